"""What may be wrong with a user's stores, weights and runs: each costs one line that names the fault and the fix."""

import io
import os
import pickle
import re
import shutil

import numpy as np
import pytest
from safetensors import numpy as safetensors

from cxda_jax.config.reading import as_fields
from cxda_jax.data.store import open_store
from cxda_jax.disk import files, manifest
from cxda_jax.nets.pretrained import read_weights
from cxda_jax.studies import identity
from cxda_jax.studies.folders import read_results
from cxda_jax.training.experiment import build_on, open_data, start_from_weights
from tests import lines
from tests.conftest import make_store
from tests.lines import HTML, refused
from tests.slow.test_malformed_raws import cut, leaf, put


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
STORES = [  # file of a good one, damage, what the line says before the fix
    (CARD, None, r"^{tmp}/store: not a data store \(no store.json\)"),
    (CARD, b"[" * 100_000, "not readable as JSON .*nested too deeply"),
    (CARD, leaf("format", to=99), "store format 99, this version reads 1"),
    (CARD, leaf("provenance", to="elsewhere"), "store.json differs from its recorded hash"),
    (CARD, unsealed("domains"), r"store.json: not understood \(no 'domains'\)"),
    (CARD, unsealed("domains", 1, "rows", to=-30), "domain 'd1' has -30 rows"),
    (CARD, unsealed("domains", 8, "name", to="d0"), "domain 'd0' is in train and in test"),
    (CARD, unsealed("mean", to=[0.4, 0.5, 0.6]), r"mean=\[0.4, 0.5, 0.6\] .*channel"),
    (CARD, unsealed("std", to=[0]), r"std=\[0\] has a zero"),
    ("images.u8", cut(1), "images.u8: 69119 bytes, expected 69120"),
    *((name, flipped, f"{name} differs from its recorded hash") for name in ("images.u8", "labels.i32")),
]


def test_data_stores(tmp_path):
    for name, damage, said in STORES:
        make_store(tmp_path)
        damaged(tmp_path / "store" / name, damage)
        with refused(f"{said}.*; (delete the folder and )?prepare (it again|the data set first)$", tmp_path):
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
OBJECTS = "other objects than tensors, or no pickle.*; save a model's state_dict"


def test_weights(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")

    def saved(value):
        torch.save(value, file := io.BytesIO())
        return file.getvalue()

    zeros = torch.zeros(3)
    monkeypatch.chdir(tmp_path)
    for name, data, said in [
        ("weights.h5", b"x", r"\.h5 is not \.safetensors, \.pth or \.pt"),
        ("a.safetensors", HTML, "a web page .*fetch it again"),
        *(("a.safetensors", data, "not a safetensors file of weights .*; fetch") for data in HEADERS),
        ("a.pth", pickle.dumps(Bomb()), OBJECTS),
        ("a.pth", saved({"a": zeros, "b": Bomb()}), OBJECTS),
        ("a.pth", saved({"a": zeros})[:-60], "holds no plain weights"),
    ]:
        path = tmp_path / name
        path.write_bytes(data)
        with (
            refused(f"^(net.weights=)?{{tmp}}/{re.escape(name)}: .*{said}", tmp_path),
            as_fields({"net": {"weights": str(path)}}, "net"),
        ):
            read_weights(path)
        assert not (tmp_path / "exploded").exists()


def test_layers_of_weights(tmp_path, monkeypatch):
    """Of a network with a first convolution and a head."""
    monkeypatch.chdir(tmp_path)
    variables = {"params": {"trunk": {"conv1": {"kernel": np.zeros((7, 7, 3, 4), np.float32)}}}, "batch_stats": {}}
    first = np.ones((4, 3, 7, 7), np.float32)
    for arrays, net, said in [
        ({"conv2.weight": first}, {}, "conv1.weight is missing; are these .* a ResNet-50"),
        ({"conv1.weight": first, "extra.weight": first}, {}, r"no extra.weight \(1 .*net.dont_load"),
        ({"conv1.weight": first * np.float32("nan")}, {}, "conv1.weight holds nan or infinity; fetch the file again"),
        ({"conv1.weight": first[:1]}, {}, r"conv1.weight is \(.*the network's is \(7, 7, 3, 4\)"),
    ]:
        safetensors.save_file(arrays, "a.safetensors")
        options = {"name": "resnet50", "weights": "a.safetensors", "dont_load": ("fc",), **net}
        with refused(f"^net.weights.*{said}"):
            start_from_weights({"net": options}, variables)


RESTORE = "run/config.json: .*; restore it or train again$"
CONFIGS = [  # damage of a good run's config.json, what the line says, the fix
    (cut(9), "not readable as JSON", RESTORE),
    (leaf("method"), "no 'method'", RESTORE),
    (leaf("method", to="cxdaa"), "method='cxdaa'.*did you mean 'cxda'.*choose from bbse, bn", "run/config.json"),
    (leaf("net", "width", to=True), "config.net.width=True: expected 128", RESTORE),
    (leaf("optimizer", "momentum"), "optimizer.momentum: missing", RESTORE),
    (leaf("data", "writers", to=[1, "2", 3]), r"data.writers=\[1, '2', 3\]: expected \(240", ""),
    (leaf("benchmark", to="folder"), "data.name=None: expected a folder", ""),
]


def test_configs_of_runs(tmp_path, data_dir):
    """As launch.evaluate reads them, before anything is compiled."""
    run = tmp_path / "run"
    for damage, said, fix in CONFIGS:
        lines.write_run(run)
        damaged(run / "config.json", damage)
        manifest.write(run, ["config.json"], about=manifest.read_about(run))  # as if it had been trained so
        with refused(f"(?=.*{fix}).*{said}", tmp_path):
            found = identity.read_config(run)
            build_on(found, open_data(found, data_dir), splits=("test",))
        shutil.rmtree(run)


def arrays(**changes):
    """The predictions with other arrays, each made of the stored ones; None takes one away."""

    def damage(old):
        stored = dict(np.load(io.BytesIO(old)))
        new = stored | {name: change(stored) for name, change in changes.items() if change}
        np.savez(file := io.BytesIO(), **{name: new[name] for name in new if changes.get(name, 1)})
        return file.getvalue()

    return damage


NPZ = "predictions.npz"
RESULTS = [  # file of a good run, damage, what the line says before the fix
    ("result.json", leaf("seed"), "result.json: no 'seed'"),
    ("result.json", leaf("avg", to=99.0), "avg is 99.0000, but the predictions give 37.5000"),
    ("result.json", leaf("risk", to={"0.8": 99.5}), "result.json: risk.0.8=99.5, .*0, 1"),
    ("result.json", leaf("calibration_error", to=99.5), "result.json: calibration_error=99.5, .*0, 1"),
    ("result.json", leaf("reached_step", to=21), "result.json: reached_step=21 .*steps=20"),
    ("result.json", leaf("also", to={"a": {"avg": 1}}), "result.json: no 'also.a.w10'"),
    ("result.json", leaf("device", to="\x1b[2J"), "result.json: device="),
    (NPZ, None, f"{NPZ}: missing"),
    (NPZ, pickle.dumps(Bomb()), f"{NPZ}: cut short, or no such file"),
    (NPZ, arrays(labels=lambda a: np.array([[Bomb()]], object)), f"{NPZ}: Object arrays"),
    (NPZ, arrays(support=None), f"{NPZ}: no support"),
    (NPZ, arrays(predictions=lambda a: a["predictions"][:5]), r"\(5, 4\) .*\(10, 4\)"),
]


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
        assert re.search(f"^{{tmp}}/run.*{said}.*evaluate again: .*--runs={{tmp}}/run$", line), line
        assert not (tmp_path / "exploded").exists()
        shutil.rmtree(tmp_path / "run")
