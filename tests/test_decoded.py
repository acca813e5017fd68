"""Bad images are named and left out as far as allowed, and what a stopped run has decoded is not decoded again."""

import collections
import os
import re
import shutil
from unittest import mock

import numpy as np
import pytest

from cxda_jax.data.readers import decoded, iwildcam, raw
from cxda_jax.data.store import open_store
from cxda_jax.study import preparing
from tests import raw_fixtures as raws
from tests.commands import command

pytestmark = pytest.mark.gate


@pytest.fixture(scope="module")
def wild(tmp_path_factory):
    """iWildCam's raw files, their table, and the store that an undisturbed run makes."""
    root = tmp_path_factory.mktemp("wild")
    table = raws.write_iwildcam(root / "raw")
    preparing.prepare(iwildcam.find(root / "raw", size=32), root / "store", 2)
    return root / "raw", table, open_store(root / "store")


@pytest.fixture
def reads(monkeypatch):
    """How often each file was decoded."""
    counts, before = collections.Counter(), raw.read_image

    def counting(path, *rest):
        counts[path.name] += 1
        return before(path, *rest)

    monkeypatch.setattr(raw, "read_image", counting)
    return counts


def copied(wild, tmp_path):
    return shutil.copytree(wild[0], tmp_path / "raw") / "iwildcam_v2.0" / "train"


def camera(wild, size):
    """The rows of the camera that has so many images."""
    cameras = collections.defaultdict(list)
    for row in wild[1]:
        cameras[row["split"], row["location_remapped"]].append(row)
    return next(rows for rows in cameras.values() if len(rows) == size)


def wild_command(tmp_path, *arguments, code=0):
    where = f"--raw_dir={tmp_path}/raw", f"--data_dir={tmp_path}/data"
    return command("prepare", "--benchmark=iwildcam", *where, "--size=32", *arguments, code=code)


def test_bad_images_are_left_out_as_far_as_allowed(tmp_path, wild, reads):
    images, whole = copied(wild, tmp_path), wild[2]
    bad = [camera(wild, 52)[3], camera(wild, 47)[0]]
    (images / bad[0]["filename"]).write_bytes(b"nothing")
    (images / bad[1]["filename"]).unlink()
    line = wild_command(tmp_path, code=2)
    assert f"/{bad[0]['filename']}: not readable as an image" in line and "skip_bad=1 (1 bad of " in line
    line = wild_command(tmp_path, "--skip_bad=1", code=2)
    assert f"/{bad[1]['filename']}: missing" in line and "skip_bad=2 (2 bad of " in line
    output = wild_command(tmp_path, "--skip_bad=2")
    assert all(re.search(f"left out: .*{row['filename']}", output) for row in bad)
    found = open_store(tmp_path / "data" / "iwildcam")
    assert "2 bad images left out" in found.info.provenance and "2 bad images left out" in output
    kept = np.ones(len(whole.labels), bool)
    for row, place in zip(bad, (3, 0), strict=True):
        kept[whole.offsets[whole.domain_names.index(f"location {row['location_remapped']}")] + place] = False
    np.testing.assert_array_equal(found.images, whole.images[kept])
    np.testing.assert_array_equal(found.labels, whole.labels[kept])
    # The pieces of the two bad images were read each time, all others at most once.
    again = {name for name, count in reads.items() if count > 1}
    assert len(again) <= 52 + 47 and {row["filename"] for row in bad} <= again


def test_a_domain_that_becomes_too_small_is_left_out(tmp_path, wild):
    row = camera(wild, 40)[7]
    (copied(wild, tmp_path) / row["filename"]).write_bytes(b"")
    name = f"location {row['location_remapped']}"
    output = wild_command(tmp_path, "--skip_bad=5")
    assert re.search(rf"warning: domain .*{name}.*39 good images are fewer than 40", output)
    found = open_store(tmp_path / "data" / "iwildcam")
    assert found.domain_names == tuple(n for n in wild[2].domain_names if n != name)


def test_an_aborted_run_is_taken_up_and_a_mended_image_read_anew(tmp_path, wild, reads):
    images, whole, last = copied(wild, tmp_path), wild[2], camera(wild, 43)[-1]["filename"]
    good = (images / last).read_bytes()
    (images / last).write_bytes(good[:200])
    assert last in wild_command(tmp_path, code=2)
    pieces = sorted((tmp_path / "data" / ".iwildcam.decoded").iterdir())
    assert len(pieces) > 3 and not (tmp_path / "data" / "iwildcam").exists()
    # A flipped bit, a file that is cut short and a foreign one are noticed.
    data = bytearray(pieces[0].read_bytes())
    data[len(data) // 2] ^= 16
    pieces[0].write_bytes(data)
    pieces[1].write_bytes(pieces[1].read_bytes()[:-30])
    pieces[2].write_bytes(b"x")
    (images / last).write_bytes(good)
    first, kept = reads.total(), sum(len(np.load(path)["labels"]) for path in pieces[3:])
    wild_command(tmp_path)
    assert open_store(tmp_path / "data" / "iwildcam").sha256 == whole.sha256
    assert reads[last] == 2 and reads.total() - first == len(whole.labels) - kept
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == ["iwildcam"]


def test_other_options_and_other_files_are_decoded_anew(tmp_path, wild):
    def keys(size=32):
        return [decoded.key(piece) for piece in iwildcam.find(tmp_path / "raw", size).pieces]

    file = copied(wild, tmp_path) / camera(wild, 52)[0]["filename"]
    before = keys()
    assert len(set(before)) == len(before) and keys() == before and not set(keys(48)) & set(before)
    for change in (lambda: os.utime(file, (0, 0)), file.unlink):
        change()
        assert sum(a != b for a, b in zip(keys(), before, strict=True)) == 1


def test_two_runs_share_what_they_decode(tmp_path, wild):
    """The first to finish deletes it; the other decodes what it misses."""
    pieces = iwildcam.find(wild[0], size=32).pieces
    with decoded.keeping(tmp_path / "store", pieces) as slow:
        early = [slow[0].read()]
        with decoded.keeping(tmp_path / "store", pieces) as fast:
            for piece in fast:
                piece.read()
        assert not list(tmp_path.iterdir())
        late = [piece.read() for piece in slow[1:]]
    np.testing.assert_array_equal(np.concatenate([rows.images for rows in early + late]), wild[2].images)
    assert not list(tmp_path.iterdir())


def test_nothing_is_kept_where_the_disk_has_no_room_for_both(tmp_path, monkeypatch, wild):
    pieces, usage = iwildcam.find(wild[0], size=32).pieces, shutil.disk_usage(tmp_path)

    def kept(spare):
        free = usage._replace(free=2 * wild[2].images.nbytes + spare)
        monkeypatch.setattr(decoded.shutil, "disk_usage", lambda path: free)
        shutil.rmtree(tmp_path / ".store.decoded", ignore_errors=True)
        with pytest.raises(KeyboardInterrupt), decoded.keeping(tmp_path / "store", pieces) as ours:
            assert len(ours[0].read().images) == pieces[0].rows
            raise KeyboardInterrupt
        return len(list(tmp_path.glob(".store.decoded/*")))

    assert (kept(spare=0), kept(spare=1)) == (0, 1)
    monkeypatch.setattr(np, "savez", mock.Mock(side_effect=OSError(28, "No space left on device")))
    assert kept(spare=1) == 0


def test_a_reader_of_other_files_leaves_out_bad_ones_too(tmp_path):
    raws.write_folder(tmp_path / "raw", domains=3)
    path = tmp_path / "raw" / "site 2/kind1/03.png"
    path.write_bytes(b"<html>")
    arguments = ("--benchmark=folder", f"--raw_dir={tmp_path}/raw", f"--data_dir={tmp_path}/data")
    line = command("prepare", *arguments, code=2)
    assert line.startswith(f"error: {path}: a web page") and line.count("\n") == 1
    assert [p.name for p in tmp_path.glob("data/*")] == [".folder.decoded"]
    assert str(path) in command("prepare", *arguments, "--skip_bad=1")
    found = open_store(tmp_path / "data" / "folder")
    assert np.diff(found.offsets)[found.domain_names.index("site 2")] == 41
