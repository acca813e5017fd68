"""FEMNIST as LEAF writes it and ARM splits it: a domain is a writer.

    <raw_dir>/femnist/{train,val,test}/*.json        or femnist-data/, as the published archive has it
    {"users": [id, ...], "num_samples": [n, ...], "user_data": {id: {"x": [[784 numbers in 0..1]], "y": [0..61]}}}

There may be any number of files; names other than *.json are ignored. In each split, writers are
sorted by their ids. Without val/, the first 50 writers of train/ in file order validate, as if LEAF's
first file of 50 writers were moved to val/.

LEAF may put all writers in one large file. So a writer's numbers become pixels as soon as they are parsed.
"""

import json
import string
from pathlib import Path
from typing import Any

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


def find(raw_dir: Path) -> RawData:
    root = find_folder(raw_dir, "femnist", "femnist-data")
    warnings, marks = [], ()
    there = [split for split in SPLITS if split != "val" or (root / "val").is_dir()]
    writers = {split: _writers_of_split(root / split) for split in there}
    if "val" not in writers:
        count = min(VAL_WRITERS, len(writers["train"]) // 2)
        in_order = list(writers["train"].items())
        writers["val"], writers["train"] = dict(in_order[:count]), dict(in_order[count:])
        warnings.append(f"{root / 'val'}: no such folder; the first {count} writers of train/ in file order validate")
        marks = ("val from train",)
    pieces = [
        Piece(user, split, len(rows.labels), lambda rows=rows: rows)
        for split in SPLITS
        for user, rows in sorted(writers[split].items())
    ]
    checks = split_checks(pieces, PUBLISHED["femnist"].domains, tasks=(420, 420))
    return RawData(INFO._replace(marks=marks), pieces, checks, warnings)


def _writers_of_split(folder: Path) -> dict[str, Rows]:
    """The writers in all files of a split, in the order of the files."""
    files = visible(folder.glob("*.json"))
    if not files:
        raise UserError(f"{folder}: no .json files; FEMNIST is read from femnist/train, femnist/val and femnist/test")
    writers = {}
    for file in files:
        found = read(file)
        if twice := found.keys() & writers.keys():
            what = f"writer {brief(min(twice), 20)} is also in another file here"
            raise UserError(f"{file}: {what}; keep one of the two")
        writers |= found
    return writers


def read(file: Path) -> dict[str, Rows]:
    """The writers of a file in its order: images uint8 [n, 28, 28, 1] and labels [n]."""
    refuse_html(file)
    try:
        content = json.loads(file.read_bytes(), object_hook=_as_rows)
        users, data = content["users"], content["user_data"]
        if sorted(users) != sorted(data):
            raise ValueError("users and user_data differ")
    except (KeyError, ValueError, TypeError, RecursionError) as e:
        what = f"not a LEAF file of users and user_data ({reason(e)})"
        raise UserError(f"{file}: {what}; fetch or make it again") from None
    for user in users:
        if not isinstance(data[user], Rows):
            fault = data[user] if isinstance(data[user], str) else "no x and y"
            raise UserError(f"{file}: writer {brief(user, 20)}: {fault}; fetch or make it again")
    return {user: data[user] for user in users}


def _as_rows(data: dict[str, Any]) -> Any:
    """Images and labels in the place of a writer's object, or its fault in words; any other object as it is."""
    if "x" not in data and "y" not in data:
        return data
    try:
        x, y = np.array(data["x"], np.float64), np.array(data["y"])
    except (KeyError, ValueError, TypeError) as e:
        return f"not readable ({reason(e, 60)})"
    if y.ndim != 1 or not len(y) or x.shape != (len(y), 784):
        return f"x {x.shape} and y {y.shape}, expected ({len(y) if y.ndim else 'n'}, 784) and as many labels"
    if not (x.min() >= 0 and x.max() <= 1):
        return f"pixels in {x.min():g}..{x.max():g}, expected 0..1"
    if y.dtype.kind != "i" or y.min() < 0 or y.max() >= 62:
        return "labels are not integers in 0..61"
    return Rows(np.rint(255 * x).astype(np.uint8).reshape(-1, 28, 28, 1), y.astype(np.int32))
