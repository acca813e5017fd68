"""A name becomes an object here and nowhere else: build(config) turns a plain config into everything a run needs."""

import difflib
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
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
from cxda_jax.methods.finetune import FineTuning, ft_em, ft_im, sf_ocda
from cxda_jax.methods.sla import sla
from cxda_jax.nets.attention import CrossAttention
from cxda_jax.nets.classifier import FEATURES, Classifier
from cxda_jax.nets.cnn import PADDINGS, CNNHead, CNNTrunk
from cxda_jax.nets.context import ContextNet
from cxda_jax.nets.pretrained import convert, read_weights
from cxda_jax.nets.resnet import LinearHead, ResNetTrunk
from cxda_jax.train import Schedule
from cxda_jax.types import Array, Images, Method, UserError, Variables

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
    "cotta": lambda c, store: cotta(build_net(c, store), _tuning(c), _strong(c), **c["cotta"]),
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
    "glyphs": lambda c, data_dir: glyphs.open_glyphs(data_dir, **c["data"]),
    "glyphs_c": lambda c, data_dir: glyphs_c.open_glyphs_c(data_dir, **c["data"]),
    **{name: lambda c, data_dir: open_prepared(c, data_dir) for name in READERS},
}
NETS: dict[str, Callable[..., tuple[Any, Any]]] = {  # (net's config, classes, options of the trunk) -> trunk and head
    "cnn": lambda c, num_classes, **options: (
        CNNTrunk(_positive(c, "width"), _choice("net.padding", c["padding"], PADDINGS), _dtype(c["dtype"]), **options),
        CNNHead(num_classes, dtype=_dtype(c["dtype"])),
    ),
    "resnet50": lambda c, num_classes, **options: (
        ResNetTrunk(stages=tuple(c["stages"]), dtype=_dtype(c["dtype"]), **options),
        LinearHead(num_classes, _dtype(c["dtype"])),
    ),
}
SELECTORS = ("mean", "worst_decile")
CALIBRATION_IMAGES = 2000


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

    def calibration_images(self) -> Array:
        """Training images, the same for every method and training seed."""
        domains = self.store.domains("train")
        count = min(CALIBRATION_IMAGES, int(np.diff(self.store.offsets)[domains].sum()))
        spec = EpisodeSpec(num_domains=0, per_domain=0, num_query=count, mixed=True)
        plan = sample_plans(spec, self.store.offsets, domains, self.config["evaluation"]["seed"], [0])
        return jnp.asarray(self.store.images[plan.query[0]])


def build(config: Config, data_dir: str | Path, splits: Sequence[str] = SPLITS) -> Experiment:
    """Raises a UserError that names the field where the config cannot be built; `splits` are those to be drawn from."""
    _choice("method", config["method"], METHODS)  # before a data set is made for it
    return build_on(config, open_data(config, data_dir), splits)


def build_on(config: Config, store: DomainStore, splits: Sequence[str] = SPLITS) -> Experiment:
    """The same on a store at hand, whatever data the config names."""
    method = build_method(config, store)
    spec = episode_spec(config)
    train_spec = mixed_spec(spec) if method.trains_mixed else spec
    for split in splits:
        check_spec(train_spec if split == "train" else spec, store, split)
    weak = augment.Weak(**config["augment"])
    augment.check(weak)
    _choice("evaluation.select", config["evaluation"]["select"], SELECTORS)
    for field in ("val_tasks", "test_tasks"):
        _positive(config["evaluation"], field, "evaluation.")
    schedule = make_schedule(config, store)
    source = lookup("train.source", config["train"]["source"], SOURCES)(store)
    tasks, domains, seed = schedule.tasks_per_step, store.domains("train"), config["seed"]
    if seed < 0 or config["evaluation"]["seed"] < 0:
        raise UserError(f"seed={seed}, evaluation.seed={config['evaluation']['seed']}: seeds must not be negative")
    return Experiment(
        config=config,
        store=store,
        source=source,
        method=method,
        optimizer=make_optimizer(**config["optimizer"]),
        weak=weak,
        schedule=schedule,
        train_plans=lambda step: sample_plans(
            train_spec, store.offsets, domains, seed, range(step * tasks, (step + 1) * tasks)
        ),
        example=Images(jnp.asarray(store.images[:2]), jnp.zeros(2, jnp.int32)),
        per_call=config["evaluation"]["per_call"] or (1 if jax.default_backend() == "cpu" else 16),
    )


def open_data(config: Config, data_dir: str | Path) -> DomainStore:
    return lookup("benchmark", config["benchmark"], BENCHMARKS)(config, Path(data_dir))


def open_prepared(config: Config, data_dir: Path) -> DomainStore:
    """What launch.prepare made."""
    name, benchmark = config["data"]["name"], config["benchmark"]
    if not (data_dir / name / "store.json").exists():
        raise UserError(
            f"{data_dir / name}: no prepared data; python -m launch.prepare --benchmark={benchmark} --raw_dir=DIR"
            + (f" --name={name}" if name != benchmark else "")
        )
    return open_store(data_dir / name)


def build_method(config: Config, store: DomainStore) -> Method:
    return lookup("method", config["method"], METHODS)(config, store)


def start_from_weights(config: Config, variables: Variables) -> Variables:
    """Fresh variables with what net.weights names in their place, if anything."""
    path = config["net"]["weights"]
    if not path:
        return variables
    if config["net"]["name"] != "resnet50":
        raise UserError(f"net.weights={path}: only resnet50 starts from a file; net.name={config['net']['name']!r}")
    return convert(read_weights(Path(path)), variables, tuple(config["net"]["dont_load"]))


def build_net(config: Config, store: DomainStore, **options: Any) -> Classifier:
    """The benchmark's network; `options` go to its trunk."""
    trunk, head = lookup("net.name", config["net"]["name"], NETS)(config["net"], store.num_classes, **options)
    return Classifier(trunk, head, store.info.mean, store.info.std)


def build_attending_net(config: Config, store: DomainStore, features: str = "") -> Classifier:
    """The benchmark's network with attention on tokens of the kind `features`, or the config's."""
    net = build_net(config, store)
    features = features or config["attention"]["features"]
    _choice("attention.features", features, FEATURES)
    image = jax.ShapeDtypeStruct((1, *store.images.shape[1:]), jnp.float32)
    maps = jax.eval_shape(lambda x: net.trunk.init_with_output(jax.random.key(0), x)[0], image)
    options = {k: v for k, v in config["attention"].items() if k != "features"}
    for field in ("heads", "ratio"):
        _positive(options, field, "attention.")
    dim = math.prod(maps.shape[1:]) if features == "flat" else maps.shape[-1]
    attention = CrossAttention(dim, dtype=_dtype(config["net"]["dtype"]), **options)
    return net.clone(attention=attention, features=features)


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
    per_call = train["steps_per_call"]
    if per_call < 0:
        raise UserError(f"train.steps_per_call={per_call} must be at least 1; 0 chooses for the machine")
    return Schedule(
        steps,
        every,
        train["log_every"],
        train["save_every"],
        tasks,
        train["tensorboard"],
        per_call or _steps_per_call(),
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
        "zero_out": config["attention"]["zero_out"],
    }


def _adapters(options: Config) -> Config:
    _positive(options, "adapters", "sla.")
    return options


def _tuning(config: Config) -> FineTuning:
    options = dict(config["finetune"])
    rate = options.pop("rate")
    if not 0 <= rate < math.inf:
        raise UserError(f"finetune.rate={rate} must be a finite share of optimizer.learning_rate, 0 or more")
    optimizer = config["optimizer"]
    return FineTuning(make_optimizer(**{**optimizer, "learning_rate": rate * optimizer["learning_rate"]}), **options)


def _strong(config: Config) -> augment.Strong:
    return augment.Strong(**config["strong"])


def lookup(field: str, name: str, table: Mapping[str, Any]) -> Any:
    return table[_choice(field, name, table)]


def _choice(field: str, value: Any, allowed: Any) -> Any:
    if value not in allowed:
        near = difflib.get_close_matches(str(value), map(str, allowed), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"{field}={value!r} is unknown; {hint}choose from {', '.join(map(str, sorted(allowed)))}")
    return value


def _positive(config: Config, field: str, prefix: str = "net.") -> int:
    if config[field] < 1:
        raise UserError(f"{prefix}{field}={config[field]} must be at least 1")
    return config[field]


def _dtype(name: str) -> Any:
    return jnp.dtype(_choice("net.dtype", name, ("float32", "bfloat16")))
