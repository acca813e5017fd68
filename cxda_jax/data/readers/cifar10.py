"""CIFAR-10 under the corruptions of CIFAR-C, all made here. A domain is a corruption at a severity.

The clean images are one of these, 50,000 for train and val domains and 10,000 for test domains:

    <raw_dir>/cifar-10-batches-bin/{data_batch_1..5,test_batch}.bin    the published binary version
    <raw_dir>/{train,test}/<class>/<image>                             files; also in CIFAR-10-images/

The published Python version is a pickle, which could run code, so it is not read.

The domains, the severities and the numbers of images are CIFAR-C's. The files are not: random numbers differ, and frost
has textures of its own; see data/corruptions.py. So results are not comparable with those on the published CIFAR-10-C.
"""

from pathlib import Path

import numpy as np

from cxda_jax.data.published import PUBLISHED
from cxda_jax.data.readers import cifar_c
from cxda_jax.data.readers.raw import EXTENSIONS, RawData, Rows, read_image, split_checks, visible
from cxda_jax.data.store import SPLITS
from cxda_jax.errors import UserError
from cxda_jax.machine.backend import in_threads

INFO = cifar_c.INFO._replace(
    name="cifar10_c",
    provenance="CIFAR-10; all domains: corruptions of its images by this package",
    marks=("regenerated",),
)


def find(raw_dir: Path, seed: int = 0) -> RawData:
    clean, pieces = read_clean(raw_dir), []
    for split, per_class in zip(SPLITS, (cifar_c.PER_CLASS, cifar_c.PER_CLASS, len(clean["test"].labels)), strict=True):
        images, labels, _ = clean["test" if split == "test" else "train"]
        own = cifar_c.Clean(images.__getitem__, labels)
        pieces += cifar_c.regenerated(split, cifar_c.DOMAINS[split], own, per_class, seed)
    counts = PUBLISHED["cifar_c"]
    return RawData(INFO, pieces, split_checks(pieces, counts.domains, counts.images))


def read_clean(raw_dir: Path) -> dict[str, Rows]:
    """The images uint8 [n, 32, 32, 3] and the labels [n] of "train" and of "test"."""
    names = {"train": cifar_c.TRAIN_BATCHES, "test": ["test_batch"]}
    for folder in (raw_dir / "CIFAR-10-images", raw_dir):
        if (folder / "train").is_dir():
            return {part: _read_files(folder / part) for part in names}
    if not any(raw_dir.glob("cifar-10-b*bin*")) and (python := [*raw_dir.glob("cifar-10-*py*")]):
        what = "the Python version of CIFAR-10 is a pickle, which could run code"
        raise UserError(f"{python[0]}: {what}; fetch the binary version, cifar-10-binary.tar.gz, as --links shows")
    return {part: cifar_c.read_binary(raw_dir, names[part]) for part in names}


def _read_files(folder: Path) -> Rows:
    files = []
    for label, name in enumerate(INFO.class_names):
        mine = [path for path in visible((folder / name).glob("*")) if path.suffix.lower() in EXTENSIONS]
        if not mine:
            raise UserError(f"{folder / name}: no images; CIFAR-10's ten classes are expected in {folder}")
        files += [(path, label) for path in mine]
    images = list(in_threads(lambda file: read_image(file[0], 32), files))
    return Rows(np.stack(images), np.array([label for _, label in files]))
