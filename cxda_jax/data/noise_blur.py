"""Noise and blur: the corruptions of corruptions.py that need neither weather nor compression.

A corruption is a function of pixels uint8 [n, side, side, 3], one of the constants, and a generator. It returns uint8,
or levels of any kind that corrupt() clips and truncates.
"""

import math

import numpy as np
from scipy import ndimage


def to_uint8(levels: np.ndarray) -> np.ndarray:
    return np.clip(levels + np.float32(1e-4), 0, 255).astype(np.uint8)


def gaussian_noise(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    return x + 255 * c * rng.standard_normal(x.shape, np.float32)


def shot_noise(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    return (rng.poisson(x * (c / 255)) * (255 / c)).astype(np.float32)


def impulse_noise(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    hit = rng.random(x.shape, np.float32)
    return np.where(hit < c / 2, np.uint8(0), np.where(hit < c, np.uint8(255), x))


def speckle_noise(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    return x + x * (c * rng.standard_normal(x.shape, np.float32))


def gaussian_blur(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    return smooth(x.astype(np.float32), c)


def smooth(x: np.ndarray, sigma: float, mode: str = "nearest", truncate: float = 4.0) -> np.ndarray:
    """Blurs the rows and columns of [n, h, w, ...]."""
    return ndimage.gaussian_filter(x, sigma, mode=mode, truncate=truncate, axes=(1, 2))


def defocus_blur(x: np.ndarray, c: tuple[float, float], rng: np.random.Generator) -> np.ndarray:
    kernel = _disk(*c)
    reach, side = len(kernel) // 2, x.shape[1]
    padded = np.pad(x, ((0, 0), (reach, reach), (reach, reach), (0, 0)), mode="reflect").astype(np.float32)
    total = np.zeros(x.shape, np.float32)
    for row, column in zip(*np.nonzero(kernel), strict=True):
        total += kernel[row, column] * padded[:, row : row + side, column : column + side]
    return total


def _disk(radius: float, sigma: float) -> np.ndarray:
    """A disk with a rim that a gaussian of three taps softens; it sums to 1."""
    reach = math.ceil(radius) + 1
    steps = np.arange(-reach, reach + 1)
    disk = (steps[:, None] ** 2 + steps**2 <= radius**2).astype(float)
    taps = np.exp(-0.5 * (np.array([-1, 0, 1]) / sigma) ** 2)
    for axis in (0, 1):
        disk = ndimage.correlate1d(disk, taps / taps.sum(), axis, mode="constant")
    kernel = (disk / disk.sum()).astype(np.float32)
    return np.where(kernel > 1e-7, kernel, 0)


def glass_blur(x: np.ndarray, c: tuple[float, int, int], rng: np.random.Generator) -> np.ndarray:
    sigma, reach, rounds = c
    n, side = x.shape[:2]
    x = to_uint8(smooth(x.astype(np.float32), sigma))
    # source[pixel, image] is the place from which the pixel takes its value.
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
    return smooth(x.astype(np.float32), sigma)


def motion_blur(x: np.ndarray, c: tuple[int, float], rng: np.random.Generator) -> np.ndarray:
    blurred = streak(np.moveaxis(x, -1, 1), *c, rng.uniform(-45, 45, len(x)))
    return np.rint(np.moveaxis(blurred, 1, -1)).astype(np.uint8)


def streak(x: np.ndarray, radius: int, sigma: float, angles: np.ndarray) -> np.ndarray:
    """Blurs [n, ..., h, w] along lines of 2 * radius + 1 pixels that start at each pixel,
    with the weights of half a gaussian.

    Each image has its own angle in degrees [n]. Outside of an image, its edge continues.
    """
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


def zoom_blur(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    planes = np.ascontiguousarray(np.moveaxis(x, -1, 1), np.float32)
    zooms = np.arange(1, c, 0.01)
    total = planes.copy()
    for zoom in zooms:
        total += zoom_in(planes, zoom)
    return np.moveaxis(total / (len(zooms) + 1), 1, -1)


def zoom_in(x: np.ndarray, zoom: float) -> np.ndarray:
    """The centre of images [..., side, side], enlarged to the same side.

    It is a crop, enlarged by linear interpolation between its ends, and trimmed. Each sum of two products is written
    out, since the rounding of a matrix product depends on the processor, and every machine has to make the same
    pixels. The last product is in float64, as in a fused multiplication and addition: the recorded stores were made
    so.
    """
    side = x.shape[-1]
    crop = math.ceil(side / zoom)
    size = round(crop * zoom)
    at = (side - crop) // 2 + (np.arange(side) + (size - side) // 2) * (crop - 1) / (size - 1)
    near = np.floor(at).astype(int)
    far = np.minimum(near + 1, side - 1)
    to_near, to_far = (np.maximum(0, 1 - np.abs(at - place)).astype(np.float32) for place in (near, near + 1))
    x = x[..., near] * to_near + x[..., far] * to_far
    below = x[..., far, :].astype(float) * to_far[:, None]
    return (x[..., near, :] * to_near[:, None] + below).astype(np.float32)
