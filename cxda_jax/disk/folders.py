"""Folders whose files are replaced all at once: whatever ends the writer, the old files or the new are there, whole.

The new ones are written into a folder inside the old one, and reach the disk. Linux then exchanges the two folders in
one step. Where it cannot (a mount point, a parent that nobody may write to, a file system without this), or should not
(the current directory, files of others beside ours), the folder of new files is renamed to NEXT instead. From then on
current() gives NEXT, and its files are put beside it. Where a kill leaves that half done, the next writer does it.
"""

import contextlib
import ctypes
import glob
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TypeVar

from cxda_jax.disk import files, manifest
from cxda_jax.disk.reading import reason
from cxda_jax.errors import TooEarly, UserError

HIDDEN = ".cxda-"  # begins the name of all that is not of the folder's content
NEXT, LOCK = f"{HIDDEN}next", f"{HIDDEN}lock"
TRIED = 2**16  # bytes that must find room before work begins
PATIENCE = 10.0  # seconds that a writer waits for another: what took minutes to make is written in less than one
READS = 20  # at most, of a folder that is replaced again and again
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux, for renameat2
T = TypeVar("T")


def entries(folder: Path) -> set[str]:
    """The names in a folder, without those of a replacement that is not complete, of locks, and of what was left."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    coming = {path.name for path in current(folder).iterdir()} if NEXT in names else set()
    return {name for name in names if not name.startswith(HIDDEN)} - coming


def current(folder: Path) -> Path:
    """Where the files of a folder are: inside it, where their replacement is not complete."""
    coming = folder / NEXT
    return coming if coming.is_dir() and not coming.is_symlink() else folder


def read(folder: Path, work: Callable[[Path], T]) -> T:
    """What work() makes of the files of a folder, of one writer all: once more where they were replaced meanwhile."""
    for _ in range(READS):
        at = _version(folder)
        try:
            found = work(at[0])
        except (OSError, ValueError):
            if at == _version(folder):
                raise
        else:
            if at == _version(folder):
                return found
    raise TooEarly(f"{folder}: replaced again and again while it was read; wait for its writer")


def _version(folder: Path) -> tuple[Path, int, bytes]:
    """Where its files are, and what tells them from others."""
    where = current(folder)
    if not (where / manifest.NAME).is_file():  # a pipe is never opened
        return where, 0, b""
    try:
        with open(where / manifest.NAME, "rb") as file:
            return where, os.fstat(file.fileno()).st_ino, file.read()
    except OSError:
        return where, 0, b""


def insist_on_writable(folder: Path, flag: str) -> None:
    """Raises a UserError unless there is some room for files in a folder, or where it is to be made."""
    try:
        place = folder.resolve()
        there = next(path for path in (place, *place.parents) if path.exists())
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(TRIED))
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as e:
        raise UserError(
            f"{flag}={folder}: cannot be written ({reason(e)}); choose another, or make room there"
        ) from None


@contextlib.contextmanager
def replaced(folder: Path, ours: Callable[[Path], Collection[str]]) -> Iterator[Path]:
    """Gives an empty folder, whose files take the place of those in `folder` at the end, if nothing fails.

    One process at a time: another one waits, and gets TooEarly where that takes long.

    Args:
      folder: is made if it is missing.
      ours: the names of the files in a folder that the new ones replace. Others stay.
    """
    folder = folder.resolve()
    made, exchanged = not folder.exists(), False
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / _hidden()
    try:
        with files.locked(folder, LOCK, PATIENCE):
            _complete(folder, ours)
            left = (*folder.glob(f"{HIDDEN}*"), *folder.parent.glob(f"{HIDDEN}*.{glob.escape(folder.name)}"))
            files.delete_abandoned(path for path in left if path.name != LOCK)
            new.mkdir()
            try:
                yield new
                _sync(new)
                exchanged = _exchanged(new, folder, ours)
                if not exchanged:
                    os.rename(new, folder / NEXT)
                    _complete(folder, ours)
            finally:
                shutil.rmtree(new, ignore_errors=True)
                if not exchanged:
                    (folder / LOCK).unlink(missing_ok=True)
    except OSError as e:
        if str(e.filename or new).startswith(str(new)):
            e.filename = str(folder)  # which the user knows
        raise
    finally:
        if made:
            with contextlib.suppress(OSError):  # it has files
                folder.rmdir()


def _hidden() -> str:
    return f"{HIDDEN}{secrets.token_hex(8)}"


def _exchanged(new: Path, folder: Path, ours: Callable[[Path], Collection[str]]) -> bool:
    """Whether the system exchanged the two, so that nobody ever sees a part of the new files."""
    beside, old, ours_too = folder.with_name(f"{new.name}.{folder.name}"), folder.stat(), new.stat()
    try:
        here = Path.cwd()
        if folder in (here, *here.parents) or entries(folder) - set(ours(folder)):
            return False
        if (old.st_uid, old.st_gid) != (ours_too.st_uid, ours_too.st_gid):
            return False
        exchange = ctypes.CDLL(None, use_errno=True).renameat2
        shutil.copymode(folder, new)
        os.rename(new, beside)
        if exchange(AT_FDCWD, os.fsencode(beside), AT_FDCWD, os.fsencode(folder), RENAME_EXCHANGE):
            os.rename(beside, new)
            return False
    except (OSError, AttributeError):
        return False
    _sync_names(folder.parent)
    shutil.rmtree(beside, ignore_errors=True)
    return True


def _complete(folder: Path, ours: Callable[[Path], Collection[str]]) -> None:
    """Puts the files of NEXT, if there are any, in the place of those in the folder: the list of all comes last."""
    if (coming := current(folder)) == folder:
        return
    files.refuse_links(coming)
    names = sorted((path.name for path in coming.iterdir()), key=lambda name: (name.endswith(".json"), name))
    for name in set(ours(folder)).difference(names):
        (folder / name).unlink(missing_ok=True)
    for name in names:
        _put(coming / name, folder / name)
    _sync_names(folder)
    done = folder / _hidden()
    os.rename(coming, done)
    shutil.rmtree(done, ignore_errors=True)


def _put(file: Path, place: Path) -> None:
    """Gives a file a second name, which takes no room, or copies it."""
    if place.exists() and place.samefile(file):
        return  # renaming would then do nothing
    partial = place.with_name(f"{_hidden()}.{place.name}")
    try:
        os.link(file, partial)
    except OSError:
        files.write_whole(place, lambda copy: shutil.copyfile(file, copy))
    else:
        os.replace(partial, place)


def _sync(folder: Path) -> None:
    """Has all files of a folder reach the disk: a power cut could leave an empty one under its name."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    _sync_names(folder)


def _sync_names(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every system opens folders, or writes their names at once
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
