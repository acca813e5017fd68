"""Lines that a user reads: how tests provoke, take, compare and measure them."""

import io
import json
from pathlib import Path

import numpy as np
import pytest

from cxda_jax import manifest
from launch import cli, identity

ROOT = Path(__file__).parent.parent
LONGEST = 200
HTML = b"<!DOCTYPE html><html>Google Drive - Virus scan warning</html>"


def one_line(error, tmp) -> str:
    """The message as a launcher prints it, with {tmp} for the folder, whose length is the machine's."""
    line = " ".join(str(error).split()).replace(str(tmp), "{tmp}")
    assert len(line) <= LONGEST, f"{len(line)} characters: {line}"
    return line


def is_as(line, expected) -> bool:
    """Equal, but that (...) stands for the words of a library, which another version of it may choose otherwise."""
    before, words, after = expected.partition("(...)")
    if not words:
        return line == expected
    return line.startswith(f"{before}(") and line.endswith(f"){after}") and len(line) > len(expected)


def parametrised(cases):
    return pytest.mark.parametrize("number", range(len(cases)), ids=lambda i: cases[i][0].replace(" ", "_"))


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def assert_short(error, *folders):
    """One line, once its whitespace is folded as the launchers do, that a terminal shows whole."""
    message = " ".join(str(error).split())
    for folder in folders:
        message = message.replace(str(folder), "")
    assert 10 < len(message) <= 200, f"{len(message)}: {message[:300]}"


def edit_json(path, change):
    content = json.loads(path.read_text())
    changed = change(content)
    path.write_text(json.dumps(content if changed is None else changed))


def set_to(*places, to):
    """An edit: content[place][place]... = to."""

    def change(content):
        for place in places[:-1]:
            content = content[place]
        content[places[-1]] = to

    return change


def cut(path, count):
    path.write_bytes(path.read_bytes()[:-count])


def folder_in_place_of(path):
    path.unlink()
    path.mkdir()


def npy(array, **options):
    def data():
        buffer = io.BytesIO()
        np.save(buffer, array, **options)
        return buffer.getvalue()

    return data


def write_run(folder, data_hash="1"):
    """A run and its result, of random predictions."""
    rng = np.random.default_rng(0)
    labels, predictions = rng.integers(0, 3, (2, 10, 4))
    config = cli.resolve(cli.load_config("configs/glyphs.py:cxda,smoke"))
    config["data"] |= {"writers": [5, 5, 5], "drawings": 41}
    folder.mkdir(parents=True)
    write_config(folder, config, data_hash)
    scores = np.sort((labels == predictions).mean(1))
    texts = dict.fromkeys(("version", "device", "package", "config_hash", "weights_hash", "data_hash"), "1")
    row = {
        "label": "cxda", "method": "cxda", "benchmark": "glyphs", "metric": "accuracy", "seed": 0, "num_tasks": 10,
        "steps": 20, "avg": 100 * scores.mean(), "w10": 100 * scores[0], "train_minutes": None, "task_ms": 1.0,
        "adapt_ms": 1.0, "predict_ms": 1.0, **texts,
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(row))
    save(folder, labels=labels, predictions=predictions, support=np.zeros((10, 6), int), query=np.zeros((10, 4), int))


def write_config(folder, config, data_hash):
    """A config as a run keeps it, proven by its manifest."""
    (folder / "config.json").write_text(json.dumps(config))
    record = identity.Record("glyphs", data_hash, "cpu", 2, "0")
    manifest.write(folder, ["config.json"], about=record._asdict())


def save(folder, **arrays):
    np.savez(folder / "predictions.npz", **arrays)
