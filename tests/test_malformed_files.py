"""What may be wrong with a user's stores, weights and runs: each costs one short line, the one that stands here."""

import io
import json
import os
import pickle
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from cxda_jax import manifest
from cxda_jax.analysis.results import read_results
from cxda_jax.data.store import Domain, open_store, write_store
from cxda_jax.experiment import as_fields, build_on, open_data, start_from_weights
from cxda_jax.nets.pretrained import read_weights
from cxda_jax.types import UserError
from launch import identity, runs
from tests.conftest import INFO, make_domains
from tests.lines import (
    HTML,
    at_the_root,  # noqa: F401
    cut,
    edit_json,
    folder_in_place_of,
    is_as,
    npy,
    one_line,
    parametrised,
    save,
    set_to,
    write_run,
)

# Data stores: what is done to a good one, line


def card(change):
    def spoil(folder):
        edit_json(folder / "store.json", change)

    return spoil


def without(place):
    """An edit: content[place] is gone."""

    def change(content):
        del content[place]

    return change


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


STORES = [
    ("no store", shutil.rmtree, "{tmp}/store: not a data store (no store.json); prepare the data set first"),
    ("a file", lambda f: (shutil.rmtree(f), f.write_text("")), "{tmp}/store: not a data store (no store.json); prepare the data set first"),
    ("no store.json", lambda f: (f / "store.json").unlink(), "{tmp}/store: not a data store (no store.json); prepare the data set first"),
    ("a folder for store.json", lambda f: folder_in_place_of(f / "store.json"), "{tmp}/store/store.json: not readable as JSON (Is a directory); delete the folder and prepare it again"),
    ("cut json", lambda f: (f / "store.json").write_text('{"format": 1,'), "{tmp}/store/store.json: not readable as JSON (...); delete the folder and prepare it again"),
    ("bytes", lambda f: (f / "store.json").write_bytes(b"\xff\xfe\xfd"), "{tmp}/store/store.json: not readable as JSON ('utf-16-le' codec can't decode byte 0xfd in position 2: truncated data); delete the folder and prepare it again"),
    ("deep", lambda f: (f / "store.json").write_text("[" * 100_000), "{tmp}/store/store.json: not readable as JSON (nested too deeply); delete the folder and prepare it again"),
    ("a list", card(lambda c: [c]), "{tmp}/store/store.json: holds a list, expected a JSON object; delete the folder and prepare it again"),
    ("other format", card(set_to("format", to=99)), "{tmp}/store: store format 99, this version reads 1; prepare it again"),
    ("no domains", card(without("domains")), "{tmp}/store/store.json: no 'domains'; delete the folder and prepare it again"),
    ("no sha256", card(without("sha256")), "{tmp}/store/store.json: no 'sha256'; delete the folder and prepare it again"),
    ("no sha256 of labels", card(lambda c: without("labels")(c["sha256"])), "{tmp}/store/store.json: sha256: no 'labels'; delete the folder and prepare it again"),
    ("no rows", card(lambda c: without("rows")(c["domains"][1])), "{tmp}/store/store.json: domains: no 'rows'; delete the folder and prepare it again"),
    ("negative rows", card(set_to("domains", 1, "rows", to=-30)), "{tmp}/store/store.json: domain 'd1' has -30 rows; delete the folder and prepare it again"),
    ("fractions of rows", card(set_to("domains", 1, "rows", to=30.5)), "{tmp}/store/store.json: domains: rows=30.5, expected a whole number; delete the folder and prepare it again"),
    ("a domain that is a name", card(set_to("domains", 1, to="d1")), "{tmp}/store/store.json: domains: 'd1', expected an object; delete the folder and prepare it again"),
    ("empty", card(set_to("domains", to=[])), "{tmp}/store/store.json: its domains have no rows; delete the folder and prepare it again"),
    ("unknown split", card(set_to("domains", 1, "split", to="dev")), "{tmp}/store/store.json: split 'dev' is not one of train, val, test; delete the folder and prepare it again"),
    ("zero in shape", card(set_to("shape", to=[0, 16, 1])), "{tmp}/store/store.json: shape=[0, 16, 1] is not a height, a width and channels; delete the folder and prepare it again"),
    ("float in shape", card(set_to("shape", to=[16, 16.0, 1])), "{tmp}/store/store.json: shape=[16, 16.0, 1] is not a height, a width and channels; delete the folder and prepare it again"),
    ("no channels", card(set_to("shape", to=[16, 16])), "{tmp}/store/store.json: shape=[16, 16] is not a height, a width and channels; delete the folder and prepare it again"),
    ("text for shape", card(set_to("shape", to="16x16x1")), "{tmp}/store/store.json: shape='16x16x1', expected a list; delete the folder and prepare it again"),
    ("too few classes", card(set_to("class_names", to=["a", "b"])), "{tmp}/store/labels.i32: labels in 0..3, but 2 classes in store.json; delete the folder and prepare it again"),
    ("no classes", card(set_to("class_names", to=[])), "{tmp}/store/store.json: class_names=[] is not a list of names; delete the folder and prepare it again"),
    ("mean of three", card(set_to("mean", to=[0.4, 0.5, 0.6])), "{tmp}/store/store.json: mean=[0.4, 0.5, 0.6] is not one number a channel, of which there are 1; delete the folder and prepare it again"),
    ("std of none", card(set_to("std", to=[])), "{tmp}/store/store.json: std=[] is not one number a channel, of which there are 1; delete the folder and prepare it again"),
    ("zero std", card(set_to("std", to=[0])), "{tmp}/store/store.json: std=[0] has a zero; delete the folder and prepare it again"),
    ("nan in mean", card(set_to("mean", to=[float("nan")])), "{tmp}/store/store.json: mean=[nan] is not one number a channel, of which there are 1; delete the folder and prepare it again"),
    ("marks in one", card(set_to("marks", to="regenerated")), "{tmp}/store/store.json: marks='regenerated', expected a list; delete the folder and prepare it again"),
    ("cut images", lambda f: cut(f / "images.u8", 1), "{tmp}/store/images.u8: 69119 bytes, expected 69120; delete the folder and prepare it again"),
    ("no labels", lambda f: (f / "labels.i32").unlink(), "{tmp}/store/labels.i32: 0 bytes, expected 1080; delete the folder and prepare it again"),
    ("flipped bit in images", lambda f: flip(f / "images.u8"), "{tmp}/store: images differ from their recorded hash; delete the folder and prepare it again"),
    ("flipped bit in labels", lambda f: flip(f / "labels.i32"), "{tmp}/store: labels differ from their recorded hash; delete the folder and prepare it again"),
]  # fmt: skip


@parametrised(STORES)
def test_data_stores(tmp_path, store, number):
    _, spoil, line = STORES[number]
    spoil(tmp_path / "store")
    with pytest.raises(UserError) as error:
        open_store(tmp_path / "store")
    assert is_as(one_line(error.value, tmp_path), line)


# Weights: file name, content, line


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


WEIGHTS = [
    ("missing", "a.safetensors", None, "net.weights={tmp}/x/a.safetensors: no such file; give a .safetensors or .pth file, or ''"),
    ("a folder", "a.safetensors", ..., "net.weights={tmp}/x/a.safetensors: no such file; give a .safetensors or .pth file, or ''"),
    ("no suffix", "weights", b"x", "net.weights={tmp}/x/weights: no suffix is not .safetensors, .pth or .pt"),
    ("another suffix", "weights.h5", b"x", "net.weights={tmp}/x/weights.h5: .h5 is not .safetensors, .pth or .pt"),
    ("empty", "a.safetensors", b"", "net.weights={tmp}/x/a.safetensors: not a safetensors file of weights (a header of 0 bytes); fetch it again"),
    ("HTML", "a.safetensors", HTML, "{tmp}/x/a.safetensors: a web page (HTML), not the data; the link asks for a confirmation or is dead, fetch it again"),
    ("huge header", "a.safetensors", safetensors({}, size=2**62), "net.weights={tmp}/x/a.safetensors: not a safetensors file of weights (a header of 4611686018427387904 bytes); fetch it again"),
    ("header past the end", "a.safetensors", safetensors({}, size=100), "net.weights={tmp}/x/a.safetensors: not a safetensors file of weights (a header of 100 bytes); fetch it again"),
    ("header not JSON", "a.safetensors", safetensors(b"{]"), "net.weights={tmp}/x/a.safetensors: not a safetensors file of weights (...); fetch it again"),
    ("header of bytes", "a.safetensors", safetensors(b"\xff\xff\xff"), "net.weights={tmp}/x/a.safetensors: not a safetensors file of weights ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte); fetch it again"),
    ("header a list", "a.safetensors", safetensors([1]), "net.weights={tmp}/x/a.safetensors: not a safetensors file of weights (its header is a list); fetch it again"),
    ("notes a list", "a.safetensors", safetensors({"__metadata__": [1]}), "net.weights={tmp}/x/a.safetensors: not a safetensors file of weights (its __metadata__ is a list); fetch it again"),
    ("deep header", "a.safetensors", safetensors(b"[" * 100_000), "net.weights={tmp}/x/a.safetensors: not a safetensors file of weights (nested too deeply); fetch it again"),
    ("entry a number", "a.safetensors", safetensors({"a": 3}), "net.weights={tmp}/x/a.safetensors: a: 3, expected an object; fetch it again"),
    ("no offsets", "a.safetensors", safetensors({"a": {"dtype": "F32", "shape": [4]}}), "net.weights={tmp}/x/a.safetensors: a: no 'data_offsets'; fetch it again"),
    ("offsets out of range", "a.safetensors", safetensors({"a": tensor(0, 32)}), "net.weights={tmp}/x/a.safetensors: not a safetensors file of weights (a in bytes 0..32, expected from 0 to 16 at most); fetch it again"),
    ("offsets backwards", "a.safetensors", safetensors({"a": tensor(16, 0, shape=[4])}), "net.weights={tmp}/x/a.safetensors: not a safetensors file of weights (a in bytes 16..0, expected from 0 to 16 at most); fetch it again"),
    ("offsets negative", "a.safetensors", safetensors({"a": tensor(-8, 8)}), "net.weights={tmp}/x/a.safetensors: not a safetensors file of weights (a in bytes -8..8, expected from 0 to 16 at most); fetch it again"),
    ("offsets in words", "a.safetensors", safetensors({"a": {**tensor(0, 16), "data_offsets": ["0", "16"]}}), "net.weights={tmp}/x/a.safetensors: not a safetensors file of weights (a: shape [4], offsets ['0', '16']); fetch it again"),
    ("offsets of three", "a.safetensors", safetensors({"a": {**tensor(0, 16), "data_offsets": [0, 8, 16]}}), "net.weights={tmp}/x/a.safetensors: not a safetensors file of weights (a: shape [4], offsets [0, 8, 16]); fetch it again"),
    ("overlap", "a.safetensors", safetensors({"a": tensor(0, 12), "b": tensor(8, 16)}), "net.weights={tmp}/x/a.safetensors: not a safetensors file of weights (b in bytes 8..16, expected from 12 to 16 at most); fetch it again"),
    ("gap", "a.safetensors", safetensors({"a": tensor(0, 4), "b": tensor(8, 16)}), "net.weights={tmp}/x/a.safetensors: not a safetensors file of weights (b in bytes 8..16, expected from 4 to 16 at most); fetch it again"),
    ("lying shape", "a.safetensors", safetensors({"a": tensor(0, 16, shape=[5])}), "net.weights={tmp}/x/a.safetensors: not a safetensors file of weights (cannot reshape array of size 4 into shape (5,)); fetch it again"),
    ("negative shape", "a.safetensors", safetensors({"a": tensor(0, 16, shape=[-1])}), "net.weights={tmp}/x/a.safetensors: not a safetensors file of weights (a of the shape [-1]); fetch it again"),
    ("shape of words", "a.safetensors", safetensors({"a": tensor(0, 16, shape="4")}), "net.weights={tmp}/x/a.safetensors: a: shape='4', expected a list; fetch it again"),
    ("unknown type", "a.safetensors", safetensors({"a": tensor(0, 16, "F8_E4M3", [16])}), "net.weights={tmp}/x/a.safetensors: not a safetensors file of weights (a of type F8_E4M3, not one of F64, F32, F16, BF16, I64, I32, I16, I8, U64, U32, U16, U8, BOOL); fetch it again"),
    ("cut element", "a.safetensors", safetensors({"a": tensor(0, 15, shape=[4])}), "net.weights={tmp}/x/a.safetensors: not a safetensors file of weights (buffer size must be a multiple of element size); fetch it again"),
    ("long name", "a.safetensors", safetensors({"a" * 900: tensor(0, 32)}), "net.weights={tmp}/x/a.safetensors: not a safetensors file of weights (aaaaaaaaaaaaaaaaaaaa...aaaaaaa in bytes 0..32, expected from 0 to 16 at most); fetch it again"),
    ("empty pth", "a.pth", b"", "net.weights={tmp}/x/a.pth: holds no plain weights (an empty file); save a model's state_dict()"),
    ("HTML pth", "a.pth", HTML, "{tmp}/x/a.pth: a web page (HTML), not the data; the link asks for a confirmation or is dead, fetch it again"),
    ("text pth", "a.pth", b"weights", "net.weights={tmp}/x/a.pth: holds no plain weights (other objects than tensors, or no pickle); save a model's state_dict()"),
    ("bare bomb", "a.pth", lambda: pickle.dumps(Bomb()), "net.weights={tmp}/x/a.pth: holds no plain weights (other objects than tensors, or no pickle); save a model's state_dict()"),
    ("wrapped bomb", "a.pth", torch_file(lambda torch: {"a": torch.zeros(3), "b": Bomb()}), "net.weights={tmp}/x/a.pth: holds no plain weights (other objects than tensors, or no pickle); save a model's state_dict()"),
    ("cut pth", "a.pth", lambda: torch_file(lambda torch: {"a": torch.zeros(3)})()[:-60], "net.weights={tmp}/x/a.pth: holds no plain weights (...)"),
    ("list pth", "a.pth", torch_file(lambda torch: [torch.zeros(3)]), "net.weights={tmp}/x/a.pth: holds no plain weights (a list); save a model's state_dict()"),
    ("whole training", "a.pth", torch_file(lambda torch: {"epoch": 3, "state_dict": {"a": torch.zeros(3)}}), "net.weights={tmp}/x/a.pth: holds no plain weights (epoch is a int); save a model's state_dict()"),
    ("bfloat16 pth", "a.pth", torch_file(lambda torch: {"a": torch.zeros(3, dtype=torch.bfloat16)}), "net.weights={tmp}/x/a.pth: holds no plain weights (...)"),
]  # fmt: skip


@parametrised(WEIGHTS)
def test_weights(tmp_path, monkeypatch, number):
    _, name, data, line = WEIGHTS[number]
    path = tmp_path / "x" / name
    path.parent.mkdir()
    if data is ...:
        path.mkdir()
    elif data is not None:
        path.write_bytes(data() if callable(data) else data)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error, as_fields({"net": {"weights": str(path)}}, "net"):
        read_weights(path)
    assert is_as(one_line(error.value, tmp_path), line)
    assert not (tmp_path / "exploded").exists()


def start_from(path, arrays, **net):
    """start_from_weights() of a variables tree with a first convolution and a head."""
    header, body = {}, b""
    for name, array in arrays.items():
        header[name] = tensor(len(body), len(body) + array.nbytes, shape=list(array.shape))
        body += array.tobytes()
    path.write_bytes(safetensors(header, body))
    leaves = {"conv1": {"kernel": jax.numpy.zeros((7, 7, 3, 4))}}
    variables = {"params": {"trunk": leaves}, "batch_stats": {}}
    options = {"name": "resnet50", "weights": str(path), "dont_load": ("fc",), **net}
    return start_from_weights({"net": options}, variables)


FIRST = np.ones((4, 3, 7, 7), np.float32)
LAYERS = [
    ("another net", {"conv1.weight": FIRST}, {"name": "cnn"}, "net.weights=a.safetensors: only resnet50 starts from a file; net.name='cnn'"),
    ("missing layer", {"conv2.weight": FIRST}, {}, "net.weights: conv1.weight is missing; are these the weights of a ResNet-50?"),
    ("unknown layer", {"conv1.weight": FIRST, "extra.weight": FIRST}, {}, "net.weights: the network has no extra.weight (1 such); add its layer to net.dont_load"),
    ("another shape", {"conv1.weight": FIRST[:, :, :5, :5]}, {}, "net.weights: conv1.weight is (5, 5, 3, 4) in our layout, the network's is (7, 7, 3, 4)"),
    ("nan", {"conv1.weight": FIRST * np.float32("nan")}, {}, "net.weights: conv1.weight holds nan or infinity; fetch the file again"),
    ("a scalar", {"conv1.weight": np.float32(1)}, {}, "net.weights: conv1.weight is () in our layout, the network's is (7, 7, 3, 4)"),
]  # fmt: skip


@parametrised(LAYERS)
def test_layers_of_weights(tmp_path, monkeypatch, number):
    _, arrays, net, line = LAYERS[number]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        start_from(Path("a.safetensors"), arrays, **net)
    assert is_as(one_line(error.value, tmp_path), line)


# Run folders: what is done to a good one, line


def config_json(change):
    return lambda run: edit_json(run / "config.json", change)


def result_json(change):
    return lambda run: edit_json(run / "result.json", change)


def arrays(change):
    def spoil(run):
        with np.load(run / "predictions.npz") as file:
            stored = dict(file)
        change(stored)
        save(run, **stored)

    return spoil


CONFIGS = [
    ("cut", lambda run: cut(run / "config.json", 9), "{tmp}/run/config.json: not readable as JSON (...); restore it or train again"),
    ("empty", lambda run: (run / "config.json").write_text(""), "{tmp}/run/config.json: not readable as JSON (...); restore it or train again"),
    ("a folder", lambda run: folder_in_place_of(run / "config.json"), "{tmp}/run/config.json: not readable as JSON (Is a directory); restore it or train again"),
    ("a list", config_json(lambda c: [c]), "{tmp}/run/config.json: holds a list, expected a JSON object; restore it or train again"),
    ("null", config_json(lambda c: 0), "{tmp}/run/config.json: holds a int, expected a JSON object; restore it or train again"),
    ("no method", config_json(without("method")), "{tmp}/run/config.json: no 'method'; restore it or train again"),
    ("no data", config_json(without("data")), "{tmp}/run/config.json: no 'data'; restore it or train again"),
    ("method is a number", config_json(set_to("method", to=3)), "{tmp}/run/config.json: method=3, expected a text; restore it or train again"),
    ("unknown method", config_json(set_to("method", to="cxdaa")), "{tmp}/run/config.json: method='cxdaa' is unknown; did you mean 'cxda'? choose from bn, cml, cotta, cxda, cxda_loo, cxda_p2p, cxda_supervised, erm, erm_iid, ft_em, ft_im, sf_ocda, sla"),
    ("unknown benchmark", config_json(set_to("benchmark", to="mnist")), "{tmp}/run/config.json: benchmark='mnist' is unknown; did you mean 'femnist'? choose from cifar_c, femnist, folder, glyphs, glyphs_c, iwildcam, tiny_imagenet_c"),
    ("seed in words", config_json(set_to("seed", to="one")), "{tmp}/run/config.json: seed='one', expected a whole number; restore it or train again"),
    ("group is a number", config_json(set_to("net", to=3)), "{tmp}/run/config.json: config.net=3: expected a group of fields; restore it or train again"),
    ("width in words", config_json(set_to("net", "width", to="16")), "{tmp}/run/config.json: config.net.width='16': expected 128 or the like; restore it or train again"),
    ("width is true", config_json(set_to("net", "width", to=True)), "{tmp}/run/config.json: config.net.width=True: expected 128 or the like; restore it or train again"),
    ("stages of fractions", config_json(set_to("net", "stages", to=[1.5, 2])), "{tmp}/run/config.json: config.net.stages=[1.5, 2]: expected (3, 4, 6, 3) or the like; restore it or train again"),
    ("negative width", config_json(set_to("net", "width", to=-16)), "net.width=-16 must be at least 1"),
    ("unknown field", config_json(set_to("attention", "headz", to=3)), "{tmp}/run/config.json: config.attention.headz: this version has no such field; restore it or train again"),
    ("missing field", config_json(lambda c: without("momentum")(c["optimizer"])), "{tmp}/run/config.json: config.optimizer.momentum: missing, though this version has that field; restore it or train again"),
    ("missing group", config_json(without("batch_norm")), "{tmp}/run/config.json: config.batch_norm: missing, though this version has that field; restore it or train again"),
    ("unknown group", config_json(set_to("batch_norn", to={})), "{tmp}/run/config.json: config.batch_norn: this version has no such field; restore it or train again"),
    ("writers is a number", config_json(set_to("data", "writers", to=3)), "data.writers=3: expected (240, 40, 60) or the like"),
    ("unknown data field", config_json(set_to("data", "colour", to=True)), "data.colour: glyphs has no such field; fields: seed, writers, drawings"),
    ("data without writers", config_json(set_to("data", "writers", to=[1, "2", 3])), "data.writers=[1, '2', 3]: expected (240, 40, 60) or the like"),
    ("prepared data without a name", config_json(set_to("benchmark", to="folder")), "data.name=None: expected a folder in --data_dir, such as 'folder'"),
]  # fmt: skip


@parametrised(CONFIGS)
def test_configs_of_runs(tmp_path, data_dir, number):
    """As launch.evaluate reads them, before anything is compiled."""
    _, spoil, line = CONFIGS[number]
    write_run(tmp_path / "run")
    spoil(tmp_path / "run")
    if (tmp_path / "run" / "config.json").is_file():  # as if it had been trained so
        about = manifest.read_about(tmp_path / "run")
        manifest.write(tmp_path / "run", ["config.json"], about=about)
    with pytest.raises(UserError) as error:
        config = identity.read_config(tmp_path / "run")
        build_on(config, open_data(config, data_dir), splits=("test",))
    assert is_as(one_line(error.value, tmp_path), line)


RESULTS = [
    ("cut", lambda run: cut(run / "result.json", 9), "{tmp}/run/result.json: not readable as JSON (...); evaluate again: python -m launch.evaluate --runs={tmp}/run"),
    ("a list", result_json(lambda r: [r]), "{tmp}/run/result.json: holds a list, expected a JSON object; evaluate again: python -m launch.evaluate --runs={tmp}/run"),
    ("no seed", result_json(without("seed")), "{tmp}/run/result.json: no 'seed'; evaluate again: python -m launch.evaluate --runs={tmp}/run"),
    ("avg in words", result_json(set_to("avg", to="high")), "{tmp}/run/result.json: avg='high', expected a number; evaluate again: python -m launch.evaluate --runs={tmp}/run"),
    ("avg is nan", result_json(set_to("avg", to=float("nan"))), "{tmp}/run: not readable (avg is nan, but the predictions give 37.5000); evaluate again: python -m launch.evaluate --runs={tmp}/run"),
    ("avg of others", result_json(set_to("avg", to=99.0)), "{tmp}/run: not readable (avg is 99.0000, but the predictions give 37.5000); evaluate again: python -m launch.evaluate --runs={tmp}/run"),
    ("minutes in words", result_json(set_to("train_minutes", to="3 min")), "{tmp}/run/result.json: train_minutes='3 min', expected a number or null; evaluate again: python -m launch.evaluate --runs={tmp}/run"),
    ("unknown metric", result_json(set_to("metric", to="auc")), "{tmp}/run: not readable (metric='auc' is not one of accuracy, macro_f1); evaluate again: python -m launch.evaluate --runs={tmp}/run"),
    ("config without episode", config_json(without("episode")), "{tmp}/run/config.json: no 'episode'; evaluate again: python -m launch.evaluate --runs={tmp}/run"),
    ("config cut", lambda run: cut(run / "config.json", 9), "{tmp}/run/config.json: not readable as JSON (...); evaluate again: python -m launch.evaluate --runs={tmp}/run"),
    ("no predictions", lambda run: (run / "predictions.npz").unlink(), "{tmp}/run/predictions.npz: missing; evaluate again: python -m launch.evaluate --runs={tmp}/run"),
    ("predictions a folder", lambda run: folder_in_place_of(run / "predictions.npz"), "{tmp}/run: not readable (predictions.npz: Is a directory); evaluate again: python -m launch.evaluate --runs={tmp}/run"),
    ("predictions cut", lambda run: cut(run / "predictions.npz", 99), "{tmp}/run: not readable (predictions.npz: cut short, or no such file at all); evaluate again: python -m launch.evaluate --runs={tmp}/run"),
    ("predictions HTML", lambda run: (run / "predictions.npz").write_bytes(HTML), "{tmp}/run: not readable (predictions.npz: cut short, or no such file at all); evaluate again: python -m launch.evaluate --runs={tmp}/run"),
    ("predictions an array", lambda run: (run / "predictions.npz").write_bytes(npy(np.zeros(3))()), "{tmp}/run: not readable (predictions.npz: cut short, or no such file at all); evaluate again: python -m launch.evaluate --runs={tmp}/run"),
    ("predictions a pickle", lambda run: (run / "predictions.npz").write_bytes(pickle.dumps(Bomb())), "{tmp}/run: not readable (predictions.npz: cut short, or no such file at all); evaluate again: python -m launch.evaluate --runs={tmp}/run"),
    ("objects", arrays(lambda a: a.update(labels=np.array([[Bomb()]], object))), "{tmp}/run: not readable (predictions.npz: Object arrays cannot be loaded when allow_pickle=False); evaluate again: python -m launch.evaluate --runs={tmp}/run"),
    ("flipped", lambda run: flip(run / "predictions.npz"), "{tmp}/run: not readable (predictions.npz: Bad CRC-32 for file 'support.npy'); evaluate again: python -m launch.evaluate --runs={tmp}/run"),
    ("no labels", arrays(lambda a: a.pop("labels")), "{tmp}/run: not readable (predictions.npz: no labels); evaluate again: python -m launch.evaluate --runs={tmp}/run"),
    ("no plan", arrays(lambda a: a.pop("support")), "{tmp}/run: not readable (predictions.npz: no support); evaluate again: python -m launch.evaluate --runs={tmp}/run"),
    ("no tasks", arrays(lambda a: a.update(labels=a["labels"][:0], predictions=a["labels"][:0])), "{tmp}/run: not readable (predictions.npz: predictions (0, 4) for labels (0, 4)); evaluate again: python -m launch.evaluate --runs={tmp}/run"),
    ("fewer predictions", arrays(lambda a: a.update(predictions=a["predictions"][:5])), "{tmp}/run: not readable (predictions.npz: predictions (5, 4) for labels (10, 4)); evaluate again: python -m launch.evaluate --runs={tmp}/run"),
    ("one row", arrays(lambda a: a.update(labels=a["labels"][0], predictions=a["labels"][0])), "{tmp}/run: not readable (predictions.npz: predictions (4,) for labels (4,)); evaluate again: python -m launch.evaluate --runs={tmp}/run"),
]  # fmt: skip


@parametrised(RESULTS)
def test_results_of_runs(tmp_path, monkeypatch, number):
    """A fault that launch.report names, while it reports the rest."""
    _, spoil, line = RESULTS[number]
    write_run(tmp_path / "run")
    write_run(tmp_path / "good")
    spoil(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    results, faults = read_results([tmp_path / "run", tmp_path / "good"])
    assert [r.run.name for r in results] == ["good"] and len(faults) == 1
    assert is_as(one_line(faults[0], tmp_path), line)
    assert not (tmp_path / "exploded").exists()


def test_a_half_written_line_of_metrics_is_skipped(tmp_path):
    """A killed training leaves one; what it says elsewhere stays."""
    write_run(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text(
        '{"step": 5, "val_score": 0.5, "seconds": 60}\n3\n{"step": 6, "val_sc'
    )
    assert runs.training_minutes(tmp_path / "run") == 1
    ((result,), _) = read_results([tmp_path / "run"])
    assert [line["step"] for line in result.curve()] == [5]


def test_a_domain_that_a_store_refuses(tmp_path):
    """What a reader hands on is checked before it is written."""
    first, second = make_domains()[:2]
    with pytest.raises(UserError) as error:
        write_store(tmp_path / "store", INFO, [first, Domain("d" * 300, "dev", second.images, second.labels)])
    name = "d" * 40 + "..." + "d" * 17
    assert one_line(error.value, tmp_path) == f"domain {name}: split 'dev' is not one of train, val, test"
