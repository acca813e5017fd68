"""Reads images of any kind with 8 bits a channel and of one size, as a viewer shows them: for your own images.

integers of 16 bits   0..65535, the range of the type, becomes 0..255, so that the images of a folder stay comparable
floats                0..1 becomes 0..255
both, outside of it   the image's own least value becomes 0 and its largest 255; NaN and infinite values are refused
transparency          the image is laid over a background of one colour
EXIF                  the image is turned and mirrored as the camera says
"""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from cxda_jax.config.fields import choose
from cxda_jax.data.store import FITS
from cxda_jax.disk.reading import insist_on_file, reason, refuse_html
from cxda_jax.errors import UserError, brief

Colour = tuple[int, int, int]
Convert = Callable[[Image.Image], Image.Image]
# The formats of phones, by the suffixes of files, and the package to install.
_PHONES = {".avif": "'pillow>=11.3'", ".heic": "pillow-heif", ".heif": "pillow-heif"}
MOST_PIXELS = 89_000_000
_TAKEN = "give a path, a PIL image, or an array [h, w] or [h, w, 1, 3 or 4] of uint8 or of floats in 0..1"


def as_image(thing: Any) -> Image.Image:
    """One image as PIL's: of a path, a PIL image, or an array [h, w], or [h, w, c] for c of 1, 3 or 4,
    of uint8 or floats."""
    if isinstance(thing, str | Path):
        return decode(Path(thing))
    if isinstance(thing, Image.Image):
        if thing.mode == "I" and not getattr(thing, "filename", ""):
            what = "PIL's mode I says no range of values"
            raise UserError(f"image: {what}; convert it to L for 0..255, or to I;16 for 0..65535")
        return thing
    try:
        array = np.asarray(thing)
    except Exception as e:  # arrays of other libraries raise exceptions of all kinds
        raise UserError(f"image: got a {type(thing).__name__} that is no array ({reason(e, 40)}); {_TAKEN}") from None
    got = f"{brief(str(array.dtype), 30)} {array.shape}"
    if array.ndim == 4:
        raise UserError(f"one image at a time: got {array.shape}; {_TAKEN}")
    has_form = array.size and (array.ndim == 2 or array.ndim == 3 and array.shape[2] in (1, 3, 4))
    if has_form and (array.dtype.kind == "f" or array.dtype.name == "bfloat16"):
        array = array.astype(np.float64)
        if not (array.min() >= 0 and array.max() <= 1):  # so NaN is refused too
            raise UserError(f"image: got {got} with values in {array.min():g}..{array.max():g}; {_TAKEN}")
        array = np.rint(255 * array).astype(np.uint8)
    if not has_form or array.dtype != np.uint8:
        raise UserError(f"image: got {got}; {_TAKEN}")
    return Image.fromarray(array[..., 0] if array.shape[2:] == (1,) else array)


def as_pixels(image: Image.Image, shape: tuple[int, int, int], fit: str, background: Colour) -> np.ndarray:
    """An image as uint8 of a shape [h, w, c], with c of 1 or 3. One that has this shape and 8 bits keeps its pixels.

    `fit` says how another one gets the shape: a key of FITS.
    """
    height, width, channels = shape
    choose("fit", fit, FITS)
    if channels not in (1, 3):
        raise UserError("images become grey or RGB", "shape", shape, "give a shape of 1 or 3 channels")
    try:
        colours = to_rgb(image, background)
    except Exception as e:  # PIL decodes an image when its pixels are first needed
        what = f"{getattr(image, 'filename', '') or 'image'}: not readable as an image"
        raise UserError(f"{what} ({reason(e)}); give another one") from None
    fitted = to_size(colours, (width, height), fit, background)
    return np.array(fitted.convert("L"))[..., None] if channels == 1 else np.array(fitted)


def decode(path: Path, convert: Convert = lambda image: image) -> Image.Image:
    """The image in a file, or what convert() makes of it. What PIL cannot read is a UserError of one line."""
    insist_on_file(path, "give the name of a file that is there")
    try:
        with Image.open(path, formats=_formats()) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                size = f"{opened.width} x {opened.height} pixels"
                raise UserError(f"{path}: {size}, at most {MOST_PIXELS:,} are read; make it smaller")
            _load(opened)
            return convert(opened)
    except UserError:
        raise
    except Exception as e:  # PIL's many decoders raise exceptions of all kinds
        refuse_html(path)
        known = {UnidentifiedImageError: "of no known format", Image.DecompressionBombError: "too many pixels"}
        what, package = known.get(type(e)) or reason(e), _PHONES.get(path.suffix.lower())
        fix = f"pip install {package}, or save it as JPEG" if package else "fetch or extract it again"
        raise UserError(f"{path}: not readable as an image ({what}); {fix}") from None


@functools.cache
def _formats() -> list[str]:
    """The formats that are read, where PIL can here. Of others, PIL hands PostScript to a program that runs it."""
    Image.init()
    with contextlib.suppress(ImportError):  # the package is optional
        import pillow_heif  # pyright: ignore[reportMissingImports]

        pillow_heif.register_heif_opener()
    return [name for name in ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM", "AVIF", "HEIF") if name in Image.OPEN]


def to_rgb(image: Image.Image, background: Colour) -> Image.Image:
    _load(image)
    with contextlib.suppress(Exception):  # a broken EXIF block raises exceptions of all kinds, and then turns nothing
        image = ImageOps.exif_transpose(image)
    if image.mode == "F" or image.mode.startswith("I"):
        image = _to_8_bits(image)
    if image.mode in ("LA", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        flat = Image.new("RGB", image.size, background)
        flat.paste(image, mask=image)
        return flat
    return image.convert("RGB")


def _load(image: Image.Image) -> None:
    """Reads all that an opened file says, so that it may be closed. Raises for faults in the pixels."""
    image.load()
    with contextlib.suppress(Exception):  # as in to_rgb(); PIL keeps what it finds, and reads that of a TIFF here
        image.getexif()


def _to_8_bits(image: Image.Image) -> Image.Image:
    """A grey image, with an alpha channel if a grey value stands for transparency."""
    values, hidden = np.asarray(image), image.info.get("transparency")
    if not np.isfinite(values).all():
        raise ValueError("NaN or infinite pixels")
    low, high = 0.0, 1.0 if image.mode == "F" else 65535.0
    if values.min() < low or values.max() > high:
        low, high = float(values.min()), float(values.max())

    grey = values.astype(np.float64)
    grey -= low
    grey *= 255 / ((high - low) or 1)
    grey = np.rint(grey, out=grey).astype(np.uint8)
    if hidden is not None:
        grey = np.stack([grey, np.where(values == hidden, 0, 255).astype(np.uint8)], -1)
    return Image.fromarray(grey)


def to_size(image: Image.Image, size: tuple[int, int], fit: str, background: Colour) -> Image.Image:
    """Brings an RGB image to a width and a height, by PIL's antialiased bilinear filter."""
    (width, height), (to_width, to_height) = image.size, size
    if fit == "crop":
        scale = min(width / to_width, height / to_height)
        inner = max(1, round(to_width * scale)), max(1, round(to_height * scale))
        left, top = (width - inner[0]) // 2, (height - inner[1]) // 2
        image = image.crop((left, top, left + inner[0], top + inner[1]))
    if fit != "pad" or width * to_height == height * to_width:
        return image if image.size == size else image.resize(size, Image.Resampling.BILINEAR)
    scale = min(to_width / width, to_height / height)
    inner = max(1, round(width * scale)), max(1, round(height * scale))
    padded = Image.new("RGB", size, background)
    padded.paste(
        image.resize(inner, Image.Resampling.BILINEAR), ((to_width - inner[0]) // 2, (to_height - inner[1]) // 2)
    )
    return padded


def read_colour(text: str) -> Colour:
    """Reads "white", "black" or "R,G,B"."""
    parts = {"white": "255,255,255", "black": "0,0,0"}.get(text, text).split(",")
    if len(parts) == 3 and all(part.strip().isdecimal() and int(part) <= 255 for part in parts):
        return int(parts[0]), int(parts[1]), int(parts[2])
    fix = "give white, black, or three numbers up to 255 such as 128,128,128"
    raise UserError("not a colour", "background", text, fix)
