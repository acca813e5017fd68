"""Kills and stops runs and flips bits of files, fewer times than `python -m tools.reliability` does by hand."""

import os
import subprocess
import sys

import pytest

from tests.lines import ROOT
from tools import reliability


@pytest.mark.parametrize("what, times", [("kill", 6), ("stop", 4), ("disk", 1), ("save", 18), ("refuse", 2)])
def test_what_befalls_a_writer_costs_one_line_and_nothing_that_was_saved(tmp_path, what, times):
    own_disks = ["unshare", "--mount", *["--map-root-user"] * (os.geteuid() != 0)] if what in ("disk", "refuse") else []
    if own_disks and subprocess.run([*own_disks, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]).returncode:
        pytest.skip("this system lets us mount nothing: no full disk")
    command = [sys.executable, "-m", "tools.reliability", what, f"--times={times}"]
    done = subprocess.run([*own_disks, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert what not in ("kill", "stop") or any(phase in done.stdout for phase in reliability.PHASES.values()), (
        "none was hit"
    )
