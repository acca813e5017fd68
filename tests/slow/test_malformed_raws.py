"""Faults of raw files, split files and the command line: each costs one short line that names the file and the fix."""

import io
import json
import re
import shutil

import numpy as np
import pytest

from cxda_jax.data.readers.raw import read_pieces
from cxda_jax.errors import UserError
from cxda_jax.studies import preparing
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
DAMAGE = {  # benchmark: file, damage, what is said
    "femnist": [
        ("femnist", None, "/femnist: no such folder; .* holds femnist/"),
        (JSON, HTML, r"a web page \(HTML\).* fetch it again"),
        (JSON, cut(2000), "not a LEAF file .*; fetch or make it again"),
        (JSON, leaf("users", to=[1]), "users and user_data differ"),
        ("femnist/train/a.json", DOUBLE, f"/train/all_.*: writer {W} is also in another file here; keep one"),
        (JSON, leaf("user_data", W, to={"x": []}), rf"writer {W}: not readable \(no 'y'\); fetch or make"),
        (JSON, leaf("user_data", W, "x", to=[[0.5] * 784] * 3), r"x \(3, 784\) .* expected \(4, 784\)"),
        (JSON, leaf("user_data", W, "x", 0, to=[float("nan")] * 784), "pixels in nan..nan, expected 0..1; fetch"),
        *((JSON, leaf("user_data", W, "y", 0, to=y), "labels are not integers in 0..61; fetch") for y in (62, 1.5, -1)),
    ],
    "cifar_c": [
        (FOG, None, f"/{FOG}: missing; extract the download again"),
        (FOG, cut(9), rf"/{FOG}: cut short or not a .npy file of numbers \(.*; fetch or make it"),
        (FOG, changed(lambda a: a.astype(object)), f"/{FOG}: .* not a .npy file of numbers .*Python objects"),
        (FOG, changed(np.uint16), r"holds \w+ \(.*\), expected uint8 \(n, 32, 32, 3\); fetch"),
        (FOG, changed(lambda a: a[:-1]), f"/{FOG}: 24 images and 25 labels, expected five equal blocks, .*; fetch it"),
        (SNOW, changed(lambda a: a[:5]), "/snow.npy: 25 images and 5 labels, .*; fetch it and snow_labels.npy again"),
        *((SNOW, changed(lambda a, v=v: np.full(25, v)), f"/{SNOW}: a label is {v}, .* whole numbers in 0..9; fetch")
          for v in (1.5, -1, 10)),
    ],
    "regenerated": [
        (CLEAN, cut(100), f"/{CLEAN}: 30630 bytes are not rows of a label .*; fetch it again"),
        (CLEAN, cut(3073), r"regenerate: 4 clean images of class \d, at least 5 are needed; extract"),
    ],
    "tiny_imagenet_c": [
        (TINY.rpartition("/")[0], None, r"/fog/3: class folder n\d+ is in one of it and .*; .* extract both"),
        (TINY, None, "/fog/3/n01443537: no images; extract"),
        (TINY, raws.png(32, 32, 8, 0, bytes(32 * 33)), f"/{TINY}: 32x32 pixels, expected 64x64; fetch it again"),
        (TINY, lambda old: old[:300], rf"/{TINY}: not readable as an image \(.*; fetch or extract it again"),
    ],
    "iwildcam": [
        (META, lambda old: old.replace(b"location_re", b"re", 1), "no column 'location_remapped'; is it WILDS"),
        (META, rows(("id_toast", 1, 0, "a.jpg")), r"line 2 is not understood \(split='id_toast'"),
        (META, rows(("test", 1, 0, "../../a.jpg")), "line 2 is not understood .*filename='../../a.jpg'"),
        (META, rows(("test", 1, 1, "a.jpg")), "labels y are not 0..0 without gaps; fetch it again"),
    ],
    "folder": [
        ("*", None, "/raw: no images; expected DOMAIN/CLASS/IMAGE with .bmp, .gif, "),
        (MINE, raws.png(40_000, 40_000, 8, 2, b"\0" * 1000), rf"/{MINE}: not readable as an image \(too many pixels\)"),
    ],
    "split_csv": [
        ("split.csv", b"domain;split\nsite 1;val\n", "split.csv: no column 'domain'; give a CSV file"),
        ("split.csv", b"domain,split\n" + b"x" * 500 + b",dev\n", r"split.csv: line 2: .*, got 'x+\.\.\.x+', 'dev'"),
        ("split.csv", b"domain,split\nsite 1,val\nsite 1,test", "line 3: 'site 1' is already in 'val'; remove a line"),
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
    with refused("{tmp}/raw.*: no such folder; give the one|split_csv={tmp}", tmp_path):
        FIND[benchmark](raw)


def test_no_reader_may_give_a_domain_to_two_splits(tmp_path):
    raws.write_folder(tmp_path / "raw")
    raw, read = READERS["folder"](tmp_path / "raw"), []
    pieces = [piece._replace(read=lambda: read.append(1)) for piece in raw.pieces]
    raw = raw._replace(pieces=[*pieces, pieces[0]._replace(split="test")])
    with refused(f"domain {pieces[0].domain!r} is in train and in test; ", tmp_path):
        preparing.prepare(raw, tmp_path / "store", 1)
    assert not read and [path.name for path in tmp_path.iterdir()] == ["raw"]
