"""Keeps decoded images on disk, so that a run that is stopped while it reads images does not decode them again.

    <data_dir>/.<name>.decoded/<key>.npz    images and labels of a piece; the key depends on its files and on how it is read

Each file is written under another name and renamed. Reading it compares its checksums. So any number of processes may share
the folder. The process that finishes the store deletes it.
"""

import contextlib
import functools
import hashlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import PIL

from cxda_jax.data.readers.raw import Piece, Rows
from cxda_jax.disk.files import write_whole

VERSION = 1  # goes up whenever a pixel changes


@contextlib.contextmanager
def keeping(target: Path, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yields the pieces of the store `target`, changed to read what an earlier run decoded, and to keep what they decode.

    What is kept takes as much room as the store. If the disk has no room for both, nothing more is kept.
    """
    folder = target.parent / f".{target.name}.decoded"
    target.parent.mkdir(parents=True, exist_ok=True)
    needed = 2 * sum(piece.decoding.bytes for piece in pieces if piece.decoding)
    room = needed < shutil.disk_usage(target.parent).free
    yield [
        piece._replace(read=functools.partial(_read, piece, folder, room)) if piece.decoding else piece
        for piece in pieces
    ]
    shutil.rmtree(folder, ignore_errors=True)


def _read(piece: Piece, folder: Path, room: bool) -> Rows:
    file = folder / f"{key(piece)}.npz"
    with contextlib.suppress(Exception):  # it is not there or damaged
        with np.load(file, allow_pickle=False) as arrays:
            kept = Rows(arrays["images"], arrays["labels"])
        if len(kept.images) == len(kept.labels) == piece.rows:
            return kept
    rows = piece.read()
    if room and not rows.faults:  # the next run tries a bad image again
        with contextlib.suppress(OSError):  # the disk is full, or another process deleted the folder; the run goes on
            folder.mkdir(exist_ok=True)
            write_whole(file, lambda partial: np.savez(partial, images=rows.images, labels=rows.labels))
    return rows


def key(piece: Piece) -> str:
    """A name that changes when a file of the piece changes, and when the piece is read in another way."""
    assert piece.decoding
    files = []
    for path in piece.decoding.files:
        with contextlib.suppress(OSError):  # a file that is missing has neither size nor time
            files.append((str(path), path.stat().st_size, path.stat().st_mtime_ns))
    return hashlib.sha256(repr((VERSION, PIL.__version__, piece.decoding.how, files)).encode()).hexdigest()[:32]
