"""Tests the best checkpoint of each run and prints one table.

python -m launch.evaluate --runs='runs/glyphs/*/*'
python -m launch.evaluate --runs='runs/glyphs/*/*' --methods=all
python -m launch.evaluate --runs='runs/glyphs/erm/*' --methods=ft_em,cotta --config.finetune.steps=1
python -m launch.evaluate --runs=runs/glyphs/cxda/0 --num_tasks=2000
python -m launch.evaluate --runs='runs/glyphs/*/*' --against=bn
python -m launch.evaluate --runs='runs/glyphs/*/*' --num_domains=1,2,5,10,20 --support_size=10,20,50,100,200,500
python -m launch.evaluate --runs='runs/glyphs/erm/*' --methods=ft_em,ft_im --steps=1

A run directory is all it needs: the config, the data set and the weights follow from it. Writes result.json,
predictions.npz and, for methods that attend, attention.png into each run; what is tested on the checkpoint of another
method, or with changed fields, into a folder of its own there, such as runs/glyphs/erm/0/ft_em,finetune.steps=1.

--num_domains and --support_size test, in place of the usual tasks, tasks of that many support domains (and as many support
images as usual), or of that many support images; as many queries as there are support images of one domain. A program is
compiled once for each method and shape; checkpoints are data. What fails is named, and the rest goes on.

Of methods that use the support, result.json also counts among the queries of the first 24 tasks (compared) those that are
wrong without support images and right with them (corrected), and the reverse (spoiled).
"""

import json
import platform
from collections.abc import Collection
from typing import Any

import jax
import numpy as np
from absl import flags

from cxda_jax import __version__, backend, checkpoints, files, memory, metrics
from cxda_jax.analysis.results import is_unfinished, store_names
from cxda_jax.evaluate import Evaluator, TaskTable, compile_task, evaluate, time_task
from cxda_jax.experiment import Experiment, build, config_hash
from cxda_jax.progress import Counter, announced, say
from cxda_jax.types import UserError, Variables, brief
from launch import cli, identity
from launch.examples import corrections, draw_example, keep_attention, without_support, write_arrays
from launch.runs import (
    OWN,
    Job,
    Setting,
    find_jobs,
    find_runs,
    in_one_line,
    reached_step,
    restore_best,
    setting,
    stored_scores,
    training_minutes,
)

RUNS = flags.DEFINE_list("runs", [], "Run directories: quoted patterns, such as 'runs/glyphs/*/*'.")
flags.adopt_module_key_flags(cli)
flags.adopt_module_key_flags(identity)
_METHODS = flags.DEFINE_list(
    "methods",
    [],
    "What to test: names, or all. ft_em, ft_im, sf_ocda and cotta start from the runs of erm. Each run's own if empty.",
)
AGAINST = flags.DEFINE_string(
    "against",
    None,
    "A method among the runs: print each one's paired difference to it. In a report: paper, paper_stand_ins.",
)
_NUM_DOMAINS = flags.DEFINE_list("num_domains", [], "Test with so many support domains: 1,2,5,10,20.")
_SUPPORT_SIZE = flags.DEFINE_list("support_size", [], "Test with so many support images: 10,20,50,100,200,500.")
_STEPS = flags.DEFINE_list("steps", [], "Test what fine-tunes with so many steps: 1,10.")
_NUM_TASKS = flags.DEFINE_integer("num_tasks", None, "Test tasks; the config's number unless given.", lower_bound=1)

# What --config.GROUP.FIELD may change here: all that a checkpoint does not depend on.
CHANGEABLE = ("batch_norm", "cotta", "episode", "evaluation", "finetune", "sf_ocda", "strong")


def main() -> None:
    backend.keep_freed_memory()
    cli.keep_compiled()
    if not RUNS.value:
        raise UserError("--runs is missing; give a run directory or a quoted pattern such as 'runs/glyphs/*/*'")
    rows, scores = [], []
    kept: tuple[str, Experiment, Evaluator] | None = None
    jobs, failures = find_jobs(
        find_runs(RUNS.value), _METHODS.value, cli.overrides(CHANGEABLE), asked_settings(), identity.OTHER_DATA.value
    )
    for failure in failures:
        print(f"failed: {failure}", flush=True)
    total = len(jobs) + len(failures)
    if jobs or not failures:
        check_methods(_METHODS.value, jobs)
    if AGAINST.value and jobs:
        check_against(AGAINST.value, {job.label for job in jobs})  # now, not when all is tested
    for job in jobs:
        # Jobs that differ in their seed alone share one compiled program.
        shape = config_hash({**job.config, "seed": 0})
        try:
            if kept is None or kept[0] != shape:
                experiment = build(job.config, cli.DATA_DIR.value, splits=("test",))
                kept = (shape, experiment, compiled(experiment))
            experiment = kept[1]._replace(config=job.config)
            files.refuse_links(job.run)
            job.folder.mkdir(exist_ok=True)
            with files.locked(job.folder):
                files.refuse_links(job.folder)
                rows.append(evaluate_run(job, experiment, kept[2], _NUM_TASKS.value))
        except Exception as e:  # whatever it is, the other runs are tested
            if total == 1:
                raise
            failures.append(f"{job.label} of {job.run}: {in_one_line(e)}")
            print(f"failed: {failures[-1]}", flush=True)
            continue
        scores.append(stored_scores(job.folder, rows[-1]))
        print(f"{job.folder}: {summary(rows[-1])}", flush=True)
    if rows:
        print(table(rows))
    if AGAINST.value and rows:
        print(comparison(rows, scores, AGAINST.value))
    if failures:
        raise UserError(f"{len(failures)} of {total} evaluations failed; the first: {failures[0]}")


def asked_settings() -> list[Setting]:
    """What --num_domains, --support_size and --steps name; the usual tasks where they name nothing."""
    asked = [("num_domains", _NUM_DOMAINS), ("support_size", _SUPPORT_SIZE), ("finetune.steps", _STEPS)]
    return [setting(kind, text) for kind, flag in asked for text in flag.value] or [OWN]


def compiled(experiment: Experiment) -> Evaluator:
    """What tests a task, which says that it compiles, and does not start what the memory will not hold."""
    evaluator = compile_task(experiment.method, experiment.source)
    answer = memory.checked(evaluator.answer) if experiment.method.feed_forward else evaluator.answer
    return evaluator._replace(answer=announced(answer, "the test of a task", say))


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


@memory.named("evaluation.per_call, episode.* or cotta.copies")
def evaluate_run(
    job: Job, experiment: Experiment, evaluator: Evaluator, num_tasks: int | None = None
) -> dict[str, Any]:
    """Tests the job's method on its run's best checkpoint; writes and returns its results row."""
    config, method = job.config, experiment.method
    variables, notes = restore_best(job, experiment)
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
        "setting": job.setting,
        "method": method.name,
        "version": method.version,
        "benchmark": config["benchmark"],
        "smoke": config["smoke"],
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
        "reached_step": reached_step(job),
        "train_minutes": training_minutes(job.run),
        "config_hash": config_hash(config),
        "started_from": config["net"]["weights"] or "random",
        "weights_hash": weights_hash,
        "data_name": experiment.store.info.name,
        "data_hash": experiment.store.sha256,
        "trained_on": job.record.data_hash,
        "data_marks": [*experiment.store.info.marks, *job.marks],
        "threads": job.record.threads,
        "device": device(),
        "package": __version__,
    }
    answers = None
    if method.uses_support and not job.setting:
        answers = without_support(experiment, evaluator, variables, plan, tasks)
        row |= answers.counts()
    arrays: dict[str, Any] = {**plan._asdict(), "predictions": tasks.predictions, "labels": tasks.labels, **tasks.also}
    row["predictions_sha256"] = write_arrays(job.folder / "predictions.npz", arrays)
    weights = None
    if evaluator.attention and answers:
        path = job.folder / "attention.npz"
        weights, row["attention_sha256"] = keep_attention(path, experiment, evaluator, variables, plan)
    files.write_text(job.folder / "result.json", json.dumps(files.sealed(row), indent=1) + "\n")
    if answers and weights is not None:
        draw_example(job.folder / "attention.png", experiment, plan, answers, weights)
    return row


def averages(scores: np.ndarray) -> dict[str, float]:
    return {"avg": 100 * float(scores.mean()), "w10": 100 * metrics.worst_decile(scores)}


def check_methods(methods: list[str], jobs: list[Job]) -> None:
    """Raises a UserError unless each method asked for has a run to start from."""
    missing = [name for name in methods if name != "all" and name not in {job.config["method"] for job in jobs}]
    if missing:
        raise UserError(
            f"--methods={missing[0]}: --runs={','.join(RUNS.value)} holds no run to test it on; train one first"
        )


def check_against(against: str, labels: Collection[str]) -> None:
    if against not in labels:
        known = brief(", ".join(sorted(labels)), 100)
        raise UserError(f"--against={brief(against, 30)}: no such method among the runs; choose from {known}")


def comparison(rows: list[dict[str, Any]], scores: list[np.ndarray], against: str) -> str:
    """Each row's mean score minus that of `against` on the same store, over the seeds that both have and the tasks all share.

    `scores` are of the tasks of each row. Unfinished seeds are left out.
    """
    check_against(against, {row["label"] for row in rows})
    found: dict[str, dict[str, dict[int, np.ndarray]]] = {}  # store -> label -> seed
    left_out = []
    for store, row, of_tasks in zip(store_names(rows), rows, scores, strict=True):
        if is_unfinished(row):
            left_out.append(f"left out: {_unfinished(store, row)}")
        else:
            found.setdefault(store, {}).setdefault(row["label"], {})[row["seed"]] = of_tasks
    lines = ["paired differences, 95 % bootstrap interval over the shared tasks:"]
    for store, labels in found.items():
        on = f"{store}: " * (len(found) > 1)
        for label, of_seeds in labels.items():
            base = labels.get(against, {})
            seeds = sorted(of_seeds.keys() & base.keys())
            if label == against or not seeds:
                continue
            ours, theirs = (np.stack([s[seed] for seed in seeds]) for s in (of_seeds, base))
            mean, low, high = (100 * v for v in metrics.paired_difference(ours, theirs))
            names = ",".join(map(str, seeds))
            lines.append(f"{on}{label} - {against}  {mean:+.2f}  [{low:+.2f}, {high:+.2f}]  seeds {names}")
    return "\n".join(lines + left_out)


def _first(experiment: Experiment) -> Any:
    return next(iter(experiment.source.batches(lambda _: experiment.task_plans("test")(range(1)), 0, 1)))


def device() -> str:
    return f"{jax.devices()[0].device_kind} x{jax.device_count()} ({platform.machine()}), jax {jax.__version__}"


def summary(row: dict[str, Any]) -> str:
    unfinished = f"  UNFINISHED: step {row['reached_step']} of {row['steps']}" * (row["reached_step"] < row["steps"])
    also = "".join(f"  ({name}: {found['avg']:.1f}, {found['w10']:.1f})" for name, found in row["also"].items())
    return (
        f"{row['label']} seed {row['seed']}  Avg {row['avg']:.1f}  W10% {row['w10']:.1f}{also}  "
        f"{row['task_ms']:.1f} ms/task  weights {row['weights_hash'][:12]}{corrections(row, '  ')}{unfinished}"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Mean and standard error over seeds, one line per store, method and number of tasks; ms of one task alone. Unfinished
    seeds have a line of their own."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    footnotes = []
    for store, row in zip(store_names(rows), rows, strict=True):
        marks, late = row.get("data_marks", []), is_unfinished(row)
        groups.setdefault((store + "*" * bool(marks), row["label"] + "†" * late, row["num_tasks"]), []).append(row)
        if marks:
            footnotes.append(f"* {store}: {', '.join(marks)}; not comparable with results that lack this mark")
        if late:
            footnotes.append(f"† {_unfinished(store, row)}; in no mean with finished seeds")
    wide = max(18, *(len(label) + 2 for _, label, _ in groups))
    first = max(17, *(len(store) + 2 for store, _, _ in groups))
    lines = [
        f"{'benchmark':<{first}}{'method':<{wide}}{'seeds':<8}{'tasks':>6}  {'Avg':>13}  {'W10%':>13}  {'adapt ms':>9}"
        f"  {'predict ms':>10}"
    ]
    for (store, label, num_tasks), group in groups.items():
        cells = ["{:.1f} +- {:.1f}".format(*metrics.mean_sem(np.array([r[k] for r in group]))) for k in ("avg", "w10")]
        cells = [cell.replace(" +- nan", "") for cell in cells]
        seeds = ",".join(str(r["seed"]) for r in group)
        adapt_ms, predict_ms = (np.median([r[k] for r in group]) for k in ("adapt_ms", "predict_ms"))
        lines.append(
            f"{store:<{first}}{label:<{wide}}{seeds:<8}{num_tasks:>6}  {cells[0]:>13}  {cells[1]:>13}  {adapt_ms:>9.1f}"
            f"  {predict_ms:>10.1f}"
        )
    return "\n".join([*lines, *dict.fromkeys(footnotes)])


def _unfinished(store: str, row: dict[str, Any]) -> str:
    return f"{store}, {row['label']} seed {row['seed']}: unfinished, at step {row['reached_step']} of {row['steps']}"


if __name__ == "__main__":
    cli.run(main)
