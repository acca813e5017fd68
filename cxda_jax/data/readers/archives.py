"""Extracts archives that may be cut short, damaged or hostile. A folder that has its final name is whole.

extract() reads the whole archive before it writes anything, and refuses what no data set needs: links, devices, names
that lead out of the folder or could do so on Windows, and sizes that no data set has. Then it writes into a folder
beside the target and renames that. Modes, owners and times in the archive are ignored.
"""

import functools
import lzma
import os
import re
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cxda_jax.data.store import SPLITS, written_whole
from cxda_jax.disk.reading import reason, refuse_html, system_fault
from cxda_jax.errors import UserError, brief
from cxda_jax.progress import Counter

LIMIT = 100 * 2**30  # bytes; iWildCam, the largest data set, has about 25 GB
MEMBERS = 5_000_000
RATIO = 200  # most unpacked bytes for each packed byte ...
SMALL = 64 * 2**20  # ... of an archive that has more unpacked bytes than this
BLOCK = 4096  # a file system may round the size of a file up to a multiple of this
CHUNK, MB = 2**20, 10**6

# An absolute name, one with a drive letter, a backslash or a null byte, and one with a part "..".
_LEADS_OUT = re.compile(r"/|[A-Za-z]:|.*[\\\0]|(.*/)?\.\.(/|$)", re.DOTALL)
_DAMAGED = (
    EOFError, OSError, OverflowError, RuntimeError, ValueError, lzma.LZMAError, struct.error, tarfile.TarError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip


class Member(NamedTuple):
    """A file or folder in an archive. extract(path=folder) writes it there, under its name."""

    name: str
    size: int
    is_file: bool
    extract: Callable[..., Any]


def extract(archive: Path, target: Path) -> None:
    """Extracts a zip, or a tar that is plain or packed by gzip, bzip2 or xz, as the new folder `target`.

    If the archive holds a folder of the target's name, that folder becomes the target, and what lies beside it is
    dropped. A single folder of another name becomes the target too, unless it has the name of a split. If another
    process finished the same target first, its copy stays.
    """
    if target.exists():
        raise UserError(f"{target}: is there already; delete it to extract {archive.name} again")
    try:
        refuse_html(archive)
        total, count = _total(archive)
        with written_whole(target, choose=functools.partial(_unwrapped, name=target.name)) as folder:
            needed, free = total + BLOCK * count, shutil.disk_usage(target.parent).free
            if needed > free:
                what = f"needs {_gigabytes(needed)} in {target.parent}, which has {_gigabytes(free)} left"
                raise UserError(f"{archive}: {what}; make room")
            _write(archive, folder, Counter(f"MB of {archive.name}", total // MB))
    except UserError:
        raise
    except _DAMAGED as e:
        if not isinstance(e, OSError) or e.errno is None:  # gzip and bzip2 raise the latter
            what = f"damaged, cut short or not an archive ({reason(e)})"
            raise UserError(f"{archive}: {what}; fetch it again") from None
        path = archive if e.filename == str(archive) else target
        raise UserError(system_fault(e, path, f"extract {archive.name} by hand, and point raw_dir there")) from None


def _unwrapped(folder: Path, name: str) -> Path:
    """The folder inside that holds everything, if there is one."""
    tops = [p for p in folder.iterdir() if p.name != "__MACOSX" and not p.name.startswith(".")]
    if (folder / name).is_dir():
        return folder / name
    return tops[0] if len(tops) == 1 and tops[0].is_dir() and tops[0].name not in SPLITS else folder


def _total(archive: Path) -> tuple[int, int]:
    """Bytes and number of the members. Raises a UserError where one of them must not be written."""
    packed, total, count, files = archive.stat().st_size, 0, 0, 0
    for member in _members(archive):
        total, count, files = total + member.size, count + 1, files + member.is_file
        if count > MEMBERS:
            raise _refused(archive, f"holds more than {MEMBERS} files")
        if member.size < 0 or total > LIMIT:
            raise _refused(archive, f"unpacks to more than {_gigabytes(LIMIT)}")
        if total > max(SMALL, RATIO * packed):
            raise _refused(archive, f"unpacks to more than {RATIO} times its size")
        # tarfile and zipfile would write some of these inside the folder, under other names.
        if _LEADS_OUT.match(member.name):
            raise _refused(archive, f"{_shown(member.name)} leads out of the folder")
    if not files:
        raise UserError(f"{archive}: holds no files; fetch it again")
    return total, count


def _write(archive: Path, folder: Path, tell: Callable[[int], None]) -> None:
    done, told = 0, -1
    for member in _members(archive):
        try:
            member.extract(path=folder)
        except (FileExistsError, IsADirectoryError, NotADirectoryError):
            raise _refused(archive, f"{_shown(member.name)} is both a file and a folder") from None
        done += member.size
        if done // MB > told:
            told = done // MB
            tell(told)
        os.utime(folder)  # or another process could take the folder for abandoned


def _members(archive: Path) -> Iterator[Member]:
    with open(archive, "rb") as file:
        is_zip = file.read(2) == b"PK"
    return _zip_members(archive) if is_zip else _tar_members(archive)


def _zip_members(archive: Path) -> Iterator[Member]:
    with zipfile.ZipFile(archive) as opened:
        for info in opened.infolist():
            if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):  # 0: made without modes
                raise _refused(archive, f"{_shown(info.filename)} is a link or a device")
            extract_one = functools.partial(opened.extract, info)
            yield Member(info.filename, info.file_size, not info.is_dir(), extract_one)


def _tar_members(archive: Path) -> Iterator[Member]:
    with tarfile.open(archive) as file:
        opened: Any = file  # its `members` are in no stub
        while (info := opened.next()) is not None:
            opened.members.clear()  # or all of them would stay in memory
            if not info.isfile() and not info.isdir():
                raise _refused(archive, f"{_shown(info.name)} is a link or a device")
            extract_one = functools.partial(opened.extract, info, set_attrs=False, filter=tarfile.data_filter)
            yield Member(info.name, info.size, info.isfile(), extract_one)
        # tarfile takes a header that is damaged or cut short for the end of the archive.
        opened.fileobj.seek(opened.offset)
        rest = opened.fileobj.read(CHUNK)  # reading to the very end also compares the checksum of the packing
        if any(rest[: tarfile.BLOCKSIZE]) or not tarfile.BLOCKSIZE <= len(rest) < CHUNK:
            raise EOFError("the end of the archive is not where it should be")


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def _shown(name: str) -> str:
    """A name from an archive, without characters that could steer a terminal."""
    return ascii(brief(name, 50))


def _refused(archive: Path, fault: str) -> UserError:
    return UserError(f"{archive}: {fault}; refused, extract it by hand if you trust it")
