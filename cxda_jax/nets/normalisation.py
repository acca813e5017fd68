"""Batch normalisation in two pieces, moments and affine, each with the gradient that is cheap to compute.

XLA's CPU backend reduces an image batch to its channels 40 times slower than it multiplies it by a row of ones, and
such reductions are half of batch normalisation forward and backward. So every one of them goes through channel_sum().
A product adds its rows one after another, and a sum of 100,000 in a row is off by 1e-5. So many rows are summed beside
each other, and their sums then together.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.custom_batching import custom_vmap

BESIDE = range(64, 129)  # sums beside each other: a number that divides the rows spares a copy


class BatchNorm(nn.Module):
    """Normalises [..., c] by the batch's own statistics (`batch`) or by the stored ones.

    A mutable call with `batch` stores exactly the batch's mean and biased variance, differentiably; whoever asked
    decides how they meet the running ones. Statistics are float32 whatever the input.
    """

    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array, batch: bool = False) -> jax.Array:
        channels = (x.shape[-1],)
        scale = self.param("scale", nn.initializers.ones, channels)
        bias = self.param("bias", nn.initializers.zeros, channels)
        stored_mean = self.variable("batch_stats", "mean", jnp.zeros, channels)
        stored_var = self.variable("batch_stats", "var", jnp.ones, channels)
        mean, var = moments(x) if batch else (stored_mean.value, stored_var.value)
        if batch and self.is_mutable_collection("batch_stats") and not self.is_initializing():
            stored_mean.value, stored_var.value = mean, var
        factor = scale * jax.lax.rsqrt(var + self.epsilon)
        return affine(x, factor, bias - mean * factor)


@custom_vmap
def channel_sum(x: jax.Array) -> jax.Array:
    """[..., c] to the float32 sums [c] over everything else."""
    return _channel_sums(x[None])[0]


@channel_sum.def_vmap
def _of_tasks(count: int, batched: Any, x: jax.Array) -> tuple[jax.Array, bool]:
    """A product for each task: vmap's own would first copy all tasks into one matrix."""
    del count, batched
    return _channel_sums(x), True


def _channel_sums(x: jax.Array) -> jax.Array:
    """[tasks, ..., c] to [tasks, c]."""
    tasks, channels = x.shape[0], x.shape[-1]
    if jax.default_backend() != "cpu":
        return x.astype(jnp.float32).sum(tuple(range(1, x.ndim - 1)))
    count = math.prod(x.shape[1:-1])
    beside = max((d for d in BESIDE if count % d == 0), default=BESIDE[0])
    rows = jnp.pad(x.reshape(tasks, count, channels).astype(jnp.float32), ((0, 0), (0, -count % beside), (0, 0)))
    rows = rows.reshape(tasks, -1, beside * channels)
    return (jnp.ones((tasks, 1, rows.shape[1])) @ rows).reshape(tasks, beside, channels).sum(1)


@jax.custom_vjp
def moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and biased variance of each channel, float32."""
    count = x.size // x.shape[-1]
    mean = channel_sum(x) / count
    return mean, channel_sum(jnp.square(x.astype(jnp.float32) - mean)) / count


def _moments_forward(x: jax.Array) -> Any:
    mean, var = moments(x)
    return (mean, var), (x, mean)


def _moments_backward(saved: Any, grads: Any) -> tuple[jax.Array]:
    x, mean = saved
    count = x.size // x.shape[-1]
    slope = 2 * grads[1] / count
    return ((x * slope + (grads[0] / count - mean * slope)).astype(x.dtype),)


moments.defvjp(_moments_forward, _moments_backward)


@jax.custom_vjp
def affine(x: jax.Array, factor: jax.Array, shift: jax.Array) -> jax.Array:
    """x * factor + shift for each channel, in x's type."""
    return (x * factor + shift).astype(x.dtype)


def _affine_forward(x: jax.Array, factor: jax.Array, shift: jax.Array) -> Any:
    return affine(x, factor, shift), (x, factor)


def _affine_backward(saved: Any, grad: jax.Array) -> Any:
    x, factor = saved
    return (grad * factor).astype(x.dtype), channel_sum(grad.astype(jnp.float32) * x), channel_sum(grad)


affine.defvjp(_affine_forward, _affine_backward)
