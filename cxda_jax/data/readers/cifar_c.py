"""CIFAR-C: CIFAR-10 under corruptions, split as ARM does; a domain is a corruption at a severity.

    <raw_dir>/CIFAR-10-C/<corruption>.npy, labels.npy                            test: the published files
    <raw_dir>/CIFAR-10-C-new/{train,val}/<corruption>.npy, <corruption>_labels.npy    made by ARM's authors

A file's rows are five equal blocks, one for each severity. Two options replace missing files:

    regenerate   makes the train and val domains from the clean training images, <raw_dir>/cifar-10-batches-bin/
                 data_batch_*.bin (the binary version), by our own corruptions
    tfds         does the same, with the clean and the test images from tensorflow-datasets, which it keeps in raw_dir
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cxda_jax.data import corruptions
from cxda_jax.data.published import PUBLISHED
from cxda_jax.data.readers.raw import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Piece,
    RawData,
    Rows,
    find_folder,
    load_npy,
    split_checks,
)
from cxda_jax.data.store import SPLITS, StoreInfo
from cxda_jax.disk.reading import reason, refuse_html
from cxda_jax.errors import UserError

SHAPE = (32, 32, 3)
SEVERITIES = (1, 2, 3, 4, 5)
TRAINED = ("gaussian_noise", "shot_noise", "defocus_blur", "glass_blur", "zoom_blur", "snow", "frost", "brightness",
           "contrast", "pixelate")  # fmt: skip
VALIDATED = ("speckle_noise", "gaussian_blur", "saturate")
TESTED = ("impulse_noise", "motion_blur", "fog", "elastic_transform")
# In ARM's order. Of two corruptions, train has severities 1 to 3, and val and test have 4 and 5, one of each.
DOMAINS = {
    "train": [(c, s) for c in ("spatter", "jpeg_compression") for s in (1, 2, 3)]
    + [(c, s) for c in TRAINED for s in SEVERITIES],
    "val": [("spatter", 4), ("jpeg_compression", 5)] + [(c, s) for c in VALIDATED for s in SEVERITIES],
    "test": [("spatter", 5), ("jpeg_compression", 4)] + [(c, s) for c in TESTED for s in SEVERITIES],
}
PER_CLASS = 100  # images of a regenerated domain
INFO = StoreInfo(
    name="cifar_c",
    class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    mean=IMAGENET_MEAN,  # not CIFAR's own, as ARM has it
    std=IMAGENET_STD,
    provenance="CIFAR-10-C and ARM's CIFAR-10-C-new",
)

Clean = tuple[np.ndarray, np.ndarray]  # images and labels


def find(raw_dir: Path, regenerate: bool = False, tfds: bool = False, seed: int = 0) -> RawData:
    info, pieces = INFO, []
    if regenerate or tfds:
        info = as_regenerated(INFO, "CIFAR-10-C")
        images, labels = _tfds_images("cifar10", "train", raw_dir) if tfds else read_binary(raw_dir)
        for split, rows in zip(("train", "val"), hold_out(labels, seed), strict=True):
            pieces += regenerated(split, DOMAINS[split], images.__getitem__, labels, rows, PER_CLASS, seed, "cifar")
    else:
        new = find_folder(raw_dir, "CIFAR-10-C-new")
        for split in ("train", "val"):
            pieces += _blocks(new / split, split, "{}_labels.npy")
    if tfds:
        pieces += _tfds_pieces(raw_dir)
    else:
        pieces += _blocks(find_folder(raw_dir, "CIFAR-10-C"), "test", "labels.npy")
    return RawData(info, pieces, split_checks(pieces, PUBLISHED["cifar_c"].domains, PUBLISHED["cifar_c"].images))


def as_regenerated(info: StoreInfo, tested_on: str) -> StoreInfo:
    made = "corruptions of clean training images by this package"
    return info._replace(provenance=f"{tested_on}; train and val domains: {made}", marks=("regenerated",))


def _blocks(folder: Path, split: str, labels_of: str) -> Iterator[Piece]:
    """Pieces of the .npy files in `folder`. `labels_of` names a corruption's file of labels, such as "{}_labels.npy"."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; CIFAR-C is read from CIFAR-10-C and CIFAR-10-C-new/{{train,val}}")
    for corruption, severity in DOMAINS[split]:
        path, labels_path = folder / f"{corruption}.npy", folder / labels_of.format(corruption)
        images, labels = load_npy(path, "u", SHAPE), _labels(labels_path)
        if len(images) % 5:
            raise UserError(f"{path}: {len(images)} images, expected five equal blocks, by severity; fetch it again")
        if len(labels) != len(images):
            raise UserError(
                f"{labels_path}: {len(labels)} labels for the {len(images)} images of {path.name}; one of the two is not "
                "whole, fetch both again"
            )
        if split == "test" and (labels.reshape(5, -1) != labels[: len(labels) // 5]).any():
            raise UserError(
                f"{labels_path}: {len(labels)} labels that are not one list five times over; fetch it again"
            )
        size = len(images) // 5
        rows = slice((severity - 1) * size, severity * size)
        yield Piece(
            f"{corruption} {severity}", split, size, lambda x=images[rows], y=labels[rows]: Rows(np.array(x), y)
        )


def _labels(path: Path) -> np.ndarray:
    """Labels int64 [n] from a file of whole numbers of any type, as a list or a column."""
    labels = load_npy(path, "iuf", (), (1,)).reshape(-1)
    wrong = labels[~((labels == np.rint(labels)) & (labels >= 0) & (labels <= 9))]
    if wrong.size:
        raise UserError(f"{path}: a label is {wrong[0]:g}, expected whole numbers in 0..9; fetch or make it again")
    return labels.astype(np.int64)


def read_binary(raw_dir: Path) -> Clean:
    """CIFAR-10's clean training images from its binary version: each row is a label and 3 x 32 x 32 bytes."""
    folder = find_folder(raw_dir, "cifar-10-batches-bin", "cifar-10-binary")  # the folder's name, the archive's
    files = [folder / f"data_batch_{i}.bin" for i in (1, 2, 3, 4, 5)]
    parts = []
    for file in files:
        if not file.exists():
            raise UserError(f"{file}: missing; extract cifar-10-binary.tar.gz again")
        refuse_html(file)
        rows = np.fromfile(file, np.uint8)
        if not rows.size or rows.size % 3073 or rows[::3073].max() > 9:
            raise UserError(f"{file}: {rows.size} bytes are not rows of a label and 3072 pixels; fetch it again")
        parts.append(rows.reshape(-1, 3073))
    rows = np.concatenate(parts)
    return rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), rows[:, 0].astype(np.int64)


def hold_out(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows for train and rows for val domains, without overlap. Val gets a fifth of each class."""
    rng = np.random.default_rng([seed, 0])
    train, val = [], []
    for c in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == c))
        cut = len(rows) // 5
        if not cut:
            raise UserError(
                f"regenerate: {len(rows)} clean images of class {c}, at least 5 are needed; extract them again"
            )
        val.append(rows[:cut])
        train.append(rows[cut:])
    return np.concatenate(train), np.concatenate(val)


def regenerated(
    split: str,
    domains: list[tuple[str, int]],
    take: Callable[[np.ndarray], np.ndarray],
    labels: np.ndarray,
    rows: np.ndarray,
    per_class: int,
    seed: int,
    constants: str,
    saved_at: int = 0,
) -> Iterator[Piece]:
    """Domains that are made from clean images, chosen anew for each domain.

    Args:
        domains: (corruption, severity) of each.
        take: take(rows) returns the pixels of clean images.
        labels: Of all clean images.
        rows: The clean images of this split.
        per_class: Images of each class in a domain.
        constants: One of corruptions.SEVERITIES.
        saved_at: The quality of the JPEG files that the published images went through, or 0.
    """
    available = np.bincount(labels[rows])
    count = min(per_class, available[available > 0].min())
    for number, (corruption, severity) in enumerate(domains):

        def make(number: int = number, corruption: str = corruption, severity: int = severity) -> Rows:
            rng = np.random.default_rng([corruptions.VERSION, seed, SPLITS.index(split), number])
            mine = np.concatenate(
                [rng.choice(rows[labels[rows] == c], count, replace=False) for c in np.unique(labels)]
            )
            made = corruptions.corrupt(take(mine), corruption, severity, rng, constants)
            return Rows(corruptions.as_jpeg(made, saved_at) if saved_at else made, labels[mine])

        yield Piece(f"{corruption} {severity}", split, count * len(np.unique(labels)), make)


def _tfds_pieces(raw_dir: Path) -> Iterator[Piece]:
    for corruption, severity in DOMAINS["test"]:
        config = f"cifar10_corrupted/{corruption.replace('_transform', '')}_{severity}"
        count = _tfds_builder(config, raw_dir).info.splits["test"].num_examples
        yield Piece(
            f"{corruption} {severity}",
            "test",
            count,
            lambda config=config: Rows(*_tfds_images(config, "test", raw_dir)),
        )


def _tfds_images(name: str, split: str, raw_dir: Path) -> Clean:
    import tensorflow_datasets as tfds

    data = _tfds_builder(name, raw_dir).as_dataset(split=split, shuffle_files=False, batch_size=1000)
    batches = list(tfds.as_numpy(data))
    return np.concatenate([b["image"] for b in batches]), np.concatenate([b["label"] for b in batches])


def _tfds_builder(name: str, raw_dir: Path) -> Any:
    try:
        import tensorflow_datasets as tfds
    except ImportError:
        raise UserError("tfds needs tensorflow-datasets: pip install 'cxda_jax[data]'") from None
    builder = tfds.builder(name, data_dir=str(raw_dir))
    try:
        builder.download_and_prepare()
    except Exception as e:  # downloads raise exceptions of all kinds
        raise UserError(f"tfds: {name} is not in {raw_dir} and could not be fetched ({reason(e)})") from None
    return builder
