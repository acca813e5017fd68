"""glyphs: rendered characters of many writers, the stand-in for FEMNIST that needs no download.

62 classes in FEMNIST's order (digits, upper case, lower case), 28x28x1, dark ink on light paper. A domain is a writer:
one of the type faces that matplotlib ships, and a style of rotation, shear, scale, stroke weight, blur, contrast and
noise, around which each drawing jitters a little. Validation and test writers use faces that no training writer uses.

A character is kept as a signed distance to its outline. One bilinear sampling of it through a drawing's affine map
gives weight and blur for free: ink = clip(1/2 + (distance + weight) / softness).
"""

import functools
import hashlib
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from scipy import ndimage

from cxda_jax.data.store import Domain, DomainStore, StoreInfo, cached_store
from cxda_jax.errors import UserError

VERSION = 1  # goes up whenever a pixel changes
SIDE = 28
MOST = 100_000  # writers, and drawings; more would take forever, or not fit in memory
CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
FACES = {
    "train": (
        "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-BoldOblique", "DejaVuSansMono", "DejaVuSansMono-Bold",
        "DejaVuSansMono-BoldOblique", "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-BoldItalic", "STIXGeneral",
        "STIXGeneralBolIta", "cmb10", "cmr10",
    ),
    "val": ("DejaVuSans-Oblique", "STIXGeneralBol", "cmti10"),
    "test": ("DejaVuSansMono-Oblique", "DejaVuSerif-Italic", "STIXGeneralItalic", "cmss10", "cmtt10"),
}  # fmt: skip
INFO = StoreInfo(
    name="glyphs",
    class_names=tuple(CHARACTERS),
    mean=(1.0,),  # the network sees 1 - x: bright ink on black, as in FEMNIST
    std=(-1.0,),
    provenance=f"rendered from matplotlib's type faces, generator version {VERSION}",
    licence="none needed",
    fit="pad",
)

# In pixels: the side of a character's field, the side of its em square, and the largest distance in the field.
_CANVAS, _EM, _REACH = 112, 60, 14
_EM_OUT = 22.0  # an em square in an image, before the writer's scale
_MARGIN = 1.5  # pixels that stay free of ink at the border


class Style(NamedTuple):
    """The style of a writer, or of one drawing: lengths in image pixels, angles in radians, levels in 0..1."""

    rotation: Any
    shear: Any
    width: Any
    height: Any
    weight: Any
    softness: Any


def open_glyphs(
    data_dir: str | Path, seed: int = 0, writers: tuple[int, int, int] = (240, 40, 60), drawings: int = 200
) -> DomainStore:
    """Opens the benchmark; makes it on first use and keeps it under data_dir.

    Args:
        writers: Of train, val and test.
        drawings: Of each writer.
    """
    if len(writers) != 3 or min(writers) < 1:
        raise UserError("expected three counts of at least 1, for train, val and test", "writers", tuple(writers))
    check(seed, writers=max(writers), drawings=drawings)
    tag = hashlib.sha256(repr((VERSION, seed, tuple(writers), drawings)).encode()).hexdigest()[:10]
    store = cached_store(Path(data_dir) / f"glyphs-{tag}", lambda: (INFO, domains(seed, tuple(writers), drawings)))
    return store._replace(info=INFO)  # a folder that an older version made says less


def domains(seed: int = 0, writers: tuple[int, ...] = (240, 40, 60), drawings: int = 200) -> Iterator[Domain]:
    """Yields writers. A writer depends on (seed, split, number) alone, not on how many there are."""
    for s, (split, count) in enumerate(zip(FACES, writers, strict=True)):
        for number in range(count):
            rng = np.random.default_rng([VERSION, seed, s, number])
            face = FACES[split][number % len(FACES[split])]
            labels = rng.integers(0, len(CHARACTERS), drawings).astype(np.int32)
            yield Domain(f"{split}-{number:03d} {face}", split, draw_characters(rng, face, labels), labels)


def check(seed: int, **counts: int) -> None:
    """Raises a UserError unless the seed is one and the counts lie in 1..MOST."""
    if seed < 0:
        raise UserError("must not be negative", "seed", seed)
    for field, count in counts.items():
        if not 1 <= count <= MOST:
            raise UserError(f"must be at least 1 and at most {MOST}", field, count)


def draw_characters(rng: np.random.Generator, face: str, labels: np.ndarray) -> np.ndarray:
    """One writer's drawings of the given characters: uint8 [n, 28, 28, 1]."""
    style = Style(
        rotation=np.deg2rad(rng.uniform(-45, 45)), shear=rng.uniform(-0.35, 0.35), width=rng.uniform(0.75, 1.2),
        height=rng.uniform(0.85, 1.2), weight=rng.uniform(-0.4, 0.9), softness=rng.uniform(1.0, 3.2),
    )  # fmt: skip
    paper, ink, tilt = rng.uniform(0.78, 1.0), rng.uniform(0.0, 0.45), rng.uniform(-0.08, 0.08, 2)
    grain = rng.uniform(0.0, 0.09)
    coverage = render(face, labels, jitter(rng, style, len(labels)), rng.uniform(-1.5, 1.5, (len(labels), 2)))
    ramp = np.linspace(-1, 1, SIDE)
    light = paper + tilt[0] * ramp[:, None] + tilt[1] * ramp[None, :]
    # Ink soaks in unevenly from drawing to drawing.
    depth = (paper - ink) * rng.uniform(0.8, 1.0, (len(labels), 1, 1))
    pixels = light - coverage * depth + rng.normal(0, grain, coverage.shape)
    return np.rint(255 * pixels.clip(0, 1)).astype(np.uint8)[..., None]


def jitter(rng: np.random.Generator, style: Style, n: int) -> Style:
    """A style for each of n drawings [n]."""
    return Style(
        rotation=style.rotation + rng.normal(0, np.deg2rad(4), n),
        shear=style.shear + rng.normal(0, 0.05, n),
        width=style.width * np.exp(rng.normal(0, 0.06, n)),
        height=style.height * np.exp(rng.normal(0, 0.06, n)),
        weight=style.weight + rng.normal(0, 0.12, n),
        softness=style.softness * np.exp(rng.normal(0, 0.08, n)),
    )


def render(face: str, labels: np.ndarray, style: Style, shift: np.ndarray) -> np.ndarray:
    """Ink coverage in 0..1 [n, 28, 28] of characters, each in its own style and shifted by pixels [n, 2]."""
    fields, extents = distance_fields(face)
    shrink, half = keep_inside(style, extents[labels])
    shift = np.clip(shift, -(SIDE / 2 - _MARGIN - half), SIDE / 2 - _MARGIN - half)
    offsets = np.indices((SIDE, SIDE))[:, None] - (SIDE - 1) / 2 - shift.T[:, :, None, None]
    inverse = np.linalg.inv(matrices(style) * shrink[:, None, None]) * (_EM / _EM_OUT)
    source = np.einsum("nij,jnhw->inhw", inverse, offsets) + (_CANVAS - 1) / 2
    distance = bilinear(fields, labels, *source)
    # Canvas pixels to image pixels, by the map's mean magnification.
    distance *= (np.sqrt(np.abs(np.linalg.det(matrices(style)))) * shrink * _EM_OUT / _EM)[:, None, None]
    return np.clip(0.5 + (distance + style.weight[:, None, None]) / style.softness[:, None, None], 0, 1)


def matrices(style: Style) -> np.ndarray:
    """Maps of (y, x) offsets from a character's centre to offsets in the image [n, 2, 2], in units of their ems."""
    cos, sin, zero = np.cos(style.rotation), np.sin(style.rotation), np.zeros_like(style.rotation)
    turn = np.array([[cos, -sin], [sin, cos]])
    slant = np.array([[style.height, zero], [style.shear * style.height, style.width]])
    return np.einsum("ijn,jkn->nik", turn, slant)


def keep_inside(style: Style, extents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Factors [n] that shrink what would leave the image, and the half sizes (y, x) [n, 2] that result."""
    corners = extents[:, None] * np.array([[1, 1], [1, -1]])  # half sizes on the canvas; the rest by symmetry
    reach = np.abs(np.einsum("nij,ncj->nci", matrices(style), corners)).max(1) * (_EM_OUT / _EM)
    rim = np.maximum(0, style.weight + style.softness / 2)[:, None]
    free = SIDE / 2 - _MARGIN
    shrink = np.minimum(1, ((free - rim) / reach).min(1))
    return shrink, reach * shrink[:, None] + rim


def bilinear(fields: np.ndarray, index: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """fields[index] sampled at (y, x) [n, h, w]; outside, the border's value."""
    y, x = y.clip(0, _CANVAS - 1.001), x.clip(0, _CANVAS - 1.001)
    y0, x0 = y.astype(np.int32), x.astype(np.int32)
    fy, fx = (y - y0).astype(np.float32), (x - x0).astype(np.float32)
    flat = fields.reshape(-1)
    at = (index[:, None, None] * _CANVAS + y0) * _CANVAS + x0
    top = flat[at] * (1 - fx) + flat[at + 1] * fx
    bottom = flat[at + _CANVAS] * (1 - fx) + flat[at + _CANVAS + 1] * fx
    return top * (1 - fy) + bottom * fy


@functools.cache
def distance_fields(face: str) -> tuple[np.ndarray, np.ndarray]:
    """Signed distances to each character's outline [62, canvas, canvas], positive inside,
    and half sizes (y, x) [62, 2].

    Both are in canvas pixels; every character is centred on its own box.
    """
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"
    font = ImageFont.truetype(str(path), _EM)
    masks, extents = [], []
    for character in CHARACTERS:
        canvas = Image.new("L", (2 * _CANVAS, 2 * _CANVAS))
        ImageDraw.Draw(canvas).text((_CANVAS, _CANVAS), character, font=font, fill=255, anchor="mm")
        mask = np.asarray(canvas) > 127
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
        row, column = (top + bottom - _CANVAS) // 2, (left + right - _CANVAS) // 2
        masks.append(mask[row : row + _CANVAS, column : column + _CANVAS])
        extents.append(((bottom - top) / 2, (right - left) / 2))
    sides = masks, [~mask for mask in masks]
    depth, height = (np.array(list(map(ndimage.distance_transform_edt, side)), np.float32) for side in sides)
    fields = (depth - height).clip(-_REACH, _REACH)
    return fields - np.copysign(np.float32(0.5), fields), np.array(extents)  # the outline runs between two pixels
