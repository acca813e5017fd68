"""The 19 common corruptions of Hendrycks and Dietterich (2019), for whole batches, from numpy, scipy and Pillow alone.

Constants are those of the scripts that made CIFAR-10-C ("cifar") and Tiny-ImageNet-C ("tiny"). Each image has its own
draws: its noise, angle, map or crop. No result equals the published files bit by bit: random numbers differ, and

- Frost: the original's photographs are not included. Ice textures drawn here, alike in colour and contrast, stand in.
- Motion blur, and the streaks of snow: computed here by ImageMagick's formula, without its 16-bit arithmetic.
- Spatter's water: computed here by OpenCV's steps, but distances are exact, and levels above 255 become 255 where the
  original's wrap around.
- JPEG: depends on Pillow's library.
- Arithmetic is in float32. 1e-4 of a level is added before truncation, so that a rounding error cannot take a level.
- The published Tiny-ImageNet-C files went through JPEG once more, at quality 85; see as_jpeg.

Glass blur looks like a swap of pixels in the original. Its assignment copies, because numpy's rows are views: a pixel
takes its neighbour's value and the neighbour keeps it. The published files were made so, and so are these.
"""

import functools
import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image
from scipy import ndimage

from cxda_jax.types import UserError

VERSION = 1  # moves whenever a pixel does
_CIFAR: dict[str, tuple] = {
    "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),  # standard deviation
    "shot_noise": (500, 250, 100, 75, 50),  # photons at full brightness
    "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),  # share of values
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),  # radius, sigma of its rim
    "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),  # sigma, reach, rounds
    "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),  # radius, sigma
    "zoom_blur": (1.06, 1.11, 1.16, 1.21, 1.26),  # end of np.arange(1, end, 0.01)
    "snow": (  # mean, deviation, zoom, threshold, radius, sigma, share of the image that is not whitened
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95), (0.1, 0.2, 1, 0.5, 10, 4, 0.9), (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85), (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "frost": ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),  # weights of the image and of the ice
    "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),  # density, decay of detail
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),  # added to V of HSV
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),  # factor
    # Height and sigma of the waves, shift of the affine map's corners; in sides of the image.
    "elastic_transform": ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),  # share of the side
    "jpeg_compression": (80, 65, 58, 50, 40),  # quality
    "speckle_noise": (0.06, 0.1, 0.12, 0.16, 0.2),  # standard deviation as a share of the value
    "gaussian_blur": (0.4, 0.6, 0.7, 0.8, 1),  # sigma
    "spatter": (  # mean, deviation, sigma, threshold, strength of water or sigma of mud, whether mud
        (0.62, 0.1, 0.7, 0.7, 0.5, 0), (0.65, 0.1, 0.8, 0.7, 0.5, 0), (0.65, 0.3, 1, 0.69, 0.5, 0),
        (0.65, 0.1, 0.7, 0.69, 0.6, 1), (0.65, 0.1, 0.5, 0.68, 0.6, 1),
    ),
    "saturate": ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),  # factor and offset of S of HSV
}  # fmt: skip
_TINY: dict[str, tuple] = _CIFAR | {  # zoom_blur is the same
    "gaussian_noise": (0.04, 0.08, 0.12, 0.15, 0.18),
    "shot_noise": (250, 100, 50, 30, 15),
    "impulse_noise": (0.01, 0.02, 0.05, 0.08, 0.14),
    "defocus_blur": ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
    "glass_blur": ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)),
    "motion_blur": ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
    "snow": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.8), (0.1, 0.2, 1, 0.5, 10, 4, 0.8), (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65), (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
    ),
    "frost": ((1, 0.3), (0.9, 0.4), (0.8, 0.45), (0.75, 0.5), (0.7, 0.55)),
    "fog": ((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)),
    "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),
    "elastic_transform": ((0, 0, 0.08), (0.05, 0.3, 0.06), (0.1, 0.08, 0.06), (0.1, 0.03, 0.03), (0.16, 0.03, 0.02)),
    "pixelate": (0.9, 0.8, 0.7, 0.6, 0.5),
    "jpeg_compression": (65, 58, 50, 40, 25),
    "speckle_noise": (0.15, 0.2, 0.25, 0.3, 0.35),
    "gaussian_blur": (0.5, 0.75, 1, 1.25, 1.5),
    "spatter": (
        (0.62, 0.1, 0.7, 0.7, 0.6, 0), (0.65, 0.1, 0.8, 0.7, 0.6, 0), (0.65, 0.3, 1, 0.69, 0.6, 0),
        (0.65, 0.1, 0.7, 0.68, 0.6, 1), (0.65, 0.1, 0.5, 0.67, 0.6, 1),
    ),
    "saturate": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (30, 0.2)),
}  # fmt: skip
NAMES = tuple(_CIFAR)
SEVERITIES = {"cifar": _CIFAR, "tiny": _TINY}
SMALLEST = 16  # pixels of a side

_BLOCK = 64  # images at a time: their float32 copies stay in a core's cache
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)
_TURQUOISE, _MUD = np.array([175, 238, 238], np.float32), np.array([63, 42, 20], np.float32)
_ICE_SIDE, _ICE_SEED = 256, 19
# Means and spreads of red, green and blue, as measured on the photographs, and which way the needles stand out. The
# original's second and third photographs are the same picture, and it never draws its sixth.
_ICE = (
    ((78, 149, 166), (27, 16, 15), 0.3), ((201, 205, 214), (21, 22, 23), -0.3), ((201, 205, 214), (21, 22, 23), -0.3),
    ((138, 153, 166), (29, 29, 30), 0.2), ((112, 123, 135), (44, 43, 42), 0.4),
)  # fmt: skip


def corrupt(
    images: np.ndarray, name: str, severity: int, rng: np.random.Generator, constants: str = "cifar"
) -> np.ndarray:
    """Images uint8 [n, side, side, 3] under one of NAMES at severity 1..5, with one of SEVERITIES' constants."""
    _check(images, name, severity, constants)
    result = np.empty_like(images)
    for start in range(0, len(images), _BLOCK):
        block = slice(start, start + _BLOCK)
        pixels = _FUNCTIONS[name](images[block], SEVERITIES[constants][name][severity - 1], rng)
        result[block] = pixels if pixels.dtype == np.uint8 else _truncate(pixels)
    return result


def as_jpeg(images: np.ndarray, quality: int) -> np.ndarray:
    """Images uint8 [n, h, w, 3] as they come back from JPEG files."""

    def saved(image: Image.Image) -> Image.Image:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        return Image.open(file)

    return np.stack([np.asarray(saved(Image.fromarray(one))) for one in images])


def _check(images: np.ndarray, name: str, severity: int, constants: str) -> None:
    if name not in NAMES:
        raise UserError(f"corruption={name!r} is unknown; choose from {', '.join(NAMES)}")
    if not isinstance(severity, int | np.integer) or not 1 <= severity <= 5:
        raise UserError(f"severity={severity!r} is not one of 1, 2, 3, 4, 5")
    if constants not in tuple(SEVERITIES):
        raise UserError(f"constants={constants!r} is not one of {', '.join(SEVERITIES)}")
    shape = images.shape
    if images.dtype != np.uint8 or len(shape) != 4 or shape[1] != shape[2] or shape[3] != 3 or shape[1] < SMALLEST:
        raise UserError(
            f"images: {images.dtype} {list(shape)} must be uint8 [n, side, side, 3] with a side of at least {SMALLEST}"
        )


def _truncate(levels: np.ndarray) -> np.ndarray:
    return np.clip(levels + np.float32(1e-4), 0, 255).astype(np.uint8)


# Functions of pixels uint8 [n, h, w, 3], one of the constants, and a generator. They return uint8, or levels
# that corrupt clips and truncates.


def _gaussian_noise(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    return x + 255 * c * rng.standard_normal(x.shape, np.float32)


def _shot_noise(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    return (rng.poisson(x * (c / 255)) * (255 / c)).astype(np.float32)


def _impulse_noise(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    hit = rng.random(x.shape, np.float32)
    return np.where(hit < c / 2, np.uint8(0), np.where(hit < c, np.uint8(255), x))


def _speckle_noise(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    return x + x * (c * rng.standard_normal(x.shape, np.float32))


def _gaussian_blur(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    return _gaussian(x.astype(np.float32), c)


def _gaussian(x: np.ndarray, sigma: float, mode: str = "nearest", truncate: float = 4.0) -> np.ndarray:
    """Blurs the rows and columns of [n, h, w, ...]."""
    return ndimage.gaussian_filter(x, sigma, mode=mode, truncate=truncate, axes=(1, 2))


def _defocus_blur(x: np.ndarray, c: tuple[float, float], rng: np.random.Generator) -> np.ndarray:
    kernel = _disk(*c)
    reach = len(kernel) // 2
    side = x.shape[1]
    padded = np.pad(x, ((0, 0), (reach, reach), (reach, reach), (0, 0)), mode="reflect").astype(np.float32)
    total = np.zeros(x.shape, np.float32)
    for row, column in zip(*np.nonzero(kernel), strict=True):
        total += kernel[row, column] * padded[:, row : row + side, column : column + side]
    return total


def _disk(radius: float, sigma: float) -> np.ndarray:
    """A disk of the radius whose rim a gaussian of three taps softens; sums to 1."""
    reach = math.ceil(radius) + 1
    steps = np.arange(-reach, reach + 1)
    disk = (steps[:, None] ** 2 + steps**2 <= radius**2).astype(float)
    taps = np.exp(-0.5 * (np.array([-1, 0, 1]) / sigma) ** 2)
    for axis in (0, 1):
        disk = ndimage.correlate1d(disk, taps / taps.sum(), axis, mode="constant")
    kernel = (disk / disk.sum()).astype(np.float32)
    return np.where(kernel > 1e-7, kernel, 0)


def _glass_blur(x: np.ndarray, c: tuple[float, int, int], rng: np.random.Generator) -> np.ndarray:
    sigma, reach, rounds = c
    n, side = x.shape[:2]
    x = _truncate(_gaussian(x.astype(np.float32), sigma))
    # Where each pixel's value comes from: one row of `source` holds one pixel of all images.
    source = np.repeat(np.arange(side**2)[:, None], n, 1)
    every, scan = np.arange(n), range(side - reach, reach, -1)
    for _ in range(rounds):
        shift = rng.integers(-reach, reach, (2, len(scan), len(scan), n))
        step = shift[0] * side + shift[1]
        for i, row in enumerate(scan):
            for j, column in enumerate(scan):
                pixel = row * side + column
                source[pixel] = source[pixel + step[i, j], every]
    x = x.reshape(n, side**2, 3)[every[:, None], source.T].reshape(x.shape)
    return _gaussian(x.astype(np.float32), sigma)


def _motion_blur(x: np.ndarray, c: tuple[int, float], rng: np.random.Generator) -> np.ndarray:
    blurred = _streak(np.moveaxis(x, -1, 1), *c, rng.uniform(-45, 45, len(x)))
    return np.rint(np.moveaxis(blurred, 1, -1)).astype(np.uint8)


def _streak(x: np.ndarray, radius: int, sigma: float, angles: np.ndarray) -> np.ndarray:
    """Blurs [n, ..., h, w] along a line from each pixel at each image's angle in degrees, by half a gaussian in whole
    pixels; edges continue outwards."""
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-0.5 * (steps / sigma) ** 2)
    steps = steps[weights > 1e-6]
    weights = (weights[steps] / weights.sum()).astype(np.float32)
    down = np.ceil(np.sin(np.deg2rad(angles)) * steps[:, None] - 0.5).astype(int)
    right = np.ceil(np.cos(np.deg2rad(angles)) * steps[:, None] - 0.5).astype(int)
    reach = int(steps[-1])
    pad = [(0, 0)] * (x.ndim - 2) + [(reach, reach)] * 2
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, pad, mode="edge"), x.shape[-2:], (-2, -1))
    total = np.zeros(x.shape, np.float32)
    for weight, dy, dx in zip(weights, down + reach, right + reach, strict=True):
        total += weight * windows[np.arange(len(x)), ..., dy, dx, :, :]
    return total


def _zoom_blur(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    planes = np.ascontiguousarray(np.moveaxis(x, -1, 1), np.float32)
    zooms = np.arange(1, c, 0.01)
    total = planes.copy()
    for zoom in zooms:
        total += _zoom(planes, zoom)
    return np.moveaxis(total / (len(zooms) + 1), 1, -1)


def _zoom(x: np.ndarray, zoom: float) -> np.ndarray:
    """The centre of [..., side, side], enlarged to the same side."""
    matrix = _zoom_matrix(x.shape[-1], zoom)
    return matrix @ (x @ matrix.T)


@functools.cache
def _zoom_matrix(side: int, zoom: float) -> np.ndarray:
    """Linear interpolation of a line, float32 [side, side]: crop, enlarge with both ends kept in place, trim."""
    crop = math.ceil(side / zoom)
    size = round(crop * zoom)
    at = (side - crop) // 2 + (np.arange(side) + (size - side) // 2) * (crop - 1) / (size - 1)
    return np.maximum(0, 1 - np.abs(at[:, None] - np.arange(side))).astype(np.float32)


def _snow(x: np.ndarray, c: tuple, rng: np.random.Generator) -> np.ndarray:
    mean, deviation, zoom, threshold, radius, sigma, keep = c
    flakes = _zoom(mean + deviation * rng.standard_normal(x.shape[:3], np.float32), zoom)
    flakes = _truncate(255 * np.where(flakes < threshold, 0, flakes))
    flakes = np.rint(_streak(flakes, radius, sigma, rng.uniform(-135, -45, len(x))))
    x = x.astype(np.float32)
    white = np.maximum(x, 1.5 * (x @ _LUMA)[..., None] + 127.5)
    return keep * x + (1 - keep) * white + (flakes + flakes[:, ::-1, ::-1])[..., None]


def _frost(x: np.ndarray, c: tuple[float, float], rng: np.random.Generator) -> np.ndarray:
    n, side = x.shape[:2]
    which, corner = rng.integers(0, len(_ICE), n), rng.integers(0, _ICE_SIDE, (2, n, 1))
    rows, columns = (corner + np.arange(side)) % _ICE_SIDE  # the textures join at their edges
    return np.float32(c[0]) * x + np.float32(c[1]) * _ice()[which[:, None, None], rows[:, :, None], columns[:, None]]


@functools.cache
def _ice() -> np.ndarray:
    """Textures of ice uint8 [textures, side, side, 3], always the same."""
    rng = np.random.default_rng(_ICE_SEED)
    reliefs = [_crystals(rng, skew)[..., None] for _, _, skew in _ICE]
    levels = [mean + relief * spread for (mean, spread, _), relief in zip(_ICE, reliefs, strict=True)]
    return np.clip(levels, 0, 255).astype(np.uint8)


def _crystals(rng: np.random.Generator, skew: float, fields: int = 9) -> np.ndarray:
    """A relief [side, side] of mean 0 and spread 1: needles in patches, each patch with a direction of its own."""
    down, right = np.meshgrid(*[np.fft.fftfreq(_ICE_SIDE)] * 2, indexing="ij")

    def noise(power: int, length: float, width: float, angle: float = 0.0) -> np.ndarray:
        along, across = np.cos(angle) * right + np.sin(angle) * down, np.cos(angle) * down - np.sin(angle) * right
        blur = np.exp(-2 * np.pi**2 * ((length * along) ** 2 + (width * across) ** 2))
        return _standard(np.fft.ifft2(blur * np.fft.fft2(rng.normal(size=down.shape) ** power)).real)

    patches = np.exp([3 * noise(1, 3, 3) for _ in range(fields)])
    angles = np.pi * (np.arange(fields) + rng.uniform(0, 1, fields)) / fields
    needles = np.stack([noise(3, 2.2, 0.3, angle) for angle in angles])  # cubes: few needles, and strong ones
    relief = (patches * needles).sum(0) / np.sqrt((patches**2).sum(0))
    relief = _standard(relief + 0.6 * noise(1, 20, 20) + 0.4 * noise(1, 5, 5) + 0.3 * noise(1, 0, 0))
    return _standard(np.exp(skew * 2.5 * np.tanh(relief / 2.5))) * np.sign(skew)


def _standard(x: np.ndarray) -> np.ndarray:
    return (x - x.mean()) / x.std()


def _fog(x: np.ndarray, c: tuple[float, float], rng: np.random.Generator) -> np.ndarray:
    density, decay = c
    side = x.shape[1]
    clouds = _plasma(rng, len(x), 1 << (side - 1).bit_length(), decay)[:, :side, :side, None]
    most = x.max((1, 2, 3), keepdims=True).astype(np.float32)
    return (x + 255 * density * clouds) * (most / (most + 255 * density))


def _plasma(rng: np.random.Generator, n: int, side: int, decay: float) -> np.ndarray:
    """Diamond-square maps [n, side, side] of a side that is a power of two, each from 0 to 1; their edges join."""
    maps = np.zeros((n, side, side), np.float32)
    step, wobble = side, 100.0**2

    def jitter(sums: np.ndarray) -> np.ndarray:
        return sums / 4 + wobble * (2 * rng.random(sums.shape, np.float32) - 1)

    while step > 1:
        half = step // 2
        corners, centres = maps[:, ::step, ::step], maps[:, half::step, half::step]
        pairs = corners + np.roll(corners, -1, 1)
        centres[:] = jitter(pairs + np.roll(pairs, -1, 2))
        maps[:, ::step, half::step] = jitter(centres + np.roll(centres, 1, 1) + corners + np.roll(corners, -1, 2))
        maps[:, half::step, ::step] = jitter(centres + np.roll(centres, 1, 2) + corners + np.roll(corners, -1, 1))
        step, wobble = half, wobble / decay**2
    maps -= maps.min((1, 2), keepdims=True)
    return maps / maps.max((1, 2), keepdims=True)


def _brightness(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    value = x.max(-1, keepdims=True).astype(np.float32)
    raised = np.minimum(value + 255 * c, 255)
    return np.where(value > 0, x * (raised / np.maximum(value, 1)), raised)  # hue and saturation stay


def _contrast(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    means = x.mean((1, 2), keepdims=True, dtype=np.float32)
    return (x - means) * np.float32(c) + means


def _elastic_transform(x: np.ndarray, c: tuple[float, float, float], rng: np.random.Generator) -> np.ndarray:
    n, side = x.shape[:2]
    amount, sigma, corners = (side * value for value in c)
    grid = np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="xy"))  # x, then y
    centre, far = side // 2, side // 3
    before = centre + far * np.array([[1, 1], [1, -1], [-1, -1]])
    after = before + rng.uniform(-corners, corners, (n, 3, 2))
    # The map back, from places of the result to places of the image.
    back = np.linalg.solve(np.concatenate([after, np.ones((n, 3, 1))], 2), before)
    places = np.einsum("nij,ihw->njhw", back[:, :2], grid) + back[:, 2, :, None, None]
    x = _sample(x.astype(np.float32), places[:, 0], places[:, 1], mirror=True)
    if not amount:
        return x
    waves = rng.uniform(-1, 1, (2 * n, side, side)).astype(np.float32)
    waves = amount * _gaussian(waves, sigma, mode="reflect", truncate=3.0)
    return _sample(x, grid[0] + waves[:n], grid[1] + waves[n:], mirror=False)


def _sample(images: np.ndarray, x: np.ndarray, y: np.ndarray, mirror: bool) -> np.ndarray:
    """Bilinear samples of float32 [n, h, h, 3] at places [n, h, h]; reflects at the outermost pixels' centres (mirror)
    or at their outer edges."""
    side = images.shape[1]
    period = 2 * side - 2 if mirror else 2 * side

    def fold(index: np.ndarray) -> np.ndarray:
        index = index % period
        return np.where(index < side, index, (period if mirror else period - 1) - index)

    x0, y0 = np.floor(x).astype(int), np.floor(y).astype(int)
    fx, fy = (x - x0).astype(np.float32)[..., None], (y - y0).astype(np.float32)[..., None]
    left, right = fold(x0), fold(x0 + 1)
    first = side**2 * np.arange(len(images))[:, None, None]
    top, bottom = first + side * fold(y0), first + side * fold(y0 + 1)
    flat = images.reshape(-1, 3)
    above = flat[top + left] * (1 - fx) + flat[top + right] * fx
    below = flat[bottom + left] * (1 - fx) + flat[bottom + right] * fx
    return above * (1 - fy) + below * fy


def _pixelate(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    side, small = x.shape[1], int(x.shape[1] * c)

    def coarse(image: Image.Image) -> Image.Image:
        return image.resize((small, small), Image.Resampling.BOX).resize((side, side), Image.Resampling.BOX)

    return np.stack([np.asarray(coarse(Image.fromarray(one))) for one in x])


def _jpeg_compression(x: np.ndarray, c: int, rng: np.random.Generator) -> np.ndarray:
    return as_jpeg(x, c)


def _spatter(x: np.ndarray, c: tuple, rng: np.random.Generator) -> np.ndarray:
    mean, deviation, sigma, threshold, strength, mud = c
    liquid = _gaussian(mean + deviation * rng.standard_normal(x.shape[:3], np.float32), sigma)
    if mud:
        cover = _gaussian((liquid > threshold).astype(np.float32), strength)
        cover = np.where(cover < 0.8, 0, cover)[..., None]
        return x * (1 - cover) + _MUD * cover
    drops = np.trunc(255 * np.clip(np.where(liquid < threshold, 0, liquid), 0, 1))
    drops *= _light(drops)
    drops *= strength / np.maximum(drops.max((1, 2), keepdims=True), 1)
    return x + _TURQUOISE * drops[..., None]


def _light(drops: np.ndarray) -> np.ndarray:
    """Light on drops of water [n, h, w], in levels: it grows with the distance from edges, brighter to one side."""
    distance = np.full(drops.shape, 20, np.float32)
    for one, edges in zip(distance, _edges(drops), strict=True):
        if edges.any():
            np.minimum(one, np.asarray(ndimage.distance_transform_edt(~edges)), out=one)
    light = _equalise(_truncate(_mean(distance)))
    slope = np.array([[[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]])
    return np.rint(_mean(np.clip(ndimage.correlate(light, slope, mode="mirror"), 0, 255)))


def _mean(x: np.ndarray) -> np.ndarray:
    """Means over 3x3 pixels of [n, h, w]."""
    return ndimage.correlate(x, np.full((1, 3, 3), 1 / 9), mode="mirror")


def _edges(levels: np.ndarray, low: float = 50, high: float = 150) -> np.ndarray:
    """Canny's edges of [n, h, w]: ridges of a slope above `low`, where they join a slope above `high`."""
    side = levels.shape[1]
    sobel = np.array([[[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]]], np.float32)  # scipy's own would mix neighbouring images
    right, down = (ndimage.correlate(levels, k, mode="nearest") for k in (sobel, sobel.swapaxes(1, 2)))
    slope = np.abs(down) + np.abs(right)
    padded = np.pad(slope, ((0, 0), (1, 1), (1, 1)))

    def next_to(rows: int, columns: int) -> np.ndarray:
        return padded[:, 1 + rows : 1 + rows + side, 1 + columns : 1 + columns + side]

    gentle = np.tan(np.pi / 8)
    along = [np.abs(down) < gentle * np.abs(right), np.abs(right) < gentle * np.abs(down), down * right > 0]
    steps = [(0, 1), (1, 0), (1, 1), (1, -1)]
    ahead, behind = ([next_to(sign * r, sign * c) for r, c in steps] for sign in (1, -1))
    ridge = (slope >= np.select(along, ahead[:3], ahead[3])) & (slope > np.select(along, behind[:3], behind[3]))
    within = np.zeros((3, 3, 3), bool)  # diagonals join, images do not
    within[1] = True
    return np.asarray(ndimage.binary_propagation(ridge & (slope > high), within, ridge & (slope > low)))


def _equalise(levels: np.ndarray) -> np.ndarray:
    """Each image's levels [n, h, w], integers, spread over 0..255 by rank; the lowest becomes 0."""
    n, bins = len(levels), int(levels.max()) + 1
    rows = np.arange(n)[:, None, None]
    counts = np.bincount((levels + bins * rows).ravel(), minlength=n * bins).reshape(n, bins)
    below = counts.cumsum(1)
    lowest = counts[np.arange(n), (counts > 0).argmax(1)][:, None]
    table = np.rint(np.maximum(below - lowest, 0) * (255 / np.maximum(below[:, -1:] - lowest, 1)))
    return table.astype(np.float32)[rows, levels]


def _saturate(x: np.ndarray, c: tuple[float, float], rng: np.random.Generator) -> np.ndarray:
    value = x.max(-1, keepdims=True).astype(np.float32)
    chroma = value - x.min(-1, keepdims=True)
    saturation = np.clip(chroma / np.maximum(value, 1) * c[0] + c[1], 0, 1)
    # How far each channel lies below the value, as a share of chroma; a grey's hue is 0, red.
    depth = np.where(chroma > 0, (value - x) / np.maximum(chroma, 1), np.array([0, 1, 1], np.float32))
    return value * (1 - saturation * depth)


_FUNCTIONS: dict[str, Callable[[np.ndarray, Any, np.random.Generator], np.ndarray]] = {
    function.__name__[1:]: function
    for function in (
        _gaussian_noise, _shot_noise, _impulse_noise, _defocus_blur, _glass_blur, _motion_blur, _zoom_blur, _snow,
        _frost, _fog, _brightness, _contrast, _elastic_transform, _pixelate, _jpeg_compression, _speckle_noise,
        _gaussian_blur, _spatter, _saturate,
    )
}  # fmt: skip
