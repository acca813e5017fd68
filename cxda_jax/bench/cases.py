"""The work that launch.benchmark times: methods that train or predict on random images of a benchmark's shape.

Training and evaluation run through the package's own code.
"""

import functools
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
SGD = "sgd", 1e-4, 0.9, 1e-4  # name, learning rate, momentum, weight decay


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
    """What one timing is of. A record holds these fields."""

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
    def net(self) -> str:
        return SHAPES[self.shape].net

    @property
    def heads(self) -> int:
        return 8 if self.width % 16 == 0 or self.net == "resnet50" else 1

    @property
    def counts(self) -> tuple[int, int]:
        """Support and query images of a task. erm_iid has no support: all images are queries."""
        return (0, self.support + QUERY) if self.method == "erm_iid" else (self.support, QUERY)

    def reduced_counts(self, small: bool) -> list[int]:
        return [min(FEW, n) if small else n for n in self.counts]


class Runner(NamedTuple):
    """A case that is ready to run."""

    timing: Timing
    lower: Callable[[], Any]  # the lowered program, whose operations XLA counts


def make_runner(case: Case, small: bool = False) -> Runner:
    """A case on random images. `small` takes few images and a small net."""
    method, key = build(case, small), jax.random.key(0)
    episodes = random_episodes(case, small)
    source = Source((), lambda *_: iter(()), lambda resident, batch: batch)
    optimizer = make_optimizer(*SGD)
    state = train.init_state(method, optimizer, 0, two_images(episodes))
    if case.work == "infer":
        answer: Any = compile_task(method, source).answer
        arguments = state.variables, episodes, jax.random.split(key, case.tasks)
        return Runner(repeated(lambda: answer(*arguments)), lambda: answer.lower(*arguments))
    run = backend.jit(functools.partial(train.train_call, method, optimizer, UNCHANGED, source, case.steps))
    batch = episodes
    if case.steps > 1:
        batch = jax.tree.map(lambda x: jnp.broadcast_to(x, (case.steps, *x.shape)), episodes)
    return Runner(chained(lambda state: run(state, (), batch, key), state), lambda: run.lower(state, (), batch, key))


def build(case: Case, small: bool = False) -> Method:
    config = read(f"{case.shape}:{case.method}")
    config["net"] |= {"width": case.width, "dtype": case.dtype}
    config["attention"]["heads"] = case.heads
    config["batch_norm"]["statistics"] = case.statistics
    if small:
        config["net"]["stages"] = (1, 1, 1)
        config["finetune"]["steps"], config["cotta"]["copies"] = 1, 2
    return build_method(config, random_store(case.shape, domains=3, images=1))


def random_episodes(case: Case, small: bool = False) -> Episode:
    """Random images [tasks, n, h, w, c] and labels [tasks, n]."""
    shape, rng, parts = SHAPES[case.shape], np.random.default_rng(0), []
    for n in case.reduced_counts(small):
        pixels = rng.integers(0, 256, (case.tasks, n, *shape.image), np.uint8)
        domain = np.arange(case.tasks * n, dtype=np.int32).reshape(case.tasks, n) % 5
        parts.append(Images(jnp.asarray(pixels), jnp.asarray(domain)))
        parts.append(jnp.asarray(rng.integers(0, shape.classes, (case.tasks, n)), jnp.int32))
    support, support_label, query, label = parts
    return Episode(support, query, label, support_label)


def two_images(episodes: Episode) -> Images:
    """Two query images of the first task, for shapes."""
    return jax.tree.map(lambda x: x[0, :2], episodes.query)


def random_store(name: str, domains: int, images: int, pixels: np.ndarray | None = None) -> DomainStore:
    """A data set of one of SHAPES in memory: a third of its domains each for train, val and test, so many images in each.

    `pixels` are uint8 [domains * images, h, w, c]; random if None.
    """
    shape, rng = SHAPES[name], np.random.default_rng(0)
    rows, channels = domains * images, shape.image[-1]
    if pixels is None:
        pixels = np.frombuffer(rng.bytes(rows * int(np.prod(shape.image))), np.uint8).reshape(rows, *shape.image)
    info = StoreInfo(f"random {name}", tuple(map(str, range(shape.classes))), (0.5,) * channels, (0.25,) * channels)
    split = tuple(("train", "val", "test")[3 * i // domains] for i in range(domains))
    labels = rng.integers(0, shape.classes, rows).astype(np.int32)
    offsets = np.arange(domains + 1, dtype=np.int64) * images
    return DomainStore(info, pixels, labels, offsets, split, tuple(map(str, range(domains))), "")


def seeds_timing(case: Case, seeds: int, small: bool) -> Timing:
    """Times a training step of several models, one for each seed, side by side in one program."""
    method, episodes, optimizer = build(case, small), random_episodes(case, small), make_optimizer(*SGD)
    each = [train.init_state(method, optimizer, seed, two_images(episodes)) for seed in range(seeds)]

    def step(state: train.TrainState) -> Any:
        return train.train_step(method, optimizer, UNCHANGED, state, episodes, jax.random.key(0))

    return chained(backend.jit(jax.vmap(step)), jax.tree.map(lambda *leaves: jnp.stack(leaves), *each))


def fine_tuning_timings(case: Case, small: bool) -> dict[str, Timing]:
    """Times three forms of fine-tuning on several tasks.

    "looped" runs a program for each task. "unrolled" is one program, with a task after another. "grouped" is one program, made
    by vmap.
    """
    method, episodes, key = build(case, small), random_episodes(case, small), jax.random.key(0)
    variables: Variables = backend.jit(method.init)(key, two_images(episodes))
    if method.calibrate:
        variables = method.calibrate(variables, episodes.query.pixels[0])
    together = episodes, jax.random.split(key, case.tasks)
    tasks = [jax.tree.map(lambda x, i=i: x[i], together) for i in range(case.tasks)]

    def predict(variables: Variables, episode: Episode, key: Array) -> Array:
        return method.predict(method.adapt(variables, episode.support, key), episode.query)

    one, all_tasks = backend.jit(predict), backend.jit(lambda variables, tasks: [predict(variables, *t) for t in tasks])
    vmapped = backend.jit(jax.vmap(predict, in_axes=(None, 0, 0)))
    return {
        "looped": repeated(lambda: [one(variables, *task) for task in tasks]),
        "unrolled": repeated(lambda: all_tasks(variables, tasks)),
        "grouped": repeated(lambda: vmapped(variables, *together)),
    }
