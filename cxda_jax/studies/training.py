"""Trains a run in its folder: data, training, plain weights, test. launch/train.py says what the folder then holds."""

import contextlib
import functools
import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cxda_jax import __version__
from cxda_jax.config.reading import Config, of_method
from cxda_jax.config.registry import METHODS, STARTS
from cxda_jax.data.store import SPLITS
from cxda_jax.disk import checkpoints, files, folders, models
from cxda_jax.errors import UserError
from cxda_jax.machine import backend, cost, memory, mesh, stops
from cxda_jax.machine.progress import duration, say
from cxda_jax.nets.pretrained import start_from_weights
from cxda_jax.studies import identity
from cxda_jax.studies.finding import Evaluation, restore_best
from cxda_jax.studies.folders import read_result
from cxda_jax.studies.gain import measure_gain
from cxda_jax.studies.result import Result
from cxda_jax.studies.sheet import draw_strips
from cxda_jax.studies.statistics import measure
from cxda_jax.studies.testing import compiled, device, evaluate_run, keep, score
from cxda_jax.studies.text import corrections, table
from cxda_jax.training import frozen, loop
from cxda_jax.training.evaluation import Evaluator, TaskTable
from cxda_jax.training.experiment import Experiment, build, build_method, build_on, tasks_per_step
from cxda_jax.types import Variables

NETWORK = "network"  # the folder, in the run of a method on a network, of the training of that network


class Trained(NamedTuple):
    """A training that is over, and what its test needs."""

    experiment: Experiment
    workdir: Path
    evaluator: Evaluator
    record: identity.Record


@memory.named("train.tasks_per_step, net.width, episode.* or evaluation.per_call")
def train_run(config: Config, workdir: Path, data_dir: str | Path, other_data: bool = False) -> Trained | None:
    """Trains what the config says in `workdir`, or goes on with the training that is there.

    It returns what test_run() takes; None where a finished run was tested already. With `other_data` a run goes on with
    other data than it was begun with; its results are marked.
    """
    compilations = cost.Compilations()
    experiment, state = prepared(config, data_dir, mesh.mesh_for(tasks_per_step(config)))
    facts = {"package": __version__, "commit": commit(), "data": experiment.store.sha256, "config": config}
    identity.insist_on_agreement(facts)
    mesh.from_first(lambda: insist_on_folder(workdir))
    network = functools.partial(network_of, experiment, workdir / NETWORK, data_dir, other_data)
    with mesh.by_first(files.locked, workdir):
        try:
            return run(experiment, state, workdir, compilations, other_data, network)
        except loop.NotFinite as e:
            advice = f"the same command with --replay_step={e.step} shows its episode"
            raise UserError(f"{e}; {advice}; a lower optimizer.learning_rate may help") from None


def network_of(experiment: Experiment, workdir: Path, data_dir: str | Path, other_data: bool) -> Variables:
    """The network that the method of an experiment takes: the best one of a training, which is a run in `workdir`.

    The folder around it gets right.json: how often that network is right.
    """
    config = frozen.network_config(experiment.config, experiment.method, experiment.recipe.held_out)
    if trained := train_run(config, workdir, data_dir, other_data):
        test_run(trained)
    training = build_on(config, experiment.store, ())
    network = restore_best(workdir, training)[0]
    right = frozen.network_accuracy(training, network)
    say(str(right))
    if mesh.is_first():
        files.write_text(workdir.with_name("right.json"), json.dumps(right._asdict()) + "\n")
    return network


def insist_on_folder(workdir: Path) -> None:
    folders.insist_on_writable(workdir, "--workdir")
    workdir.mkdir(parents=True, exist_ok=True)


def prepared(config: Config, data_dir: str | Path, devices: Mesh | None = None) -> tuple[Experiment, loop.TrainState]:
    """The experiment and the state at step 0."""
    experiment = build(config, data_dir, devices=devices)
    method = experiment.method
    if method.trains_as:
        raise UserError(
            f"method {method.name!r} starts from the runs of {method.trains_as!r} and trains nothing; train that, then "
            f"cxda evaluate --runs=... --methods={method.name}"
        )
    state = loop.init_state(method, experiment.recipe.optimizer, config.seed, experiment.example)
    return experiment, state.replace(variables=start_from_weights(config.net, state.variables))


def run(
    experiment: Experiment, state: loop.TrainState, workdir: Path, compilations: cost.Compilations, other_data: bool,
    network: Callable[[], Variables],
) -> Trained | None:  # fmt: skip
    """Trains in a folder that this process has locked. network() gives the network of a frozen method."""
    record, earlier = mesh.from_first(lambda: claimed(experiment, workdir, other_data))
    record = identity.Record(**{**record, "marks": tuple(record["marks"])})
    if earlier:
        say(f"{workdir}: trained and tested already; cxda evaluate --runs={workdir} tests it again\n{earlier}")
        return None
    evaluator, steps = compiled(experiment), experiment.schedule.steps
    announce(experiment)
    learn(experiment, state, workdir, evaluator, network, compilations)
    return Trained(experiment, workdir, evaluator, record._replace(steps=steps, reached_step=steps))


def announce(experiment: Experiment) -> None:
    config, store = experiment.config, experiment.store
    counts = ", ".join(f"{len(store.domains(split))} {split}" for split in SPLITS)
    used, there = (experiment.source.mesh.size if experiment.source.mesh else 1), jax.device_count()
    if used < there:
        fix = f"a multiple of {there} uses all"
        say(f"on {used} of {there} devices: train.tasks_per_step={config.train.tasks_per_step}; {fix}")
    what = f"{len(store.labels)} images of {store.num_classes} classes; domains: {counts}"
    steps = experiment.schedule.steps
    say(f"{experiment.method.name} on {store.info.name}: {what}; {steps} steps, seed {config.seed}")


def learn(
    experiment: Experiment, state: loop.TrainState, workdir: Path, evaluator: Evaluator,
    network: Callable[[], Variables], compilations: cost.Compilations,
) -> None:  # fmt: skip
    """Trains, and keeps the best variables in workdir/best and what it cost in cost.json."""
    config = experiment.config
    learning, state = frozen.begin(experiment, state, network)
    judge = evaluator if learning is experiment else compiled(learning)

    def validated(of: Experiment, variables: Variables) -> TaskTable:
        # Several processes validate together; a signal to one of them then waits until all have ended it.
        with stops.interruptible() if mesh.processes() == 1 else contextlib.nullcontext():
            return score(of, judge, variables, "val", experiment.num_tasks["val"])

    def validate(variables: Variables) -> float:
        return getattr(validated(learning, variables), config.evaluation.select)

    chosen_at_the_end = learning is not experiment
    choose = frozen.selection(learning, state.variables, validate, validated) if chosen_at_the_end else None
    programs = loop.Programs(learning.learner, learning.source, learning.schedule.steps_per_call)
    with stops.deferred() as stopping:
        spent = loop.train(
            programs, learning.train_plans, state, learning.schedule, loop.Validation(validate, choose),
            loop.Run(workdir, say, stopping), config.seed,
        )  # fmt: skip
    if not spent.finished:  # another process was asked to stop; this one would have ended above
        raise stops.Stopped(signal.SIGTERM)
    of_step = programs.cost_of_step(state) if spent.steps else None
    if of_step and mesh.is_first():
        passport = describe_cost(spent, of_step, compilations, config.net.dtype)
        files.write_text(workdir / "cost.json", json.dumps(passport, indent=1) + "\n")
        say(cost_line(passport))


def test_run(trained: Trained) -> None:
    """Tests the best variables of a training, and writes them with their scores to workdir/model."""
    with mesh.by_first(files.locked, trained.workdir):
        _test(*trained)


def _test(experiment: Experiment, workdir: Path, evaluator: Evaluator, record: identity.Record) -> None:
    config, store = experiment.config, experiment.store
    variables, notes = restore_best(workdir, experiment)
    known = {**notes, "config_hash": config.hash, "data_hash": store.sha256}
    write = mesh.by_first(
        functools.partial, models.write_model, workdir / "model", variables, config, known, record._asdict()
    )
    write()  # a test that is broken off leaves a model that can be tested
    evaluation = Evaluation(workdir, workdir, experiment.method.name, config, record, record.marks)
    result = evaluate_run(evaluation, experiment, evaluator, (variables, notes["step"]))
    if result:
        keep(result, store)
    gain = measure_gain(experiment, variables)
    if result:
        write(make_card(experiment, notes["step"], result, gain), calibrations(experiment, variables))
        say("\n".join(filter(None, [table([result]), corrections(result)])))


def tested_before(workdir: Path, experiment: Experiment) -> str:
    """The table of the test that this code made of the finished run; "" where anything of it is missing or damaged."""
    config, store = experiment.config, experiment.store
    like = jax.eval_shape(experiment.method.init, jax.random.key(0), experiment.example)
    try:
        result, card = read_result(workdir, workdir), models.read_card(workdir / "model")
        models.read_model(workdir / "model", like)
        best = checkpoints.restore(workdir / "best", like)
    except (UserError, OSError, ValueError, ArithmeticError):
        return ""
    now = {
        "config_hash": config.hash, "data_hash": store.sha256,
        "weights_hash": best and checkpoints.weights_hash(best[0]),
        "reached_step": experiment.schedule.steps, "num_tasks": experiment.num_tasks["test"],
        "package": __version__,
    }  # fmt: skip
    known = card.commit == commit() and not has_changes(card.commit)
    same = known and all(getattr(result, name) == value for name, value in now.items())
    return table([result]) if same else ""


def has_changes(commit: str) -> bool:
    """Whether the clone held changes that its commit lacks. Then equal commits do not tell of equal code."""
    return commit.endswith("+")


def claimed(experiment: Experiment, workdir: Path, other_data: bool) -> tuple[dict[str, Any], str]:
    """The fields of the record that identity.claim() returns, and what tested_before() does."""
    record = identity.claim(workdir, experiment.config, experiment.store, other_data, say)
    return record._asdict(), tested_before(workdir, experiment)


def make_card(experiment: Experiment, step: int, result: Result, gain: models.Gain | None) -> models.Card:
    """The card of a model, with the scores of its test."""
    info, store = experiment.store.info, experiment.store
    return models.Card(
        method=experiment.method.name, seed=experiment.config.seed, step=step, data=info.name,
        data_hash=store.sha256, provenance=info.provenance, licence=info.licence,
        class_names=info.class_names, shape=store.images.shape[1:], fit=info.fit,
        background=info.background, mean=info.mean, std=info.std, metric=experiment.metric,
        test=with_intervals(result), gain=gain, package=__version__, commit=commit(),
        looks=models.Looks.of(np.asarray(experiment.known_images().images)),
    )  # fmt: skip


def with_intervals(result: Result) -> dict[str, float]:
    """The scores of a result and their 95 % bootstrap intervals over the tasks; see Card.test."""
    scores = {"avg": result.tasks.weighted, "w10": result.tasks.scores}
    found = measure(scores, {name: {0: {name: 1.0}} for name in scores}, worst=True)
    spans = {name: getattr(difference, name) for name, difference in found.items()}
    ends = {f"{name}_{end}": round(getattr(span, end), 2) for name, span in spans.items() for end in ("low", "high")}
    return ends | {name: getattr(result, name) for name in ("avg", "w10", "num_tasks")}


def commit() -> str:
    """The commit of the clone that this package runs in; see Card.commit."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists() or not shutil.which("git"):
        return ""
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--match="]
    return subprocess.run(describe, capture_output=True, text=True).stdout.strip()


def calibrations(experiment: Experiment, variables: Variables) -> dict[str, Any]:
    """By name, what the methods that start from this training need to know of its images."""
    found, config, known = {}, experiment.config, None
    if experiment.method.name not in STARTS:
        return found
    for name in METHODS:
        try:
            method = build_method(of_method(config, name), experiment.store)
        except UserError:  # its network has no place for the method
            continue
        if method.trains_as and method.calibrate:
            known = known or experiment.known_images()
            found[name] = backend.jit(method.calibrate)(variables, known)["calibration"]
    return found


def replay(config: Config, workdir: Path, data_dir: str | Path, other_data: bool, step: int) -> str:
    """Draws the episodes of a step and says what loss they have; trains nothing,
    and takes a run that is under way too."""
    experiment, fresh = prepared(config, data_dir)
    if not (workdir / "config.json").exists():
        raise UserError(f"--workdir={workdir}: no run there, --replay_step shows an episode of one; train it first")
    identity.check_config(workdir, experiment.config)
    identity.check_data(workdir, identity.read_record(workdir), experiment.store, other_data)
    if step >= experiment.schedule.steps:
        raise UserError(f"--replay_step={step}: the run has {experiment.schedule.steps} steps, numbered from 0")
    state, _ = checkpoints.restore(workdir / "last", fresh) or (fresh, {})
    known, plans, source, store = int(state.step), experiment.train_plans, experiment.source, experiment.store
    call = functools.partial(loop.train_call, experiment.learner, source, 1)
    begun, key = state.replace(step=jnp.asarray(step, jnp.int32)), jax.random.key(experiment.config.seed)
    batch = next(iter(source.batches(plans, step, step + 1)))
    after, measured = backend.jit(call)(begun, source.resident, batch, key)
    strips, domains = [], store.row_domains()
    for support, query in zip(*plans(step), strict=True):
        for what, rows in (("support", support), ("query", query)):
            for domain in dict.fromkeys(domains[rows].tolist()):
                chosen = rows[domains[rows] == domain]
                names = [store.info.class_names[label] for label in store.labels[chosen]]
                strips.append((f"{what}, {store.domain_names[domain]}", store.images[chosen], names))
    path = workdir / f"step{step}.png"
    files.write_whole(path, lambda partial: draw_strips(partial, strips))
    whose = "" if known == step else f", with the weights of step {known}"
    finite = "" if bool(after.finite) else "; it or its gradients are NOT FINITE"
    return (
        f"step {step}: loss {float(measured['loss']):.6g}, accuracy {float(measured['accuracy']):.3f}"
        f"{whose}{finite}; {path}"
    )


def describe_cost(
    spent: loop.Spent, of_step: tuple[float | None, int], compilations: cost.Compilations, dtype: str
) -> dict[str, Any]:
    """The cost of the training of this process, and the share of the machine's
    matrix-product peak that its steps reached."""
    peak, (counted, moved) = cost.matmul_peak(dtype=jnp.dtype(dtype)), of_step
    memory, where = cost.peak_memory()
    return {
        "seconds": spent.seconds,
        "validating_s": spent.validating,
        "saving_s": spent.saving,
        "waiting_for_data_s": spent.waiting,
        "compiling_s": compilations.seconds,
        "programs": compilations.programs,
        "programs_from_cache": compilations.cached,
        "steps": spent.steps,
        "steps_per_s": spent.steps_per_s,
        "step_gflop": None if counted is None else counted / 1e9,
        "peak_gflop_per_s": peak / 1e9,
        "of_peak": None if counted is None else counted * spent.steps_per_s / peak,
        "bytes_to_device_per_step": moved,
        "peak_memory_bytes": memory,
        "memory_of": where,
        "dtype": dtype,
        "device": device(),
    }


def cost_line(c: dict[str, Any]) -> str:
    of_peak = "operations were not counted"
    if c["of_peak"] is not None:
        of_peak = f"{c['step_gflop']:.1f} GFLOP each: {c['of_peak']:.0%} of the {c['dtype']} matrix-product peak"
    return (
        f"cost: {duration(c['seconds'])} for {c['steps']} steps ({duration(c['validating_s'])} validating, "
        f"{c['saving_s']:.1f}s saving, {c['waiting_for_data_s']:.1f}s waiting for data); compiling, before and in it: "
        f"{c['compiling_s']:.1f}s, {c['programs_from_cache']} of {c['programs']} programs from the cache\n"
        f"      {c['steps_per_s']:.1f} steps/s, {of_peak}; "
        f"{c['peak_memory_bytes'] / 1e9:.1f} GB of {c['memory_of']} memory at most; "
        f"{c['bytes_to_device_per_step']:,} bytes to the device a step"
    )
