"""Files that are never half written, and folders that one process at a time writes to."""

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cxda_jax.errors import TooEarly, UserError

LOCK, SEAL = "lock", "seal"
ABANDONED = 3600.0  # seconds without a write; after them, an unfinished file or folder is deleted


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Has write() make a file beside `path`, with the same suffix, and renames it to `path` when it is whole.

    The file of each writer is its own. What a killed writer of `path` left is removed here, an hour later.
    """
    delete_abandoned(path.parent.glob(f".cxda-*.{glob.escape(path.name)}"))
    partial = path.with_name(f".cxda-{secrets.token_hex(8)}.{path.name}")
    try:
        partial.touch(exist_ok=False)  # so it is no link
        write(partial)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())  # otherwise a power cut could leave an empty file of the new name
        os.replace(partial, path)
    except OSError as e:
        e.filename = str(path)  # an error of a full disk names no file; others name the partial one
        raise
    finally:
        partial.unlink(missing_ok=True)


def delete_abandoned(left: Iterable[Path]) -> None:
    """Deletes those files and folders, of a writer that may have been killed, to which nobody wrote for an hour."""
    for path in left:
        with contextlib.suppress(OSError):
            is_folder = path.is_dir() and not path.is_symlink()
            written = [path, *path.iterdir()] if is_folder else [path]
            if time.time() - max(f.lstat().st_mtime for f in written) > ABANDONED:
                shutil.rmtree(path, ignore_errors=True) if is_folder else path.unlink()


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8. What is no character, as a file's name may hold, becomes an escape."""
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_bytes(path: Path, data: bytes) -> None:
    write_whole(path, lambda partial: partial.write_bytes(data))


def write_hashed(path: Path, pieces: Sequence[bytes | memoryview]) -> str:
    """Writes a file made of `pieces` and returns their SHA-256. A second thread computes it during the writing."""

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


def hash_file(path: Path) -> str:
    """SHA-256 of a file, which may be larger than the memory."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """The content with a SHA-256 of itself, for a JSON file whose hash stands nowhere else."""
    rest = {name: value for name, value in content.items() if name != SEAL}
    return {**rest, SEAL: hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}


def is_falsified(content: dict[str, Any]) -> bool:
    """Whether the content has changed since it was sealed. Files of older versions have no seal and pass."""
    return SEAL in content and content[SEAL] != sealed(content)[SEAL]


def refuse_links(folder: Path) -> None:
    """Raises a UserError if `folder` holds a link: writing through it could change a file elsewhere."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            raise UserError(f"{path}: a link, and nothing is written through links; put its target in its place")


@contextlib.contextmanager
def locked(folder: Path, name: str = LOCK, patience: float = 0.0) -> Iterator[None]:
    """Holds the lock of `folder`, which may hold no link: a second process gets
    TooEarly until this one ends or is killed, after so many seconds of `patience`."""
    refuse_links(folder)
    until = time.monotonic() + patience
    with contextlib.ExitStack() as stack:
        while True:
            file = stack.enter_context(open(folder / name, "a+"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < until:
                    file.close()
                    time.sleep(0.02)
                    continue
                file.seek(0)
                holder = file.read(200).strip() or "another process"
                fix = "wait for it, stop it, or choose another folder"
                raise TooEarly(f"{folder} is in use by {holder}; {fix}") from None
            except OSError:
                break  # the file system has no locks
            with contextlib.suppress(FileNotFoundError):  # who held it may have deleted it, or replaced the folder
                if os.path.samestat(os.fstat(file.fileno()), (folder / name).lstat()):
                    break
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        file.flush()
        yield
