"""ICRM: in-context risk minimisation (Gupta et al., "Context is Environment", ICLR 2024). Differs from ERM in:

    y_q = W T(f(x_1), ..., f(x_n), f(x_q))        x_1, ..., x_n: the unlabelled support

The support is in a random order, or in that of its places where `present` says which of them hold an image.

T is a causal transformer, whose output at the last image is classified by a linear layer. In training
every image of the sequence is classified, each from the images so far, so one pass teaches every
number of support images from none to all.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cxda_jax.config.fields import COUNT, Field, Group, Range
from cxda_jax.methods.entry import GREEN, Config, Entry, Style
from cxda_jax.methods.erm import erm, outcome
from cxda_jax.nets.building import build_net
from cxda_jax.nets.classifier import Classifier, fresh
from cxda_jax.nets.resnet import LinearHead
from cxda_jax.nets.transformer import Cache, CausalTransformer, check_transformer
from cxda_jax.types import Array, Episode, Images, Inputs, Method, Variables

ICRM_FIELDS = Group("Method icrm.", {
    "features": Field("flat", "Tokens: flat features of an image, or pooled ones.", choices=("flat", "pool")),
    "width": Field(128, "Features of an image in the transformer.", Range(1, 8192), smoke=16),
    "layers": Field(12, "Blocks of the transformer.", Range(1, 1000), smoke=2),
    "heads": Field(4, "Attention heads of a block; they divide the width.", Range(1)),
    "context": Field(100, "The most support images that count; of more, a random choice.", COUNT),
})  # fmt: skip


class WithPrefix(NamedTuple):
    """The result of icrm's adapt(): the support as a sequence that was read."""

    variables: Variables
    cache: Cache  # the encoded support
    place: Array | None  # int32 [n_support]: in the cache, or beyond it for an image that does not count; None: its own


def with_transformer(
    net: Classifier, features: str = "flat", width: int = 128, layers: int = 12, heads: int = 4, context: int = 100
) -> Classifier:
    """The network of icrm(): the trunk of a plain network, a transformer, and a linear layer that reads it out.

    Args:
      net: the plain network.
      features: what a token is: "flat" the flattened map of an image, "pool" the pooled one.
      width: features of an image inside the transformer.
      layers: blocks of the transformer.
      heads: attention heads of a block.
      context: the most support images that count; of more, a random choice, or the last ones of its places.
    """
    check_transformer(width, heads)
    head, dtype = LinearHead(net.head.num_classes, net.head.dtype, initial="xavier"), net.head.dtype
    return net.clone(head=head, features=features, transformer=CausalTransformer(width, layers, heads, context, dtype))


def icrm(net: Classifier) -> Method:
    """ICRM, for a network of with_transformer()."""
    context = net.transformer.context

    def init(key: Array, images: Images) -> Variables:
        return fresh(net, key, images.pixels, lambda net, pixels: read(net, net.map(pixels), len(pixels)))

    def loss(variables: Variables, episode: Episode, key: Array) -> tuple[Array, Any]:
        order = draw_order(key, episode.support, context)
        pixels = jnp.concatenate([episode.support.pixels[order], episode.query.pixels])
        maps, exact = net.apply(variables, pixels, True, mutable=["batch_stats"], method="map")
        logits: Any = net.apply(variables, maps, len(order), method=read)
        ordered = episode.replace(support_label=episode.support_label[order])
        return outcome(variables, exact, ordered, logits[len(order) :], logits[: len(order)])

    def adapt(variables: Variables, support: Images, key: Array) -> WithPrefix:
        pixels, place = support.pixels, None
        if support.present is None:
            order = draw_order(key, support, context)
            pixels, place = pixels[order], jnp.full(len(pixels), context).at[order].set(jnp.arange(len(order)))
        cache: Any = net.apply(variables, net.apply(variables, pixels, method="map"), support.present, method=encode)
        return WithPrefix(variables, cache, place)

    def predict(adapted: WithPrefix, query: Images) -> Any:
        maps = net.apply(adapted.variables, query.pixels, method="map")
        return net.apply(adapted.variables, maps, adapted.cache, method=answer)

    def attention(adapted: WithPrefix, query: Images) -> Array:
        maps = net.apply(adapted.variables, query.pixels, method="map")
        weights: Any = net.apply(adapted.variables, maps, adapted.cache, method=weigh)
        return weights if adapted.place is None else weights.at[..., adapted.place].get(mode="fill", fill_value=0)

    return erm(net)._replace(
        name="icrm", version="2", attention=attention, init=init, loss=loss, adapt=adapt, predict=predict,
        uses_support=True, takes_places=True, stochastic=True,
    )  # fmt: skip


def append(net: Classifier, adapted: WithPrefix, pixels: Array) -> WithPrefix:
    """Adapts to one image [h, w, c] more, which comes after those that were adapted to;
    in a full cache it changes nothing."""
    maps = net.apply(adapted.variables, pixels[None], method="map")
    cache = net.apply(adapted.variables, maps, adapted.cache, method=extend)
    return adapted._replace(cache=cache, place=None)


def draw_order(key: Array, support: Images, context: int) -> Array:
    """Rows of the support in a random order, at most `context` of them."""
    return jax.random.permutation(key, len(support.pixels))[:context]


# Parts of the network, which Classifier.apply() takes as methods. Maps are [n, h, w, c], logits [n, classes].


def read(net: Classifier, maps: Array, length: int) -> Array:
    """Logits of all images: the first `length` are a sequence, each of the others comes after it alone."""
    return net.classify(net.transformer(net.tokens(maps), length))


def encode(net: Classifier, maps: Array, present: Array | None) -> Cache:
    """A sequence, or those of the images that are `present` [n], as answer() needs it."""
    return net.transformer.encode(net.tokens(maps), present)


def answer(net: Classifier, maps: Array, cache: Cache) -> Array:
    """Logits of images that come after the sequence, each alone."""
    return net.classify(net.transformer.next(net.tokens(maps), cache))


def weigh(net: Classifier, maps: Array, cache: Cache) -> Array:
    """Weights [n, heads, places] of images that come after the sequence, on it; see CausalTransformer.weights()."""
    return net.transformer.weights(net.tokens(maps), cache)


def extend(net: Classifier, maps: Array, cache: Cache) -> Cache:
    """The sequence with the one image of `maps` behind it."""
    return net.transformer.append(net.tokens(maps)[0], cache)


def _build(config: Config, inputs: Inputs) -> Method:
    return icrm(with_transformer(build_net(config, inputs), **config.icrm))


_STYLE = Style(GREEN, (8, 1, 0), (7, 2, 3, 2))
ICRM = Entry(_build, {"icrm": ICRM_FIELDS}, _STYLE, varied=True, page="sequence", holds_out=True)
