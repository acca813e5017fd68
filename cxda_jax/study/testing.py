"""Tests the best checkpoints of runs. launch/evaluate.py says what is written."""

import json
import platform
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cxda_jax import __version__, backend, memory, metrics
from cxda_jax.config import Changes, config_hash
from cxda_jax.disk import checkpoints, files
from cxda_jax.errors import UserError, brief
from cxda_jax.evaluation import Evaluator, TaskTable, compile_task, evaluate, time_task
from cxda_jax.experiment import Experiment, build
from cxda_jax.fields import FIELDS, Group
from cxda_jax.progress import Counter, announced
from cxda_jax.study.comparing import comparison, summary, table
from cxda_jax.study.examples import draw_example, keep_attention, without_support, write_arrays
from cxda_jax.study.results import Result, read_result
from cxda_jax.study.runs import (
    Evaluation,
    find_evaluations,
    find_runs,
    in_one_line,
    reached_step,
    restore_best,
    training_minutes,
)
from cxda_jax.study.settings import USUAL, Setting
from cxda_jax.types import Variables


def evaluate_runs(
    patterns: Sequence[str],
    methods: Sequence[str],
    changes: Changes,
    settings: Sequence[Setting],
    data_dir: str | Path,
    num_tasks: int | None = None,
    against: str | None = None,
    other_data: bool = False,
) -> None:
    """Tests what the patterns of runs name and prints each result, one table and the paired differences to `against`.

    What fails is named, and the rest goes on; a UserError at the end says how much failed.
    """
    check_changes(changes)
    evaluations, failures = find_evaluations(
        find_runs(patterns), methods, changes, data_dir, settings or [USUAL], other_data
    )
    for failure in failures:
        print(f"failed: {failure}", flush=True)
    total = len(evaluations) + len(failures)
    if evaluations or not failures:
        check_methods(methods, {e.config["method"] for e in evaluations}, patterns)
    if against and evaluations:
        check_against(against, {e.label for e in evaluations})  # before anything is tested
    results = []
    for evaluation, result in tested(evaluations, data_dir, num_tasks, alone=total == 1):
        if isinstance(result, Result):
            results.append(result)
            print(f"{evaluation.folder}: {summary(result.row)}", flush=True)
        else:
            failures.append(f"{evaluation.label} of {evaluation.run}: {in_one_line(result)}")
            print(f"failed: {failures[-1]}", flush=True)
    if results:
        print(table(results))
    if against and results:
        check_against(against, {result.row["label"] for result in results})
        print(comparison(results, against))
    if failures:
        raise UserError(f"{len(failures)} of {total} evaluations failed; the first: {failures[0]}")


def tested(
    evaluations: Sequence[Evaluation], data_dir: str | Path, num_tasks: int | None, alone: bool
) -> Iterator[tuple[Evaluation, Result | Exception]]:
    """Each evaluation with its result, or with what went wrong; that of one `alone` is raised."""
    kept: tuple[str, Experiment, Evaluator] | None = None
    for evaluation in evaluations:
        # Evaluations that differ in their seed alone share one compiled program.
        shape = config_hash({**evaluation.config, "seed": 0})
        try:
            if kept is None or kept[0] != shape:
                experiment = build(evaluation.config, data_dir, splits=("test",))
                kept = (shape, experiment, compiled(experiment))
            experiment = kept[1]._replace(config=evaluation.config)
            files.refuse_links(evaluation.run)
            evaluation.folder.mkdir(exist_ok=True)
            with files.locked(evaluation.folder):
                result: Result | Exception = evaluate_run(evaluation, experiment, kept[2], num_tasks)
        except Exception as e:
            if alone:
                raise
            result = e
        yield evaluation, result


def check_changes(changes: Changes) -> None:
    """Raises a UserError for a field that a checkpoint depends on."""
    can = [name for name, entry in FIELDS.items() if isinstance(entry, Group) and entry.at_test]
    for name, _ in changes:
        if name.partition(".")[0] not in can:
            raise UserError(
                f"--config.{brief(name)}: a trained run fixes it; this command can change {', '.join(sorted(can))}"
            )


def check_methods(methods: Sequence[str], of_runs: Collection[str], patterns: Sequence[str]) -> None:
    """Raises a UserError unless each method asked for has a run to start from."""
    missing = [name for name in methods if name != "all" and name not in of_runs]
    if missing:
        raise UserError(
            f"--methods={missing[0]}: --runs={','.join(patterns)} holds no run to test it on; train one first"
        )


def check_against(against: str, labels: Collection[str]) -> None:
    if against not in labels:
        known = brief(", ".join(sorted(labels)), 100)
        raise UserError(f"--against={brief(against, 30)}: no such method among the runs; choose from {known}")


def compiled(experiment: Experiment) -> Evaluator:
    """What tests a task, which says that it compiles, and does not start what the memory will not hold."""
    evaluator = compile_task(experiment.method, experiment.source)
    check = memory.insist_it_fits if experiment.method.feed_forward else lambda *_: None
    return evaluator._replace(answer=announced(evaluator.answer, "the test of a task", check))


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
    evaluation: Evaluation, experiment: Experiment, evaluator: Evaluator, num_tasks: int | None = None
) -> Result:
    """Tests a method on its run's best checkpoint, writes the result into its folder, and reads it back."""
    config, method = evaluation.config, experiment.method
    variables, notes = restore_best(evaluation, experiment)
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
        "label": evaluation.label,
        "setting": str(evaluation.setting),
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
        "reached_step": reached_step(evaluation),
        "train_minutes": training_minutes(evaluation.run),
        "config_hash": config_hash(config),
        "started_from": config["net"]["weights"] or "random",
        "weights_hash": weights_hash,
        "data_name": experiment.store.info.name,
        "data_hash": experiment.store.sha256,
        "trained_on": evaluation.record.data_hash,
        "data_marks": [*experiment.store.info.marks, *evaluation.marks],
        "threads": evaluation.record.threads,
        "device": device(),
        "package": __version__,
    }
    answers = None
    if method.uses_support and evaluation.setting == USUAL:
        answers = without_support(experiment, evaluator, variables, plan, tasks)
        row |= answers.counts()
    arrays: dict[str, Any] = {**plan._asdict(), "predictions": tasks.predictions, "labels": tasks.labels, **tasks.also}
    row["predictions_sha256"] = write_arrays(evaluation.folder / "predictions.npz", arrays)
    weights = None
    if evaluator.attention and answers:
        path = evaluation.folder / "attention.npz"
        weights, row["attention_sha256"] = keep_attention(path, experiment, evaluator, variables, plan)
    files.write_text(evaluation.folder / "result.json", json.dumps(files.sealed(row), indent=1) + "\n")
    if answers and weights is not None:
        draw_example(evaluation.folder / "attention.png", experiment, plan, answers, weights)
    return read_result(evaluation.run, evaluation.folder)


def averages(scores: np.ndarray) -> dict[str, float]:
    return {"avg": 100 * float(scores.mean()), "w10": 100 * metrics.worst_decile(scores)}


def device() -> str:
    return f"{jax.devices()[0].device_kind} x{jax.device_count()} ({platform.machine()}), jax {jax.__version__}"


def _first(experiment: Experiment) -> Any:
    return next(iter(experiment.source.batches(lambda _: experiment.task_plans("test")(range(1)), 0, 1)))
