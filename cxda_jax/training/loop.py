"""The training loop: episodic meta-training with validation, checkpoints and exact resume.

It knows no method, network or data set. Step t is a pure function of the state, the seed and t. So a run that was
killed and started again ends with the same parameters as a run that was not killed. If a loss or a gradient is not
finite, the program leaves the state as it was, and the run stops and names the episode.

The newest state is kept in workdir/last, and the best variables in workdir/best. A state in last/ was saved before the
validation of its step, so a run that resumes begins with this validation. A training without a workdir, such as those
of cxda_jax.fit, writes no file and keeps its best variables in memory.

On a mesh the tasks of a step are shared out over its devices. Of several processes, which all train, the first one
alone reads and writes files, and all of them stop after the same step.
"""

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh

from cxda_jax.data import augment
from cxda_jax.data.episodes import Plan
from cxda_jax.data.sources import Source
from cxda_jax.disk import checkpoints, files, manifest
from cxda_jax.errors import UserError
from cxda_jax.machine import backend, cost, memory, mesh
from cxda_jax.machine.progress import Meter, MetricsFile, compiling
from cxda_jax.types import Array, Episode, Images, Method, Variables

if TYPE_CHECKING:
    from cxda_jax.training.pace import Pace

STOP = "stop"  # among what a step measures: the number of devices whose process is asked to stop


class TrainState(struct.PyTreeNode):
    """All that a step changes."""

    step: Array  # steps so far
    variables: Variables
    optimizer: Any
    finite: Any = np.True_  # whether all losses and gradients were; if not, further steps change nothing


Stepped = tuple[TrainState, dict[str, Array]]  # the state after steps, and their measured loss and accuracy


class Learner(NamedTuple):
    """The rule of a training's steps.

    Attributes:
      weak: the augmentation of all images.
      axis: of the mesh over whose devices the tasks of a step are shared out; "" where one has them all.
    """

    method: Method
    optimizer: optax.GradientTransformation
    weak: augment.Weak
    axis: str = ""


class Schedule(NamedTuple):
    """The length of a training, and the times of what is done between steps. Intervals are in steps.

    A Pace, in pace.py, is one whose end comes nearer where time is short.
    """

    steps: int
    validate_every: int
    log_every: int
    save_every: int
    tasks_per_step: int = 1
    tensorboard: bool = False  # whether to write event files too
    steps_per_call: int = 1  # in one program, if nothing is to be done between them

    def due(self, step: int) -> bool:
        """Whether a validation follows this step."""
        return step > 0 and (step % self.validate_every == 0 or step == self.steps)

    def next_call(self, step: int) -> int:
        """The number of steps of the next program: steps_per_call, or 1 if something is to be done before so many are
        over."""
        intervals = (self.log_every, self.save_every, self.validate_every)
        stop = min(self.steps, *(step // every * every + every for every in intervals))
        return self.steps_per_call if step + self.steps_per_call <= stop else 1

    def before_step(self, state: TrainState) -> TrainState:
        """The state with what the schedule changes in it before a step."""
        return state

    def after_step(self, step: int, wait: Callable[[], Any]) -> None:
        """Hears that so many steps are taken; wait(), now or later, returns when they are done."""


class Validation(NamedTuple):
    """How the best variables of a training are found.

    Attributes:
      score: variables -> score. The largest one is the best, and of equal ones the earliest.
      choose: (the best variables, their score) -> those that are kept in their place, once the last step is over.
    """

    score: Callable[[Variables], float]
    choose: Callable[[Variables, float], Variables] | None = None


class Run(NamedTuple):
    """The place and the surroundings of a training.

    Attributes:
      workdir: for checkpoints, and for metrics.jsonl with the progress; None: no file is written.
      stopping: once it returns True, the loop saves and returns.
    """

    workdir: Path | None
    log: Callable[[str], None] = print
    stopping: Callable[[], bool] = lambda: False


class NotFinite(UserError):
    """A step whose loss or gradients were not finite. The state was not changed;
    workdir/nonfinite.json has its plan."""

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
    best: Variables | None  # of a training without files that came to its end


def init_state(method: Method, tx: optax.GradientTransformation, seed: int, example: Images) -> TrainState:
    """The state before the first step, for images of the example's shape."""
    return state_of(init_variables(method, seed, example), tx)


def init_variables(method: Method, seed: int, example: Images) -> Variables:
    """New variables, for images of the example's shape."""
    init, key = backend.jit(method.init, effort=1), jax.random.key(seed)  # without jit each layer is compiled alone
    memory.insist_it_fits(init, key, example)
    return init(key, example)


def state_of(variables: Variables, tx: optax.GradientTransformation) -> TrainState:
    """The state before the first step, with these variables."""
    optimizer = backend.jit(tx.init, effort=1)(variables["params"])
    return TrainState(jnp.zeros((), jnp.int32), variables, optimizer, jnp.array(True))


def train_step(learner: Learner, state: TrainState, episodes: Episode, key: Array) -> Stepped:
    """One step of the training, on episodes [tasks, ...]. The key is the run's, the same for all steps.

    Where the learner has the axis of over_devices(), each device has an equal part of the tasks.
    """
    (method, tx, weak, axis), own = learner, len(episodes.label)
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
    learner: Learner, source: Source, steps: int, state: TrainState, resident: Any, batch: Any, key: Array
) -> Stepped:
    """train_step() for one or several steps in one program, with a source's `resident` and `batch` instead of episodes.

    For several `steps`, `batch` has theirs stacked along a first axis, and so are the measured values.
    """

    def one(state: TrainState, batch: Any) -> Stepped:
        return train_step(learner, state, source.assemble(resident, batch), key)

    return one(state, batch) if steps == 1 else jax.lax.scan(one, state, batch)


def over_devices(
    learner: Learner, source: Source, devices: Mesh, steps: int, resident: Any = mesh.WHOLE, asked: bool = False
) -> Callable[..., Stepped]:
    """train_call() with its first three arguments given, as one program for all devices of a mesh with the axis
    "tasks".

    The state is whole on each device; the tasks of a batch are shared out; `resident` says how the source's data lie.
    Devices exchange their mean gradients once a step, in float32. (If instead the compiler shares out the work, it may
    sum bfloat16 gradients.) With `asked` the program has a fifth argument, a number of each device. Their sum is
    measured too: so all processes know, after the same step, whether one of them is asked to stop.
    """
    cut = mesh.CUT if steps == 1 else jax.P(None, mesh.AXIS)
    call = functools.partial(train_call, learner._replace(axis=mesh.AXIS), source, steps)

    def with_asked(state: TrainState, resident: Any, batch: Any, key: Array, stop: Array) -> Stepped:
        state, measured = call(state, resident, batch, key)
        return state, measured | {STOP: jax.lax.psum(stop.sum(), mesh.AXIS)}

    inputs = (mesh.WHOLE, resident, cut, mesh.WHOLE)
    if asked:
        return mesh.over(devices, with_asked, (*inputs, mesh.CUT), mesh.WHOLE)
    return mesh.over(devices, call, inputs, mesh.WHOLE)


class Programs:
    """The compiled steps of a training: one step, and several in one program."""

    def __init__(self, learner: Learner, source: Source, steps_per_call: int = 1, effort: int = 3):
        self.source = source
        self.batch: Any = None  # the latest
        self.started: set[int] = set()  # the numbers of steps whose programs have run
        donated = 0 if backend.donates_state() else ()
        calls: dict[int, Callable[..., Stepped]] = {
            n: functools.partial(train_call, learner, source, n) for n in (1, steps_per_call)
        }
        if devices := source.mesh:
            lie, asked = mesh.specs(source.resident), mesh.processes() > 1
            calls = {n: over_devices(learner, source, devices, n, lie, asked) for n in calls}
        self.programs = {n: backend.jit(call, effort=effort, donate_argnums=donated) for n, call in calls.items()}

    def arguments(
        self, batches: Iterator[Any], steps: int, key: Array, stopping: Callable[[], bool] = lambda: False
    ) -> tuple[Any, ...]:
        """The arguments of the program of so many steps, but for the state. The key is the run's."""
        drawn = [next(batches) for _ in range(steps)]
        self.batch, given = drawn[0], mesh.step_arguments(self.source.mesh, drawn, stopping)
        return self.source.resident, given[0], key, *given[1:]

    def __call__(
        self, steps: int, state: TrainState, arguments: tuple[Any, ...], log: Callable[[str], None]
    ) -> Stepped:
        """The state after the steps. The first call compiles, and waits for the result."""
        program = self.programs[steps]
        if steps in self.started:
            return program(state, *arguments)
        with compiling("the training step", log):
            memory.insist_it_fits(program, state, *arguments)
            state, measured = jax.block_until_ready(program(state, *arguments))
        self.started.add(steps)
        return state, measured

    def cost_of_step(self, state: TrainState) -> tuple[float | None, int]:
        """The operations of one step, as XLA counts them, None where nothing does; and the bytes that it moves to the
        device. For programs that have run."""
        batch = self.batch
        form = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)  # a step may have taken its arrays
        flops = cost.flops(self.programs[1].lower(form, *self.arguments(iter([batch]), 1, jax.random.key(0))))
        return flops, sum(leaf.nbytes for leaf in jax.tree.leaves(batch) if isinstance(leaf, np.ndarray))


class Clock:
    """Counts the seconds of a training by what they go to."""

    def __init__(self, earlier: float):
        self.earlier, self.began = earlier, time.perf_counter()  # earlier: seconds of the runs before this one
        self.waiting = self.validating = self.saving = self.starting = 0.0  # for data; starting: of programs

    def add(self, what: str, began: float) -> float:
        """Counts the seconds since `began` for `what`, and returns them."""
        took = time.perf_counter() - began
        setattr(self, what, getattr(self, what) + took)
        return took

    def so_far(self) -> float:
        """The seconds since the training began, over all its resumptions."""
        return self.earlier + time.perf_counter() - self.began

    def stepping(self) -> float:
        return time.perf_counter() - self.began - self.starting - self.validating - self.saving


class Saver:
    """Keeps the newest state and the best variables of a training, and writes its metrics."""

    def __init__(
        self, run: Run, schedule: "Schedule | Pace", validation: Validation, start: int, best: dict[str, Any],
        clock: Clock,
    ):  # fmt: skip
        self.run, self.validation, self.best, self.clock = run, validation, best, clock
        self.stack = contextlib.ExitStack()
        self.variables: Variables | None = None  # the best that this process has found
        self.metrics: Any = mesh.NoWriter()
        self.last: Any = mesh.NoWriter()
        self.bests: Any = mesh.NoWriter()
        if run.workdir:
            opened = functools.partial(mesh.by_first, MetricsFile, run.workdir / "metrics.jsonl")
            self.metrics = self.stack.enter_context(opened(start, schedule.tensorboard, run.log))
            self.last = self.stack.enter_context(mesh.by_first(checkpoints.Folder, run.workdir / "last"))
            # Three, for the older states in last/, and what is chosen in the end.
            keep = 4 if validation.choose else 3
            self.bests = self.stack.enter_context(mesh.by_first(checkpoints.Folder, run.workdir / "best", keep))

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)

    def save(self, state: TrainState) -> float:
        """Saves the state, and returns the seconds that it took."""
        began = time.perf_counter()
        self.bests.wait()  # the best that a state in last/ names must be on disk
        self.last.save(int(state.step), state, {"best": self.best, "seconds": self.clock.so_far()})
        return self.clock.add("saving", began)

    def validate(self, step: int, variables: Variables) -> float:
        """Keeps the variables where they are the best so far, says how they did,
        and returns the seconds that it took."""
        began = time.perf_counter()
        score = self.validation.score(variables)
        took = self.clock.add("validating", began)
        if score > self.best["score"]:
            self.best, began = {"score": score, "step": step}, time.perf_counter()
            self.bests.save(step, variables, self.best)
            if self.validation.choose or not self.run.workdir:
                self.variables = mesh.local(variables)  # a later step may write into these arrays
            took += self.clock.add("saving", began)
        if not self.run.workdir:
            return took
        best, seconds = self.best, round(self.clock.so_far(), 2)
        self.metrics.write({"step": step, "val_score": score, "best_score": best["score"], "seconds": seconds})
        so_far = f"best {best['score']:.4f} at step {best['step']}"
        self.run.log(
            f"step {step}  validation {score:.4f}  {so_far}  weights {checkpoints.weights_hash(variables)[:12]}"
        )
        return took

    def choose(self, last: int, like: Variables) -> None:
        """Keeps what is chosen in place of the best variables, in best/ under a number above that of the last step."""
        best, choose = self.variables, self.validation.choose
        if not choose:
            return
        if best is None and self.run.workdir:  # an earlier process has found them
            folder = self.run.workdir / "best"
            best = mesh.from_first(lambda: checkpoints.restore(folder, mesh.local(like)), like=like)[0]
        assert best is not None  # the last step has a validation
        began = time.perf_counter()
        self.variables = choose(best, self.best["score"])
        self.clock.add("validating", began)
        self.bests.save(last + 1, self.variables, self.best)

    def wait(self) -> None:
        """Returns when all that was to be saved is on disk."""
        began = time.perf_counter()
        self.bests.wait()
        self.last.wait()
        self.clock.add("saving", began)


class Stopper:
    """Says after which step to stop. Several processes stop after the same one."""

    def __init__(self, stopping: Callable[[], bool]):
        self.stopping, self.many = stopping, mesh.processes() > 1
        self.asked: list[Array] = []  # whether a process was asked to stop, after the latest steps

    def after(self, measured: dict[str, Array]) -> bool:
        """Whether to stop after steps that measured this; takes the processes' own question out of it."""
        if not self.many:
            return self.stopping()
        self.asked.append(measured.pop(STOP))
        # The answer is that of the step before, so that nobody waits for the step that has just begun.
        return len(self.asked) > 1 and bool(self.asked.pop(0) > 0)


def train(
    programs: Programs,
    plan_of: Callable[[int], Any],
    state: TrainState,
    schedule: "Schedule | Pace",
    validation: Validation,
    run: Run,
    seed: int = 0,
) -> Spent:
    """Trains from the newest state in workdir/last, or else from this one. It raises NotFinite.

    Args:
      programs: of the learner and its source.
      plan_of: step -> the Plan of its episodes, or what else the source makes its batches of.
      seed: of augmentation and methods.
    """
    entered, source = time.perf_counter(), programs.source
    state, (best, earlier) = mesh.from_first(lambda: resume(run.workdir, state, run.log), like=state)
    step = start = int(state.step)
    if start:
        run.log(f"resumed from step {start} of {schedule.steps}")
    state, key = mesh.place(source.mesh, state), jax.random.key(seed)
    batches, started = source.own_batches(plan_of, start, schedule.steps), sum(programs.started)
    clock, meter, stopper, stop = Clock(earlier), Meter(start, schedule.steps), Stopper(run.stopping), False
    with Saver(run, schedule, validation, start, best, clock) as saver:
        while True:
            if schedule.due(step) and not stop:
                meter.exclude(saver.validate(step, state.variables))
            if stop or step >= schedule.steps:
                break
            began, count, first = time.perf_counter(), schedule.next_call(step), step == start
            compiles, arguments = count not in programs.started, programs.arguments(batches, count, key, run.stopping)
            waited = clock.add("waiting", began)
            state, measured = programs(count, schedule.before_step(state), arguments, run.log)
            if compiles:
                meter.exclude(clock.add("starting", began), count)
            else:
                meter.waited += waited
            step, stop = step + count, stopper.after(measured)
            meter.add(measured)
            schedule.after_step(step, functools.partial(jax.block_until_ready, {**measured}))
            saving = stop or step % schedule.save_every == 0 or schedule.due(step)
            logging = step % schedule.log_every == 0 or first or step == schedule.steps
            if (saving or logging) and not bool(state.finite):
                saver.save(state.replace(finite=jnp.array(True)))
                raise _not_finite(int(state.step), plan_of, run, seed)
            if logging:
                saver.metrics.write({"step": step} | meter.read(step, schedule.tasks_per_step))
                run.log(meter.line())
            elif guess := meter.first_guess(step):
                run.log(guess)
            if saving:
                meter.exclude(saver.save(state))
        jax.block_until_ready(state)
        stepping, finished = clock.stepping(), step >= schedule.steps
        if finished:
            saver.choose(step, state.variables)
        saver.wait()
    mesh.together()  # nobody goes on, or ends, before the first process has written all
    seconds, done = time.perf_counter() - entered, step - start
    speed = (done - sum(programs.started) + started) / max(stepping, 1e-9)
    kept = saver.variables if finished and not run.workdir else None
    return Spent(done, finished, seconds, speed, clock.waiting, clock.validating, clock.saving, kept)


def resume(
    workdir: Path | None, fresh: TrainState, log: Callable[[str], None]
) -> tuple[TrainState, tuple[dict[str, Any], float]]:
    """The newest undamaged state of a run, or `fresh`; its best validation {"score", "step"},
    and the seconds spent so far."""
    restored = workdir and checkpoints.restore(workdir / "last", fresh, damaged=lambda text: log(f"warning: {text}"))
    if not workdir or not restored:
        return fresh, ({"score": -1.0, "step": 0}, 0.0)
    state, notes = restored
    step = notes["best"]["step"]
    if step and (fault := manifest.find_fault(workdir / "best" / str(step), checkpoints.READ)):
        raise UserError(f"{workdir}/best/{step}: {fault}; copy it back, or delete {workdir} to train again")
    return state, (notes["best"], notes["seconds"])


def _not_finite(step: int, plan_of: Callable[[int], Plan], run: Run, seed: int) -> NotFinite:
    if run.workdir and mesh.is_first():
        plan = {name: np.asarray(rows).tolist() for name, rows in plan_of(step)._asdict().items()}
        told = {"step": step, "seed": seed, "plan": plan}
        files.write_text(run.workdir / "nonfinite.json", json.dumps(told) + "\n")
    return NotFinite(step)
