"""Faults of raw files, split files and the command line: each costs one short line that names the file and the fix."""

import io
import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from cxda_jax.data.readers.raw import read_pieces
from cxda_jax.errors import UserError
from cxda_jax.experiment import READERS
from cxda_jax.study import preparing
from tests import raw_fixtures as raws
from tests.lines import HTML, npy, one_line, refused, set_to

pytestmark = pytest.mark.gate
FILL = {
    "femnist": lambda raw: raws.write_femnist(raw, images=4, writers=2),
    "cifar_c": raws.write_cifar_c,
    "regenerated": lambda raw: raws.write_cifar_binary(raw, per_class=1),
    "tiny_imagenet_c": lambda raw: raws.write_tiny_imagenet_c(raw, per_class=1),
    "iwildcam": lambda raw: raws.write_iwildcam(raw, {"train": (40,)}),
    "folder": raws.write_folder,
    "split_csv": raws.write_folder,
}
FIND = READERS | {
    "regenerated": lambda raw: READERS["cifar_c"](raw, regenerate=True),
    "split_csv": lambda raw: READERS["folder"](raw, split_csv=f"{raw}/split.csv"),
}


def leaf(*places, to):
    def damage(old):
        set_to(*places, to=to)(content := json.loads(old))
        return json.dumps(content).encode()

    return damage


def without(*places):
    """The JSON without content[place]...[last place]."""

    def damage(old):
        inner = content = json.loads(old)
        for place in places[:-1]:
            inner = inner[place]
        del inner[places[-1]]
        return json.dumps(content).encode()

    return damage


def put(path, damage, old):
    """What is damaged: other bytes, changed ones, nothing for None, or a folder for `...`."""
    if damage is ...:
        path.mkdir()
    elif damage is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(damage(old) if callable(damage) else damage)


def cut(count):
    return lambda old: old[:-count]


def replaced(old, new):
    return lambda content: content.replace(old, new, 1)


def changed(change):
    """A .npy file of the changed array."""
    return lambda old: npy(change(np.load(io.BytesIO(old))), allow_pickle=True)()


def picture(side, kind, most=None):
    """The first bytes of an image file."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)).save(file, kind)
    return file.getvalue()[:most]


def rows(*lines):
    """A CSV file with its header and these lines."""
    return lambda old: b"\n".join([old.splitlines()[0], *lines]) + b"\n"


def row(split="test", y=0, filename="a.jpg"):
    """metadata.csv with one line."""
    return rows(f"0,{split},1,1,0,s0,{y},0,2013,{filename},a".encode())


def table(*lines):
    return b"\n".join([b"domain,split", *lines]) + b"\n"


W, JSON = "f0074_00", "femnist/train/all_data_0_niid_1_keep_100_train_9.json"
FOG, SNOW = "CIFAR-10-C/fog.npy", "CIFAR-10-C-new/train/snow_labels.npy"
CLEAN, TINY = "cifar-10-batches-bin/data_batch_1.bin", f"Tiny-ImageNet-C/fog/3/{raws.WNIDS[0]}/{raws.WNIDS[0]}_0.JPEG"
META, ANY, MINE = "iwildcam_v2.0/metadata.csv", "iwildcam_v2.0/train/*", "site 1/kind0/00.png"
UNREADABLE = r"not readable as an image \(.*; fetch or extract it again"
DOUBLE = json.dumps({"users": [W], "num_samples": [1], "user_data": {W: {}}}).encode()
DAMAGE = {  # benchmark: file, damage, what is said
    "femnist": [
        ("femnist", None, "/femnist: no such folder; .* holds femnist/"),
        (JSON, HTML, r"a web page \(HTML\).* fetch it again"),
        (JSON, cut(2000), "not a LEAF file .*cut short.*; fetch or make it again"),
        (JSON, leaf("num_samples", to=[4, 4]), "users and num_samples are not lists of one length"),
        (JSON, leaf("users", to=[1]), "users and user_data differ"),
        ("femnist/val/a.json", DOUBLE, f"/val/a.json: writer {W} is also in train/.*; .* keep one"),
        (JSON, leaf("user_data", W, to={"x": []}), rf"writer {W}: not readable \(no 'y'\); fetch or make"),
        (JSON, leaf("user_data", W, "x", to=[[0.5] * 784] * 3), r"x \(3, 784\) .* expected \(4, 784\)"),
        (JSON, leaf("user_data", W, "x", 0, to=[float("nan")] * 784), "pixels in nan..nan, expected 0..1; fetch"),
        *((JSON, leaf("user_data", W, "y", 0, to=y), "labels are not integers in 0..61; fetch") for y in (62, 1.5, -1)),
    ],
    "cifar_c": [
        (FOG, None, f"/{FOG}: missing; extract the download again"),
        (FOG, cut(9), rf"/{FOG}: cut short or not a .npy file \(.*; fetch it again"),
        (FOG, changed(lambda a: a.astype(object)), f"/{FOG}: holds Python objects, .*refused"),
        (FOG, changed(np.uint16), r"holds \w+ \(.*\), expected uint8 \(n, 32, 32, 3\); fetch"),
        (FOG, changed(lambda a: a[:-1]), f"/{FOG}: 24 images, expected five equal blocks, .*; fetch it again"),
        ("CIFAR-10-C/labels.npy", changed(lambda a: a + np.eye(25, dtype=np.uint8)[0]), "not one list five times over"),
        (SNOW, changed(lambda a: a[:5]), f"/{SNOW}: 5 labels for the 25 images of snow.npy; .* fetch both again"),
        *((SNOW, npy(np.full(25, v))(), f"/{SNOW}: a label is {v}, expected whole numbers in 0..9; fetch")
          for v in (1.5, -1, 10)),
    ],
    "regenerated": [
        (CLEAN, cut(100), f"/{CLEAN}: 30630 bytes are not rows of a label .*; fetch it again"),
        (CLEAN, cut(3073), r"regenerate: 4 clean images of class \d, at least 5 are needed; extract"),
    ],
    "tiny_imagenet_c": [
        (TINY.rpartition("/")[0], None, r"/fog/3: class folder n\d+ is missing \(3 of 4\); .* extract"),
        (TINY, None, "/fog/3/n01443537: no images; extract"),
        (TINY, picture(32, "JPEG"), f"/{TINY}: 32x32 pixels, expected 64x64; fetch it again"),
        (TINY, picture(64, "JPEG", 900), f"/{TINY}: {UNREADABLE}"),
    ],
    "iwildcam": [
        (META, replaced(b"location_remapped", b"place"), "no column 'location_remapped'; is it WILDS version 2.0"),
        (META, row(split="id_toast"), r"line 2 is not understood \(split='id_toast'"),
        (META, row(filename="../../a.jpg"), "line 2 is not understood .*filename='../../a.jpg'"),
        (META, row(y=1), "labels y are not 0..0 without gaps; fetch it again"),
        (META, rows(b"0,train,7,1,0,s0,0,0,2013,a.jpg,a", b"0,test,7,1,0,s0,0,0,2013,b.jpg,b"),
         "location 7 is in train and in test; fetch"),
        (ANY, lambda old: old[:300], f".jpg: {UNREADABLE}"),
    ],
    "folder": [
        ("*", None, "/raw: no images; expected DOMAIN/CLASS/IMAGE with .bmp, .gif, "),
        (MINE, raws.png(40_000, 40_000, 8, 2, b"\0" * 1000), rf"/{MINE}: not readable as an image \(too many pixels\)"),
    ],
    "split_csv": [
        ("split.csv", b"domain;split\nsite 1;val\n", "split.csv: no column 'domain'; give a CSV file"),
        ("split.csv", table(b"x" * 500 + b",dev"), r"split.csv: line 2: .*, got 'x+\.\.\.x+', 'dev'"),
        ("split.csv", table(b"site 1,val", b"site 1,test"), "line 3: 'site 1' is already in 'val'; remove a line"),
    ],
}  # fmt: skip


@pytest.fixture(scope="session")
def good_raws(tmp_path_factory):
    """Good raw files of each benchmark, made once."""
    root = tmp_path_factory.mktemp("raws")
    for name, fill in FILL.items():
        fill(root / name)
    return root


@pytest.mark.parametrize("benchmark", DAMAGE)
def test_damaged_files_are_named(tmp_path, good_raws, benchmark):
    raw = shutil.copytree(good_raws / benchmark, tmp_path / "raw")
    for name, damage, message in DAMAGE[benchmark]:
        good = {p: p.rename(tmp_path / f"{i}") for i, p in enumerate([*raw.glob(name)]) if p.exists()}
        paths = [*good] or [raw / name]
        for path in paths:
            put(path, damage, good[path].read_bytes() if path in good and good[path].is_file() else b"")
        with pytest.raises(UserError) as error:
            list(read_pieces(FIND[benchmark](raw).pieces, 2, lambda done: None))
        line = one_line(str(error.value).partition("; or give skip_bad=1 (1 bad of ")[0], tmp_path)
        assert re.search("{tmp}/raw|^regenerate: ", line) and re.search(message, line), f"{name}: {line}"
        for path in paths:
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
            if path in good:
                good[path].rename(path)
            elif not any(path.parent.iterdir()):
                path.parent.rmdir()
    shutil.rmtree(raw)
    raw.write_text("")
    with refused("{tmp}/raw.*: no such folder; give the one|split_csv={tmp}", tmp_path):
        FIND[benchmark](raw)


def test_no_reader_may_give_a_domain_to_two_splits(tmp_path, good_raws):
    raw, read = READERS["cifar_c"](good_raws / "cifar_c"), []
    pieces = [piece._replace(read=lambda: read.append(1)) for piece in raw.pieces]
    raw = raw._replace(pieces=[*pieces, pieces[0]._replace(split="test")])
    with refused(f"domain {pieces[0].domain!r} is in train and in test; ", tmp_path):
        preparing.prepare(raw, tmp_path / "store", 1)
    assert not read and not list(tmp_path.iterdir())
