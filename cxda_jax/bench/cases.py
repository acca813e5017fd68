"""The work that cxda benchmark times: methods that train or predict, by the package's own code, on random images."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cxda_jax import augment, backend, train
from cxda_jax.bench.measure import Timing, chained, repeated
from cxda_jax.config import read
from cxda_jax.data.sources import Source
from cxda_jax.data.store import DomainStore, StoreInfo
from cxda_jax.evaluation import compile_task
from cxda_jax.experiment import build_method, make_optimizer
from cxda_jax.types import Array, Episode, Images, Method, Variables

SUPPORT, QUERY = 100, 20  # images of an episode
FEW = 4  # images of a support or a query where a suite only shows that it runs
UNCHANGED = augment.Weak(crop=False, flip=False, rotate=0.0)  # no augmentation, since the peers have none
OPTIMIZER = make_optimizer("sgd", learning_rate=1e-4, momentum=0.9, weight_decay=1e-4)


class Shape(NamedTuple):
    """Images of a benchmark, and what the paper spends on it."""

    image: tuple[int, int, int]  # height, width, channels
    classes: int
    net: str
    steps: int  # of the paper's training: its epochs, of images // 100 tasks each
    validations: int
    paper_minutes: float  # of CXDA's training, on the paper's GPU


SHAPES = {
    "femnist": Shape((28, 28, 1), 62, "cnn", 120_000, 20, 110),
    "cifar_c": Shape((32, 32, 3), 10, "cnn", 56_000, 10, 63.2),
    "tiny_imagenet_c": Shape((64, 64, 3), 200, "resnet50", 51_000, 10, 168),
    "iwildcam": Shape((112, 112, 3), 182, "resnet50", 64_750, 10, 492),
}


class Case(NamedTuple):
    """The work of one timing. A record holds these fields."""

    shape: str  # a key of SHAPES
    method: str
    work: str  # "train": training steps; "infer": adapt to the support and predict the queries
    statistics: str = "flow"  # batch_norm.statistics
    width: int = 128  # channels of the CNN
    dtype: str = "float32"
    tasks: int = 1  # in one step, or predicted at once
    steps: int = 1  # in one compiled program
    support: int = SUPPORT  # images

    @property
    def heads(self) -> int:
        return 8 if self.width % 16 == 0 or SHAPES[self.shape].net == "resnet50" else 1

    def counts(self, small: bool = False) -> list[int]:
        """Support and query images of a task. erm_iid has no support: all images are queries."""
        counts = [0, self.support + QUERY] if self.method == "erm_iid" else [self.support, QUERY]
        return [min(FEW, n) for n in counts] if small else counts


class Runner(NamedTuple):
    """A case that is ready to run."""

    timing: Timing
    lower: Callable[[], Any]  # the lowered program, whose operations XLA counts


def make_runner(case: Case, small: bool = False) -> Runner:
    """A case on random images. `small` takes few images and a small net."""
    (method, episodes, state), key = prepare(case, small), jax.random.key(0)
    source = Source((), lambda *_: iter(()), lambda resident, batch: batch)
    if case.work == "infer":
        answer: Any = compile_task(method, source).answer
        arguments = calibrated(method, state, episodes), episodes, jax.random.split(key, case.tasks)
        return Runner(repeated(lambda: answer(*arguments)), lambda: answer.lower(*arguments))
    learner = train.Learner(method, OPTIMIZER, UNCHANGED)
    run = backend.jit(functools.partial(train.train_call, learner, source, case.steps))
    if case.steps > 1:
        episodes = jax.tree.map(lambda x: jnp.broadcast_to(x, (case.steps, *x.shape)), episodes)
    rest = (), episodes, key
    return Runner(chained(lambda state: run(state, *rest), state), lambda: run.lower(state, *rest))


def prepare(case: Case, small: bool = False) -> tuple[Method, Episode, train.TrainState]:
    """The method of a case, random episodes and a state to start from."""
    config = read(f"{case.shape}:{case.method}")
    config["net"] |= {"width": case.width, "dtype": case.dtype} | ({"stages": (1, 1, 1)} if small else {})
    chosen = {"attention": {"heads": case.heads}, "batch_norm": {"statistics": case.statistics}}
    chosen |= {"finetune": {"steps": 1}, "cotta": {"copies": 2}} if small else {}
    for group in chosen.keys() & config.keys():
        config[group] |= chosen[group]
    method, episodes = build_method(config, random_store(case.shape, domains=3, images=1)), random_episodes(case, small)
    return method, episodes, train.init_state(method, OPTIMIZER, 0, jax.tree.map(lambda x: x[0, :2], episodes.query))


def calibrated(method: Method, state: train.TrainState, episodes: Episode) -> Variables:
    """The variables that the method adapts, calibrated on the first episode's queries if it needs that."""
    return method.calibrate(state.variables, episodes.query.pixels[0]) if method.calibrate else state.variables


def random_episodes(case: Case, small: bool = False) -> Episode:
    """Random images [tasks, n, h, w, c] and labels [tasks, n]."""
    shape, rng = SHAPES[case.shape], np.random.default_rng(0)

    def draw(n: int) -> tuple[Images, Array]:
        pixels = rng.integers(0, 256, (case.tasks, n, *shape.image), np.uint8)
        domain = np.arange(case.tasks * n, dtype=np.int32).reshape(case.tasks, n) % 5
        labels = jnp.asarray(rng.integers(0, shape.classes, domain.shape), jnp.int32)
        return Images(jnp.asarray(pixels), jnp.asarray(domain)), labels

    (support, support_label), (query, label) = map(draw, case.counts(small))
    return Episode(support, query, label, support_label)


def random_store(name: str, domains: int, images: int, pixels: np.ndarray | None = None) -> DomainStore:
    """A data set in memory, a third of its domains in each split; of `pixels` [domains * images, h, w, c] or random."""
    shape, rng, rows = SHAPES[name], np.random.default_rng(0), domains * images
    if pixels is None:
        pixels = np.frombuffer(rng.bytes(rows * math.prod(shape.image)), np.uint8).reshape(rows, *shape.image)
    mean, std = ((value,) * shape.image[-1] for value in (0.5, 0.25))
    info = StoreInfo(f"random {name}", tuple(map(str, range(shape.classes))), mean, std)
    split = tuple(("train", "val", "test")[3 * i // domains] for i in range(domains))
    labels = rng.integers(0, shape.classes, rows).astype(np.int32)
    offsets = np.arange(domains + 1, dtype=np.int64) * images
    return DomainStore(info, pixels, labels, offsets, split, tuple(map(str, range(domains))), "")


def seeds_timing(case: Case, seeds: int, small: bool) -> Timing:
    """Times a training step of several models side by side in one program, as of several seeds."""
    method, episodes, state = prepare(case, small)

    def step(state: train.TrainState) -> Any:
        return train.train_step(train.Learner(method, OPTIMIZER, UNCHANGED), state, episodes, jax.random.key(0))

    return chained(backend.jit(jax.vmap(step)), jax.tree.map(lambda x: jnp.stack([x] * seeds), state))


def tuning_forms(case: Case, small: bool) -> dict[str, Timing]:
    """Times fine-tuning on several tasks: "looped", a program each; "unrolled" in one; "grouped" in one by vmap."""
    method, episodes, state = prepare(case, small)
    variables = calibrated(method, state, episodes)
    together = episodes, jax.random.split(jax.random.key(0), case.tasks)
    tasks = [jax.tree.map(lambda x, i=i: x[i], together) for i in range(case.tasks)]

    def predict(variables: Variables, episode: Episode, key: Array) -> Array:
        return method.predict(method.adapt(variables, episode.support, key), episode.query)

    one, grouped = backend.jit(predict), backend.jit(jax.vmap(predict, in_axes=(None, 0, 0)))
    unrolled = backend.jit(lambda variables, tasks: [predict(variables, *task) for task in tasks])
    return {
        "looped": repeated(lambda: [one(variables, *task) for task in tasks]),
        "unrolled": repeated(lambda: unrolled(variables, tasks)),
        "grouped": repeated(lambda: grouped(variables, *together)),
    }
