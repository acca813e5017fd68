"""Reads images of any kind as RGB with 8 bits a channel and of one size, as a viewer shows them: for your own images.

integers of 16 bits   0..65535, the range of the type, becomes 0..255, so that the images of a folder stay comparable
floats                0..1 becomes 0..255
both, outside of it   the image's own least value becomes 0 and its largest 255; NaN and infinite values are refused
transparency          the image is laid over a background of one colour
EXIF                  the image is turned and mirrored as the camera says
"""

import contextlib

import numpy as np
from PIL import Image, ImageOps

from cxda_jax.errors import UserError, brief

FITS = {"squash": "squashed to a square", "crop": "cropped to the square in the middle", "pad": "padded to a square"}
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


def to_square(image: Image.Image, side: int, fit: str, background: Colour) -> Image.Image:
    """Brings an image to a square, by PIL's antialiased bilinear filter."""
    width, height = image.size
    if fit == "crop":
        least = min(width, height)
        left, top = (width - least) // 2, (height - least) // 2
        image = image.crop((left, top, left + least, top + least))
    if fit != "pad" or width == height:
        return image if image.size == (side, side) else image.resize((side, side), Image.Resampling.BILINEAR)
    scale = side / max(width, height)
    inner = max(1, round(width * scale)), max(1, round(height * scale))
    square = Image.new("RGB", (side, side), background)
    square.paste(image.resize(inner, Image.Resampling.BILINEAR), ((side - inner[0]) // 2, (side - inner[1]) // 2))
    return square


def read_colour(text: str) -> Colour:
    """Reads "white", "black" or "R,G,B"."""
    parts = {"white": "255,255,255", "black": "0,0,0"}.get(text, text).split(",")
    if len(parts) == 3 and all(part.strip().isdecimal() and int(part) <= 255 for part in parts):
        return int(parts[0]), int(parts[1]), int(parts[2])
    shown = brief(repr(text), 40)
    raise UserError(f"background={shown}: give white, black, or three numbers up to 255 such as 128,128,128")
