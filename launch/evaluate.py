"""Tests the best checkpoint of each run and prints one table.

python -m launch.evaluate --runs='runs/glyphs/*/*'
python -m launch.evaluate --runs=runs/glyphs/cxda/0 --num_tasks=2000
python -m launch.evaluate --runs='runs/glyphs/*/*' --against=bn

A run directory is all it needs: the config, the data set and the weights follow from it. Writes result.json,
predictions.npz and, for methods that attend, attention.png into each run.
"""

import glob
import json
import platform
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from cxda_jax import __version__, backend, checkpoints, metrics
from cxda_jax.analysis.attention import draw_attention
from cxda_jax.evaluate import Evaluator, TaskTable, compile_task, evaluate, time_task
from cxda_jax.experiment import Experiment, build, config_hash
from cxda_jax.progress import Counter
from cxda_jax.types import UserError, Variables
from launch import cli

_RUNS = flags.DEFINE_string("runs", None, "Run directories, as a quoted pattern: 'runs/glyphs/*/*'.")
flags.adopt_module_key_flags(cli)
_AGAINST = flags.DEFINE_string("against", None, "A method among the runs: print each one's paired difference to it.")
_NUM_TASKS = flags.DEFINE_integer("num_tasks", None, "Test tasks; the config's number unless given.", lower_bound=1)


def main() -> None:
    backend.keep_freed_memory()
    if not _RUNS.value:
        raise UserError("--runs is missing; give a run directory or a quoted pattern such as 'runs/glyphs/*/*'")
    rows, scores = [], {}
    kept: tuple[str, Experiment, Evaluator] | None = None
    for workdir in find_runs(_RUNS.value):
        config = read_config(workdir)
        # Runs that differ in their seed alone share one compiled program.
        shape = config_hash(config | {"seed": 0})
        if kept is None or kept[0] != shape:
            experiment = build(config, cli.DATA_DIR.value)
            kept = (shape, experiment, compiled(experiment))
        experiment = kept[1]._replace(config=config)
        rows.append(evaluate_run(workdir, experiment, kept[2], _NUM_TASKS.value))
        scores.setdefault(rows[-1]["method"], {})[config["seed"]] = stored_scores(workdir, rows[-1])
        print(f"{workdir}: {summary(rows[-1])}", flush=True)
    print(table(rows))
    if _AGAINST.value:
        print(comparison(scores, _AGAINST.value))


def find_runs(pattern: str) -> list[Path]:
    """Directories that match and hold a config.json."""
    matches = [Path(p) for p in sorted(glob.glob(pattern))]
    runs = [p for p in matches if (p / "config.json").exists()]
    if not runs:
        what = f"{len(matches)} paths match but none holds a config.json" if matches else "nothing matches"
        raise UserError(f"--runs={pattern}: {what}; name run directories that launch.train made")
    return runs


def read_config(workdir: Path) -> Any:
    try:
        return json.loads((workdir / "config.json").read_text())
    except ValueError as e:
        raise UserError(f"{workdir}/config.json is not valid JSON ({e}); restore it or train again") from None


def compiled(experiment: Experiment) -> Evaluator:
    return compile_task(experiment.method, experiment.source)


def score(experiment: Experiment, evaluator: Evaluator, variables: Variables, split: str, num_tasks: int) -> TaskTable:
    """Scores the first num_tasks tasks of a split."""
    return evaluate(
        evaluator,
        variables,
        experiment.source,
        experiment.task_plans(split),
        num_tasks,
        experiment.store.info.metric,
        experiment.config["evaluation"]["seed"],
        experiment.per_call,
        Counter(f"  {split} tasks", num_tasks),
    )


def evaluate_run(
    workdir: Path, experiment: Experiment, evaluator: Evaluator, num_tasks: int | None = None
) -> dict[str, Any]:
    """Tests workdir's best checkpoint; writes and returns its results row."""
    config, method = experiment.config, experiment.method
    like = jax.eval_shape(method.init, jax.random.key(0), experiment.example)
    found = checkpoints.restore(workdir / "best", like)
    if found is None:
        raise UserError(f"{workdir}: no checkpoint in best/; train it: python -m launch.train ... --workdir={workdir}")
    variables, notes = found
    num_tasks = int(num_tasks or config["evaluation"]["test_tasks"])
    tasks = score(experiment, evaluator, variables, "test", num_tasks)
    plan = experiment.task_plans("test")(range(num_tasks))
    episode = jax.tree.map(
        lambda x: x[0], jax.jit(experiment.source.assemble)(experiment.source.resident, _first(experiment))
    )
    adapt_ms, predict_ms = time_task(method, variables, episode)
    row = {
        "method": method.name,
        "version": method.version,
        "benchmark": config["benchmark"],
        "seed": config["seed"],
        "metric": experiment.store.info.metric,
        "avg": 100 * tasks.mean,
        "w10": 100 * tasks.worst_decile,
        "num_tasks": num_tasks,
        "task_ms": tasks.task_ms,
        "adapt_ms": adapt_ms,
        "predict_ms": predict_ms,
        "steps": experiment.schedule.steps,
        "best_step": notes["step"],
        "train_minutes": training_minutes(workdir),
        "config_hash": config_hash(config),
        "weights_hash": checkpoints.weights_hash(variables),
        "data_hash": experiment.store.sha256,
        "device": device(),
        "package": __version__,
    }
    np.savez_compressed(
        workdir / "predictions.npz", **plan._asdict(), predictions=tasks.predictions, labels=tasks.labels
    )
    (workdir / "result.json").write_text(json.dumps(row, indent=1) + "\n")
    if method.attention:
        names = experiment.store.domain_names
        draw_attention(workdir / "attention.png", method, variables, episode, names, experiment.store.info.class_names)
    return row


def stored_scores(workdir: Path, row: dict[str, Any]) -> np.ndarray:
    """Scores [tasks] from the stored predictions."""
    with np.load(workdir / "predictions.npz", allow_pickle=False) as stored:
        return metrics.scores(row["metric"], stored["predictions"], stored["labels"])


def comparison(scores: dict[str, dict[int, np.ndarray]], against: str) -> str:
    """Each method's mean score minus that of `against`, over the seeds that both have and the tasks all share."""
    if against not in scores:
        raise UserError(f"--against={against}: no such method among the runs; choose from {', '.join(sorted(scores))}")
    lines = ["paired differences, 95 % bootstrap interval over the shared tasks:"]
    for method, found in scores.items():
        seeds = sorted(found.keys() & scores[against].keys())
        if method == against or not seeds:
            continue
        ours, theirs = (np.stack([s[seed] for seed in seeds]) for s in (found, scores[against]))
        mean, low, high = (100 * v for v in metrics.paired_difference(ours, theirs))
        names = ",".join(map(str, seeds))
        lines.append(f"{method} - {against}  {mean:+.2f}  [{low:+.2f}, {high:+.2f}]  seeds {names}")
    return "\n".join(lines)


def training_minutes(workdir: Path) -> float | None:
    """From the start of the training to its last validation, over all resumptions; None where no metrics came along."""
    path = workdir / "metrics.jsonl"
    if not path.exists():
        return None
    return max((json.loads(line).get("seconds", 0.0) for line in path.read_text().splitlines()), default=0.0) / 60


def _first(experiment: Experiment) -> Any:
    return next(iter(experiment.source.batches(lambda _: experiment.task_plans("test")(range(1)), 0, 1)))


def device() -> str:
    return f"{jax.devices()[0].device_kind} x{jax.device_count()} ({platform.machine()}), jax {jax.__version__}"


def summary(row: dict[str, Any]) -> str:
    return (
        f"{row['method']} seed {row['seed']}  Avg {row['avg']:.1f}  W10% {row['w10']:.1f}  {row['task_ms']:.1f} ms/task"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Mean and standard error over seeds, one line per benchmark, method and number of tasks."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["benchmark"], row["method"], row["num_tasks"]), []).append(row)
    lines = [f"{'benchmark':<12}{'method':<18}{'seeds':<8}{'tasks':>6}  {'Avg':>13}  {'W10%':>13}  {'ms/task':>8}"]
    for (benchmark, method, num_tasks), group in groups.items():
        cells = ["{:.1f} +- {:.1f}".format(*metrics.mean_sem(np.array([r[k] for r in group]))) for k in ("avg", "w10")]
        cells = [cell.replace(" +- nan", "") for cell in cells]
        seeds = ",".join(str(r["seed"]) for r in group)
        ms = np.median([r["task_ms"] for r in group])
        lines.append(f"{benchmark:<12}{method:<18}{seeds:<8}{num_tasks:>6}  {cells[0]:>13}  {cells[1]:>13}  {ms:>8.1f}")
    return "\n".join(lines)


if __name__ == "__main__":
    cli.run(main)
