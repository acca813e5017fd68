"""FEMNIST as LEAF writes it and ARM splits it: a domain is a writer.

    <raw_dir>/femnist/{train,val,test}/*.json        or femnist-data/, as the published archive has it
    {"users": [id, ...], "num_samples": [n, ...], "user_data": {id: {"x": [[784 numbers in 0..1]], "y": [0..61]}}}

There may be any number of files; names other than *.json are ignored. In each split, writers are
sorted by their ids. Without val/, the first 50 writers of train/ in file order validate, as if LEAF's
first file of 50 writers were moved to val/.

LEAF may put all writers in one large file. So the text is first searched for the writers' places,
and then parsed one writer at a time.
"""

import functools
import json
import mmap
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cxda_jax.data.published import PUBLISHED
from cxda_jax.data.readers.raw import Piece, RawData, Rows, find_folder, split_checks, visible
from cxda_jax.data.store import SPLITS, StoreInfo
from cxda_jax.disk.reading import reason, refuse_html
from cxda_jax.errors import UserError, brief

VAL_WRITERS = 50
INFO = StoreInfo(
    name="femnist",
    class_names=tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
    mean=(1.0,),  # the network sees 1 - x: bright ink on black, and nothing else is normalised
    std=(-1.0,),
    provenance="FEMNIST, LEAF's JSON files",
    fit="pad",
)

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]]')


class Writer(NamedTuple):
    """A writer, and the place of the images in a file: bytes start:stop."""

    user: str
    images: int
    file: Path
    start: int
    stop: int


def find(raw_dir: Path) -> RawData:
    root = find_folder(raw_dir, "femnist", "femnist-data")
    warnings, marks, seen = [], (), {}
    there = [split for split in SPLITS if split != "val" or (root / "val").is_dir()]
    writers = {split: _writers_of_split(root / split, seen) for split in there}
    if "val" not in writers:
        count = min(VAL_WRITERS, len(writers["train"]) // 2)
        writers["val"], writers["train"] = writers["train"][:count], writers["train"][count:]
        warnings.append(f"{root / 'val'}: no such folder; the first {count} writers of train/ in file order validate")
        marks = ("val from train",)
    pieces = [
        Piece(w.user, split, w.images, functools.partial(read, w)) for split in SPLITS for w in sorted(writers[split])
    ]
    checks = split_checks(pieces, PUBLISHED["femnist"].domains, tasks=(420, 420))
    return RawData(INFO._replace(marks=marks), pieces, checks, warnings)


def _writers_of_split(folder: Path, seen: dict[str, Path]) -> list[Writer]:
    """The writers in all files of a split, in the order of the files. `seen` gets the file of each, for all splits."""
    files = visible(folder.glob("*.json"))
    if not files:
        raise UserError(f"{folder}: no .json files; FEMNIST is read from femnist/train, femnist/val and femnist/test")
    writers = []
    for file in files:
        for writer in _writers_of(file):
            if (other := seen.setdefault(writer.user, file)) != file:
                what = f"writer {brief(writer.user, 20)} is also in {other.parent.name}/{other.name}"
                raise UserError(f"{file}: {what}; a writer is in one file, keep one of the two")
            writers.append(writer)
    return writers


def _writers_of(file: Path) -> list[Writer]:
    refuse_html(file)
    try:
        with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as text:
            spans = dict(_spans(text))
            users, counts = (json.loads(text[slice(*spans[name,])]) for name in ("users", "num_samples"))
        if not isinstance(users, list) or not isinstance(counts, list) or len(users) != len(counts):
            raise ValueError("users and num_samples are not lists of one length")
        if not all(type(count) is int for count in counts):
            raise ValueError("num_samples are not whole numbers")
        places = {path[1]: span for path, span in spans.items() if len(path) == 2}
        if sorted(users) != sorted(places):
            raise ValueError("users and user_data differ")
    except (KeyError, ValueError, TypeError, RecursionError) as e:
        what = f"no list {e.args[0][0]!r}" if isinstance(e, KeyError) else reason(e)
        fault = f"not a LEAF file of users, num_samples and user_data ({what})"
        raise UserError(f"{file}: {fault}; fetch or make it again") from None
    return [Writer(user, count, file, *places[user]) for user, count in zip(users, counts, strict=True)]


def _spans(text: Any) -> Iterator[tuple[tuple[str, ...], tuple[int, int]]]:
    """The places (start, stop) of the values of top-level fields (name,) and of fields of user_data (name, user)."""
    stack, last = [], b""
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token[:1] == b'"':
            last = token
        elif token in b"{[":
            stack.append((last, match.start()))
        elif not stack:
            break
        else:
            path = tuple(json.loads(name) for name, _ in stack[1:]) if len(stack) in (2, 3) else ()
            _, start = stack.pop()
            if len(path) == 1 or len(path) == 2 and path[0] == "user_data":
                yield path, (start, match.end())
    if stack:
        raise ValueError("cut short inside a JSON value")


def read(writer: Writer) -> Rows:
    """A writer's images uint8 [n, 28, 28, 1] and labels [n]."""
    with open(writer.file, "rb") as file:
        file.seek(writer.start)
        text = file.read(writer.stop - writer.start)
    try:
        data = json.loads(text)
        x, y = np.array(data["x"], np.float64), np.array(data["y"])
    except (KeyError, ValueError, TypeError, RecursionError) as e:
        raise _fault(writer, f"not readable ({reason(e, 60)})") from None
    if x.shape != (writer.images, 784) or y.shape != (writer.images,):
        raise _fault(writer, f"x {x.shape} and y {y.shape}, expected ({writer.images}, 784) and ({writer.images},)")
    if not (x.min() >= 0 and x.max() <= 1):
        raise _fault(writer, f"pixels in {x.min():g}..{x.max():g}, expected 0..1")
    if y.dtype.kind != "i" or y.min() < 0 or y.max() >= 62:
        raise _fault(writer, "labels are not integers in 0..61")
    return Rows(np.rint(255 * x).astype(np.uint8).reshape(-1, 28, 28, 1), y.astype(np.int32))


def _fault(writer: Writer, what: str) -> UserError:
    return UserError(f"{writer.file}: writer {writer.user}: {what}; fetch or make it again")
