"""Batch normalisation as two functions, moments and scale_and_shift. Each has a gradient that is cheap to compute.

Half of batch normalisation is sums over all pixels of a channel. On CPUs, XLA computes them 40 times slower than the
product with a row of ones. So all these sums go through channel_sum(), which uses the product. A product adds its rows
one after another, and after 100,000 additions the sum is off by 1e-5. So channel_sum() first makes about a hundred
partial sums, and then adds these.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.custom_batching import custom_vmap

from cxda_jax.machine import backend

PARTIAL_SUMS = range(64, 129)  # how many there may be; a number that divides the count of rows saves a copy


class BatchNorm(nn.Module):
    """Normalises the channels of [n, ..., c]; `batch=True` uses the batch's own statistics, False the stored ones.

    `batch` may also be bool [n], True for the images whose statistics are used, or a number:
    those of the first so many images.

    If "batch_stats" is mutable and `batch` is True, the module stores the batch's mean and biased variance as they
    are, and gradients flow through them. The caller decides how they are averaged with the running ones.
    Statistics are float32 for all types of input.

    Attributes:
      rectified: what is below zero becomes zero.
    """

    rectified: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, batch: bool | int | jax.Array = False) -> jax.Array:
        channels = (x.shape[-1],)
        scale = self.param("scale", nn.initializers.ones, channels)
        bias = self.param("bias", nn.initializers.zeros, channels)
        stored_mean = self.variable("batch_stats", "mean", jnp.zeros, channels)
        stored_var = self.variable("batch_stats", "var", jnp.ones, channels)
        own = batch is not False
        if not own:
            mean, var = stored_mean.value, stored_var.value
        elif isinstance(batch, int):
            mean, var = moments(x if batch is True else x[:batch])
        else:
            mean, var = moments_of(x, batch)
        if own and self.is_mutable_collection("batch_stats") and not self.is_initializing():
            stored_mean.value, stored_var.value = mean, var
        factor = scale * jax.lax.rsqrt(var + 1e-5)
        shift = bias - mean * factor
        if self.rectified and not backend.rewrites_layers():
            return rectify(x, factor, shift)
        y = scale_and_shift(x, factor, shift)
        return nn.relu(y) if self.rectified else y


def channel_sum(x: jax.Array) -> jax.Array:
    """[..., c] to the float32 sums [c] over everything else."""
    return _by_products(x) if backend.rewrites_layers() else x.astype(jnp.float32).sum(tuple(range(x.ndim - 1)))


@custom_vmap
def _by_products(x: jax.Array) -> jax.Array:
    return _channel_sums(x[None])[0]


@_by_products.def_vmap
def _of_tasks(count: int, batched: Any, x: jax.Array) -> tuple[jax.Array, bool]:
    """Under vmap: one product for each task. The default of vmap first copies all tasks into one matrix."""
    return _channel_sums(x), True


def _channel_sums(x: jax.Array) -> jax.Array:
    """[tasks, ..., c] to [tasks, c]."""
    tasks, *inner, channels = x.shape
    count = math.prod(inner)
    sums = max((d for d in PARTIAL_SUMS if count % d == 0), default=PARTIAL_SUMS[0])
    rows = jnp.pad(x.reshape(tasks, count, channels).astype(jnp.float32), ((0, 0), (0, -count % sums), (0, 0)))
    rows = rows.reshape(tasks, -1, sums * channels)
    return (jnp.ones((tasks, 1, rows.shape[1])) @ rows).reshape(tasks, sums, channels).sum(1)


@jax.custom_vjp
def moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., c] to the float32 mean [c] and biased variance [c] of each channel."""
    count = x.size // x.shape[-1]
    mean = channel_sum(x) / count
    if backend.rewrites_layers():
        return mean, channel_sum(jnp.square(x.astype(jnp.float32) - mean)) / count
    # Here both sums are a part of the convolution that makes x. Sums of x - mean would read all of x once more.
    squares = channel_sum(jnp.square(x.astype(jnp.float32))) / count
    return mean, jnp.maximum(0, squares - jnp.square(mean))


def _moments_forward(x: jax.Array) -> Any:
    mean, var = moments(x)
    return (mean, var), (x, mean)


def _moments_backward(saved: Any, grads: Any) -> tuple[jax.Array]:
    x, mean = saved
    count = x.size // x.shape[-1]
    slope = 2 * grads[1] / count
    return ((x * slope + (grads[0] / count - mean * slope)).astype(x.dtype),)


moments.defvjp(_moments_forward, _moments_backward)


def moments_of(x: jax.Array, present: jax.Array) -> tuple[jax.Array, jax.Array]:
    """moments() of the images [n, ..., c] for which `present` [n] is True; zeros and ones if there is none."""
    chosen = present.reshape(-1, *[1] * (x.ndim - 1))
    count = jnp.maximum(1, present.sum()) * (x.size // (len(x) * x.shape[-1]))
    mean = channel_sum(jnp.where(chosen, x, 0)) / count
    var = channel_sum(jnp.where(chosen, jnp.square(x.astype(jnp.float32) - mean), 0)) / count
    return mean, jnp.where(
        present.any(), var, 1
    )  # with a variance of 0 what stands in empty places would grow beyond all numbers


@jax.custom_vjp
def scale_and_shift(x: jax.Array, factor: jax.Array, shift: jax.Array) -> jax.Array:
    """[..., c] times factor [c] plus shift [c], in x's type."""
    return (x * factor + shift).astype(x.dtype)


def _backward(saved: Any, grad: jax.Array) -> Any:
    x, factor = saved
    return (grad * factor).astype(x.dtype), channel_sum(grad.astype(jnp.float32) * x), channel_sum(grad)


scale_and_shift.defvjp(lambda x, factor, shift: (scale_and_shift(x, factor, shift), (x, factor)), _backward)


@jax.custom_vjp
def rectify(x: jax.Array, factor: jax.Array, shift: jax.Array) -> jax.Array:
    """scale_and_shift() and ReLU as one, for accelerators: the backward pass
    stores no gradient of its own between the two."""
    return jnp.maximum(x * factor + shift, 0).astype(x.dtype)


def _rectify_backward(saved: Any, grad: jax.Array) -> Any:
    x, factor, shift = saved
    kept, wide = x * factor + shift > 0, grad.astype(jnp.float32)
    dx = jnp.where(kept, wide * factor, 0).astype(x.dtype)
    return dx, channel_sum(jnp.where(kept, wide * x, 0)), channel_sum(jnp.where(kept, wide, 0))


rectify.defvjp(lambda x, factor, shift: (rectify(x, factor, shift), (x, factor, shift)), _rectify_backward)
