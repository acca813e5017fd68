"""TinyImageNet-C: Tiny ImageNet under corruptions, split as ARM does; a domain is a corruption at a severity.

    <raw_dir>/Tiny-ImageNet-C/<corruption>/<severity>/<wnid>/*                    test: the published files
    <raw_dir>/Tiny-ImageNet-C-new/{train,val}/<corruption>/<severity>/<wnid>/*    made by ARM's authors

A label is the rank of its wnid (n and digits) among the sorted ones, so a folder that lacks a class would shift the
labels silently: it is a fault. With `regenerate`, train and val domains are made from the clean training images,
<raw_dir>/tiny-imagenet-200/train/<wnid>/images/*, by our own corruptions.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cxda_jax.data import cifar_c
from cxda_jax.data.raw import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Piece,
    RawData,
    find_folder,
    image_pieces,
    read_image,
    split_checks,
    visible,
)
from cxda_jax.data.store import StoreInfo
from cxda_jax.types import UserError

SIZE = (64, 64)
TRAINED = tuple(c for c in cifar_c.TRAINED if c != "frost")
# Frost has the part that spatter has in CIFAR-C; again in ARM's order, with its swap.
DOMAINS = {
    "train": [(c, s) for c in ("frost", "jpeg_compression") for s in (1, 2, 3)]
    + [(c, s) for c in TRAINED for s in cifar_c.SEVERITIES],
    "val": [("frost", 4), *cifar_c.DOMAINS["val"][1:]],
    "test": [("frost", 5), *cifar_c.DOMAINS["test"][1:]],
}
CLASSES = 200
PER_CLASS = 10  # images of a regenerated domain
QUALITY = 85  # of the published JPEG files
INFO = StoreInfo(
    name="tiny_imagenet_c",
    class_names=(),
    mean=IMAGENET_MEAN,
    std=IMAGENET_STD,
    provenance="Tiny-ImageNet-C and ARM's Tiny-ImageNet-C-new",
)

Files = dict[str, list[Path]]  # wnid -> images


def find(raw_dir: Path, regenerate: bool = False, seed: int = 0) -> RawData:
    clean: Files = {}
    info, found = INFO, {("test", *d): f for d, f in _domains(find_folder(raw_dir, "Tiny-ImageNet-C"), "test")}
    if regenerate:
        made = "corruptions of clean training images by this package"
        info = INFO._replace(provenance=f"Tiny-ImageNet-C; train and val domains: {made}", marks=("regenerated",))
        folder = find_folder(raw_dir, "tiny-imagenet-200") / "train"
        found["", str(folder), 0] = clean = _class_files(folder, "images")
    else:
        new = find_folder(raw_dir, "Tiny-ImageNet-C-new")
        found |= {(split, *d): f for split in ("train", "val") for d, f in _domains(new / split, split)}
    wnids = _common_classes(found)
    pieces = []
    for split in ("train", "val", "test"):
        if regenerate and split != "test":
            pieces += _regenerated(clean, split, seed)
            continue
        for corruption, severity in DOMAINS[split]:
            files = found[split, corruption, severity]
            labelled = [(path, label) for label, wnid in enumerate(wnids) for path in files[wnid]]
            pieces += image_pieces(f"{corruption} {severity}", split, labelled, SIZE, resize=False)
    checks = split_checks(pieces, (51, 17, 22), (102_000, 34_000, 220_000))
    return RawData(info._replace(class_names=tuple(wnids)), pieces, checks)


def _domains(folder: Path, split: str) -> Iterator[tuple[tuple[str, int], Files]]:
    for corruption, severity in DOMAINS[split]:
        yield (corruption, severity), _class_files(folder / corruption / str(severity))


def _class_files(folder: Path, inner: str = "") -> Files:
    """The images of each class, both in the order of their names."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; extract the download again")
    wnids = sorted(p.name for p in folder.iterdir() if re.fullmatch(r"n\d+", p.name) and p.is_dir())
    files = {wnid: [p for p in visible((folder / wnid / inner).glob("*")) if p.is_file()] for wnid in wnids}
    for wnid, paths in files.items():
        if not paths:
            raise UserError(f"{folder / wnid / inner}: no images; extract the download again")
    return files


def _common_classes(found: dict[tuple[str, str, int], Files]) -> list[str]:
    wnids = sorted({wnid for files in found.values() for wnid in files})
    if not wnids:
        raise UserError("Tiny-ImageNet-C: no class folders (n and digits) anywhere; extract the download again")
    for (split, name, severity), files in found.items():
        for wnid in wnids:
            if wnid not in files:
                where = f"{split}/{name}/{severity}" if split else name
                raise UserError(
                    f"{where}: class folder {wnid} is missing ({len(files)} of {len(wnids)}); labels would shift, "
                    "extract it again"
                )
    return wnids


def _regenerated(clean: Files, split: str, seed: int) -> Iterator[Piece]:
    paths = [path for files in clean.values() for path in files]
    labels = np.repeat(np.arange(len(clean)), [len(files) for files in clean.values()])
    rows = cifar_c.hold_out(labels, seed)[split == "val"]

    def read(rows: np.ndarray) -> np.ndarray:
        return np.stack([read_image(paths[row], SIZE, resize=False) for row in rows])

    return cifar_c.regenerated(split, DOMAINS[split], read, labels, rows, PER_CLASS, seed, "tiny", QUALITY)
