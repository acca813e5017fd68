"""The training loop: episodic meta-training with validation, checkpoints and exact resume.

It knows no method, network or data set. Step t is a pure function of the state, the seed and t. So a run that was
killed and started again ends with the same parameters as a run that was not killed. If a loss or a gradient is not
finite, the program leaves the state as it was, and the run stops and names the episode.
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
from jax.sharding import Mesh

from cxda_jax import augment, backend, cost, memory, mesh
from cxda_jax.data.episodes import Plan
from cxda_jax.data.sources import Source, stack
from cxda_jax.disk import checkpoints, files, manifest
from cxda_jax.errors import UserError
from cxda_jax.progress import Meter, MetricsFile, compiling
from cxda_jax.types import Array, Episode, Images, Method, Variables

ASKED = "asked"  # among what a step measures: whether a process is asked to stop


class TrainState(struct.PyTreeNode):
    """All that a step changes."""

    step: Array  # steps so far
    variables: Variables
    optimizer: Any
    finite: Any = np.True_  # whether all losses and gradients were; if not, further steps change nothing


Stepped = tuple[TrainState, dict[str, Array]]  # the state after steps, and their measured loss and accuracy


class Schedule(NamedTuple):
    """The length of a training, and the times of what is done between steps. Intervals are in steps."""

    steps: int
    validate_every: int
    log_every: int
    save_every: int
    tasks_per_step: int = 1
    tensorboard: bool = False  # whether to write event files too
    steps_per_call: int = 1  # in one program, if nothing is to be done between them


class NotFinite(UserError):
    """A step whose loss or gradients were not finite. The state was not changed."""

    def __init__(self, step: int) -> None:
        super().__init__(f"step {step}: the loss or its gradients are not finite; the state before it is kept")
        self.step = step


class Spent(NamedTuple):
    """The time that this process spent on a training."""

    steps: int
    finished: bool  # or stopped
    seconds: float
    steps_per_s: float  # without compilation, validation and saving
    waiting: float  # seconds, for data
    validating: float
    saving: float
    step_flops: float | None  # of one step, as XLA counts them; None where nothing does
    step_bytes: int  # moved to the device for one step


def init_state(method: Method, tx: optax.GradientTransformation, seed: int, example: Images) -> TrainState:
    """The state before the first step, for images of the example's shape."""
    init, key = jax.jit(method.init), jax.random.key(seed)  # without jit each layer would be compiled alone
    memory.insist_it_fits(init, key, example)
    variables = init(key, example)
    return TrainState(jnp.zeros((), jnp.int32), variables, tx.init(variables["params"]), jnp.array(True))


def train_step(
    method: Method,
    tx: optax.GradientTransformation,
    weak: augment.Weak,
    state: TrainState,
    episodes: Episode,
    key: Array,
    axis: str = "",
) -> Stepped:
    """One step of the training, on episodes [tasks, ...]. The key is the run's, the same for all steps.

    `axis` is the axis of over_devices(), where there is one. Each device then has an equal part of the tasks.
    """
    own = len(episodes.label)
    keys = jax.random.split(jax.random.fold_in(key, state.step), own * (jax.lax.axis_size(axis) if axis else 1))
    if axis:
        keys = jax.lax.dynamic_slice_in_dim(keys, own * jax.lax.axis_index(axis), own)

    def task_loss(params: Any, episode: Episode, key: Array) -> tuple[Array, Any]:
        support_key, query_key, method_key = jax.random.split(key, 3)
        support, query = episode.support, episode.query
        episode = episode.replace(
            support=support.replace(pixels=augment.weak(support_key, support.pixels, weak)),
            query=query.replace(pixels=augment.weak(query_key, query.pixels, weak)),
        )
        return method.loss({**state.variables, "params": params}, episode, method_key)

    def objective(params: Any) -> tuple[Array, Any]:
        if len(keys) == 1:  # a batch axis of one would only make the program slower
            loss, aux = task_loss(params, *jax.tree.map(lambda x: x[0], (episodes, keys)))
            return loss, jax.tree.map(lambda x: x[None], aux)
        losses, aux = jax.vmap(task_loss, in_axes=(None, 0, 0))(params, episodes, keys)
        return losses.mean(), aux

    (loss, aux), grads = jax.value_and_grad(objective, has_aux=True)(state.variables["params"])
    stats = jax.tree.map(lambda s: s.mean(0), aux["batch_stats"])  # the only place where episodes' statistics meet
    accuracy = (aux["logits"].argmax(-1) == episodes.label).mean()
    if axis:  # the only place where devices meet: all is float32 here, whatever the type of products
        loss, grads, stats, accuracy = jax.lax.pmean((loss, grads, stats, accuracy), axis)
    updates, optimizer = tx.update(grads, state.optimizer, state.variables["params"])
    params = optax.apply_updates(state.variables["params"], updates)
    finite = jax.tree.reduce(lambda so_far, x: so_far & jnp.isfinite(x).all(), (loss, grads), state.finite)
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
    axis: str = "",
) -> Stepped:
    """train_step() for one or several steps in one program, with a source's `resident` and `batch` instead of episodes.

    For several `steps`, `batch` is stack() of theirs, and the measured values have a step axis.
    """

    def one(state: TrainState, batch: Any) -> Stepped:
        return train_step(method, tx, weak, state, source.assemble(resident, batch), key, axis)

    return one(state, batch) if steps == 1 else jax.lax.scan(one, state, batch)


def over_devices(
    call: Callable[..., Stepped], devices: Mesh, steps: int, resident: Any = mesh.WHOLE, asked: bool = False
) -> Callable[..., Stepped]:
    """train_call() with its first five arguments given, as one program for all devices of a mesh with the axis "tasks".

    The state is whole on each device; the tasks of a batch are shared out; `resident` says how the source's data lie.
    Devices exchange their mean gradients once a step, in float32. (If instead the compiler shares out the work, it may
    sum bfloat16 gradients.) With `asked` the program has a fifth argument, a number of each device. Their sum is
    measured too: so all processes know, after the same step, whether one of them is asked to stop.
    """
    cut = mesh.CUT if steps == 1 else jax.P(None, mesh.AXIS)
    call = functools.partial(call, axis=mesh.AXIS)

    def with_asked(state: TrainState, resident: Any, batch: Any, key: Array, stop: Array) -> Stepped:
        state, measured = call(state, resident, batch, key)
        return state, measured | {ASKED: jax.lax.psum(stop.sum(), mesh.AXIS)}

    inputs = (mesh.WHOLE, resident, cut, mesh.WHOLE)
    if asked:
        return mesh.over(devices, with_asked, (*inputs, mesh.CUT), mesh.WHOLE)
    return mesh.over(devices, call, inputs, mesh.WHOLE)


def next_call(step: int, schedule: Schedule) -> int:
    """The number of steps of the next program: steps_per_call, or 1 if
    something is to be done before so many are over."""
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
    """Trains a method, with validation and checkpoints.

    The newest state is kept in workdir/last, and the best variables in workdir/best. A state in last/ was saved before
    the validation of its step, so a run that resumes begins with this validation.

    On a mesh the tasks of a step are shared out over its devices. Of several processes, which all call this, the first
    one alone reads and writes files, and all of them stop after the same step.

    Args:
      tx: the optimiser.
      weak: augmentation of all images.
      plan_of: step -> the Plan of its episodes.
      state: to start from, if workdir/last has none.
      seed: of augmentation and methods.
      validate: variables -> score. The largest score is the best, and of equal ones the earliest.
      workdir: for checkpoints, and for metrics.jsonl with the progress.
      stopping: once it returns True, the loop saves and returns.

    Raises:
      NotFinite: workdir/nonfinite.json then holds the plan of the step.
    """
    augment.check_weak(weak)
    entered = time.perf_counter()
    devices, many = source.mesh, mesh.processes() > 1
    state, (best, seconds) = mesh.from_first(lambda: resume(workdir, state, log), like=state)
    step = start = int(state.step)
    state = mesh.place(devices, state)
    if start:
        log(f"resumed from step {start} of {schedule.steps}")
    donated = 0 if backend.donates_state() else ()
    calls = {n: functools.partial(train_call, method, tx, weak, source, n) for n in (1, schedule.steps_per_call)}
    if devices:
        lie = mesh.specs(source.resident)
        calls = {steps: over_devices(call, devices, steps, lie, many) for steps, call in calls.items()}
    programs = {steps: backend.jit(call, donate_argnums=donated) for steps, call in calls.items()}
    key = jax.random.key(seed)
    batches = source.own_batches(plan_of, start, schedule.steps)
    waiting = validating = saving = starting = 0.0
    started: set[int] = set()
    with (
        mesh.by_first(MetricsFile, workdir / "metrics.jsonl", start, schedule.tensorboard, log) as metrics_file,
        mesh.by_first(checkpoints.Folder, workdir / "last") as last_folder,
        mesh.by_first(checkpoints.Folder, workdir / "best", 3) as best_folder,  # 3: for the older states in last/
    ):
        meter, looping = Meter(start, schedule.steps), time.perf_counter()
        asked: list[Array] = []  # whether a process was asked to stop, after the latest steps
        opened = looping - seconds

        def save(state: TrainState) -> float:
            began = time.perf_counter()
            best_folder.wait()  # the best that a state in last/ names must be on disk
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
                seconds = round(time.perf_counter() - opened, 2)
                metrics_file.write({"step": step, "val_score": score, "best_score": best["score"], "seconds": seconds})
                so_far = f"best {best['score']:.4f} at step {best['step']}"
                weights = checkpoints.weights_hash(state.variables)[:12]
                log(f"step {step}  validation {score:.4f}  {so_far}  weights {weights}")
                meter.exclude(time.perf_counter() - began)
            if step >= schedule.steps:
                break
            began, count, first = time.perf_counter(), next_call(step, schedule), step == start
            batch = stack([next(batches) for _ in range(count)])
            given = mesh.step_arguments(devices, batch, count, stopping)
            waiting += (waited := time.perf_counter() - began)
            if count in started:
                state, measured = programs[count](state, source.resident, given[0], key, *given[1:])
                meter.waited += waited
            else:
                with compiling("the training step", log):
                    memory.insist_it_fits(programs[count], state, source.resident, given[0], key, *given[1:])
                    state, measured = programs[count](state, source.resident, given[0], key, *given[1:])
                    jax.block_until_ready(measured)
                started.add(count)
                starting += time.perf_counter() - began
                meter.exclude(time.perf_counter() - began, count)
            step += count
            if many:
                asked.append(measured.pop(ASKED))
            meter.add(measured)
            saving_now = step % schedule.save_every == 0 or _due(step, schedule)
            logging = step % schedule.log_every == 0 or first or step == schedule.steps
            # Of several processes: after the step before this one, so that nobody waits for the step that has just begun.
            stop = stopping() if not many else len(asked) > 1 and bool(asked.pop(0) > 0)
            if (saving_now or logging or stop) and not bool(state.finite):
                save(state.replace(finite=jnp.array(True)))
                raise _not_finite(int(state.step), plan_of, seed, workdir)
            if logging:
                metrics_file.write({"step": step} | meter.read(step, schedule.tasks_per_step))
                log(meter.line())
            elif guess := meter.first_guess(step):
                log(guess)
            if saving_now or stop:
                saving += (took := save(state))
                meter.exclude(took)
            if stop:
                break
        jax.block_until_ready(state)
        stepping = time.perf_counter() - looping - starting - validating - saving
        saving += _timed(best_folder.wait) + _timed(last_folder.wait)
    mesh.together()  # nobody goes on, or ends, before the first process has written all
    steps, seconds, flops, moved = step - start, time.perf_counter() - entered, 0.0, 0
    if steps:
        batch = next(source.own_batches(plan_of, 0, 1))
        given = mesh.step_arguments(devices, batch, 1, stopping)
        flops = cost.flops(programs[1].lower(state, source.resident, given[0], key, *given[1:]))
        moved = sum(leaf.nbytes for leaf in jax.tree.leaves(batch) if isinstance(leaf, np.ndarray))
    speed = (steps - sum(started)) / max(stepping, 1e-9)
    return Spent(steps, step >= schedule.steps, seconds, speed, waiting, validating, saving, flops, moved)


def resume(
    workdir: Path, fresh: TrainState, log: Callable[[str], None]
) -> tuple[TrainState, tuple[dict[str, Any], float]]:
    """The newest undamaged state of a run, or `fresh`; its best validation {"score", "step"},
    and the seconds spent so far."""
    restored = checkpoints.restore(workdir / "last", fresh, damaged=lambda text: log(f"warning: {text}"))
    if not restored:
        return fresh, ({"score": -1.0, "step": 0}, 0.0)
    state, notes = restored
    step = notes["best"]["step"]
    if step and (fault := manifest.find_fault(workdir / "best" / str(step), checkpoints.READ)):
        raise UserError(f"{workdir}/best/{step}: {fault}; copy it back, or delete {workdir} to train again")
    return state, (notes["best"], notes["seconds"])


def _due(step: int, schedule: Schedule) -> bool:
    """Whether a validation follows this step."""
    return step > 0 and (step % schedule.validate_every == 0 or step == schedule.steps)


def _not_finite(step: int, plan_of: Callable[[int], Plan], seed: int, workdir: Path) -> NotFinite:
    plan = {name: np.asarray(rows).tolist() for name, rows in plan_of(step)._asdict().items()}
    if mesh.is_first():
        files.write_text(workdir / "nonfinite.json", json.dumps({"step": step, "seed": seed, "plan": plan}) + "\n")
    return NotFinite(step)


def _timed(work: Callable[..., Any], *arguments: Any) -> float:
    began = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began
