"""Losses over logits [n, classes], each a mean over images."""

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, labels: jax.Array, counted: jax.Array | None = None) -> jax.Array:
    """Mean cross-entropy of integer labels [n], over the images `counted` [n] (booleans) where given; 0 over none."""
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)[:, 0]
    return losses.mean() if counted is None else (losses * counted).sum() / jnp.maximum(1, counted.sum())


def entropy(logits: jax.Array) -> jax.Array:
    """Mean entropy of the predictions, in nats; from log-probabilities, so it is finite with a finite gradient."""
    log_p = jax.nn.log_softmax(logits)
    return -(jnp.exp(log_p) * log_p).sum(-1).mean()


def infomax(logits: jax.Array) -> jax.Array:
    """Mean entropy minus the entropy of the mean prediction, in [-log(classes), 0]: confident and balanced is low."""
    log_p = jax.nn.log_softmax(logits)
    log_mean = jax.nn.logsumexp(log_p, axis=0) - jnp.log(len(logits))
    return entropy(logits) + (jnp.exp(log_mean) * log_mean).sum()


def consistency(logits: jax.Array, teacher: jax.Array) -> jax.Array:
    """Mean cross-entropy of a teacher's soft predictions; no gradient reaches the teacher."""
    target = jax.lax.stop_gradient(jax.nn.softmax(teacher))
    return -(target * jax.nn.log_softmax(logits)).sum(-1).mean()
