"""The one training loop: episodic meta-training with validation, checkpoints and exact resume.

It knows no method, network or data set. Step t is a pure function of the state, the seed and t, so a run that is killed
and started again ends with the parameters of the run that was not. A step whose loss or gradients are not finite is not
taken: the program leaves the state as it was, the run stops and says which episode it was.
"""

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from cxda_jax import augment, backend, checkpoints, cost, files, manifest, memory
from cxda_jax.data.episodes import Plan
from cxda_jax.data.sources import Source, stack
from cxda_jax.progress import Meter, MetricsFile, compiling
from cxda_jax.types import Array, Episode, Images, Method, UserError, Variables

NOT_FINITE = "nonfinite.json"


class TrainState(struct.PyTreeNode):
    """Everything that a step changes."""

    step: Array
    variables: Variables
    optimizer: Any
    finite: Any = np.True_  # whether all losses and gradients were; after one that was not, nothing changes any more


class Schedule(NamedTuple):
    """How long to train, and how often to look."""

    steps: int
    validate_every: int
    log_every: int
    save_every: int
    tasks_per_step: int = 1
    tensorboard: bool = False
    steps_per_call: int = 1  # steps in one program, where nothing is to be done between them


class NotFinite(UserError):
    """A step that was not taken."""

    def __init__(self, step: int) -> None:
        super().__init__(f"step {step}: the loss or its gradients are not finite; the state before it is kept")
        self.step = step


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
    init, key = jax.jit(method.init), jax.random.key(seed)  # eagerly, each layer would compile alone
    memory.check(init, key, example)
    variables = init(key, example)
    return TrainState(jnp.zeros((), jnp.int32), variables, tx.init(variables["params"]), jnp.array(True))


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
    finite = jax.tree.reduce(lambda found, x: found & jnp.isfinite(x).all(), (loss, grads), state.finite)
    after = TrainState(state.step + 1, {"params": params, "batch_stats": stats}, optimizer, finite)
    state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state.replace(finite=finite))
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
    stopping: Callable[[], bool] = lambda: False,
) -> Spent:
    """Trains from `state`, or from what workdir/last holds, and leaves the best variables in workdir/best.

    plan_of(step) gives the plans of a step's episodes; validate(variables) a score, larger is better, of which
    ties keep the earlier. Progress goes to workdir/metrics.jsonl. Once stopping() is true, it saves and returns.
    A state in last/ is from before the validation that is due at its step: whoever goes on from it begins with that.
    """
    entered = time.perf_counter()
    state, best, seconds = resume(workdir, state, log)
    step = start = int(state.step)
    if start:
        log(f"resumed from step {start} of {schedule.steps}")
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
    waiting = validating = saving = starting = 0.0
    started: set[int] = set()
    with (
        MetricsFile(workdir / "metrics.jsonl", start, schedule.tensorboard, log) as metrics_file,
        checkpoints.Folder(workdir / "last") as last_folder,
        checkpoints.Folder(workdir / "best", keep=3) as best_folder,  # an older state in last/ names an older best
    ):
        meter, looping = Meter(start, schedule.steps), time.perf_counter()
        opened = looping - seconds

        def save(state: TrainState) -> float:
            began = time.perf_counter()
            best_folder.wait()  # a state in last/ must never name a best that is not on disk
            last_folder.save(int(state.step), state, {"best": best, "seconds": began - opened})
            return time.perf_counter() - began

        while True:
            if _due(step, schedule):
                began = time.perf_counter()
                score = validate(state.variables)
                validating += time.perf_counter() - began
                if score > best["score"]:
                    best = {"score": score, "step": step}
                    saving += _timed(best_folder.save, step, state.variables, best)
                seconds = time.perf_counter() - opened
                metrics_file.write(
                    {"step": step, "val_score": score, "best_score": best["score"], "seconds": round(seconds, 2)}
                )
                weights = checkpoints.weights_hash(state.variables)[:12]
                log(
                    f"step {step}  validation {score:.4f}  best {best['score']:.4f} at step {best['step']}  weights {weights}"
                )
                meter.exclude(time.perf_counter() - began)
            if step >= schedule.steps:
                break
            began, count, first = time.perf_counter(), next_call(step, schedule), step == start
            batch = stack([next(batches) for _ in range(count)])
            waited = time.perf_counter() - began
            waiting += waited
            if count in started:
                state, measured = programs[count](state, source.resident, batch, key)
                meter.waited += waited
            else:
                with compiling("the training step", log):
                    memory.check(programs[count], state, source.resident, batch, key)
                    state, measured = programs[count](state, source.resident, batch, key)
                    jax.block_until_ready(measured)
                started.add(count)
                starting += time.perf_counter() - began
                meter.exclude(time.perf_counter() - began, count)
            step += count
            meter.add(measured)
            saving_now = step % schedule.save_every == 0 or _due(step, schedule)
            logging = step % schedule.log_every == 0 or first or step == schedule.steps
            stop = stopping()
            if (saving_now or logging or stop) and not bool(state.finite):
                save(state.replace(finite=jnp.array(True)))
                raise _not_finite(int(state.step), plan_of, seed, workdir)
            if logging:
                metrics_file.write({"step": step} | meter.read(step, schedule.tasks_per_step))
                log(meter.line())
            if saving_now or stop:
                spent_saving = save(state)
                saving += spent_saving
                meter.exclude(spent_saving)
            if stop:
                break
        jax.block_until_ready(state)
        stepping = time.perf_counter() - looping - starting - validating - saving
        saving += _timed(best_folder.wait) + _timed(last_folder.wait)
    steps = step - start
    speed = (steps - sum(started)) / max(stepping, 1e-9)
    spent = Spent(steps, time.perf_counter() - entered, speed, waiting, validating, saving, 0.0, 0)
    if not steps:
        return spent
    batch = next(source.batches(plan_of, 0, 1))
    lowered = programs[1].lower(state, source.resident, batch, key)
    arrays = [leaf for leaf in jax.tree.leaves(batch) if isinstance(leaf, np.ndarray)]
    return spent._replace(step_flops=cost.flops(lowered), step_bytes=sum(array.nbytes for array in arrays))


def resume(
    workdir: Path, fresh: TrainState, log: Callable[[str], None] = print
) -> tuple[TrainState, dict[str, Any], float]:
    """The newest good state of a run, its best validation score and the seconds spent so far; `fresh` if there is none."""
    found = checkpoints.restore(workdir / "last", fresh, damaged=lambda text: log(f"warning: {text}"))
    if not found:
        return fresh, {"score": -1.0, "step": 0}, 0.0
    state, notes = found
    step = notes["best"]["step"]
    fault = manifest.find_fault(workdir / "best" / str(step)) if step else ""
    if fault:
        raise UserError(f"{workdir}/best/{step}: {fault}; copy it back, or delete {workdir} to train again")
    return state, notes["best"], notes["seconds"]


def _due(step: int, schedule: Schedule) -> bool:
    """Whether the state of this step is to be validated."""
    return step > 0 and (step % schedule.validate_every == 0 or step == schedule.steps)


def _not_finite(step: int, plan_of: Callable[[int], Plan], seed: int, workdir: Path) -> NotFinite:
    plan = {name: np.asarray(rows).tolist() for name, rows in plan_of(step)._asdict().items()}
    files.write_text(workdir / NOT_FINITE, json.dumps({"step": step, "seed": seed, "plan": plan}) + "\n")
    return NotFinite(step)


def _timed(work: Callable[..., Any], *arguments: Any) -> float:
    began = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began
