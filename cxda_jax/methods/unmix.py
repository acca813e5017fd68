"""Un-mixing: EM for class shares in clusters of a mixed buffer, without a training. Differs from MLLS in the images
that count for a query.

A buffer may hold images of several devices, each with class shares of its own. k-means deals it into clusters by keys,
and a query is corrected by the images of the cluster whose centre is nearest to its key:

    k = D^T s       s: the style of an image; D: the directions in which validation domains differ most (Fisher)

The shares of each cluster are those of mlls(), with smaller smoothing, since a cluster has few images.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cxda_jax.config.fields import COUNT, Field, Group, Range
from cxda_jax.methods.cxda_shares import ADAPTER_DEFAULTS, discriminants, logits_and_style
from cxda_jax.methods.entry import GREEN, Style
from cxda_jax.methods.erm import calibrated, entry_of, erm, on_erm, places
from cxda_jax.methods.label_shift import FLOOR, SMOOTHING, STEPS, fit_temperature, shares_by_em, shares_of
from cxda_jax.methods.training_free import BATCH
from cxda_jax.nets.classifier import Classifier
from cxda_jax.nets.shares import LARGEST, SMALLEST
from cxda_jax.types import Array, Images, Known, Method, Variables

CLUSTERS, FEW, ROUNDS, RANK = 5, 3.0, 20, ADAPTER_DEFAULTS.rank  # rounds of k-means; numbers of a key
UNMIX_FIELDS = Group("Method unmix.", {
    "clusters": Field(CLUSTERS, "Of the buffer.", Range(1, 1000)),
    "maps": Field(ADAPTER_DEFAULTS.maps, "As in cxda_shares.", COUNT),
    "steps": STEPS, "smoothing": SMOOTHING._replace(default=FEW),
}, at_test=True)  # fmt: skip


class Unmixed(NamedTuple):
    """What adapt() finds.

    Attributes:
      variables: of the network, with what it is calibrated by.
      centres: of the clusters, [clusters, rank].
      shares: of the classes in each, [clusters, classes].
      some: whether there is an image.
    """

    variables: Variables
    centres: Array
    shares: Array
    some: Array


def unmix(net: Classifier, clusters: int = CLUSTERS, maps: int = 6, steps: int = 50, smoothing: float = FEW) -> Method:
    """Un-mixing; the arguments are the fields of its group."""
    plain = erm(net)

    def calibrate(variables: Variables, known: Known) -> Variables:
        def describe(pixels: Array) -> Any:
            return jax.tree.map(lambda x: x[0], logits_and_style(net, variables, pixels[None], maps))

        logits, style = jax.lax.map(describe, known.unseen, batch_size=BATCH)
        mean, std, (scale, bias) = style.mean(0), style.std(0) + SMALLEST, fit_temperature(logits, known.unseen_labels)
        like = jax.ShapeDtypeStruct((style.shape[1], RANK), jnp.float32)
        directions = jax.pure_callback(_directions, like, _scaled(style, mean, std), known.unseen_domains)
        shares = shares_of(known.unseen_labels, logits.shape[1])
        kept = {"shares": shares, "scale": scale, "bias": bias, "mean": mean, "std": std, "directions": directions}
        return {**variables, "calibration": kept}

    def describe(variables: Variables, pixels: Array) -> tuple[Array, Array]:
        """Calibrated logits, and keys."""
        source, kept = calibrated("unmix", variables)
        logits, style = logits_and_style(net, source, pixels, maps)
        keys = _scaled(style, kept["mean"], kept["std"]) @ kept["directions"]
        return logits * kept["scale"] + kept["bias"], keys

    def adapt(variables: Variables, support: Images, key: Array) -> Any:
        source, kept = calibrated("unmix", variables)
        if not len(support.pixels):
            return source
        (z, keys), present = describe(variables, support.pixels), places(support)
        given = jax.nn.softmax(z), keys, present, kept["shares"], clusters, steps, smoothing
        return Unmixed(variables, *shares_in_clusters(*given), present.any())

    def predict(adapted: Any, query: Images) -> Array:
        if not isinstance(adapted, Unmixed):
            return plain.predict(adapted, query)
        source, kept = calibrated("unmix", adapted.variables)
        z, keys = describe(adapted.variables, query.pixels)
        shares = adapted.shares[distances(keys, adapted.centres).argmin(1)]
        corrected = z + jnp.log(jnp.maximum(FLOOR, shares) / kept["shares"])
        return jnp.where(adapted.some, corrected, plain.predict(source, query))

    return on_erm(net, "unmix", adapt=adapt, predict=predict, calibrate=calibrate)


def _scaled(style: Array, mean: Array, std: Array) -> Array:
    """As in nets/shares.py."""
    return jnp.clip((style - mean) / std, -LARGEST, LARGEST)


def _directions(style: Any, domains: Any) -> np.ndarray:
    """discriminants() [d, RANK]; zeros where there are fewer."""
    found = discriminants(np.asarray(style, np.float64), np.asarray(domains), RANK)
    return np.pad(found, [(0, 0), (0, RANK - found.shape[1])]).astype(np.float32)


def shares_in_clusters(
    p: Array, keys: Array, present: Array, trained: Array, clusters: int, steps: int, smoothing: float
) -> tuple[Array, Array]:
    """The centres of some clusters [clusters, rank] and the shares of the classes in each [clusters, classes].

    The first centre is the image furthest from the mean, and each other one the image furthest from all centres: so
    the order of the images changes nothing.

    Args:
      p: probabilities of images, [n, classes].
      keys: of these, [n, rank].
      present: [n], as how many images each place counts: 0 or 1.
      trained: as in shares_by_em(), likewise `steps` and `smoothing`.
      clusters: how many.
    """

    def furthest(centres: Array) -> Array:
        return keys[jnp.where(present, distances(keys, centres).min(1), -1).argmax()]

    def members(centres: Array) -> Array:
        return jax.nn.one_hot(distances(keys, centres).argmin(1), clusters) * present[:, None]

    def again(_: Array, centres: Array) -> Array:
        own = members(centres)
        count = own.sum(0)[:, None]
        return jnp.where(count > 0, own.T @ keys / jnp.maximum(count, 1), centres)

    mean = (keys * present[:, None]).sum(0) / jnp.maximum(present.sum(), 1)
    centres = jnp.tile(furthest(mean[None]), (clusters, 1))
    centres = jax.lax.fori_loop(1, clusters, lambda i, found: found.at[i].set(furthest(found)), centres)
    centres = jax.lax.fori_loop(0, ROUNDS, again, centres)
    em = jax.vmap(lambda weights: shares_by_em(p, trained, steps, smoothing, weights))
    return centres, em(members(centres).T)


def distances(points: Array, centres: Array) -> Array:
    """Squared, [points, centres]."""
    return jnp.square(points[:, None] - centres).sum(-1)


UNMIX = entry_of(unmix, {"unmix": UNMIX_FIELDS}, Style(GREEN, "D", (2, 1, 4, 1)))
