"""StatA (Zanella et al., 2025): it starts from ERM's checkpoint, leaves all of its weights as they are, and fits one
Gaussian to each class of the support.

h(x) is the input of the last layer, divided by its length, and p(x) are the checkpoint's probabilities. The anchors
are the means m_k of h over the training images of class k, and the variances v around them, one for each feature.
N_k is a normal density with means u_k and variances s_k, one for each feature. It starts at m_k and v. Again and again

    z_i <- softmax(log p(x_i) + log N(h_i) / T + sum_j a_ij z_j)      for all support images, several times
    b_k = n_k / (n_k + alpha)              n_k: the number of images with argmax z_i = k
    u_k <- b_k (mean of h_i) + (1 - b_k) m_k                                      means with the weights z_i(k)
    s_k <- b_k (mean of (h_i - u_k)^2) + (1 - b_k) (v + (m_k - u_k)^2)

    logits of the query = log p(x_q) + log N(h_q) / T + sum_s a_qs z_s

a_ij is h_i . h_j / (2 K), once if j is among the K nearest neighbours of i, and once more if i is among those of j.

In the publication m_k comes from texts and v from the batch, u_k is scaled to unit length, and the query is a part of
the batch. Here the query changes neither u_k, s_k nor any z_s, so no query sees another.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cxda_jax.config.fields import COUNT, POSITIVE, Field, Group, Range
from cxda_jax.methods.entry import GREY, Style
from cxda_jax.methods.erm import calibrated, entry_of, erm, on_erm, places
from cxda_jax.methods.training_free import BATCH, affinities, encode_and_classify, unit
from cxda_jax.nets.classifier import Classifier
from cxda_jax.types import Array, Images, Known, Method, Variables

INNER = 5  # how often z is computed anew between two updates of the Gaussians, as published
FLOOR = 0.01  # the least variance of a feature, as a share of the mean one: ReLUs leave some features constant
TINY = 1e-8  # added to what is divided by
STATA_FIELDS = Group("Method stata.", {
    "alpha": Field(1.0, "The anchor of a class counts like so many support images.", POSITIVE),
    "neighbours": Field(3, "Neighbours of an image, whose z it shares; 0: none.", Range(0, 10_000)),
    "steps": Field(10, "How often the Gaussians are fitted anew.", COUNT),
    "temperature": Field(50.0, "T, which divides the logarithms of densities.", POSITIVE),
}, at_test=True)  # fmt: skip


class Mixture(NamedTuple):
    """The result of stata's adapt() to one image or more, with the names of the formula."""

    variables: Variables
    means: Array  # u [classes, d]
    variances: Array  # s [classes, d]
    features: Array  # h of the support [n, d]
    z: Array  # of the support [n, classes]; 0 in places without an image
    reach: Array  # [n]: what has a larger cosine would be among the neighbours of an image
    present: Array  # bool [n]


def stata(
    net: Classifier, alpha: float = 1.0, neighbours: int = 3, steps: int = 10, temperature: float = 50.0
) -> Method:
    """StatA on the support, whose Gaussians answer each query; the arguments are the fields of its group."""

    def describe(variables: Variables, pixels: Array) -> tuple[Array, Array]:
        features, logits = encode_and_classify(net, variables, Images(pixels, jnp.zeros(len(pixels), jnp.int32)))
        return unit(features), logits

    def calibrate(variables: Variables, known: Known) -> Variables:
        features = jax.lax.map(lambda pixels: describe(variables, pixels[None])[0][0], known.images, batch_size=BATCH)
        classes = len(net.last_layer(variables)["bias"])
        return {**variables, "calibration": anchors(features, known.labels, classes)}

    def adapt(variables: Variables, support: Images, key: Array) -> Any:
        source, anchor = calibrated("stata", variables)
        if not len(support.pixels):
            return source
        present = places(support)
        features, logits = describe(source, support.pixels)
        scores, (weights, reach) = jax.nn.log_softmax(logits), neighbourhood(features, present, neighbours)

        def assign(means: Array, variances: Array, z: Array) -> Array:
            given = scores + log_density(features, means, variances) / temperature
            z = jax.lax.fori_loop(0, INNER, lambda _, z: jax.nn.softmax(given + weights @ z), z)
            return jnp.where(present[:, None], z, 0)

        def again(_: Any, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            z = assign(*state)
            return *fit_gaussians(features, z, anchor, alpha), z

        start = anchor["means"], jnp.broadcast_to(anchor["variance"], anchor["means"].shape), jnp.exp(scores)
        means, variances, z = jax.lax.fori_loop(0, steps, again, start)
        return Mixture(source, means, variances, features, assign(means, variances, z), reach, present)

    def predict(adapted: Any, query: Images) -> Array:
        if not isinstance(adapted, Mixture):
            return plain.predict(adapted, query)
        features, logits = describe(adapted.variables, query.pixels)
        density = log_density(features, adapted.means, adapted.variances) / temperature
        shared = join(features, adapted, neighbours) @ adapted.z
        return jnp.where(adapted.present.any(), jax.nn.log_softmax(logits) + density + shared, logits)

    plain = erm(net)
    return on_erm(net, "stata", adapt=adapt, predict=predict, calibrate=calibrate)


def neighbourhood(features: Array, present: Array, neighbours: int) -> tuple[Array, Array]:
    """a above, [n, n], of support images; and their `reach`, which is without an end for fewer than `neighbours`."""
    near, cosines = affinities(features, "knn", neighbours, present), features @ features.T
    last = jnp.where(near > 0, cosines, jnp.inf).min(1)
    return (near + near.T) * cosines / (2 * max(1, neighbours)), jnp.where(near.sum(1) < neighbours, -jnp.inf, last)


def join(features: Array, support: Mixture, neighbours: int) -> Array:
    """a above of queries, each of which joins the support on its own: [queries, n]."""
    cosines = features @ support.features.T
    possible = jnp.where(support.present, cosines, -jnp.inf)
    _, which = jax.lax.top_k(possible, min(neighbours, len(support.features)))
    near = (which[..., None] == jnp.arange(len(support.features))).any(1)
    both = near.astype(jnp.float32) + (cosines > support.reach)
    return jnp.where(support.present, both * cosines, 0) / (2 * max(1, neighbours))


def anchors(features: Array, labels: Array, classes: int) -> dict[str, Array]:
    """m above [classes, d] and v above [d], of features [n, d]. A class without any has the mean of all."""
    members = jax.nn.one_hot(labels, classes)
    counts = members.sum(0)[:, None]
    means = jnp.where(counts > 0, members.T @ features / jnp.maximum(1, counts), features.mean(0))
    variance = ((features - means[labels]) ** 2).mean(0)
    return {"means": means, "variance": jnp.maximum(variance, FLOOR * variance.mean() + TINY)}


def log_density(features: Array, means: Array, variances: Array) -> Array:
    """log N of features [n, d] for all classes, without the term that all have: [n, classes]."""
    squares = ((features[:, None] - means) ** 2 / variances).sum(-1)
    return -0.5 * (squares + jnp.log(variances).sum(-1))


def fit_gaussians(features: Array, z: Array, anchor: Mapping[str, Array], alpha: float) -> tuple[Array, Array]:
    """u and s above, both [classes, d]. An image that is not there has z of 0."""
    counts = (jax.nn.one_hot(z.argmax(-1), z.shape[1]) * z.any(-1, keepdims=True)).sum(0)
    b, z = (counts / (counts + alpha))[:, None], z / jnp.maximum(z.sum(0), TINY)
    means = b * (z.T @ features) + (1 - b) * anchor["means"]
    spread = (z.T[..., None] * (features - means[:, None]) ** 2).sum(1)
    return means, b * spread + (1 - b) * (anchor["variance"] + (anchor["means"] - means) ** 2)


STATA = entry_of(stata, {"stata": STATA_FIELDS}, Style(GREY, "D", (1, 2, 5, 2)))
