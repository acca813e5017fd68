"""Raw downloads to stores: every value from its place, and every fault in one line."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cxda_jax.data import corruptions, store
from cxda_jax.data.readers import cifar_c, tiny_imagenet_c
from cxda_jax.data.readers.raw import Piece, Rows, load_npy, read_pieces
from cxda_jax.data.store import open_store
from cxda_jax.errors import UserError
from cxda_jax.experiment import READERS
from cxda_jax.study import preparing
from tests import raw_fixtures as raws
from tests.commands import command

ROOT = Path(__file__).parent.parent


def stored(tmp_path, benchmark, **options):
    """The store that a benchmark's raw files give."""
    raw = READERS[benchmark](tmp_path, **options)
    preparing.prepare(raw, tmp_path / "store", workers=2)
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


def test_femnist_without_val_takes_the_first_writers_in_file_order(tmp_path):
    raws.write_femnist(tmp_path)
    shutil.rmtree(tmp_path / "femnist" / "val")
    train = sorted((tmp_path / "femnist" / "train").glob("all*.json"))
    order = [user for file in train for user in json.loads(file.read_text())["users"]]
    output = command("prepare", "--benchmark=femnist", f"--raw_dir={tmp_path}", f"--data_dir={tmp_path}/data")
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


def test_labels_of_cifar_c_may_be_whole_floats_or_a_column(tmp_path):
    raws.write_cifar_c(tmp_path, size=10)
    found = stored(tmp_path, "cifar_c")
    folder = tmp_path / "CIFAR-10-C-new" / "train"
    for number, path in enumerate(sorted(folder.glob("*_labels.npy"))):
        labels = np.load(path).astype((np.float64, np.float32, np.int64, np.uint8)[number % 4])
        np.save(path, labels[:, None] if number % 3 else labels)
    np.save(tmp_path / "CIFAR-10-C" / "labels.npy", np.load(tmp_path / "CIFAR-10-C" / "labels.npy")[:, None] * 1.0)
    shutil.rmtree(tmp_path / "store")
    assert stored(tmp_path, "cifar_c").sha256 == found.sha256


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


def test_iwildcam_value_by_value(tmp_path):
    table = raws.write_iwildcam(tmp_path)
    output = command(
        "prepare",
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


def test_folder_value_by_value(tmp_path):
    raws.write_folder(tmp_path / "mine")
    lines = [f"site {d},{('train', 'val', 'test')[d % 3]}" for d in range(7)]
    (tmp_path / "split.csv").write_text("\n".join(["domain,split", *lines]))
    arguments = ("--benchmark=folder", f"--raw_dir={tmp_path}/mine", f"--data_dir={tmp_path}/data", "--size=16")
    output = command("prepare", *arguments, f"--split_csv={tmp_path}/split.csv")
    assert "site 0: left out, 9 images are fewer than 40" in output and "val: 2 domains; tasks of 5 need more" in output
    found = open_store(tmp_path / "data" / "folder")
    where = dict(zip(found.domain_names, found.split, strict=True))
    assert where == {f"site {d}": ("train", "val", "test")[d % 3] for d in range(1, 7)}  # the file leaves site 7 out
    for name, split in where.items():
        images, labels = rows(found, name, split)
        np.testing.assert_array_equal(labels, np.repeat(np.arange(3), 14))
        colour = np.stack([np.full(42, 20 * int(name.split()[1])), 60 * labels, np.tile(np.arange(14), 3)], 1)
        np.testing.assert_array_equal(images, np.broadcast_to(colour[:, None, None], images.shape))
    again = command("prepare", *arguments)
    assert "is there already" in again and found.sha256 in again
    kept = command("prepare", *arguments, "--name=all", "--min_images=1", "--seed=3")
    assert "left out" not in kept and len(open_store(tmp_path / "data" / "all").split) == 8


def test_folder_splits_follow_the_seed(tmp_path):
    from cxda_jax.data.readers.folder import random_splits

    names = [f"d{i}" for i in range(50)]
    splits = random_splits(names, 0)
    counts = [sum(s == split for s in splits.values()) for split in ("train", "val", "test")]
    assert counts == [35, 5, 10] and splits == random_splits(names, 0) != random_splits(names, 1)


def test_cifar_c_regenerated(tmp_path):
    raws.write_cifar_c(tmp_path)
    shutil.rmtree(tmp_path / "CIFAR-10-C-new")
    clean, labels = raws.write_cifar_binary(tmp_path)
    arguments = ("--benchmark=cifar_c", f"--raw_dir={tmp_path}", "--regenerate", f"--data_dir={tmp_path}")
    output = command("prepare", *arguments, "--seed=1")
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
    command("prepare", *arguments, "--seed=1", "--name=again", "--workers=1")
    assert open_store(tmp_path / "again").sha256 == found.sha256  # whatever the number of threads
    command("prepare", *arguments, "--seed=2", "--name=other")
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


def test_the_card_compares_with_the_paper(tmp_path):
    raws.write_cifar_c(tmp_path)
    output = command("prepare", "--benchmark=cifar_c", f"--raw_dir={tmp_path}", f"--data_dir={tmp_path}")
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
        return Rows(np.full((2, 1, 1, 1), i, np.uint8), np.zeros(2, int))

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
    slow = "import time, cxda_jax.data.readers.raw as r; old = r.read_image; r.read_image = lambda *a, **k: (time.sleep(0.02), old(*a, **k))[1]; "
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
    (partial,) = target.parent.glob(".iwildcam.partial-*")
    assert not target.exists() and {p.name for p in target.parent.iterdir()} <= {partial.name, ".iwildcam.decoded"}
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
    preparing.prepare(raw, tmp_path / "undisturbed", 1)
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
from cxda_jax.data import store
from cxda_jax.data.readers import iwildcam
from cxda_jax.study import preparing
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
found = iwildcam.find(Path({str(tmp_path)!r}), size=448)
before = peak()
preparing.prepare(found, Path({str(tmp_path)!r}) / "store", workers=2)
opened = store.open_store(Path({str(tmp_path)!r}) / "store")
print(opened.images.nbytes // 2**20, peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    size, growth = map(float, done.stdout.split()[-2:])
    assert size > 700 and growth < 120
