"""Pictures of images in rows, such as some images of each domain of a data set."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cxda_jax.data.store import DomainStore
from cxda_jax.pictures.names import plain


def draw_sheet(
    store: DomainStore, path: str | Path, domains: Sequence[int], per_domain: int = 24, seed: int = 0
) -> None:
    """Writes a picture with one row of random images for each domain, under its name.

    Args:
      store: the data set.
      path: of the picture.
      domains: places of domains in the data set.
      per_domain: images of each, at most.
      seed: chooses the images.
    """
    figure = Figure(figsize=(0.4 * per_domain, 0.62 * len(domains)), layout="constrained")
    for axes, domain in zip(figure.subplots(len(domains), 1, squeeze=False)[:, 0], domains, strict=True):
        rng = np.random.default_rng([seed, domain])
        rows = np.arange(store.offsets[domain], store.offsets[domain + 1])
        chosen = rng.choice(rows, min(per_domain, len(rows)), replace=False)
        gap = ((0, 0), (0, 2), (0, 0))
        strip = np.concatenate([np.pad(store.images[r], gap, constant_values=255) for r in chosen], axis=1)
        blank = (per_domain - len(chosen)) * (strip.shape[1] // len(chosen))
        strip = np.pad(strip, ((0, 0), (0, blank), (0, 0)), constant_values=255)  # rows of one width have one scale
        _show_row(axes, strip, plain(store.domain_names[domain], max(12, 6 * per_domain)))
    figure.savefig(path, dpi=90)


def draw_strips(path: str | Path, strips: Sequence[tuple[str, np.ndarray, Sequence[str]]]) -> None:
    """Writes a picture with one row for each (title, images [n, h, w, c], a name for each image)."""
    longest = max(len(images) for _, images, _ in strips)
    figure = Figure(figsize=(max(4.0, 0.45 * longest), 0.75 * len(strips)), layout="constrained")
    rows = figure.subplots(len(strips), 1, squeeze=False)[:, 0]
    for axes, (title, images, names) in zip(rows, strips, strict=True):
        _, height, width, channels = images.shape
        row = np.full((height, longest * (width + 2), channels), 255, np.uint8)
        for i, (image, name) in enumerate(zip(images, names, strict=True)):
            row[:, i * (width + 2) : i * (width + 2) + width] = image
            middle = i * (width + 2) + (width - 1) / 2
            axes.text(middle, height + 1, plain(name, 8, 2), ha="center", va="top", fontsize=6)
        _show_row(axes, row, plain(title, max(60, 7 * longest)))
    figure.savefig(path, dpi=110)


def show(axes: Axes, image: np.ndarray) -> None:
    """Draws an image [h, w, c] of 0..255 with 1 or 3 channels."""
    axes.imshow(image.squeeze(-1) if image.shape[-1] == 1 else image, cmap="gray", vmin=0, vmax=255)


def _show_row(axes: Axes, row: np.ndarray, title: str) -> None:
    show(axes, row)
    axes.set_title(title, loc="left", fontsize=8, pad=2)
    axes.axis("off")
