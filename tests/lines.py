"""Lines that a user reads: how tests provoke, take, compare and measure them."""

import contextlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from cxda_jax.config.reading import read, replaced
from cxda_jax.disk import manifest
from cxda_jax.errors import UserError
from cxda_jax.studies import identity
from tests import results

ROOT = Path(__file__).parent.parent
LONGEST = 200
HTML = b"<!DOCTYPE html><html>Google Drive - Virus scan warning</html>"


def one_line(error, *folders) -> str:
    """The message as a launcher prints it, which is short but for the folders' names: {tmp} stands for them."""
    line = " ".join(str(error).split())
    for folder in folders:
        line = line.replace(str(folder), "{tmp}")
    assert 10 < len(line) <= LONGEST, f"{len(line)} characters: {line[:300]}"
    return line


@contextlib.contextmanager
def refused(match="", *folders, named="", field=None, value=None):
    """The block raises a UserError about this field and value, in one short line that names this part.

    Where a word of it is a promise, a regular expression says which.
    """
    with pytest.raises(UserError) as error:
        yield
    line = one_line(error.value, *folders)
    assert re.search(match, line) and named in line, line
    assert field in (None, error.value.field) and value in (None, error.value.value), line


def contents(folder):
    """The bytes of all files in a folder, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def cut(path, count):
    path.write_bytes(path.read_bytes()[:-count])


def flip(path):
    """One bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def write_run(folder, data_hash="1"):
    """A run and its result, of random predictions."""
    labels, predictions = np.random.default_rng(0).integers(0, 3, (2, 10, 4))
    config = replaced(read("glyphs:cxda,smoke"), data={"writers": [5, 5, 5], "drawings": 41})
    result = results.make_result(benchmark="glyphs", config=config, steps=20, data_hash="1")
    plans = {"support": np.zeros((10, 6), int), "query": np.zeros((10, 4), int)}
    results.write_result(result, folder, labels, predictions, **plans)
    (folder / "metrics.jsonl").unlink()
    write_config(folder, config, data_hash)


def write_config(folder, config, data_hash):
    """A config as a run keeps it, proven by its manifest."""
    (folder / "config.json").write_text(json.dumps(config))
    record = identity.Record("glyphs", data_hash, "cpu", 2, "0")
    manifest.write(folder, ["config.json"], about=record._asdict())


def rot(folder):
    """One bit of the largest file that a manifest names."""
    paths = [folder / name for name in json.loads((folder / "manifest.json").read_text())["sha256"]]
    flip(max(paths, key=lambda p: p.stat().st_size))
