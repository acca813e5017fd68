"""Folders are replaced as a whole: a writer that ends anywhere leaves the old files or the new, and readers mix none."""

import itertools
import os
import resource
import shutil
from pathlib import Path

import pytest

import cxda_jax
from cxda_jax.adapter import adapter as adapters
from cxda_jax.disk import files, folders, manifest, models
from cxda_jax.errors import TooEarly, UserError
from cxda_jax.export import exporting
from tools.reliability import PART, SAVES, tiny_adapter

STEPS = ("rename", "replace", "link", "unlink", "mkdir", "rmdir", "fsync", "open")  # of os: what a writer does


class Killed(BaseException):
    pass


def killed_at(monkeypatch, step, work):
    """Does work() until that call of the system; from then on nothing is done, so no clean-up either."""
    count = itertools.count()

    def until(call):
        def called(*arguments, **options):
            if next(count) >= step:
                raise Killed
            return call(*arguments, **options)

        return called

    with monkeypatch.context() as patched:
        for name in STEPS:
            patched.setattr(os, name, until(getattr(os, name)))
        try:
            work()
        except Killed:
            return True
    return False


def test_a_first_save_that_was_killed_is_in_nobodys_way(tmp_path, monkeypatch):
    for step in range(0, 40, 3):
        killed_at(monkeypatch, step, lambda step=step: tiny_adapter(1).save(tmp_path / str(step)))
        tiny_adapter(2).save(tmp_path / str(step))
        assert cxda_jax.load_adapter(tmp_path / str(step)).seed == 2


def test_what_a_killed_writer_left_goes_an_hour_after_its_last_write(tmp_path):
    folder = tmp_path / "it"
    tiny_adapter(1).save(folder)
    left = [tmp_path / ".cxda-1.it", tmp_path / ".cxda-1.other", folder / ".cxda-1", folder / ".cxda-2"]
    for path in left:
        path.mkdir()
        (path / "half").write_text("half")
        for written in (path, path / "half"):
            os.utime(written, (0, 0) if path.name != ".cxda-2" or written == path else None)
    with folders.replaced(folder, lambda _: ()):
        assert [path.exists() for path in left] == [False, True, False, True]


def test_a_file_that_may_not_grow_leaves_the_old_adapter_and_no_folder_where_there_was_none(tmp_path):
    tiny_adapter(1).save(tmp_path / "it")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name in ("it", "new"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large") as error:
                tiny_adapter(2).save(tmp_path / name)
            with pytest.raises(UserError, match="--out=.*: cannot be written"):
                folders.insist_on_writable(tmp_path / name, "--out")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert error.value.filename == str(tmp_path / name)
    assert cxda_jax.load_adapter(tmp_path / "it").seed == 1 and os.listdir(tmp_path) == ["it"]


def test_a_second_writer_waits_its_turn_and_a_reader_mixes_nothing(tmp_path, monkeypatch):
    folder, write, read = tmp_path / "it", manifest.write, adapters.read_object
    tiny_adapter(1).save(folder)

    def write_late(*arguments):
        with pytest.raises(TooEarly, match="it is in use by process"):
            tiny_adapter(3).save(folder)
        write(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(folders, "PATIENCE", 0.1)
        patched.setattr(manifest, "write", write_late)
        tiny_adapter(2).save(folder)
    assert cxda_jax.load_adapter(folder).seed == 2

    newer = [tiny_adapter(4)]

    def read_late(path, fix):
        if path.name == models.CARD and newer:
            newer.pop().save(folder)
        return read(path, fix)

    monkeypatch.setattr(adapters, "read_object", read_late)
    found = cxda_jax.load_adapter(folder)
    assert found.seed == 4 == found.known["scale"] / PART


def test_links_and_places_that_cannot_be_exchanged(tmp_path, monkeypatch):
    """A link leads to the folder that is replaced, and stays; a folder that belongs to others, or is one's own, stays."""
    folder, link = tmp_path / "a" / "it", tmp_path / "link"
    folder.parent.mkdir()
    link.symlink_to(folder)
    for number in (1, 2):
        tiny_adapter(number).save(link)
        assert link.is_symlink() and cxda_jax.load_adapter(folder).seed == number
    rename = os.rename
    for number, error in enumerate((PermissionError, OSError), 3):

        def renamed(old, new, error=error):
            if Path(new).parent == folder.parent:  # where nobody may write, and as of a mount point
                raise error
            rename(old, new)

        with monkeypatch.context() as patched:
            patched.setattr(os, "rename", renamed)
            before = folder.stat().st_ino
            tiny_adapter(number).save(folder)
        assert folder.stat().st_ino == before and cxda_jax.load_adapter(folder).seed == number
        assert {*os.listdir(folder)} == {models.WEIGHTS, models.CARD, manifest.NAME}
    (folder / folders.NEXT).symlink_to(tmp_path)
    with pytest.raises(UserError, match="a link"):
        tiny_adapter(9).save(folder)


def test_where_nothing_can_be_written_is_said_before_the_work(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(UserError, match="--out=.*: cannot be written"):
            exporting.insist_on_place(place)
    folders.insist_on_writable(tmp_path / "a" / "b", "--out")
    assert [*tmp_path.iterdir()] == [tmp_path / "file"] and files.LOCK not in os.listdir(tmp_path)


@pytest.mark.slow
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
