"""Losses of logits [n, classes], each a mean over the n images."""

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, labels: jax.Array, counted: jax.Array | None = None) -> jax.Array:
    """Mean cross-entropy with labels [n]; over the images alone that booleans `counted` [n] mark,
    and 0 if it marks none."""
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)[:, 0]
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
