"""A name becomes an object here and nowhere else: build(config) turns a plain config into everything a run needs."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cxda_jax import augment
from cxda_jax.data import glyphs
from cxda_jax.data.episodes import EpisodeSpec, Plan, check_spec, sample_plans
from cxda_jax.data.sources import SOURCES, Source
from cxda_jax.data.store import DomainStore
from cxda_jax.methods.cxda import cxda, cxda_p2p, cxda_supervised
from cxda_jax.methods.erm import bn, erm
from cxda_jax.nets.attention import CrossAttention
from cxda_jax.nets.classifier import FEATURES, Classifier
from cxda_jax.nets.cnn import PADDINGS, CNNHead, CNNTrunk
from cxda_jax.train import Schedule
from cxda_jax.types import Images, Method, UserError

Config = Mapping[str, Any]  # nested dicts of plain values, as in a run's config.json

METHODS: dict[str, Callable[[Config, DomainStore], Method]] = {
    "erm": lambda c, store: erm(build_net(c, store)),
    "bn": lambda c, store: bn(build_net(c, store), **c["batch_norm"]),
    "cxda": lambda c, store: cxda(build_net(c, store, c["attention"]["features"]), **_attending(c)),
    "cxda_p2p": lambda c, store: cxda_p2p(build_net(c, store, "patch"), **_attending(c)),
    "cxda_supervised": lambda c, store: cxda_supervised(
        build_net(c, store, c["attention"]["features"]), **_attending(c)
    ),
}
BENCHMARKS: dict[str, Callable[[Config, Path], DomainStore]] = {
    "glyphs": lambda c, data_dir: glyphs.open_glyphs(data_dir, **c["data"]),
}
NETS: dict[str, Callable[[Config, int], tuple[Any, Any]]] = {  # trunk and head
    "cnn": lambda c, num_classes: (
        CNNTrunk(_positive(c, "width"), _choice("net.padding", c["padding"], PADDINGS), _dtype(c["dtype"])),
        CNNHead(num_classes, dtype=_dtype(c["dtype"])),
    ),
}
SELECTORS = ("mean", "worst_decile")


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
        spec, seed = episode_spec(self.config), self.config["evaluation"]["seed"]
        return lambda tasks: sample_plans(spec, self.store.offsets, self.store.domains(split), seed, tasks)


def build(config: Config, data_dir: str | Path) -> Experiment:
    """Raises a UserError that names the field where the config cannot be built."""
    store = _lookup("benchmark", config["benchmark"], BENCHMARKS)(config, Path(data_dir))
    spec = episode_spec(config)
    for split in ("train", "val", "test"):
        check_spec(spec, store, split)
    weak = augment.Weak(**config["augment"])
    augment.check(weak)
    _choice("evaluation.select", config["evaluation"]["select"], SELECTORS)
    for field in ("val_tasks", "test_tasks"):
        _positive(config["evaluation"], field, "evaluation.")
    schedule = make_schedule(config, store)
    source = _lookup("train.source", config["train"]["source"], SOURCES)(store)
    tasks, domains, seed = schedule.tasks_per_step, store.domains("train"), config["seed"]
    if seed < 0 or config["evaluation"]["seed"] < 0:
        raise UserError(f"seed={seed}, evaluation.seed={config['evaluation']['seed']}: seeds must not be negative")
    return Experiment(
        config=config,
        store=store,
        source=source,
        method=_lookup("method", config["method"], METHODS)(config, store),
        optimizer=make_optimizer(**config["optimizer"]),
        weak=weak,
        schedule=schedule,
        train_plans=lambda step: sample_plans(
            spec, store.offsets, domains, seed, range(step * tasks, (step + 1) * tasks)
        ),
        example=Images(jnp.asarray(store.images[:2]), jnp.zeros(2, jnp.int32)),
        per_call=config["evaluation"]["per_call"] or (1 if jax.default_backend() == "cpu" else 16),
    )


def build_net(config: Config, store: DomainStore, features: str | None = None) -> Classifier:
    """The benchmark's network; with `features`, attention on tokens of that kind."""
    trunk, head = _lookup("net.name", config["net"]["name"], NETS)(config["net"], store.num_classes)
    net = Classifier(trunk, head, store.info.mean, store.info.std)
    if features is None:
        return net
    _choice("attention.features", features, FEATURES)
    image = jax.ShapeDtypeStruct((1, *store.images.shape[1:]), jnp.float32)
    maps = jax.eval_shape(lambda x: trunk.init_with_output(jax.random.key(0), x)[0], image)
    options = {k: v for k, v in config["attention"].items() if k != "features"}
    for field in ("heads", "ratio"):
        _positive(options, field, "attention.")
    dim = math.prod(maps.shape[1:]) if features == "flat" else maps.shape[-1]
    attention = CrossAttention(dim, dtype=_dtype(config["net"]["dtype"]), **options)
    return net.clone(attention=attention, features=features)


def make_optimizer(
    name: str, learning_rate: float, momentum: float, weight_decay: float
) -> optax.GradientTransformation:
    """SGD with momentum or Adam at a constant rate; the decay is L2, added to the gradient as PyTorch does."""
    steps = {"sgd": lambda: optax.sgd(learning_rate, momentum or None), "adam": lambda: optax.adam(learning_rate)}
    return optax.chain(optax.add_decayed_weights(weight_decay), _lookup("optimizer.name", name, steps)())


def make_schedule(config: Config, store: DomainStore) -> Schedule:
    """Steps and intervals; an epoch is (training images // 100) episodes."""
    train, evaluation = config["train"], config["evaluation"]
    tasks = _positive(train, "tasks_per_step", "train.")
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
    for field in ("log_every", "save_every"):
        _positive(train, field, "train.")
    return Schedule(steps, every, train["log_every"], train["save_every"], tasks, train["tensorboard"])


def episode_spec(config: Config) -> EpisodeSpec:
    return EpisodeSpec(**config["episode"])


def config_hash(config: Config) -> str:
    """Identity of a resolved config."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _attending(config: Config) -> dict[str, Any]:
    return {**config["batch_norm"], "zero_out": config["attention"]["zero_out"]}


def _lookup(field: str, name: str, table: Mapping[str, Any]) -> Any:
    return table[_choice(field, name, table)]


def _choice(field: str, value: str, allowed: Any) -> str:
    if value not in allowed:
        raise UserError(f"{field}={value!r} is unknown; choose from {', '.join(sorted(allowed))}")
    return value


def _positive(config: Config, field: str, prefix: str = "net.") -> int:
    if config[field] < 1:
        raise UserError(f"{prefix}{field}={config[field]} must be at least 1")
    return config[field]


def _dtype(name: str) -> Any:
    return jnp.dtype(_choice("net.dtype", name, ("float32", "bfloat16")))
