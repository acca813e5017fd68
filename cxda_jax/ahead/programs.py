"""The training step and the evaluation of a config, lowered for devices that this machine does not have."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from cxda_jax import augment, backend, cost, train
from cxda_jax.config import Config
from cxda_jax.data.episodes import Plan, mixed_spec
from cxda_jax.data.published import PUBLISHED, empty_store
from cxda_jax.data.sources import Source, gather, rows_of
from cxda_jax.data.store import DomainStore
from cxda_jax.errors import UserError
from cxda_jax.evaluation import compile_task
from cxda_jax.experiment import CALIBRATION_IMAGES, build_method, episode_spec, make_optimizer, make_schedule, open_data
from cxda_jax.study.settings import count_tasks
from cxda_jax.types import Images, Method


class Program(NamedTuple):
    """A lowered program, and how often a whole training runs it."""

    what: str  # "step" or "evaluation"
    lowered: Any
    tasks: int  # in one run, on all devices together
    runs: int
    flops: float  # of one device, counted before compilation, where the device's compiler counts none; else 0
    exchanged: int = 0  # bytes of the means over all devices


def open_sizes(config: Config, data_dir: str) -> DomainStore:
    """The config's data set; if it is a published one that is not prepared, a store of its sizes, whose images are black."""
    benchmark = config["benchmark"]
    prepared = (Path(data_dir) / str(config["data"].get("name")) / "store.json").exists()
    return empty_store(benchmark) if benchmark in PUBLISHED and not prepared else open_data(config, data_dir)


def lower_all(config: Config, store: DomainStore, mesh: Any, counts: bool) -> Iterator[Program]:
    """The training step, unless the method trains as another one, and the evaluation. The context is chips.devices().

    `counts` says whether the target's compiler counts operations.
    """
    method, chips = build_method(config, store), mesh.size
    tasks, schedule = config["train"]["tasks_per_step"], make_schedule(config, store)
    if tasks % chips and not method.trains_as:
        fix = f"make it a multiple of {chips}"
        raise UserError(f"tasks_per_step={tasks} cannot be shared by {chips} chips; {fix}")
    source = Source((), lambda *_: iter(()), gather(store))
    image = store.images.shape[1:]
    pixels: Any = jax.ShapeDtypeStruct((2, *image), jnp.uint8)
    domains: Any = jax.ShapeDtypeStruct((2,), jnp.int32)
    example = Images(pixels, domains)
    variables = jax.eval_shape(method.init, _keys(()), example)
    if not method.trains_as:
        yield _step(config, method, source, _shapes(rows_of(store)), variables, schedule.steps, mesh, counts)
    validations = -(-schedule.steps // schedule.validate_every)
    evaluated = validations * count_tasks(config, store, "val") + count_tasks(config, store, "test")
    if method.calibrate:
        images = jax.ShapeDtypeStruct((CALIBRATION_IMAGES, *image), jnp.uint8)
        variables = jax.eval_shape(method.calibrate, variables, images)
    yield _evaluation(config, method, source, _shapes(rows_of(store)), variables, evaluated, mesh, counts)


def _step(
    config: Config, method: Method, source: Source, resident: Any, variables: Any, steps: int, mesh: Any, counts: bool
) -> Program:
    tx, tasks = make_optimizer(**config["optimizer"], steps=steps), config["train"]["tasks_per_step"]
    call = functools.partial(train.train_call, method, tx, augment.Weak(**config["augment"]), source, 1)
    flag: Any = jax.ShapeDtypeStruct((), jnp.bool_)
    number: Any = jax.ShapeDtypeStruct((), jnp.int32)
    state = train.TrainState(number, variables, jax.eval_shape(tx.init, variables["params"]), flag)
    whole, cut = NamedSharding(mesh, jax.P()), NamedSharding(mesh, jax.P("tasks"))
    step = backend.jit(train.over_devices(call, mesh, 1) if mesh.size > 1 else call, donate_argnums=0)
    batch = _plan(config, method, tasks)
    lowered = step.lower(_at(whole, state), _at(whole, resident), _at(cut, batch), _at(whole, _keys(())))
    own = _plan(config, method, tasks // mesh.size)
    flops = 0.0 if counts else cost.flops(jax.jit(call).lower(state, resident, own, _keys(()))) or 0.0
    exchanged = sum(4 * leaf.size for leaf in jax.tree.leaves(variables)) + 8  # loss and accuracy too
    return Program("step", lowered, tasks, steps, flops, exchanged)


def _evaluation(
    config: Config,
    method: Method,
    source: Source,
    resident: Any,
    variables: Any,
    evaluated: int,
    mesh: Any,
    counts: bool,
) -> Program:
    """The program that adapts to some tasks and answers, or for a method that fine-tunes the one that adapts to a task."""
    each = (config["evaluation"]["per_call"] or backend.default_tasks_per_call()) if method.feed_forward else 1
    tasks, evaluator = each * mesh.size if method.feed_forward else 1, compile_task(method, source)
    whole, cut = NamedSharding(mesh, jax.P()), NamedSharding(mesh, jax.P("tasks"))

    def arguments(count: int) -> tuple[Any, Any]:
        plan = _plan(config, method, count, training=False)
        return jax.eval_shape(source.assemble, resident, plan), _keys((count,))

    if method.feed_forward:
        program: Any = evaluator.answer
        episodes, keys = arguments(tasks)
        placed, plain = (_at(cut, episodes), _at(cut, keys)), arguments(each)
    else:
        program = evaluator.adapt
        episodes, keys = arguments(1)
        plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (episodes.support, keys))
        placed = _at(whole, plain)
    lowered = program.lower(_at(whole, variables), *placed)
    flops = 0.0 if counts else cost.flops(program.lower(variables, *plain)) or 0.0
    return Program("evaluation", lowered, tasks, -(-evaluated // tasks), flops)


def _plan(config: Config, method: Method, tasks: int, training: bool = True) -> Plan:
    """The shapes of a Plan of the config's tasks."""
    spec = episode_spec(config)
    spec = mixed_spec(spec) if training and method.trains_mixed else spec
    rows = (spec.num_domains * spec.per_domain, spec.num_query)
    shapes: list[Any] = [jax.ShapeDtypeStruct((tasks, count), jnp.int32) for count in rows]
    return Plan(*shapes)


def _keys(shape: tuple[int, ...]) -> Any:
    """The shape of keys for random numbers."""
    return jax.eval_shape(lambda: jax.random.split(jax.random.key(0), shape) if shape else jax.random.key(0))


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), tree)


def _at(sharding: NamedSharding, tree: Any) -> Any:
    """The shapes of a tree, each placed so."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
