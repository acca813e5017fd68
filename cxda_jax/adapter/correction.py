"""What labels teach without any buffer: the logits of a classifier corrected by the image's own style.

    z' = a z + b + s U

z are the logits and s the standardised style of one image. a, b and U have the least cross-entropy on labelled images
of some domains, plus a penalty on the squares of U; other domains choose the penalty, or that nothing is corrected.
While they are learnt, log q - log t is added to z', where q are the shares of the classes in the image's domain and t
those in all: otherwise U would learn which classes these domains have.

An adapter must not learn from logits that were corrected by their own labels, since new domains have no such logits.
So the domains lie in groups, and each group is corrected by what the other groups taught. New domains get the mean of
all these corrections.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize

from cxda_jax.losses import cross_entropy
from cxda_jax.machine import backend
from cxda_jax.nets.shares import LARGEST, OWN
from cxda_jax.types import ADAPTER, Array, Variables

PENALTIES = (1.0, 0.1, 0.01, 0.001)  # from the most careful on
STEPS = 50  # of L-BFGS, for each of them


class Correction(NamedTuple):
    """z' of the formula, as a function of logits [..., classes] and style [..., d]."""

    scale: float
    bias: np.ndarray  # [classes]
    weights: np.ndarray  # [d, classes]
    mean: np.ndarray  # of the style, [d]
    std: np.ndarray

    def __call__(self, logits: np.ndarray, style: np.ndarray) -> np.ndarray:
        s = np.clip((style - self.mean) / self.std, -LARGEST, LARGEST)
        return self.scale * logits + self.bias + s @ self.weights

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """As nets/shares.py reads it."""
        return {name: np.asarray(x, np.float32) for name, x in self._asdict().items()}


class Labelled(NamedTuple):
    """Images of some domains: logits [n, classes], style [n, d], labels [n], domains [n]."""

    logits: np.ndarray
    style: np.ndarray
    labels: np.ndarray
    domains: np.ndarray


def correct(learn: Labelled, choose: Labelled, mean: np.ndarray, std: np.ndarray) -> Correction:
    """The correction that some domains teach and others choose, for styles of this mean and deviation."""
    classes, d = learn.logits.shape[1], learn.style.shape[1]
    style, offset = np.clip((learn.style - mean) / std, -LARGEST, LARGEST), told_shares(learn)
    point = np.concatenate([[1.0], np.zeros(classes + d * classes)])
    tried = [Correction(1.0, np.zeros(classes), np.zeros((d, classes)), mean, std)]  # corrects nothing
    for penalty in PENALTIES:

        def objective(x: np.ndarray, penalty: float = penalty) -> tuple[float, np.ndarray]:
            given = style, learn.logits, learn.labels, offset, np.float32(penalty)
            loss, slope = _objective()(x.astype(np.float32), *given)
            return float(loss), np.asarray(slope, np.float64)

        options = {"maxiter": STEPS, "ftol": 1e-6}
        point = scipy.optimize.minimize(objective, point, jac=True, method="L-BFGS-B", options=options).x
        bias, weights = point[1 : 1 + classes], point[1 + classes :].reshape(d, classes)
        tried.append(Correction(point[0], bias.astype(np.float32), weights.astype(np.float32), mean, std))
    return max(tried, key=lambda found: float((found(*choose[:2]).argmax(1) == choose.labels).mean()))


def added(variables: Variables, correction: Correction | None) -> Variables:
    """The variables of an adapter with a correction by the own style, or without one."""
    stats = {name: x for name, x in variables["batch_stats"][ADAPTER].items() if name != OWN}
    own = {OWN: correction.arrays} if correction else {}
    return {**variables, "batch_stats": {**variables["batch_stats"], ADAPTER: {**stats, **own}}}


def correction_in(variables: Variables) -> Correction | None:
    """The correction that added() put there."""
    own = variables["batch_stats"][ADAPTER].get(OWN)
    return Correction(float(own["scale"]), *(np.asarray(own[name]) for name in Correction._fields[1:])) if own else None


def mean_of(corrections: Sequence[Correction]) -> Correction:
    """The correction whose answers are the means of those of these, which have one mean and deviation of styles."""
    first = corrections[0]
    scale = float(np.mean([each.scale for each in corrections]))
    bias, weights = (np.mean([getattr(each, name) for each in corrections], axis=0) for name in ("bias", "weights"))
    return Correction(scale, bias, weights, first.mean, first.std)


def told_shares(learn: Labelled) -> np.ndarray:
    """log q - log t of each image's domain, [n, classes]; t counts like one image in q."""
    classes = learn.logits.shape[1]
    _, domains = np.unique(learn.domains, return_inverse=True)
    counts = np.zeros((domains.max() + 1, classes))
    np.add.at(counts, (domains, learn.labels), 1)
    total = counts.sum(0) + 0.5
    t = total / total.sum()
    shares = (counts + t) / (counts.sum(1, keepdims=True) + 1)
    return (np.log(shares) - np.log(t)).astype(np.float32)[domains]


@functools.cache
def _objective() -> Callable[..., tuple[Array, Array]]:
    """The cross-entropy with its penalty, and its gradient, of a, b and U in one vector."""

    def objective(point: Array, style: Array, logits: Array, labels: Array, offset: Array, penalty: Array) -> Array:
        classes = logits.shape[1]
        scale, bias, weights = point[0], point[1 : 1 + classes], point[1 + classes :].reshape(-1, classes)
        z = scale * logits + bias + style @ weights + offset
        return cross_entropy(z, labels) + penalty / 2 * jnp.square(weights).sum()

    return backend.jit(jax.value_and_grad(objective))
