"""The one training loop: episodic meta-training with validation, checkpoints and exact resume.

It knows no method, network or data set. Step t is a pure function of the state, the seed and t, so a run that is killed
and started again ends with the parameters of the run that was not.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from cxda_jax import augment, backend, checkpoints
from cxda_jax.data.episodes import Plan
from cxda_jax.data.sources import Source
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


def init_state(method: Method, tx: optax.GradientTransformation, seed: int, example: Images) -> TrainState:
    """A fresh state; `example` gives the shape of the images."""
    variables = method.init(jax.random.key(seed), example)
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
        losses, aux = jax.vmap(task_loss, in_axes=(None, 0, 0))(params, episodes, keys)
        return losses.mean(), aux

    (loss, aux), grads = jax.value_and_grad(objective, has_aux=True)(state.variables["params"])
    updates, optimizer = tx.update(grads, state.optimizer, state.variables["params"])
    params = optax.apply_updates(state.variables["params"], updates)
    stats = jax.tree.map(lambda s: s.mean(0), aux["batch_stats"])  # the only place where episodes' statistics meet
    accuracy = (aux["logits"].argmax(-1) == episodes.label).mean()
    state = TrainState(state.step + 1, {"params": params, "batch_stats": stats}, optimizer)
    return state, {"loss": loss, "accuracy": accuracy}


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
) -> None:
    """Trains from `state`, or from what workdir/last holds, and leaves the best variables in workdir/best.

    plan_of(step) gives the plans of a step's episodes; validate(variables) a score, larger is better, of which
    ties keep the earlier. Progress goes to workdir/metrics.jsonl.
    """
    best, seconds = {"score": -1.0, "step": 0}, 0.0
    found = checkpoints.restore(workdir / "last", state)
    if found:
        state, best, seconds = found[0], found[1]["best"], found[1]["seconds"]
        log(f"resumed from step {int(state.step)} of {schedule.steps}")
    start = int(state.step)
    step_fn = backend.jit(
        lambda state, resident, batch, key: train_step(method, tx, weak, state, source.assemble(resident, batch), key),
        # On CPUs donation saves nothing, and a checkpoint still being written may share the state's memory.
        donate_argnums=0 if jax.default_backend() != "cpu" else (),
    )
    key = jax.random.key(seed)
    batches = source.batches(plan_of, start, schedule.steps)
    with (
        MetricsFile(workdir / "metrics.jsonl", start, schedule.tensorboard) as metrics_file,
        checkpoints.open_folder(workdir / "last") as last_folder,
        checkpoints.open_folder(workdir / "best") as best_folder,
    ):
        meter, opened = Meter(start, schedule.steps), time.perf_counter() - seconds
        for step in range(start + 1, schedule.steps + 1):
            began = time.perf_counter()
            batch = next(batches)
            meter.waited += time.perf_counter() - began
            state, measured = step_fn(state, source.resident, batch, key)
            meter.add(measured)
            validating = step % schedule.validate_every == 0 or step == schedule.steps
            if step % schedule.log_every == 0 or step in (start + 1, schedule.steps):
                metrics_file.write({"step": step} | meter.read(step, schedule.tasks_per_step))
                log(meter.line())
            if validating:
                began = time.perf_counter()
                score = validate(state.variables)
                if score > best["score"]:
                    best = {"score": score, "step": step}
                    checkpoints.save(best_folder, step, state.variables, best)
                seconds = time.perf_counter() - opened
                metrics_file.write(
                    {"step": step, "val_score": score, "best_score": best["score"], "seconds": round(seconds, 2)}
                )
                log(f"step {step}  validation {score:.4f}  best {best['score']:.4f} at step {best['step']}")
                meter.exclude(time.perf_counter() - began)
            if validating or step % schedule.save_every == 0:
                seconds = time.perf_counter() - opened
                checkpoints.save(last_folder, step, state, {"best": best, "seconds": seconds})
