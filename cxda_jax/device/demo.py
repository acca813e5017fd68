"""A demonstration without training or data: writers whom the model never saw, and what adapting to them changes."""

import csv
import sys
import webbrowser
from pathlib import Path

import numpy as np
from PIL import Image

from cxda_jax.data import glyphs
from cxda_jax.device.adapting import adapt_folder

WRITERS = 5
OF_EACH, ASKED = 20, 60  # images of each writer: in the buffer, and to answer for
FIRST_SEED = 1000  # training has 0


def demo(out: Path, seed: int = 0, show: bool = False) -> None:
    """Renders new writers into buffer/ and images/ in `out`, and adapts the model of the package to them.

    Their type faces are those of the test writers, which training never saw. With `show` a browser opens the page.
    """
    rng = np.random.default_rng(seed)
    labels = []
    for folder in ("buffer", "images"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    drawn = glyphs.domains(FIRST_SEED + seed, (0, 0, WRITERS), OF_EACH + ASKED)
    for writer, domain in enumerate(drawn):
        for i, pixels in enumerate(domain.images[..., 0]):
            folder = "buffer" if i < OF_EACH else "images"
            name = f"{rng.integers(10**6):06d}-writer{writer}-{i:03d}.png"  # in no order of writers
            Image.fromarray(pixels).save(out / folder / name)
            if folder == "images":
                labels.append((name, glyphs.CHARACTERS[domain.labels[i]]))
    with open(out / "labels.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("file", "label"), *labels])
    print(
        f"{WRITERS} new writers: {out}/buffer has {OF_EACH} unlabelled images of each, {out}/images {ASKED}", flush=True
    )
    adapt_folder("glyphs", "", str(out / "buffer"), str(out / "images"), out, labels=str(out / "labels.csv"))
    if show and sys.stdout.isatty():
        webbrowser.open((out / "adapted.html").resolve().as_uri())
