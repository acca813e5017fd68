"""What the readers of raw downloads share: pieces read in parallel and kept in order, and faults of one line.

A reader looks at names and headers only and returns RawData; the pixels come when read_pieces() asks for them, a few
pieces at a time. So the memory in use depends on neither the data set's size nor its largest domain's.
"""

import collections
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from cxda_jax.data.store import SPLITS, Domain, StoreInfo, repeated
from cxda_jax.reading import reason, refuse_html
from cxda_jax.types import UserError, brief

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
ARCHIVES = (".tar", ".tar.bz2", ".tar.gz", ".tar.xz", ".tgz", ".zip")
PIECE = 2**23  # bytes of images


class Rows(NamedTuple):
    """What was read of a piece: uint8 [rows, h, w, c], integer labels [rows], and what is wrong with images left out."""

    images: np.ndarray
    labels: np.ndarray
    faults: tuple[str, ...] = ()


class Decoding(NamedTuple):
    """What the images of a piece are made from, and how: the same again gives the same bytes."""

    files: Sequence[Path]
    how: str
    bytes: int  # of the images


class Piece(NamedTuple):
    """Some images of one domain, still to be read."""

    domain: str
    split: str
    rows: int
    read: Callable[[], Rows]
    decoding: Decoding | None = None  # where it is costly enough to be kept when a run is stopped


class Packed(UserError):
    """The data is there as an archive. Readers only look, so it is the caller who may extract it and look again."""

    def __init__(self, archive: Path, folder: Path):
        super().__init__(f"{archive}: extract it first, so that {folder}/ exists")
        self.archive, self.folder = archive, folder


class Check(NamedTuple):
    """A count of the raw files beside what the paper used."""

    what: str
    found: int
    expected: int


class RawData(NamedTuple):
    """A data set found in its raw files; the pieces of a domain are neighbours."""

    info: StoreInfo
    pieces: list[Piece]
    checks: list[Check] = []
    warnings: list[str] = []
    least: int = 1  # images, below which a domain is left out


def read_pieces(
    pieces: Sequence[Piece],
    workers: int,
    progress: Callable[[int], None],
    skip_bad: int = 0,
    tell: Callable[[str], None] = print,
) -> Iterator[Domain]:
    """Reads pieces on threads (decoding and arithmetic let go of the interpreter), in order, few of them at once.

    tell() is called with what is wrong with each of up to `skip_bad` bad images, which are left out.
    """
    if fault := repeated((piece.domain, piece.split) for piece in pieces):
        raise UserError(f"{fault}; remove it from one of the two")
    done, bad, todo = 0, 0, iter(pieces)
    with ThreadPoolExecutor(workers) as pool:
        try:
            waiting = collections.deque((p, pool.submit(p.read)) for p in itertools.islice(todo, workers + 2))
            while waiting:
                piece, future = waiting.popleft()
                rows = future.result()
                waiting.extend((p, pool.submit(p.read)) for p in itertools.islice(todo, 1))
                done += piece.rows
                for fault in rows.faults:
                    bad += 1
                    if bad > skip_bad:
                        raise UserError(f"{fault}; or give skip_bad={bad} ({bad} bad of {done} so far)")
                    tell(fault)
                progress(done)
                yield Domain(piece.domain, piece.split, rows.images, rows.labels)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def large_enough(domains: Iterable[Domain], least: int, tell: Callable[[str], None]) -> Iterator[Domain]:
    """Leaves out the domains that have fewer than `least` images: at most so many wait for the others of their domain."""
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
    pieces: Iterable[Piece],
    domains: tuple[int, int, int] | None = None,
    images: tuple[int, int, int] | None = None,
    tasks: tuple[int, int] | None = None,
) -> list[Check]:
    """The pieces' counts beside the expected ones (train, val, test); `tasks` are images // 20 of val and test."""
    names, counts = collections.defaultdict(set), collections.Counter()
    for piece in pieces:
        names[piece.split].add(piece.domain)
        counts[piece.split] += piece.rows
    found = [Check(f"{s} domains", len(names[s]), n) for s, n in zip(SPLITS, domains or (), strict=False)]
    found += [Check(f"{s} images", counts[s], n) for s, n in zip(SPLITS, images or (), strict=False)]
    return found + [
        Check(f"{s} images // 20", counts[s] // 20, n) for s, n in zip(SPLITS[1:], tasks or (), strict=False)
    ]


def image_pieces(
    domain: str,
    split: str,
    files: Sequence[tuple[Path, int]],
    size: tuple[int, int],
    read: Callable[[Path, tuple[int, int]], np.ndarray],
    how: str,
) -> Iterator[Piece]:
    """Pieces of a domain whose images are files with labels. `size` is (height, width); read(path, size) gives uint8
    [*size, 3], in the way that `how` names."""
    each = size[0] * size[1] * 3
    rows = max(1, PIECE // each)
    for start in range(0, len(files), rows):
        some = files[start : start + rows]
        paths, labels = [path for path, _ in some], [label for _, label in some]
        decoding = Decoding(paths, repr((how, size, labels)), each * len(some))
        yield Piece(domain, split, len(some), lambda some=some: _read_files(some, size, read), decoding)


def _read_files(
    files: Sequence[tuple[Path, int]], size: tuple[int, int], read: Callable[[Path, tuple[int, int]], np.ndarray]
) -> Rows:
    images, labels, faults = [np.empty((0, *size, 3), np.uint8)], [], []
    for path, label in files:
        try:
            images.append(read(path, size)[None])
            labels.append(label)
        except UserError as e:
            faults.append(str(e))
    return Rows(np.concatenate(images), np.array(labels, np.int32), tuple(faults))


def read_image(path: Path, size: tuple[int, int], resize: bool) -> np.ndarray:
    """RGB, uint8 [height, width, 3]; where `resize`, by PIL's antialiased bilinear filter to exactly `size`."""
    height, width = size
    image = decode(path, lambda image: image.convert("RGB"))
    if image.size != (width, height):
        if not resize:
            raise UserError(f"{path}: {image.width}x{image.height} pixels, expected {width}x{height}; fetch it again")
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(image)


def decode(path: Path, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """convert(the image of a file), or a UserError that says what is wrong with it."""
    try:
        with Image.open(path) as image:
            return convert(image)
    except FileNotFoundError:
        raise UserError(f"{path}: missing; extract the download again") from None
    except Exception as e:  # whatever PIL's many decoders make of a broken file
        refuse_html(path)
        known = {UnidentifiedImageError: "of no known format", Image.DecompressionBombError: "too many pixels"}
        what = known.get(type(e)) or reason(e)
        raise UserError(f"{path}: not readable as an image ({what}); fetch or extract it again") from None


def load_npy(path: Path, kinds: str, *shapes: tuple[int, ...]) -> np.ndarray:
    """A memory map of a .npy file of one of numpy's `kinds` whose shape is (n, *one of the shapes); never unpickles."""
    refuse_html(path)
    try:
        with open(path, "rb") as file:
            np.lib.format.read_magic(file)
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as e:  # whatever numpy makes of a broken header
        if "Python objects" in str(e) or "allow_pickle" in str(e):
            raise UserError(
                f"{path}: holds Python objects, not numbers; refused, since loading could run code"
            ) from None
        raise UserError(f"{path}: cut short or not a .npy file ({reason(e)}); fetch it again") from None
    known = array.dtype == np.uint8 if kinds == "u" else array.dtype.kind in kinds
    if not known or not array.ndim or array.shape[1:] not in shapes or not len(array):
        what = "uint8" if kinds == "u" else "whole numbers"
        wanted = " or ".join(f"(n, {', '.join(map(str, shape))})" if shape else "(n,)" for shape in shapes)
        raise UserError(f"{path}: holds {array.dtype} {array.shape}, expected {what} {wanted}; fetch it again")
    return array


def find_folder(raw_dir: Path, *names: str, packed: Sequence[str] = ()) -> Path:
    """The first of `names` that is a folder in raw_dir, in a folder that an archive made there, or raw_dir itself.

    An archive may have one of these names or of those in `packed`.
    """
    if not raw_dir.is_dir():
        raise UserError(f"raw_dir={raw_dir}: no such folder; give the one that holds {names[0]}/")
    archives = (*names, *packed)
    inner = [raw_dir / outer / name for name in names for outer in archives]
    direct = [found for name in names for found in (raw_dir / name, raw_dir) if found.name == name]
    for found in (*inner, *direct):
        if found.is_dir():
            return found
    for archive in (raw_dir / f"{name}{suffix}" for name in archives for suffix in ARCHIVES):
        if archive.is_file():
            refuse_html(archive)
            raise Packed(archive, raw_dir / names[0])
    raise UserError(f"{raw_dir / names[0]}: no such folder; raw_dir is the folder that holds {names[0]}/")


def visible(paths: Iterable[Path]) -> list[Path]:
    """In the order of their names, without what file systems and archivers hide (.DS_Store, ._x.json)."""
    return sorted(path for path in paths if not path.name.startswith("."))


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
