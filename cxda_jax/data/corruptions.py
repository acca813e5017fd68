"""The 19 common corruptions of Hendrycks and Dietterich (2019), for whole batches, from numpy, scipy and Pillow alone.

The constants are those of the scripts that made CIFAR-10-C ("cifar") and Tiny-ImageNet-C ("tiny"). Each image has its
own noise, angle, map or crop. No result equals the published files bit by bit: the random numbers differ, and

- Frost: the original's photographs are not included. Generated textures of the same colours and contrast replace them.
- Motion blur and the streaks of snow follow ImageMagick's formula, without its 16-bit arithmetic.
- Spatter's water follows OpenCV's steps, but distances are exact. Levels above 255 become 255;
  the original's wrap around.
- JPEG depends on Pillow's library.
- Arithmetic is in float32. 1e-4 of a level is added before truncation, so that a rounding error cannot cost a level.
- No matrix product is used, since its rounding depends on the processor: a data set's hash must not.
- The published Tiny-ImageNet-C files went through JPEG once more, at quality 85; see as_jpeg().

The original's glass blur looks as if it swapped pixels. But numpy's rows are views, so its assignment copies:
a pixel takes its neighbour's value and the neighbour keeps its own. The published files were made so, and this
package does the same.

noise_blur.py and weather_digital.py hold the corruptions themselves.
"""

import io

import numpy as np
from PIL import Image

from cxda_jax.config.fields import choose
from cxda_jax.data import noise_blur, weather_digital
from cxda_jax.errors import UserError

VERSION = 1  # goes up whenever a pixel changes
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
LEVELS = range(1, 6)
SEVERITIES = {"cifar": _CIFAR, "tiny": _TINY}
SMALLEST = 16  # pixels of a side
BLOCK = 64  # images at a time: their float32 copies stay in a core's cache


def corrupt(
    images: np.ndarray, name: str, severity: int, rng: np.random.Generator, constants: str = "cifar"
) -> np.ndarray:
    """Images uint8 [n, side, side, 3] under one of NAMES, with its constant of severity 1..5 in one of SEVERITIES."""
    corruption = _FUNCTIONS[choose("corruption", name, NAMES)]
    constant = SEVERITIES[choose("constants", constants, SEVERITIES)][name][choose("severity", severity, LEVELS) - 1]
    n, side, *rest = images.shape
    if images.dtype != np.uint8 or rest != [side, 3] or side < SMALLEST:
        expected = f"uint8 [n, side, side, 3] with a side of at least {SMALLEST}"
        raise UserError(f"images: {images.dtype} {list(images.shape)} must be {expected}")
    result = np.empty_like(images)
    for start in range(0, n, BLOCK):
        block = slice(start, start + BLOCK)
        pixels = corruption(images[block], constant, rng)
        result[block] = pixels if pixels.dtype == np.uint8 else noise_blur.to_uint8(pixels)
    return result


def as_jpeg(images: np.ndarray, quality: int) -> np.ndarray:
    """Saves images uint8 [n, h, w, 3] as JPEG files in memory and reads them back."""
    files = [io.BytesIO() for _ in images]
    for image, file in zip(images, files, strict=True):
        Image.fromarray(image).save(file, "JPEG", quality=quality)
    return np.stack([np.asarray(Image.open(file, formats=["JPEG"])) for file in files])


_JPEG = {"jpeg_compression": lambda images, quality, rng: as_jpeg(images, quality)}
_FUNCTIONS = vars(noise_blur) | vars(weather_digital) | _JPEG  # NAMES are among them
