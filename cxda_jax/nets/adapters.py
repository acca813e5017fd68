"""Sparse latent adapters (SLA; Deecke et al., 2022): a gated sum of 1x1 convolutions, which is added to a convolution.

sum_k g_k(x) A_k(x),   g(x) = sparsemax(dense(global average pool of x))
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from cxda_jax.nets.initial import initialisers


def sparsemax(logits: jax.Array) -> jax.Array:
    """The Euclidean projection of [..., k] onto the simplex: max(z - tau, 0), where tau makes the sum one."""
    descending = -jnp.sort(-logits, axis=-1)
    count = jnp.arange(1, logits.shape[-1] + 1)
    excess = (jnp.cumsum(descending, axis=-1) - 1) / count
    kept = (descending > excess).sum(-1, keepdims=True)
    return jnp.maximum(logits - jnp.take_along_axis(excess, kept - 1, axis=-1), 0)


class Mix(nn.Module):
    """The matrices [k, c_in, c_out] of k adapters. Gates [n, k] mix them to one matrix for each image."""

    count: int  # k
    features: int  # c_out
    zero: bool  # the matrices start at zero, not at normal numbers of deviation sqrt(2 / c_out)

    @nn.compact
    def __call__(self, gates: jax.Array, channels: int) -> jax.Array:
        init = nn.initializers.zeros if self.zero else nn.initializers.normal((2 / self.features) ** 0.5)
        return jnp.einsum("nk,kio->nio", gates, self.param("weight", init, (self.count, channels, self.features)))


class LatentAdapters(nn.Module):
    """Maps [n, h, w, c_in] to [n, h', w', features], which is added to the output of a convolution."""

    features: int
    count: int
    crop: int = 0  # pixels to leave out on each side, where the convolution pads less than half of its kernel
    zero: bool = False  # start at zero
    dtype: Any = jnp.float32
    stride: int = 1  # that of the convolution
    initial: str = "torch"  # how the gates' layer starts; see initialisers()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        pooled = x.astype(jnp.float32).mean((1, 2))
        gates = sparsemax(nn.Dense(self.count, name="gate", **initialisers(self.initial, x.shape[-1]))(pooled))
        # One product with a mixed matrix is half of the work of a product with each adapter.
        matrix = Mix(self.count, self.features, self.zero, name="mix")(gates, x.shape[-1])
        _, h, w, _ = x.shape
        inner = x[:, self.crop : h - self.crop : self.stride, self.crop : w - self.crop : self.stride]
        return jnp.einsum("nhwi,nio->nhwo", inner.astype(self.dtype), matrix.astype(self.dtype))
