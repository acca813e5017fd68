"""Tests the best checkpoint of each run and prints one table.

python -m launch.evaluate --runs='runs/glyphs/*/*'
python -m launch.evaluate --runs='runs/glyphs/*/*' --methods=all
python -m launch.evaluate --runs='runs/glyphs/erm/*' --methods=ft_em,cotta --config.finetune.steps=1
python -m launch.evaluate --runs=runs/glyphs/cxda/0 --num_tasks=2000
python -m launch.evaluate --runs='runs/glyphs/*/*' --against=bn

A run directory is all it needs: the config, the data set and the weights follow from it. Writes result.json,
predictions.npz and, for methods that attend, attention.png into each run; what is tested on the checkpoint of another
method, or with changed fields, into a folder of its own there, such as runs/glyphs/erm/0/ft_em,finetune.steps=1.
"""

import glob
import json
import platform
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from configs import common
from cxda_jax import __version__, backend, checkpoints, metrics
from cxda_jax.analysis.attention import draw_attention
from cxda_jax.evaluate import Evaluator, TaskTable, compile_task, evaluate, time_task
from cxda_jax.experiment import METHODS, Config, Experiment, build, build_method, config_hash, open_data
from cxda_jax.progress import Counter
from cxda_jax.types import UserError, Variables
from launch import cli

_RUNS = flags.DEFINE_string("runs", None, "Run directories, as a quoted pattern: 'runs/glyphs/*/*'.")
flags.adopt_module_key_flags(cli)
_METHODS = flags.DEFINE_list(
    "methods",
    [],
    "What to test: names, or all. ft_em, ft_im, sf_ocda and cotta start from the runs of erm. Each run's own if empty.",
)
_AGAINST = flags.DEFINE_string("against", None, "A method among the runs: print each one's paired difference to it.")
_NUM_TASKS = flags.DEFINE_integer("num_tasks", None, "Test tasks; the config's number unless given.", lower_bound=1)

# What --config.GROUP.FIELD may change here: all that a checkpoint does not depend on.
CHANGEABLE = ("batch_norm", "cotta", "episode", "evaluation", "finetune", "sf_ocda", "strong")


class Job(NamedTuple):
    """A method to test on the checkpoint of a run, and where its results go."""

    run: Path
    folder: Path
    label: str
    config: Config


def main() -> None:
    backend.keep_freed_memory()
    if not _RUNS.value:
        raise UserError("--runs is missing; give a run directory or a quoted pattern such as 'runs/glyphs/*/*'")
    rows, scores = [], {}
    kept: tuple[str, Experiment, Evaluator] | None = None
    for job in find_jobs(find_runs(_RUNS.value), _METHODS.value, cli.overrides(CHANGEABLE)):
        # Jobs that differ in their seed alone share one compiled program.
        shape = config_hash({**job.config, "seed": 0})
        if kept is None or kept[0] != shape:
            experiment = build(job.config, cli.DATA_DIR.value)
            kept = (shape, experiment, compiled(experiment))
        experiment = kept[1]._replace(config=job.config)
        rows.append(evaluate_run(job, experiment, kept[2], _NUM_TASKS.value))
        scores.setdefault(job.label, {})[job.config["seed"]] = stored_scores(job.folder, rows[-1])
        print(f"{job.folder}: {summary(rows[-1])}", flush=True)
    print(table(rows))
    if _AGAINST.value:
        print(comparison(scores, _AGAINST.value))


def find_jobs(runs: list[Path], methods: list[str], changes: list[tuple[str, str]]) -> list[Job]:
    """One job for each run and method that can be tested on it, in the order of the methods' registry."""
    for name in methods:
        if name not in METHODS and name != "all":
            raise UserError(f"--methods={name}: no such method; choose from all, {', '.join(METHODS)}")
    jobs, stores = [], {}
    for run in runs:
        stored = read_config(run)
        own = stored["method"]
        data = json.dumps([stored["benchmark"], stored["data"]])
        if data not in stores:
            stores[data] = open_data(stored, cli.DATA_DIR.value)
        for name in METHODS if "all" in methods else methods or [own]:
            config = changed({**stored, "method": name}, changes)
            label = ",".join([name, *("=".join(change) for change in changes)])
            starts_from = build_method(config, stores[data]).trains_as or name
            if starts_from == own:
                jobs.append(Job(run, run if label == own else run / label, label, config))
    missing = [name for name in methods if name != "all" and name not in {job.config["method"] for job in jobs}]
    if missing:
        raise UserError(f"--methods={missing[0]}: --runs={_RUNS.value} holds no run to test it on; train one first")
    return sorted(jobs, key=lambda job: list(METHODS).index(job.config["method"]))


def changed(config: Config, changes: list[tuple[str, str]]) -> Config:
    """The config with --config.field=value pairs applied."""
    fields = ConfigDict(config, convert_dict=True)
    for name, text in changes:
        cli.override(fields, name, text)
    return fields.to_dict()


def find_runs(pattern: str) -> list[Path]:
    """Directories that match and hold a config.json."""
    matches = [Path(p) for p in sorted(glob.glob(pattern))]
    runs = [p for p in matches if (p / "config.json").exists()]
    if not runs:
        what = f"{len(matches)} paths match but none holds a config.json" if matches else "nothing matches"
        raise UserError(f"--runs={pattern}: {what}; name run directories that launch.train made")
    return runs


def read_config(workdir: Path) -> Config:
    """The run's config; fields younger than the run have their defaults."""
    try:
        stored = json.loads((workdir / "config.json").read_text())
    except ValueError as e:
        raise UserError(f"{workdir}/config.json is not valid JSON ({e}); restore it or train again") from None
    return with_defaults(stored, common.default().to_dict())


def with_defaults(config: Config, defaults: Config) -> dict[str, Any]:
    return {**defaults, **config} | {
        k: with_defaults(config.get(k, {}), v) for k, v in defaults.items() if isinstance(v, dict)
    }


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
    job: Job, experiment: Experiment, evaluator: Evaluator, num_tasks: int | None = None
) -> dict[str, Any]:
    """Tests the job's method on its run's best checkpoint; writes and returns its results row."""
    config, method = job.config, experiment.method
    like = jax.eval_shape(method.init, jax.random.key(0), experiment.example)
    found = checkpoints.restore(job.run / "best", like)
    if found is None:
        raise UserError(f"{job.run}: no checkpoint in best/; train it: python -m launch.train ... --workdir={job.run}")
    variables, notes = found
    weights_hash = checkpoints.weights_hash(variables)
    if method.calibrate:
        variables = backend.jit(method.calibrate)(variables, experiment.calibration_images())
    num_tasks = int(num_tasks or config["evaluation"]["test_tasks"])
    tasks = score(experiment, evaluator, variables, "test", num_tasks)
    plan = experiment.task_plans("test")(range(num_tasks))
    episode = jax.tree.map(
        lambda x: x[0], jax.jit(experiment.source.assemble)(experiment.source.resident, _first(experiment))
    )
    adapt_ms, predict_ms = time_task(evaluator, variables, episode)
    metric = experiment.store.info.metric
    row = {
        "label": job.label,
        "method": method.name,
        "version": method.version,
        "benchmark": config["benchmark"],
        "seed": config["seed"],
        "metric": metric,
        **averages(tasks.scores),
        "also": {name: averages(metrics.scores(metric, p, tasks.labels)) for name, p in tasks.also.items()},
        "calibration": jax.tree.map(float, variables.get("calibration", {})),
        "num_tasks": num_tasks,
        "task_ms": tasks.task_ms,
        "adapt_ms": adapt_ms,
        "predict_ms": predict_ms,
        "steps": experiment.schedule.steps,
        "best_step": notes["step"],
        "train_minutes": training_minutes(job.run),
        "config_hash": config_hash(config),
        "started_from": config["net"]["weights"] or "random",
        "weights_hash": weights_hash,
        "data_hash": experiment.store.sha256,
        "data_marks": list(experiment.store.info.marks),
        "device": device(),
        "package": __version__,
    }
    job.folder.mkdir(exist_ok=True)
    arrays: dict[str, Any] = {**plan._asdict(), "predictions": tasks.predictions, "labels": tasks.labels, **tasks.also}
    np.savez_compressed(job.folder / "predictions.npz", **arrays)
    (job.folder / "result.json").write_text(json.dumps(row, indent=1) + "\n")
    if method.attention:
        names, classes = experiment.store.domain_names, experiment.store.info.class_names
        draw_attention(job.folder / "attention.png", method, variables, episode, names, classes)
    return row


def averages(scores: np.ndarray) -> dict[str, float]:
    return {"avg": 100 * float(scores.mean()), "w10": 100 * metrics.worst_decile(scores)}


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
    also = "".join(f"  ({name}: {found['avg']:.1f}, {found['w10']:.1f})" for name, found in row["also"].items())
    return (
        f"{row['label']} seed {row['seed']}  Avg {row['avg']:.1f}  W10% {row['w10']:.1f}{also}  "
        f"{row['task_ms']:.1f} ms/task"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Mean and standard error over seeds, one line per benchmark, method and number of tasks; ms of one task alone."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    footnotes: dict[str, str] = {}
    for row in rows:
        marks = row.get("data_marks", [])
        groups.setdefault((row["benchmark"] + "*" * bool(marks), row["label"], row["num_tasks"]), []).append(row)
        if marks:
            footnotes[row["benchmark"]] = f"* {row['benchmark']}: {', '.join(marks)}; not the published data"
    wide = max(18, *(len(row["label"]) + 2 for row in rows))
    lines = [
        f"{'benchmark':<17}{'method':<{wide}}{'seeds':<8}{'tasks':>6}  {'Avg':>13}  {'W10%':>13}  {'adapt ms':>9}"
        f"  {'predict ms':>10}"
    ]
    for (benchmark, label, num_tasks), group in groups.items():
        cells = ["{:.1f} +- {:.1f}".format(*metrics.mean_sem(np.array([r[k] for r in group]))) for k in ("avg", "w10")]
        cells = [cell.replace(" +- nan", "") for cell in cells]
        seeds = ",".join(str(r["seed"]) for r in group)
        adapt_ms, predict_ms = (np.median([r[k] for r in group]) for k in ("adapt_ms", "predict_ms"))
        lines.append(
            f"{benchmark:<17}{label:<{wide}}{seeds:<8}{num_tasks:>6}  {cells[0]:>13}  {cells[1]:>13}  {adapt_ms:>9.1f}"
            f"  {predict_ms:>10.1f}"
        )
    return "\n".join([*lines, *footnotes.values()])


if __name__ == "__main__":
    cli.run(main)
