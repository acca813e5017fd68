"""Convolutions and pooling in forms that XLA's CPU backend compiles well. Other backends get the plain convolution.

The CPU backend has three weaknesses:
- It uses naive loops if the output is narrower than three pixels. (ResNet-50's last stage at 64 pixels takes 2155 ms
  instead of 22.)
- It has no fast path for kernels of one pixel.
- It multiplies the zeros of the padding. In the gradient of a 5x5 convolution's input these are a third of the work.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from cxda_jax.machine import backend

NARROW = 3  # an output with fewer pixels a side is computed as products of matrices
FEW = 8  # channels; with fewer, cuDNN takes longer than a product with all pixels under the kernel
LARGE = 1e9  # from this number of operations on, the gradient of the input is computed in pieces
NUMBERS = ("NHWC", "HWIO", "NHWC")  # the layouts of input, kernel and output
Padding = Sequence[tuple[int, int]]


def convolve(x: jax.Array, kernel: jax.Array, strides: Sequence[int], padding: Padding, **other: Any) -> jax.Array:
    """lax.conv_general_dilated of [n, h, w, c] with [kh, kw, c, features], for
    flax's nn.Conv(conv_general_dilated=...)."""
    (kh, kw, _, features), (n, *sizes, channels) = kernel.shape, x.shape
    h, w = (
        (size + sum(pad) - k) // stride + 1
        for size, pad, k, stride in zip(sizes, padding, (kh, kw), strides, strict=True)
    )
    products = kh == kw == 1 or h < NARROW or w < NARROW
    large = max(strides) == 1 and 2 * n * h * w * kernel.size > LARGE and kh > 3
    on_cudnn = backend.convolves_by_cudnn()
    few = on_cudnn and channels < FEW
    if not few and not (backend.rewrites_layers() and (products or large)):
        y = jax.lax.conv_general_dilated(x, kernel, strides, padding, **other)
        return jax.lax.optimization_barrier(y) if on_cudnn else y  # else cuDNN adds the bias, in kernels for older GPUs
    if not (few or products):
        return _in_pieces(tuple(padding), x, kernel)
    x, precision = jnp.pad(x, ((0, 0), *padding, (0, 0))), other.get("precision")
    rows, columns = ([slice(i, i + stride * (size - 1) + 1, stride) for i in range(taps)]
                     for taps, size, stride in zip((kh, kw), (h, w), strides, strict=True))  # fmt: skip
    if few:  # in two stages: one concatenation of all takes as long as a large convolution
        x = jnp.concatenate([x[:, :, column] for column in columns], -1)
        x = jnp.concatenate([x[:, row] for row in rows], -1)
        return jnp.matmul(x, kernel.reshape(-1, features), precision=precision)
    out = jnp.zeros((), x.dtype)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            tap = x[:, row, column].reshape(n * h * w, channels)
            out = out + jnp.matmul(tap, kernel[i, j], precision=precision)
    return out.reshape(n, h, w, features)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_pieces(padding: Padding, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A convolution of stride 1 whose backward pass multiplies no zeros of the padding."""
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=NUMBERS)


def _backward(padding: Padding, saved: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The input's gradient is `grad`, padded and convolved with the kernel rotated by 180 degrees. Near the border a
    part of the kernel lies on the padding. So the output is cut into pieces: all pixels of a piece use the same part
    of the kernel, and each piece is convolved with this part alone.
    """
    (x, kernel), (kh, kw) = saved, saved[1].shape[:2]
    rotated = kernel[::-1, ::-1].swapaxes(2, 3)
    around = [(k - 1 - low, k - 1 - high) for k, (low, high) in zip((kh, kw), padding, strict=True)]
    rows = []
    for row_taps, row_inputs in _pieces(x.shape[1], grad.shape[1], kh, around[0][0]):
        columns = [(slice(0, kw), slice(None), around[1])]
        if row_taps == slice(0, kh):
            columns = [(*piece, (0, 0)) for piece in _pieces(x.shape[2], grad.shape[2], kw, around[1][0])]
        parts = [
            jax.lax.conv_general_dilated(
                grad[:, row_inputs, column_inputs], rotated[row_taps, column_taps], (1, 1), ((0, 0), pad),
                dimension_numbers=NUMBERS,
            )
            for column_taps, column_inputs, pad in columns
        ]  # fmt: skip
        rows.append(jnp.concatenate(parts, axis=2))
    return jnp.concatenate(rows, axis=1), _kernel_gradient(padding)(x, kernel, grad)


def _pieces(size: int, inner: int, taps: int, before: int) -> list[tuple[slice, slice]]:
    """Cuts an axis of `size` outputs into runs that use the same taps of the kernel: (these taps,
    the inputs under them).

    There are `inner` inputs, and `before` zeros in front of them.
    """

    def taps_inside(i: int) -> tuple[int, int]:
        return max(0, before - i), min(taps, inner + before - i)

    pieces = []
    for (low, high), run in itertools.groupby(range(size), taps_inside):
        outputs = list(run)
        pieces.append((slice(low, high), slice(outputs[0] + low - before, outputs[-1] + high - before)))
    return pieces


@functools.cache
def _kernel_gradient(padding: Padding) -> Any:
    """(x, kernel, grad) -> gradient of the kernel. The default of vmap is a grouped convolution, which is slow."""

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


_in_pieces.defvjp(lambda padding, x, kernel: (_in_pieces(padding, x, kernel), (x, kernel)), _backward)


def max_pool(x: jax.Array, size: int = 2, stride: int = 2, pad: int = 0) -> jax.Array:
    """Maps [..., h, w, c], with `pad` pixels of minus infinity around, to the
    largest values of windows [..., h', w', c]."""
    if backend.pools_in_windows():
        return _pool_windows(x, size, stride, pad)
    if (size, stride, pad) == (2, 2, 0) and not backend.rewrites_layers():
        return _pool_pairs(x[..., : x.shape[-3] // 2 * 2, : x.shape[-2] // 2 * 2, :])
    # On CPUs the backward pass of a maximum of strided slices is 6 times faster than reduce_window's. The two differ
    # only in how equal values share a gradient.
    if pad:
        around = [(0, 0)] * (x.ndim - 3) + [(pad, pad), (pad, pad), (0, 0)]
        x = jnp.pad(x, around, constant_values=-jnp.inf)
    for axis in (-3, -2):
        count = (x.shape[axis] - size) // stride + 1
        slices = [jax.lax.slice_in_dim(x, i, i + stride * (count - 1) + 1, stride, axis % x.ndim) for i in range(size)]
        x = functools.reduce(jnp.maximum, slices)
    return x


def _pool_windows(x: jax.Array, size: int, stride: int, pad: int) -> jax.Array:
    """max_pool() by reduce_window."""
    *outer, h, w, c = x.shape
    sides, steps, around = (1, size, size, 1), (1, stride, stride, 1), ((0, 0), (pad, pad), (pad, pad), (0, 0))
    y = jax.lax.reduce_window(x.reshape(-1, h, w, c), -jnp.inf, jax.lax.max, sides, steps, around)
    return y.reshape(*outer, *y.shape[1:])


@jax.custom_vjp
def _pool_pairs(x: jax.Array) -> jax.Array:
    """max_pool() of maps with even sides.

    The backward pass keeps the place of each maximum, an eighth of bfloat16 maps.
    """
    return _largest(x)[0]


def _largest(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The maxima of windows of 2 x 2, and the place 0..3 of the first largest value in each."""
    corners = [x[..., i::2, j::2, :] for i in (0, 1) for j in (0, 1)]
    most = functools.reduce(jnp.maximum, corners)
    places = [jnp.where(corner == most, i, 3) for i, corner in enumerate(corners)]
    return most, functools.reduce(jnp.minimum, places).astype(jnp.uint8)


def _spread(place: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    """The gradient of each window at the place of its maximum, and zeros at the others."""
    *outer, h, w, c = grad.shape
    numbers = jnp.arange(4, dtype=jnp.uint8).reshape(2, 1, 2, 1)
    place, grad = (a.reshape(*outer, h, 1, w, 1, c) for a in (place, grad))
    return (jnp.where(place == numbers, grad, 0).reshape(*outer, 2 * h, 2 * w, c),)


_pool_pairs.defvjp(_largest, _spread)
