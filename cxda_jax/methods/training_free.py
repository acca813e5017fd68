"""T3A, LAME and the activation shift of FOA: they start from ERM's checkpoint and leave all of its weights as they are.

h(x) is the input of the last layer, w_k and b_k are this layer's weights and bias of class k,
and p(x) = softmax(W h(x) + b).

t3a            (Iwasawa and Matsuo, 2021) differs from ERM in: adapt, which replaces the last layer by prototypes c_k

    S_k = w_k and h(x_s) for all support images with argmax p(x_s) = k; of these, the K with the lowest entropy of p
    c_k = unit(sum of unit(s) over S_k),  logits of the query = h(x_q) . c_k

lame           (Boudiaf et al., 2022) differs from ERM in: predict, where the query joins the support; a_ij is their
               affinity

    z_i = p(x_i), then again and again  z_i <- softmax(log p(x_i) + sum_j a_ij z_j);  the query's z is its answer

feature_shift  (FOA's activation shift, Niu et al., 2024) differs from ERM in: adapt, which moves the mean of the
               features

    logits of the query = W (h(x_q) + gamma (m - mean of h(x_s))) + b      m: mean of h over training images
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cxda_jax.config.fields import COUNT, NOT_NEGATIVE, Field, Group, Range
from cxda_jax.methods.entry import BLACK, GREEN, SKY, Style
from cxda_jax.methods.erm import calibrated, entry_of, on_erm, places
from cxda_jax.nets.classifier import Classifier
from cxda_jax.types import Array, Images, Known, Method, Variables

FLOOR = 1e-10  # added to LAME's probabilities before the logarithm, as published
BATCH = 100  # training images that calibrate() holds at once

T3A_FIELDS = Group("Method t3a.", {
    "keep": Field(20, "Vectors that make a class's prototype, those of the lowest entropy; 0: all.",
                  Range(0, 10_000)),
}, at_test=True)  # fmt: skip
LAME_FIELDS = Group("Method lame.", {
    "affinity": Field("knn", "Of two images: knn 1 for neighbours, else 0; rbf a Gaussian of the distance; "
                             "linear the cosine.",
                      choices=("knn", "rbf", "linear")),
    "neighbours": Field(5, "knn: neighbours of an image; rbf: the last of them gives the width.", COUNT),
    "steps": Field(50, "Fixed-point steps.", COUNT),
}, at_test=True)  # fmt: skip
FEATURE_SHIFT_FIELDS = Group("Method feature_shift.", {
    "gamma": Field(1.0, "Share of the shift that is applied.", NOT_NEGATIVE),
}, at_test=True)  # fmt: skip


class WithSupport(NamedTuple):
    """The result of lame's adapt(): the variables, and the support's unit features
    [n, d] and log-probabilities [n, classes]."""

    variables: Variables
    features: Array
    scores: Array
    present: Array | None = None  # [n]: the places that hold an image; None: all


def t3a(net: Classifier, keep: int = 20) -> Method:
    """T3A. The support fills the prototypes once, and then they stay as they are for all queries.

    Args:
      net: the network.
      keep: K above, how many vectors of a class make its prototype, its own weights among them; 0: all.
    """

    def adapt(variables: Variables, support: Images, key: Array) -> Variables:
        if not len(support.pixels):
            return variables
        last = net.last_layer(variables)
        features, _ = encode_and_classify(net, variables, support)
        kernel = prototypes(features, last["kernel"], last["bias"], keep, support.present)
        adapted = {"kernel": kernel, "bias": jnp.zeros_like(last["bias"])}
        if support.present is not None:
            some = support.present.any()
            adapted = jax.tree.map(lambda new, old: jnp.where(some, new, old), adapted, {**last})
        return net.with_last_layer(variables, adapted)

    return on_erm(net, "t3a", adapt=adapt)


def prototypes(features: Array, kernel: Array, bias: Array, keep: int, present: Array | None = None) -> Array:
    """The prototypes [d, classes] of T3A. Vectors whose entropies are equal stay or go together.

    Args:
      features: of the support, [n, d].
      kernel: of the last layer, [d, classes].
      bias: of the last layer, [classes].
      keep: as in t3a().
      present: bool [n], the features that count; None: all.
    """
    classes = len(bias)
    vectors = jnp.concatenate([kernel.T, features])
    log_p = jax.nn.log_softmax(vectors @ kernel + bias)
    entropy = -(jnp.exp(log_p) * log_p).sum(-1)
    owner = jnp.concatenate([jnp.arange(classes), log_p[classes:].argmax(-1)])
    if present is not None:
        owner = owner.at[classes:].set(jnp.where(present, owner[classes:], classes))  # of no class
    member = jax.nn.one_hot(owner, classes)
    if keep:
        surer = (entropy[None] < entropy[:, None]) & (owner[None] == owner[:, None])  # [i, j]: j is surer than i
        member *= surer.sum(-1, keepdims=True) < keep
    return unit(unit(vectors).T @ member, axis=0)


def lame(net: Classifier, affinity: str = "knn", neighbours: int = 5, steps: int = 50) -> Method:
    """LAME on the support and one query at a time, so that no query sees another.

    Args:
      net: the network.
      affinity: "knn", "rbf" or "linear"; see affinities().
      neighbours: of an image, for "knn" and "rbf".
      steps: how often all z are computed anew.
    """

    def compare(variables: Variables, images: Images) -> tuple[Array, Array, Array]:
        features, logits = encode_and_classify(net, variables, images)
        return unit(features), jnp.log(jax.nn.softmax(logits) + FLOOR), logits

    def adapt(variables: Variables, support: Images, key: Array) -> WithSupport:
        return WithSupport(variables, *compare(variables, support)[:2], support.present)

    def predict(adapted: WithSupport, query: Images) -> Array:
        features, scores, logits = compare(adapted.variables, query)
        if not len(adapted.features):
            return logits

        present = None if adapted.present is None else jnp.append(adapted.present, True)

        def answer(feature: Array, score: Array) -> Array:
            everything = jnp.vstack([adapted.features, feature]), jnp.vstack([adapted.scores, score])
            return regularise(*everything, affinity, neighbours, steps, present)[-1]

        found = jax.vmap(answer)(features, scores)
        return found if adapted.present is None else jnp.where(adapted.present.any(), found, logits)

    return on_erm(net, "lame", adapt=adapt, predict=predict)


def regularise(
    features: Array, scores: Array, affinity: str, neighbours: int, steps: int, present: Array | None = None
) -> Array:
    """LAME's fixed-point steps on n images. Returns log p(x_i) + sum_j a_ij z_j of the last step, [n, classes].

    Args:
      features: of unit length, [n, d].
      scores: log p(x), [n, classes].
      affinity: as in lame(), likewise `neighbours` and `steps`.
      present: bool [n], the images that there are; None: all.
    """
    weights = affinities(features, affinity, neighbours, present)
    return jax.lax.fori_loop(0, steps, lambda _, logits: scores + weights @ jax.nn.softmax(logits), scores)


def affinities(features: Array, affinity: str, neighbours: int, present: Array | None = None) -> Array:
    """LAME's affinities [n, n] of unit features [n, d], for two images or more;
    0 for images that are not `present` [n].

    "knn": a_ij is 1 where j is among the nearest neighbours of i, of equally near ones the first,
    and 0 elsewhere. "rbf": exp(-|h_i - h_j|^2 / (2 s^2)), where s is the mean distance of an image
    to its last neighbour. "linear": h_i . h_j.
    """
    products = features @ features.T
    there = jnp.ones(len(features), bool) if present is None else present
    both = there[:, None] & there
    if affinity == "linear":
        return jnp.where(both, products, 0)
    lengths = jnp.diag(products)
    distances = jnp.maximum(0, lengths[:, None] + lengths - 2 * products)  # squared
    others = jnp.where(jnp.eye(len(features), dtype=bool) | ~both, jnp.inf, distances)
    nearest, which = jax.lax.top_k(-others, min(neighbours, len(features) - 1))
    if affinity == "knn":
        among = (which[..., None] == jnp.arange(len(features))).any(1)
        # Of too few others, the nearest are the image itself and free places too.
        return (among & jnp.isfinite(others)).astype(jnp.float32)
    last = -nearest[:, jnp.minimum(neighbours, there.sum() - 1) - 1, None]  # to the last neighbour
    width = jnp.sqrt(last[:, 0]).mean(where=there)
    return jnp.where(both, jnp.exp(-distances / jnp.maximum(2 * width**2, 1e-12)), 0)


def feature_shift(net: Classifier, gamma: float = 1.0) -> Method:
    """FOA's activation shift, with the mean over the whole support in place of a moving average over batches.

    Args:
      net: the network.
      gamma: the share of the shift that is applied.
    """

    def calibrate(variables: Variables, known: Known) -> Variables:
        def feature(pixels: Array) -> Array:
            return encode_and_classify(net, variables, Images(pixels[None], jnp.zeros(1, jnp.int32)))[0][0]

        mean = jax.lax.map(feature, known.images, batch_size=BATCH).mean(0)
        return {**variables, "calibration": {"mean": mean}}

    def adapt(variables: Variables, support: Images, key: Array) -> Variables:
        source, kept = calibrated("feature_shift", variables)
        if not len(support.pixels):
            return source
        last, (features, _) = net.last_layer(source), encode_and_classify(net, source, support)
        # The last layer is linear, so a shift of its input is a shift of its bias.
        there = places(support)
        mean = jnp.where(there[:, None], features, 0).sum(0) / jnp.maximum(1, there.sum())
        shift = jnp.where(there.any(), gamma * (kept["mean"] - mean), 0.0)
        return net.with_last_layer(source, {**last, "bias": last["bias"] + shift @ last["kernel"]})

    return on_erm(net, "feature_shift", adapt=adapt, calibrate=calibrate)


def encode_and_classify(net: Classifier, variables: Variables, images: Images) -> tuple[Any, Any]:
    """Features h(x) [n, d] and logits [n, classes], normalised by the checkpoint's statistics."""
    maps = net.apply(variables, images.pixels, method="map")
    return net.apply(variables, maps, method="before_last"), net.apply(variables, maps, method="classify")


def unit(vectors: Array, axis: int = -1) -> Array:
    """Vectors along an axis, each divided by its length; zeros stay zeros."""
    return vectors / jnp.maximum(1e-12, jnp.linalg.norm(vectors, axis=axis, keepdims=True))


T3A = entry_of(t3a, {"t3a": T3A_FIELDS}, Style(GREEN, "h", (3, 1, 3, 4)))
LAME = entry_of(lame, {"lame": LAME_FIELDS}, Style(SKY, "8", (1, 1, 1, 5)))
FEATURE_SHIFT = entry_of(feature_shift, {"feature_shift": FEATURE_SHIFT_FIELDS}, Style(BLACK, (6, 1, 0), (8, 1, 1, 1)))
