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
from tests.lines import cut, flip

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
    """How often each file was decoded so far."""
    spy = mock.Mock(wraps=raw.read_image)
    monkeypatch.setattr(raw, "read_image", spy)
    return lambda: collections.Counter(call.args[0].name for call in spy.call_args_list)


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
    again = {name for name, count in reads().items() if count > 1}
    assert len(again) <= 52 + 47 and {row["filename"] for row in bad} <= again


def test_an_aborted_run_is_taken_up_and_a_mended_image_read_anew(tmp_path, wild, reads):
    images, whole, last = copied(wild, tmp_path), wild[2], camera(wild, 43)[-1]["filename"]
    good = (images / last).read_bytes()
    (images / last).write_bytes(good[:200])
    assert last in wild_command(tmp_path, code=2)
    pieces = sorted((tmp_path / "data" / ".iwildcam.decoded").iterdir())
    assert len(pieces) > 3 and not (tmp_path / "data" / "iwildcam").exists()
    # A flipped bit, a file that is cut short and a foreign one are noticed.
    flip(pieces[0])
    cut(pieces[1], 30)
    pieces[2].write_bytes(b"x")
    (images / last).write_bytes(good)
    first, kept = reads().total(), sum(len(np.load(path)["labels"]) for path in pieces[3:])
    wild_command(tmp_path)
    assert open_store(tmp_path / "data" / "iwildcam").sha256 == whole.sha256
    assert reads()[last] == 2 and reads().total() - first == len(whole.labels) - kept
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
