"""Raw downloads to stores: every value from its place, and every fault in one line."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from PIL import Image

from cxda_jax.data import cifar_c, corruptions, store, tiny_imagenet_c
from cxda_jax.data.raw import Piece, load_npy, read_pieces
from cxda_jax.data.store import open_store
from cxda_jax.experiment import READERS
from cxda_jax.types import UserError
from launch import cli, prepare
from tests import raw_fixtures as raws

ROOT = Path(__file__).parent.parent
WRITERS = {
    "femnist": raws.write_femnist,
    "cifar_c": raws.write_cifar_c,
    "tiny_imagenet_c": raws.write_tiny_imagenet_c,
    "iwildcam": raws.write_iwildcam,
    "folder": raws.write_folder,
}


def command(monkeypatch, *arguments, code=0):
    """What launch.prepare prints, run in this process; a fault's line if code is 2."""
    out, err = io.StringIO(), io.StringIO()
    # Flags that launchers imported by other tests require.
    others = [f"--{name}=unused" for name in ("config", "out", "workdir") if name in flags.FLAGS]
    monkeypatch.setattr(sys, "argv", ["prepare", *map(str, arguments), *others])
    with flagsaver.flagsaver(), redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as exit:
        cli.run(prepare.main)
    assert (exit.value.code or 0) == code, out.getvalue() + err.getvalue()
    return err.getvalue() if code else out.getvalue()


def stored(tmp_path, benchmark, **options):
    """The store that a benchmark's raw files give."""
    raw = READERS[benchmark](tmp_path, **options)
    prepare.prepare(raw, tmp_path / "store", workers=2)
    return open_store(tmp_path / "store")


def rows(found, domain, split):
    (d,) = [i for i, name in enumerate(found.domain_names) if (name, found.split[i]) == (domain, split)]
    at = slice(found.offsets[d], found.offsets[d + 1])
    return found.images[at], found.labels[at]


def test_femnist_value_by_value(tmp_path):
    raws.write_femnist(tmp_path)
    found = stored(tmp_path, "femnist")
    assert found.info.mean == (1.0,) and found.info.std == (-1.0,) and found.num_classes == 62
    assert found.images.shape == (18 * 45, 28, 28, 1) and not found.info.marks
    for split in ("train", "val", "test"):
        names = []
        for file in sorted((tmp_path / "femnist" / split).glob("all*.json")):
            content = json.loads(file.read_text())
            for user, data in content["user_data"].items():
                images, labels = rows(found, user, split)
                np.testing.assert_array_equal(images.reshape(45, 784), np.rint(np.array(data["x"]) * 255))
                np.testing.assert_array_equal(labels, data["y"])
                names.append(user)
        assert names != sorted(names)
        assert [found.domain_names[d] for d in found.domains(split)] == sorted(names)
    pixels = (found.images[:1] / 255 - found.info.mean) / found.info.std
    assert pixels[0, 27, 27, 0] == 0.0  # white paper is 0 to the network


def test_femnist_without_val_takes_the_first_writers_in_file_order(tmp_path, monkeypatch):
    raws.write_femnist(tmp_path)
    shutil.rmtree(tmp_path / "femnist" / "val")
    train = sorted((tmp_path / "femnist" / "train").glob("all*.json"))
    order = [user for file in train for user in json.loads(file.read_text())["users"]]
    output = command(monkeypatch, "--benchmark=femnist", f"--raw_dir={tmp_path}", f"--data_dir={tmp_path}/data")
    assert "warning" in output and "the first 3 writers of train/ in file order validate" in output
    found = open_store(tmp_path / "data" / "femnist")
    assert [found.domain_names[d] for d in found.domains("val")] == sorted(order[:3])
    assert [found.domain_names[d] for d in found.domains("train")] == sorted(order[3:])
    assert found.info.marks == ("val from train",)


def test_femnist_in_one_file_is_the_same(tmp_path):
    """LEAF since 2021 writes all writers of a split into one file."""
    raws.write_femnist(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for split in ("train", "val", "test"):
        files = sorted((tmp_path / "b" / "femnist" / split).glob("all*.json"))
        parts = [json.loads(file.read_text()) for file in files]
        merged = {
            "user_data": parts[1]["user_data"] | parts[0]["user_data"],
            "users": parts[0]["users"] + parts[1]["users"],
            "num_samples": parts[0]["num_samples"] + parts[1]["num_samples"],
        }
        files[0].write_text(json.dumps(merged, indent=2))
        files[1].unlink()
    assert stored(tmp_path / "a", "femnist").sha256 == stored(tmp_path / "b", "femnist").sha256


# The tables of ARM's data sets, written out once more.
CIFAR = {
    "train": "spatter 1,spatter 2,spatter 3,jpeg_compression 1,jpeg_compression 2,jpeg_compression 3",
    "val": "spatter 4,jpeg_compression 5",
    "test": "spatter 5,jpeg_compression 4",
}
EACH = {
    "train": "gaussian_noise shot_noise defocus_blur glass_blur zoom_blur snow frost brightness contrast pixelate",
    "val": "speckle_noise gaussian_blur saturate",
    "test": "impulse_noise motion_blur fog elastic_transform",
}


@pytest.mark.parametrize(
    "benchmark, first, counts", [("cifar_c", "spatter", (56, 17, 22)), ("tiny_imagenet_c", "frost", (51, 17, 22))]
)
def test_corrupted_benchmarks_have_arms_domains_in_its_order(benchmark, first, counts):
    domains = {"cifar_c": cifar_c, "tiny_imagenet_c": tiny_imagenet_c}[benchmark].DOMAINS
    for (split, start), count in zip(CIFAR.items(), counts, strict=True):
        each = [f"{c} {s}" for c in EACH[split].split() if c != first for s in range(1, 6)]
        assert [f"{c} {s}" for c, s in domains[split]] == start.replace("spatter", first).split(",") + each
        assert len(domains[split]) == count


def test_cifar_c_value_by_value(tmp_path):
    raws.write_cifar_c(tmp_path)
    found = stored(tmp_path, "cifar_c")
    assert found.info.mean == (0.485, 0.456, 0.406) and found.info.std == (0.229, 0.224, 0.225)
    for split, folder in {"train": "CIFAR-10-C-new/train", "val": "CIFAR-10-C-new/val", "test": "CIFAR-10-C"}.items():
        names = [found.domain_names[d] for d in found.domains(split)]
        assert names == [f"{c} {s}" for c, s in cifar_c.DOMAINS[split]]
        for name in names:
            corruption, severity = name.split()
            number = sum(map(ord, folder + corruption)) % 251
            images, labels = raws.cifar_blocks(corruption, number, 45)
            ours, our_labels = rows(found, name, split)
            assert (ours[:, 0, 0, 1] == 40 * int(severity)).all() and (ours[:, 0, 0, 2] == np.arange(45)).all()
            block = slice(45 * (int(severity) - 1), 45 * int(severity))
            np.testing.assert_array_equal(ours, images[block])
            np.testing.assert_array_equal(our_labels, np.arange(45) * 7 % 10 if split == "test" else labels[block])


def test_tiny_imagenet_c_value_by_value(tmp_path):
    raws.write_tiny_imagenet_c(tmp_path)
    found = stored(tmp_path, "tiny_imagenet_c")
    assert found.info.class_names == raws.WNIDS and found.images.shape[1:] == (64, 64, 3)
    for split in ("train", "val", "test"):
        names = [found.domain_names[d] for d in found.domains(split)]
        assert names == [f"{c} {s}" for c, s in tiny_imagenet_c.DOMAINS[split]]
        for name in names:
            corruption, severity = name.split()
            images, labels = rows(found, name, split)
            np.testing.assert_array_equal(labels, np.repeat(np.arange(4), 3))
            for i, (image, label) in enumerate(zip(images, labels, strict=True)):
                grey = corruption == "fog" and i % 3 == 0  # a grey file has become RGB
                wanted = (90, 90, 90) if grey else raws.tiny_colour(corruption, int(severity), label)
                assert np.abs(image.astype(int) - wanted).max() <= 3  # JPEG


def test_iwildcam_value_by_value(tmp_path, monkeypatch):
    table = raws.write_iwildcam(tmp_path)
    output = command(
        monkeypatch,
        "--benchmark=iwildcam",
        f"--raw_dir={tmp_path}",
        f"--data_dir={tmp_path}",
        "--name=wild",
        "--size=48",
    )
    assert "train: left out 1 cameras with fewer than 40 images (39 images)" in output
    found = open_store(tmp_path / "wild")
    assert found.info.metric == "macro_f1" and found.info.class_names == tuple(f"animal {y}" for y in range(5))
    assert found.images.shape[1:] == (48, 48, 3)
    for split, sizes in raws.CAMERAS.items():
        assert sorted(np.diff(found.offsets)[found.domains(split)]) == sorted(n for n in sizes if n >= 40)
        names = [found.domain_names[d] for d in found.domains(split)]
        assert names == sorted(names, key=lambda name: int(name.split()[1]))
        for name in names:
            mine = [r for r in table if r["split"] == split and f"location {r['location_remapped']}" == name]
            images, labels = rows(found, name, split)
            np.testing.assert_array_equal(labels, [r["y"] for r in mine])
            for image, row in zip(images, mine, strict=True):
                with Image.open(tmp_path / "iwildcam_v2.0" / "train" / row["filename"]) as file:
                    wanted = file.convert("RGB").resize((48, 48), Image.Resampling.BILINEAR)
                np.testing.assert_array_equal(image, np.asarray(wanted))
    assert len(found.labels) == sum(n for sizes in raws.CAMERAS.values() for n in sizes if n >= 40)


def test_folder_value_by_value(tmp_path, monkeypatch):
    raws.write_folder(tmp_path / "mine")
    lines = [f"site {d},{('train', 'val', 'test')[d % 3]}" for d in range(7)]
    (tmp_path / "split.csv").write_text("\n".join(["domain,split", *lines]))
    arguments = ("--benchmark=folder", f"--raw_dir={tmp_path}/mine", f"--data_dir={tmp_path}/data", "--size=16")
    output = command(monkeypatch, *arguments, f"--split_csv={tmp_path}/split.csv")
    assert "site 0: left out, 9 images are fewer than 40" in output and "val: 2 domains; tasks of 5 need more" in output
    found = open_store(tmp_path / "data" / "folder")
    where = dict(zip(found.domain_names, found.split, strict=True))
    assert where == {f"site {d}": ("train", "val", "test")[d % 3] for d in range(1, 7)}  # the file leaves site 7 out
    for name, split in where.items():
        images, labels = rows(found, name, split)
        np.testing.assert_array_equal(labels, np.repeat(np.arange(3), 14))
        colour = np.stack([np.full(42, 20 * int(name.split()[1])), 60 * labels, np.tile(np.arange(14), 3)], 1)
        np.testing.assert_array_equal(images, np.broadcast_to(colour[:, None, None], images.shape))
    again = command(monkeypatch, *arguments)
    assert "is there already" in again and found.sha256 in again
    kept = command(monkeypatch, *arguments, "--name=all", "--min_images=1", "--seed=3")
    assert "left out" not in kept and len(open_store(tmp_path / "data" / "all").split) == 8


def test_folder_splits_follow_the_seed(tmp_path):
    from cxda_jax.data.folder import random_splits

    names = [f"d{i}" for i in range(50)]
    splits = random_splits(names, 0)
    counts = [sum(s == split for s in splits.values()) for split in ("train", "val", "test")]
    assert counts == [35, 5, 10] and splits == random_splits(names, 0) != random_splits(names, 1)


def test_cifar_c_regenerated(tmp_path, monkeypatch):
    raws.write_cifar_c(tmp_path)
    shutil.rmtree(tmp_path / "CIFAR-10-C-new")
    clean, labels = raws.write_cifar_binary(tmp_path)
    arguments = ("--benchmark=cifar_c", f"--raw_dir={tmp_path}", "--regenerate", f"--data_dir={tmp_path}")
    output = command(monkeypatch, *arguments, "--seed=1")
    assert "regenerated" in output
    found = open_store(tmp_path / "cifar_c")
    assert found.info.marks == ("regenerated",) and "corruptions of clean training images" in found.info.provenance
    np.testing.assert_array_equal(cifar_c.read_binary(tmp_path)[0], clean)
    bases = {}
    for split, per_class in (("train", 48), ("val", 12)):
        kept = cifar_c.hold_out(labels, 1)[split == "val"]
        bases[split] = set(kept)
        for number, (corruption, severity) in enumerate(cifar_c.DOMAINS[split]):
            images, got = rows(found, f"{corruption} {severity}", split)
            assert (np.bincount(got) == per_class).all()  # of 60 images of each class
            if number in (0, 7):  # one with all its images, whichever way they were drawn
                rng = np.random.default_rng([corruptions.VERSION, 1, ("train", "val").index(split), number])
                mine = np.concatenate(
                    [rng.choice(kept[labels[kept] == c], per_class, replace=False) for c in range(10)]
                )
                wanted = corruptions.corrupt(clean[mine], corruption, severity, rng)
                np.testing.assert_array_equal(images, wanted)
                np.testing.assert_array_equal(got, labels[mine])
    assert not bases["train"] & bases["val"] and len(bases["train"] | bases["val"]) == 600
    np.testing.assert_array_equal(rows(found, "fog 2", "test")[0], np.load(tmp_path / "CIFAR-10-C" / "fog.npy")[45:90])
    command(monkeypatch, *arguments, "--seed=1", "--name=again", "--workers=1")
    assert open_store(tmp_path / "again").sha256 == found.sha256  # whatever the number of threads
    command(monkeypatch, *arguments, "--seed=2", "--name=other")
    assert open_store(tmp_path / "other").sha256 != found.sha256


def test_tiny_imagenet_c_regenerated(tmp_path):
    raws.write_tiny_imagenet_c(tmp_path)
    shutil.rmtree(tmp_path / "Tiny-ImageNet-C-new")
    raws.write_tiny_imagenet(tmp_path)
    found = stored(tmp_path, "tiny_imagenet_c", regenerate=True)
    assert found.info.marks == ("regenerated",) and found.info.class_names == raws.WNIDS
    assert [found.domain_names[d] for d in found.domains("train")] == [
        f"{c} {s}" for c, s in tiny_imagenet_c.DOMAINS["train"]
    ]
    images, labels = rows(found, "contrast 5", "train")
    assert (np.bincount(labels) == 10).all()
    again = corruptions.as_jpeg(images, 85)  # it has been through this already, which the published files have too
    assert np.abs(again.astype(int) - images).mean() < 0.05
    # Of its contrast a twentieth is left (Tiny's constant; CIFAR's is 0.15); the clean means and spread are known.
    assert np.abs(images.mean((1, 2, 3)) - (75 + 25 * labels + 9)).max() < 2
    assert np.abs(images.std((1, 2, 3)) - 0.05 * 150 / np.sqrt(12)).max() < 0.5
    assert (np.bincount(rows(found, "saturate 1", "val")[1]) == 3).all()


def test_cifar_c_through_tensorflow_datasets(tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets")
    rng = np.random.default_rng(0)

    def write(name, config, split, count):
        images, labels = rng.integers(0, 256, (count, 32, 32, 3), np.uint8), np.arange(count) % 10
        info = tfds.builder(f"{name}/{config}" if config else name, data_dir=str(tmp_path)).info
        record = {"id": "", "image": None, "label": 0}
        records = [(i, record | {"image": image, "label": i % 10}) for i, image in enumerate(images)]
        tfds.dataset_builders.store_as_tfds_dataset(
            name=name, version=str(info.version), config=config, data_dir=str(tmp_path), features=info.features,
            split_datasets={split: [(i, {k: r[k] for k in info.features}) for i, r in records]}, disable_shuffling=True,
        )  # fmt: skip
        return images, labels

    clean = write("cifar10", None, "train", 60)
    test = {}
    for corruption, severity in cifar_c.DOMAINS["test"]:
        name = corruption.removesuffix("_transform")
        test[f"{corruption} {severity}"] = write("cifar10_corrupted", f"{name}_{severity}", "test", 20)
    found = stored(tmp_path, "cifar_c", tfds=True)
    assert found.info.marks == ("regenerated",) and [len(found.domains(s)) for s in ("train", "val", "test")] == [
        56,
        17,
        22,
    ]
    for domain, (images, labels) in test.items():
        np.testing.assert_array_equal(rows(found, domain, "test")[0], images)
        np.testing.assert_array_equal(rows(found, domain, "test")[1], labels)
    assert (np.bincount(rows(found, "contrast 3", "train")[1]) == 5).all() and len(clean[0]) == 60


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def first_json(raw):
    return sorted((raw / "femnist" / "train").glob("all*.json"))[0]


def resave(path, change):
    array = change(np.load(path))
    np.save(path, array, allow_pickle=array.dtype == object)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def replace_in(path, old, new):
    path.write_text(path.read_text().replace(old, new, 1))


HTML = b"<!DOCTYPE html><html>Google Drive - Virus scan warning</html>"
OFFICIAL, NEW = "CIFAR-10-C", "CIFAR-10-C-new"
WILD = "iwildcam_v2.0"
FAULTS = [
    ("femnist", lambda r: shutil.rmtree(r / "femnist"), "/femnist: no such folder; --raw_dir is the folder that holds femnist/"),
    ("femnist", lambda r: (shutil.rmtree(r / "femnist"), write(r / "femnist.zip", HTML)),
     "/femnist.zip: a web page (HTML), not the data; the link asks for a confirmation or is dead, fetch it again"),
    ("femnist", lambda r: (shutil.rmtree(r / "femnist"), write(r / "femnist.zip", b"PK")),
     "/femnist.zip: damaged, cut short or not an archive ("),
    ("femnist", lambda r: [p.unlink() for p in (r / "femnist" / "test").glob("all*.json")],
     "/femnist/test: no .json files; FEMNIST is read from femnist/train, femnist/val and femnist/test"),
    ("femnist", lambda r: write(first_json(r), HTML), "train_9.json: a web page (HTML), not the data"),
    ("femnist", lambda r: write(first_json(r), b""), "train_9.json: empty; fetch or make it again"),
    ("femnist", lambda r: write(first_json(r), first_json(r).read_bytes()[:-2000]),
     "train_9.json: cut short (ends inside a JSON value); fetch or make it again"),
    ("femnist", lambda r: write(first_json(r), b'[{"a": 1}]'), "train_9.json: not a LEAF file of users, num_samples and user_data"),
    ("femnist", lambda r: edit(first_json(r), lambda c: c["users"].pop()), "train_9.json: not a LEAF file of users"),
    ("femnist", lambda r: shutil.copy(first_json(r), first_json(r).with_name("z.json")),
     "z.json: writer f0074_00 is also in all_data_0_niid_1_keep_100_train_9.json; keep one of them"),
    ("femnist", lambda r: edit(first_json(r), lambda c: c["user_data"]["f0074_00"]["y"].__setitem__(0, 62)),
     "train_9.json: writer f0074_00: labels are not integers in 0..61; fetch or make it again"),
    ("femnist", lambda r: edit(first_json(r), lambda c: c["user_data"]["f0074_00"]["x"][3].pop()), "train_9.json: writer f0074_00: "),
    ("femnist", lambda r: edit(first_json(r), lambda c: c["user_data"]["f0074_00"]["x"].pop()),
     "train_9.json: writer f0074_00: x (44, 784) and y (45,), expected (45, 784) and (45,); fetch or make it again"),
    ("femnist", lambda r: edit(first_json(r), lambda c: c["user_data"]["f0074_00"]["x"][3].__setitem__(0, 255)),
     "train_9.json: writer f0074_00: pixels in 0..255, expected 0..1; fetch or make it again"),
    ("cifar_c", lambda r: shutil.rmtree(r / NEW), "/CIFAR-10-C-new: no such folder; --raw_dir is the folder that holds CIFAR-10-C-new/"),
    ("cifar_c", lambda r: shutil.rmtree(r / NEW / "val"), "/CIFAR-10-C-new/val: no such folder; CIFAR-C is read from CIFAR-10-C and"),
    ("cifar_c", lambda r: (r / OFFICIAL / "fog.npy").unlink(), "/CIFAR-10-C/fog.npy: missing; extract the download again"),
    ("cifar_c", lambda r: (r / NEW / "val" / "saturate_labels.npy").unlink(), "/val/saturate_labels.npy: missing; extract"),
    ("cifar_c", lambda r: write(r / OFFICIAL / "fog.npy", HTML), "/CIFAR-10-C/fog.npy: a web page (HTML), not the data"),
    ("cifar_c", lambda r: write(r / OFFICIAL / "fog.npy", (r / OFFICIAL / "fog.npy").read_bytes()[:-9]),
     "/CIFAR-10-C/fog.npy: cut short or not a .npy file ("),
    ("cifar_c", lambda r: write(r / OFFICIAL / "fog.npy", b"\x93NUMPY"), "/CIFAR-10-C/fog.npy: cut short or not a .npy file ("),
    ("cifar_c", lambda r: write(r / OFFICIAL / "fog.npy", b""), "/CIFAR-10-C/fog.npy: cut short or not a .npy file ("),
    ("cifar_c", lambda r: resave(r / OFFICIAL / "fog.npy", lambda a: a.astype(object)),
     "/CIFAR-10-C/fog.npy: holds Python objects, not numbers; refused, since loading could run code"),
    ("cifar_c", lambda r: resave(r / OFFICIAL / "fog.npy", lambda a: a.astype(np.float32)),
     "/CIFAR-10-C/fog.npy: holds float32 (225, 32, 32, 3), expected uint8 (n, 32, 32, 3)"),
    ("cifar_c", lambda r: resave(r / OFFICIAL / "fog.npy", lambda a: a[:-1]),
     "/CIFAR-10-C/fog.npy: 224 images and 225 labels; expected five equal blocks of each, by severity"),
    ("cifar_c", lambda r: resave(r / OFFICIAL / "labels.npy", lambda a: np.roll(a, 1)[np.r_[0:225]] + np.eye(225, dtype=np.uint8)[0]),
     "/CIFAR-10-C/labels.npy: 225 labels that are not one list five times over; fetch it again"),
    ("cifar_c", lambda r: resave(r / NEW / "train" / "snow_labels.npy", lambda a: a + 1),
     "/train/snow_labels.npy: labels in 1..10, expected 0..9; fetch it again"),
    ("tiny_imagenet_c", lambda r: shutil.rmtree(r / "Tiny-ImageNet-C" / "fog"), "/Tiny-ImageNet-C/fog/1: no such folder; extract the download again"),
    ("tiny_imagenet_c", lambda r: shutil.rmtree(r / "Tiny-ImageNet-C-new" / "train" / "frost" / "2" / raws.WNIDS[1]),
     "train/frost/2: class folder n01629819 is missing (3 of 4); labels would shift, extract it again"),
    ("tiny_imagenet_c", lambda r: [p.unlink() for p in (r / "Tiny-ImageNet-C/fog/3" / raws.WNIDS[0]).iterdir()],
     "/Tiny-ImageNet-C/fog/3/n01443537: no images; extract the download again"),
    ("tiny_imagenet_c", lambda r: write(r / "Tiny-ImageNet-C/fog/3" / raws.WNIDS[0] / "a.JPEG", HTML), "/n01443537/a.JPEG: a web page (HTML)"),
    ("tiny_imagenet_c", lambda r: Image.new("RGB", (32, 64)).save(r / "Tiny-ImageNet-C/fog/3" / raws.WNIDS[0] / "a.JPEG"),
     "/n01443537/a.JPEG: 32x64 pixels, expected 64x64"),
    ("iwildcam", lambda r: (r / WILD / "metadata.csv").unlink(), "/metadata.csv: missing; extract the download again"),
    ("iwildcam", lambda r: replace_in(r / WILD / "metadata.csv", "location_remapped", "place"),
     "/metadata.csv: no column 'location_remapped'; is it WILDS version 2.0? fetch it again"),
    ("iwildcam", lambda r: replace_in(r / WILD / "metadata.csv", "0,id_test,", "0,id_toast,"), "/metadata.csv: line 2 is not understood (split='id_toast'"),
    ("iwildcam", lambda r: replace_in(r / WILD / "metadata.csv", ",1,0,2013", ",9,0,2013"), "/metadata.csv: labels y are not 0..5 without gaps; fetch it again"),
    ("iwildcam", lambda r: (r / WILD / "categories.csv").unlink(), "/categories.csv: missing; extract the download again"),
    ("iwildcam", lambda r: replace_in(r / WILD / "categories.csv", "4,40,animal 4\n", ""), "/categories.csv: no category with y=4, which metadata.csv uses; fetch it again"),
    ("iwildcam", lambda r: [p.unlink() for p in (r / WILD / "train").iterdir()][:0], ".jpg: missing; extract the download again"),
    ("iwildcam", lambda r: [p.write_bytes(p.read_bytes()[:300]) for p in (r / WILD / "train").iterdir()][:0], ".jpg: not readable as an image ("),
    ("folder", lambda r: shutil.rmtree(r), ": no such folder; give the one that holds DOMAIN/CLASS/IMAGE"),
    ("folder", lambda r: [shutil.rmtree(p) for p in r.iterdir()], ": no images; expected DOMAIN/CLASS/IMAGE with .bmp, .gif, "),
    ("folder", lambda r: [shutil.rmtree(p) for p in r.iterdir() if p.name != "site 0"], ": no domain has 40 images; add images or lower --min_images"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_each_fault_is_one_line_that_names_the_file_and_the_fix(tmp_path, monkeypatch, number):
    benchmark, spoil, message = FAULTS[number]
    raw = tmp_path / "raw"
    WRITERS[benchmark](raw)
    spoil(raw)
    line = command(monkeypatch, f"--benchmark={benchmark}", f"--raw_dir={raw}", f"--data_dir={tmp_path}/data", code=2)
    assert line.startswith("error: ") and line.count("\n") == 1 and message in line
    assert str(tmp_path) in line or message.startswith("train/frost")
    assert not (tmp_path / "data").exists() or not list((tmp_path / "data").iterdir())


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "--split_csv={}: No such file or directory; give a CSV file with the columns domain and split"),
        ("domain,split\n", "{}: no lines; give a CSV file with the columns domain and split"),
        (
            "domain,split\nsite 1,dev\n",
            "{}: line 2: expected a domain and one of train, val, test, got 'site 1', 'dev'",
        ),
        ("name,part\nsite 1,val\n", "{}: no column 'domain'; give a CSV file with the columns domain and split"),
        ("domain,split\nsite 99,val\n", "{}: line 2: "),
        ("domain,split\nsite 1,val\nsite 1,test\n", "{}: line 3: 'site 1' is already in 'val'"),
    ],
)
def test_faults_of_split_files(tmp_path, content, message):
    raws.write_folder(tmp_path / "raw")
    path = tmp_path / "split.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as error:
        READERS["folder"](tmp_path / "raw", split_csv=str(path))
    assert str(error.value).startswith(message.format(path))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--benchmark=femnits",), "--benchmark='femnits' is unknown; did you mean 'femnist'?"),
        (("--benchmark=femnist", "--tfds"), "--tfds: femnist has no such option; see --help"),
        (("--benchmark=femnist", "--strict"), "--strict: train domains: 6, but the paper's 262; fetch the files again"),
        (("--benchmark=femnist", "--size=4"), "flag --size=4"),
    ],
)
def test_faults_of_the_command_line(tmp_path, monkeypatch, arguments, message):
    raws.write_femnist(tmp_path / "raw")
    line = command(monkeypatch, *arguments, f"--raw_dir={tmp_path}/raw", f"--data_dir={tmp_path}/data", code=2)
    assert message in line and line.count("\n") == 1 and not (tmp_path / "data").exists()


def test_the_card_compares_with_the_paper(tmp_path, monkeypatch):
    raws.write_cifar_c(tmp_path)
    output = command(monkeypatch, "--benchmark=cifar_c", f"--raw_dir={tmp_path}", f"--data_dir={tmp_path}")
    lines = output.splitlines()
    assert (
        "train         56     2520       10   45 to 45" in lines
        and "test          22      990       10   45 to 45" in lines
    )
    assert "train domains: 56, as in the paper" in lines and "test images: 990, the paper's: 220000" in lines
    assert f"sha256 {open_store(tmp_path / 'cifar_c').sha256}" in lines
    with Image.open(tmp_path / "cifar_c" / "sheet.png") as sheet:  # four domains of each split
        assert sheet.size[0] > 800 and sheet.size[1] > 600 and len(set(sheet.convert("L").get_flattened_data())) > 50


def test_objects_in_a_npy_file_are_never_loaded(tmp_path):
    ran = tmp_path / "ran"

    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(ran),))

    np.save(tmp_path / "trap.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="refused"):
        load_npy(tmp_path / "trap.npy", "u", (32, 32, 3))
    assert not ran.exists()


def test_pieces_come_in_order_and_few_are_read_ahead():
    """A slow reader must not let the rest of a data set pile up in memory, nor change its order."""
    started, taken = [], 0

    def read(i):
        started.append(i)
        time.sleep(0.01 * (i % 3))
        return np.full((2, 1, 1, 1), i, np.uint8), np.zeros(2, int)

    pieces = [Piece(f"d{i}", "train", 2, lambda i=i: read(i)) for i in range(40)]
    for i, domain in enumerate(read_pieces(pieces, 3, lambda done: None)):
        assert domain.name == f"d{i}" and (domain.images == i).all()
        taken += 1
        assert len(started) <= taken + 6
    assert taken == 40


def test_a_fault_in_one_piece_stops_the_rest(tmp_path):
    read = []

    def fail():
        raise UserError("x.jpg: broken")

    pieces = [Piece("a", "train", 1, fail)] + [Piece("b", "train", 1, lambda: read.append(1)) for _ in range(100)]
    with pytest.raises(UserError, match="x.jpg"):
        list(read_pieces(pieces, 2, lambda done: None))
    time.sleep(0.1)
    assert len(read) < 10


def test_a_killed_prepare_leaves_nothing_that_is_taken_for_a_store(tmp_path):
    """Killed while it writes; run again, it makes the same store as an undisturbed one."""
    raws.write_iwildcam(tmp_path / "raw")
    arguments = [sys.executable, "-m", "launch.prepare", "--benchmark=iwildcam", f"--raw_dir={tmp_path}/raw"]
    slow = "import time, cxda_jax.data.raw as r; old = r.read_image; r.read_image = lambda *a: (time.sleep(0.02), old(*a))[1]; "
    code = slow + "from launch import cli, prepare; cli.run(prepare.main)"
    target = tmp_path / "data" / "iwildcam"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments[3:], f"--data_dir={target.parent}"], cwd=ROOT, stdout=subprocess.PIPE
    )
    until = time.monotonic() + 60
    while not any(p.stat().st_size for p in tmp_path.glob("data/.iwildcam.partial-*/images.u8")):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (partial,) = target.parent.iterdir()
    assert partial.name.startswith(".iwildcam.partial-") and not target.exists()
    with pytest.raises(UserError, match="no data store|not a data store"):
        open_store(target)
    subprocess.run([*arguments, f"--data_dir={target.parent}"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    assert partial.exists()  # it may belong to a process that is still at work
    for path in (partial, *partial.iterdir()):
        os.utime(path, (0, time.time() - store.ABANDONED - 60))
    shutil.rmtree(target)
    subprocess.run([*arguments, f"--data_dir={target.parent}"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    assert not partial.exists()
    raw = READERS["iwildcam"](tmp_path / "raw")
    prepare.prepare(raw, tmp_path / "undisturbed", 1)
    assert open_store(target).sha256 == open_store(tmp_path / "undisturbed").sha256


def test_memory_does_not_grow_with_the_data(tmp_path):
    """600 images of one camera at 448 pixels are 361 MB; a few pieces of 8 MB may be in memory."""
    table = raws.write_iwildcam(tmp_path)
    root = tmp_path / "iwildcam_v2.0"
    (row,) = [r for r in table if r["y"] == 0 and r["split"] == "train"][:1]
    large = Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 40, 3), np.uint8)).resize((600, 448))
    large.save(root / "train" / "large.jpg")
    lines = (root / "metadata.csv").read_text().splitlines()
    more = ",".join(str(v) for v in (row | {"filename": "large.jpg"}).values())
    (root / "metadata.csv").write_text("\n".join([*lines, *[more] * 600]))
    code = f"""
import resource
from pathlib import Path
from cxda_jax.data import iwildcam, raw, store
from launch import cli, prepare
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
found = iwildcam.find(Path({str(tmp_path)!r}), size=448)
before = peak()
prepare.prepare(found, Path({str(tmp_path)!r}) / "store", workers=2)
opened = store.open_store(Path({str(tmp_path)!r}) / "store")
print(opened.images.nbytes // 2**20, peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    size, growth = map(float, done.stdout.split()[-2:])
    assert size > 700 and growth < 120
