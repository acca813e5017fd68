"""glyphs_c: coloured digits over textures under CIFAR-C's corruptions, the stand-in for CIFAR-C without a download.

10 classes, 32x32x3. The domains are CIFAR-C's own 56 / 17 / 22 pairs of corruption and severity, made by the same code
from fresh drawings for each domain; type faces, colours and textures are alike everywhere, so the corruption alone
tells domains apart.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy import ndimage

from cxda_jax.data import corruptions, glyphs
from cxda_jax.data.readers import cifar_c
from cxda_jax.data.store import SPLITS, Domain, DomainStore, StoreInfo, cached_store

VERSION = 1  # goes up whenever a pixel changes
SIDE = 32
CLASSES = 10
FACES = [face for faces in glyphs.FACES.values() for face in faces]
INFO = StoreInfo(
    name="glyphs_c",
    class_names=tuple(glyphs.CHARACTERS[:CLASSES]),
    mean=cifar_c.INFO.mean,
    std=cifar_c.INFO.std,
    provenance=f"coloured digits, generator version {VERSION}, corruptions version {corruptions.VERSION}",
)


def open_glyphs_c(data_dir: str | Path, seed: int = 0, images: int = 300) -> DomainStore:
    """Opens the benchmark with so many images in each domain; makes it on first use and keeps it under data_dir."""
    glyphs.check(seed, images=images)
    versions = (VERSION, corruptions.VERSION, glyphs.VERSION)
    tag = hashlib.sha256(repr((versions, seed, images)).encode()).hexdigest()[:10]
    return cached_store(Path(data_dir) / f"glyphs_c-{tag}", lambda: (INFO, domains(seed, images)))


def domains(seed: int = 0, images: int = 300) -> Iterator[Domain]:
    """Yields the domains, one for each corruption and severity. A domain depends on (seed, split, number) alone."""
    for s, split in enumerate(SPLITS):
        for number, (corruption, severity) in enumerate(cifar_c.DOMAINS[split]):
            rng = np.random.default_rng([VERSION, seed, s, number])
            labels = rng.integers(0, CLASSES, images).astype(np.int32)
            pixels = corruptions.corrupt(draw_digits(rng, labels), corruption, severity, rng)
            yield Domain(f"{corruption} {severity}", split, pixels, labels)


def draw_digits(rng: np.random.Generator, labels: np.ndarray) -> np.ndarray:
    """Clean drawings of the given digits: uint8 [n, 32, 32, 3]."""
    n = len(labels)
    ink = np.zeros((n, SIDE, SIDE, 1))
    faces = rng.integers(0, len(FACES), n)
    corners = rng.integers(0, SIDE - glyphs.SIDE + 1, (n, 2))
    for face in np.unique(faces):
        mine = np.flatnonzero(faces == face)
        ranges = glyphs.Style(
            rotation=(-0.4, 0.4), shear=(-0.3, 0.3), width=(0.75, 1.2), height=(0.85, 1.2), weight=(0, 1),
            softness=(1, 1.6),
        )  # fmt: skip
        style = glyphs.Style(*(rng.uniform(low, high, len(mine)) for low, high in ranges))
        coverage = glyphs.render(FACES[face], labels[mine], style, rng.uniform(-1, 1, (len(mine), 2)))
        for i, (row, column), one in zip(mine, corners[mine], coverage, strict=True):
            ink[i, row : row + glyphs.SIDE, column : column + glyphs.SIDE, 0] = one
    # A texture mixes two shades of paper. The ink is lighter or darker than both.
    light = rng.uniform(0.1, 0.9, (n, 1, 1, 1))
    away = np.where(light > 0.5, -1, 1) * rng.uniform(0.35, 0.55, (n, 1, 1, 1))
    paper = light + _tint(rng, n), light - 0.25 * away * rng.uniform(0, 1, (n, 1, 1, 1)) + _tint(rng, n)
    texture = textures(rng, n)
    pixels = paper[0] * texture + paper[1] * (1 - texture)
    pixels = pixels * (1 - ink) + (light + away + _tint(rng, n)) * ink
    return np.rint(255 * pixels.clip(0, 1)).astype(np.uint8)


def _tint(rng: np.random.Generator, n: int) -> np.ndarray:
    """Colours without lightness."""
    colour = rng.uniform(-0.3, 0.3, (n, 1, 1, 3))
    return colour - colour.mean(-1, keepdims=True)


def textures(rng: np.random.Generator, n: int) -> np.ndarray:
    """Stripes through clouds, in 0..1 [n, 32, 32, 1]."""
    ramp = np.arange(SIDE) / SIDE
    angle, waves, phase = rng.uniform(0, np.pi, n), rng.uniform(1, 6, n), rng.uniform(0, 2 * np.pi, n)
    along = np.cos(angle)[:, None, None] * ramp[:, None] + np.sin(angle)[:, None, None] * ramp
    stripes = np.sin(2 * np.pi * waves[:, None, None] * along + phase[:, None, None])
    clouds = ndimage.gaussian_filter(rng.normal(size=(n, SIDE, SIDE)), (0, 2, 2), mode="wrap")
    clouds /= clouds.std((1, 2), keepdims=True)
    share = rng.uniform(0, 1, (n, 1, 1))
    return (1 / (1 + np.exp(-2 * (share * stripes + (1 - share) * clouds))))[..., None]
