"""The one evaluation: adapt to each task's support, predict its queries, score. It knows no method and no data set."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from cxda_jax import backend, metrics
from cxda_jax.data.episodes import Plan
from cxda_jax.data.sources import Source
from cxda_jax.types import Array, Episode, Method, Variables


class TaskTable(NamedTuple):
    """What an evaluation measured, one row a task."""

    predictions: np.ndarray  # int32 [tasks, queries]
    labels: np.ndarray  # int32 [tasks, queries]
    scores: np.ndarray  # [tasks]
    task_ms: float  # adapt and predict, per task: the median over calls, compilation left out

    @property
    def mean(self) -> float:
        return float(self.scores.mean())

    @property
    def worst_decile(self) -> float:
        return metrics.worst_decile(self.scores)


class Evaluator(NamedTuple):
    """Compiled on first use and once per shape: keep it, and checkpoints become data."""

    fetch: Callable[[Any, Any], Episode]
    answer: Callable[[Variables, Episode, Array], Array]  # [tasks, queries] class numbers


def compile_task(method: Method, source: Source) -> Evaluator:
    # Adapting and predicting stay in one program: the tasks of a call share their weights, and vmap merges them into
    # one batch. Returned from one vmap and passed to another, the weights would be copied and no longer shared.
    def answer(variables: Variables, episode: Episode, key: Array) -> Array:
        return method.predict(method.adapt(variables, episode.support, key), episode.query).argmax(-1)

    return Evaluator(backend.jit(source.assemble), backend.jit(jax.vmap(answer, in_axes=(None, 0, 0))))


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
    key = jax.random.key(seed)
    predictions = labels = np.empty(0)
    seconds = []
    for start, batch in zip(starts, batches, strict=True):
        episodes = jax.block_until_ready(evaluator.fetch(source.resident, batch))
        keys = jax.vmap(lambda task: jax.random.fold_in(key, task))(np.arange(start, start + per_call))
        began = time.perf_counter()
        answers = np.asarray(evaluator.answer(variables, episodes, keys))
        seconds.append(time.perf_counter() - began)
        if not predictions.size:
            predictions, labels = (np.empty((num_tasks, answers.shape[1]), np.int32) for _ in range(2))
        predictions[start : start + per_call] = answers
        labels[start : start + per_call] = episodes.label
        report(start + per_call)
    task_ms = 1e3 * float(np.median(seconds[1:] or seconds)) / per_call
    return TaskTable(predictions, labels, metrics.scores(metric, predictions, labels), task_ms)


def time_task(method: Method, variables: Variables, episode: Episode, repeats: int = 5) -> tuple[float, float]:
    """Median milliseconds of adapt() and of predict() on one task alone, as a device would run them."""
    adapt, predict = backend.jit(method.adapt), backend.jit(method.predict)
    key = jax.random.key(0)
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        adapted = jax.block_until_ready(adapt(variables, episode.support, key))
        between = time.perf_counter()
        jax.block_until_ready(predict(adapted, episode.query))
        times.append((between - began, time.perf_counter() - between))
    adapt_ms, predict_ms = 1e3 * np.median(times[1:], axis=0)
    return float(adapt_ms), float(predict_ms)
