"""What was decoded stays decoded: a run that is stopped while it reads images goes on where it was.

    <data_dir>/.<name>.decoded/<key>.npz    images and labels of a piece; the key says from which files, and how

Each file is written under another name and renamed, and its checksums are compared when it is read, so any number of
processes may share the folder. The one that finishes the store deletes it.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import PIL

from cxda_jax.data.raw import Piece, Rows

VERSION = 1  # moves whenever a pixel does


@contextlib.contextmanager
def keeping(target: Path, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Inside, pieces that read what an earlier run decoded for the store `target`, and keep what they decode themselves.

    What is kept takes as much room as the store; where the disk has no room for both, nothing more is kept.
    """
    folder = target.parent / f".{target.name}.decoded"
    target.parent.mkdir(parents=True, exist_ok=True)
    needed = 2 * sum(piece.decoding.bytes for piece in pieces if piece.decoding)
    room = needed < shutil.disk_usage(target.parent).free
    yield [_kept(piece, folder, room) if piece.decoding else piece for piece in pieces]
    shutil.rmtree(folder, ignore_errors=True)


def _kept(piece: Piece, folder: Path, room: bool) -> Piece:
    def read() -> Rows:
        file = folder / f"{key(piece)}.npz"
        if (rows := _load(file, piece.rows)) is not None:
            return rows
        rows = piece.read()
        if room and not rows.faults:  # which may pass: a piece with a fault is read anew
            _save(file, rows)
        return rows

    return piece._replace(read=read)


def key(piece: Piece) -> str:
    """Another one whenever a file of the piece was changed or it is read in another way."""
    assert piece.decoding
    files = [(str(path), *_state(path)) for path in piece.decoding.files]
    return hashlib.sha256(repr((VERSION, PIL.__version__, piece.decoding.how, files)).encode()).hexdigest()[:32]


def _state(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return -1, -1
    return found.st_size, found.st_mtime_ns


def _load(file: Path, rows: int) -> Rows | None:
    try:
        with np.load(file, allow_pickle=False) as kept:
            found = Rows(kept["images"], kept["labels"])
    except Exception:  # it is not there, or whatever the unpackers make of a damaged one
        return None
    return found if len(found.images) == len(found.labels) == rows else None


def _save(file: Path, rows: Rows) -> None:
    partial = file.with_name(f".{os.getpid()}.{file.name}")
    with contextlib.suppress(OSError):  # a full disk, or another process that has finished: the run goes on without
        try:
            file.parent.mkdir(exist_ok=True)
            with open(partial, "wb") as opened:
                np.savez(opened, images=rows.images, labels=rows.labels)
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
