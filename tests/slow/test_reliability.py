"""Kills and stops runs and flips bits of files, fewer times than `python -m tools.reliability` does by hand."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.lines import ROOT
from tools import reliability


def test_a_hundred_flipped_bits_are_noticed_or_change_nothing(smoke, tmp_path):
    for part in ("run", "data"):  # without other tests' results
        shutil.copytree(smoke[0] / part, tmp_path / part, ignore=shutil.ignore_patterns("*,*"))
    outcomes, faults = reliability.flip(tmp_path, 100)
    assert faults == [] and outcomes["noticed"] > 60


def test_a_saved_file_that_is_damaged_or_cut_is_noticed_or_changes_nothing(tmp_path):
    outcomes, faults = reliability.damage_saves(tmp_path, 60)
    assert faults == [] and outcomes["noticed"] > 30


@pytest.mark.weekly
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
