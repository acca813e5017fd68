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

from cxda_jax.data.store import SPLITS, Domain, StoreInfo
from cxda_jax.reading import reason, refuse_html
from cxda_jax.types import UserError

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
ARCHIVES = (".tar", ".tar.bz2", ".tar.gz", ".tar.xz", ".tgz", ".zip")
PIECE = 2**23  # bytes of images


class Piece(NamedTuple):
    """Some images of one domain, still to be read: read() gives uint8 [rows, h, w, c] and integer labels [rows]."""

    domain: str
    split: str
    rows: int
    read: Callable[[], tuple[np.ndarray, np.ndarray]]


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


def read_pieces(pieces: Iterable[Piece], workers: int, progress: Callable[[int], None]) -> Iterator[Domain]:
    """Reads pieces on threads (decoding and arithmetic let go of the interpreter), in order, few of them at once."""
    done, todo = 0, iter(pieces)
    with ThreadPoolExecutor(workers) as pool:
        try:
            waiting = collections.deque((p, pool.submit(p.read)) for p in itertools.islice(todo, workers + 2))
            while waiting:
                piece, future = waiting.popleft()
                images, labels = future.result()
                waiting.extend((p, pool.submit(p.read)) for p in itertools.islice(todo, 1))
                done += len(images)
                progress(done)
                yield Domain(piece.domain, piece.split, images, labels)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


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
    domain: str, split: str, files: Sequence[tuple[Path, int]], size: tuple[int, int], resize: bool
) -> Iterator[Piece]:
    """Pieces of a domain whose images are files with labels; `size` is (height, width)."""
    rows = max(1, PIECE // (size[0] * size[1] * 3))
    for start in range(0, len(files), rows):
        some = files[start : start + rows]

        def read(some: Sequence[tuple[Path, int]] = some) -> tuple[np.ndarray, np.ndarray]:
            return np.stack([read_image(f, size, resize) for f, _ in some]), np.array([y for _, y in some], np.int32)

        yield Piece(domain, split, len(some), read)


def read_image(path: Path, size: tuple[int, int], resize: bool) -> np.ndarray:
    """RGB, uint8 [height, width, 3]; where `resize`, by PIL's antialiased bilinear filter to exactly `size`."""
    height, width = size
    try:
        with Image.open(path) as image:
            image = image.convert("RGB")
    except FileNotFoundError:
        raise UserError(f"{path}: missing; extract the download again") from None
    except Exception as e:  # whatever PIL's many decoders make of a broken file
        refuse_html(path)
        known = {UnidentifiedImageError: "of no known format", Image.DecompressionBombError: "too many pixels"}
        what = known.get(type(e)) or reason(e)
        raise UserError(f"{path}: not readable as an image ({what}); fetch or extract it again") from None
    if image.size != (width, height):
        if not resize:
            raise UserError(f"{path}: {image.width}x{image.height} pixels, expected {width}x{height}; fetch it again")
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(image)


def load_npy(path: Path, kinds: str, shape: tuple[int, ...]) -> np.ndarray:
    """A memory map of a .npy file of one of numpy's `kinds` whose shape is (n, *shape); never unpickles."""
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
    if not known or not array.ndim or array.shape[1:] != shape or not len(array):
        what = "uint8" if kinds == "u" else "integers"
        wanted = f"(n, {', '.join(map(str, shape))})" if shape else "(n,)"
        raise UserError(f"{path}: holds {array.dtype} {array.shape}, expected {what} {wanted}; fetch it again")
    return array


def find_folder(raw_dir: Path, *names: str) -> Path:
    """The first of `names` that is a folder in raw_dir, or raw_dir itself where it has that name."""
    if not raw_dir.is_dir():
        raise UserError(f"--raw_dir={raw_dir}: no such folder; give the one that holds {names[0]}/")
    for name in names:
        for found in (raw_dir / name, raw_dir if raw_dir.name == name else None):
            if found and found.is_dir():
                return found
    for archive in (raw_dir / f"{name}{suffix}" for name in names for suffix in ARCHIVES):
        if archive.is_file():
            refuse_html(archive)
            raise Packed(archive, raw_dir / names[0])
    raise UserError(f"{raw_dir / names[0]}: no such folder; --raw_dir is the folder that holds {names[0]}/")


def visible(paths: Iterable[Path]) -> list[Path]:
    """In the order of their names, without what file systems and archivers hide (.DS_Store, ._x.json)."""
    return sorted(path for path in paths if not path.name.startswith("."))


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
