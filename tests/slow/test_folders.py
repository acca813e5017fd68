"""Folders are replaced as a whole: a writer that ends anywhere leaves the old files or the new, and readers mix none."""

import itertools
import shutil

import pytest

from cxda_jax.disk import folders
from tests.fast.test_folders import STEPS, Killed, killed_at  # noqa: F401
from tools.reliability import SAVES


@pytest.mark.parametrize("how", ["exchanged", "beside a note", "where it is"])
@pytest.mark.parametrize("kind", ["adapter", "model", "export", "record"])
def test_wherever_a_writer_is_killed_the_old_or_the_new_is_there_and_the_same_call_goes_on(
    kind, how, tmp_path, monkeypatch
):
    save, read = SAVES[kind]
    before, seen = tmp_path / "before" / kind, set()
    save(before, 1)
    if how == "beside a note" and kind != "export":
        (before / "note.txt").write_text("mine")
    for step in itertools.count():
        shutil.copytree(tmp_path / "before", tmp_path / str(step))
        place = tmp_path / str(step) / kind
        monkeypatch.chdir(place if how == "where it is" else tmp_path)
        was_killed = killed_at(monkeypatch, step, lambda place=place: save(place, 2))
        seen.add(found := read(place))
        assert found in (1, 2)
        save(place, 3)
        assert read(place) == 3
        assert not (place / "note.txt").exists() or (place / "note.txt").read_text() == "mine"
        assert len(folders.entries(place)) == len([*before.iterdir()]) and not (place / folders.NEXT).exists()
        if not was_killed:
            break
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(tmp_path / str(step))
    assert seen == {1, 2} and step > 10
