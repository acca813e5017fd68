"""Losses of logits [n, classes], each a mean over the n images; and one for NumPy, with its gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def cross_entropy(logits: jax.Array, labels: jax.Array, counted: jax.Array | None = None) -> jax.Array:
    """Mean cross-entropy with labels [n]; over the images alone that booleans `counted` [n] mark,
    and 0 if it marks none."""
    own = jnp.arange(logits.shape[-1]) == labels[:, None]  # the gradient of a gather is a slow loop over images on CPUs
    losses = -jnp.where(own, jax.nn.log_softmax(logits), 0).sum(-1)
    return losses.mean() if counted is None else (losses * counted).sum() / jnp.maximum(1, counted.sum())


def entropy(logits: jax.Array) -> jax.Array:
    """Mean entropy of the predictions, in nats. It and its gradient are finite for all logits."""
    log_p = jax.nn.log_softmax(logits)
    return -(jnp.exp(log_p) * log_p).sum(-1).mean()


def infomax(logits: jax.Array) -> jax.Array:
    """Mean entropy minus the entropy of the mean prediction, in -log(classes)..0.

    Sure and balanced predictions are low.
    """
    log_p = jax.nn.log_softmax(logits)
    log_mean = jax.nn.logsumexp(log_p, axis=0) - jnp.log(len(logits))
    return entropy(logits) + (jnp.exp(log_mean) * log_mean).sum()


def consistency(logits: jax.Array, teacher: jax.Array) -> jax.Array:
    """Mean cross-entropy with the predictions of a teacher, given as logits [n, classes].

    The teacher gets no gradient.
    """
    target = jax.lax.stop_gradient(jax.nn.softmax(teacher))
    return -(target * jax.nn.log_softmax(logits)).sum(-1).mean()


def into_slopes(logits: np.ndarray, labels: np.ndarray, weight: Any) -> float:
    """The sum of cross-entropies with labels [n] times weights, one or [n]. Its gradient overwrites the logits, which
    are NumPy's and [classes, n], as sums over classes then run along images."""
    own = labels, np.arange(len(labels))
    logits -= logits.max(0)
    right = logits[own]
    np.exp(logits, out=logits)
    whole = logits.sum(0)
    logits *= weight / whole
    logits[own] -= weight
    return float(np.sum(weight * (np.log(whole) - right), dtype=np.float64))
