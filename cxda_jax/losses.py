"""Losses over logits [n, classes], each a mean over images."""

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy of integer labels [n]."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1).mean()
