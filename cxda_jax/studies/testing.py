"""Tests the best checkpoints of runs. launch/evaluate.py says what is written."""

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from cxda_jax import __version__
from cxda_jax.config.fields import Group
from cxda_jax.config.reading import config_hash
from cxda_jax.config.registry import schema
from cxda_jax.data.episodes import Context, Plan, check_context, counting
from cxda_jax.data.store import DomainStore
from cxda_jax.disk import checkpoints, files
from cxda_jax.errors import UserError, brief
from cxda_jax.machine import backend, memory, mesh
from cxda_jax.machine.progress import Counter, announced, replaces
from cxda_jax.studies import identity
from cxda_jax.studies.examples import draw_example, images_of, with_examples
from cxda_jax.studies.finding import Evaluation, Request, find_evaluations, in_one_line, restore_best, training_minutes
from cxda_jax.studies.folders import find_runs, write_result
from cxda_jax.studies.result import Result, make_tasks
from cxda_jax.studies.settings import USUAL
from cxda_jax.studies.text import comparison, context_curves, summary, table
from cxda_jax.training import metrics
from cxda_jax.training.evaluation import Evaluator, Tasks, TaskTable, compile_task, evaluate, time_task
from cxda_jax.training.experiment import Experiment, build
from cxda_jax.types import Variables


def evaluate_runs(patterns: Sequence[str], request: Request, data_dir: str | Path) -> None:
    """Tests what the patterns of runs name, and prints each result, a table and paired differences.

    What fails is named, and the rest goes on; a UserError at the end says how much failed.
    """
    can = sorted(name for name, entry in schema().items() if isinstance(entry, Group) and entry.at_test)
    for name, _ in request.changes:
        if name.partition(".")[0] not in can:
            raise UserError(
                f"--config.{brief(name)}: a trained run fixes it; here you can change {brief(', '.join(can), 100)}"
            )
    evaluations, failures = find_evaluations(find_runs(patterns), request, data_dir)
    for failure in failures:
        print(f"failed: {failure}", flush=True)
    total = len(evaluations) + len(failures)
    missing = [name for name in request.methods if name not in ("all", *(e.config.method for e in evaluations))]
    if missing and (evaluations or not failures):
        what = f"--runs={','.join(patterns)} holds no run to test it on"
        raise UserError(f"--methods={missing[0]}: {what}; train one first, or change --from={request.start}")
    if request.against and evaluations:
        check_against(request.against, evaluations)  # before any test
    tests = [[e.label, e.folder.name, e.split, config_hash(e.config)] for e in evaluations]
    identity.insist_on_agreement({"package": __version__, "tests": tests, "num_tasks": request.num_tasks})
    results: list[Result] = []
    compiled_tests = CompiledTests(data_dir, request.split)
    for evaluation in evaluations:
        try:
            result = tested(evaluation, *compiled_tests.of(evaluation), request.num_tasks)
        except Exception as e:
            if total == 1:
                raise
            failures.append(f"{evaluation.label} of {evaluation.run}: {in_one_line(e)}")
            print(f"failed: {failures[-1]}", flush=True)
        else:
            if result:
                results.append(result)
                print(f"{evaluation.folder}: {summary(result)}", flush=True)
    if results:
        print("\n".join([table(results), *context_curves(results, request.against)]))
        if any(r.label == request.against for r in results):
            print(comparison(results, request.against or ""))
    if failures:
        raise UserError(f"{len(failures)} of {total} evaluations failed; the first: {failures[0]}")


class CompiledTests:
    """The experiment and the compiled test of the latest evaluation. Seeds share one compiled program."""

    def __init__(self, data_dir: str | Path, split: str):
        self.data_dir, self.split = data_dir, split
        self.kept: tuple[tuple[str, Context | None], Experiment, Evaluator] | None = None

    def of(self, evaluation: Evaluation) -> tuple[Experiment, Evaluator]:
        shape, context = config_hash({**evaluation.config, "seed": 0}), evaluation.setting.context
        if self.kept is None or self.kept[0] != (shape, context):
            same = self.kept[1] if self.kept and self.kept[0][0] == shape else None
            devices = mesh.mesh_of()
            experiment = same or build(evaluation.config, self.data_dir, splits=(self.split,), devices=devices)
            self.kept = (shape, context), experiment, compiled(experiment)
        experiment = self.kept[1]._replace(config=evaluation.config, context=context)
        identity.insist_on_agreement({"data": experiment.store.sha256})
        if context:
            check_context(context, experiment.spec, experiment.store, self.split)
        return experiment, self.kept[2]


def tested(
    evaluation: Evaluation, experiment: Experiment, evaluator: Evaluator, num_tasks: int | None
) -> Result | None:
    """The result of an evaluation, kept in its folder, which the process that writes makes and locks."""
    if num_tasks and evaluation.config.evaluation.tasks == "exhaustive":
        fix = "leave out one of them"
        raise UserError(f"--num_tasks={num_tasks}: evaluation.tasks=exhaustive tests every image; {fix}")

    def make() -> None:
        files.refuse_links(evaluation.run)
        evaluation.folder.mkdir(exist_ok=True)

    if mesh.is_first() and (evaluation.folder / "result.json").exists():
        replaces(evaluation.folder / "result.json")
    mesh.from_first(make)
    with mesh.by_first(files.locked, evaluation.folder):
        variables, notes = restore_best(evaluation.run, experiment)
        result = evaluate_run(evaluation, experiment, evaluator, (variables, notes["step"]), num_tasks)
        return result and keep(result, experiment.store)


def check_against(against: str, evaluations: Sequence[Evaluation]) -> None:
    """Checks that --against names a label that is tested, or that of context curves."""
    labels = {e.label for e in evaluations}
    labels |= {e.label.removesuffix(f",{e.setting}") for e in evaluations if e.setting.context}
    if against not in labels:
        known = brief(", ".join(sorted(labels)), 100)
        raise UserError(f"--against={brief(against, 30)}: no such method among the runs; choose from {known}")


def compiled(experiment: Experiment) -> Evaluator:
    """The compiled test of a task. It says that it compiles, and does not start what the memory will not hold."""
    evaluator = compile_task(experiment.method, experiment.source)
    check = memory.insist_it_fits if experiment.method.feed_forward else lambda *_: None
    return evaluator._replace(answer=announced(evaluator.answer, "the test of a task", check))


def score(experiment: Experiment, evaluator: Evaluator, variables: Variables, split: str, num_tasks: int) -> TaskTable:
    """Scores the first num_tasks tasks of a split."""
    evaluation, source, plans = experiment.config.evaluation, experiment.source, experiment.task_plans(split)
    counts = counting(plans(range(num_tasks)).query) if experiment.exhaustive else None
    asked = Tasks(plans, num_tasks, experiment.metric, evaluation.seed, experiment.per_call, counts)
    return evaluate(evaluator, variables, source, asked, report=Counter(f"  {split} tasks", num_tasks))


@memory.named("evaluation.per_call, episode.* or cotta.copies")
def evaluate_run(
    evaluation: Evaluation,
    experiment: Experiment,
    evaluator: Evaluator,
    best: tuple[Variables, int],
    num_tasks: int | None = None,
) -> Result | None:
    """Tests a method on the best variables of its run and their step, and writes nothing.

    Several processes share the tasks; the first one alone has the result.
    """
    method, split = experiment.method, evaluation.split
    trained, best_step = best
    variables = trained
    if method.calibrate:
        variables = backend.jit(method.calibrate)(variables, experiment.known_images())
    num_tasks = int(num_tasks or experiment.num_tasks[split])
    tasks = score(experiment, evaluator, variables, split, num_tasks)
    if not mesh.is_first():
        return None
    plan, images = experiment.task_plans(split)(range(num_tasks)), images_of(experiment)
    adapt_ms, predict_ms = time_task(evaluator, variables, images(plan.support[0]), images(plan.query[0]))
    result = result_of(
        evaluation, experiment, plan, tasks, adapt_ms=adapt_ms, predict_ms=predict_ms, best_step=best_step,
        weights_hash=checkpoints.weights_hash(trained),
        calibration={name: float(x) for name, x in variables.get("calibration", {}).items() if not x.ndim},
    )  # fmt: skip
    if method.uses_support and evaluation.setting == USUAL and split == "test":
        return with_examples(result, experiment, evaluator, variables, plan)
    return result


def result_of(evaluation: Evaluation, experiment: Experiment, plan: Plan, tasks: TaskTable, **measured: Any) -> Result:
    """The result of these tasks; `measured` are the fields that neither they nor the experiment tell."""
    config, method, info, metric = evaluation.config, experiment.method, experiment.store.info, experiment.metric
    answers = {**plan._asdict(), "predictions": tasks.predictions, "labels": tasks.labels, **tasks.also}
    others = {name: metrics.scores(metric, predictions, tasks.labels) for name, predictions in tasks.also.items()}
    return Result(
        label=evaluation.label,
        setting=evaluation.setting,
        split=evaluation.split,
        method=method.name,
        version=method.version,
        benchmark=config.benchmark,
        smoke=config.smoke,
        uses_support=method.uses_support,
        seed=config.seed,
        metric=metric,
        **metrics.averages(tasks.scores, tasks.labels),
        **metrics.trust(tasks.predictions, tasks.labels, tasks.confidence),
        also={name: metrics.averages(scores, tasks.labels) for name, scores in others.items()},
        num_tasks=len(tasks.labels),
        task_ms=tasks.task_ms,
        steps=experiment.schedule.steps,
        reached_step=min(evaluation.reached_step(), experiment.schedule.steps),  # a choice comes after the last
        train_minutes=training_minutes(evaluation.run),
        config_hash=config.hash,
        started_from=config.net.weights or "random",
        data_name=info.name,
        data_hash=experiment.store.sha256,
        trained_on=evaluation.record.data_hash,
        data_marks=(*info.marks, *evaluation.marks),
        threads=evaluation.record.threads,
        device=device(),
        package=__version__,
        config=config,
        folder=evaluation.folder,
        run=evaluation.run,
        tasks=make_tasks(tasks.scores, answers),
        arrays={"predictions": answers},
        **measured,
    )


def keep(result: Result, store: DomainStore) -> Result:
    """Writes a result into its folder, with a picture of a query if it has attention; returns it as it lies there."""
    written = write_result(result)
    if "attention" in result.arrays:
        draw_example(result.folder / "attention.png", result, store)
    return written


def device() -> str:
    """The machine kind of a result: the accelerator, or else the processor's model,
    since another one rounds differently."""
    return f"{backend.machine()} x{jax.device_count()} ({platform.machine()}), jax {jax.__version__}"
