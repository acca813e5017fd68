"""Reads images of any kind as RGB with 8 bits a channel and of one size, as a viewer shows them: for your own images.

integers of 16 bits   0..65535, the range of the type, becomes 0..255, so that the images of a folder stay comparable
floats                0..1 becomes 0..255
both, outside of it   the image's own least value becomes 0 and its largest 255; NaN and infinite values are refused
transparency          the image is laid over a background of one colour
EXIF                  the image is turned and mirrored as the camera says
"""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from cxda_jax.data.readers.raw import decode
from cxda_jax.errors import UserError, brief

Colour = tuple[int, int, int]
# PIL scales the pixels of a PNG of 2, 4 or 16 bits by these factors, but not the colour that stands for transparency.
_SCALES = {"L;2": 85, "L;4": 17, "RGB;16B": 1 / 256}


def to_rgb(image: Image.Image, background: Colour) -> Image.Image:
    _scale_key(image)
    image.load()  # raises for faults in the pixels; those of the EXIF block are ignored below
    with contextlib.suppress(Exception):  # a broken EXIF block raises exceptions of all kinds, and then turns nothing
        image = ImageOps.exif_transpose(image)
    if image.mode == "F" or image.mode.startswith("I"):
        image = _to_8_bits(image)
    if image.mode in ("LA", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        pixels = np.asarray(image.convert("RGBA"), np.int64)
        colour, alpha = pixels[..., :3], pixels[..., 3:]
        over = np.rint((colour * alpha + np.array(background) * (255 - alpha)) / 255)
        return Image.fromarray(over.astype(np.uint8))
    return image.convert("RGB")


def _scale_key(image: Image.Image) -> None:
    tiles, key = getattr(image, "tile", []), image.info.get("transparency")  # only an opened file has tiles
    scale = _SCALES.get(str(tiles[0][3])) if tiles else None
    if scale and key is not None:
        image.info["transparency"] = tuple(int(k * scale) for k in key) if isinstance(key, tuple) else key * scale


def _to_8_bits(image: Image.Image) -> Image.Image:
    """A grey image, with an alpha channel if a grey value stands for transparency."""
    pixels, hidden = np.asarray(image).astype(np.float64), image.info.get("transparency")
    if not np.isfinite(pixels).all():
        raise ValueError("NaN or infinite pixels")
    low, high = 0.0, 1.0 if image.mode == "F" else 65535.0
    if pixels.min() < low or pixels.max() > high:
        low, high = pixels.min(), pixels.max()
    grey = np.rint((pixels - low) * (255 / ((high - low) or 1))).astype(np.uint8)
    if hidden is None:
        return Image.fromarray(grey)
    return Image.fromarray(np.stack([grey, np.where(pixels == hidden, 0, 255).astype(np.uint8)], -1))


def to_size(image: Image.Image, size: tuple[int, int], fit: str, background: Colour) -> Image.Image:
    """Brings an RGB image to a width and a height, by PIL's antialiased bilinear filter; `fit` is a key of FITS."""
    width, height = image.size
    if fit == "crop":
        shrunk = min(width / size[0], height / size[1])
        inner = max(1, round(size[0] * shrunk)), max(1, round(size[1] * shrunk))
        left, top = (width - inner[0]) // 2, (height - inner[1]) // 2
        image = image.crop((left, top, left + inner[0], top + inner[1]))
    if fit != "pad" or width * size[1] == height * size[0]:
        return image if image.size == size else image.resize(size, Image.Resampling.BILINEAR)
    scale = min(size[0] / width, size[1] / height)
    inner = max(1, round(width * scale)), max(1, round(height * scale))
    padded = Image.new("RGB", size, background)
    padded.paste(image.resize(inner, Image.Resampling.BILINEAR), ((size[0] - inner[0]) // 2, (size[1] - inner[1]) // 2))
    return padded


def fit_image(thing: Any, shape: tuple[int, ...], fit: str, background: tuple[int, ...]) -> np.ndarray:
    """A path, a PIL image or an array as uint8 of `shape` (height, width, channels), with 1 or 3 channels; see as_image()."""
    (height, width, channels), (red, green, blue) = shape, background

    def convert(image: Image.Image) -> Image.Image:
        return to_size(to_rgb(image, (red, green, blue)), (width, height), fit, (red, green, blue))

    if channels not in (1, 3):
        raise UserError(f"images of {channels} channels cannot be made of a picture, which has 1 or 3")
    is_path = isinstance(thing, str | Path)
    fitted = decode(Path(thing), convert, "give another file") if is_path else convert(as_image(thing))
    return np.asarray(fitted.convert("L"))[..., None] if channels == 1 else np.asarray(fitted)


def as_image(thing: Any) -> Image.Image:
    """A PIL image, or an array as one: [h, w] or [h, w, 1, 3 or 4], of uint8, or of floats in 0..1."""
    if isinstance(thing, Image.Image):
        return thing
    taken = "give a path, a PIL image, or an array [h, w] or [h, w, 1, 3 or 4] of uint8 or of floats in 0..1"
    if not hasattr(thing, "__array__"):
        raise UserError(f"a {type(thing).__name__} is no image; {taken}")
    array = np.asarray(thing)
    what = f"an array of {array.dtype} {array.shape}"
    if array.ndim == 4:
        raise UserError(f"{what} is no single image; give a list of images, each [h, w] or [h, w, channels]")
    if array.ndim not in (2, 3) or not array.size or array.ndim == 3 and array.shape[2] not in (1, 3, 4):
        raise UserError(f"{what} is no image; {taken}")
    if array.dtype.kind == "f" or array.dtype.name == "bfloat16":
        array = array.astype(np.float64)
        if not (np.isfinite(array).all() and array.min() >= 0 and array.max() <= 1):
            raise UserError(f"{what} with values outside 0..1 or not finite is no image; {taken}")
        array = np.rint(255 * array).astype(np.uint8)
    if array.dtype != np.uint8:
        raise UserError(f"{what} is no image; {taken}")
    return Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array)


def read_colour(text: str) -> Colour:
    """Reads "white", "black" or "R,G,B"."""
    parts = {"white": "255,255,255", "black": "0,0,0"}.get(text, text).split(",")
    if len(parts) == 3 and all(part.strip().isdecimal() and int(part) <= 255 for part in parts):
        return int(parts[0]), int(parts[1]), int(parts[2])
    shown = brief(repr(text), 40)
    raise UserError(f"background={shown}: give white, black, or three numbers up to 255 such as 128,128,128")
