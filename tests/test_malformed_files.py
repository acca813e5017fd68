"""What may be wrong with a user's stores, weights and runs: each costs one short line that names the fault and the fix."""

import io
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from cxda_jax.config import as_fields
from cxda_jax.data.store import open_store
from cxda_jax.disk import manifest
from cxda_jax.experiment import build_on, open_data, start_from_weights
from cxda_jax.nets.pretrained import read_weights
from cxda_jax.study import identity, runs
from cxda_jax.study.results import read_results
from tests import lines
from tests.lines import HTML, cases, cut, edit_json, flip, folder_in_place_of, refused, set_to


def json_of(name, change):
    return lambda folder: edit_json(folder / name, change)


def card(*places, to):
    return json_of("store.json", set_to(*places, to=to))


def without(place):
    """An edit: content[place] is gone."""

    def change(content):
        del content[place]

    return change


PREPARE = r"; (delete the folder and )?prepare (it again|the data set first)$"
STORES = [  # name, what is done to a good one, what the line says before the fix
    ("no store", shutil.rmtree, r"^{tmp}/store: not a data store \(no store.json\)"),
    ("a file", lambda f: (shutil.rmtree(f), f.write_text("")), "no store.json"),
    ("no store.json", lambda f: (f / "store.json").unlink(), "no store.json"),
    ("a folder for store.json", lambda f: folder_in_place_of(f / "store.json"), "store.json: .*Is a directory"),
    ("cut json", lambda f: (f / "store.json").write_text('{"format": 1,'), "store.json: not readable as JSON"),
    ("bytes", lambda f: (f / "store.json").write_bytes(b"\xff\xfe\xfd"), "not readable as JSON .*truncated data"),
    ("deep", lambda f: (f / "store.json").write_text("[" * 100_000), "not readable as JSON .*nested too deeply"),
    ("a list", json_of("store.json", lambda c: [c]), "holds a list"),
    ("other format", card("format", to=99), "store format 99, this version reads 1"),
    ("no domains", json_of("store.json", without("domains")), "no 'domains'"),
    ("no sha256", json_of("store.json", without("sha256")), "no 'sha256'"),
    ("no sha256 of labels", json_of("store.json", lambda c: without("labels")(c["sha256"])), "sha256: no 'labels'"),
    ("no rows", json_of("store.json", lambda c: without("rows")(c["domains"][1])), "domains: no 'rows'"),
    ("negative rows", card("domains", 1, "rows", to=-30), "domain 'd1' has -30 rows"),
    ("fractions of rows", card("domains", 1, "rows", to=30.5), "rows=30.5, expected a whole number"),
    ("a domain that is a name", card("domains", 1, to="d1"), "domains: 'd1', expected an object"),
    ("empty", card("domains", to=[]), "its domains have no rows"),
    ("unknown split", card("domains", 1, "split", to="dev"), "split 'dev' is not one of train, val, test"),
    ("zero in shape", card("shape", to=[0, 16, 1]), r"shape=\[0, 16, 1\]"),
    ("float in shape", card("shape", to=[16, 16.0, 1]), r"shape=\[16, 16.0, 1\]"),
    ("no channels", card("shape", to=[16, 16]), r"shape=\[16, 16\] is not a height, a width and channels"),
    ("text for shape", card("shape", to="16x16x1"), "shape='16x16x1', expected a list"),
    ("too few classes", card("class_names", to=["a", "b"]), "labels.i32: labels in 0..3, but 2 classes"),
    ("no classes", card("class_names", to=[]), r"class_names=\[\]"),
    ("mean of three", card("mean", to=[0.4, 0.5, 0.6]), r"mean=\[0.4, 0.5, 0.6\] .*channel"),
    ("std of none", card("std", to=[]), r"std=\[\] .*channel"),
    ("zero std", card("std", to=[0]), r"std=\[0\] has a zero"),
    ("nan in mean", card("mean", to=[float("nan")]), r"mean=\[nan\]"),
    ("marks in one", card("marks", to="regenerated"), "marks='regenerated', expected a list"),
    ("cut images", lambda f: cut(f / "images.u8", 1), "images.u8: 69119 bytes, expected 69120"),
    ("no labels", lambda f: (f / "labels.i32").unlink(), "labels.i32: 0 bytes, expected 1080"),
]  # fmt: skip


@cases("spoil, said", STORES)
def test_data_stores(tmp_path, store, spoil, said):
    spoil(tmp_path / "store")
    with refused(f"{said}.*{PREPARE}", tmp_path):
        open_store(tmp_path / "store")


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def safetensors(header, body=b"\0" * 16, size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + body


def tensor(start, stop, dtype="F32", shape=None):
    return {"dtype": dtype, "shape": [(stop - start) // 4] if shape is None else shape, "data_offsets": [start, stop]}


def torch_file(value):
    def data():
        torch = pytest.importorskip("torch")
        buffer = io.BytesIO()
        torch.save(value(torch), buffer)
        return buffer.getvalue()

    return data


NOT_ONE, NO_FILE = (
    "not a safetensors file of weights .*; fetch",
    r"no such file; give a \.safetensors or \.pth file, or ''$",
)
OBJECTS = "other objects than tensors, or no pickle.*; save a model's state_dict"
HEADERS = {  # of safetensors files, with 16 bytes of arrays
    "huge": safetensors({}, size=2**62), "past the end": safetensors({}, size=100), "not JSON": safetensors(b"{]"),
    "of bytes": safetensors(b"\xff\xff\xff"), "a list": safetensors([1]), "deep": safetensors(b"[" * 100_000),
    "an entry that is a number": safetensors({"a": 3}), "no offsets": safetensors({"a": {"dtype": "F32", "shape": [4]}}),
    "out of range": safetensors({"a": tensor(0, 32)}), "backwards": safetensors({"a": tensor(16, 0, shape=[4])}),
    "overlap": safetensors({"a": tensor(0, 12), "b": tensor(8, 16)}), "gap": safetensors({"a": tensor(0, 4), "b": tensor(8, 16)}),
    "another shape": safetensors({"a": tensor(0, 16, shape=[5])}), "unknown type": safetensors({"a": tensor(0, 16, "F8_E4M3", [16])}),
    "long name": safetensors({"a" * 900: tensor(0, 32)}),
}  # fmt: skip
WEIGHTS = [  # file name, what is wrong, content, what the line says
    ("a.safetensors", "missing", None, NO_FILE),
    ("a.safetensors", "a folder", ..., NO_FILE),
    ("weights", "no suffix", b"x", r"no suffix is not \.safetensors, \.pth or \.pt"),
    ("weights.h5", "another suffix", b"x", r"\.h5 is not \.safetensors, \.pth or \.pt"),
    ("a.safetensors", "empty", b"", NOT_ONE),
    ("a.safetensors", "HTML", HTML, "a web page .*fetch it again"),
    *[("a.safetensors", f"header {name}", data, NOT_ONE) for name, data in HEADERS.items()],
    ("a.pth", "empty", b"", r"holds no plain weights \(an empty file\); save a model's state_dict"),
    ("a.pth", "HTML", HTML, "a web page .*fetch it again"),
    ("a.pth", "text", b"weights", OBJECTS),
    ("a.pth", "bare bomb", lambda: pickle.dumps(Bomb()), OBJECTS),
    ("a.pth", "wrapped bomb", torch_file(lambda torch: {"a": torch.zeros(3), "b": Bomb()}), OBJECTS),
    ("a.pth", "cut", lambda: torch_file(lambda torch: {"a": torch.zeros(3)})()[:-60], "holds no plain weights"),
    ("a.pth", "list", torch_file(lambda torch: [torch.zeros(3)]), r"\(a list\); save a model's state_dict"),
    ("a.pth", "whole training", torch_file(lambda torch: {"epoch": 3, "state_dict": {}}), "epoch is a int"),
    ("a.pth", "bfloat16", torch_file(lambda torch: {"a": torch.zeros(3, dtype=torch.bfloat16)}), "no plain weights"),
]  # fmt: skip


@cases("name, data, said", [(f"{name} {fault}", name, data, said) for name, fault, data, said in WEIGHTS])
def test_weights(tmp_path, monkeypatch, name, data, said):
    path = tmp_path / "x" / name
    path.parent.mkdir()
    if data is ...:
        path.mkdir()
    elif data is not None:
        path.write_bytes(data() if callable(data) else data)
    monkeypatch.chdir(tmp_path)
    with (
        refused(f"^(net.weights=)?{{tmp}}/x/{re.escape(name)}: .*{said}", tmp_path),
        as_fields({"net": {"weights": str(path)}}, "net"),
    ):
        read_weights(path)
    assert not (tmp_path / "exploded").exists()


FIRST = np.ones((4, 3, 7, 7), np.float32)
LAYERS = [  # arrays of the file, fields of net, what the line says
    ("another net", {"conv1.weight": FIRST}, {"name": "cnn"}, "=a.*: only resnet50 .*net.name='cnn'"),
    ("missing layer", {"conv2.weight": FIRST}, {}, "conv1.weight is missing; are these .* a ResNet-50"),
    ("unknown layer", {"conv1.weight": FIRST, "extra.weight": FIRST}, {}, r"no extra.weight \(1 .*net.dont_load"),
    ("another shape", {"conv1.weight": FIRST[:, :, :5, :5]}, {}, r"\(5, 5, 3, 4\) .*the network's is \(7, 7, 3, 4\)"),
    ("nan", {"conv1.weight": FIRST * np.float32("nan")}, {}, "conv1.weight holds nan or infinity; fetch the file again"),
    ("a scalar", {"conv1.weight": np.float32(1)}, {}, r"conv1.weight is \(\) .*the network's is \(7, 7, 3, 4\)"),
]  # fmt: skip


@cases("arrays, net, said", LAYERS)
def test_layers_of_weights(tmp_path, monkeypatch, arrays, net, said):
    """Of a network with a first convolution and a head."""
    monkeypatch.chdir(tmp_path)
    header, body = {}, b""
    for name, array in arrays.items():
        header[name] = tensor(len(body), len(body) + array.nbytes, shape=list(array.shape))
        body += array.tobytes()
    Path("a.safetensors").write_bytes(safetensors(header, body))
    variables = {"params": {"trunk": {"conv1": {"kernel": jax.numpy.zeros((7, 7, 3, 4))}}}, "batch_stats": {}}
    options = {"name": "resnet50", "weights": "a.safetensors", "dont_load": ("fc",), **net}
    with refused(f"^net.weights.*{said}"):
        start_from_weights({"net": options}, variables)


def config(*places, to):
    return json_of("config.json", set_to(*places, to=to))


def result(*places, to):
    return json_of("result.json", set_to(*places, to=to))


def arrays(change):
    def spoil(run):
        with np.load(run / "predictions.npz") as file:
            stored = dict(file)
        change(stored)
        lines.save(run, **stored)

    return spoil


RESTORE = "run/config.json: .*; restore it or train again$"
CONFIGS = [  # what is done to a good run, what the line says, the fix
    ("cut", lambda run: cut(run / "config.json", 9), "not readable as JSON", RESTORE),
    ("empty", lambda run: (run / "config.json").write_text(""), "not readable as JSON", RESTORE),
    ("a folder", lambda run: folder_in_place_of(run / "config.json"), "Is a directory", RESTORE),
    ("a list", json_of("config.json", lambda c: [c]), "holds a list, expected a JSON object", RESTORE),
    ("null", json_of("config.json", lambda c: 0), "holds a int", RESTORE),
    ("no method", json_of("config.json", without("method")), "no 'method'", RESTORE),
    ("no data", json_of("config.json", without("data")), "no 'data'", RESTORE),
    ("method is a number", config("method", to=3), "method=3, expected a text", RESTORE),
    ("unknown method", config("method", to="cxdaa"), "method='cxdaa'.*did you mean 'cxda'.*choose from bn", "run/config.json"),
    ("unknown benchmark", config("benchmark", to="mnist"), "benchmark='mnist'.*choose from cifar10_c", "run/config.json"),
    ("seed in words", config("seed", to="one"), "seed='one', expected a whole number", RESTORE),
    ("group is a number", config("net", to=3), "config.net=3: expected a group", RESTORE),
    ("width in words", config("net", "width", to="16"), "config.net.width='16': expected 128", RESTORE),
    ("width is true", config("net", "width", to=True), "config.net.width=True: expected 128", RESTORE),
    ("stages of fractions", config("net", "stages", to=[1.5, 2]), r"net.stages=\[1.5, 2\]: expected \(3, 4", RESTORE),
    ("negative width", config("net", "width", to=-16), "net.width=-16 must be at least 1", ""),
    ("unknown field", config("attention", "headz", to=3), "config.attention.headz: .*no such field", RESTORE),
    ("missing field", json_of("config.json", lambda c: without("momentum")(c["optimizer"])), "optimizer.momentum: missing", RESTORE),
    ("missing group", json_of("config.json", without("batch_norm")), "config.batch_norm: missing", RESTORE),
    ("unknown group", config("batch_norn", to={}), "config.batch_norn: .*no such field", RESTORE),
    ("writers is a number", config("data", "writers", to=3), r"data.writers=3: expected \(240, 40, 60\)", ""),
    ("unknown data field", config("data", "colour", to=True), "data.colour: .*no such field; fields: seed, writers", ""),
    ("writers of words", config("data", "writers", to=[1, "2", 3]), r"data.writers=\[1, '2', 3\]: expected \(240", ""),
    ("prepared data without a name", config("benchmark", to="folder"), "data.name=None: expected a folder", ""),
]  # fmt: skip


@cases("spoil, said, fix", CONFIGS)
def test_configs_of_runs(tmp_path, data_dir, spoil, said, fix):
    """As launch.evaluate reads them, before anything is compiled."""
    lines.write_run(tmp_path / "run")
    spoil(tmp_path / "run")
    if (tmp_path / "run" / "config.json").is_file():  # as if it had been trained so
        about = manifest.read_about(tmp_path / "run")
        manifest.write(tmp_path / "run", ["config.json"], about=about)
    with refused(f"(?=.*{fix}).*{said}", tmp_path):
        found = identity.read_config(tmp_path / "run")
        build_on(found, open_data(found, data_dir), splits=("test",))


NPZ = "predictions.npz: cut short, or no such file"
RESULTS = [  # what is done to a good run, what the line says before the fix
    ("cut", lambda run: cut(run / "result.json", 9), "result.json: not readable as JSON"),
    ("a list", json_of("result.json", lambda r: [r]), "result.json: holds a list"),
    ("no seed", json_of("result.json", without("seed")), "result.json: no 'seed'"),
    ("avg in words", result("avg", to="high"), "avg='high', expected a number"),
    ("avg is nan", result("avg", to=float("nan")), "avg is nan, but the predictions give 37.5000"),
    ("avg of others", result("avg", to=99.0), "avg is 99.0000, but the predictions give 37.5000"),
    ("minutes in words", result("train_minutes", to="3 min"), "train_minutes='3 min', expected a number or null"),
    ("unknown metric", result("metric", to="auc"), "metric='auc' is not one of accuracy, macro_f1"),
    ("config without episode", json_of("config.json", without("episode")), "config.json: no 'episode'"),
    ("config cut", lambda run: cut(run / "config.json", 9), "config.json: not readable as JSON"),
    ("no predictions", lambda run: (run / "predictions.npz").unlink(), "predictions.npz: missing"),
    ("predictions a folder", lambda run: folder_in_place_of(run / "predictions.npz"), "predictions.npz: Is a directory"),
    ("predictions cut", lambda run: cut(run / "predictions.npz", 99), NPZ),
    ("predictions HTML", lambda run: (run / "predictions.npz").write_bytes(HTML), NPZ),
    ("predictions an array", lambda run: (run / "predictions.npz").write_bytes(lines.npy(np.zeros(3))()), NPZ),
    ("predictions a pickle", lambda run: (run / "predictions.npz").write_bytes(pickle.dumps(Bomb())), NPZ),
    ("objects", arrays(lambda a: a.update(labels=np.array([[Bomb()]], object))), "predictions.npz: Object arrays"),
    ("flipped", lambda run: flip(run / "predictions.npz"), "predictions.npz: Bad CRC-32"),
    ("no labels", arrays(lambda a: a.pop("labels")), "predictions.npz: no labels"),
    ("no plan", arrays(lambda a: a.pop("support")), "predictions.npz: no support"),
    ("no tasks", arrays(lambda a: a.update(labels=a["labels"][:0], predictions=a["labels"][:0])), r"\(0, 4\)"),
    ("fewer predictions", arrays(lambda a: a.update(predictions=a["predictions"][:5])), r"\(5, 4\) .*\(10, 4\)"),
    ("one row", arrays(lambda a: a.update(labels=a["labels"][0], predictions=a["labels"][0])), r"\(4,\)"),
]  # fmt: skip


@cases("spoil, said", RESULTS)
def test_results_of_runs(tmp_path, monkeypatch, spoil, said):
    """A fault that launch.report names, while it reports the rest."""
    lines.write_run(tmp_path / "run")
    lines.write_run(tmp_path / "good")
    spoil(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    results, faults = read_results([tmp_path / "run", tmp_path / "good"])
    assert [r.run.name for r in results] == ["good"] and len(faults) == 1
    line = lines.one_line(faults[0], tmp_path)
    assert re.search(f"^{{tmp}}/run.*{said}.*evaluate again: .*--runs={{tmp}}/run$", line), line
    assert not (tmp_path / "exploded").exists()


def test_a_half_written_line_of_metrics_is_skipped(tmp_path):
    """A killed training leaves one; what it says elsewhere stays."""
    lines.write_run(tmp_path / "run")
    text = '{"step": 5, "val_score": 0.5, "seconds": 60}\n3\n{"step": 6, "val_sc'
    (tmp_path / "run" / "metrics.jsonl").write_text(text)
    assert runs.training_minutes(tmp_path / "run") == 1
    ((result,), _) = read_results([tmp_path / "run"])
    assert [line["step"] for line in result.curve()] == [5]
