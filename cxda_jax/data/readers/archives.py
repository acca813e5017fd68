"""Extracts archives that may be cut short, damaged or hostile. A folder that has its final name is whole.

extract() writes into a folder beside the target and renames that. It refuses what no data set needs: links, devices,
names that lead out of the folder or could do so on Windows, and sizes that no data set has. Modes, owners and times in
the archive are ignored.
"""

import functools
import lzma
import os
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from cxda_jax.data.store import SPLITS, written_whole
from cxda_jax.disk.reading import reason, refuse_html, system_fault
from cxda_jax.errors import UserError, brief
from cxda_jax.machine.progress import Counter

LIMIT = 100 * 2**30  # bytes; iWildCam, the largest data set, has about 25 GB
MEMBERS = 5_000_000
RATIO = 200  # most unpacked bytes for each packed byte ...
SMALL = 64 * 2**20  # ... of an archive that has more unpacked bytes than this
CHUNK, MB = 2**20, 10**6

# An absolute name, one with a drive letter, a backslash or a null byte, and one with a part "..".
_LEADS_OUT = re.compile(r"/|[A-Za-z]:|.*[\\\0]|(.*/)?\.\.(/|$)", re.DOTALL)
_DAMAGED = (
    EOFError, OSError, OverflowError, RuntimeError, ValueError, lzma.LZMAError, struct.error, tarfile.TarError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip


class Member(NamedTuple):
    """A file, folder or other thing in an archive. extract(path=folder) writes it there, under its name."""

    name: str
    size: int
    kind: str  # file, folder or other
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
        with (
            open(archive, "rb") as file,
            written_whole(target, choose=functools.partial(_unwrapped, name=target.name)) as folder,
        ):
            _write(archive, file, folder)
    except UserError:
        raise
    except _DAMAGED as e:
        # gzip and bzip2 raise errors without a number; the others say that a name is both a file and a folder.
        names = isinstance(e, FileExistsError | IsADirectoryError | NotADirectoryError)
        if names or not isinstance(e, OSError) or e.errno is None:
            what = f"damaged, cut short or not an archive ({reason(e)})"
            raise UserError(f"{archive}: {what}; fetch it again") from None
        path = archive if e.filename == str(archive) else target
        raise UserError(system_fault(e, path, f"extract {archive.name} by hand, and point --raw_dir there")) from None


def _unwrapped(folder: Path, name: str) -> Path:
    """The folder inside that holds everything, if there is one."""
    tops = [p for p in folder.iterdir() if p.name != "__MACOSX" and not p.name.startswith(".")]
    if (folder / name).is_dir():
        return folder / name
    return tops[0] if len(tops) == 1 and tops[0].is_dir() and tops[0].name not in SPLITS else folder


def _write(archive: Path, file: IO[bytes], folder: Path) -> None:
    packed, total, files = archive.stat().st_size, 0, 0
    tell = Counter(f"MB of {archive.name}", packed // MB)
    is_zip = file.read(2) == b"PK"
    file.seek(0)
    for count, member in enumerate(_zip_members(file) if is_zip else _tar_members(file), 1):
        total, files = total + member.size, files + (member.kind == "file")
        name = ascii(brief(member.name, 50))  # without characters that could steer a terminal
        faults = {
            f"holds more than {MEMBERS} files": count > MEMBERS,
            f"unpacks to more than {LIMIT / 1e9:.1f} GB": member.size < 0 or total > LIMIT,
            f"unpacks to more than {RATIO} times its size": total > max(SMALL, RATIO * packed),
            f"{name} leads out of the folder": _LEADS_OUT.match(member.name),
            f"{name} is a link or a device": member.kind == "other",
        }
        if fault := next((fault for fault, found in faults.items() if found), ""):
            raise UserError(f"{archive}: {fault}; refused, extract it by hand if you trust it")
        member.extract(path=folder)
        tell(file.tell() // MB)
        os.utime(folder)  # or another process could take the folder for abandoned
    if not files:
        raise UserError(f"{archive}: holds no files; fetch it again")


def _zip_members(file: IO[bytes]) -> Iterator[Member]:
    with zipfile.ZipFile(file) as opened:
        for info in opened.infolist():
            plain = stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG, stat.S_IFDIR)  # 0: made without modes
            kind = "other" if not plain else "folder" if info.is_dir() else "file"
            yield Member(info.filename, info.file_size, kind, functools.partial(opened.extract, info))


def _tar_members(file: IO[bytes]) -> Iterator[Member]:
    with tarfile.open(fileobj=file) as tar:
        opened: Any = tar  # its `members` are in no stub
        while (info := opened.next()) is not None:
            opened.members.clear()  # or all of them would stay in memory
            kind = "file" if info.isfile() else "folder" if info.isdir() else "other"
            extract_one = functools.partial(opened.extract, info, set_attrs=False, filter=tarfile.data_filter)
            yield Member(info.name, info.size, kind, extract_one)
        # tarfile takes a header that is damaged or cut short for the end of the archive.
        opened.fileobj.seek(opened.offset)
        rest = opened.fileobj.read(CHUNK)  # reading to the very end also compares the checksum of the packing
        if any(rest[: tarfile.BLOCKSIZE]) or not tarfile.BLOCKSIZE <= len(rest) < CHUNK:
            raise EOFError("the end of the archive is not where it should be")
