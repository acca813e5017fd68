"""Faults of raw files, split files and the command line: each costs one short line that names the file and the fix."""

import io
import json
import re
import shutil

import numpy as np
import pytest

from cxda_jax.data.readers.raw import read_pieces
from cxda_jax.errors import UserError
from cxda_jax.training.experiment import READERS
from tests import raw_fixtures as raws
from tests.lines import HTML, one_line, refused

FILL = {
    "femnist": lambda raw: raws.write_femnist(raw, images=4, writers=2), "cifar_c": raws.write_cifar_c,
    "regenerated": lambda raw: raws.write_cifar_binary(raw, per_class=1), "folder": raws.write_folder,
    "tiny_imagenet_c": lambda raw: raws.write_tiny_imagenet_c(raw, per_class=1), "split_csv": raws.write_folder,
    "iwildcam": lambda raw: raws.write_iwildcam(raw, {"train": (40,)}),
}  # fmt: skip
FIND = READERS | {
    "regenerated": lambda raw: READERS["cifar_c"](raw, regenerate=True),
    "split_csv": lambda raw: READERS["folder"](raw, split_csv=f"{raw}/split.csv"),
}


def leaf(*places, to=...):
    """The JSON with another value at content[place][place]..., or without it."""

    def damage(old):
        inner = content = json.loads(old)
        for place in places[:-1]:
            inner = inner[place]
        inner[places[-1]] = to
        if to is ...:
            del inner[places[-1]]
        return json.dumps(content).encode()

    return damage


def put(path, damage, old):
    """What is damaged: other bytes, changed ones, or nothing for None."""
    if damage is not None:
        path.write_bytes(damage(old) if callable(damage) else damage)


def cut(count):
    return lambda old: old[:-count]


def changed(change):
    """A .npy file of the changed array."""

    def damage(old):
        np.save(file := io.BytesIO(), change(np.load(io.BytesIO(old))))
        return file.getvalue()

    return damage


def rows(*lines):
    """metadata.csv with its header and a line for each split, place, label and file."""
    written = (f"0,{split},{place},1,0,s0,{y},0,2013,{name},a\n".encode() for split, place, y, name in lines)
    return lambda old: old[: old.index(b"\n") + 1] + b"".join(written)


W, JSON = "f0074_00", "femnist/train/all_data_0_niid_1_keep_100_train_9.json"
FOG, SNOW = "CIFAR-10-C/fog.npy", "CIFAR-10-C-new/train/snow_labels.npy"
CLEAN, TINY = "cifar-10-batches-bin/data_batch_1.bin", f"Tiny-ImageNet-C/fog/3/{raws.WNIDS[0]}/{raws.WNIDS[0]}_0.JPEG"
META, MINE = "iwildcam_v2.0/metadata.csv", "site 1/kind0/00.png"
DOUBLE = json.dumps({"users": [W], "user_data": {W: {"x": [[0] * 784], "y": [0]}}}).encode()
DAMAGE = {  # benchmark: file, damage, what the line names beside the file
    "femnist": [
        (JSON, HTML, "web page"), (JSON, cut(2000), "not a LEAF file"), (JSON, leaf("users", to=[1]), "users"),
        ("femnist/train/a.json", DOUBLE, f"writer {W} is also in another file"),
        (JSON, leaf("user_data", W, to={"x": []}), f"writer {W}: .*'y'"),
        (JSON, leaf("user_data", W, "x", to=[[0.5] * 784] * 3), f"writer {W}: .*3, 784"),
        (JSON, leaf("user_data", W, "x", 0, to=[float("nan")] * 784), "nan"),
        *((JSON, leaf("user_data", W, "y", 0, to=y), f"writer {W}.*labels") for y in (62, 1.5, -1)),
    ],
    "cifar_c": [
        (FOG, None, "missing"), (FOG, cut(9), ".npy"), (FOG, changed(lambda a: a.astype(object)), "Python objects"),
        (FOG, changed(np.uint16), "expected uint8"), (FOG, changed(lambda a: a[:-1]), "24 images"),
        *((SNOW, changed(lambda a, v=v: np.full(25, v)), f"a label is {v}") for v in (1.5, -1, 10)),
    ],
    "regenerated": [(CLEAN, cut(100), "30630 bytes"), (CLEAN, cut(3073), r"regenerate: 4 clean images of class \d")],
    "tiny_imagenet_c": [
        (TINY.rpartition("/")[0], None, "/fog/3: class folder"), (TINY, None, "/fog/3/n01443537: no images"),
        (TINY, raws.png(32, 32, 8, 0, bytes(32 * 33)), "32x32"), (TINY, lambda old: old[:300], "not readable"),
    ],
    "iwildcam": [
        (META, lambda old: old.replace(b"location_re", b"re", 1), "location_remapped"),
        (META, rows(("id_toast", 1, 0, "a.jpg")), "line 2 .*split='id_toast'"),
        (META, rows(("test", 1, 0, "../../a.jpg")), "line 2 .*filename='../../a.jpg'"),
        (META, rows(("test", 1, 1, "a.jpg")), "labels y"),
    ],
    "folder": [("*", None, "no images"), (MINE, raws.png(40_000, 40_000, 8, 2, b"\0" * 1000), "too many pixels")],
    "split_csv": [
        ("split.csv", b"domain;split\nsite 1;val\n", "'domain'"),
        ("split.csv", b"domain,split\n" + b"x" * 500 + b",dev\n", "line 2: .*'dev'"),
        ("split.csv", b"domain,split\nsite 1,val\nsite 1,test", "line 3: 'site 1'"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("benchmark", DAMAGE)
def test_damaged_files_are_named(tmp_path, benchmark):
    FILL[benchmark](raw := tmp_path / "raw")
    for name, damage, message in DAMAGE[benchmark]:
        good = {path: path.rename(tmp_path / f"{i}") for i, path in enumerate([*raw.glob(name)])}
        for path in (good or [raw / name]) if damage else ():
            put(path, damage, good[path].read_bytes() if good else b"")
        with pytest.raises(UserError) as error:
            list(read_pieces(FIND[benchmark](raw).pieces, 2, lambda done: None))
        line = one_line(str(error.value).partition("; or give skip_bad=1 (1 bad of ")[0], tmp_path)
        assert re.search("{tmp}/raw|^regenerate: ", line) and re.search(message, line), f"{name}: {line}"
        (raw / name).unlink(missing_ok=True)
        for path, kept in good.items():
            kept.rename(path)
    shutil.rmtree(raw)
    raw.write_text("")
    with refused("{tmp}/raw.*: no such folder|split_csv={tmp}", tmp_path):
        FIND[benchmark](raw)
