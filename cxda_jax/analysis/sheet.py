"""A look at a data set: some images of some of its domains."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from cxda_jax.analysis.names import plain
from cxda_jax.data.store import DomainStore


def draw_sheet(
    store: DomainStore, path: str | Path, domains: Sequence[int], per_domain: int = 24, seed: int = 0
) -> None:
    """A picture with one row of random images for each domain, under its name."""
    figure = Figure(figsize=(0.4 * per_domain, 0.62 * len(domains)), layout="constrained")
    axes = figure.subplots(len(domains), 1, squeeze=False)[:, 0]
    for axis, domain in zip(axes, domains, strict=True):
        rng = np.random.default_rng([seed, domain])
        rows = np.arange(store.offsets[domain], store.offsets[domain + 1])
        chosen = rng.choice(rows, min(per_domain, len(rows)), replace=False)
        gap = ((0, 0), (0, 2), (0, 0))
        strip = np.concatenate([np.pad(store.images[r], gap, constant_values=255) for r in chosen], axis=1)
        blank = (per_domain - len(chosen)) * (strip.shape[1] // len(chosen))
        strip = np.pad(strip, ((0, 0), (0, blank), (0, 0)), constant_values=255)  # one scale for all rows
        axis.imshow(strip.squeeze(-1) if strip.shape[-1] == 1 else strip, cmap="gray", vmin=0, vmax=255)
        axis.set_title(plain(store.domain_names[domain], max(12, 6 * per_domain)), loc="left", fontsize=8, pad=2)
        axis.axis("off")
    figure.savefig(path, dpi=90)


def draw_strips(path: str | Path, strips: Sequence[tuple[str, np.ndarray, Sequence[str]]]) -> None:
    """A picture with one row for each (title, images [n, h, w, c], a name under each)."""
    longest = max(len(images) for _, images, _ in strips)
    figure = Figure(figsize=(max(4.0, 0.45 * longest), 0.75 * len(strips)), layout="constrained")
    axes = figure.subplots(len(strips), 1, squeeze=False)[:, 0]
    for axis, (title, images, names) in zip(axes, strips, strict=True):
        _, height, width, channels = images.shape
        row = np.full((height, longest * (width + 2), channels), 255, np.uint8)
        for i, (image, name) in enumerate(zip(images, names, strict=True)):
            row[:, i * (width + 2) : i * (width + 2) + width] = image
            middle = i * (width + 2) + (width - 1) / 2
            axis.text(middle, height + 1, plain(name, 8, 2), ha="center", va="top", fontsize=6)
        axis.imshow(row.squeeze(-1) if channels == 1 else row, cmap="gray", vmin=0, vmax=255)
        axis.set_title(plain(title, max(60, 7 * longest)), loc="left", fontsize=8, pad=2)
        axis.axis("off")
    figure.savefig(path, dpi=110)
