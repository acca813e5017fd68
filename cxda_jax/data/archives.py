"""Archives that may be cut short, wrong or hostile: what appears under its final name is whole.

extract() measures an archive before it writes anything, refuses what no data set needs, and writes into a sibling folder
that is renamed at the end. Only plain files and folders come out, with no more than their bytes: links of any kind, devices,
names that lead elsewhere, and sizes that no data set has are refused; owners, modes (setuid bits too) and times are dropped.
"""

import bz2
import contextlib
import gzip
import lzma
import os
import re
import shutil
import stat
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, Any, NamedTuple

from cxda_jax.data.store import SPLITS, drop_abandoned
from cxda_jax.progress import Counter
from cxda_jax.reading import reason, refuse_html, system_fault
from cxda_jax.types import UserError, brief

LIMIT = 100 * 2**30  # bytes; iWildCam, the largest, has about 25 GB
MEMBERS = 5_000_000
RATIO, SMALL = 200, 64 * 2**20  # unpacked to packed bytes, judged from this many unpacked bytes on
HEADER = 2**20  # bytes of names and notes about one member of a tar, which are read into memory
BLOCK = 4096  # bytes that the disk may round a file up to
CHUNK, MB = 2**20, 10**6

Report = Callable[[str, int], Callable[[int], None]]  # (what, total) -> tell(done)

_DAMAGED = (
    EOFError, NotImplementedError, OverflowError, RecursionError, ValueError, lzma.LZMAError, struct.error,
    tarfile.TarError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
_PACKINGS: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open,
}  # fmt: skip
# Members of a tar that hold a long name of, or notes about, the next one.
_NOTES = (
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
)  # fmt: skip


class Member(NamedTuple):
    """What an archive says of one thing in it."""

    name: str
    kind: str  # "file", "folder", or what else it is
    size: int
    open: Callable[[], IO[bytes] | None]


def extract(archive: Path, target: Path, limit: int = LIMIT, report: Report = Counter) -> None:
    """Extracts a zip, or a tar plain or packed by gzip, bzip2 or xz, as the new folder `target`.

    If the archive holds a folder of the target's name, that is what becomes the target; what lies beside it is dropped.
    So does a single folder of another name, unless it is that of a split.
    If another process finished the same target first, its copy stays.
    """
    if target.exists():
        raise UserError(f"{target}: is there already; delete it to extract {archive.name} again")
    try:
        refuse_html(archive)
        total, count = _measure(archive, limit)
        target.parent.mkdir(parents=True, exist_ok=True)
        drop_abandoned(target)
        insist_on_room(archive, target.parent, total + BLOCK * count)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
        try:
            whole = partial / target.name  # a folder of its own, since mkdtemp's is closed to others
            _write(archive, whole, limit, megabytes(report, archive.name, total))
            try:
                _unwrapped(whole).rename(target)
            except OSError:
                if not target.is_dir():
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except UserError:
        raise
    except _DAMAGED as e:
        raise _damaged(archive, e) from None
    except OSError as e:
        if e.errno is None:  # the unpackers' own
            raise _damaged(archive, e) from None
        path = archive if e.filename == str(archive) else target
        fix = f"extract {archive.name} by hand, and point raw_dir there"
        raise UserError(system_fault(e, path, fix)) from None


def _unwrapped(folder: Path) -> Path:
    tops = [p for p in folder.iterdir() if p.name != "__MACOSX" and not p.name.startswith(".")]
    if (named := folder / folder.name).is_dir():
        return named
    return tops[0] if len(tops) == 1 and tops[0].is_dir() and tops[0].name not in SPLITS else folder


def _measure(archive: Path, limit: int) -> tuple[int, int]:
    """Bytes and number of the members, all of which are fit to be written."""
    total = count = files = 0
    with contextlib.closing(_checked(archive, limit)) as members:
        for _, member in members:
            total, count, files = total + member.size, count + 1, files + (member.kind == "file")
    if not files:
        raise UserError(f"{archive}: holds no files; fetch it again")
    return total, count


def _write(archive: Path, folder: Path, limit: int, tell: Callable[[int], None]) -> None:
    done = 0
    folder.mkdir()
    with contextlib.closing(_checked(archive, limit)) as members:
        for parts, member in members:
            place = folder.joinpath(*parts)
            try:
                if member.kind == "folder":
                    place.mkdir(parents=True, exist_ok=True)
                    continue
                place.parent.mkdir(parents=True, exist_ok=True)
                with open(place, "wb") as file:
                    for chunk in _chunks(archive, member):
                        file.write(chunk)
                        done += len(chunk)
                        tell(done)
                        os.utime(folder.parent)  # a sign of life to those who drop what was abandoned
            except (FileExistsError, IsADirectoryError, NotADirectoryError):
                raise _refused(archive, f"{_shown(member.name)} is both a file and a folder") from None


def _chunks(archive: Path, member: Member) -> Generator[bytes, None, None]:
    """A member's bytes: as many as it declares, or a fault."""
    left, source = member.size, member.open()
    if source is None:
        raise EOFError(f"{_shown(member.name)} is missing")
    with source:
        while chunk := source.read(CHUNK):
            left -= len(chunk)
            if left < 0:
                raise _refused(archive, f"{_shown(member.name)} is larger than it declares")
            yield chunk
    if left:
        raise EOFError(f"{_shown(member.name)} lacks {left} bytes")


def _checked(archive: Path, limit: int) -> Generator[tuple[tuple[str, ...], Member], None, None]:
    """The members that are fit to be written, and where."""
    packed, total = archive.stat().st_size, 0
    with open(archive, "rb") as file:
        start = file.read(6)
    members = _zip_members(archive) if start.startswith(b"PK") else _tar_members(archive, start, limit)
    with contextlib.closing(members):
        for number, member in enumerate(members, 1):
            total += member.size
            if number > MEMBERS:
                raise _refused(archive, f"holds more than {MEMBERS} files")
            if member.size < 0 or total > limit:
                raise _refused(archive, f"unpacks to more than {gigabytes(limit)}")
            if total > max(SMALL, RATIO * packed):
                raise _refused(archive, f"unpacks to more than {RATIO} times its size")
            if member.kind not in ("file", "folder"):
                raise _refused(archive, f"{_shown(member.name)} is {member.kind}")
            parts = _parts(archive, member.name)
            if parts:
                yield parts, member
            elif member.kind == "file":
                raise _refused(archive, "holds a file without a name")


def _parts(archive: Path, name: str) -> tuple[str, ...]:
    parts = name.split("/")
    # Backslashes and drive letters mean nothing here; they are for machines where they do.
    if name.startswith("/") or ".." in parts or "\\" in name or "\0" in name or re.match("[A-Za-z]:", name):
        raise _refused(archive, f"{_shown(name)} leads out of the folder")
    return tuple(part for part in parts if part not in ("", "."))


def _zip_members(archive: Path) -> Generator[Member, None, None]:
    with zipfile.ZipFile(archive) as opened:
        for info in opened.infolist():
            mode = stat.S_IFMT(info.external_attr >> 16)  # 0 where the archive was made without modes
            kind = "folder" if info.is_dir() else "file"
            if info.flag_bits & 1:
                kind = "encrypted"
            elif mode not in (0, stat.S_IFREG, stat.S_IFDIR):
                kind = "a link" if mode == stat.S_IFLNK else "a device or pipe"
            yield Member(info.filename, kind, info.file_size, lambda info=info: opened.open(info))


def _tar_members(archive: Path, start: bytes, limit: int) -> Generator[Member, None, None]:
    with contextlib.ExitStack() as stack:
        file: Any = stack.enter_context(open(archive, "rb"))
        for mark, unpacked in _PACKINGS.items():
            if start.startswith(mark):
                file = stack.enter_context(unpacked(file))
        tar: Any = stack.enter_context(tarfile.open(fileobj=file, mode="r|", tarinfo=_Header))
        while (info := tar.next()) is not None:
            tar.members.clear()  # which would otherwise hold all of them
            if info.isdir():
                kind = "folder"
            elif info.issym() or info.islnk():
                kind = "a link"
            elif not info.isreg():
                kind = "a device or pipe"
            else:
                kind = "sparse" if info.issparse() else "file"
            yield Member(info.name, kind, info.size, lambda info=info: tar.extractfile(info))
        rest = 0
        while chunk := file.read(CHUNK):  # to the packing's own checksum
            rest += len(chunk)
            if rest > limit:
                raise _refused(archive, f"unpacks to more than {gigabytes(limit)}")


class _Header(tarfile.TarInfo):
    """tarfile takes a header that is cut short or damaged for the end of the archive; only the mark of the end is that."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> "_Header":
        try:
            info = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as e:
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):
                raise
            raise tarfile.ReadError(str(e)) from None
        if info.size < 0 or info.type in _NOTES and info.size > HEADER:
            raise tarfile.ReadError("a header of a size that none has")
        return info


def megabytes(report: Report, name: str, total: int) -> Callable[[int], None]:
    """tell(bytes done), which passes on whole megabytes that have grown: a Counter divides by the growth."""
    tell, last = report(f"MB of {name}", total // MB), -1

    def grown(done: int) -> None:
        nonlocal last
        if done // MB > last:
            last = done // MB
            tell(last)

    return grown


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def _shown(name: str) -> str:
    """A name from an archive, without what could steer a terminal."""
    return ascii(brief(name, 50))


def insist_on_room(file: Path, folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(f"{file}: needs {gigabytes(needed)} in {folder}, which has {gigabytes(free)} left; make room")


def _refused(archive: Path, fault: str) -> UserError:
    return UserError(f"{archive}: {fault}; refused, extract it by hand if you trust it")


def _damaged(archive: Path, error: Exception) -> UserError:
    return UserError(f"{archive}: damaged, cut short or not an archive ({reason(error)}); fetch it again")
