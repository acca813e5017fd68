"""A look at a data set: some images of some of its domains."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

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
        axis.set_title(store.domain_names[domain], loc="left", fontsize=8, pad=2)
        axis.axis("off")
    figure.savefig(path, dpi=90)
