"""Downloads and archives that may be cut short, wrong or hostile: what appears under its final name is whole.

extract() measures an archive before it writes anything, refuses what no data set needs, and writes into a sibling folder
that is renamed at the end. Only plain files and folders come out, with no more than their bytes: links of any kind, devices,
names that lead elsewhere, and sizes that no data set has are refused; owners, modes (setuid bits too) and times are dropped.

fetch() receives into a sibling file, `NAME.part`, goes on from there after a dropped connection or in a later run, and
renames it when size and hash are the published ones.
"""

import bz2
import contextlib
import errno
import gzip
import hashlib
import http.client
import lzma
import os
import re
import shutil
import ssl
import stat
import struct
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

from cxda_jax.data.store import drop_abandoned
from cxda_jax.progress import Counter, duration
from cxda_jax.reading import reason, refuse_html
from cxda_jax.types import UserError, brief

LIMIT = 100 * 2**30  # bytes; iWildCam, the largest, has about 25 GB
MEMBERS = 5_000_000
RATIO, SMALL = 200, 64 * 2**20  # unpacked to packed bytes, judged from this many unpacked bytes on
HEADER = 2**20  # bytes of names and notes about one member of a tar, which are read into memory
BLOCK = 4096  # bytes that the disk may round a file up to
CHUNK, MB = 2**20, 10**6
TRIES = 5  # without a new byte in between
PAUSE, TIMEOUT = 1.0, 30.0  # seconds before the second try, doubled each time; seconds of silence on a connection

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
    If another process finished the same target first, its copy stays.
    """
    if target.exists():
        raise UserError(f"{target}: is there already; delete it to extract {archive.name} again")
    try:
        refuse_html(archive)
        total, count = _measure(archive, limit)
        target.parent.mkdir(parents=True, exist_ok=True)
        drop_abandoned(target)
        _insist_on_room(archive, target.parent, total + BLOCK * count)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
        try:
            whole = partial / target.name  # a folder of its own, since mkdtemp's is closed to others
            _write(archive, whole, limit, _megabytes(report, archive.name, total))
            inner = whole / target.name
            try:
                (inner if inner.is_dir() else whole).rename(target)
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
        raise _disk_fault(path, e, f"extract {archive.name} by hand, and point --raw_dir there") from None


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
                raise _refused(archive, f"unpacks to more than {_gigabytes(limit)}")
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
                raise _refused(archive, f"unpacks to more than {_gigabytes(limit)}")


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


def fetch(url: str, path: Path, size: int | None = None, digest: str | None = None, report: Report = Counter) -> None:
    """Downloads `url` to `path`; `size` in bytes and `digest`, "sha256:..." or "md5:...", where they are published.

    A file that is there already is checked instead.
    """
    part = path.with_name(path.name + ".part")
    if urlsplit(url).scheme not in ("https", "http", "file"):
        raise UserError(f"{path}: {_host(url)} is not an https, http or file address; fetch it by hand")
    try:
        if path.exists():
            if fault := _fault_of(path, size, digest):
                raise UserError(f"{path}: {fault}; delete it to fetch it again")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        _download(url, part, size, report)
        if fault := _fault_of(part, size, digest):
            part.unlink()
            raise UserError(f"{path}: {fault}; what {_host(url)} sent is deleted, run again or fetch it by hand")
        part.replace(path)
    except OSError as e:
        raise _disk_fault(path, e, "give another --raw_dir") from None


class _Dropped(Exception):
    """A fault that may pass; what has come so far stays."""


def _download(url: str, part: Path, size: int | None, report: Report) -> None:
    failures, furthest = 0, _length(part)
    while True:
        try:
            if size is None or _length(part) != size:
                _receive(url, part, size, report)
            return
        except _Dropped as e:
            # Compared with the furthest ever, or a server that always has one start anew would keep this going for ever.
            failures = 1 if _length(part) > furthest else failures + 1
            furthest, why = max(furthest, _length(part)), reason(e)
        if failures == TRIES:
            raise UserError(f"{part}: {why}, {TRIES} times; run again to go on from here, or fetch it by hand")
        wait = PAUSE * 2 ** (failures - 1)
        print(f"{part.name}: {why}; next try in {duration(wait)}", flush=True)
        time.sleep(wait)


def _receive(url: str, part: Path, size: int | None, report: Report) -> None:
    """One connection: from the end of what is there if the server can, or else from the beginning."""
    start = _length(part)
    with contextlib.closing(_answer(url, part, start)) as response:
        start, total = _span(response, part, start)
        expected = size if total is None else total
        most = LIMIT if expected is None else expected
        fault = f"{expected} bytes, expected {size}" if size not in (None, expected) else ""
        _insist_on_room(part, part.parent, max(0, (expected or 0) - start))
        tell, done = _megabytes(report, part.name.removesuffix(".part"), expected or 0), start
        with open(part, "ab" if start else "wb") as file:
            while chunk := _read(response):
                file.write(chunk)
                if not done:
                    file.flush()
                    _refuse_page(part)
                done += len(chunk)
                if fault or done > most:
                    part.unlink()
                    fault = fault or f"more than {most} bytes"
                    raise UserError(f"{part}: {_host(url)} sends {fault}; fetch it by hand")
                tell(done)
            file.flush()
            os.fsync(file.fileno())
    if expected is not None and done < expected:
        raise _Dropped(f"the connection ended after {done} of {expected} bytes")


def _answer(url: str, part: Path, start: int) -> Any:
    headers = {"User-Agent": "cxda_jax"} | ({"Range": f"bytes={start}-"} if start else {})
    opener = urllib.request.build_opener(_WebOnly)
    try:
        return opener.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as e:
        e.close()
        if e.code == 416:  # no such range: what is there is of another file, or all of it without a known size
            part.unlink()
            raise _Dropped(f"{_host(url)} has nothing after {start} bytes, starting anew") from None
        if e.code in (408, 429) or e.code >= 500:
            raise _Dropped(f"{_host(url)} answers {e.code} {e.reason}") from None
        what = "a redirection that is not followed" if e.code < 400 else brief(str(e.reason), 40)
        raise UserError(f"{part}: {_host(url)} answers {e.code}, {what}; fetch it by hand") from None
    except (http.client.HTTPException, OSError) as e:
        cause = getattr(e, "reason", e)  # of a URLError, which wraps it
        why = reason(cause) if isinstance(cause, Exception) else brief(str(cause))
        if isinstance(cause, ssl.SSLCertVerificationError) or urlsplit(url).scheme == "file":
            raise UserError(f"{part}: {_host(url)} cannot be read ({why}); fetch it by hand") from None
        raise _Dropped(f"{_host(url)}: {why}") from None


class _WebOnly(urllib.request.HTTPRedirectHandler):
    """urllib itself would also follow to ftp."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if urlsplit(newurl).scheme not in ("https", "http"):
            raise urllib.error.HTTPError(newurl, code, msg, headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _span(response: Any, part: Path, start: int) -> tuple[int, int | None]:
    """Where in the file the body begins, and the file's size if the server tells."""
    length = response.headers.get("Content-Length", "")
    total = int(length) if length.isdigit() else None
    if response.status != 206:
        return 0, total
    told = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "").strip())
    if not told or int(told[1]) != start:
        part.unlink(missing_ok=True)
        raise _Dropped("the server sent another range, starting anew")
    whole = int(told[2]) if told[2] != "*" else None
    return start, whole if whole is not None or total is None else start + total


def _read(response: Any) -> bytes:
    try:
        return response.read1(CHUNK)
    except (http.client.HTTPException, OSError) as e:
        raise _Dropped(f"the connection broke off ({reason(e, 40)})") from None


def _refuse_page(part: Path) -> None:
    try:
        refuse_html(part)
    except UserError:
        part.unlink()
        raise


def _fault_of(file: Path, size: int | None, digest: str | None) -> str:
    """What is wrong with a file that ought to have this size and hash, if anything."""
    if size is not None and _length(file) != size:
        return f"{_length(file)} bytes, expected {size}"
    if digest is None:
        return ""
    kind, _, wanted = digest.partition(":")
    with open(file, "rb") as opened:
        found = hashlib.file_digest(opened, kind).hexdigest()
    return "" if found == wanted.lower() else f"{kind} is {found[:12]}..., published is {wanted[:12]}..."


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _host(url: str) -> str:
    parts = urlsplit(url)
    return parts.hostname or f"{parts.scheme}:{parts.path}"


def _megabytes(report: Report, name: str, total: int) -> Callable[[int], None]:
    """tell(bytes done), which passes on whole megabytes that have grown: a Counter divides by the growth."""
    tell, last = report(f"MB of {name}", total // MB), -1

    def grown(done: int) -> None:
        nonlocal last
        if done // MB > last:
            last = done // MB
            tell(last)

    return grown


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def _shown(name: str) -> str:
    """A name from an archive, without what could steer a terminal."""
    return ascii(brief(name, 50))


def _insist_on_room(file: Path, folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(f"{file}: needs {_gigabytes(needed)} in {folder}, which has {_gigabytes(free)} left; make room")


def _refused(archive: Path, fault: str) -> UserError:
    return UserError(f"{archive}: {fault}; refused, extract it by hand if you trust it")


def _damaged(archive: Path, error: Exception) -> UserError:
    return UserError(f"{archive}: damaged, cut short or not an archive ({reason(error)}); fetch it again")


def _disk_fault(path: Path, error: OSError, fix: str) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"{path}: the disk is full; make room and run again")
    return UserError(f"{path}: {reason(error)}; {fix}")
