"""QMNIST: MNIST's digits with the ids of their writers. A domain is a writer.

    <raw_dir>/qmnist-train-images-idx3-ubyte[.gz]    or MNIST's own train-images-idx3-ubyte[.gz], the same
                                                     digits in the same order
    <raw_dir>/qmnist-train-labels-idx2-int[.gz]      class, series and writer of each digit
    <raw_dir>/qmnist-test-images-idx3-ubyte[.gz]     60,000 digits; or MNIST's t10k-images-idx3-ubyte[.gz],
                                                     the first 10,000 of them
    <raw_dir>/qmnist-test-labels-idx2-int[.gz]

The files may also lie in QMNIST/raw/, where torchvision puts them. `split` says who is tested:

    published    the writers of the test file, who wrote nothing in the train file
    students     all high-school students (series 4). Train and val are the employees of the census bureau (series 0
                 and 1)

In both, a tenth of the other writers validate.
"""

import gzip
import math
from pathlib import Path

import numpy as np

from cxda_jax.config.fields import choose
from cxda_jax.data.readers.folder import FRACTIONS
from cxda_jax.data.readers.raw import Piece, RawData, Rows
from cxda_jax.data.store import SPLITS, StoreInfo
from cxda_jax.disk.reading import reason, refuse_html
from cxda_jax.errors import UserError

STUDENTS = 4  # the series of NIST's digits that students wrote
TYPES = {0x08: np.dtype("u1"), 0x0C: np.dtype(">i4")}  # by the third byte of an idx file
INFO = StoreInfo(
    name="qmnist",
    class_names=tuple("0123456789"),
    mean=(0.0,),  # bright ink on black, as the other handwriting after its normalisation
    std=(1.0,),
    provenance="QMNIST, writers of MNIST's digits (Yadav and Bottou 2019, BSD-style licence)",
    licence="BSD-style, Yadav and Bottou",
    fit="pad",
    background=(0, 0, 0),
)


def find(raw_dir: Path, name: str = "qmnist", split: str = "published", min_images: int = 40, seed: int = 0) -> RawData:
    choose("split", split, ("published", "students"))
    folders = [folder for folder in (raw_dir / "QMNIST" / "raw", raw_dir) if folder.is_dir()]
    if not folders:
        raise UserError("no such folder", "raw_dir", raw_dir, "give the one that holds qmnist-train-labels-idx2-int.gz")
    parts = [read_part(folders[0], part) for part in ("train", "test")]
    images, rows = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    labels, series, writers = rows[:, 0].astype(np.int32), rows[:, 1], rows[:, 2]
    in_test = np.arange(len(rows)) >= len(parts[0][1]) if split == "published" else series == STUDENTS
    test_writers, others = np.unique(writers[in_test]), np.unique(writers[~in_test])
    others = np.random.default_rng(seed).permutation(others)
    cut = round(FRACTIONS[1] * len(others))
    pieces, few = [], []
    for part, mine in zip(SPLITS, (others[cut:], others[:cut], test_writers), strict=True):
        for writer in sorted(mine.tolist()):
            rows_of = np.flatnonzero(writers == writer)
            if len(rows_of) < min_images:
                few.append(f"{writer} ({len(rows_of)})")
            else:
                who = f"{'student' if series[rows_of[0]] == STUDENTS else 'employee'} {writer:04}"
                read = lambda i=rows_of: Rows(images[i][..., None], labels[i])  # noqa: E731
                pieces.append(Piece(who, part, len(rows_of), read))
    warnings = [f"{len(few)} writers left out, with fewer than {min_images} digits: {', '.join(few)}"] if few else []
    tested = "students tested" if split == "students" else "published split"
    info = INFO._replace(name=name, provenance=f"{INFO.provenance}; {tested}")
    return RawData(info, pieces, warnings=warnings)


def read_part(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """The images uint8 [n, 28, 28] of "train" or "test", and the 8 columns of their extended labels [n, 8]."""
    published = {"train": "train-images-idx3-ubyte", "test": "t10k-images-idx3-ubyte"}[part]
    images = read_idx(folder, 3, f"qmnist-{part}-images-idx3-ubyte", published)
    rows = read_idx(folder, 2, f"qmnist-{part}-labels-idx2-int")
    whole = len(rows) == len(images) or part == "test" and len(images) < len(rows)
    if images.shape[1:] != (28, 28) or rows.shape[1] < 3 or not whole or rows.min() < 0 or rows[:, 0].max() > 9:
        raise UserError(f"{folder}: {part} images {images.shape} do not fit labels {rows.shape}; fetch both again")
    return images, rows[: len(images)]


def read_idx(folder: Path, axes: int, *names: str) -> np.ndarray:
    """The array of the first file that is there, by its names, packed by gzip or not."""
    path = next((path for name in names for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
    if path is None:
        raise UserError(f"{folder / names[0]}.gz: missing; fetch it into --raw_dir")
    refuse_html(path)
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if data[:2] != b"\0\0" or data[3] != axes:
            raise ValueError(f"not an idx file of {axes} axes")
        shape = np.frombuffer(data, ">i4", axes, 4).tolist()
        return np.frombuffer(data, TYPES[data[2]], math.prod(shape), 4 + 4 * axes).reshape(shape)
    except (OSError, EOFError, ValueError, KeyError, IndexError) as e:
        raise UserError(f"{path}: cut short or not an idx file ({reason(e)}); fetch it again") from None
