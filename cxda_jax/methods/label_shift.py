"""Prior shift, MLLS and BBSE: they start from ERM's checkpoint, estimate the shares of the classes on this device from
the support, and correct the answers for them.

p_s are the checkpoint's probabilities of support image s, t the shares of the classes among training images, and q
those on the device. The query's logits get log q - log t.

prior_shift    (Saerens, Latinne and Decaestecker, 2002) has q of maximum likelihood by EM, from q = t:

    r_s(k) = p_s(k) q(k) / t(k), divided by its sum over k;  q(k) <- (sum of r_s(k) over the support + a t(k)) / (n + a)

mlls           (Alexandari, Kundaje and Shrikumar, 2020) does so with calibrated p_s, and answers with them:

    p = softmax(z / T + b)      z: logits; T and b have the least cross-entropy on images that training has not seen

bbse           (Lipton, Wang and Smola, 2018) compares the mean m of p_s with the means C(k) of p over each class k:

    q of least |sum of q(k) C(k) - m|, cut off at 0 and divided by its sum; then (n q + a t) / (n + a)

The unseen images, of which mlls has T and b, and bbse C, are those of validation domains.

Without the term with a, the published form, a few images would rule out most classes.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
import scipy.special

from cxda_jax.config.fields import COUNT, NOT_NEGATIVE, Field, Group
from cxda_jax.losses import into_slopes
from cxda_jax.methods.entry import BLUE, PURPLE, RED, Style
from cxda_jax.methods.erm import calibrated, entry_of, on_erm, places
from cxda_jax.methods.training_free import BATCH
from cxda_jax.nets.classifier import Classifier
from cxda_jax.types import Array, Images, Known, Method, Variables

FLOOR = 1e-6  # of shares that are divided by, or whose logarithm is taken
STEPS = Field(50, "How often the shares of the classes are computed anew.", COUNT)
SMOOTHING = Field(10.0, "The shares in training count like so many support images.", NOT_NEGATIVE)
PRIOR_SHIFT_FIELDS = Group("Method prior_shift.", {"steps": STEPS, "smoothing": SMOOTHING}, at_test=True)
MLLS_FIELDS = Group("Method mlls.", {"steps": STEPS, "smoothing": SMOOTHING}, at_test=True)
BBSE_FIELDS = Group("Method bbse.", {"smoothing": SMOOTHING}, at_test=True)
SMALLEST = 0.01  # as few images would turn into wild shares
FITTING = 100  # steps of temperature_of(), at most


def shares_by_em(p: Array, trained: Array, steps: int, smoothing: Any, weights: Array) -> Array:
    """The shares [classes] of maximum likelihood: q above.

    Args:
      p: probabilities of images, [n, classes].
      trained: t above, [classes].
      steps: how often they are computed anew.
      smoothing: a above.
      weights: [n], as how many images each one counts.
    """
    count, product = jnp.maximum(weights.sum() + smoothing, FLOOR), functools.partial(jnp.matmul, precision="highest")

    def again(_: Any, shares: Array) -> Array:
        ratio = shares / trained
        # The sum of weights times r, by products: without an array r [n, classes] it takes 0.7 of the time with ten
        # classes, and a third with 62.
        found = ratio * product(weights / jnp.maximum(product(p, ratio), FLOOR), p)
        return (found + smoothing * trained) / count

    return jax.lax.fori_loop(0, steps, again, trained)


def _by_em(steps: int, smoothing: float) -> Callable[[Array, Array, Mapping[str, Array]], Array]:
    return lambda p, weights, kept: shares_by_em(p, kept["shares"], steps, smoothing, weights)


def shares_by_confusions(mean: Array, undo: Array) -> Array:
    """The shares [classes] of least squares, cut off at 0: bbse's without smoothing, for m [classes] and undoing() of
    C."""
    shares = jnp.maximum(0, undo @ mean)
    return shares / jnp.maximum(shares.sum(), FLOOR)


def undoing(of_classes: Array) -> Array:
    """The inverse of C [classes, classes]. What it can hardly tell apart, singular values below SMALLEST of the
    largest, does not count."""
    return jnp.linalg.pinv(of_classes.T, rtol=SMALLEST)


def temperature_of(logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inverse temperature, and the bias [classes], of least cross-entropy: mlls's 1 / T and b."""
    unit = np.std(logits) + FLOOR  # so that steps fit logits of any size
    z = np.asarray(logits / unit, np.float32).T.copy()

    def objective(fitted: np.ndarray) -> tuple[float, np.ndarray]:
        scale, bias = np.split(fitted.astype(np.float32), [1])
        moved = z * scale + bias[:, None]
        loss = into_slopes(moved, labels, 1 / len(labels))
        return loss, np.append(np.vdot(moved, z), moved.sum(1, dtype=np.float64))

    start = np.append(unit, np.zeros(len(z)))
    found = scipy.optimize.minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": FITTING}).x
    bias = found[1:] - found[1:].mean()
    return np.asarray(found[0] / unit, np.float32), bias.astype(np.float32)


def fit_temperature(logits: Array, labels: Array) -> tuple[Array, Array]:
    """temperature_of(), for use in programs."""
    like = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct(logits.shape[-1:], jnp.float32)

    def on_host(logits: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
        return temperature_of(np.asarray(logits), np.asarray(labels))

    found: tuple[Array, Array] = jax.pure_callback(on_host, like, logits, labels)
    return found


def shares_of(labels: Array, classes: int) -> Array:
    """The shares [classes] of labels [n]. A class without any has the share of half an image."""
    return _smoothed(jnp.bincount(labels, length=classes))


def _smoothed(counts: Any) -> Any:
    counts = counts.clip(0.5)
    return counts / counts.sum()


def shares_by_answers(labels: np.ndarray, logits: np.ndarray, scale: Any) -> np.ndarray:
    """shares_of(), but a class without an image has the share that the classifier's answers give it, by its logits
    times `scale`. With a smaller one EM would find the class in every buffer, since its answers are no rarer there."""
    shares = _smoothed(np.bincount(labels, minlength=logits.shape[1]))
    if lacking := sorted({*range(len(shares))} - {*labels.tolist()}):
        shares[lacking] = scipy.special.softmax(logits * np.asarray(scale), axis=1).mean(0)[lacking]
    return shares / shares.sum()


def prior_shift(net: Classifier, steps: int = 50, smoothing: float = 10.0) -> Method:
    """Prior shift by EM; the arguments are the fields of its group."""

    def learn(logits: Callable[[Array], Array], known: Known, classes: int) -> dict[str, Array]:
        return {"shares": shares_of(known.labels, classes)}

    return _correcting("prior_shift", net, learn, _by_em(steps, smoothing))


def mlls(net: Classifier, steps: int = 50, smoothing: float = 10.0) -> Method:
    """Prior shift by EM with calibrated probabilities; the arguments are the fields of its group."""

    def learn(logits: Callable[[Array], Array], known: Known, classes: int) -> dict[str, Array]:
        scale, bias = fit_temperature(logits(known.unseen), known.unseen_labels)
        return {"shares": shares_of(known.unseen_labels, classes), "scale": scale, "bias": bias}

    return _correcting("mlls", net, learn, _by_em(steps, smoothing))


def bbse(net: Classifier, smoothing: float = 10.0) -> Method:
    """Black-box shift estimation with probabilities; the argument is the field of its group."""

    def learn(logits: Callable[[Array], Array], known: Known, classes: int) -> dict[str, Array]:
        members, p = jax.nn.one_hot(known.unseen_labels, classes), jax.nn.softmax(logits(known.unseen))
        counts = members.sum(0)[:, None]
        of_classes = jnp.where(counts > 0, members.T @ p / jnp.maximum(1, counts), jnp.eye(classes))
        return {"shares": shares_of(known.labels, classes), "undo": undoing(of_classes)}

    def estimate(p: Array, weights: Array, kept: Mapping[str, Array]) -> Array:
        count = weights.sum()
        shares = shares_by_confusions(weights @ p / jnp.maximum(1, count), kept["undo"])
        return (count * shares + smoothing * kept["shares"]) / jnp.maximum(FLOOR, count + smoothing)

    return _correcting("bbse", net, learn, estimate)


def _correcting(
    name: str,
    net: Classifier,
    learn: Callable[[Callable[[Array], Array], Known, int], dict[str, Array]],
    estimate: Callable[[Array, Array, Mapping[str, Array]], Array],
) -> Method:
    """A method whose adapt() corrects the last layer for estimated shares.

    Args:
      name: of the method.
      net: the network.
      learn: (images -> logits, known images, number of classes) -> what to keep: t as "shares"; and 1 / T as "scale"
        and b as "bias" to calibrate with.
      estimate: (p, weights [n] of the images, what was kept) -> q.
    """

    def calibrate(variables: Variables, known: Known) -> Variables:
        def logits(images: Array) -> Array:
            return jax.lax.map(lambda pixels: net.apply(variables, pixels[None])[0], images, batch_size=BATCH)

        classes = len(net.last_layer(variables)["bias"])
        return {**variables, "calibration": learn(logits, known, classes)}

    def adapt(variables: Variables, support: Images, key: Array) -> Variables:
        source, kept = calibrated(name, variables)
        if not len(support.pixels):
            return source
        weights = places(support).astype(jnp.float32)
        scale, bias = kept.get("scale", 1.0), kept.get("bias", 0.0)
        p = jax.nn.softmax(net.apply(source, support.pixels) * scale + bias)
        shift = bias + jnp.log(jnp.maximum(FLOOR, estimate(p, weights, kept)) / kept["shares"])
        last, some = net.last_layer(source), weights.any()
        layer = {**last, "kernel": last["kernel"] * scale, "bias": last["bias"] * scale + shift}
        layer = jax.tree.map(lambda new, old: jnp.where(some, new, old), layer, {**last})
        return net.with_last_layer(source, layer)

    return on_erm(net, name, adapt=adapt, calibrate=calibrate)


PRIOR_SHIFT = entry_of(prior_shift, {"prior_shift": PRIOR_SHIFT_FIELDS}, Style(BLUE, "D", (6, 2, 2, 2)))
MLLS = entry_of(mlls, {"mlls": MLLS_FIELDS}, Style(PURPLE, "D", (4, 1, 1, 1)))
BBSE = entry_of(bbse, {"bbse": BBSE_FIELDS}, Style(RED, "D", (2, 2, 6, 2)))
