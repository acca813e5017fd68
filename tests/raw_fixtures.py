"""Tiny raw copies of the benchmarks in their exact layouts, with values that tell where an image came from."""

import csv
import json
import struct
import uuid
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from cxda_jax.data.readers.cifar_c import TRAIN_BATCHES

WNIDS = ("n01443537", "n01629819", "n02124075", "n12267677")
CIFAR = {"train": "CIFAR-10-C-new/train", "val": "CIFAR-10-C-new/val", "test": "CIFAR-10-C"}
TINY = {"train": "Tiny-ImageNet-C-new/train", "val": "Tiny-ImageNet-C-new/val", "test": "Tiny-ImageNet-C"}
EACH = {
    "train": "gaussian_noise shot_noise defocus_blur glass_blur zoom_blur snow frost brightness contrast pixelate",
    "val": "speckle_noise gaussian_blur saturate",
    "test": "impulse_noise motion_blur fog elastic_transform",
}


def arms_domains(first: str) -> dict[str, list[tuple[str, int]]]:
    """The tables of ARM's data sets, written out once more; `first` is spatter for CIFAR-C, frost for the other."""
    late = {"val": [(first, 4), ("jpeg_compression", 5)], "test": [(first, 5), ("jpeg_compression", 4)]}
    start = {"train": [(c, s) for c in (first, "jpeg_compression") for s in (1, 2, 3)], **late}
    each = {split: [c for c in names.split() if c != first] for split, names in EACH.items()}
    return {split: start[split] + [(c, s) for c in each[split] for s in range(1, 6)] for split in start}


def write_femnist(raw: Path, images: int = 6, writers: int = 6) -> None:
    """Two files in each split, writers in no order; image i of a writer has its number in pixel (0, i % 28)."""
    rng = np.random.default_rng(0)
    for s, split in enumerate(("train", "val", "test")):
        (folder := raw / "femnist" / split).mkdir(parents=True)
        ids = [f"f{1000 * s + 37 * (i + 2) % 101:04d}_{i:02d}" for i in range(writers)]
        for part, mine in enumerate((ids[: writers // 2], ids[writers // 2 :])):
            data = {}
            for user in mine:
                x = np.ones((images, 784))
                x[:, 300:556] = np.round(rng.permutation(256) / 255, 6)  # short decimals, so levels are to be rounded
                x[np.arange(images), np.arange(images) % 28] = (ids.index(user) * 10 + s) / 255
                data[user] = {"x": x.tolist(), "y": rng.integers(0, 62, images).tolist()}
            name = f"all_data_{part}_niid_1_keep_100_{'test' if split == 'test' else 'train'}_9.json"
            content = {"users": mine, "num_samples": [images] * len(mine), "hierarchies": ["a", "b"], "user_data": data}
            (folder / name).write_text(json.dumps(content))
        (folder / "README.md").write_text("not data")
        (folder / "._all_data_0.json").write_bytes(b"\x00\x05\x16\x07")  # what macOS puts into archives


def cifar_number(folder: str, corruption: str) -> int:
    return sum(map(ord, folder + corruption)) % 251


def cifar_blocks(number: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Five blocks; a pixel holds the file's number, the severity and the row, and labels differ from block to block."""
    images = np.random.default_rng(number).integers(0, 256, (5 * size, 32, 32, 3), np.uint8)
    rows = np.arange(5 * size)
    images[:, 0, 0] = np.stack([np.full_like(rows, number), 40 * (rows // size + 1), rows % size], 1)
    return images, ((rows % size) * (rows // size + 1) + number) % 10


def write_cifar_c(raw: Path, size: int = 5) -> None:
    for split, domains in arms_domains("spatter").items():
        folder = CIFAR[split]
        (raw / folder).mkdir(parents=True)
        for name in {corruption for corruption, _ in domains}:
            images, labels = cifar_blocks(cifar_number(folder, name), size)
            np.save(raw / folder / f"{name}.npy", images)
            if split != "test":
                np.save(raw / folder / f"{name}_labels.npy", labels)
    np.save(raw / "CIFAR-10-C" / "labels.npy", np.tile(np.arange(size) * 7 % 10, 5).astype(np.uint8))
    np.save(raw / "CIFAR-10-C" / "gaussian_noise.npy", np.zeros((5, 32, 32, 3), np.uint8))  # not of this benchmark


def write_cifar_binary(
    raw: Path, per_class: int = 2, names: Sequence[str] = TRAIN_BATCHES
) -> tuple[np.ndarray, np.ndarray]:
    """The binary version of clean CIFAR-10: files of rows of a label and 3072 bytes, channel by channel."""
    rng = np.random.default_rng(5)
    labels = rng.permutation(np.repeat(np.arange(10), len(names) * per_class)).astype(np.uint8)
    images = np.linspace(0, 200, 32)[:, None, None] + 5 * labels[:, None, None, None]
    images = (images + rng.integers(0, 9, (len(labels), 32, 32, 3))).astype(np.uint8)
    (raw / "cifar-10-batches-bin").mkdir(parents=True, exist_ok=True)
    rows = np.concatenate([labels[:, None], images.transpose(0, 3, 1, 2).reshape(len(labels), -1)], 1)
    for name, part in zip(names, np.split(rows, len(names)), strict=True):
        part.tofile(raw / "cifar-10-batches-bin" / f"{name}.bin")
    return images, labels


def tiny_colour(corruption: str, severity: int, label: int) -> tuple[int, int, int]:
    return sum(map(ord, corruption)) % 200, 40 * severity, 50 * label


def write_tiny_imagenet_c(raw: Path, per_class: int = 2) -> None:
    """Images of one colour that names corruption, severity and class; a grey one, and things that are no classes."""
    for split, domains in arms_domains("frost").items():
        for corruption, severity in domains:
            here = raw / TINY[split] / corruption / str(severity)
            for label, wnid in enumerate(WNIDS):
                (here / wnid).mkdir(parents=True)
                for i in range(per_class):
                    image = Image.new("RGB", (64, 64), tiny_colour(corruption, severity, label))
                    if corruption == "fog" and i == 0:
                        image = Image.new("L", (64, 64), 90)
                    image.save(here / wnid / f"{wnid}_{i}.JPEG", quality=85)
            (here / "notes.txt").write_text("no class")
            (here / WNIDS[0] / ".DS_Store").write_bytes(b"\x00")
            (here / "nothing").mkdir()


def write_iwildcam(raw: Path, cameras: dict | None = None, classes: int = 5) -> list[dict]:
    """Cameras of these sizes, id_val and id_test rows on training cameras, images of several shapes, some grey."""
    root, cameras = raw / "iwildcam_v2.0", cameras or {"train": (52, 39, 41), "val": (44, 40), "test": (47, 43)}
    (root / "train").mkdir(parents=True)
    (root / "RELEASE_v2.0.txt").write_text("")
    rng = np.random.default_rng(3)
    locations = iter(rng.permutation(sum(map(len, cameras.values()))))
    rows, table = [], []
    for split, sizes in cameras.items():
        for size in sizes:
            location = int(next(locations))
            rows += [(split, location)] * size
            rows += [("id_val", location), ("id_test", location)] * 2 * (split == "train")
    for i, (split, location) in enumerate(rows[j] for j in rng.permutation(len(rows))):
        name = f"{uuid.UUID(int=int(rng.integers(2**62)))}.jpg"
        shape = [(60, 80, 3), (54, 96, 3), (112, 112, 3), (60, 80)][i % 4]
        pixels = rng.integers(0, 40, shape) + np.linspace(0, 200, shape[1]).reshape(1, -1, *[1] * (len(shape) - 2))
        Image.fromarray(pixels.astype(np.uint8)).save(root / "train" / name, quality=90)
        table.append({
            "": i, "split": split, "location_remapped": location, "location": 900 - location, "sequence_remapped": i,
            "seq_id": f"s{i}", "y": i % classes if i < classes else int(rng.integers(classes)), "category_id": 0,
            "datetime": f"2013-06-{i % 28 + 1:02d} 10:25:57.000", "filename": name, "image_id": name[:-4],
        })  # fmt: skip
    with open(root / "metadata.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, table[0])
        writer.writeheader()
        writer.writerows(table)
    lines = [*(f"{y},{10 * y},animal {y}" for y in range(classes)), "99999,7,unseen"]
    (root / "categories.csv").write_text("\n".join(["y,category_id,name", *sorted(lines, reverse=True)]) + "\n")
    return table


def write_images(folder: Path, count: int, seed: int) -> Path:
    """A user's own images, of mixed sizes and kinds."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    for i in range(count):
        pixels = rng.integers(0, 256, (*rng.integers(10, 60, 2), 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"image{i:03d}.{('png', 'jpg', 'webp', 'bmp', 'tif')[i % 5]}")
    return folder


def write_folder(raw: Path, domains: int = 8, images: int = 14, classes: int = 3) -> None:
    """domain/class/image of several formats; the image's grey value names its domain and class."""
    for d in range(domains):
        for label in range(classes):
            (here := raw / f"site {d}" / f"kind{label}").mkdir(parents=True)
            for i in range(images if d else 3):
                suffix = ("png", "bmp", "PNG")[i % 3]
                Image.new("RGB", (20 + d, 30), (d * 20, label * 60, i)).save(here / f"{i:02d}.{suffix}")
            (here / "Thumbs.db").write_text("")
            (here / "._00.png").write_bytes(b"\x00")
        (raw / f"site {d}" / ".hidden").mkdir()


def png(width: int, height: int, bits: int, kind: int, data: bytes) -> bytes:
    """A file of any depth, also of those that PIL reads but does not write."""
    chunks = {b"IHDR": struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)}
    chunks |= {b"IDAT": zlib.compress(data), b"IEND": b""}
    parts = (struct.pack(">I", len(c)) + n + c + struct.pack(">I", zlib.crc32(n + c)) for n, c in chunks.items())
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
