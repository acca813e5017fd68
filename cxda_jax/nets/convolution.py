"""Convolutions and pooling in the forms that XLA's CPU backend compiles well; elsewhere as they are.

Its convolution falls to naive loops where the output is narrower than three pixels (ResNet-50's last stage at 64 pixels:
2155 ms in place of 22), and treats kernels of one pixel as any other.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

NARROW = 3  # an output below this is computed as products of matrices


def convolve(
    x: jax.Array, kernel: jax.Array, strides: Sequence[int], padding: Sequence[tuple[int, int]], **other: Any
) -> jax.Array:
    """lax.conv_general_dilated of [n, h, w, c] and [kh, kw, c, features]; for flax's Conv(conv_general_dilated=...)."""
    (kh, kw, _, features), (n, *sizes, _) = kernel.shape, x.shape
    h, w = (
        (size + sum(pad) - k) // stride + 1
        for size, pad, k, stride in zip(sizes, padding, (kh, kw), strides, strict=True)
    )
    if jax.default_backend() != "cpu" or not (kh == kw == 1 or h < NARROW or w < NARROW):
        return jax.lax.conv_general_dilated(x, kernel, strides, padding, **other)
    x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    precision, out = other.get("precision"), jnp.zeros((), x.dtype)
    for i in range(kh):
        for j in range(kw):
            seen = x[:, i : i + strides[0] * (h - 1) + 1 : strides[0], j : j + strides[1] * (w - 1) + 1 : strides[1]]
            out = out + jnp.matmul(seen.reshape(n * h * w, -1), kernel[i, j], precision=precision)
    return out.reshape(n, h, w, features)


def max_pool(x: jax.Array, size: int = 2, stride: int = 2, pad: int = 0) -> jax.Array:
    """Max-pool over [..., h, w, c]."""
    # A maximum of strided slices: its backward pass is 6 times faster on CPUs than reduce_window's, and the two
    # differ only in how a tie shares its gradient.
    if pad:
        around = [(0, 0)] * (x.ndim - 3) + [(pad, pad), (pad, pad), (0, 0)]
        x = jnp.pad(x, around, constant_values=-jnp.inf)
    for axis in (-3, -2):
        count = (x.shape[axis] - size) // stride + 1
        slices = [jax.lax.slice_in_dim(x, i, i + stride * (count - 1) + 1, stride, axis % x.ndim) for i in range(size)]
        x = slices[0]
        for other in slices[1:]:
            x = jnp.maximum(x, other)
    return x
