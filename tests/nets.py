"""Small networks and methods, their inputs and weights, and how near to PyTorch's they must be."""

import contextlib
import functools
import math
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
import pytest
import scipy.special

from cxda_jax.config.reading import checked, default, read, replaced, resolve
from cxda_jax.config.registry import METHODS
from cxda_jax.data.store import DomainStore
from cxda_jax.device.loading import as_store
from cxda_jax.device.model import CompiledMethod, Model
from cxda_jax.disk import models
from cxda_jax.nets.attention import CrossAttention
from cxda_jax.nets.building import NETS
from cxda_jax.nets.classifier import Classifier
from cxda_jax.nets.cnn import CNNHead, CNNTrunk
from cxda_jax.training import experiment
from cxda_jax.types import ADAPTER, Episode, Images, Known, Method
from docs.examples.counted_shares import COUNTED_SHARES
from docs.examples.nnx_net import nnx_net
from docs.examples.vit import vit
from tests import conftest

FEMNIST, CIFAR = ((28, 28, 1), 62), ((32, 32, 3), 10)
KEY = jax.random.key(0)
put = jax.device_put  # compiles nothing, unlike jnp.asarray
softmax = functools.partial(scipy.special.softmax, axis=-1)


def make_net(shape, classes, width=16, **options) -> Classifier:
    """Pixels pass as they are: mean 0 and deviation 1."""
    return Classifier(CNNTrunk(width), CNNHead(classes), (0.0,) * shape[2], (1.0,) * shape[2], **options)


def make_attending(shape, classes, features, width=16, **options) -> Classifier:
    side = ((shape[0] - 4) // 2 - 4) // 2
    dim = width * side**2 if features == "flat" else width
    return make_net(shape, classes, width, attention=CrossAttention(dim, **options), features=features)


def make_images(shape, n, seed=0):
    pixels = np.random.default_rng(seed).random((n, *shape), np.float32)
    return Images(put(pixels), put(np.zeros(n, np.int32)))


def make_episode(shape, classes, support=12, query=8, seed=1) -> Episode:
    labels = np.random.default_rng(7).integers(0, classes, support + query).astype(np.int32)
    images = make_images(shape, support, seed), make_images(shape, query, -seed + 1000)
    return Episode(*images, put(labels[:query]), put(labels[query:]))


def fill(shapes, seed=9):
    """Random values for a tree of shapes, as large as initial ones. None is 0 or 1: a missing operation shows."""
    rng = np.random.default_rng(seed)

    def value(path, leaf):
        name, fan_in = path[-1].key, max(1, math.prod(leaf.shape[:-1]))
        low, high = (0.8, 1.2) if name in ("scale", "var") else (-(fan_in**-0.5), fan_in**-0.5)
        drawn = rng.uniform(low, high, leaf.shape) * (0.2 if leaf.ndim == 1 and low < 0 else 1)
        return put(drawn.astype(np.float32))

    return jax.tree_util.tree_map_with_path(value, shapes)


def initialised(method, shape):
    return fill(jax.eval_shape(method.init, KEY, make_images(shape, 2)))


TINY = Classifier(CNNTrunk(8), CNNHead(4), (0.5,), (0.5,))  # the network of build_method()
ALL = (*METHODS, "counted_shares")  # with the documentation's example


@contextlib.contextmanager
def with_examples():
    """A context in which the package knows the documentation's examples."""
    with mock.patch.dict(METHODS, counted_shares=COUNTED_SHARES), mock.patch.dict(NETS, vit=vit, nnx_net=nnx_net):
        yield


def build_method(name, features="pool", **changes) -> Method:
    """A method at the size of a test; changes are written group__field=value."""
    with with_examples():
        config = default()
        config.method, config.net.width, config.attention.features, config.attention.heads = name, 8, features, 2
        config.cml.width, config.finetune.steps, config.finetune.rate, config.cotta.copies = 4, 2, 5.0, 3
        config.icrm.update(width=8, layers=2, heads=2, context=16)
        for field, value in changes.items():
            group, _, leaf = field.partition("__")
            config[group][leaf] = value
        images = np.zeros((2, 16, 16, 1), np.uint8)
        offsets = np.array([0, 2])
        store = DomainStore(conftest.INFO, images, np.zeros(2, np.int32), offsets, ("train",), ("d0",), "")
        return experiment.build_method(checked(resolve(config)), store)


class Case(NamedTuple):
    """A method with variables, and its functions, each compiled once for all tests of a process."""

    method: Method
    fresh: Any  # of init()
    variables: Any
    adapt: Any
    predict: Any
    loss: Any
    traced: list[str]  # a name for each time that a function was traced

    def answer(self, episode, key=KEY):
        return self.predict(self.adapt(self.variables, episode.support, key), episode.query)


@functools.cache
def case_of(name, features="pool") -> Case:
    few = {f"strong__{part}": 0.0 for part in ("hue", "rotate", "translate", "scale", "blur")}  # slow to compile
    method, traced = build_method(name, features, **few), []

    def compiled(function):
        def called(*arguments):
            traced.append(function.__name__)
            return function(*arguments)

        return jax.jit(called)

    adapt, predict, loss = (compiled(f) for f in (method.adapt, method.predict, method.loss))
    fresh = jax.jit(method.init)(KEY, conftest.make_episode().support)
    variables = {**fresh}
    # Running statistics as after some training. With initial ones hardly any ReLU of so small a network is alive, and
    # most tests would compare constants.
    trainer = method.frozen.trains_as if method.frozen else method.trains_as
    source, network = case_of(trainer).loss if trainer else loss, variables
    if method.frozen:
        network = {kind: {name: x for name, x in tree.items() if name != ADAPTER} for kind, tree in variables.items()}
    for seed in range(100, 120):
        network = {**network, "batch_stats": source(network, conftest.make_episode(seed), KEY)[1]["batch_stats"]}
    variables["batch_stats"] = {**variables["batch_stats"], **network["batch_stats"]}
    if method.calibrate:
        variables = method.calibrate(variables, conftest.make_known())
    return Case(method, fresh, variables, adapt, predict, loss, traced)


def close(a, b, tolerance=1e-5):
    """Within `tolerance` of the larger of 1 and the largest entry, for each leaf."""
    jax.tree.map(lambda x, y: assert_close(x, y, tolerance), a, b)


def assert_close(ours, theirs, tolerance=1e-4):
    """Within `tolerance` of the larger of 1 and the largest entry."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * max(1.0, np.abs(theirs).max()))


def assert_within_some_draw(error_of, tolerance=1e-4):
    """Asserts a small error on one of three draws of images.

    Rounding may move an activation across zero before a ReLU, or change the largest of a window, at times. A wrong
    gradient differs on all.
    """
    assert any(error_of(seed) < tolerance for seed in (2, 3, 4)), f"gradients differ by more than {tolerance}"


def total(tree) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def nchw(pixels):
    torch = pytest.importorskip("torch")
    return torch.from_numpy(np.array(pixels).transpose(0, 3, 1, 2).copy())


def tensor(x):
    torch = pytest.importorskip("torch")
    return torch.from_numpy(np.array(x))


def torch_named(tree, name=".".join) -> dict[str, Any]:
    """A Flax collection in PyTorch's layouts; `name` makes a layer's name of its path."""
    kinds = {"kernel": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var"}
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        *layers, kind = (part.key for part in path)
        value = np.asarray(leaf)
        value = value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T
        found[f"{name(layers)}.{kinds.get(kind, kind)}"] = tensor(np.ascontiguousarray(value))
    return found


CARD = models.Card(
    **dict.fromkeys(("method", "data_hash", "provenance", "licence", "package", "commit"), ""), seed=0, step=0,
    data="tiny", class_names=tuple("abcd"), shape=(16, 16, 1), fit="pad", background=(255, 255, 255), mean=(0.5,),
    std=(0.5,), metric="accuracy", test=None, gain=None,
)  # fmt: skip


def random_model(method: str, side: int = 20, **fields) -> Model:
    """A small model, none of whose parameters and statistics has its initial value. A field is group__name."""
    rng = np.random.default_rng(0)
    config = read(f"glyphs:{method},smoke")
    heads = 3 if fields.get("net__name", "cnn") == "cnn" else 4
    for name, value in {"net__width": 6, "cxda_any__learned": 3, **fields, "attention__heads": heads}.items():
        group, field = name.split("__")
        if group in config:
            config = replaced(config, **{group: {field: value}})
    card = CARD._replace(method=method, shape=(side, side, 1), mean=(0.9,), std=(-0.7,), class_names=tuple("abcdefg"))
    built = experiment.build_method(config, as_store(card))
    images = Images(np.zeros((2, *card.shape), np.float32), np.zeros(2, np.int32))
    variables = jax.device_get(jax.jit(built.init)(jax.random.key(0), images))
    moved = jax.tree.map(lambda x: x + rng.normal(0, 0.15, x.shape).astype(np.float32), variables)
    moved["batch_stats"] = jax.tree.map(lambda x: np.abs(x) + np.float32(0.1), moved["batch_stats"])
    if ADAPTER in moved["batch_stats"]:
        moved["batch_stats"][ADAPTER]["std"] *= np.float32(0.1)  # a part of the style is clipped then
    moved = jax.device_put(moved)
    if built.calibrate:
        images, labels = rng.integers(0, 256, (9, *card.shape), np.uint8), np.arange(9) % len(card.class_names)
        moved = built.calibrate(moved, Known(images, labels, images, labels, labels % 3))
    adapt, predict, attention = (part and jax.jit(part) for part in (built.adapt, built.predict, built.attention))
    programs = CompiledMethod(adapt, predict, attention)
    return Model(card, built, moved, programs, config=config)


def assert_equal_trees(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
