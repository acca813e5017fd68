"""Raw downloads to stores: every value from its place."""

import collections
import json
import re
import shutil
import sys
from unittest import mock

import numpy as np
import pytest

from cxda_jax.data import corruptions, store
from cxda_jax.data.readers import cifar_c, iwildcam, tiny_imagenet_c
from cxda_jax.data.readers.folder import random_splits
from cxda_jax.data.store import SPLITS, open_store
from cxda_jax.studies import preparing
from cxda_jax.training.experiment import READERS
from tests import raw_fixtures as raws
from tests.commands import command


def stored(raw_dir, benchmark, **options):
    """The store that a benchmark's raw files give."""
    target = raw_dir / f"store {len(list(raw_dir.iterdir()))}"
    preparing.prepare(READERS[benchmark](raw_dir, **options), target, workers=2)
    return open_store(target)


def names(found, split):
    return [found.domain_names[d] for d in found.domains(split)]


def rows(found, domain, split):
    (d,) = [i for i, name in enumerate(found.domain_names) if (name, found.split[i]) == (domain, split)]
    at = slice(found.offsets[d], found.offsets[d + 1])
    return found.images[at], found.labels[at]


def test_femnist_value_by_value(tmp_path):
    raws.write_femnist(tmp_path)
    found = stored(tmp_path, "femnist")
    assert found.info.mean == (1.0,) and found.info.std == (-1.0,) and found.num_classes == 62
    assert found.images.shape == (18 * 6, 28, 28, 1) and not found.info.marks
    pixels = (found.images[:1] / 255 - found.info.mean) / found.info.std
    assert pixels[0, 27, 27, 0] == 0.0  # white paper is 0 to the network
    for split in SPLITS:
        files = sorted((tmp_path / "femnist" / split).glob("all*.json"))
        first, second = (json.loads(file.read_text()) for file in files)
        users = first["user_data"] | second["user_data"]
        for user, data in users.items():
            images, labels = rows(found, user, split)
            np.testing.assert_array_equal(images.reshape(6, 784), np.rint(np.array(data["x"]) * 255))
            np.testing.assert_array_equal(labels, data["y"])
        assert list(users) != sorted(users) == names(found, split)
        # LEAF since 2021 writes all writers of a split into one file.
        merged = {name: first[name] + second[name] for name in ("users", "num_samples")}
        files[0].write_text(json.dumps({"user_data": second["user_data"] | first["user_data"]} | merged, indent=2))
        files[1].unlink()
    assert stored(tmp_path, "femnist").sha256 == found.sha256


def test_cifar_c_value_by_value(tmp_path):
    """And the card compares with the paper."""
    assert raws.arms_domains("spatter") == cifar_c.DOMAINS and raws.arms_domains("frost") == tiny_imagenet_c.DOMAINS
    raws.write_cifar_c(tmp_path)
    output = command("prepare", "--benchmark=cifar_c", f"--raw_dir={tmp_path}", f"--data_dir={tmp_path}")
    found = open_store(tmp_path / "cifar_c")
    assert found.info.mean == (0.485, 0.456, 0.406) and found.info.std == (0.229, 0.224, 0.225)
    for split, folder in raws.CIFAR.items():
        assert names(found, split) == [f"{c} {s}" for c, s in cifar_c.DOMAINS[split]]
        for corruption, severity in cifar_c.DOMAINS[split]:
            images, labels = raws.cifar_blocks(raws.cifar_number(folder, corruption), 5)
            ours, our_labels = rows(found, f"{corruption} {severity}", split)
            assert (ours[:, 0, 0, 1] == 40 * severity).all() and (ours[:, 0, 0, 2] == np.arange(5)).all()
            block = slice(5 * (severity - 1), 5 * severity)
            np.testing.assert_array_equal(ours, images[block])
            np.testing.assert_array_equal(our_labels, np.arange(5) * 7 % 10 if split == "test" else labels[block])
    lines = output.splitlines()
    counts = "train         56      280       10   5 to 5", "test          22      110        5   5 to 5"
    assert {*counts, "train domains: 56, as in the paper", "test images: 110, the paper's: 220000"} <= {*lines}
    assert f"sha256 {found.sha256}" in lines
    assert (tmp_path / "cifar_c" / "sheet.png").exists()


def test_tiny_imagenet_c_value_by_value(tmp_path):
    raws.write_tiny_imagenet_c(tmp_path)
    found = stored(tmp_path, "tiny_imagenet_c")
    assert found.info.class_names == raws.WNIDS and found.images.shape[1:] == (64, 64, 3)
    for split in SPLITS:
        assert names(found, split) == [f"{c} {s}" for c, s in tiny_imagenet_c.DOMAINS[split]]
        for corruption, severity in tiny_imagenet_c.DOMAINS[split]:
            images, labels = rows(found, f"{corruption} {severity}", split)
            np.testing.assert_array_equal(labels, np.repeat(np.arange(4), 2))
            for i, (image, label) in enumerate(zip(images, labels, strict=True)):
                grey = corruption == "fog" and i % 2 == 0  # a grey file has become RGB
                wanted = (90, 90, 90) if grey else raws.tiny_colour(corruption, severity, label)
                assert np.abs(image.astype(int) - wanted).max() <= 3  # JPEG


def test_folder_value_by_value(tmp_path):
    raws.write_folder(tmp_path / "mine")
    lines = [f"site {d},{SPLITS[d % 3]}" for d in range(7)]
    table = "\r\n".join(["domain,split", *lines])
    (tmp_path / "split.csv").write_text(table, encoding="utf-8-sig")  # spreadsheets begin their UTF-8 with a mark
    arguments = ("--benchmark=folder", f"--raw_dir={tmp_path}/mine", f"--data_dir={tmp_path}/data", "--size=16")
    output = command("prepare", *arguments, f"--split_csv={tmp_path}/split.csv")
    assert "site 0: left out, 9 images are fewer than 40" in output and "val: 2 domains; tasks of 5 need more" in output
    found = open_store(tmp_path / "data" / "folder")
    where = dict(zip(found.domain_names, found.split, strict=True))
    assert where == {f"site {d}": SPLITS[d % 3] for d in range(1, 7)}  # the file leaves site 7 out
    for name, split in where.items():
        images, labels = rows(found, name, split)
        np.testing.assert_array_equal(labels, np.repeat(np.arange(3), 14))
        colour = np.stack([np.full(42, 20 * int(name.split()[1])), 60 * labels, np.tile(np.arange(14), 3)], 1)
        np.testing.assert_array_equal(images, np.broadcast_to(colour[:, None, None], images.shape))
    again = command("prepare", *arguments, f"--split_csv={tmp_path}/split.csv")
    assert "is there already" in again and found.sha256 in again


def test_folder_splits_follow_the_seed():
    domains = [f"d{i}" for i in range(50)]
    splits = random_splits(domains, 0)
    counts = [list(splits.values()).count(split) for split in SPLITS]
    assert counts == [35, 5, 10] and splits == random_splits(domains, 0) != random_splits(domains, 1)


def test_cifar_c_regenerated(tmp_path, monkeypatch):
    """With a few of its domains."""
    few = {split: domains[:9] for split, domains in cifar_c.DOMAINS.items()}
    monkeypatch.setattr(cifar_c, "DOMAINS", few)
    raws.write_cifar_c(tmp_path)
    shutil.rmtree(tmp_path / "CIFAR-10-C-new")
    clean, labels = raws.write_cifar_binary(tmp_path)
    arguments = ("--benchmark=cifar_c", f"--raw_dir={tmp_path}", "--regenerate", f"--data_dir={tmp_path}")
    output = command("prepare", *arguments, "--seed=1")
    assert "regenerated" in output
    found = open_store(tmp_path / "cifar_c")
    assert found.info.marks == ("regenerated",) and "corruptions of clean training images" in found.info.provenance
    np.testing.assert_array_equal(cifar_c.read_binary(tmp_path).images, clean)
    held = cifar_c.hold_out(labels, 1)
    assert sorted(np.concatenate([held["train"], held["val"]])) == list(range(100))  # without overlap
    for s, (split, per_class) in enumerate({"train": 8, "val": 2}.items()):  # of 10 images of each class
        for number, (corruption, severity) in enumerate(cifar_c.DOMAINS[split]):
            images, got = rows(found, f"{corruption} {severity}", split)
            assert (np.bincount(got) == per_class).all()
            if number in (0, 7):  # one with all its images, whichever way they were drawn
                rng = np.random.default_rng([corruptions.VERSION, 1, s, number])
                of_class = [held[split][labels[held[split]] == c] for c in range(10)]
                mine = np.concatenate([rng.choice(of_one, per_class, replace=False) for of_one in of_class])
                np.testing.assert_array_equal(images, corruptions.corrupt(clean[mine], corruption, severity, rng))
                np.testing.assert_array_equal(got, labels[mine])
    command("prepare", *arguments, "--seed=1", "--name=again", "--workers=1")
    assert open_store(tmp_path / "again").sha256 == found.sha256  # whatever the number of threads
    assert not np.array_equal(cifar_c.hold_out(labels, 2)["val"], held["val"])


def camera(table, size):
    """The rows of the camera that has so many images."""
    cameras = collections.defaultdict(list)
    for row in table:
        cameras[row["split"], row["location_remapped"]].append(row)
    return next(rows for rows in cameras.values() if len(rows) == size)


def wild_command(tmp_path, *arguments, code=0):
    where = f"--raw_dir={tmp_path}/raw", f"--data_dir={tmp_path}/data"
    return command("prepare", "--benchmark=iwildcam", *where, "--size=32", *arguments, code=code)


def test_bad_images_are_left_out_as_far_as_allowed(tmp_path):
    table, images = raws.write_iwildcam(tmp_path / "raw"), tmp_path / "raw" / "iwildcam_v2.0" / "train"
    preparing.prepare(iwildcam.find(tmp_path / "raw", size=32), tmp_path / "whole", 2)
    whole, bad = open_store(tmp_path / "whole"), [camera(table, 52)[3], camera(table, 47)[0]]
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


# torchvision has no build for CPUs in the registry; wilds imports these modules of it, for detection alone.
TORCHVISION = ("", ".ops", ".ops.boxes", ".models", ".models.detection", ".models.detection._utils")


@pytest.fixture
def wilds_class(monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("wilds", reason="pip install --no-deps wilds==2.0.0")
    for name in TORCHVISION:
        monkeypatch.setitem(sys.modules, f"torchvision{name}", mock.MagicMock())
    from wilds.datasets.iwildcam_dataset import IWildCamDataset

    return IWildCamDataset


def test_splits_cameras_labels_and_pixels_are_those_of_wilds(tmp_path, wilds_class):
    raws.write_iwildcam(tmp_path)
    theirs = wilds_class(version="2.0", root_dir=str(tmp_path))
    arguments = ("--benchmark=iwildcam", f"--raw_dir={tmp_path}", f"--data_dir={tmp_path}", "--name=wild", "--size=60")
    assert "train: left out 1 cameras with fewer than 40 images (39 images)" in command("prepare", *arguments)
    ours = store.open_store(tmp_path / "wild")
    assert ours.num_classes == theirs.n_classes
    assert ours.info.metric == "macro_f1" and ours.info.class_names == tuple(f"animal {y}" for y in range(5))
    for split in store.SPLITS:
        subset = theirs.get_subset(split)
        cameras = subset.metadata_array[:, theirs.metadata_fields.index("location")].numpy()
        names, sizes = np.unique(cameras, return_counts=True)
        kept = [f"location {name}" for name, size in zip(names, sizes, strict=True) if size >= 40]
        assert [ours.domain_names[d] for d in ours.domains(split)] == kept
        for d in ours.domains(split):
            mine = np.flatnonzero(cameras == int(ours.domain_names[d].split()[1]))
            for row, i in zip(range(*ours.offsets[d : d + 2]), mine, strict=True):
                image, label, _ = subset[i]
                pixels = np.asarray(image.convert("RGB").resize((60, 60), 2))  # bilinear, as torchvision's Resize
                np.testing.assert_array_equal(ours.images[row], pixels)
                assert ours.labels[row] == label
