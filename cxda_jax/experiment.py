"""The registries of all names, and build(config), which turns a plain config into all that a run needs."""

import functools
import inspect
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from cxda_jax import augment, backend
from cxda_jax.config import Changes, Config, as_fields, check_all, choose, lookup, read, refuse_unread
from cxda_jax.data import glyphs, glyphs_c
from cxda_jax.data.episodes import (
    Context,
    EpisodeSpec,
    Plan,
    check_spec,
    exhaustive,
    first_arrived,
    mixed_spec,
    sample_plans,
)
from cxda_jax.data.readers import cifar10, cifar_c, femnist, folder, iwildcam, qmnist, tiny_imagenet_c, unipen
from cxda_jax.data.readers.raw import RawData
from cxda_jax.data.sources import SOURCES, Source
from cxda_jax.data.store import SPLITS, DomainStore, open_store
from cxda_jax.errors import UserError, brief
from cxda_jax.fields import FIELDS, Group
from cxda_jax.methods.anytime import cxda_any
from cxda_jax.methods.cml import cml
from cxda_jax.methods.cotta import Teaching, cotta
from cxda_jax.methods.cxda import cxda, cxda_loo, cxda_p2p, cxda_supervised
from cxda_jax.methods.erm import bn, bn_alpha, erm, erm_iid
from cxda_jax.methods.finetune import FineTuning, ft_em, ft_im, sf_ocda
from cxda_jax.methods.frozen import feature_shift, lame, t3a
from cxda_jax.methods.icrm import icrm, with_transformer
from cxda_jax.methods.sla import sla
from cxda_jax.metrics import METRICS, metric_of
from cxda_jax.nets.attention import CrossAttention, check_attention
from cxda_jax.nets.classifier import Classifier
from cxda_jax.nets.cnn import CNNHead, CNNTrunk
from cxda_jax.nets.context import ContextNet
from cxda_jax.nets.pretrained import convert, read_weights
from cxda_jax.nets.resnet import LinearHead, ResNetTrunk
from cxda_jax.optimizers import make_optimizer
from cxda_jax.train import Learner, Schedule
from cxda_jax.types import Array, Images, Method, Variables

ATTENDING = ("attention", "batch_norm")  # what the methods of the cxda family read


class Entry(NamedTuple):
    """A method in METHODS.

    Attributes:
      build: makes it from a config and a data set.
      reads: the groups of fields that are for some methods alone and that this one reads.
    """

    build: Callable[[Config, DomainStore], Method]
    reads: tuple[str, ...] = ()


METHODS: dict[str, Entry] = {
    "erm": Entry(lambda c, store: erm(build_net(c, store))),
    "erm_iid": Entry(lambda c, store: erm_iid(build_net(c, store))),
    "bn": Entry(
        lambda c, store: bn(build_net(c, store), **c["batch_norm"], support_loss=c["train"]["support_loss"]),
        ("batch_norm",),
    ),
    "cml": Entry(lambda c, store: cml(build_context_net(c, store)), ("cml",)),
    "cxda": Entry(lambda c, store: cxda(build_attending_net(c, store), **_attending(c)), ATTENDING),
    "cxda_p2p": Entry(lambda c, store: cxda_p2p(build_attending_net(c, store, "patch"), **_attending(c)), ATTENDING),
    "cxda_supervised": Entry(
        lambda c, store: cxda_supervised(build_attending_net(c, store), **_attending(c)), ATTENDING
    ),
    "cxda_loo": Entry(lambda c, store: cxda_loo(build_attending_net(c, store), **_attending(c)), ATTENDING),
    "cxda_any": Entry(
        lambda c, store: cxda_any(
            build_attending_net(refuse_unread(c, "train.support_loss"), store, learned=c["cxda_any"]["learned"]),
            c["cxda_any"]["full"],
            c["cxda_any"]["prior"],
        ),
        ("attention", "cxda_any"),
    ),
    "icrm": Entry(lambda c, store: icrm(with_transformer(build_net(c, store), **c["icrm"])), ("icrm",)),
    "ft_em": Entry(lambda c, store: ft_em(build_net(c, store), _tuning(c)), ("finetune",)),
    "ft_im": Entry(lambda c, store: ft_im(build_net(c, store), _tuning(c)), ("finetune",)),
    "sf_ocda": Entry(
        lambda c, store: sf_ocda(build_net(c, store), _tuning(c), augment.Strong(**c["strong"]), **c["sf_ocda"]),
        ("finetune", "strong", "sf_ocda"),
    ),
    "cotta": Entry(
        lambda c, store: cotta(
            build_net(c, store),
            _tuning(c),
            augment.Strong(**c["strong"]),
            Teaching(**c["cotta"]),
            support=c["episode"]["num_domains"] * c["episode"]["per_domain"],
        ),
        ("finetune", "strong", "cotta"),
    ),
    "sla": Entry(lambda c, store: sla(build_net(c, store, **c["sla"])), ("sla",)),
    "bn_alpha": Entry(lambda c, store: bn_alpha(build_net(c, store), **c["bn_alpha"]), ("bn_alpha",)),
    "t3a": Entry(lambda c, store: t3a(build_net(c, store), **c["t3a"]), ("t3a",)),
    "lame": Entry(lambda c, store: lame(build_net(c, store), **c["lame"]), ("lame",)),
    "feature_shift": Entry(
        lambda c, store: feature_shift(build_net(c, store), **c["feature_shift"]), ("feature_shift",)
    ),
}
STARTS = ("erm", "erm_iid")  # from whose checkpoints a method without a training of its own may start; the usual first
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
BENCHMARKS: dict[str, Callable[[Config, Path], DomainStore]] = {
    "glyphs": lambda c, data_dir: _generate(glyphs.open_glyphs, c, data_dir),
    "glyphs_c": lambda c, data_dir: _generate(glyphs_c.open_glyphs_c, c, data_dir),
    **{name: lambda c, data_dir: open_prepared(c, data_dir) for name in READERS},
}
# (the config's group net, classes, options of the trunk if it takes any) -> trunk and head
NETS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "cnn": lambda c, num_classes, **options: (
        CNNTrunk(c["width"], c["padding"], **_shared(c), **options),
        CNNHead(num_classes, **_shared(c)),
    ),
    "resnet50": lambda c, num_classes, **options: (
        ResNetTrunk(stages=_stages(c["stages"]), **_shared(c), **options),
        LinearHead(num_classes, **_shared(c)),
    ),
}
SMALLEST = {"arm": 16, "same": 4}  # pixels a side of an image for the cnn, by its padding
CALIBRATION_IMAGES = 2000
STREAMS = ("training", *SPLITS, "calibration")  # uses of plans; each has random numbers of its own


class Experiment(NamedTuple):
    """All that a run needs, built from its config."""

    config: Config
    store: DomainStore
    source: Source
    method: Method
    optimizer: optax.GradientTransformation
    weak: augment.Weak  # augmentation in training
    schedule: Schedule
    train_plans: Callable[[int], Plan]  # step -> plans of its episodes
    example: Images  # two images, for shapes
    per_call: int  # evaluation tasks in one program
    context: Context | None = None  # the part of each evaluation task's support that has arrived; None: all of it

    @property
    def learner(self) -> Learner:
        return Learner(self.method, self.optimizer, self.weak)

    @property
    def metric(self) -> str:
        """The name in METRICS of what scores a task."""
        return metric_of(self.store.info.metric, self.config["evaluation"]["f1"])

    def task_plans(self, split: str) -> Callable[[Sequence[int]], Plan]:
        """The function task numbers -> Plan, which is the same for every method and training seed."""
        spec, seed, stream = episode_spec(self.config), self.config["evaluation"]["seed"], STREAMS.index(split)
        offsets, domains, context = self.store.offsets, self.store.domains(split), self.context
        if self.config["evaluation"]["tasks"] == "exhaustive":
            plans = exhaustive(spec, offsets, domains, seed, stream)[1]
            return (
                plans
                if not context
                else lambda tasks: first_arrived(plans(tasks), context, spec, offsets, seed, tasks, stream)
            )
        return lambda tasks: sample_plans(spec, offsets, domains, seed, tasks, stream, context)

    def calibration_images(self) -> Array:
        """Training images [n, h, w, c] for Method.calibrate(), the same for every method and training seed."""
        domains = self.store.domains("train")
        count = min(CALIBRATION_IMAGES, int(np.diff(self.store.offsets)[domains].sum()))
        spec = EpisodeSpec(num_domains=0, per_domain=0, num_query=count, mixed=True)
        seed, stream = self.config["evaluation"]["seed"], STREAMS.index("calibration")
        plan = sample_plans(spec, self.store.offsets, domains, seed, [0], stream)
        return jnp.asarray(self.store.images[plan.query[0]])


def build(
    config: Config, data_dir: str | Path, splits: Sequence[str] = SPLITS, devices: Mesh | None = None
) -> Experiment:
    """Builds an experiment from a config of plain values, as config.read() gives,
    or raises a UserError that names a field.

    Tasks will be drawn from `splits`. They are shared out over a mesh of `devices`;
    without one they all run on one device.
    """
    choose("method", config["method"], METHODS)  # before a data set is made for it
    return build_on(config, open_data(config, data_dir), splits, devices)


def build_on(
    config: Config, store: DomainStore, splits: Sequence[str] = SPLITS, devices: Mesh | None = None
) -> Experiment:
    """build() on an open store, instead of the data set that the config names."""
    choose(f"data set {brief(repr(store.info.name))}: metric", store.info.metric, METRICS)
    method = build_method(config, store)
    spec = episode_spec(config)
    train_spec = mixed_spec(spec) if method.trains_mixed else spec
    for split in splits:
        with as_fields(config, "episode"):
            check_spec(train_spec if split == "train" else spec, store, split)
    schedule = make_schedule(config, store)
    with as_fields(config, "train"):
        source = SOURCES[config["train"]["source"]](store, devices)
    tasks, domains, seed = schedule.tasks_per_step, store.domains("train"), config["seed"]

    def train_plans(step: int) -> Plan:
        numbers = range(step * tasks, (step + 1) * tasks)
        return sample_plans(train_spec, store.offsets, domains, seed, numbers, STREAMS.index("training"))

    return Experiment(
        config=config,
        store=store,
        source=source,
        method=method,
        optimizer=make_optimizer(**config["optimizer"], steps=schedule.steps),
        weak=augment.Weak(**config["augment"]),
        schedule=schedule,
        train_plans=train_plans,
        example=Images(jnp.asarray(store.images[:2]), jnp.zeros(2, jnp.int32)),
        per_call=config["evaluation"]["per_call"] or backend.default_tasks_per_call(),
    )


def groups_of_methods() -> set[str]:
    """The groups of fields that some methods alone read."""
    return {group for entry in METHODS.values() for group in entry.reads}


def read_by_method(config: Config) -> Config:
    """The config without the groups that its method does not read, so that no other method changes its hash."""
    unread = groups_of_methods() - {*METHODS[config["method"]].reads}
    return {name: value for name, value in config.items() if name not in unread}


def read_config(spec: str, changes: Changes) -> Config:
    """config.read(). A UserError for a change of a field that the method never reads.

    A training that others start from may hold what they read, so that their tests need not say it again.
    """
    config = read(spec, changes)
    method = config["method"]
    for name, _ in changes:
        group = name.partition(".")[0]
        entry, readers = FIELDS.get(group), [m for m, of in METHODS.items() if group in of.reads]
        kept = method in STARTS and isinstance(entry, Group) and entry.at_test
        if readers and method not in readers and not kept:
            raise UserError(f"--config.{name}: {method} does not read it, only {', '.join(readers)}; leave it out")
    return config


def open_data(config: Config, data_dir: str | Path) -> DomainStore:
    """The data set that the config names."""
    return lookup("benchmark", config["benchmark"], BENCHMARKS)(config, Path(data_dir))


def open_prepared(config: Config, data_dir: Path) -> DomainStore:
    """A data set that cxda prepare made."""
    name, benchmark = config["data"].get("name"), config["benchmark"]
    if not isinstance(name, str):
        raise UserError(f"data.name={brief(repr(name))}: expected a folder in --data_dir, such as {benchmark!r}")
    if not os.path.exists(data_dir / name / "store.json"):  # Path.exists() raises if a name is too long
        command = f"cxda prepare --benchmark={benchmark} --raw_dir=DIR"
        named = f" --name={brief(name, 30)}" if name != benchmark else ""
        raise UserError(f"{data_dir / brief(name, 30)}: no prepared data; {command}{named}")
    return open_store(data_dir / name)


def _generate(make: Callable[..., DomainStore], config: Config, data_dir: Path) -> DomainStore:
    """A data set that `make` generates; the fields of `data` are its arguments."""
    known = {k: p.default for k, p in inspect.signature(make).parameters.items() if p.default is not p.empty}
    for name, value in config["data"].items():
        if name not in known:
            raise UserError(f"data.{brief(name)}: {config['benchmark']} has no such field; fields: {', '.join(known)}")
        many = isinstance(known[name], tuple)
        if isinstance(value, list | tuple) != many or not all(type(n) is int for n in (value if many else [value])):
            raise UserError(f"data.{name}={brief(repr(value))}: expected {known[name]!r} or the like")
    with as_fields(config, "data"):
        return make(data_dir, **config["data"])


def build_method(config: Config, store: DomainStore) -> Method:
    """The method that the config names, for images of the store. A UserError names the first field that is wrong."""
    make = lookup("method", config["method"], METHODS).build
    check_all(config)
    with as_fields(config, config["method"], "strong", "train", "batch_norm"):
        return with_precision(make(config, store), config["net"]["precision"])


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


def start_from_weights(config: Config, variables: Variables) -> Variables:
    """The variables, in which the weights of the file net.weights replace the new ones, if the field is set."""
    path = config["net"]["weights"]
    if not path:
        return variables
    if (name := config["net"]["name"]) != "resnet50":
        raise UserError(f"net.weights={brief(path)}: only resnet50 starts from a file; net.name={name!r}")
    with as_fields(config, "net"):
        return convert(read_weights(Path(path)), variables, tuple(config["net"]["dont_load"]))


def build_net(config: Config, store: DomainStore, **options: Any) -> Classifier:
    """The network that the config names, for images of the store. Options are for the trunk."""
    name, padding, (height, width) = config["net"]["name"], config["net"]["padding"], store.images.shape[1:3]
    takes_options = [n for n, make in NETS.items() if inspect.getfullargspec(make).varkw]
    if options and name not in takes_options:
        raise UserError(
            f"net.name={name!r} has no {next(iter(options))}; choose another, such as {', '.join(takes_options)}"
        )
    if name == "cnn" and min(height, width) < SMALLEST[padding]:
        raise UserError(
            f"net.padding={padding!r} takes images from {SMALLEST[padding]} pixels a side, those of "
            f"{brief(store.info.name)} are {height}x{width}; 'same' takes them from {SMALLEST['same']}, resnet50 all"
        )
    trunk, head = NETS[name](config["net"], store.num_classes, **options)
    return Classifier(trunk, head, store.info.mean, store.info.std)


def build_attending_net(config: Config, store: DomainStore, features: str = "", learned: int = 0) -> Classifier:
    """build_net() with attention, which has so many learned tokens; `features` replaces attention.features."""
    net, features = build_net(config, store), features or config["attention"]["features"]
    image = jax.ShapeDtypeStruct((1, *store.images.shape[1:]), jnp.float32)
    maps = jax.eval_shape(lambda x: net.trunk.init_with_output(jax.random.key(0), x)[0], image)
    options = {k: v for k, v in config["attention"].items() if k != "features"}
    dim = math.prod(maps.shape[1:]) if features == "flat" else maps.shape[-1]
    with as_fields(config, "attention"):
        check_attention(dim, options["heads"], options["ratio"], options["scale"])
    attention = CrossAttention(dim, learned=learned, **_shared(config["net"]), **options)
    return net.clone(attention=attention, features=features)


def build_context_net(config: Config, store: DomainStore) -> Classifier:
    """build_net() with a context network, which gives as many channels as the image has."""
    convs = {"convs": config["cml"]["convs"]} if config["net"]["name"] == "cnn" else {}
    context = ContextNet(store.images.shape[-1], config["cml"]["width"], **_shared(config["net"]))
    return build_net(config, store, **convs).clone(context=context)


def make_schedule(config: Config, store: DomainStore) -> Schedule:
    """Steps and intervals of the training. An epoch is (training images // 100) episodes."""
    train, evaluation = config["train"], config["evaluation"]
    images, tasks = int(np.diff(store.offsets)[store.domains("train")].sum()), train["tasks_per_step"]
    epoch = images // 100 // tasks
    steps = train["steps"] or train["epochs"] * epoch
    every = evaluation["every_steps"] or evaluation["every_epochs"] * epoch
    if steps < 1:
        raise UserError(
            f"train.epochs={train['epochs']} of {images} training images gives {steps} steps; set train.steps"
        )
    if every < 1:
        given = f"evaluation.every_epochs={evaluation['every_epochs']}"
        raise UserError(f"{given} gives an interval of {every} steps; set evaluation.every_steps")
    per_call = train["steps_per_call"] or backend.default_steps_per_call()
    return Schedule(steps, every, train["log_every"], train["save_every"], tasks, train["tensorboard"], per_call)


def episode_spec(config: Config) -> EpisodeSpec:
    """The shape of the config's tasks."""
    return EpisodeSpec(**config["episode"])


def _shared(net: Config) -> dict[str, Any]:
    """The options that all parts of a network take from the config's group net."""
    return {"dtype": jnp.dtype(net["dtype"]), "initial": net["init"]}


def _attending(config: Config) -> dict[str, Any]:
    norm = {name: value for name, value in config["batch_norm"].items() if name != "test_time_only"}
    return {**norm, "support_loss": config["train"]["support_loss"]}


def _tuning(config: Config) -> FineTuning:
    optimizer, options = config["optimizer"], dict(config["finetune"])
    share = options.pop("rate")
    if not optimizer["learning_rate"] * share < math.inf:
        raise UserError(f"finetune.rate={share} makes the rate infinite; lower it or optimizer.learning_rate")
    return FineTuning(make_optimizer(**optimizer, steps=options["steps"], share=share), **options)


def _stages(stages: Sequence[int]) -> tuple[int, ...]:
    if not 1 <= len(stages) <= 6 or not all(1 <= blocks <= 100 for blocks in stages):
        raise UserError(f"net.stages={brief(repr(tuple(stages)))}: give one to six counts of 1 to 100 blocks")
    return tuple(stages)
