"""Augmentation in pure jax, on pixels before normalisation, one key per image."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cxda_jax.config.fields import SHARE, Field, Group, Range
from cxda_jax.errors import UserError
from cxda_jax.types import Array


def as_floats(pixels: Array) -> Array:
    """uint8 or floats in 0..1 to floats in 0..1."""
    return pixels.astype(jnp.float32) / 255 if pixels.dtype == jnp.uint8 else pixels


class Weak(NamedTuple):
    """The paper's training augmentation. Crop, flip and rotation are applied independently."""

    crop: bool = True  # pad by 1/8 of the side and crop back at random
    flip: bool = True  # horizontally
    rotate: float = 30.0  # degrees, uniform in -rotate..rotate; 0 switches it off
    fill: float = 0.0  # the value in 0..1 of pixels from outside the image
    probability: float = 0.5  # of each part


def weak(key: Array, pixels: Array, options: Weak) -> Array:
    """The training augmentation of pixels [n, h, w, c], uint8 or floats in 0..1, as floats in 0..1."""
    x = as_floats(pixels)
    if not (options.crop or options.flip or options.rotate):
        return x
    keys = jax.random.split(key, len(x))
    return jax.vmap(lambda key, image: warp(image, *draw_weak(key, image.shape, options), options.fill))(keys, x)


def draw_weak(key: Array, shape: tuple[int, ...], options: Weak) -> tuple[Array, Array, Array]:
    """Random parameters for an image [h, w, c]: shift in pixels [2], whether to flip, angle in radians."""
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
    """Shifts, flips, then rotates an image [h, w, c] about its centre, in one bilinear interpolation.

    Pixels that the shift moves out of the image do not come back by the rotation.
    """
    h, w, _ = image.shape
    ys, xs = jnp.meshgrid(jnp.arange(h) - (h - 1) / 2, jnp.arange(w) - (w - 1) / 2, indexing="ij")
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    y = cos * ys - sin * xs + (h - 1) / 2
    x = sin * ys + cos * xs + (w - 1) / 2

    def pixel(row: Array, column: Array) -> Array:
        inside = (row >= 0) & (row < h) & (column >= 0) & (column < w)
        column = jnp.where(flip, w - 1 - column, column) - shift[1]
        row = row - shift[0]
        inside &= (row >= 0) & (row < h) & (column >= 0) & (column < w)
        return jnp.where(inside[..., None], image[jnp.clip(row, 0, h - 1), jnp.clip(column, 0, w - 1)], fill)

    return bilinear(y, x, pixel)


def bilinear(y: Array, x: Array, pixel: Callable[[Array, Array], Array]) -> Array:
    """Interpolates at (y, x), both [h, w], between four neighbours;
    pixel(rows, columns) gives their values [h, w, c]."""
    y0, x0 = jnp.floor(y), jnp.floor(x)
    total = jnp.zeros(())
    for dy in (0, 1):
        for dx in (0, 1):
            weight = jnp.abs(1 - dy - (y - y0)) * jnp.abs(1 - dx - (x - x0))
            total += weight[..., None] * pixel((y0 + dy).astype(jnp.int32), (x0 + dx).astype(jnp.int32))
    return total


class Strong(NamedTuple):
    """CoTTA's test-time augmentation (Wang et al., 2022); 0 or False switches a part off. Draws are uniform."""

    brightness: float = 0.4  # a factor in 1 - brightness..1 + brightness
    contrast: float = 0.3  # a factor in 1 - contrast..1 + contrast
    saturation: float = 0.5  # a factor in 1 - saturation..1 + saturation; colour images only
    hue: float = 0.06  # turns in -hue..hue; colour images only
    gamma: float = 0.3  # an exponent in 1 - gamma..1 + gamma
    rotate: float = 15.0  # degrees in -rotate..rotate
    translate: float = 0.125  # a share of the side in -translate..translate, rounded to whole pixels
    scale: float = 0.1  # a factor in 1 - scale..1 + scale
    blur: float = 0.5  # pixels; the Gaussian's sigma is in 0.001..blur
    flip: bool = True  # horizontally, with probability 1/2
    noise: float = 0.005  # standard deviation, independent in each pixel and channel
    invert: bool = False  # augment 1 - pixels; for dark ink on white, so that brightness leaves the background alone


SHARPEST = 0.001  # the sigma of a blur that changes nothing
STRONG = Group("Augmentation in sf_ocda and cotta; 0 switches a part off.", {
    "brightness": Field(0.4, "Greatest change of brightness.", SHARE),
    "contrast": Field(0.3, "Greatest change of contrast.", SHARE),
    "saturation": Field(0.5, "Greatest change of saturation.", SHARE),
    "hue": Field(0.06, "Greatest change of hue, in turns.", Range(0, 0.5)),  # half a turn to both sides is the circle
    "gamma": Field(0.3, "Greatest change of gamma.", SHARE),
    "rotate": Field(15.0, "Greatest rotation in degrees.", Range(0, 180)),
    "translate": Field(0.125, "Greatest shift, as a share of the side.", SHARE),
    "scale": Field(0.1, "Greatest change of scale.", Range(0, 0.9)),
    "blur": Field(0.5, "Greatest deviation of the Gaussian blur in pixels; 0, or from 0.001.",
                  Range(0, 1)),  # the kernel of 5 pixels is too small for wider Gaussians
    "flip": Field(True, "Flip half of the images."),
    "noise": Field(0.005, "Deviation of Gaussian noise.", SHARE),
    "invert": Field(False, "Augment 1 - pixels, for dark ink on white."),
}, at_test=True)  # fmt: skip


def check_strong(options: Strong) -> None:
    """Raises a UserError for a blur that no kernel has."""
    if 0 < options.blur < SHARPEST:
        raise UserError(f"must be at least {SHARPEST}, or 0 to switch it off", "strong.blur", options.blur)


def strong(key: Array, pixels: Array, options: Strong) -> Array:
    """CoTTA's augmentation of pixels [n, h, w, 1 or 3], uint8 or floats in 0..1, as floats in 0..1."""
    if pixels.shape[-1] not in (1, 3):
        raise UserError(f"strong augmentation takes images of 1 or 3 channels, not {pixels.shape[-1]}")
    x = jnp.clip(as_floats(pixels), 0, 1)
    x = 1 - x if options.invert else x

    def one(key: Array, image: Array) -> Array:
        draw_key, noise_key = jax.random.split(key)
        drawn = draw_strong(draw_key, image.shape, options)
        image = jitter(image, drawn, adjustments(image.shape, options))
        image = move(image, drawn, options)
        if options.noise:
            image = image + options.noise * jax.random.normal(noise_key, image.shape)
        return jnp.clip(image, 0, 1)

    x = jax.vmap(one)(jax.random.split(key, len(x)), x)
    return 1 - x if options.invert else x


class Drawn(NamedTuple):
    """Random parameters of one image. Those of parts that are switched off change nothing."""

    order: Array  # positions in adjustments()
    amounts: Array  # one for each of ADJUSTMENTS
    angle: Array  # radians
    shift: Array  # pixels down and to the right
    scale: Array
    sigma: Array
    flip: Array


def draw_strong(key: Array, shape: tuple[int, ...], options: Strong) -> Drawn:
    """Random parameters for an image of this shape [h, w, c]."""
    order_key, number_key = jax.random.split(key)
    turn = math.radians(options.rotate)
    ranges = [
        *((1 - spread, 1 + spread) for spread in options[:3]),
        (-options.hue, options.hue),
        (1 - options.gamma, 1 + options.gamma),
        (-turn, turn),
        *((-options.translate * side, options.translate * side) for side in shape[:2]),
        (1 - options.scale, 1 + options.scale),
        (SHARPEST, max(SHARPEST, options.blur)),
        (-1, 1),
    ]
    ends = jnp.array(ranges)
    numbers = jax.random.uniform(number_key, (len(ranges),), minval=ends[:, 0], maxval=ends[:, 1])
    return Drawn(
        order=jax.random.uniform(order_key, (len(adjustments(shape, options)),)).argsort(),
        amounts=numbers[:5],
        angle=numbers[5],
        shift=jnp.round(numbers[6:8]),
        scale=numbers[8],
        sigma=numbers[9],
        flip=(numbers[10] < 0) & options.flip,
    )


# Adjustments take an image in 0..1 as planes [c, h, w]. On CPUs this is twice as fast as [h, w, c], where rows of 3
# channels cannot be vectorised. The definitions are torchvision's.


def grey(planes: Array) -> Array:
    """Planes [c, h, w] to their luma [h, w]."""
    return planes[0] if len(planes) == 1 else 0.2989 * planes[0] + 0.587 * planes[1] + 0.114 * planes[2]


def blend(reference: Array | float, planes: Array, factor: Array) -> Array:
    """The reference at factor 0, the planes at 1, clipped to 0..1."""
    return jnp.clip(factor * planes + (1 - factor) * reference, 0, 1)


def adjust_hue(planes: Array, turns: Array) -> Array:
    """Turns the hue in HSV; value and saturation stay."""
    red, green, blue = planes
    most = planes.max(0)
    chroma = most - planes.min(0)
    # One division with a selected numerator costs half of three divisions.
    start = jnp.where(most == red, 0, jnp.where(most == green, 2, 4))
    rise = jnp.where(most == red, green - blue, jnp.where(most == green, blue - red, red - green))
    sixths = start + rise / jnp.where(chroma > 0, chroma, 1) + 6 * turns
    k = sixths + jnp.array([5, 3, 1])[:, None, None]
    k -= 6 * jnp.floor(k / 6)  # `%` is several times slower
    return most - chroma * jnp.clip(jnp.minimum(k, 4 - k), 0, 1)


ADJUSTMENTS: dict[str, Callable[[Array, Array], Array]] = {
    "brightness": lambda planes, factor: blend(0.0, planes, factor),
    "contrast": lambda planes, factor: blend(grey(planes).mean(), planes, factor),
    "saturation": lambda planes, factor: blend(grey(planes), planes, factor),
    "hue": adjust_hue,
    "gamma": lambda planes, power: jnp.exp(power * jnp.log(jnp.clip(planes, 1e-8, 1))),  # `**` is several times slower
}


def adjustments(shape: tuple[int, ...], options: Strong) -> list[int]:
    """The adjustments that an image of this shape [h, w, c] gets, as indices into ADJUSTMENTS."""
    without = () if shape[-1] == 3 else ("saturation", "hue")
    return [i for i, name in enumerate(ADJUSTMENTS) if getattr(options, name) and name not in without]


def jitter(image: Array, drawn: Drawn, used: list[int]) -> Array:
    """An image [h, w, c] after the adjustments `used`, in the drawn order."""
    if not used:
        return image
    adjusts, amounts = [list(ADJUSTMENTS.values())[i] for i in used], drawn.amounts[jnp.array(used)]

    def step(planes: Array, which: Array) -> tuple[Array, None]:
        return jax.lax.switch(which, adjusts, planes, amounts[which]), None

    # The result of a loop is stored. Without a loop XLA computes the last step
    # again for each pixel that is interpolated.
    return jnp.moveaxis(jax.lax.scan(step, jnp.moveaxis(image, -1, 0), drawn.order)[0], 0, -1)


REACH = 2  # pixels on each side that the blur uses


def move(image: Array, drawn: Drawn, options: Strong) -> Array:
    """Scales, rotates, shifts, blurs, then flips [h, w, c]; the pixels at the edges continue outwards.

    The published pipeline first pads by half of the side and crops at the end. With its ranges, and sides of 17 pixels
    or more, no pixel from outside the padding reaches the crop. So limiting the coordinates to the image gives the
    same. The blur is symmetric, so the flip can be a part of the interpolation before it.
    """
    margin = REACH if options.blur else 0
    if options.rotate or options.translate or options.scale or options.flip:
        image = affine(image, drawn.angle, drawn.shift, drawn.scale, margin, drawn.flip)
    elif margin:
        image = jnp.pad(image, ((margin, margin), (margin, margin), (0, 0)), mode="edge")
    return blur(image, drawn.sigma) if options.blur else image


def affine(
    image: Array, angle: Array, shift: Array, scale: Array, margin: int = 0, flip: Array | bool = False
) -> Array:
    """Scales and rotates an image [h, w, c] about its centre, shifts, then flips it, in one bilinear interpolation.

    The result has so many pixels more on each side as `margin` says.
    """
    h, w, _ = image.shape
    down, right = jnp.arange(-margin, h + margin) - (h - 1) / 2, jnp.arange(-margin, w + margin) - (w - 1) / 2
    ys, xs = jnp.meshgrid(down - shift[0], jnp.where(flip, -right, right) - shift[1], indexing="ij")
    cos, sin = jnp.cos(angle) / scale, jnp.sin(angle) / scale
    y = jnp.clip(cos * ys - sin * xs + (h - 1) / 2, 0, h - 1)
    x = jnp.clip(sin * ys + cos * xs + (w - 1) / 2, 0, w - 1)
    # The neighbour beyond the last row or column has weight 0.
    return bilinear(y, x, lambda row, column: image[jnp.minimum(row, h - 1), jnp.minimum(column, w - 1)])


def blur(image: Array, sigma: Array) -> Array:
    """A Gaussian blur with a kernel of 5 x 5 pixels, from [h + 4, w + 4, c] to [h, w, c]."""
    taps = jnp.exp(-0.5 * (jnp.arange(-REACH, REACH + 1) / sigma) ** 2)
    taps /= taps.sum()
    for axis in (0, 1):
        side = image.shape[axis] - 2 * REACH
        slices = (jax.lax.slice_in_dim(image, i, i + side, axis=axis) for i in range(len(taps)))
        image = sum((tap * part for tap, part in zip(taps, slices, strict=True)), jnp.zeros(()))
    return image
