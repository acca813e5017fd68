"""CIFAR-C: CIFAR-10 under corruptions, split as ARM does; a domain is a corruption at a severity.

    <raw_dir>/CIFAR-10-C/<corruption>.npy, labels.npy                            test: the published files
    <raw_dir>/CIFAR-10-C-new/{train,val}/<corruption>.npy, <corruption>_labels.npy    made by ARM's authors

A file's rows are five equal blocks, one for each severity. Two options replace missing files:

    regenerate   makes the train and val domains from the clean training images, <raw_dir>/cifar-10-batches-bin/
                 data_batch_*.bin (the binary version), by our own corruptions
    tfds         does the same, with the clean and the test images from tensorflow-datasets, which it keeps in raw_dir
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cxda_jax.data import corruptions
from cxda_jax.data.published import PUBLISHED
from cxda_jax.data.readers.raw import IMAGENET, Piece, RawData, Rows, find_folder, load_npy, split_checks
from cxda_jax.data.store import SPLITS, StoreInfo
from cxda_jax.disk.reading import reason, refuse_html
from cxda_jax.errors import UserError, needing

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
TRAIN_BATCHES = [f"data_batch_{i}" for i in (1, 2, 3, 4, 5)]  # CIFAR-10's files of clean images for training
PER_CLASS = 100  # images of a regenerated domain
INFO = StoreInfo(
    "cifar_c",
    ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    *IMAGENET,  # not CIFAR's own, as ARM has it
    provenance="CIFAR-10-C and ARM's CIFAR-10-C-new",
)


def find(raw_dir: Path, regenerate: bool = False, tfds: bool = False, seed: int = 0) -> RawData:
    info, pieces = INFO, []
    if regenerate or tfds:
        info = as_regenerated(INFO, "CIFAR-10-C")
        images, labels, _ = _tfds_images("cifar10", "train", raw_dir) if tfds else read_binary(raw_dir)
        for split in ("train", "val"):
            pieces += regenerated(split, DOMAINS[split], Clean(images.__getitem__, labels), PER_CLASS, seed)
    else:
        new = find_folder(raw_dir, "CIFAR-10-C-new")
        for split in ("train", "val"):
            pieces += _blocks(new / split, split, "{}_labels.npy")
    pieces += _tfds_pieces(raw_dir) if tfds else _blocks(find_folder(raw_dir, "CIFAR-10-C"), "test", "labels.npy")
    return RawData(info, pieces, split_checks(pieces, PUBLISHED["cifar_c"].domains, PUBLISHED["cifar_c"].images))


def as_regenerated(info: StoreInfo, tested_on: str) -> StoreInfo:
    made = "corruptions of clean training images by this package"
    return info._replace(provenance=f"{tested_on}; train and val domains: {made}", marks=("regenerated",))


def _blocks(folder: Path, split: str, labels_of: str) -> Iterator[Piece]:
    """Pieces of the .npy files in `folder`, of which `labels_of`, such as "{}_labels.npy", names those of labels."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; CIFAR-C is read from CIFAR-10-C and CIFAR-10-C-new/{{train,val}}")
    for corruption, severity in DOMAINS[split]:
        path, labels_path = folder / f"{corruption}.npy", folder / labels_of.format(corruption)
        images, labels = load_npy(path, "u", (32, 32, 3)), _labels(labels_path)
        if len(images) % 5 or len(labels) != len(images):
            what = f"{len(images)} images and {len(labels)} labels, expected five equal blocks, by severity"
            raise UserError(f"{path}: {what}; fetch it and {labels_path.name} again")
        name, size = f"{corruption} {severity}", len(images) // 5
        mine = slice((severity - 1) * size, severity * size)
        yield Piece(name, split, size, lambda x=images[mine], y=labels[mine]: Rows(np.array(x), y))


def _labels(path: Path) -> np.ndarray:
    """Labels int64 [n] from a file of whole numbers of any type, as a list or a column."""
    labels = load_npy(path, "iuf", (), (1,)).reshape(-1)
    wrong = labels[~((labels == np.rint(labels)) & (labels >= 0) & (labels <= 9))]
    if wrong.size:
        raise UserError(f"{path}: a label is {wrong[0]:g}, expected whole numbers in 0..9; fetch or make it again")
    return labels.astype(np.int64)


def read_binary(raw_dir: Path, names: Sequence[str] = TRAIN_BATCHES) -> Rows:
    """CIFAR-10's clean images and labels from its binary version: rows of a label and 3 x 32 x 32 bytes."""
    folder = find_folder(raw_dir, "cifar-10-batches-bin", "cifar-10-binary")  # the folder's name, the archive's
    parts = []
    for file in (folder / f"{name}.bin" for name in names):
        refuse_html(file)
        part = np.fromfile(file, np.uint8)
        if not part.size or part.size % 3073 or part[::3073].max() > 9:
            raise UserError(f"{file}: {part.size} bytes are not rows of a label and 3072 pixels; fetch it again")
        parts.append(part)
    rows = np.concatenate(parts).reshape(-1, 3073)
    return Rows(rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), rows[:, 0].astype(np.int64))


def hold_out(labels: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Rows for train and rows for val domains, without overlap. Val gets a fifth of each class."""
    rng = np.random.default_rng([seed, 0])
    train, val = [], []
    for c in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == c))
        if not (cut := len(rows) // 5):
            raise UserError(f"{len(rows)} clean images of class {c}, not 5", "regenerate", fix="extract again")
        val.append(rows[:cut])
        train.append(rows[cut:])
    return {"train": np.concatenate(train), "val": np.concatenate(val)}


class Clean(NamedTuple):
    """Images without corruption, and what their published corruptions were made with."""

    take: Callable[[np.ndarray], np.ndarray]  # rows -> their pixels
    labels: np.ndarray  # of all
    constants: str = "cifar"  # a key of corruptions.SEVERITIES
    saved_at: int = 0  # the quality of the JPEG files through which the published images went; 0: none


def regenerated(split: str, domains: list[tuple[str, int]], clean: Clean, per_class: int, seed: int) -> Iterator[Piece]:
    """Domains (corruption, severity). Clean images are drawn for each anew; train and val share none."""
    take, labels, constants, saved_at = clean
    rows = np.arange(len(labels)) if split == "test" else hold_out(labels, seed)[split]
    classes, available = np.unique(labels[rows], return_counts=True)
    count = min(per_class, int(available.min()))

    def make(number: int, corruption: str, severity: int) -> Rows:
        rng = np.random.default_rng([corruptions.VERSION, seed, SPLITS.index(split), number])
        mine = np.concatenate([rng.choice(rows[labels[rows] == c], count, replace=False) for c in classes])
        made = corruptions.corrupt(take(mine), corruption, severity, rng, constants)
        return Rows(corruptions.as_jpeg(made, saved_at) if saved_at else made, labels[mine])

    for number, (corruption, severity) in enumerate(domains):
        read = functools.partial(make, number, corruption, severity)
        yield Piece(f"{corruption} {severity}", split, count * len(classes), read)


def _tfds_pieces(raw_dir: Path) -> Iterator[Piece]:
    for corruption, severity in DOMAINS["test"]:
        config = f"cifar10_corrupted/{corruption.replace('_transform', '')}_{severity}"
        count = _tfds_builder(config, raw_dir).info.splits["test"].num_examples
        read = functools.partial(_tfds_images, config, "test", raw_dir)
        yield Piece(f"{corruption} {severity}", "test", count, read)


def _tfds_images(name: str, split: str, raw_dir: Path) -> Rows:
    data = _tfds_builder(name, raw_dir).as_dataset(split=split, shuffle_files=False, batch_size=-1)
    return Rows(data["image"].numpy(), data["label"].numpy())


def _tfds_builder(name: str, raw_dir: Path) -> Any:
    with needing("--tfds=True", "data"):
        import tensorflow_datasets as tfds
    builder = tfds.builder(name, data_dir=str(raw_dir))
    try:
        builder.download_and_prepare()
    except Exception as e:  # downloads raise exceptions of all kinds
        raise UserError(f"{name} is not in {raw_dir} and could not be fetched ({reason(e)})", "tfds") from None
    return builder
