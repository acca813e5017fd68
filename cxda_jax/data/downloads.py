"""Downloads that may break off, be something else or be tampered with: what appears under its final name is whole.

fetch() receives into a sibling file, `NAME.part`, goes on from there after a dropped connection or in a later run, and
renames it when size and hash are the published ones.
"""

import contextlib
import hashlib
import http.client
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cxda_jax.data.archives import CHUNK, LIMIT, Report, insist_on_room, megabytes
from cxda_jax.progress import Counter, duration
from cxda_jax.reading import reason, refuse_html, system_fault
from cxda_jax.types import UserError, brief

TRIES = 5  # without a new byte in between
PAUSE, TIMEOUT = 1.0, 30.0  # seconds before the second try, doubled each time; seconds of silence on a connection


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
        raise UserError(system_fault(e, path, "give another raw_dir")) from None


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
        insist_on_room(part, part.parent, max(0, (expected or 0) - start))
        tell, done = megabytes(report, part.name.removesuffix(".part"), expected or 0), start
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
