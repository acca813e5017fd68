"""The one evaluation: adapt to each task's support, predict its queries, score. It knows no method and no data set."""

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from cxda_jax import backend, metrics
from cxda_jax.data.episodes import Plan
from cxda_jax.data.sources import Source
from cxda_jax.types import Adapted, Array, Episode, Images, Method, Variables

OWN = "predictions"  # the name of the method's own answer
_LABELS = "labels"
STREAM = 2**32 - 1  # sets the keys of tasks apart from those of a training with the same seed, which counts its steps


class TaskTable(NamedTuple):
    """What an evaluation measured, one row a task."""

    predictions: np.ndarray  # int32 [tasks, queries]
    labels: np.ndarray  # int32 [tasks, queries]
    scores: np.ndarray  # [tasks]
    task_ms: float  # adapt and predict, per task: the median over calls, compilation left out
    also: Mapping[str, np.ndarray] = MappingProxyType({})  # the method's other predictions, as `predictions`

    @property
    def mean(self) -> float:
        return float(self.scores.mean())

    @property
    def worst_decile(self) -> float:
        return metrics.worst_decile(self.scores)


class Evaluator(NamedTuple):
    """Compiled on first use and once per shape: keep it, and checkpoints become data."""

    fetch: Callable[[Any, Any], Episode]
    adapt: Callable[[Variables, Images, Array], Adapted]  # one task
    predict: Callable[[Adapted, Images], Array]  # one task: class numbers [queries]
    answer: Callable[[Variables, Episode, Array], Mapping[str, Any]]  # class numbers [tasks, queries], by name
    attention: Callable[[Adapted, Images], Array] | None  # one task: weights [queries, heads, support]


def compile_task(method: Method, source: Source) -> Evaluator:
    def classes(predict: Callable[[Adapted, Images], Array]) -> Callable[[Adapted, Images], Array]:
        return lambda adapted, query: predict(adapted, query).argmax(-1)

    answers_of = {name: classes(predict) for name, predict in {OWN: method.predict, **method.also}.items()}
    adapt, compiled = backend.jit(method.adapt), {name: backend.jit(f) for name, f in answers_of.items()}

    # Adapting and predicting stay in one program: the tasks of a call share their weights, and vmap merges them into
    # one batch. Returned from one vmap and passed to another, the weights would be copied and no longer shared.
    def together(variables: Variables, episode: Episode, key: Array) -> dict[str, Array]:
        adapted = method.adapt(variables, episode.support, key)
        return {name: answer(adapted, episode.query) for name, answer in answers_of.items()}

    # Weights of each task's own would make vmap's one batch a grouped convolution, several times slower than a loop.
    def one_by_one(variables: Variables, episodes: Episode, keys: Array) -> dict[str, np.ndarray]:
        rows: dict[str, list[Array]] = {name: [] for name in compiled}
        for i in range(len(keys)):
            episode, key = jax.tree.map(lambda x, i=i: x[i], (episodes, keys))
            adapted = adapt(variables, episode.support, key)
            for name, answer in compiled.items():
                rows[name].append(answer(adapted, episode.query))
        return {name: np.stack(jax.device_get(answers)) for name, answers in rows.items()}

    def batched(variables: Variables, episodes: Episode, keys: Array) -> dict[str, Array]:
        if len(keys) > 1:
            return jax.vmap(together, in_axes=(None, 0, 0))(variables, episodes, keys)
        alone = together(
            variables, *jax.tree.map(lambda x: x[0], (episodes, keys))
        )  # no batch axis of one, as in training
        return jax.tree.map(lambda x: x[None], alone)

    answer = backend.jit(batched) if method.feed_forward else one_by_one
    attention = backend.jit(method.attention) if method.attention else None
    return Evaluator(backend.jit(source.assemble), adapt, compiled[OWN], answer, attention)


def evaluate(
    evaluator: Evaluator,
    variables: Variables,
    source: Source,
    plan_of: Callable[[range], Plan],
    num_tasks: int,
    metric: str,
    seed: int = 0,
    per_call: int = 1,
    report: Callable[[int], None] = lambda done: None,
) -> TaskTable:
    """Scores tasks 0..num_tasks - 1, `per_call` at a time; plan_of(range) gives the plans of numbered tasks."""
    per_call = min(per_call, num_tasks)
    # A shorter last call would compile anew: it reaches back instead, and the tasks it repeats are overwritten.
    starts = [min(start, num_tasks - per_call) for start in range(0, num_tasks, per_call)]
    batches = source.batches(lambda i: plan_of(range(starts[i], starts[i] + per_call)), 0, len(starts))
    key = jax.random.fold_in(jax.random.key(seed), STREAM)
    tables: dict[str, np.ndarray] = {}
    seconds = []
    batch = next(batches)
    for start in starts:
        episodes = jax.block_until_ready(evaluator.fetch(source.resident, batch))
        keys = jax.vmap(lambda task: jax.random.fold_in(key, task))(np.arange(start, start + per_call))
        began = time.perf_counter()
        answers = evaluator.answer(variables, episodes, keys)
        batch = next(batches, None)  # the host chooses the next tasks while the device works
        answers = jax.device_get(answers)
        seconds.append(time.perf_counter() - began)
        for name, table in {**answers, _LABELS: np.asarray(episodes.label)}.items():
            rows = tables.setdefault(name, np.empty((num_tasks, table.shape[1]), np.int32))
            rows[start : start + per_call] = table
        report(start + per_call)
    task_ms = 1e3 * float(np.median(seconds[1:] or seconds)) / per_call
    predictions, labels = tables.pop(OWN), tables.pop(_LABELS)
    return TaskTable(predictions, labels, metrics.scores(metric, predictions, labels), task_ms, tables)


def time_task(
    evaluator: Evaluator, variables: Variables, episode: Episode, repeats: int = 5, budget_s: float = 10.0
) -> tuple[float, float]:
    """Median milliseconds of adapt() and of predict() on one task alone, as a device would run them.

    Repeats stop once they have taken the budget.
    """
    key = jax.random.key(0)
    times: list[tuple[float, float]] = []
    while len(times) <= repeats and (len(times) < 2 or np.sum(times[1:]) < budget_s):
        began = time.perf_counter()
        adapted = jax.block_until_ready(evaluator.adapt(variables, episode.support, key))
        between = time.perf_counter()
        jax.block_until_ready(evaluator.predict(adapted, episode.query))
        times.append((between - began, time.perf_counter() - between))
    adapt_ms, predict_ms = 1e3 * np.median(times[1:], axis=0)
    return float(adapt_ms), float(predict_ms)
