"""Bad images are named and left out as far as allowed, and what a stopped run has decoded is not decoded again."""

import collections
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cxda_jax.data.readers import decoded, iwildcam, raw
from cxda_jax.data.store import open_store
from cxda_jax.errors import UserError
from cxda_jax.study import preparing
from tests import raw_fixtures as raws
from tests.commands import command

ROOT = Path(__file__).parent.parent


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
    shutil.copytree(wild[0], tmp_path / "raw")
    return tmp_path / "raw" / "iwildcam_v2.0" / "train"


def in_cameras_of(table, size, split):
    """The files of a camera that has so many images."""
    cameras = collections.defaultdict(list)
    for row in table:
        if row["split"] == split:
            cameras[row["location_remapped"]].append(row["filename"])
    return next(files for files in cameras.values() if len(files) == size)


def wild_arguments(tmp_path):
    return "--benchmark=iwildcam", f"--raw_dir={tmp_path}/raw", f"--data_dir={tmp_path}/data", "--size=32"


def wild_command(tmp_path, *arguments, code=0):
    return command("prepare", *wild_arguments(tmp_path), *arguments, code=code)


def images_in(kept):
    return sum(len(np.load(path)["labels"]) for path in kept)


def test_bad_images_are_left_out_as_far_as_allowed(tmp_path, wild, reads):
    images, (_, table, whole) = copied(wild, tmp_path), wild
    cameras = in_cameras_of(table, 52, "train"), in_cameras_of(table, 47, "test")
    bad = [cameras[0][3], cameras[1][0]]
    (images / bad[0]).write_bytes(b"nothing")
    (images / bad[1]).unlink()
    line = wild_command(tmp_path, code=2)
    assert f"/{bad[0]}: not readable as an image" in line and "skip_bad=1 (1 bad of " in line
    line = wild_command(tmp_path, "--skip_bad=1", code=2)
    assert f"/{bad[1]}: missing" in line and "skip_bad=2 (2 bad of " in line
    output = wild_command(tmp_path, "--skip_bad=2")
    left_out = "".join(line for line in output.splitlines() if line.startswith("left out: "))
    assert bad[0] in left_out and bad[1] in left_out
    found = open_store(tmp_path / "data" / "iwildcam")
    assert "2 bad images left out" in found.info.provenance and "2 bad images left out" in output
    kept = np.ones(len(whole.labels), bool)
    for name, mine in zip(bad, cameras, strict=True):
        (row,) = [r for r in table if r["filename"] == name]
        d = whole.domain_names.index(f"location {row['location_remapped']}")
        kept[whole.offsets[d] + mine.index(name)] = False
    np.testing.assert_array_equal(found.images, whole.images[kept])
    np.testing.assert_array_equal(found.labels, whole.labels[kept])
    # The pieces of the two bad images were read each time, all others at most once.
    again = [name for name, count in reads.items() if count > 1]
    assert len(again) <= 52 + 47 and set(bad) <= set(again)


def test_a_domain_that_becomes_too_small_is_left_out(tmp_path, wild):
    images, (_, table, whole) = copied(wild, tmp_path), wild
    name = in_cameras_of(table, 40, "val")[7]
    (images / name).write_bytes(b"")
    (row,) = [r for r in table if r["filename"] == name]
    camera = f"location {row['location_remapped']}"
    output = wild_command(tmp_path, "--skip_bad=5")
    (line,) = [line for line in output.splitlines() if line.startswith("warning: domain ")]
    assert camera in line and "39 good images are fewer than 40" in line
    found = open_store(tmp_path / "data" / "iwildcam")
    assert found.domain_names == tuple(n for n in whole.domain_names if n != camera)


def test_a_domain_waits_for_no_more_than_it_needs():
    taken = 0

    def parts():
        nonlocal taken
        for i in range(20):
            taken += 1
            yield raw.Domain("a", "train", np.full((10, 1, 1, 1), i, np.uint8), np.zeros(10, int))
        yield raw.Domain("b", "train", np.zeros((10, 1, 1, 1), np.uint8), np.zeros(10, int))

    told = []
    for number, part in enumerate(raw.large_enough(parts(), 25, told.append)):
        assert (part.images == number).all() and taken <= number + 3
    assert number == 19 and len(told) == 1 and "'b'" in told[0]


def test_an_aborted_run_is_taken_up_and_a_mended_image_read_anew(tmp_path, wild, reads):
    images, (_, table, whole) = copied(wild, tmp_path), wild
    last = in_cameras_of(table, 43, "test")[-1]
    good = (images / last).read_bytes()
    (images / last).write_bytes(good[:200])
    assert last in wild_command(tmp_path, code=2)
    folder = tmp_path / "data" / ".iwildcam.decoded"
    pieces = sorted(folder.iterdir())
    assert len(pieces) > 10 and not (tmp_path / "data" / "iwildcam").exists()
    # A flipped bit, a file that is cut short and a foreign one are noticed.
    data = bytearray(pieces[0].read_bytes())
    data[len(data) // 2] ^= 16
    pieces[0].write_bytes(data)
    pieces[1].write_bytes(pieces[1].read_bytes()[:-30])
    pieces[2].write_bytes(b"x")
    (images / last).write_bytes(good)
    first, kept = reads.total(), images_in(pieces[3:])
    wild_command(tmp_path)
    assert open_store(tmp_path / "data" / "iwildcam").sha256 == whole.sha256
    assert reads[last] == 2 and reads.total() - first == len(whole.labels) - kept
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == ["iwildcam"]


def test_a_killed_run_is_taken_up(tmp_path, wild, reads):
    """It leaves nothing that is taken for a store, and then the same store as an undisturbed one."""
    _, _, whole = wild
    copied(wild, tmp_path)
    slow = (
        "import time, cxda_jax.data.readers.raw as r; old = r.read_image; "
        "r.read_image = lambda *a: (time.sleep(0.005), old(*a))[1]; "
        "from launch import cli, prepare; cli.run(prepare.main)"
    )
    arguments = [sys.executable, "-c", slow, *wild_arguments(tmp_path)]
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE)
    data, until = tmp_path / "data", time.monotonic() + 60
    folder, target = data / ".iwildcam.decoded", data / "iwildcam"
    while len(list(folder.glob("[!.]*"))) < 5 or not any(
        p.stat().st_size for p in data.glob(".iwildcam.partial-*/images.u8")
    ):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (partial,) = data.glob(".iwildcam.partial-*")
    assert {p.name for p in data.iterdir()} == {partial.name, folder.name}
    with pytest.raises(UserError, match="no data store|not a data store"):
        open_store(target)
    kept = images_in(folder.glob("[!.]*"))
    assert 5 * 40 <= kept < len(whole.labels)
    wild_command(tmp_path)
    found = open_store(target)
    assert found.sha256 == whole.sha256 and found.info == whole.info
    assert reads.total() == len(whole.labels) - kept
    assert partial.exists() and not folder.exists()  # the first may belong to a process that is still at work


def test_other_options_and_other_files_are_decoded_anew(tmp_path, wild):
    def keys(size=32):
        return [decoded.key(piece) for piece in iwildcam.find(tmp_path / "raw", size).pieces]

    images = copied(wild, tmp_path)
    before = keys()
    assert len(set(before)) == len(before) and keys() == before and not set(keys(48)) & set(before)
    name = in_cameras_of(wild[1], 52, "train")[0]
    os.utime(images / name, (0, 0))
    assert sum(a != b for a, b in zip(keys(), before, strict=True)) == 1
    (images / name).unlink()
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


@pytest.mark.parametrize("spare, full, kept", [(0, False, 0), (1, False, 1), (1, True, 0)])
def test_nothing_is_kept_where_the_disk_has_no_room_for_both(tmp_path, monkeypatch, wild, spare, full, kept):
    pieces, usage = iwildcam.find(wild[0], size=32).pieces, shutil.disk_usage(tmp_path)
    free = 2 * wild[2].images.nbytes + spare
    monkeypatch.setattr(decoded.shutil, "disk_usage", lambda path: usage._replace(free=free))

    def no_space(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if full:
        monkeypatch.setattr(np, "savez", no_space)
    with pytest.raises(KeyboardInterrupt), decoded.keeping(tmp_path / "store", pieces) as ours:
        assert len(ours[0].read().images) == pieces[0].rows
        raise KeyboardInterrupt
    assert len(list(tmp_path.glob(".store.decoded/*"))) == kept


@pytest.mark.parametrize("benchmark, name", [("folder", "site 2/kind1/03.png"), ("tiny_imagenet_c", None)])
def test_other_readers_of_single_files_leave_out_bad_ones_too(tmp_path, monkeypatch, benchmark, name):
    raws.WRITERS[benchmark](tmp_path / "raw")
    path = tmp_path / "raw" / (name or f"Tiny-ImageNet-C/fog/2/{raws.WNIDS[1]}/{raws.WNIDS[1]}_1.JPEG")
    path.write_bytes(b"<html>")
    arguments = (f"--benchmark={benchmark}", f"--raw_dir={tmp_path}/raw", f"--data_dir={tmp_path}/data")
    assert str(path) in command("prepare", *arguments, code=2)
    assert str(path) in command("prepare", *arguments, "--skip_bad=1")
    found = open_store(tmp_path / "data" / benchmark)
    (d,) = [i for i, n in enumerate(found.domain_names) if n == ("site 2" if name else "fog 2")]
    assert found.offsets[d + 1] - found.offsets[d] == (41 if name else 11)
