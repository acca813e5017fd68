"""Convolutions and pooling in the forms that XLA's CPU backend compiles well; elsewhere as they are.

Its convolution falls to naive loops where the output is narrower than three pixels (ResNet-50's last stage at 64 pixels:
2155 ms in place of 22), treats kernels of one pixel as any other, and multiplies the zeros of its padding: a third of the
gradient of a 5x5 convolution's input.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

NARROW = 3  # an output below this is computed as products of matrices
LARGE = 1e9  # operations from which it pays to compute the gradient of the input in pieces
NUMBERS = ("NHWC", "HWIO", "NHWC")
Padding = Sequence[tuple[int, int]]


def convolve(x: jax.Array, kernel: jax.Array, strides: Sequence[int], padding: Padding, **other: Any) -> jax.Array:
    """lax.conv_general_dilated of [n, h, w, c] and [kh, kw, c, features]; for flax's Conv(conv_general_dilated=...)."""
    (kh, kw, _, features), (n, *sizes, _) = kernel.shape, x.shape
    h, w = (
        (size + sum(pad) - k) // stride + 1
        for size, pad, k, stride in zip(sizes, padding, (kh, kw), strides, strict=True)
    )
    if jax.default_backend() != "cpu":
        return jax.lax.conv_general_dilated(x, kernel, strides, padding, **other)
    if not (kh == kw == 1 or h < NARROW or w < NARROW):
        if max(strides) == 1 and 2 * n * h * w * kernel.size > LARGE and kh > 3:
            return _in_pieces(tuple(padding), x, kernel)
        return jax.lax.conv_general_dilated(x, kernel, strides, padding, **other)
    x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    precision, out = other.get("precision"), jnp.zeros((), x.dtype)
    for i in range(kh):
        for j in range(kw):
            seen = x[:, i : i + strides[0] * (h - 1) + 1 : strides[0], j : j + strides[1] * (w - 1) + 1 : strides[1]]
            out = out + jnp.matmul(seen.reshape(n * h * w, x.shape[-1]), kernel[i, j], precision=precision)
    return out.reshape(n, h, w, features)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_pieces(padding: Padding, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A convolution of stride 1 whose backward pass multiplies no zeros."""
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=NUMBERS)


def _forward(padding: Padding, x: jax.Array, kernel: jax.Array) -> Any:
    return _in_pieces(padding, x, kernel), (x, kernel)


def _backward(padding: Padding, saved: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The input's gradient is the gradient convolved with the turned kernel, in pieces of which each pixel meets the same
    taps: the border row by row and column by column, with what part of the kernel lies inside."""
    (x, kernel), (kh, kw) = saved, saved[1].shape[:2]
    turned = kernel[::-1, ::-1].swapaxes(2, 3)
    around = [(k - 1 - low, k - 1 - high) for k, (low, high) in zip((kh, kw), padding, strict=True)]
    rows = []
    for taps, inside in _pieces(x.shape[1], grad.shape[1], kh, around[0][0]):
        columns = [(slice(0, kw), slice(None), around[1])]
        if taps == slice(0, kh):
            columns = [(*piece, (0, 0)) for piece in _pieces(x.shape[2], grad.shape[2], kw, around[1][0])]
        parts = [
            jax.lax.conv_general_dilated(
                grad[:, inside, seen], turned[taps, used], (1, 1), ((0, 0), pad), dimension_numbers=NUMBERS
            )
            for used, seen, pad in columns
        ]
        rows.append(jnp.concatenate(parts, axis=2))
    return jnp.concatenate(rows, axis=1), _kernel_gradient(padding)(x, kernel, grad)


def _pieces(size: int, inner: int, taps: int, before: int) -> list[tuple[slice, slice]]:
    """Along one axis, for each run of outputs that meet the same taps: those taps, and the inputs under them.

    `size` outputs of a convolution with so many `taps` over `inner` inputs, with `before` zeros in front of them.
    """

    def met(i: int) -> tuple[int, int]:
        return max(0, before - i), min(taps, inner + before - i)

    found = []
    for (low, high), run in itertools.groupby(range(size), met):
        outputs = list(run)
        found.append((slice(low, high), slice(outputs[0] + low - before, outputs[-1] + high - before)))
    return found


@functools.cache
def _kernel_gradient(padding: Padding) -> Any:
    """gradient(x, kernel, grad); for each of several tasks on its own, where vmap would make a grouped convolution."""

    @custom_vmap
    def gradient(x: jax.Array, kernel: jax.Array, grad: jax.Array) -> jax.Array:
        def convolved(kernel: jax.Array) -> jax.Array:
            return jax.lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=NUMBERS)

        return jax.vjp(convolved, kernel)[1](grad)[0]

    @gradient.def_vmap
    def each(count: int, batched: Sequence[bool], *arguments: jax.Array) -> tuple[jax.Array, bool]:
        tasks = [[a[i] if b else a for a, b in zip(arguments, batched, strict=True)] for i in range(count)]
        return jnp.stack([gradient(*task) for task in tasks]), True

    return gradient


_in_pieces.defvjp(_forward, _backward)


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
