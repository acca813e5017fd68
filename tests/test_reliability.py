"""Kills and stops runs and flips bits of files, fewer times than `python -m tests.reliability` does by hand."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests import reliability
from tests.lines import ROOT


@pytest.mark.exhaustive
@pytest.mark.parametrize(("what", "times", "least"), [("kill", 6, 3), ("stop", 4, 3), ("mishap", 1, 0), ("disk", 1, 0)])
def test_what_befalls_a_run_costs_one_line_and_nothing_that_was_saved(tmp_path, what, times, least):
    """Killed at random times, or stopped in each phase. Beside other work, some runs end before they are hit."""
    own_disks = ["unshare", "--mount", *["--map-root-user"] * (os.geteuid() != 0)] if what == "disk" else []
    if subprocess.run(
        [*own_disks, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)] if own_disks else ["true"]
    ).returncode:
        pytest.skip("this system lets us mount nothing: no full and no read-only disk")
    command = [sys.executable, "-m", "tests.reliability", what, f"--times={times}", f"--out={tmp_path}/found"]
    done = subprocess.run([*own_disks, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(json.loads((tmp_path / "found").read_text())["counts"].values()) >= least


@pytest.mark.gate
def test_a_hundred_flipped_bits_are_noticed_or_change_nothing(smoke, tmp_path):
    for part in ("run", "data"):  # without other tests' results
        shutil.copytree(smoke[0] / part, tmp_path / part, ignore=shutil.ignore_patterns("*,*"))
    outcomes, faults = reliability.flip(tmp_path, 100, 0)
    assert faults == [] and outcomes["noticed"] > 60
