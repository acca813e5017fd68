"""Trains one method on one benchmark, then tests its best checkpoint.

python -m launch.train --config=configs/glyphs.py:cxda --workdir=runs/glyphs/cxda/0
python -m launch.train --config=configs/glyphs.py:bn --config.seed=1 --workdir=runs/glyphs/bn/1
python -m launch.train --config=configs/glyphs.py:cxda,smoke --workdir=runs/smoke

The same command again resumes a run that was stopped, exactly. The workdir then holds:
  config.json      the resolved config; evaluation rebuilds everything from it
  metrics.jsonl    loss, accuracy, episodes/s, data_wait_ms; validation scores
  last/ best/      checkpoints: the newest state, and the weights that validated best
  result.json      Avg, W10% and ms/task on the test tasks
  predictions.npz  plans, labels and predictions of every test task
  attention.png    a query and what it attends to
  cost.json        where the time went, speed, memory

Compiled programs are kept in ~/.cache/cxda_jax/compiled, or where $JAX_COMPILATION_CACHE_DIR says.
"""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from absl import flags

from cxda_jax import backend, cost, train
from cxda_jax.experiment import Config, Experiment, build, start_from_weights
from cxda_jax.progress import duration
from cxda_jax.types import UserError, Variables
from launch import cli
from launch.evaluate import Job, compiled, device, evaluate_run, read_config, score, table

_CONFIG = flags.DEFINE_string("config", None, "configs/NAME.py:METHOD[,smoke]", required=True)
flags.adopt_module_key_flags(cli)
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run is kept.", required=True)


def main() -> None:
    backend.keep_freed_memory()
    cli.keep_compiled()
    compilations = cost.Compilations()
    workdir = Path(_WORKDIR.value)
    config = cli.resolve(cli.load_config(_CONFIG.value))
    experiment = build(config, cli.DATA_DIR.value)
    method = experiment.method
    if method.trains_as:
        raise UserError(
            f"method {method.name!r} starts from the runs of {method.trains_as!r} and trains nothing; train that, then "
            f"python -m launch.evaluate --runs=... --methods={method.name}"
        )
    claim(workdir, config)
    evaluator = compiled(experiment)

    def validate(variables: Variables) -> float:
        tasks = score(experiment, evaluator, variables, "val", config["evaluation"]["val_tasks"])
        return getattr(tasks, config["evaluation"]["select"])

    print(describe(experiment), flush=True)
    state = train.init_state(method, experiment.optimizer, config["seed"], experiment.example)
    spent = train.train(
        method,
        experiment.optimizer,
        experiment.weak,
        experiment.source,
        experiment.train_plans,
        state.replace(variables=start_from_weights(config, state.variables)),
        config["seed"],
        experiment.schedule,
        validate,
        workdir,
        log=lambda line: print(line, flush=True),
    )
    if spent.steps:
        passport = describe_cost(spent, compilations, config["net"]["dtype"])
        (workdir / "cost.json").write_text(json.dumps(passport, indent=1) + "\n")
        print(cost_line(passport), flush=True)
    print(table([evaluate_run(Job(workdir, workdir, method.name, config), experiment, evaluator)]))


def describe_cost(spent: train.Spent, compilations: cost.Compilations, dtype: str) -> dict[str, Any]:
    """What the training of this process cost, and the share of the machine's matrix-product peak that its steps reached."""
    peak = cost.matmul_peak(dtype=jnp.dtype(dtype))
    memory, where = cost.peak_memory()
    return {
        "seconds": spent.seconds,
        "validating_s": spent.validating,
        "saving_s": spent.saving,
        "waiting_for_data_s": spent.waiting,
        "compiling_s": compilations.seconds,
        "programs": compilations.programs,
        "programs_from_cache": compilations.cached,
        "steps": spent.steps,
        "steps_per_s": spent.steps_per_s,
        "step_gflop": spent.step_flops / 1e9,
        "peak_gflop_per_s": peak / 1e9,
        "of_peak": spent.step_flops * spent.steps_per_s / peak,
        "bytes_to_device_per_step": spent.step_bytes,
        "peak_memory_bytes": memory,
        "memory_of": where,
        "dtype": dtype,
        "device": device(),
    }


def cost_line(c: dict[str, Any]) -> str:
    return (
        f"cost: {duration(c['seconds'])} for {c['steps']} steps ({duration(c['validating_s'])} validating, "
        f"{c['saving_s']:.1f}s saving, {c['waiting_for_data_s']:.1f}s waiting for data); compiled in "
        f"{c['compiling_s']:.1f}s, {c['programs_from_cache']} of {c['programs']} programs from the cache\n"
        f"      {c['steps_per_s']:.1f} steps/s, {c['step_gflop']:.1f} GFLOP each: {c['of_peak']:.0%} of the {c['dtype']} "
        f"matrix-product peak; {c['peak_memory_bytes'] / 1e9:.1f} GB of {c['memory_of']} memory at most; "
        f"{c['bytes_to_device_per_step']:,} bytes to the device a step"
    )


def claim(workdir: Path, config: Config) -> None:
    """Writes the config into a new workdir; an existing one must hold the same."""
    path = workdir / "config.json"
    if path.exists():
        for field, (old, new) in differences(read_config(workdir), config).items():
            raise UserError(
                f"--workdir={workdir} holds a run with {field}={old!r}, not {new!r}; choose another --workdir or delete it"
            )
        return
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(config, indent=1) + "\n")
    except OSError as e:
        raise UserError(f"--workdir={workdir}: cannot be written ({e.strerror}); choose another") from None


def differences(a: Config, b: Config, prefix: str = "config.") -> dict[str, tuple]:
    """Dotted fields in which two configs differ."""
    found = {}
    for k in sorted({*a, *b}):
        x, y = a.get(k), b.get(k)
        if isinstance(x, dict) and isinstance(y, dict):
            found |= differences(x, y, f"{prefix}{k}.")
        elif x != y:
            found[prefix + k] = (x, y)
    return found


def describe(experiment: Experiment) -> str:
    c, s = experiment.config, experiment.store
    counts = ", ".join(f"{len(s.domains(split))} {split}" for split in ("train", "val", "test"))
    return (
        f"{c['method']} on {s.info.name}: {len(s.labels)} images of {s.num_classes} classes; domains: {counts}; "
        f"{experiment.schedule.steps} steps, seed {c['seed']}"
    )


if __name__ == "__main__":
    cli.run(main)
