"""The evaluation: adapt to each task's support, predict its queries, score. It knows no method and no data set."""

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cxda_jax.data.episodes import Plan
from cxda_jax.data.sources import Source
from cxda_jax.errors import UserError
from cxda_jax.machine import backend, mesh
from cxda_jax.training import metrics
from cxda_jax.types import Adapted, Array, Episode, Images, Method, Variables

PREDICTIONS, CONFIDENCE, LABELS = "predictions", "confidence", "labels"  # names of tables
NO_CLASS = -1  # where the outputs for a query are not finite
STREAM = 2**32 - 1  # folded into the keys of tasks; a training with the same seed folds in its steps, which are fewer


class TaskTable(NamedTuple):
    """The result of an evaluation, one row a task."""

    predictions: np.ndarray  # class numbers, int32 [tasks, queries]
    labels: np.ndarray  # class numbers, int32 [tasks, queries]; -1: the query does not count
    scores: np.ndarray  # [tasks]
    confidence: np.ndarray  # the probability of each prediction, float32 [tasks, queries]
    task_ms: float  # milliseconds of adapt and predict a task, the median over calls without compilation
    also: Mapping[str, np.ndarray] = MappingProxyType({})  # the method's other predictions by name

    @property
    def mean(self) -> float:
        return float((self.scores * metrics.shares(self.labels)).mean())

    @property
    def worst_decile(self) -> float:
        return metrics.worst_decile(self.scores)


class Evaluator(NamedTuple):
    """A method's programs for any checkpoint.

    Each is compiled at its first call, once for each shape of its arguments.
    """

    fetch: Callable[[Any, Any], Episode]
    adapt: Callable[[Variables, Images, Array], Adapted]  # one task
    predict: Callable[[Adapted, Images], tuple[Array, Array]]  # one task: class numbers and probabilities [queries]
    answer: Callable[[Variables, Episode, Array], Mapping[str, Any]]  # the same [tasks, queries], by name
    attention: Callable[[Adapted, Images], Array] | None  # one task: weights [queries, heads, support]


def compile_task(method: Method, source: Source) -> Evaluator:
    """The programs that evaluate a method on episodes of a source, on the source's mesh if it has one."""
    devices = source.mesh

    def classes(predict: Callable[[Adapted, Images], Array]) -> Callable[[Adapted, Images], tuple[Array, Array]]:
        def chosen(adapted: Adapted, query: Images) -> tuple[Array, Array]:
            logits = predict(adapted, query).astype(jnp.float32)
            found = jnp.where(jnp.isfinite(logits).all(-1), logits.argmax(-1), NO_CLASS)
            return found, jax.nn.softmax(logits).max(-1)

        return chosen

    answers_of = {name: classes(predict) for name, predict in {PREDICTIONS: method.predict, **method.also}.items()}
    adapt, compiled = backend.jit(method.adapt), {name: backend.jit(f) for name, f in answers_of.items()}

    def all_of(programs: Mapping[str, Any], adapted: Adapted, query: Images) -> dict[str, Array]:
        answers = {name: program(adapted, query) for name, program in programs.items()}
        return {name: chosen for name, (chosen, _) in answers.items()} | {CONFIDENCE: answers[PREDICTIONS][1]}

    # Adapting and predicting are one program, in which the tasks of a call share their weights and vmap merges them
    # into one batch. Between two programs the weights would be copied for each task.
    def together(variables: Variables, episode: Episode, key: Array) -> dict[str, Array]:
        adapted = method.adapt(variables, episode.support, key)
        return all_of(answers_of, adapted, episode.query)

    # If each task has weights of its own, vmap makes a grouped convolution. That is several times slower than a loop.
    def one_by_one(variables: Variables, episodes: Episode, keys: Array) -> dict[str, np.ndarray]:
        answers, own = [], [None] if devices is None else list(devices.local_devices)
        if devices is not None:  # each device of this process takes one task after the other
            episodes, keys = mesh.local(episodes), jax.random.wrap_key_data(mesh.local(jax.random.key_data(keys)))
            copies = [jax.device_put(mesh.local(variables), device) for device in own]
        else:
            copies = [variables]
        for i in range(len(keys)):
            episode, key = jax.tree.map(lambda x, i=i: x[i], (episodes, keys))
            if devices is not None:
                episode, key = jax.device_put((episode, key), own[i % len(own)])
            adapted = adapt(copies[i % len(own)], episode.support, key)
            answers.append(all_of(compiled, adapted, episode.query))
        return jax.tree.map(lambda *rows: np.stack(rows), *jax.device_get(answers))

    def batched(variables: Variables, episodes: Episode, keys: Array) -> dict[str, Array]:
        if len(keys) > 1:
            return jax.vmap(together, in_axes=(None, 0, 0))(variables, episodes, keys)
        # As in training, a batch axis of one would only make the program slower.
        alone = together(variables, *jax.tree.map(lambda x: x[0], (episodes, keys)))
        return jax.tree.map(lambda x: x[None], alone)

    whole, cut = mesh.WHOLE, mesh.CUT
    answer = backend.jit(mesh.over(devices, batched, (whole, cut, cut))) if method.feed_forward else one_by_one
    fetch = backend.jit(mesh.over(devices, source.assemble, (mesh.specs(source.resident) if devices else None, cut)))
    attention = backend.jit(method.attention) if method.attention else None
    return Evaluator(fetch, adapt, compiled[PREDICTIONS], answer, attention)


class Tasks(NamedTuple):
    """The tasks of an evaluation.

    Attributes:
      plan_of: task numbers -> their Plan.
      number: so many tasks, from number 0 on.
      metric: a name in METRICS.
      seed: of the keys that methods draw from.
      per_call: tasks in one program, on each device.
      counts: whether each query counts, [tasks, queries]; None: all do.
    """

    plan_of: Callable[[Sequence[int]], Plan]
    number: int
    metric: str
    seed: int = 0
    per_call: int = 1
    counts: np.ndarray | None = None


def evaluate(
    evaluator: Evaluator,
    variables: Variables,
    source: Source,
    asked: Tasks,
    report: Callable[[int], None] = lambda done: None,
) -> TaskTable:
    """Evaluates variables on tasks.

    Args:
      evaluator: of the method, from compile_task().
      variables: of the method, calibrated if it has calibrate().
      source: of the episodes, that of the evaluator.
      report: called with the number of tasks that are done.
    """
    plan_of, num_tasks, metric, seed, per_call, counts = asked
    devices, share = source.mesh, source.mesh.size if source.mesh else 1
    together = share * min(per_call, -(-num_tasks // share))
    # A last call with fewer tasks would be compiled again. So it starts earlier and repeats some tasks.
    starts = [max(0, min(start, num_tasks - together)) for start in range(0, num_tasks, together)]
    numbers: list[Any] = [np.minimum(np.arange(start, start + together), num_tasks - 1) for start in starts]
    batches = source.own_batches(lambda i: plan_of(numbers[i]), 0, len(starts))
    key = jax.random.fold_in(jax.random.key(seed), STREAM)
    variables, batch, seconds, tables = mesh.place(devices, variables), next(batches), [], {}
    for call, tasks in enumerate(numbers):
        episodes = jax.block_until_ready(evaluator.fetch(source.resident, mesh.place(devices, batch, mesh.CUT)))
        own = tasks if devices is None else mesh.own_part(tasks)
        keys = jax.vmap(lambda task: jax.random.fold_in(key, task))(own)
        if devices is not None:
            keys = jax.random.wrap_key_data(mesh.place(devices, jax.random.key_data(keys), mesh.CUT))
        began = time.perf_counter()
        answers = evaluator.answer(variables, episodes, keys)
        batch = next(batches, None)  # the host chooses the next tasks while the device works
        ready = time.perf_counter()
        answers = mesh.local(answers)
        waited, took = time.perf_counter() - ready, time.perf_counter() - began
        if call == 0 or batch is None or waited > 0.1 * took:  # else the device may have waited for the host
            seconds.append(took)
        for name, table in {**answers, LABELS: mesh.local(episodes.label)}.items():
            rows = tables.setdefault(name, np.full((num_tasks, table.shape[1]), -1, table.dtype))
            rows[own] = table
        report(int(tasks[-1]) + 1)
    tables = {name: mesh.largest(rows) for name, rows in tables.items()}
    chosen = [rows for name, rows in tables.items() if name not in (LABELS, CONFIDENCE)]
    if without := sum(int((rows == NO_CLASS).any(1).sum()) for rows in chosen):
        what = f"in {without} of {num_tasks} tasks the network's outputs are not finite, so it has no answer"
        raise UserError(f"{what}; its weights have grown too large: train anew with a lower optimizer.learning_rate")
    task_ms = 1e3 * float(np.median(seconds[1:] or seconds)) / together
    predictions, confidence, labels = (tables.pop(name) for name in (PREDICTIONS, CONFIDENCE, LABELS))
    labels = labels if counts is None else np.where(counts, labels, np.int32(-1))
    return TaskTable(predictions, labels, metrics.scores(metric, predictions, labels), confidence, task_ms, tables)


def time_task(evaluator: Evaluator, variables: Variables, support: Images, query: Images) -> tuple[float, float]:
    """Median milliseconds of adapt() and of predict() on one task without a task axis, as a device would run them."""
    key, times = jax.random.key(0), []
    while len(times) < 2 or len(times) < 6 and np.sum(times[1:]) < 10.0:  # the first call compiles and does not count
        began = time.perf_counter()
        adapted = jax.block_until_ready(evaluator.adapt(variables, support, key))
        between = time.perf_counter()
        jax.block_until_ready(evaluator.predict(adapted, query))
        times.append((between - began, time.perf_counter() - between))
    adapt_ms, predict_ms = 1e3 * np.median(times[1:], axis=0)
    return float(adapt_ms), float(predict_ms)
