"""Pictures of images in rows, such as some images of each domain of a data set."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cxda_jax.data.store import DomainStore
from cxda_jax.pages.figures import plain


def draw_sheet(store: DomainStore, path: str | Path, domains: Sequence[int], per_domain: int = 24) -> None:
    """Writes a picture with one row of random images for each of these domains of the store, under its name."""
    figure = Figure(figsize=(0.4 * per_domain, 0.62 * len(domains)), layout="constrained")
    for axes, domain in zip(figure.subplots(len(domains), 1, squeeze=False)[:, 0], domains, strict=True):
        rows = np.arange(store.offsets[domain], store.offsets[domain + 1])
        chosen = np.random.default_rng([0, domain]).choice(rows, min(per_domain, len(rows)), replace=False)
        _show_row(axes, store.images[chosen], per_domain, plain(store.domain_names[domain], max(12, 6 * per_domain)))
    figure.savefig(path, dpi=90)


def draw_strips(path: str | Path, strips: Sequence[tuple[str, np.ndarray, Sequence[str]]]) -> None:
    """Writes a picture with one row for each (title, images [n, h, w, c], a name for each image)."""
    longest = max(len(images) for _, images, _ in strips)
    figure = Figure(figsize=(max(4.0, 0.45 * longest), 0.75 * len(strips)), layout="constrained")
    rows = figure.subplots(len(strips), 1, squeeze=False)[:, 0]
    for axes, (title, images, names) in zip(rows, strips, strict=True):
        _, height, width, _ = images.shape
        for i, name in enumerate(names):
            middle = i * (width + 2) + (width - 1) / 2
            axes.text(middle, height + 1, plain(name, 8, 2), ha="center", va="top", fontsize=6)
        _show_row(axes, images, longest, plain(title, max(60, 7 * longest)))
    figure.savefig(path, dpi=110)


def show(axes: Axes, image: np.ndarray) -> None:
    """Draws an image [h, w, c] of 0..255 with 1 or 3 channels."""
    axes.imshow(image.squeeze(-1) if image.shape[-1] == 1 else image, cmap="gray", vmin=0, vmax=255)


def _show_row(axes: Axes, images: np.ndarray, most: int, title: str) -> None:
    """Draws images [n, h, w, c] side by side, with room for `most`, so that all rows have one scale."""
    spaced = np.pad(images, ((0, most - len(images)), (0, 0), (0, 2), (0, 0)), constant_values=255)
    show(axes, np.concatenate(list(spaced), axis=1))
    axes.set_title(title, loc="left", fontsize=8, pad=2)
    axes.axis("off")
