"""TinyImageNet-C: Tiny ImageNet under corruptions, split as ARM does; a domain is a corruption at a severity.

    <raw_dir>/Tiny-ImageNet-C/<corruption>/<severity>/<wnid>/*                    test: the published files
    <raw_dir>/Tiny-ImageNet-C-new/{train,val}/<corruption>/<severity>/<wnid>/*    made by ARM's authors

A label is the rank of its wnid (n and digits) among all wnids. A folder that lacks a class would shift the labels, so it is
refused. With `regenerate`, train and val domains are made from the clean training images,
<raw_dir>/tiny-imagenet-200/train/<wnid>/images/*, by our own corruptions.
"""

import collections
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cxda_jax.data.published import PUBLISHED
from cxda_jax.data.readers import cifar_c
from cxda_jax.data.readers.raw import (
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
from cxda_jax.data.store import SPLITS, StoreInfo
from cxda_jax.errors import UserError

SIZE = (64, 64)
TRAINED = tuple(c for c in cifar_c.TRAINED if c != "frost")
# As in CIFAR-C and in ARM's order, with frost in the place of spatter.
DOMAINS = {
    "train": [(c, s) for c in ("frost", "jpeg_compression") for s in (1, 2, 3)]
    + [(c, s) for c in TRAINED for s in cifar_c.SEVERITIES],
    "val": [("frost", 4), *cifar_c.DOMAINS["val"][1:]],
    "test": [("frost", 5), *cifar_c.DOMAINS["test"][1:]],
}
CLASSES = 200
PER_CLASS = 10  # images of a regenerated domain
PACKED = ("tinyimagenet-c",)  # ARM's archive of Tiny-ImageNet-C-new
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
    info, clean, roots = INFO, None, {"test": find_folder(raw_dir, "Tiny-ImageNet-C")}
    if regenerate:
        info = cifar_c.as_regenerated(INFO, "Tiny-ImageNet-C")
        clean = find_folder(raw_dir, "tiny-imagenet-200") / "train"
    else:
        new = find_folder(raw_dir, "Tiny-ImageNet-C-new", packed=PACKED)
        roots |= {"train": new / "train", "val": new / "val"}
    files = {f: _class_files(f) for split, root in roots.items() for f in _folders(root, split).values()}
    if clean:
        files[clean] = _class_files(clean, "images")
    wnids = _common_classes(files, roots["test"])
    pieces = []
    for split in SPLITS:
        if clean and split != "test":
            pieces += _regenerated(files[clean], split, seed)
            continue
        for domain, folder in _folders(roots[split], split).items():
            labelled = [(path, label) for label, wnid in enumerate(wnids) for path in files[folder][wnid]]
            pieces += image_pieces(domain, split, labelled, SIZE, functools.partial(read_image, resize=False), "as is")
    checks = split_checks(pieces, PUBLISHED["tiny_imagenet_c"].domains, PUBLISHED["tiny_imagenet_c"].images)
    return RawData(info._replace(class_names=tuple(wnids)), pieces, checks)


def _folders(root: Path, split: str) -> dict[str, Path]:
    """The folder of each domain of a split."""
    return {f"{c} {severity}": root / c / str(severity) for c, severity in DOMAINS[split]}


def _class_files(folder: Path, inner: str = "") -> Files:
    """The images of each class. Classes and images are in the order of their names."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; extract the download again")
    wnids = sorted(p.name for p in folder.iterdir() if re.fullmatch(r"n\d+", p.name) and p.is_dir())
    files = {wnid: [p for p in visible((folder / wnid / inner).glob("*")) if p.is_file()] for wnid in wnids}
    for wnid, paths in files.items():
        if not paths:
            raise UserError(f"{folder / wnid / inner}: no images; extract the download again")
    return files


def _common_classes(folders: dict[Path, Files], root: Path) -> list[str]:
    """The classes that most folders have. A folder with other classes is refused."""
    usual = collections.Counter(tuple(files) for files in folders.values() if files).most_common(1)
    if not usual:
        raise UserError(f"{root}: no class folders (n and digits) anywhere in it; extract the download again")
    wnids = list(usual[0][0])
    for folder, files in folders.items():
        lacking, more = [w for w in wnids if w not in files], [w for w in files if w not in wnids]
        if lacking or more:
            what = f"{lacking[0]} is missing" if lacking else f"{more[0]} is not in the others"
            counts = f"({len(files)} of {len(wnids)})"
            raise UserError(f"{folder}: class folder {what} {counts}; labels would shift, extract it again")
    return wnids


def _regenerated(clean: Files, split: str, seed: int) -> Iterator[Piece]:
    paths = [path for files in clean.values() for path in files]
    labels = np.repeat(np.arange(len(clean)), [len(files) for files in clean.values()])
    rows = cifar_c.hold_out(labels, seed)[split == "val"]

    def read(rows: np.ndarray) -> np.ndarray:
        return np.stack([read_image(paths[row], SIZE, resize=False) for row in rows])

    return cifar_c.regenerated(split, DOMAINS[split], read, labels, rows, PER_CLASS, seed, "tiny", QUALITY)
