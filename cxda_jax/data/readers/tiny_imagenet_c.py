"""TinyImageNet-C: Tiny ImageNet under corruptions, split as ARM does; a domain is a corruption at a severity.

    <raw_dir>/Tiny-ImageNet-C/<corruption>/<severity>/<wnid>/*                    test: the published files
    <raw_dir>/Tiny-ImageNet-C-new/{train,val}/<corruption>/<severity>/<wnid>/*    made by ARM's authors

A label is the rank of its wnid (n and digits) among all wnids. A folder that lacks a class would shift the labels, so
it is refused. With `regenerate`, train and val domains are made from the clean training images,
<raw_dir>/tiny-imagenet-200/train/<wnid>/images/*, by our own corruptions.
"""

import re
from pathlib import Path

import numpy as np

from cxda_jax.data.published import PUBLISHED
from cxda_jax.data.readers import cifar_c
from cxda_jax.data.readers.raw import IMAGENET, RawData, find_folder, image_pieces, read_image, split_checks, visible
from cxda_jax.data.store import StoreInfo
from cxda_jax.errors import UserError

SIDE = 64
# As in CIFAR-C and in ARM's order, with frost in the place of spatter.
DOMAINS = {
    split: [("frost" if c == "spatter" else c, severity) for c, severity in domains if c != "frost"]
    for split, domains in cifar_c.DOMAINS.items()
}
PER_CLASS = 10  # images of a regenerated domain
QUALITY = 85  # of the published JPEG files
INFO = StoreInfo("tiny_imagenet_c", (), *IMAGENET, provenance="Tiny-ImageNet-C and ARM's Tiny-ImageNet-C-new")

Files = dict[str, list[Path]]  # wnid -> images


def find(raw_dir: Path, regenerate: bool = False, seed: int = 0) -> RawData:
    info, clean, roots = INFO, None, {"test": find_folder(raw_dir, "Tiny-ImageNet-C")}
    if regenerate:
        info = cifar_c.as_regenerated(INFO, "Tiny-ImageNet-C")
        clean = find_folder(raw_dir, "tiny-imagenet-200") / "train"
    else:
        new = find_folder(raw_dir, "Tiny-ImageNet-C-new", packed=("tinyimagenet-c",))  # so ARM's archive is called
        roots |= {"train": new / "train", "val": new / "val"}
    folders = {(split, c, s): root / c / str(s) for split, root in roots.items() for c, s in DOMAINS[split]}
    files = {folder: _class_files(folder) for folder in folders.values()}
    if clean:
        files[clean] = _class_files(clean, "images")
    wnids = _common_classes(files)
    labelled = {f: [(path, y) for y, wnid in enumerate(wnids) for path in its[wnid]] for f, its in files.items()}
    clean_files = labelled[clean] if clean else []

    def take(rows: np.ndarray) -> np.ndarray:
        return np.stack([read_image(clean_files[row][0], SIDE) for row in rows])

    pieces = []
    for split, domains in DOMAINS.items():
        if clean_files and split != "test":
            labels = np.array([label for _, label in clean_files])
            own = cifar_c.Clean(take, labels, "tiny", QUALITY)
            pieces += cifar_c.regenerated(split, domains, own, PER_CLASS, seed)
            continue
        for c, s in domains:
            pieces += image_pieces(f"{c} {s}", split, labelled[folders[split, c, s]], SIDE)
    checks = split_checks(pieces, PUBLISHED["tiny_imagenet_c"].domains, PUBLISHED["tiny_imagenet_c"].images)
    return RawData(info._replace(class_names=wnids), pieces, checks)


def _class_files(folder: Path, inner: str = "") -> Files:
    """The images of each class. Classes and images are in the order of their names."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; extract the download again")
    wnids = sorted(p.name for p in folder.iterdir() if re.fullmatch(r"n\d+", p.name) and p.is_dir())
    files = {wnid: [p for p in visible((folder / wnid / inner).glob("*")) if p.is_file()] for wnid in wnids}
    if empty := [wnid for wnid, paths in files.items() if not paths]:
        raise UserError(f"{folder / empty[0] / inner}: no images; extract the download again")
    return files


def _common_classes(folders: dict[Path, Files]) -> tuple[str, ...]:
    """The classes of all folders, which have to be the same."""
    first, files = next(iter(folders.items()))
    if not files:
        raise UserError(f"{first}: no class folders (n and digits) in it; extract the download again")
    for folder, others in folders.items():
        if odd := sorted(files.keys() ^ others.keys()):
            what = f"class folder {odd[0]} is in one of it and {first}"
            raise UserError(f"{folder}: {what}; labels would shift, extract both again")
    return tuple(files)
