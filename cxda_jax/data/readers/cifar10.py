"""CIFAR-10 under the corruptions of CIFAR-C, all made here. A domain is a corruption at a severity.

The clean images are one of these, 50,000 for train and val domains and 10,000 for test domains:

    <raw_dir>/cifar-10-batches-py/{data_batch_1..5,test_batch}         the published Python version
    <raw_dir>/cifar-10-batches-bin/{data_batch_1..5,test_batch}.bin    the published binary version
    <raw_dir>/{train,test}/<class>/<image>                             files; also in CIFAR-10-images/

The domains, the severities and the numbers of images are CIFAR-C's. The files are not: random numbers differ, and frost has
textures of its own; see data/corruptions.py. So results are not comparable with those on the published CIFAR-10-C.
"""

import codecs
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from cxda_jax.data.published import PUBLISHED
from cxda_jax.data.readers import cifar_c
from cxda_jax.data.readers.raw import EXTENSIONS, RawData, Rows, cores, find_folder, read_image, split_checks, visible
from cxda_jax.data.store import SPLITS
from cxda_jax.disk.reading import reason, refuse_html
from cxda_jax.errors import UserError

INFO = cifar_c.INFO._replace(
    name="cifar10_c",
    provenance="CIFAR-10; all domains: corruptions of its images by this package",
    marks=("regenerated",),
)


def find(raw_dir: Path, seed: int = 0) -> RawData:
    clean, pieces = read_clean(raw_dir), []
    for split, per_class in zip(SPLITS, (cifar_c.PER_CLASS, cifar_c.PER_CLASS, len(clean["test"].labels)), strict=True):
        images, labels, _ = clean["test" if split == "test" else "train"]
        domains = cifar_c.DOMAINS[split]
        pieces += cifar_c.regenerated(split, domains, images.__getitem__, labels, per_class, seed, "cifar")
    counts = PUBLISHED["cifar_c"]
    return RawData(INFO, pieces, split_checks(pieces, counts.domains, counts.images))


def read_clean(raw_dir: Path) -> dict[str, Rows]:
    """The images uint8 [n, 32, 32, 3] and the labels [n] of "train" and of "test"."""
    names = {"train": cifar_c.TRAIN_BATCHES, "test": ["test_batch"]}
    for folder in (raw_dir / "cifar-10-batches-py", raw_dir):
        if (folder / "data_batch_1").is_file():
            return {part: _read_batches([folder / name for name in names[part]]) for part in names}
    for folder in (raw_dir / "CIFAR-10-images", raw_dir):
        if (folder / "train").is_dir():
            return {part: _read_files(folder / part) for part in names}
    if any(raw_dir.glob("cifar-10-batches-py.*")) or any(raw_dir.glob("cifar-10-python.*")):
        find_folder(raw_dir, "cifar-10-batches-py", packed=("cifar-10-python",))  # has the archive extracted
    return {part: cifar_c.read_binary(raw_dir, names[part]) for part in names}


_ARRAYS = {"_reconstruct": np.zeros(0).__reduce__()[0], "ndarray": np.ndarray, "dtype": np.dtype}


class _Batch(pickle.Unpickler):
    """Reads numpy's arrays and plain values. It refuses all else, since loading it could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for Python 2
            return codecs.encode
        if module.split(".")[0] == "numpy" and name in _ARRAYS:
            return _ARRAYS[name]
        raise pickle.UnpicklingError(f"holds {module}.{name}, which is refused")


def _read_batches(paths: list[Path]) -> Rows:
    images, labels = [], []
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: missing; extract cifar-10-python.tar.gz again")
        refuse_html(path)
        try:
            with open(path, "rb") as file:
                batch = _Batch(file, encoding="bytes").load()
            images.append(np.asarray(batch[b"data"], np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
            labels.append(np.asarray(batch[b"labels"], np.int64))
            if len(images[-1]) != len(labels[-1]) or not 0 <= labels[-1].min() <= labels[-1].max() <= 9:
                raise ValueError("images and labels 0..9 do not fit each other")
        except Exception as e:  # a broken pickle raises exceptions of all kinds
            raise UserError(f"{path}: not a batch of CIFAR-10's Python version ({reason(e)}); fetch it again") from None
    return Rows(np.concatenate(images), np.concatenate(labels))


def _read_files(folder: Path) -> Rows:
    files = []
    for label, name in enumerate(INFO.class_names):
        mine = [path for path in visible((folder / name).glob("*")) if path.suffix.lower() in EXTENSIONS]
        if not mine:
            raise UserError(f"{folder / name}: no images; CIFAR-10's ten classes are expected in {folder}")
        files += [(path, label) for path in mine]
    with ThreadPoolExecutor(cores()) as pool:
        images = list(pool.map(lambda file: read_image(file[0], 32, lambda image: image.convert("RGB")), files))
    return Rows(np.stack(images), np.array([label for _, label in files]))
