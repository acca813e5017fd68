"""Kills and stops runs and flips bits of files, fewer times than `python -m tools.reliability` does by hand."""

import shutil

from tools import reliability


def test_a_hundred_flipped_bits_are_noticed_or_change_nothing(smoke, tmp_path):
    for part in ("run", "data"):  # without other tests' results
        shutil.copytree(smoke[0] / part, tmp_path / part, ignore=shutil.ignore_patterns("*,*"))
    outcomes, faults = reliability.flip(tmp_path, 100)
    assert faults == [] and outcomes["noticed"] > 60


def test_a_saved_file_that_is_damaged_or_cut_is_noticed_or_changes_nothing(tmp_path):
    outcomes, faults = reliability.damage_saves(tmp_path, 60)
    assert faults == [] and outcomes["noticed"] > 30
