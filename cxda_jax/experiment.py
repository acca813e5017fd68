"""A name becomes an object here and nowhere else: build(config) turns a plain config into everything a run needs."""

import contextlib
import difflib
import hashlib
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cxda_jax import augment
from cxda_jax.data import cifar_c, femnist, folder, glyphs, glyphs_c, iwildcam, tiny_imagenet_c
from cxda_jax.data.episodes import EpisodeSpec, Plan, check_spec, mixed_spec, sample_plans
from cxda_jax.data.raw import RawData
from cxda_jax.data.sources import SOURCES, Source
from cxda_jax.data.store import SPLITS, DomainStore, open_store
from cxda_jax.methods.cml import cml
from cxda_jax.methods.cotta import cotta
from cxda_jax.methods.cxda import cxda, cxda_loo, cxda_p2p, cxda_supervised
from cxda_jax.methods.erm import bn, erm, erm_iid
from cxda_jax.methods.finetune import FineTuning, check_tuning, ft_em, ft_im, sf_ocda
from cxda_jax.methods.sla import sla
from cxda_jax.metrics import METRICS
from cxda_jax.nets import attention
from cxda_jax.nets.attention import CrossAttention
from cxda_jax.nets.classifier import FEATURES, Classifier
from cxda_jax.nets.cnn import PADDINGS, CNNHead, CNNTrunk
from cxda_jax.nets.context import ContextNet
from cxda_jax.nets.pretrained import convert, read_weights
from cxda_jax.nets.resnet import LinearHead, ResNetTrunk
from cxda_jax.train import Schedule
from cxda_jax.types import Array, Images, Method, UserError, Variables, brief

Config = Mapping[str, Any]  # nested dicts of plain values, as in a run's config.json

METHODS: dict[str, Callable[[Config, DomainStore], Method]] = {
    "erm": lambda c, store: erm(build_net(c, store)),
    "erm_iid": lambda c, store: erm_iid(build_net(c, store)),
    "bn": lambda c, store: bn(build_net(c, store), **c["batch_norm"], support_loss=c["train"]["support_loss"]),
    "cml": lambda c, store: cml(build_context_net(c, store)),
    "cxda": lambda c, store: cxda(build_attending_net(c, store), **_attending(c)),
    "cxda_p2p": lambda c, store: cxda_p2p(build_attending_net(c, store, "patch"), **_attending(c)),
    "cxda_supervised": lambda c, store: cxda_supervised(build_attending_net(c, store), **_attending(c)),
    "cxda_loo": lambda c, store: cxda_loo(build_attending_net(c, store), **_attending(c)),
    "ft_em": lambda c, store: ft_em(build_net(c, store), _tuning(c)),
    "ft_im": lambda c, store: ft_im(build_net(c, store), _tuning(c)),
    "sf_ocda": lambda c, store: sf_ocda(build_net(c, store), _tuning(c), _strong(c), **c["sf_ocda"]),
    "cotta": lambda c, store: cotta(
        build_net(c, store),
        _tuning(c),
        _strong(c),
        **c["cotta"],
        support=c["episode"]["num_domains"] * c["episode"]["per_domain"],
    ),
    "sla": lambda c, store: sla(build_net(c, store, **_adapters(c["sla"]))),
}
READERS: dict[str, Callable[..., RawData]] = {  # raw files, for launch.prepare; see each one's find()
    "femnist": femnist.find,
    "cifar_c": cifar_c.find,
    "tiny_imagenet_c": tiny_imagenet_c.find,
    "iwildcam": iwildcam.find,
    "folder": folder.find,
}
BENCHMARKS: dict[str, Callable[[Config, Path], DomainStore]] = {
    "glyphs": lambda c, data_dir: _generate(glyphs.open_glyphs, c, data_dir),
    "glyphs_c": lambda c, data_dir: _generate(glyphs_c.open_glyphs_c, c, data_dir),
    **{name: lambda c, data_dir: open_prepared(c, data_dir) for name in READERS},
}
# (net's config, classes, options of the trunk if it has any) -> trunk and head
NETS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "cnn": lambda c, num_classes, **options: (
        CNNTrunk(_positive(c, "width"), _choice("net.padding", c["padding"], PADDINGS), _dtype(c["dtype"]), **options),
        CNNHead(num_classes, dtype=_dtype(c["dtype"])),
    ),
    "resnet50": lambda c, num_classes, **options: (
        ResNetTrunk(stages=_stages(c["stages"]), dtype=_dtype(c["dtype"]), **options),
        LinearHead(num_classes, _dtype(c["dtype"])),
    ),
}
SMALLEST = {"arm": 16, "same": 4}  # pixels a side, below which nothing of an image is left at the end of the cnn
SELECTORS = ("mean", "worst_decile")
# What counts may be, whatever the method. More would not be refused later: it would take all memory, or forever.
LIMITS = {
    "seed": (0, 2**32 - 1),  # of more bits jax sees the last 32
    "net.width": (1, 8192),
    "cml.width": (1, 8192),
    "sla.adapters": (1, 1000),
    "finetune.steps": (1, 10_000),
    "cotta.copies": (1, 10_000),
    "episode.num_domains": (1, 10_000),
    "episode.per_domain": (1, 10_000),
    "episode.num_query": (1, 10_000),
    "train.epochs": (0, 100_000),
    "train.steps": (0, 2**31 - 1),
    "train.tasks_per_step": (1, 10_000),
    "train.steps_per_call": (0, 10_000),
    "train.log_every": (1, 2**31 - 1),
    "train.save_every": (1, 2**31 - 1),
    "evaluation.every_epochs": (0, 100_000),
    "evaluation.every_steps": (0, 2**31 - 1),
    "evaluation.val_tasks": (1, 1_000_000),
    "evaluation.test_tasks": (1, 1_000_000),
    "evaluation.seed": (0, 2**32 - 1),
    "evaluation.per_call": (0, 10_000),
}
CALIBRATION_IMAGES = 2000
STREAMS = ("training", *SPLITS, "calibration")  # what draws plans, each from numbers of its own where seeds are equal


class Experiment(NamedTuple):
    """Everything a run needs, built from its config alone."""

    config: Config
    store: DomainStore
    source: Source
    method: Method
    optimizer: optax.GradientTransformation
    weak: augment.Weak
    schedule: Schedule
    train_plans: Callable[[int], Plan]  # step -> plans of its tasks
    example: Images  # two images, for shapes
    per_call: int

    def task_plans(self, split: str) -> Callable[[range], Plan]:
        """Plans of numbered evaluation tasks: the same for every method and training seed."""
        spec, seed, stream = episode_spec(self.config), self.config["evaluation"]["seed"], STREAMS.index(split)
        return lambda tasks: sample_plans(spec, self.store.offsets, self.store.domains(split), seed, tasks, stream)

    def calibration_images(self) -> Array:
        """Training images, the same for every method and training seed."""
        domains = self.store.domains("train")
        count = min(CALIBRATION_IMAGES, int(np.diff(self.store.offsets)[domains].sum()))
        spec = EpisodeSpec(num_domains=0, per_domain=0, num_query=count, mixed=True)
        seed, stream = self.config["evaluation"]["seed"], STREAMS.index("calibration")
        plan = sample_plans(spec, self.store.offsets, domains, seed, [0], stream)
        return jnp.asarray(self.store.images[plan.query[0]])


def build(config: Config, data_dir: str | Path, splits: Sequence[str] = SPLITS) -> Experiment:
    """Raises a UserError that names the field where the config cannot be built; `splits` are those to be drawn from."""
    _choice("method", config["method"], METHODS)  # before a data set is made for it
    return build_on(config, open_data(config, data_dir), splits)


def build_on(config: Config, store: DomainStore, splits: Sequence[str] = SPLITS) -> Experiment:
    """The same on a store at hand, whatever data the config names."""
    check_numbers(config)
    _choice(f"data set {brief(repr(store.info.name))}: metric", store.info.metric, METRICS)
    method = build_method(config, store)
    spec = episode_spec(config)
    train_spec = mixed_spec(spec) if method.trains_mixed else spec
    for split in splits:
        with as_fields(config, "episode"):
            check_spec(train_spec if split == "train" else spec, store, split)
    weak = augment.Weak(**config["augment"])
    with as_fields(config, "augment"):
        augment.check(weak)
    _choice("evaluation.select", config["evaluation"]["select"], SELECTORS)
    schedule = make_schedule(config, store)
    with as_fields(config, "train"):
        source = lookup("train.source", config["train"]["source"], SOURCES)(store)
    tasks, domains, seed = schedule.tasks_per_step, store.domains("train"), config["seed"]
    return Experiment(
        config=config,
        store=store,
        source=source,
        method=method,
        optimizer=make_optimizer(**config["optimizer"]),
        weak=weak,
        schedule=schedule,
        train_plans=lambda step: sample_plans(
            train_spec, store.offsets, domains, seed, range(step * tasks, (step + 1) * tasks), STREAMS.index("training")
        ),
        example=Images(jnp.asarray(store.images[:2]), jnp.zeros(2, jnp.int32)),
        per_call=config["evaluation"]["per_call"] or (1 if jax.default_backend() == "cpu" else 16),
    )


def open_data(config: Config, data_dir: str | Path) -> DomainStore:
    return lookup("benchmark", config["benchmark"], BENCHMARKS)(config, Path(data_dir))


def open_prepared(config: Config, data_dir: Path) -> DomainStore:
    """What launch.prepare made."""
    name, benchmark = config["data"].get("name"), config["benchmark"]
    if not isinstance(name, str):
        raise UserError(f"data.name={brief(repr(name))}: expected a folder in --data_dir, such as {benchmark!r}")
    if not os.path.exists(data_dir / name / "store.json"):  # Path's own raises where a name is too long
        raise UserError(
            f"{data_dir / brief(name, 30)}: no prepared data; python -m launch.prepare --benchmark={benchmark} --raw_dir=DIR"
            + (f" --name={brief(name, 30)}" if name != benchmark else "")
        )
    return open_store(data_dir / name)


def _generate(make: Callable[..., DomainStore], config: Config, data_dir: Path) -> DomainStore:
    """What `make` draws from the data's fields."""
    known = {k: p.default for k, p in inspect.signature(make).parameters.items() if p.default is not p.empty}
    for name, value in config["data"].items():
        if name not in known:
            raise UserError(f"data.{brief(name)}: {config['benchmark']} has no such field; fields: {', '.join(known)}")
        many = isinstance(known[name], tuple)
        if isinstance(value, list | tuple) != many or not all(type(n) is int for n in (value if many else [value])):
            raise UserError(f"data.{name}={brief(repr(value))}: expected {known[name]!r} or the like")
    with as_fields(config, "data"):
        return make(data_dir, **config["data"])


def check_numbers(config: Config) -> None:
    """Raises a UserError for a count outside its LIMITS, and for an optimizer that cannot work."""
    for name, (low, high) in LIMITS.items():
        group, _, field = name.rpartition(".")
        value = (config[group] if group else config)[field]
        if not low <= value <= high:
            raise UserError(f"{name}={value} must be at {f'least {low}' if value < low else f'most {high}'}")
    rate, momentum, decay = (config["optimizer"][field] for field in ("learning_rate", "momentum", "weight_decay"))
    if not 0 < rate < math.inf:
        raise UserError(f"optimizer.learning_rate={rate} must be a finite number above 0")
    if not 0 <= momentum < 1:
        raise UserError(f"optimizer.momentum={momentum} must be a number from 0 to below 1")
    if not 0 <= decay < math.inf:
        raise UserError(f"optimizer.weight_decay={decay} must be a finite number, 0 or more")


def build_method(config: Config, store: DomainStore) -> Method:
    make = lookup("method", config["method"], METHODS)
    with as_fields(config, config["method"], "batch_norm", "train"):
        return make(config, store)


@contextlib.contextmanager
def as_fields(config: Config, *groups: str) -> Iterator[None]:
    """Has a UserError of the library, which names its own parameters, name the fields of these groups of the config:
    momentum=2.0 becomes batch_norm.momentum=2.0."""
    of_groups = ((name, f"{group}.{name}") for group in reversed(groups) if group in config for name in config[group])
    with renamed(dict(of_groups)):
        yield


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Has a UserError call parameters of the library by the names that its user knows.

    A word counts as a parameter where the message begins with it, where = follows, or where it has an underscore.
    """

    def other(found: re.Match[str]) -> str:
        name, follows = found.groups()
        meant = name in names and (not found.start() or follows or "_" in name)
        return f"{names[name]}{follows}" if meant else found[0]

    try:
        yield
    except UserError as e:
        raise UserError(re.sub(r"(?<![\w.'\"=/-])(\w+)(=?)", other, str(e))) from e


def start_from_weights(config: Config, variables: Variables) -> Variables:
    """Fresh variables with what net.weights names in their place, if anything."""
    path = config["net"]["weights"]
    if not path:
        return variables
    if config["net"]["name"] != "resnet50":
        raise UserError(
            f"net.weights={brief(path)}: only resnet50 starts from a file; net.name={config['net']['name']!r}"
        )
    with as_fields(config, "net"):
        return convert(read_weights(Path(path)), variables, tuple(config["net"]["dont_load"]))


def build_net(config: Config, store: DomainStore, **options: Any) -> Classifier:
    """The benchmark's network; `options` go to its trunk."""
    make = lookup("net.name", config["net"]["name"], NETS)
    if options and not _takes_options(make):
        others = ", ".join(name for name, other in NETS.items() if _takes_options(other))
        raise UserError(
            f"net.name={config['net']['name']!r} has no {next(iter(options))}; choose another, such as {others}"
        )
    trunk, head = make(config["net"], store.num_classes, **options)
    padding, (height, width) = config["net"]["padding"], store.images.shape[1:3]
    if config["net"]["name"] == "cnn" and min(height, width) < SMALLEST[padding]:
        raise UserError(
            f"net.padding={padding!r} takes images from {SMALLEST[padding]} pixels a side, those of "
            f"{brief(store.info.name)} are {height}x{width}; 'same' takes them from {SMALLEST['same']}, resnet50 all"
        )
    return Classifier(trunk, head, store.info.mean, store.info.std)


def _takes_options(make: Callable[..., Any]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(make).parameters.values())


def build_attending_net(config: Config, store: DomainStore, features: str = "") -> Classifier:
    """The benchmark's network with attention on tokens of the kind `features`, or the config's."""
    net = build_net(config, store)
    features = features or config["attention"]["features"]
    _choice("attention.features", features, FEATURES)
    image = jax.ShapeDtypeStruct((1, *store.images.shape[1:]), jnp.float32)
    maps = jax.eval_shape(lambda x: net.trunk.init_with_output(jax.random.key(0), x)[0], image)
    options = {k: v for k, v in config["attention"].items() if k != "features"}
    dim = math.prod(maps.shape[1:]) if features == "flat" else maps.shape[-1]
    with as_fields(config, "attention"):
        attention.check(dim, options["heads"], options["ratio"], options["scale"])
    attending = CrossAttention(dim, dtype=_dtype(config["net"]["dtype"]), **options)
    return net.clone(attention=attending, features=features)


def build_context_net(config: Config, store: DomainStore) -> Classifier:
    """The benchmark's network on images with as many context channels as the image has."""
    options = config["cml"]
    convs = _choice("cml.convs", options["convs"], (2, 3))
    smaller = {"convs": convs} if config["net"]["name"] == "cnn" else {}
    context = ContextNet(store.images.shape[-1], _positive(options, "width", "cml."), _dtype(config["net"]["dtype"]))
    return build_net(config, store, **smaller).clone(context=context)


def make_optimizer(
    name: str, learning_rate: float, momentum: float, weight_decay: float
) -> optax.GradientTransformation:
    """SGD with momentum or Adam at a constant rate; the decay is L2, added to the gradient as PyTorch does."""
    steps = {"sgd": lambda: optax.sgd(learning_rate, momentum or None), "adam": lambda: optax.adam(learning_rate)}
    return optax.chain(optax.add_decayed_weights(weight_decay), lookup("optimizer.name", name, steps)())


def make_schedule(config: Config, store: DomainStore) -> Schedule:
    """Steps and intervals; an epoch is (training images // 100) episodes."""
    train, evaluation = config["train"], config["evaluation"]
    tasks = train["tasks_per_step"]
    images = int(np.diff(store.offsets)[store.domains("train")].sum())
    epoch = images // 100 // tasks
    steps = train["steps"] or train["epochs"] * epoch
    every = evaluation["every_steps"] or evaluation["every_epochs"] * epoch
    if steps < 1:
        raise UserError(
            f"train.epochs={train['epochs']} of {images} training images gives {steps} steps; set train.steps"
        )
    if every < 1:
        raise UserError(
            f"evaluation.every_epochs={evaluation['every_epochs']} gives an interval of {every} steps; "
            "set evaluation.every_steps"
        )
    return Schedule(
        steps,
        every,
        train["log_every"],
        train["save_every"],
        tasks,
        train["tensorboard"],
        train["steps_per_call"] or _steps_per_call(),
    )


def _steps_per_call() -> int:
    """One on CPUs, where XLA computes the gradients of convolutions inside loops fifty times more slowly than outside."""
    return 1 if jax.default_backend() == "cpu" else 20


def episode_spec(config: Config) -> EpisodeSpec:
    return EpisodeSpec(**config["episode"])


def config_hash(config: Config) -> str:
    """Identity of a resolved config."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _attending(config: Config) -> dict[str, Any]:
    return {
        "statistics": config["batch_norm"]["statistics"],
        "momentum": config["batch_norm"]["momentum"],
        "support_loss": config["train"]["support_loss"],
    }


def _adapters(options: Config) -> Config:
    _positive(options, "adapters", "sla.")
    return options


def _tuning(config: Config) -> FineTuning:
    options = dict(config["finetune"])
    rate = options.pop("rate")
    if not 0 <= rate * config["optimizer"]["learning_rate"] < math.inf:
        raise UserError(f"finetune.rate={rate} must be a finite share of optimizer.learning_rate, 0 or more")
    optimizer = config["optimizer"]
    tuning = FineTuning(make_optimizer(**{**optimizer, "learning_rate": rate * optimizer["learning_rate"]}), **options)
    with as_fields(config, "finetune"):
        check_tuning(tuning)
    return tuning


def _strong(config: Config) -> augment.Strong:
    strong = augment.Strong(**config["strong"])
    with as_fields(config, "strong"):
        augment.check_strong(strong)
    return strong


def lookup(field: str, name: str, table: Mapping[str, Any]) -> Any:
    return table[_choice(field, name, table)]


def _choice(field: str, value: Any, allowed: Any) -> Any:
    if value not in allowed:
        near = difflib.get_close_matches(str(value), map(str, allowed), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(
            f"{field}={brief(repr(value), 30)} is unknown; {hint}choose from {', '.join(map(str, sorted(allowed)))}"
        )
    return value


def _positive(config: Config, field: str, prefix: str = "net.") -> int:
    if config[field] < 1:
        raise UserError(f"{prefix}{field}={config[field]} must be at least 1")
    return config[field]


def _stages(stages: Sequence[int]) -> tuple[int, ...]:
    """As many as ResNets have, and some."""
    if not 1 <= len(stages) <= 6 or not all(1 <= blocks <= 100 for blocks in stages):
        raise UserError(f"net.stages={brief(repr(tuple(stages)))}: give one to six counts of 1 to 100 blocks")
    return tuple(stages)


def _dtype(name: str) -> Any:
    return jnp.dtype(_choice("net.dtype", name, ("float32", "bfloat16")))
