"""What may be wrong with a user's stores, weights and runs: each costs one line that names the fault and the fix."""

import io
import os
import pickle
import re
import shutil

import numpy as np
import pytest
from safetensors import numpy as safetensors

from cxda_jax.config.fields import Values
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


def test_layers_of_weights(tmp_path, monkeypatch):
    """Of a network with a first convolution and a head."""
    monkeypatch.chdir(tmp_path)
    variables = {"params": {"trunk": {"conv1": {"kernel": np.zeros((7, 7, 3, 4), np.float32)}}}, "batch_stats": {}}
    first, options = (
        np.ones((4, 3, 7, 7), np.float32),
        {"name": "resnet50", "weights": "a.safetensors", "dont_load": ("fc",)},
    )
    for arrays, named in [
        ({"conv2.weight": first}, "conv1.weight is missing"), ({"conv1.weight": first[:1]}, "conv1.weight is (7"),
        ({"conv1.weight": first, "extra.weight": first}, "extra.weight"),
        ({"conv1.weight": first * np.float32("nan")}, "conv1.weight holds nan"),
    ]:  # fmt: skip
        safetensors.save_file(arrays, "a.safetensors")
        with refused("^net.weights", named=named):
            start_from_weights(Values(options), variables)


CONFIGS = [  # damage of a good run's config.json, what the line names
    (cut(9), "config.json"), (leaf("method"), "'method'"), (leaf("method", to="cxdaa"), "method='cxdaa'"),
    (leaf("net", "width", to=True), "net.width=True"), (leaf("optimizer", "momentum"), "optimizer.momentum"),
    (leaf("data", "writers", to=[1, "2", 3]), "data.writers="), (leaf("benchmark", to="folder"), "data.name:"),
]  # fmt: skip


def test_configs_of_runs(tmp_path, data_dir):
    """As launch.evaluate reads them, before anything is compiled."""
    run = tmp_path / "run"
    for damage, named in CONFIGS:
        lines.write_run(run)
        damaged(run / "config.json", damage)
        manifest.write(run, ["config.json"], about=manifest.read_about(run))  # as if it had been trained so
        with refused("", tmp_path, named=named):
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
RESULTS = [  # file of a good run, damage, what the line names
    ("result.json", leaf("seed"), "'seed'"), ("result.json", leaf("avg", to=99.0), "avg is 99"),
    ("result.json", leaf("risk", to={"0.8": 99.5}), "risk.0.8=99.5"),
    ("result.json", leaf("calibration_error", to=99.5), "calibration_error=99.5"),
    ("result.json", leaf("reached_step", to=21), "reached_step=21"),
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
