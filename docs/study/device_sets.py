"""Writes public sets of real devices as folders DEVICE/CLASS/IMAGE for `cxda features`.

python -m docs.study.device_sets letters FOLDER OUT           # 60 writers of Arabic letters
python -m docs.study.device_sets cells FOLDER OUT             # blood cells of 58 patients
python -m docs.study.device_sets prepared STORE OUT [MOST]    # what cxda prepare wrote, at most so many images of each

A device of STORE gets its split before its name, as in test-fog_3. For the others, FOLDER holds the four CSV files of
github.com/mloey/Arabic-Handwritten-Characters-Dataset, or the folder cell_images of
github.com/vishxlshxrma/Malaria_Classification, whose 50x50 images are those of NIH.
"""

import re
import shutil
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from cxda_jax.data.store import open_store

LETTERS, WRITERS = 28, 60
TIMES = {"Train": 8, "Test": 2}  # how often a writer's letter is in each file
LEAST = 120  # images of a patient
PATIENT = re.compile(r"C\d+[AB]?(P\d+)|(C\d+)")


def letters(folder: Path, out: Path) -> None:
    """Rows go writer after writer. Both files have one order of writers: their mean brightness correlates by 0.99."""
    for part, times in TIMES.items():
        pixels, labels = (
            np.loadtxt(next(folder.glob(f"csv{part}{what} *.csv")), delimiter=",", dtype=int)
            for what in ("Images", "Label")
        )
        images = pixels.reshape(-1, 32, 32).transpose(0, 2, 1).astype(np.uint8)
        count = np.zeros(LETTERS + 1, int)
        for image, label in zip(images, labels, strict=True):
            writer, count[label] = count[label] // times, count[label] + 1
            place = out / f"writer{writer:02}" / f"{label:02}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"{part}{count[label]:03}.png")
        assert (count[1:] == WRITERS * times).all()


def cells(folder: Path, out: Path) -> None:
    """A file's name has the patient near its beginning, as in C39P4thinF_IMG_20150622_105253_cell_95.png."""
    of = {}
    for path in sorted(folder.glob("**/*.png")):
        if found := PATIENT.search(path.name):
            of.setdefault(found[1] or found[2], []).append(path)
    for patient, paths in of.items():
        for path in paths if len(paths) >= LEAST else ():
            place = out / patient / path.parent.name
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place / path.name)


def prepared(folder: Path, out: Path, most: str = "") -> None:
    store, rng = open_store(folder), np.random.default_rng(0)
    for device, (split, name) in enumerate(zip(store.split, store.domain_names, strict=True)):
        rows = rng.permutation(np.arange(*store.offsets[device : device + 2]))[: int(most) if most else None]
        for row in np.sort(rows):
            place = out / f"{split}-{name}" / store.info.class_names[store.labels[row]]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(store.images[row].squeeze()).save(place / f"{row}.png")


if __name__ == "__main__":
    {"letters": letters, "cells": cells, "prepared": prepared}[sys.argv[1]](*map(Path, sys.argv[2:4]), *sys.argv[4:])
