"""Data sets by their names, and build(config), which turns a plain config into all that a run needs."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from cxda_jax.config.fields import Config, lookup
from cxda_jax.config.registry import METHODS, STARTS
from cxda_jax.data import augment, glyphs, glyphs_c
from cxda_jax.data.episodes import (
    NO_ROWS,
    Context,
    Draw,
    EpisodeSpec,
    Plan,
    check_spec,
    domains_for,
    exhaustive,
    first_arrived,
    mixed_spec,
    sample_plans,
    split_part,
)
from cxda_jax.data.readers import cifar10, cifar_c, femnist, folder, iwildcam, qmnist, tiny_imagenet_c, unipen
from cxda_jax.data.readers.raw import RawData
from cxda_jax.data.sources import SOURCES, Source
from cxda_jax.data.store import SPLITS, DomainStore, open_store
from cxda_jax.disk.reading import system_fault
from cxda_jax.errors import UserError, brief, naming
from cxda_jax.machine import backend
from cxda_jax.methods.cxda_shares import VALIDATIONS
from cxda_jax.methods.optimizers import make_optimizer
from cxda_jax.training.loop import Learner, Schedule
from cxda_jax.training.metrics import metric_of
from cxda_jax.types import ADAPTER, TRUNK, Array, Episode, Frozen, Images, Known, Method, Variables

READERS: dict[str, Callable[..., RawData]] = {  # of raw files, for cxda prepare; see the find() of each
    "femnist": femnist.find,
    "cifar_c": cifar_c.find,
    "tiny_imagenet_c": tiny_imagenet_c.find,
    "iwildcam": iwildcam.find,
    "unipen": unipen.find,
    "qmnist": qmnist.find,
    "cifar10_c": cifar10.find,
    "folder": folder.find,
}
# (name of the benchmark, fields of the config's group data, folder of all data) -> data set
BENCHMARKS: dict[str, Callable[[str, Mapping[str, Any], Path], DomainStore]] = {
    "glyphs": lambda *given: _generate(glyphs.open_glyphs, *given),
    "glyphs_c": lambda *given: _generate(glyphs_c.open_glyphs_c, *given),
    **{name: lambda *given: open_prepared(*given) for name in READERS},
}
CALIBRATION_IMAGES = 2000
STREAMS = ("training", *SPLITS, "calibration")  # uses of plans; each has random numbers of its own


class Recipe(NamedTuple):
    """How a method is trained.

    Attributes:
      held_out: the part of the training data that the method learns from, and its network does not, or that it leaves
        out.
      spec: the shape of a training task.
    """

    held_out: float
    spec: EpisodeSpec
    optimizer: optax.GradientTransformation
    schedule: Schedule


class Experiment(NamedTuple):
    """All that a run needs, built from its config."""

    config: Config
    store: DomainStore
    spec: EpisodeSpec  # the shape of an evaluation task
    exhaustive: bool  # whether each image of a split is a query once; else tasks are drawn
    num_tasks: dict[str, int]  # of a validation, "val", and of a test, "test"
    source: Source
    method: Method
    recipe: Recipe
    weak: augment.Weak  # augmentation in training
    train_plans: Callable[[int], Plan]  # step -> plans of its episodes
    example: Images  # two images, for shapes
    per_call: int  # evaluation tasks in one program
    context: Context | None = None  # the part of each evaluation task's support that has arrived; None: all of it

    @property
    def metric(self) -> str:
        """The name in METRICS of what scores an evaluation task."""
        return metric_of(self.store.info.metric, self.config.evaluation.f1)

    @property
    def learner(self) -> Learner:
        return Learner(self.method, self.recipe.optimizer, self.weak)

    @property
    def schedule(self) -> Schedule:
        return self.recipe.schedule

    def task_plans(self, split: str) -> Callable[[Sequence[int]], Plan]:
        """The function task numbers -> Plan, which is the same for every method and training seed."""
        seed, context = self.config.evaluation.seed, self.context
        domains, stream = domains_for(self.spec, self.store, split)[0], STREAMS.index(split)
        draw = Draw(self.spec, self.store.offsets, domains, seed, stream, self.store.labels)
        if self.exhaustive:
            plans = exhaustive(draw)[1]
            return plans if not context else lambda tasks: first_arrived(plans(tasks), context, draw, tasks)
        return lambda tasks: sample_plans(draw, tasks, context)

    def known_images(self) -> Known:
        """Images for Method.calibrate(), the same for every method and training seed. Where no validation domain has
        any, training images take their place."""
        splits = ["train", "val" if len(self.store.domains("val")) else "train"]
        rows = [self._some_rows(split) for split in splits]
        (images, labels), (unseen, unseen_labels) = (
            (jnp.asarray(self.store.images[of_split]), jnp.asarray(self.store.labels[of_split])) for of_split in rows
        )
        return Known(images, labels, unseen, unseen_labels, jnp.asarray(self.store.row_domains()[rows[1]]))

    def _some_rows(self, split: str) -> np.ndarray:
        """Rows of a split for known_images(), spread over its domains."""
        domains = self.store.domains(split)
        count = min(CALIBRATION_IMAGES, int(np.diff(self.store.offsets)[domains].sum()))
        spec = EpisodeSpec(num_domains=0, per_domain=0, num_query=count, mixed=True)
        seed, stream = self.config.evaluation.seed, STREAMS.index("calibration")
        return sample_plans(Draw(spec, self.store.offsets, domains, seed, stream), [0]).query[0]


def build(
    config: Config, data_dir: str | Path, splits: Sequence[str] = SPLITS, devices: Mesh | None = None
) -> Experiment:
    """Builds an experiment from a config, or raises a UserError that names a field.

    Tasks will be drawn from `splits`. They are shared out over a mesh of `devices`;
    without one they all run on one device.
    """
    return build_on(config, open_data(config, data_dir), splits, devices)


def build_on(
    config: Config, store: DomainStore, splits: Sequence[str] = SPLITS, devices: Mesh | None = None
) -> Experiment:
    """build() on an open store, instead of the data set that the config names."""
    method = build_method(config, store)
    spec, every = EpisodeSpec(**config.episode), config.evaluation.tasks == "exhaustive"
    recipe = recipe_of(config, method, store, spec)
    share = recipe.held_out
    part = split_part(store, share, config.seed, bool(method.frozen)) if share else None
    learnt = check_spec(recipe.spec, store, "train", part) if "train" in splits else NO_ROWS
    domains = {split: check_spec(spec, store, split) for split in splits if split != "train"}
    num_tasks = {
        split: exhaustive(Draw(spec, store.offsets, found, 0))[0] if every else config.evaluation[f"{split}_tasks"]
        for split, found in domains.items()
    }
    tasks, stream = recipe.schedule.tasks_per_step, STREAMS.index("training")
    rows = part.rows if part else np.arange(len(store.labels))
    offsets, labels = (part.offsets, store.labels[part.rows]) if part else (store.offsets, store.labels)
    draw = Draw(recipe.spec, offsets, learnt, config.seed, stream, labels)

    def train_plans(step: int) -> Plan:
        numbers = range(step * tasks, (step + 1) * tasks)
        return Plan(*(rows[drawn] for drawn in sample_plans(draw, numbers)))

    return Experiment(
        config=config,
        store=store,
        spec=spec,
        exhaustive=every,
        num_tasks=num_tasks,
        source=SOURCES[config.train.source](store, devices),
        method=method,
        recipe=recipe,
        weak=augment.Weak(**config.augment),
        train_plans=train_plans,
        example=Images(jnp.asarray(store.images[:2]), jnp.zeros(2, jnp.int32)),
        per_call=config.evaluation.per_call or backend.default_tasks_per_call(),
    )


def open_data(config: Mapping[str, Any], data_dir: str | Path) -> DomainStore:
    """The data set that a config names, or what is kept of one beside a result."""
    make = lookup("benchmark", config["benchmark"], BENCHMARKS)
    try:
        return make(config["benchmark"], config["data"], Path(data_dir))
    except OSError as e:
        raise UserError(system_fault(e, fix="name another folder in --data_dir or $CXDA_DATA_DIR")) from e


def open_prepared(benchmark: str, fields: Mapping[str, Any], data_dir: Path) -> DomainStore:
    """A data set that cxda prepare made."""
    name = fields.get("name")
    if not isinstance(name, str):
        raise UserError(f"expected a folder in --data_dir, such as {benchmark!r}", "data.name", name)
    if not os.path.exists(data_dir / name / "store.json"):  # Path.exists() raises if a name is too long
        command = f"cxda prepare --benchmark={benchmark} --raw_dir=DIR"
        named = f" --name={brief(name, 30)}" if name != benchmark else ""
        raise UserError(f"{data_dir / brief(name, 30)}: no prepared data; {command}{named}, or another --data_dir")
    return open_store(data_dir / name)


def _generate(
    make: Callable[..., DomainStore], benchmark: str, fields: Mapping[str, Any], data_dir: Path
) -> DomainStore:
    """A data set that `make` generates; the fields are its arguments."""
    known = {k: p.default for k, p in inspect.signature(make).parameters.items() if p.default is not p.empty}
    for name, value in fields.items():
        if name not in known:
            fix = f"fields: {', '.join(known)}"
            raise UserError(f"{benchmark} has no such field", f"data.{brief(name)}", fix=fix)
        many = isinstance(known[name], tuple)
        if isinstance(value, list | tuple) != many or not all(type(n) is int for n in (value if many else [value])):
            raise UserError(f"expected {known[name]!r} or the like", f"data.{name}", value)
    with naming({name: f"data.{name}" for name in known}):
        return make(data_dir, **fields)


def recipe_of(config: Config, method: Method, store: DomainStore, spec: EpisodeSpec) -> Recipe:
    """How the method is trained, where `spec` is the shape of an evaluation task.

    An adapter learns from what a network says of the images: by Adam with a cosine, from tasks of any shares of the
    classes and any mixture of domains. The network stays as it is.
    """
    train = config.train
    if method.frozen and method.frozen.described:
        own = config[method.name]
        schedule = Schedule(
            own.steps, max(1, own.steps // VALIDATIONS), train.log_every, train.save_every, own.tasks_per_step
        )
        optimizer = only(optax.adam(optax.cosine_decay_schedule(own.rate, own.steps)), lambda part: part == ADAPTER)
        any_tasks = spec._replace(shares="any", mixture="any", replacement=False)
        return Recipe(own.held_out, any_tasks, optimizer, schedule)
    optimizer = make_optimizer(**config.optimizer)
    if method.frozen:
        optimizer = only(optimizer, lambda part: part != TRUNK)
    if train.held_out and not method.frozen and method.name not in STARTS:
        raise UserError(f"{method.name} does not read it", "train.held_out", train.held_out, "leave it at 0")
    spec = mixed_spec(spec) if method.trains_mixed else spec
    return Recipe(train.held_out, spec, optimizer, make_schedule(config, store))


def only(optimizer: optax.GradientTransformation, learns: Callable[[str], bool]) -> optax.GradientTransformation:
    """The optimiser for those parts of the network that learn. The others stay as they are."""

    def labels(params: Any) -> Any:
        return {name: "learns" if learns(name) else "stays" for name in params}

    return optax.multi_transform({"learns": optimizer, "stays": optax.set_to_zero()}, labels)


def build_method(config: Config, store: DomainStore) -> Method:
    """The method that the config names, for images of the store."""
    entry = METHODS[config.method]
    method = with_precision(entry.build(config, store.inputs), config.net.precision)
    return with_frozen_trunk(method) if entry.holds_out and config.train.held_out else method


def with_frozen_trunk(method: Method) -> Method:
    """The method on the trunk of a training of erm_iid, whose weights stay. All else learns."""

    def loss(variables: Variables, episode: Episode, key: Array) -> tuple[Array, Any]:
        params = variables["params"]
        kept = {**params, TRUNK: jax.lax.stop_gradient(params[TRUNK])}  # so that no time is spent on its gradients
        return method.loss({**variables, "params": kept}, episode, key)

    return method._replace(loss=loss, frozen=Frozen("erm_iid"))


def with_precision(method: Method, precision: Any) -> Method:
    """The method with products of this precision on accelerators, those of its
    gradients included. "default" is JAX's setting."""
    if precision == "default":
        return method

    def within(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            with jax.default_matmul_precision(precision):
                return function(*args)

        return call

    functions = {name: within(of) for name, of in method._asdict().items() if callable(of)}
    return method._replace(**functions, also={name: within(function) for name, function in method.also.items()})


def tasks_per_step(config: Config) -> int:
    """The tasks of a training step; an adapter has its own."""
    return config.get(config.method, {}).get("tasks_per_step") or config.train.tasks_per_step


def make_schedule(config: Config, store: DomainStore) -> Schedule:
    """Steps and intervals of the training. An epoch is (training images // 100) episodes."""
    train, evaluation = config.train, config.evaluation
    images, tasks = int(np.diff(store.offsets)[store.domains("train")].sum()), train.tasks_per_step
    epoch = images // 100 // tasks
    steps = train.steps or train.epochs * epoch
    every = evaluation.every_steps or evaluation.every_epochs * epoch
    if steps < 1:
        fault = f"of {images} training images gives {steps} steps"
        raise UserError(fault, "train.epochs", train.epochs, "set train.steps")
    if every < 1:
        fault = f"gives an interval of {every} steps"
        raise UserError(fault, "evaluation.every_epochs", evaluation.every_epochs, "set evaluation.every_steps")
    per_call = train.steps_per_call or backend.default_steps_per_call()
    return Schedule(steps, every, train.log_every, train.save_every, tasks, train.tensorboard, per_call)
