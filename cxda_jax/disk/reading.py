"""Reading files that a user may have touched, or received. A wrong file becomes a UserError of one line."""

import csv
import errno
import json
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cxda_jax.errors import UserError, brief

CHECK, MOST = "crc32", sys.float_info.max
_SPECIAL = {
    stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}  # fmt: skip
# What helps against what the system says.
_SYSTEM = {
    "No space left on device": "free some space and run the same command again",
    "Disk quota exceeded": "free some space and run the same command again",
    "File too large": "raise the limit on the size of files (ulimit -f), or choose another folder",
    "Read-only file system": "choose a folder that can be written to",
    "Permission denied": "choose another folder, or change its rights",
    "No such file or directory": "make the folder that it should lie in, or bring it back",
}


def reason(error: BaseException, most: int = 80) -> str:
    """The text of an exception on one line. Of a library's long message only the system's own words stay,
    such as "No space left on device"."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror  # the rest repeats the path
    elif words := next((words for words in _SYSTEM if len(text) > most and words.lower() in text.lower()), ""):
        text = words
    elif isinstance(error, KeyError):
        text = f"no {text}"
    elif isinstance(error, RecursionError):
        text = "nested too deeply"
    return brief(" ".join(text.split()), most) or type(error).__name__


def system_fault(error: OSError, path: Path | None = None, fix: str = "") -> str:
    """A line that names the path, what the system refused there, and a fix: `fix`, unless the disk is full."""
    if not fix or error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = _SYSTEM.get(error.strerror or "", "") or "--debug shows where"
    return f"{path or error.filename or 'a file'}: {reason(error)}; {fix}"


def read_object(path: Path, fix: str) -> dict[str, Any]:
    """A file that holds one JSON object."""
    insist_on_file(path, fix)
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{path}: not readable as JSON ({reason(e)}); {fix}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}, expected a JSON object; {fix}")
    return content


def read_lines(path: Path, damaged: Callable[[list[int]], None] = lambda numbers: None) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl: objects of finite numbers, with a whole number "step".

    A damaged line is left out, and `damaged` is called with the numbers of all such lines. A last line that is cut
    short is no damage: a killed writer leaves one. Files of older versions have no checksums, so none is asked for
    there.
    """
    records, bad = [], []
    insist_on_file(path, "delete it, or bring it back")
    lines = path.read_bytes().split(b"\n")
    checked = any(CHECK.encode() in line for line in lines)
    for number, line in enumerate(lines, 1):
        try:
            value: Any = json.loads(line.decode())
        except (ValueError, RecursionError):
            value = None
        if _is_metrics(value) and value.pop(CHECK, None) == (_checksum(value) if checked else None):
            records.append(value)
        elif line and (number < len(lines) or b"}" in line):
            bad.append(number)
    if bad:
        damaged(bad)
    return records


def metrics_line(record: Mapping[str, float]) -> str:
    """The line of a metrics.jsonl that holds these numbers, and their checksum."""
    return json.dumps({**record, CHECK: _checksum(record)}) + "\n"


def _checksum(record: Mapping[str, float]) -> int:
    return zlib.crc32(json.dumps(record).encode())


def _is_metrics(value: Any) -> bool:
    numbers = isinstance(value, dict) and all(type(v) in (int, float) and abs(v) <= MOST for v in value.values())
    return numbers and type(value.get("step")) is int and value["step"] >= 0


def read_table(
    path: Path, columns: Sequence[str], fix: str, also: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and fields of each line of a CSV file whose header names `columns`. A field that a line lacks is None.

    `also` has other names of columns, and the names that these have here.
    """
    refuse_html(path)
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets begin UTF-8 with a mark
            rows = csv.DictReader(file)
            found = rows.fieldnames or ()
            rows.fieldnames = [also.get(name, name) if also.get(name) not in found else name for name in found]
            if lacking := [c for c in columns if c not in rows.fieldnames]:
                lacks, has = (", ".join(map(repr, names)) for names in (lacking, found))
                raise UserError(f"{path}: no column {lacks} beside {brief(has or 'none', 60)}; {fix}")
            yield from ((rows.line_num, row) for row in rows)
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise UserError(f"{path}: not readable as CSV ({reason(e)}); {fix}") from None


def insist_on_file(path: Path, fix: str) -> None:
    """Raises a UserError where there is no file, or one that reading could wait for without end, such as a pipe."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise UserError(f"{path}: missing; {fix}") from None
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: not readable ({reason(e)}); {fix}") from None
    if not stat.S_ISREG(mode):
        what = next((what for is_so, what in _SPECIAL.items() if is_so(mode)), "something else")
        raise UserError(f"{path}: {what}, not a file; {fix}")


def refuse_html(path: Path) -> None:
    """Raises a UserError where a path is no file, or holds the web page that a dead link serves in its place."""
    insist_on_file(path, "extract the download again")
    try:
        with open(path, "rb") as file:
            start = file.read(512).lstrip().lower()
    except OSError as e:
        raise UserError(f"{path}: not readable ({reason(e)}); fetch or extract it again") from None
    if start.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        what = "a web page (HTML), not the data; the link asks for a confirmation or is dead, fetch it again"
        raise UserError(f"{path}: {what}")
