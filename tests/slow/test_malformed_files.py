"""What may be wrong with a user's raw files, stores, weights and runs: one line names the file and what is wrong in it."""

import io
import json
import os
import pickle
import re
import shutil

import numpy as np
import pytest
from safetensors import numpy as safetensors

from cxda_jax.data.readers.raw import read_pieces
from cxda_jax.data.store import open_store
from cxda_jax.disk import files
from cxda_jax.errors import UserError
from cxda_jax.nets.pretrained import read_weights
from cxda_jax.studies.folders import read_results
from cxda_jax.training.experiment import READERS
from tests import lines
from tests import raw_fixtures as raws
from tests.conftest import make_store
from tests.lines import HTML, one_line, refused


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


def flipped(old):
    return old[: len(old) // 2] + bytes([old[len(old) // 2] ^ 1]) + old[len(old) // 2 + 1 :]


def damaged(path, damage):
    old = path.read_bytes()
    path.unlink()
    put(path, damage, old)


def unsealed(*places, to=...):
    """A card as the oldest versions wrote it: without a seal."""
    return lambda old: leaf(files.SEAL)(leaf(*places, to=to)(old))


CARD = "store.json"
STORES = [  # file of a good one, damage, what the line names
    (CARD, None, CARD), (CARD, b"[" * 100_000, CARD), (CARD, leaf("format", to=99), "99"),
    (CARD, leaf("provenance", to="elsewhere"), "recorded hash"), (CARD, unsealed("domains"), "'domains'"),
    (CARD, unsealed("domains", 1, "rows", to=-30), "'d1' has -30"), (CARD, unsealed("domains", 8, "name", to="d0"), "'d0'"),
    (CARD, unsealed("mean", to=[0.4, 0.5, 0.6]), "mean="), (CARD, unsealed("std", to=[0]), "std="),
    ("images.u8", cut(1), "69119 bytes"), ("images.u8", flipped, "recorded hash"), ("labels.i32", flipped, "recorded hash"),
]  # fmt: skip


def test_data_stores(tmp_path):
    for name, damage, said in STORES:
        make_store(tmp_path)
        damaged(tmp_path / "store" / name, damage)
        with refused("; (delete the folder and )?prepare ", tmp_path, named=said):
            open_store(tmp_path / "store")
        shutil.rmtree(tmp_path / "store")


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


WEIGHTS = safetensors.save({"a": np.zeros(4, np.float32)})
HEADERS = [  # bytes that are no such file
    b"", WEIGHTS[:-3], (2**62).to_bytes(8, "little") + WEIGHTS[8:], WEIGHTS[:8] + b"[1]" + WEIGHTS[11:],
    *(WEIGHTS.replace(old, new) for old, new in ((b"F32", b"F8_"), (b"[4]", b"[5]"), (b'"shape"', b'"shaqe"'))),
]  # fmt: skip


def test_weights(tmp_path, monkeypatch):
    """What is pickled is never run."""
    torch = pytest.importorskip("torch")

    def saved(value):
        torch.save(value, file := io.BytesIO())
        return file.getvalue()

    zeros = torch.zeros(3)
    monkeypatch.chdir(tmp_path)
    bombs = pickle.dumps(Bomb()), saved({"a": zeros, "b": Bomb()}), saved({"a": zeros})[:-60]
    others = ("weights.h5", b"x"), ("a.safetensors", HTML), *(("a.safetensors", data) for data in HEADERS)
    for name, data in (*others, *(("a.pth", bomb) for bomb in bombs)):
        (tmp_path / name).write_bytes(data)
        with refused("", tmp_path, named=name):
            read_weights(tmp_path / name)
        assert not (tmp_path / "exploded").exists()


def arrays(**changes):
    """The predictions with other arrays, each made of the stored ones; None takes one away."""

    def damage(old):
        stored = dict(np.load(io.BytesIO(old)))
        new = stored | {name: change(stored) for name, change in changes.items() if change}
        np.savez(file := io.BytesIO(), **{name: new[name] for name in new if changes.get(name, 1)})
        return file.getvalue()

    return damage


NPZ = "predictions.npz"
RESULTS = [  # file of a good run, damage, what the line names
    ("result.json", leaf("seed"), "'seed'"), ("result.json", leaf("avg", to=99.0), "avg is 99"),
    ("result.json", leaf("risk", to={"0.8": 99.5}), "risk.0.8=99.5"),
    ("result.json", leaf("calibration_error", to=99.5), "calibration_error=99.5"),
    ("result.json", leaf("reached_step", to=21), "reached_step=21"),
    ("result.json", leaf("predictions_sha256", to="1f"), "differs from the hash in result.json"),  # of another evaluation
    ("result.json", leaf("also", to={"a": {"avg": 1}}), "also.a.w10"),
    ("result.json", leaf("device", to="\x1b[2J"), "device="), (NPZ, None, NPZ), (NPZ, pickle.dumps(Bomb()), NPZ),
    (NPZ, arrays(labels=lambda a: np.array([[Bomb()]], object)), NPZ), (NPZ, arrays(support=None), "support"),
    (NPZ, arrays(predictions=lambda a: a["predictions"][:5]), "(5, 4)"),
]  # fmt: skip


def test_results_of_runs(tmp_path, monkeypatch):
    """A fault that launch.report names, while it reports the rest."""
    monkeypatch.chdir(tmp_path)
    lines.write_run(tmp_path / "good")
    for name, damage, said in RESULTS:
        lines.write_run(tmp_path / "run")
        damaged(tmp_path / "run" / name, damage)
        results, faults = read_results([tmp_path / "run", tmp_path / "good"])
        assert [r.run.name for r in results] == ["good"] and len(faults) == 1
        line = lines.one_line(faults[0], tmp_path)
        assert re.search("^{tmp}/run.*--runs={tmp}/run$", line) and said in line, line
        assert not (tmp_path / "exploded").exists()
        shutil.rmtree(tmp_path / "run")


W, JSON = "f0074_00", "femnist/train/all_data_0_niid_1_keep_100_train_9.json"
FOG, SNOW = "CIFAR-10-C/fog.npy", "CIFAR-10-C-new/train/snow_labels.npy"
CLEAN, TINY = "cifar-10-batches-bin/data_batch_1.bin", f"Tiny-ImageNet-C/fog/3/{raws.WNIDS[0]}/{raws.WNIDS[0]}_0.JPEG"
META, MINE = "iwildcam_v2.0/metadata.csv", "site 1/kind0/00.png"
DOUBLE = json.dumps({"users": [W], "user_data": {W: {"x": [[0] * 784], "y": [0]}}}).encode()
DAMAGE = {  # benchmark: file, damage, what the line names beside the file
    "femnist": [
        (JSON, HTML, "web page"), (JSON, cut(2000), "not a LEAF file"), (JSON, leaf("users", to=[1]), "users"),
        ("femnist/train/a.json", DOUBLE, f"writer {W} is also in another file"),
        (JSON, leaf("user_data", W, "x", to=[[0.5] * 784] * 3), f"writer {W}: .*3, 784"),
        (JSON, leaf("user_data", W, "x", 0, to=[float("nan")] * 784), "nan"),
        *((JSON, leaf("user_data", W, "y", 0, to=y), f"writer {W}.*labels") for y in (62, 1.5, -1)),
    ],
    "cifar_c": [
        (FOG, cut(9), ".npy"), (FOG, changed(np.uint16), "uint8"), (FOG, changed(lambda a: a[:-1]), "24 images"),
        *((SNOW, changed(lambda a, v=v: np.full(25, v)), f"a label is {v}") for v in (1.5, -1, 10)),
    ],
    "regenerated": [(CLEAN, cut(100), "30630 bytes"), (CLEAN, cut(3073), r"regenerate: 4 clean images of class \d")],
    "tiny_imagenet_c": [
        (TINY.rpartition("/")[0], None, "/fog/3: class folder"), (TINY, None, "/fog/3/n01443537: no images"),
        (TINY, raws.png(32, 32, 8, 0, bytes(32 * 33)), "32x32"),
    ],
    "iwildcam": [
        (META, rows(("test", 1, 0, "../../a.jpg")), "line 2 .*filename='../../a.jpg'"),
        (META, rows(("test", 1, 1, "a.jpg")), "labels y"),
    ],
    "folder": [(MINE, raws.png(40_000, 40_000, 8, 2, b"\0" * 1000), "too many pixels")],
    "split_csv": [("split.csv", b"domain,split\nsite 1,val\nsite 1,test", "line 3: 'site 1'")],
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
