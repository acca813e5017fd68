"""The work that python -m tools.bench times: methods that train or predict, by the package's own code, on random images."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cxda_jax.config.reading import read, replaced
from cxda_jax.data import augment
from cxda_jax.data.published import PUBLISHED, sample_store
from cxda_jax.data.sources import Source
from cxda_jax.machine import backend
from cxda_jax.training import loop
from cxda_jax.training.evaluation import compile_task
from cxda_jax.training.experiment import build_method, make_optimizer
from cxda_jax.types import Array, Episode, Images, Method
from tools.bench.measure import Timing, chained, repeated

SUPPORT, QUERY = 100, 20  # images of an episode
FEW = 4  # images of a support or a query where a suite only shows that it runs
UNCHANGED = augment.Weak(crop=False, flip=False, rotate=0.0)  # no augmentation, since the peers have none
OPTIMIZER = make_optimizer("sgd", learning_rate=1e-4, momentum=0.9, weight_decay=1e-4)


class Case(NamedTuple):
    """The work of one timing. A record holds these fields."""

    shape: str  # the published data set whose images it has
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
        return 1 if self.width % 16 else 8

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
        arguments = state.variables, episodes, jax.random.split(key, case.tasks)
        return Runner(repeated(lambda: answer(*arguments)), lambda: answer.lower(*arguments))
    learner = loop.Learner(method, OPTIMIZER, UNCHANGED)
    run = backend.jit(functools.partial(loop.train_call, learner, source, case.steps))
    if case.steps > 1:
        episodes = jax.tree.map(lambda x: jnp.broadcast_to(x, (case.steps, *x.shape)), episodes)
    rest = (), episodes, key
    return Runner(chained(lambda state: run(state, *rest), state), lambda: run.lower(state, *rest))


def prepare(case: Case, small: bool = False) -> tuple[Method, Episode, loop.TrainState]:
    """The method of a case, random episodes and a state to start from."""
    config = read(f"{case.shape}:{case.method}")
    net = {"width": case.width, "dtype": case.dtype} | ({"stages": (1, 1, 1)} if small else {})
    others = {"attention": {"heads": case.heads}, "batch_norm": {"statistics": case.statistics}}
    config = replaced(config, net=net, **{group: of for group, of in others.items() if group in config})
    method, episodes = build_method(config, sample_store(case.shape, 1, 1)), random_episodes(case, small)
    return method, episodes, loop.init_state(method, OPTIMIZER, 0, jax.tree.map(lambda x: x[0, :2], episodes.query))


def random_episodes(case: Case, small: bool = False) -> Episode:
    """Random images [tasks, n, h, w, c] and labels [tasks, n]."""
    shape, rng = PUBLISHED[case.shape], np.random.default_rng(0)

    def draw(n: int) -> tuple[Images, Array]:
        pixels = rng.integers(0, 256, (case.tasks, n, *shape.image), np.uint8)
        domain = np.arange(case.tasks * n, dtype=np.int32).reshape(case.tasks, n) % 5
        labels = jnp.asarray(rng.integers(0, shape.classes, domain.shape), jnp.int32)
        return Images(jnp.asarray(pixels), jnp.asarray(domain)), labels

    (support, support_label), (query, label) = map(draw, case.counts(small))
    return Episode(support, query, label, support_label)
