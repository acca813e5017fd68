"""The one training loop: episodic meta-training with validation, checkpoints and exact resume.

It knows no method, network or data set. Step t is a pure function of the state, the seed and t, so a run that is killed
and started again ends with the parameters of the run that was not.
"""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from cxda_jax import augment, backend, checkpoints, cost
from cxda_jax.data.episodes import Plan
from cxda_jax.data.sources import Source, stack
from cxda_jax.progress import Meter, MetricsFile
from cxda_jax.types import Array, Episode, Images, Method, Variables


class TrainState(struct.PyTreeNode):
    """Everything that a step changes."""

    step: Array
    variables: Variables
    optimizer: Any


class Schedule(NamedTuple):
    """How long to train, and how often to look."""

    steps: int
    validate_every: int
    log_every: int
    save_every: int
    tasks_per_step: int = 1
    tensorboard: bool = False
    steps_per_call: int = 1  # steps in one program, where nothing is to be done between them


class Spent(NamedTuple):
    """What this process spent on a training."""

    steps: int
    seconds: float
    steps_per_s: float  # compilation, validation and saving left out
    waiting: float  # seconds, for data
    validating: float
    saving: float
    step_flops: float  # of one step, as XLA counts them
    step_bytes: int  # moved to the device for one step


def init_state(method: Method, tx: optax.GradientTransformation, seed: int, example: Images) -> TrainState:
    """A fresh state; `example` gives the shape of the images."""
    variables = jax.jit(method.init)(jax.random.key(seed), example)  # eagerly, each layer would compile alone
    return TrainState(jnp.zeros((), jnp.int32), variables, tx.init(variables["params"]))


def train_step(
    method: Method,
    tx: optax.GradientTransformation,
    weak: augment.Weak,
    state: TrainState,
    episodes: Episode,
    key: Array,
) -> tuple[TrainState, dict[str, Array]]:
    """One update from episodes [tasks, ...]; `key` is the run's, it never advances."""
    keys = jax.random.split(jax.random.fold_in(key, state.step), len(episodes.label))

    def task_loss(params: Any, episode: Episode, key: Array) -> tuple[Array, Any]:
        support_key, query_key, method_key = jax.random.split(key, 3)
        support, query = episode.support, episode.query
        episode = episode.replace(
            support=support.replace(pixels=augment.weak(support_key, support.pixels, weak)),
            query=query.replace(pixels=augment.weak(query_key, query.pixels, weak)),
        )
        return method.loss({**state.variables, "params": params}, episode, method_key)

    def objective(params: Any) -> tuple[Array, Any]:
        if len(keys) == 1:  # a batch axis of one would only be in the compiler's way
            loss, aux = task_loss(params, *jax.tree.map(lambda x: x[0], (episodes, keys)))
            return loss, jax.tree.map(lambda x: x[None], aux)
        losses, aux = jax.vmap(task_loss, in_axes=(None, 0, 0))(params, episodes, keys)
        return losses.mean(), aux

    (loss, aux), grads = jax.value_and_grad(objective, has_aux=True)(state.variables["params"])
    updates, optimizer = tx.update(grads, state.optimizer, state.variables["params"])
    params = optax.apply_updates(state.variables["params"], updates)
    stats = jax.tree.map(lambda s: s.mean(0), aux["batch_stats"])  # the only place where episodes' statistics meet
    accuracy = (aux["logits"].argmax(-1) == episodes.label).mean()
    state = TrainState(state.step + 1, {"params": params, "batch_stats": stats}, optimizer)
    return state, {"loss": loss, "accuracy": accuracy}


def train_call(
    method: Method,
    tx: optax.GradientTransformation,
    weak: augment.Weak,
    source: Source,
    steps: int,
    state: TrainState,
    resident: Any,
    batch: Any,
    key: Array,
) -> tuple[TrainState, dict[str, Array]]:
    """`steps` updates in one program, from a batch of the source; from as many, stacked, if there are several."""

    def one(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Array]]:
        return train_step(method, tx, weak, state, source.assemble(resident, batch), key)

    return one(state, batch) if steps == 1 else jax.lax.scan(one, state, batch)


def next_call(step: int, schedule: Schedule) -> int:
    """How many steps the next program takes: those of a call, or one where a call would run past something to be done."""
    intervals = (schedule.log_every, schedule.save_every, schedule.validate_every)
    stop = min(schedule.steps, *(step // every * every + every for every in intervals))
    return schedule.steps_per_call if step + schedule.steps_per_call <= stop else 1


def train(
    method: Method,
    tx: optax.GradientTransformation,
    weak: augment.Weak,
    source: Source,
    plan_of: Callable[[int], Plan],
    state: TrainState,
    seed: int,
    schedule: Schedule,
    validate: Callable[[Variables], float],
    workdir: Path,
    log: Callable[[str], None] = print,
) -> Spent:
    """Trains from `state`, or from what workdir/last holds, and leaves the best variables in workdir/best.

    plan_of(step) gives the plans of a step's episodes; validate(variables) a score, larger is better, of which
    ties keep the earlier. Progress goes to workdir/metrics.jsonl.
    """
    entered = time.perf_counter()
    best, seconds = {"score": -1.0, "step": 0}, 0.0
    found = checkpoints.restore(workdir / "last", state)
    if found:
        state, best, seconds = found[0], found[1]["best"], found[1]["seconds"]
        log(f"resumed from step {int(state.step)} of {schedule.steps}")
    step = start = int(state.step)
    programs = {
        steps: backend.jit(
            functools.partial(train_call, method, tx, weak, source, steps),
            # On CPUs donation saves nothing, and a checkpoint still being written may share the state's memory.
            donate_argnums=0 if jax.default_backend() != "cpu" else (),
        )
        for steps in (1, schedule.steps_per_call)
    }
    key = jax.random.key(seed)
    batches = source.batches(plan_of, start, schedule.steps)
    waiting = validating_s = saving = starting = 0.0
    started: set[int] = set()
    with (
        MetricsFile(workdir / "metrics.jsonl", start, schedule.tensorboard) as metrics_file,
        checkpoints.open_folder(workdir / "last") as last_folder,
        checkpoints.open_folder(workdir / "best") as best_folder,
    ):
        meter, looping = Meter(start, schedule.steps), time.perf_counter()
        opened = looping - seconds
        while step < schedule.steps:
            began, count, first = time.perf_counter(), next_call(step, schedule), step == start
            batch = stack([next(batches) for _ in range(count)])
            waited = time.perf_counter() - began
            waiting, meter.waited = waiting + waited, meter.waited + waited
            state, measured = programs[count](state, source.resident, batch, key)
            if count not in started:  # compiled just now
                jax.block_until_ready(measured)
                started.add(count)
                starting += time.perf_counter() - began
            step += count
            meter.add(measured)
            last = step == schedule.steps
            if step % schedule.log_every == 0 or first or last:
                metrics_file.write({"step": step} | meter.read(step, schedule.tasks_per_step))
                log(meter.line())
            validating = step % schedule.validate_every == 0 or last
            if validating:
                began = time.perf_counter()
                score = validate(state.variables)
                validating_s += time.perf_counter() - began
                if score > best["score"]:
                    best = {"score": score, "step": step}
                    saving += _timed(checkpoints.save, best_folder, step, state.variables, best)
                seconds = time.perf_counter() - opened
                metrics_file.write(
                    {"step": step, "val_score": score, "best_score": best["score"], "seconds": round(seconds, 2)}
                )
                log(f"step {step}  validation {score:.4f}  best {best['score']:.4f} at step {best['step']}")
                meter.exclude(time.perf_counter() - began)
            if validating or step % schedule.save_every == 0:
                seconds = time.perf_counter() - opened
                saving += _timed(checkpoints.save, last_folder, step, state, {"best": best, "seconds": seconds})
        jax.block_until_ready(state)
        stepping = time.perf_counter() - looping - starting - validating_s - saving
        saving += _timed(last_folder.wait_until_finished) + _timed(best_folder.wait_until_finished)
    steps = step - start
    speed = (steps - sum(started)) / max(stepping, 1e-9)
    spent = Spent(steps, time.perf_counter() - entered, speed, waiting, validating_s, saving, 0.0, 0)
    if not steps:
        return spent
    batch = next(source.batches(plan_of, 0, 1))
    lowered = programs[1].lower(state, source.resident, batch, key)
    arrays = [leaf for leaf in jax.tree.leaves(batch) if isinstance(leaf, np.ndarray)]
    return spent._replace(step_flops=cost.flops(lowered), step_bytes=sum(array.nbytes for array in arrays))


def _timed(work: Callable[..., Any], *arguments: Any) -> float:
    began = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began
