"""The training step and the evaluation of a config, lowered for devices that this machine does not have."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from cxda_jax import augment, backend, train
from cxda_jax.config import Config
from cxda_jax.data.episodes import Plan, mixed_spec
from cxda_jax.data.published import PUBLISHED, empty_store
from cxda_jax.data.sources import Source, gather
from cxda_jax.data.store import DomainStore
from cxda_jax.errors import UserError
from cxda_jax.evaluation import compile_task
from cxda_jax.experiment import build_method, episode_spec, make_optimizer, make_schedule, open_data
from cxda_jax.study.settings import count_tasks
from cxda_jax.types import Images, Method, Variables


class Program(NamedTuple):
    """A lowered program, and how often a whole training runs it."""

    what: str  # "step" or "evaluation"
    lowered: Any
    tasks: int  # in one run, on all devices together
    runs: int


def open_sizes(config: Config, data_dir: str) -> DomainStore:
    """The config's data set; if it is a published one that is not prepared, a store of its sizes, whose images are black."""
    benchmark = config["benchmark"]
    prepared = (Path(data_dir) / str(config["data"].get("name")) / "store.json").exists()
    return empty_store(benchmark) if benchmark in PUBLISHED and not prepared else open_data(config, data_dir)


def lower_all(config: Config, store: DomainStore, mesh: Any) -> list[Program]:
    """The training step, unless the method trains as another one, and the evaluation. The context is chips.devices()."""
    method, chips = build_method(config, store), mesh.size
    tasks, resident = config["train"]["tasks_per_step"], _shapes((store.images, store.labels, store.row_domains()))
    key, schedule = jax.eval_shape(lambda: jax.random.key(0)), make_schedule(config, store)
    example = Images(jax.ShapeDtypeStruct((2, *store.images.shape[1:]), jnp.uint8), jax.ShapeDtypeStruct((2,), jnp.int32))
    variables, found = jax.eval_shape(method.init, key, example), []
    whole, cut = NamedSharding(mesh, jax.P()), NamedSharding(mesh, jax.P("tasks"))
    if not method.trains_as:
        if tasks % chips:
            raise UserError(f"train.tasks_per_step={tasks} cannot be shared by {chips} chips; make it a multiple of {chips}")
        tx = make_optimizer(**config["optimizer"], steps=schedule.steps)
        source = Source((), lambda *_: iter(()), gather)
        call = functools.partial(train.train_call, method, tx, augment.Weak(**config["augment"]), source, 1)
        step = backend.jit(train.over_devices(call, mesh, 1) if chips > 1 else call, donate_argnums=0)
        flag, number = jax.ShapeDtypeStruct((), jnp.bool_), jax.ShapeDtypeStruct((), jnp.int32)
        state = train.TrainState(number, variables, jax.eval_shape(tx.init, variables["params"]), flag)
        arguments = _at(whole, state), _at(whole, resident), _at(cut, _plan(config, method, tasks)), _at(whole, key)
        found.append(Program("step", step.lower(*arguments), tasks, schedule.steps))
    validations = -(-schedule.steps // schedule.validate_every)
    evaluated = validations * count_tasks(config, store, "val") + count_tasks(config, store, "test")
    return [*found, _evaluation(config, method, variables, store, evaluated, mesh)]


def _evaluation(
    config: Config, method: Method, variables: Variables, store: DomainStore, evaluated: int, mesh: Any
) -> Program:
    """The program that adapts to some tasks and answers, or for a method that fine-tunes the one that adapts to a task."""
    whole, cut = NamedSharding(mesh, jax.P()), NamedSharding(mesh, jax.P("tasks"))
    tasks = mesh.size * (config["evaluation"]["per_call"] or backend.default_tasks_per_call())
    if method.calibrate:
        images = jax.ShapeDtypeStruct((2000, *store.images.shape[1:]), jnp.uint8)
        variables = jax.eval_shape(method.calibrate, variables, images)
    evaluator = compile_task(method, Source((), lambda *_: iter(()), gather))
    resident = _shapes((store.images, store.labels, store.row_domains()))
    episodes = jax.eval_shape(gather, resident, _plan(config, method, tasks, training=False))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), tasks))
    if method.feed_forward:
        lowered: Any = evaluator.answer
        lowered = lowered.lower(_at(whole, variables), _at(cut, episodes), _at(cut, keys))
        return Program("evaluation", lowered, tasks, -(-evaluated // tasks))
    support, key = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (episodes.support, keys))
    adapt: Any = evaluator.adapt
    return Program("evaluation", adapt.lower(_at(whole, variables), _at(whole, support), _at(whole, key)), 1, evaluated)


def _plan(config: Config, method: Method, tasks: int, training: bool = True) -> Plan:
    """The shapes of a Plan of the config's tasks."""
    spec = episode_spec(config)
    spec = mixed_spec(spec) if training and method.trains_mixed else spec
    rows = (spec.num_domains * spec.per_domain, spec.num_query)
    return Plan(*(jax.ShapeDtypeStruct((tasks, count), jnp.int32) for count in rows))


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), tree)


def _at(sharding: NamedSharding, tree: Any) -> Any:
    """The shapes of a tree, each placed so."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
