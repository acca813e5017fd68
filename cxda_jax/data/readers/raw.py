"""Reads pieces of raw downloads in parallel, keeps their order, and reports faults in one line. All readers share this.

A reader looks only at names and headers, and returns RawData. read_pieces() then reads the pixels, a few pieces at a
time. So the memory in use depends neither on the size of the data set nor on that of its largest domain.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from cxda_jax.data.readers.images import Convert, decode
from cxda_jax.data.store import SPLITS, Domain, StoreInfo, repeated
from cxda_jax.disk.reading import reason, refuse_html
from cxda_jax.errors import UserError, brief

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and standard deviation
EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
ARCHIVES = (".tar", ".tar.bz2", ".tar.gz", ".tar.xz", ".tgz", ".zip")
PIECE = 2**23  # bytes of images


class Rows(NamedTuple):
    """A piece that was read: images uint8 [rows, h, w, c], integer labels [rows], and the faults of images left out."""

    images: np.ndarray
    labels: np.ndarray
    faults: tuple[str, ...] = ()


class Piece(NamedTuple):
    """Some images of one domain, still to be read."""

    domain: str
    split: str
    rows: int
    read: Callable[[], Rows]
    are_files: bool = False  # each image is a file of its own, so that a bad one can be left out


class Packed(UserError):
    """The data is there as an archive. Readers only look; their caller may extract it and call them again."""

    def __init__(self, archive: Path, folder: Path):
        super().__init__(f"{archive}: extract it first, so that {folder}/ exists")
        self.archive, self.folder = archive, folder


class Check(NamedTuple):
    """A count in the raw files, and the paper's."""

    what: str
    found: int
    expected: int


class RawData(NamedTuple):
    """A data set in its raw files. The pieces of a domain are neighbours."""

    info: StoreInfo
    pieces: list[Piece]
    checks: list[Check] = []
    warnings: list[str] = []
    least: int = 1  # domains with fewer images are left out


def read_pieces(
    pieces: Sequence[Piece],
    workers: int,
    progress: Callable[[int], None],
    skip_bad: int = 0,
    tell: Callable[[str], None] = print,
) -> Iterator[Domain]:
    """Reads pieces on threads, a few at once, and yields them in order. progress() gets the number of images so far.

    So many bad images as `skip_bad` are left out, and tell() gets the fault of each. One more is an error.
    """
    if fault := repeated((piece.domain, piece.split) for piece in pieces):
        raise UserError(f"{fault}; remove it from one of the two")
    done, bad = 0, 0
    with ThreadPoolExecutor(workers) as pool:
        submitted = ((piece, pool.submit(piece.read)) for piece in pieces)
        try:
            waiting = collections.deque(itertools.islice(submitted, workers + 2))
            while waiting:
                piece, future = waiting.popleft()
                rows = future.result()
                waiting.extend(itertools.islice(submitted, 1))
                done += piece.rows
                for fault in rows.faults:
                    bad += 1
                    if bad > skip_bad:
                        raise UserError(f"{fault}; or give --skip_bad={bad} ({bad} bad of {done} so far)")
                    tell(fault)
                progress(done)
                yield Domain(piece.domain, piece.split, rows.images, rows.labels)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def large_enough(domains: Iterable[Domain], least: int, tell: Callable[[str], None]) -> Iterator[Domain]:
    """Leaves out the domains with fewer than `least` images. Of a domain, about that many are in memory at once."""
    for (name, split), parts in itertools.groupby(domains, lambda d: (d.name, d.split)):
        waiting, count = [], 0
        for part in parts:
            waiting.append(part)
            count += len(part.labels)
            if count >= least:
                yield from (w for w in waiting if len(w.labels))
                waiting = []
        if count < least:
            tell(f"domain {brief(repr(name))} of {split}: left out, {count} good images are fewer than {least}")


def split_checks(
    pieces: Sequence[Piece], domains: Sequence[int] = (), images: Sequence[int] = (), tasks: Sequence[int] = ()
) -> list[Check]:
    """Compares with the paper's domains and images of each split, and its tasks of 20 queries in val and test."""
    names = {split: {piece.domain for piece in pieces if piece.split == split} for split in SPLITS}
    rows = {split: sum(piece.rows for piece in pieces if piece.split == split) for split in SPLITS}
    checks = [Check(f"{s} domains", len(names[s]), n) for s, n in zip(SPLITS, domains, strict=False)]
    checks += [Check(f"{s} images", rows[s], n) for s, n in zip(SPLITS, images, strict=False)]
    return checks + [Check(f"{s} images // 20", rows[s] // 20, n) for s, n in zip(SPLITS[1:], tasks, strict=False)]


def as_rgb(image: Image.Image) -> Image.Image:
    return image.convert("RGB")


def image_pieces(
    domain: str, split: str, files: Sequence[tuple[Path, int]], side: int, convert: Convert = as_rgb
) -> Iterator[Piece]:
    """Pieces of a domain whose images are files, each with its label; see read_image()."""
    rows = max(1, PIECE // (3 * side**2))
    for start in range(0, len(files), rows):
        some = files[start : start + rows]
        yield Piece(domain, split, len(some), functools.partial(_read_files, some, side, convert), are_files=True)


def _read_files(files: Sequence[tuple[Path, int]], side: int, convert: Convert) -> Rows:
    images, labels, faults = [], [], []
    for path, label in files:
        try:
            images.append(read_image(path, side, convert))
            labels.append(label)
        except UserError as e:
            faults.append(str(e))
    pixels = np.array(images, np.uint8).reshape(-1, side, side, 3)  # also where no image is left
    return Rows(pixels, np.array(labels, np.int32), tuple(faults))


def read_image(path: Path, side: int, convert: Convert = as_rgb) -> np.ndarray:
    """The image in a file after convert(), uint8 [side, side, 3]."""
    image = decode(path, convert)
    if image.size != (side, side):
        raise UserError(f"{path}: {image.width}x{image.height} pixels, expected {side}x{side}; fetch it again")
    return np.asarray(image)


def load_npy(path: Path, kinds: str, *shapes: tuple[int, ...]) -> np.ndarray:
    """A memory map of a .npy file of the shape (n, *shape), with one of the shapes. Never unpickles.

    `kinds` are letters of numpy's kinds of types; "u" alone stands for uint8.
    """
    refuse_html(path)
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except Exception as e:  # numpy raises exceptions of all kinds for a broken header, and refuses Python objects
        raise UserError(
            f"{path}: cut short or not a .npy file of numbers ({reason(e)}); fetch or make it again"
        ) from None
    known = array.dtype == np.uint8 if kinds == "u" else array.dtype.kind in kinds
    if not known or not array.ndim or array.shape[1:] not in shapes or not len(array):
        what = f"{'uint8' if kinds == 'u' else 'whole numbers'} ({', '.join(['n', *map(str, shapes[0])])})"
        raise UserError(f"{path}: holds {array.dtype} {array.shape}, expected {what}; fetch or make it again")
    return array


def find_folder(raw_dir: Path, *names: str, packed: Sequence[str] = ()) -> Path:
    """Finds the folder of a data set, in raw_dir, in a folder there that an archive made, or raw_dir itself.

    It has one of the names. Its archive has one of them, or one of `packed`. If only that is there, Packed is raised.
    """
    if not raw_dir.is_dir():
        raise UserError("no such folder", "raw_dir", raw_dir, f"give the one that holds {names[0]}/")
    archives = (*names, *packed)
    places = [raw_dir / outer / name for name in names for outer in archives]
    places += [folder for name in names for folder in (raw_dir / name, raw_dir) if folder.name == name]
    if folder := next(filter(Path.is_dir, places), None):
        return folder
    files = (raw_dir / f"{name}{suffix}" for name in archives for suffix in ARCHIVES)
    if archive := next(filter(Path.is_file, files), None):
        raise Packed(archive, raw_dir / names[0])
    raise UserError(f"{raw_dir / names[0]}: no such folder; --raw_dir is the folder that holds {names[0]}/")


def visible(paths: Iterable[Path]) -> list[Path]:
    """The paths by name, without hidden files, which archivers add (.DS_Store, ._x.json)."""
    return sorted(path for path in paths if not path.name.startswith("."))
