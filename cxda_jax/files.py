"""Files that are whole or not there, and folders that one process writes to at a time."""

import contextlib
import errno
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cxda_jax.types import UserError

LOCK, SEAL = "lock", "seal"


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Calls write() with the name of a file beside `path`, of the same suffix, and gives it its final name when it is done."""
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    partial.unlink(missing_ok=True)  # should it be a link, what it points to stays as it is
    try:
        write(partial)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())  # or a power cut could leave the new name with nothing in it
        os.replace(partial, path)
    except OSError as e:
        e.filename = str(path)  # a full disk names no file, others the one beside it
        raise
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    write_whole(path, lambda partial: partial.write_text(text))


def write_bytes(path: Path, data: bytes) -> None:
    write_whole(path, lambda partial: partial.write_bytes(data))


def write_hashed(path: Path, pieces: Sequence[bytes | memoryview]) -> str:
    """Writes a file made of `pieces` and returns their SHA-256, which a second thread finds meanwhile: the disk takes longer."""

    def digest() -> str:
        found = hashlib.sha256()
        for piece in pieces:
            found.update(piece)
        return found.hexdigest()

    def write(partial: Path) -> None:
        with open(partial, "wb") as file:
            file.writelines(pieces)

    with ThreadPoolExecutor(1) as beside:
        hashing = beside.submit(digest)
        write_whole(path, write)
        return hashing.result()


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """The same with a SHA-256 of itself, for a JSON file that nothing else proves."""
    return {**content, SEAL: _seal_of(content)}


def is_falsified(content: dict[str, Any]) -> bool:
    """Whether a file's content is not what it was when it was sealed; what older versions wrote has no seal."""
    return SEAL in content and content[SEAL] != _seal_of(content)


def _seal_of(content: dict[str, Any]) -> str:
    rest = {name: value for name, value in content.items() if name != SEAL}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def refuse_links(folder: Path) -> None:
    """Raises a UserError where something directly in `folder` is a link: writing there could change a file elsewhere."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            raise UserError(f"{path}: a link, through which nothing is written; put what it points to in its place")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes that call it out of `folder`; the system lets go of it when this process ends, however it does."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as e:
        if e.errno != errno.ELOOP:
            raise
        raise UserError(f"{folder / LOCK}: a link, through which nothing is written; delete it") from None
    with open(descriptor, "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(200).strip() or "another process"
            raise UserError(f"{folder} is in use by {holder}; wait for it, stop it, or choose another folder") from None
        except OSError:  # a file system without locks
            yield
            return
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        file.flush()
        yield
