"""cxda features: an ONNX graph beside PyTorch's layers with its weights, a function, what goes on, and mistakes."""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from PIL import Image

from cxda_jax.adapter import encoders
from cxda_jax.machine import stops
from tests.fast.test_features import CLASSES, FUNCTION, MEAN, RNG, SIDE, STD, features, here, read, stopped  # noqa: F401
from tests.lines import ROOT, cases


def weights():
    sizes = {"conv1": (4, 3, 3, 3), "scale": (4,), "shift": (4,), "mean": (4,), "var": (4,), "conv2": (6, 4, 3, 3),
             "dense": (CLASSES, 6), "bias": (CLASSES,)}  # fmt: skip
    made = {name: RNG.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    return made | {"var": np.abs(made["var"]) + 0.1}


def save_onnx(path, w, channels_last=False, batch="n", side="side", dense=False, centred=False):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    node, info = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    first = [node("Transpose", ["image"], ["x"], perm=[0, 3, 1, 2])] if channels_last else []
    nodes = [
        *first,
        node("Conv", ["x" if channels_last else "image", "conv1"], ["c1"], pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["c1", "scale", "shift", "mean", "var"], ["b1"]),
        node("Relu", ["b1"], ["r1"]),
        node("Conv", ["r1", "conv2"], ["c2"], strides=[2, 2]),
        node("GlobalAveragePool", ["c2"], ["pooled"]),
        node("Flatten", ["image" if dense else "pooled"], ["flat"]),
        node("Gemm", ["flat", "dense", "bias"], ["linear"], transB=1),
        node("ReduceMean", ["linear"], ["mean of all"], axes=[0]),
        node("Sub" if centred else "Identity", ["linear", "mean of all"][: 1 + centred], ["answer"]),
        node("Softmax", ["answer"], ["shares"]),
    ]
    form = [batch, side, side, 3] if channels_last else [batch, 3, side, side]
    outputs = [info("answer", 1, [batch, CLASSES]), info("shares", 1, [batch, CLASSES])]
    constants = [onnx.numpy_helper.from_array(value, name) for name, value in w.items()]
    graph = onnx.helper.make_graph(nodes, "tiny", [info("image", 1, form)], outputs, constants)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)


def by_torch(w, paths, maps):
    """Logits, features and style by PyTorch's layers and formulas of the images at these paths."""
    torch = pytest.importorskip("torch")
    f, w = torch.nn.functional, {name: torch.from_numpy(value) for name, value in w.items()}
    pixels = [np.asarray(Image.open(path).resize((SIDE, SIDE), Image.Resampling.BILINEAR)) for path in paths]
    x = torch.from_numpy((np.stack(pixels).astype(np.float32) / 255 - MEAN) / STD).permute(0, 3, 1, 2)
    early = f.batch_norm(f.conv2d(x, w["conv1"], padding=1), w["mean"], w["var"], w["scale"], w["shift"]).relu()
    late = f.conv2d(early, w["conv2"], stride=2)
    chosen = [x, *({"r1": early, "c2": late}[name] for name in maps)]
    style = [moment for m in chosen for moment in (m.mean((2, 3)), m.std((2, 3), correction=0))]
    flat = late.mean((2, 3)) if maps else x.flatten(1)
    return {"logits": f.linear(flat, w["dense"], w["bias"]), "features": flat, "style": torch.cat(style, 1)}


@pytest.mark.parametrize(
    ("options", "maps"),
    [
        ({}, ["r1"]),
        ({"channels_last": True}, ["r1"]),
        ({"batch": 5}, ["r1", "c2"]),
        ({"side": SIDE}, ["r1", "c2"]),
        ({"dense": True}, []),
    ],
    ids=str,
)
def test_a_graph_gives_what_pytorch_computes(options, maps, here):
    """Of its own choice r1 alone is a map: b1 and c1 become r1, and c2 is a convolution."""
    w = weights() | ({} if maps else {"dense": np.ones((CLASSES, 3 * SIDE**2), np.float32) / SIDE})
    save_onnx("tiny.onnx", w, **options)
    asked = [f"--maps={','.join(maps)}"] * (len(maps) > 1)
    said = features("--logits=answer", "--size=16", *asked, encoder="tiny.onnx")
    assert "12 images of 2 domains, 0 left out" in said and ("of the input alone" in said) == (not maps)
    found = read()
    expected = by_torch(w, [here / "images" / path for path in found["paths"]], maps)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=1e-4)
    about = json.loads(str(found["about"]))
    assert about["maps"] == maps and about["size"] == SIDE and about["batch"] == options.get("batch", 32)
    assert list(found["classes"]) == ["a", "b", "c"] and found["labels"].dtype.kind == "i"
    for path, domain, label in zip(found["paths"], found["domains"], found["labels"], strict=True):
        assert path.split("/")[:2] == [domain, "abc"[label]]


def test_after_a_kill_the_same_bits(here):
    (here / "signal").write_text(f"4 {int(signal.SIGKILL)}")  # in the second batch; the first is asked for thrice
    arguments = "--encoder=mine:stopped", "--images=images", "--out=f.npz", "--batch=5"
    done = subprocess.run(
        [sys.executable, "-m", "launch.features", *arguments], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == -signal.SIGKILL
    with open("f.npz.part/rows.f32", "ab") as rows:
        rows.write(b"torn")
    (here / "signal").unlink()
    assert "goes on after 5 images" in stopped()
    stopped(out="g.npz")
    assert (here / "f.npz").read_bytes() == (here / "g.npz").read_bytes() and not list(here.glob("*.part"))


GRAPHS = [
    ("two outputs", "free", [], "--logits: 2 outputs have the form [n, classes] (answer, shares)"),
    ("softmax", "free", ["--logits=shares"], "probabilities; give the values before the softmax"),
    ("unknown tensor", "free", ["--logits=anser"], "--logits='anser' is unknown; did you mean 'answer'?"),
    ("unknown map", "free", ["--logits=answer", "--maps=r1,flt"], "--maps='flt' is unknown; did you mean 'flat'?"),
    ("no map", "free", ["--logits=answer", "--maps=flat"], "--maps=flat: has the form [32, 6]"),
    ("input", "free", ["--logits=answer", "--maps=r1,image"], "--maps=image: the input's moments are in the style"),
    ("means", "free", ["--logits=answer", "--mean=1,2"], "--mean=1,2: give one number, or one for each of 3 channels"),
    (
        "deviation",
        "free",
        ["--logits=answer", "--std=0"],
        "--std=0: give one number, or one for each of 3 channels, above 0",
    ),
    (
        "batch statistics",
        "centred",
        ["--logits=answer"],
        "'logits' of an image changes by the other images of its batch",
    ),
    ("size", "fixed", ["--logits=answer", "--size=32"], "--size=32: the graph takes 16 x 16 pixels"),
    ("a large size", "free", ["--logits=answer", "--size=100000"], "--size=100000: 32 images of 100000 x 100000"),
    ("a large graph", "large", ["--logits=answer"], "--size=100000: 32 images of 100000 x 100000"),
    ("a large batch", "free", ["--logits=answer", "--batch=100000"], "--size=224: 100000 images of 224 x 224"),
]


@cases(("graph", "flags", "said"), GRAPHS)
def test_a_mistake_with_a_graph_costs_one_line(graph, flags, said):
    sides = {"fixed": SIDE, "large": 100_000}
    save_onnx(f"{graph}.onnx", weights(), side=sides.get(graph, "side"), centred=graph == "centred")
    line = features(*flags, code=2, encoder=f"{graph}.onnx")
    assert said in line and line.count("\n") == 1 and len(line) < 210


def test_weights_beside_a_graph_are_files_of_its_own_folder(here):
    onnx = pytest.importorskip("onnx")
    save_onnx("whole.onnx", weights())
    (here / "pair").mkdir()
    onnx.save(onnx.load("whole.onnx"), "pair/m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    ask = functools.partial(features, "--logits=answer", "--size=16", encoder="pair/m.onnx")
    assert "12 images" in ask()
    shutil.move(here / "pair" / "w.bin", here / "w.bin")
    (here / "pair" / "w.bin").symlink_to(here / "w.bin")
    assert "'w.bin' of the graph lie outside its folder" in ask(out="g.npz", code=2)
    (here / "inner").mkdir()
    shutil.copy(here / "w.bin", here / "inner")
    (here / "pair" / "sub").symlink_to(here / "inner")
    for place in ("../w.bin", f"{here}/w.bin", "sub/w.bin", "sub/../../w.bin"):
        model = onnx.load(here / "pair" / "m.onnx", load_external_data=False)
        for tensor in model.graph.initializer:
            next(entry for entry in tensor.external_data if entry.key == "location").value = place
        (here / "pair" / "m.onnx").write_bytes(model.SerializeToString())
        line = ask(out="g.npz", code=2)
        assert "outside its folder" in line and line.count("\n") == 1
    (here / "pair" / "sub").unlink()
    os.mkfifo(here / "pair" / "sub")
    for tensor in model.graph.initializer:
        next(entry for entry in tensor.external_data if entry.key == "location").value = "sub"
    (here / "pair" / "m.onnx").write_bytes(model.SerializeToString())
    assert "pair/sub: a pipe, not a file" in ask(out="g.npz", code=2)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_graph_without_end_hears_a_signal(deferred, monkeypatch):
    """Also where a signal waits for the end of a batch, as in cxda features."""
    onnx, node = pytest.importorskip("onnx"), pytest.importorskip("onnx").helper.make_node
    info, array = onnx.helper.make_tensor_value_info, onnx.numpy_helper.from_array
    going = [node("Identity", ["c"], ["d"]), node("Identity", ["v"], ["w"])]
    ends = [info("i", 7, []), info("c", 9, []), info("v", 1, [])], [info("d", 9, []), info("w", 1, [])]
    body = onnx.helper.make_graph(going, "body", *ends)
    nodes = [
        node("GlobalAveragePool", ["image"], ["p"]), node("Flatten", ["p"], ["f"]),
        node("ReduceMax", ["f"], ["m"], keepdims=0), node("Loop", ["n", "t", "m"], ["l"], body=body),
        node("Mul", ["f", "l"], ["logits"]),
    ]  # fmt: skip
    ends = [info("image", 1, ["n", 3, 16, 16])], [info("logits", 1, ["n", 3])]
    constants = [array(np.array(2**62), "n"), array(np.array(True), "t")]
    graph = onnx.helper.make_graph(nodes, "g", *ends, constants)
    opset = onnx.helper.make_opsetid("", 17)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8), "loop.onnx")
    encoder = encoders.open_encoder("loop.onnx", encoders.Options())
    monkeypatch.setattr(encoders, "PATIENCE", 0.1)
    monkeypatch.setattr(stops, "say", lambda text: None)
    stops.watch()
    try:
        threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
        with pytest.raises(stops.Stopped), stops.deferred() if deferred else contextlib.nullcontext():
            encoder.encode(np.zeros((32, 16, 16, 3), np.uint8))
    finally:
        stops.unwatch()
