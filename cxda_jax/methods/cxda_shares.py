"""CXDA for class shares: attention over the buffer finds which classes this device meets, and how the network errs on
images like the query. nets/shares.py has the formulas. Differs from ERM in: adapt, and what trains.

The network itself is that of a training of erm_iid and stays as it is. The adapter learns from tasks of other
images: those whose labels that training has not seen, since there is nothing to correct on images known by heart.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from cxda_jax.fields import COUNT, POSITIVE, Field, Group, Range, check
from cxda_jax.losses import cross_entropy
from cxda_jax.methods.entry import RED, Config, Entry, Style
from cxda_jax.methods.erm import erm
from cxda_jax.nets.building import build_net
from cxda_jax.nets.classifier import Classifier
from cxda_jax.nets.shares import Described, ShareAdapter
from cxda_jax.types import Array, Episode, Images, Inputs, Method, Variables

ADAPTER = "adapter"  # its name among the variables
CXDA_SHARES_FIELDS = Group("Method cxda_shares.", {
    "rank": Field(16, "Numbers of a key.", Range(1, 1024), smoke=4),
    "depth": Field(3, "The first so many maps of the trunk whose means and deviations are an image's style.", COUNT),
    "em_steps": Field(5, "Steps of EM for the shares of the classes.", Range(1, 100)),
})  # fmt: skip


ADAPTER_FIELDS = Group("Training of an adapter on a network that stays as it is, by Adam with a cosine schedule.", {
    "steps": Field(2000, "Training steps.", Range(1, 2**31 - 1), smoke=20),
    "rate": Field(3e-3, "Learning rate at the start.", POSITIVE),
    "tasks_per_step": Field(16, "Tasks of a step.", COUNT, smoke=2),
})  # fmt: skip


class WithBuffer(NamedTuple):
    """The result of adapt(): the variables, and the buffer as the adapter knows it."""

    variables: Variables
    buffer: Described
    present: Array | None  # bool [n]: the places that hold an image; None: all do


def cxda_shares(net: Classifier, rank: int = 16, depth: int = 3, em_steps: int = 5) -> Method:
    """CXDA for class shares.

    Args:
      net: the plain network.
      rank: numbers of a key.
      depth: the first so many maps of the trunk whose moments are an image's style.
      em_steps: steps of EM for the shares of the classes.
    """
    check(CXDA_SHARES_FIELDS, rank=rank, depth=depth, em_steps=em_steps)
    adapter = ShareAdapter(net.head.num_classes, rank, em_steps)

    def describe(variables: Variables, pixels: Array) -> tuple[Array, Array]:
        return logits_and_style(net, variables, pixels, depth)

    def init(key: Array, images: Images) -> Variables:
        plain = erm(net).init(key, images)
        new = fresh_adapter(adapter, key, describe(plain, images.pixels)[1])
        return {kind: {**tree, ADAPTER: new[kind]} for kind, tree in plain.items()}

    return _attending(adapter, describe, init)


def of_described(classes: int, rank: int = 16, em_steps: int = 5) -> Method:
    """cxda_shares() on images that are described already: their pixels are [..., logits and style], one after another.

    Of its variables the adapter's alone are read.
    """
    adapter = ShareAdapter(classes, rank, em_steps)

    def describe(variables: Variables, pixels: Array) -> tuple[Array, Array]:
        flat = pixels.reshape(len(pixels), -1)
        return flat[:, :classes], flat[:, classes:]

    def init(key: Array, images: Images) -> Variables:
        new = fresh_adapter(adapter, key, describe({}, images.pixels)[1])
        return {kind: {ADAPTER: tree} for kind, tree in new.items()}

    return _attending(adapter, describe, init)


def logits_and_style(net: Classifier, variables: Variables, pixels: Array, depth: int) -> tuple[Any, Any]:
    """Logits [n, classes] and style [n, d]: means and deviations over the places of the image and of the trunk's first
    `depth` maps. A map is what a child of the trunk gives, but for convolutions and dense layers."""

    def is_map(module: nn.Module, _: str) -> bool:
        return module.path[:-1] == ("trunk",) and not isinstance(module, nn.Conv | nn.Dense)

    applied: Any = net.apply(variables, pixels, capture_intermediates=is_map, mutable=["intermediates"])
    logits, kept = applied
    outputs = [called["__call__"][0] for called in kept["intermediates"].get("trunk", {}).values()]
    maps: Any = [net.apply(variables, pixels, method="normalise"), *outputs[:depth]]
    moments = []
    for x in maps:
        x, places = x.astype(jnp.float32), tuple(range(1, x.ndim - 1))
        moments += [x.mean(places), x.std(places)]
    return logits, jnp.concatenate(moments, axis=-1)


def fresh_adapter(adapter: ShareAdapter, key: Array, style: Array) -> Variables:
    """New variables of the adapter alone."""
    return {**adapter.init(jax.random.fold_in(key, 1), style, method="keys")}


def _attending(
    adapter: ShareAdapter,
    describe: Callable[[Variables, Array], tuple[Array, Array]],
    init: Callable[[Array, Images], Variables],
) -> Method:
    """The method whose images are described so: (variables, pixels) -> logits and style."""

    def parts_of(variables: Variables) -> Variables:
        return {kind: tree[ADAPTER] for kind, tree in variables.items() if ADAPTER in tree}

    def known(variables: Variables, pixels: Array) -> Described:
        logits, style = jax.lax.stop_gradient(describe(variables, pixels))
        keys: Any = adapter.apply(parts_of(variables), style, method="keys")
        return Described(logits, keys)

    def answer(variables: Variables, query: Described, buffer: Described, present: Array | None) -> Any:
        return adapter.apply(parts_of(variables), query, buffer, present, method="answer")

    def loss(variables: Variables, episode: Episode, key: Array) -> tuple[Array, Any]:
        buffer, query = known(variables, episode.support.pixels), known(variables, episode.query.pixels)
        present = draw_present(key, len(episode.support_label))
        logits = answer(variables, query, buffer, present)
        return cross_entropy(logits, episode.label), {"logits": logits, "batch_stats": variables["batch_stats"]}

    def adapt(variables: Variables, support: Images, key: Array) -> WithBuffer:
        return WithBuffer(variables, known(variables, support.pixels), support.present)

    def put(adapted: WithBuffer, place: Array, image: Images) -> WithBuffer:
        one = known(adapted.variables, image.pixels)
        buffer = jax.tree.map(lambda places, new: places.at[place].set(new[0]), adapted.buffer, one)
        present = None if adapted.present is None else adapted.present.at[place].set(True)
        return WithBuffer(adapted.variables, buffer, present)

    def predict(adapted: WithBuffer, query: Images) -> Any:
        return answer(adapted.variables, known(adapted.variables, query.pixels), adapted.buffer, adapted.present)

    def attention(adapted: WithBuffer, query: Images) -> Any:
        keys, (variables, buffer, present) = known(adapted.variables, query.pixels).keys, adapted
        return adapter.apply(parts_of(variables), keys, buffer.keys, present, method="attention")

    return Method(
        "cxda_shares", "1", init, loss, adapt, predict, attention, takes_places=True, remember=put, trunk="erm_iid"
    )


def draw_present(key: Array, n: int) -> Array:
    """A random part of n places, as a buffer fills: all of them with probability 1/2, else a number whose logarithm is
    uniform."""
    full_key, size_key, order_key = jax.random.split(key, 3)
    some = jnp.exp(jax.random.uniform(size_key) * jnp.log(n + 1.0))
    size = jnp.where(jax.random.bernoulli(full_key), n, jnp.floor(some))
    return jax.random.permutation(order_key, n) < size


def _build(config: Config, inputs: Inputs) -> Method:
    return cxda_shares(build_net(config, inputs), **config["cxda_shares"])


CXDA_SHARES = Entry(
    _build, {"cxda_shares": CXDA_SHARES_FIELDS, "adapter": ADAPTER_FIELDS}, style=Style(RED, "s"), varied=True
)
