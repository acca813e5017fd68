"""A demonstration without training or data: writers whom the model never saw, and what adapting to them changes."""

import csv
import io
import re
import sys
import webbrowser
from pathlib import Path

import numpy as np
from PIL import Image

from cxda_jax.data import glyphs
from cxda_jax.device.adapting import Adaptation, adapt_folder
from cxda_jax.disk import files
from cxda_jax.errors import UserError
from cxda_jax.machine.progress import replacing, say

WRITERS = 5
IN_BUFFER, TO_ANSWER = 20, 60  # images of each writer
FIRST_SEED = 1000  # training has 0
FOLDERS = "buffer", "images"
OURS = re.compile(r"\d{6}-writer\d+-\d{3}\.png")  # names of images in them


def demo(out: Path, seed: int = 0, show: bool = False) -> None:
    """Renders new writers into buffer/ and images/ in `out`, and adapts the model of the package to them.

    Their type faces are those of the test writers, which training never saw. Images of an earlier demonstration in
    `out` go first. With `show` a browser opens the page.
    """
    out.mkdir(parents=True, exist_ok=True)
    with files.locked(out):
        replacing("file,label", out / "labels.csv")
        if earlier := sum(empty(out / folder) for folder in FOLDERS):
            say(f"{out}: {earlier} images of an earlier demonstration are deleted")
        draw(out, seed)
        say(f"{WRITERS} new writers: {out}/buffer has {IN_BUFFER} unlabelled images of each, {out}/images {TO_ANSWER}")
    buffer, images, labels = (str(out / name) for name in (*FOLDERS, "labels.csv"))
    adapt_folder(Adaptation("glyphs_icrm", buffer, images, out, labels))
    if show and sys.stdout.isatty():
        webbrowser.open((out / "adapted.html").resolve().as_uri())


def empty(folder: Path) -> int:
    """Makes a folder, or deletes the images that an earlier demonstration left in it.

    A UserError where it holds anything else.
    """
    folder.mkdir(exist_ok=True)
    entries = list(folder.iterdir())
    for path in entries:
        if path.is_symlink() or not path.is_file() or not OURS.fullmatch(path.name):
            raise UserError(f"{path}: not of a demonstration, so nothing is deleted there; choose another --out")
    for path in entries:
        path.unlink()
    return len(entries)


def draw(out: Path, seed: int) -> None:
    """Writes the images of new writers into the empty folders, and labels.csv."""
    rng, labels = np.random.default_rng(seed), io.StringIO()
    table = csv.writer(labels)
    table.writerow(("file", "label"))
    for writer, domain in enumerate(glyphs.domains(FIRST_SEED + seed, (0, 0, WRITERS), IN_BUFFER + TO_ANSWER)):
        for i, pixels in enumerate(domain.images[..., 0]):
            name = f"{rng.integers(10**6):06d}-writer{writer}-{i:03d}.png"  # in no order of writers
            Image.fromarray(pixels).save(out / FOLDERS[i >= IN_BUFFER] / name)
            if i >= IN_BUFFER:
                table.writerow((name, glyphs.CHARACTERS[domain.labels[i]]))
    files.write_text(out / "labels.csv", labels.getvalue())
