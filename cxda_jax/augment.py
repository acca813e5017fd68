"""Augmentation in pure jax, on pixels before normalisation, one key per image."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cxda_jax.types import Array, UserError


class Weak(NamedTuple):
    """The paper's training augmentation: each of the three is applied with `probability`, independently."""

    crop: bool = True  # pad by 1/8 of the side and crop back at random
    flip: bool = True  # horizontally
    rotate: float = 30.0  # degrees, uniform in -rotate..rotate; 0 switches it off
    fill: float = 0.0  # what enters from outside, as a pixel in 0..1
    probability: float = 0.5


def check(options: Weak) -> None:
    if not 0 <= options.probability <= 1:
        raise UserError(f"augment.probability={options.probability} lies outside 0..1")
    if not 0 <= options.rotate <= 180:
        raise UserError(f"augment.rotate={options.rotate} lies outside 0..180 degrees; 0 switches it off")


def weak(key: Array, pixels: Array, options: Weak) -> Array:
    """Images [n, h, w, c], uint8 or floats in 0..1, to augmented floats in 0..1."""
    x = pixels.astype(jnp.float32) / 255 if pixels.dtype == jnp.uint8 else pixels
    if not (options.crop or options.flip or options.rotate):
        return x
    keys = jax.random.split(key, len(x))
    return jax.vmap(lambda key, image: warp(image, *draw(key, image.shape, options), options.fill))(keys, x)


def draw(key: Array, shape: tuple[int, ...], options: Weak) -> tuple[Array, Array, Array]:
    """One image's parameters: shift in pixels [2], whether to flip, angle in radians."""
    chosen_key, shift_key, angle_key = jax.random.split(key, 3)
    chosen = jax.random.bernoulli(chosen_key, options.probability, (3,))
    pad = jnp.array([shape[0] // 8, shape[1] // 8])
    shift = jax.random.randint(shift_key, (2,), -pad, pad + 1)
    angle = jnp.deg2rad(jax.random.uniform(angle_key, minval=-options.rotate, maxval=options.rotate))
    return (
        jnp.where(chosen[0] & options.crop, shift, 0),
        chosen[1] & options.flip,
        jnp.where(chosen[2] & (options.rotate > 0), angle, 0.0),
    )


def warp(image: Array, shift: Array, flip: Array, angle: Array, fill: float) -> Array:
    """Shifts, flips, then rotates an image [h, w, c] about its centre, bilinearly, in a single gather.

    The three are applied in this order, so what a shift pushes out is lost before the rotation.
    """
    h, w, _ = image.shape
    ys, xs = jnp.meshgrid(jnp.arange(h) - (h - 1) / 2, jnp.arange(w) - (w - 1) / 2, indexing="ij")
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    y = cos * ys - sin * xs + (h - 1) / 2
    x = sin * ys + cos * xs + (w - 1) / 2
    y0, x0 = jnp.floor(y), jnp.floor(x)
    total = jnp.zeros_like(image)
    for dy in (0, 1):
        for dx in (0, 1):
            weight = jnp.abs(1 - dy - (y - y0)) * jnp.abs(1 - dx - (x - x0))
            row, column = (y0 + dy).astype(jnp.int32), (x0 + dx).astype(jnp.int32)
            inside = (row >= 0) & (row < h) & (column >= 0) & (column < w)
            column = jnp.where(flip, w - 1 - column, column) - shift[1]
            row = row - shift[0]
            inside &= (row >= 0) & (row < h) & (column >= 0) & (column < w)
            pixel = image[jnp.clip(row, 0, h - 1), jnp.clip(column, 0, w - 1)]
            total += weight[..., None] * jnp.where(inside[..., None], pixel, fill)
    return total
