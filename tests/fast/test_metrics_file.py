"""metrics.jsonl is what a resumed run goes on with: a damaged line costs that line and a warning, never the file."""

import json
import time

import pytest

from cxda_jax.disk.reading import metrics_line, read_lines
from cxda_jax.machine.progress import MetricsFile
from cxda_jax.studies.finding import training_minutes

LINES = [
    {"step": 1, "loss": 1.25, "accuracy": 0.5},
    {"step": 2, "loss": 1.5, "accuracy": 0.25, "episodes_per_s": 12.5, "data_wait_ms": 0.125, "eta_s": 1e-3},
    {"step": 2, "val_score": 0.5, "best_score": 0.5, "seconds": 1.25},
    {"step": 3, "loss": 0.75, "accuracy": 0.75},
]
TEXT = "".join(map(metrics_line, LINES)).encode()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def resumed(path, start):
    """What is left of the file when a run goes on from step `start`, and the warnings."""
    said = []
    with MetricsFile(path, start, log=said.append):
        pass
    return read_lines(path), said


def test_a_resumed_run_drops_the_lines_that_it_repeats(path):
    """It validates anew where it begins, so a score of that step goes too."""
    path.write_bytes(TEXT + b'{"st')
    with MetricsFile(path, 2) as file:
        assert read_lines(path) == LINES[:2]
        file.write({"step": 3, "again": 1})
    last = read_lines(path)[-1]
    assert read_lines(path) == [*LINES[:2], {"step": 3, "again": 1, "time": last["time"]}]
    assert abs(last["time"] - time.time()) < 60


def test_what_a_killed_writer_or_an_older_version_left_is_no_damage(path):
    for end in (b'{"st', b'{"step": 3, "loss": "', b"\xc3", b"", b"\n\n"):
        path.write_bytes(TEXT + end)
        assert resumed(path, 3) == (LINES, [])
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))  # without checksums
    assert resumed(path, 3) == (LINES, [])


def test_a_damaged_line_is_named_and_left_out(path):
    for line in (
        b"junk", b"7", b'{"loss": 1.0}', b'{"step": "2"}', b'{"step": NaN}', b'{"step": 2, "loss": NaN}',
        b'{"step": 2, "seconds": [1]}', b"\xff\xfe", b'{"step": 2, "loss": 1' + b"0" * 400 + b"}", b"[" * 100_000,
    ):  # fmt: skip
        whole = TEXT.splitlines()
        path.write_bytes(b"\n".join([*whole[:2], line, *whole[2:], b""]))
        assert read_lines(path) == LINES, line[:40]
        assert training_minutes(path.parent) == 1.25 / 60
        assert resumed(path, 3) == (LINES, [f"warning: {path}: line 3 is damaged and left out"]), line[:40]
        assert resumed(path, 3) == (LINES, [])  # once
    path.write_bytes(b"junk\n" * 5000 + TEXT)
    assert resumed(path, 3) == (LINES, [f"warning: {path}: line 1 is damaged and left out, as are 4999 more"])
