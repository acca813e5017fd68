"""cxda features: an ONNX graph beside PyTorch's layers with its weights, a function, what goes on, and mistakes."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from cxda_jax.machine import stops
from tests.commands import command
from tests.lines import ROOT, contents, cut, flip

RNG = np.random.default_rng(0)
SIDE, CLASSES, MEAN, STD = 16, 3, np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])
FUNCTION = """
import os
from pathlib import Path
import numpy as np
def encoder(images):
    means = images.mean((1, 2)) - 100
    return {"logits": means, "features": means[:, :2], "maps": [images[:, ::2], images[:, :, :1] / 255]}
def of(**answer):
    return lambda images: {name: value[: len(images)] for name, value in answer.items()}
logits, style = np.ones((99, 3)), np.ones((99, 5))
nothing, tensor, shares = of(style=style), of(logits=logits[:, :, None], style=style), of(logits=logits / 3, style=style)
few, not_finite = (lambda images: {"logits": logits, "style": style}), of(logits=logits * np.nan, style=style)
def first(images): return {"logits": logits[:32], "maps": [images.transpose(0, 3, 1, 2)]}
two = of(logits=logits[:, :2], style=style)
calls = []
def stopped(images):
    calls.append(1)
    number, sent = map(int, Path("signal").read_text().split()) if os.path.exists("signal") else (0, 0)
    if len(calls) == number:
        os.kill(os.getpid(), sent)
    return encoder(images)
def centred(images):
    answer = encoder(images)
    return answer | {"logits": answer["logits"] - answer["logits"].mean(0)}
def dropped(images): return encoder(images) | {"style": np.random.default_rng().random((len(images), 5))}
def mistaken(images): return logits[images]
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder of the user, with 12 images of different sizes in 2 domains and 3 classes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "mine.py").write_text(FUNCTION)
    for i in range(12):
        path = tmp_path / "images" / f"camera{i % 2}" / "abc"[i // 2 % 3] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(RNG.integers(0, 256, (10 + i, SIDE, 3), np.uint8)).save(path)
    return tmp_path


def features(*arguments, code=0, encoder="mine:encoder", images="images", out="f.npz"):
    sys.modules.pop("mine", None)
    return command("features", f"--encoder={encoder}", f"--images={images}", f"--out={out}", *arguments, code=code)


def read(path="f.npz"):
    with np.load(path) as arrays:
        return dict(arrays)


def test_a_function_gives_what_it_gives():
    assert "12 images" in features("--size=16", "--batch=5")
    found = read()
    images = np.stack([Image.open(f"images/{p}").resize((16, 16), Image.Resampling.BILINEAR) for p in found["paths"]])
    np.testing.assert_allclose(found["logits"], images.mean((1, 2)) - 100, rtol=1e-5)
    np.testing.assert_array_equal(found["features"], found["logits"][:, :2])
    maps = images / 255, images[:, ::2], images[:, :, :1] / 255
    style = np.concatenate([g(m, (1, 2)) for m in maps for g in (np.mean, np.std)], axis=1)
    np.testing.assert_allclose(found["style"], style, rtol=1e-4)


def test_a_list_and_a_folder_without_classes(here):
    lines = [f"images/camera{i % 2}/{'abc'[i // 2 % 3]}/{i}.png,d{i},{'' if i else 2}" for i in range(12)]
    (here / "list.csv").write_text("path,domain,label\n" + "\n".join(lines))
    features(images="list.csv")
    found = read()
    assert list(found["labels"]) == [2, *[-1] * 11] and found["domains"][11] == "d11"
    assert list(found["classes"]) == ["0", "1", "2"]
    features(images="images/camera0", out="g.npz")  # its classes are domains here
    assert set(read("g.npz")["labels"]) == {-1} and set(read("g.npz")["domains"]) == {*"abc"}


def test_what_cannot_be_read_is_named_and_left_out(here):
    (here / "images/camera0/a/0.png").write_bytes(b"no image")
    said = features()
    assert "left out: images/camera0/a/0.png" in said and "11 images of 2 domains, 1 left out" in said
    found = read()
    assert len(found["logits"]) == len(found["paths"]) == 11 and "camera0/a/0.png" not in found["paths"]
    assert json.loads(str(found["about"]))["left_out"] == ["camera0/a/0.png"]
    for path in here.glob("images/*/*/*"):
        path.write_bytes(b"no image")
    assert "none of 12 images could be read; the first: images/camera0/a/0.png" in features(out="g.npz", code=2)


def stopped(*arguments, **options):
    return features("--batch=5", *arguments, encoder="mine:stopped", **options)


@pytest.fixture
def halves(here, capfd):
    """A finished f.npz, and the same as g.npz after a signal in its second batch of three."""
    stopped()
    (here / "signal").write_text(f"4 {int(signal.SIGTERM)}")
    stopped(out="g.npz", code=143)
    assert stops.LINE.format("SIGTERM") in capfd.readouterr().err  # the same command does go on
    (here / "signal").unlink()


def test_what_differs_from_an_earlier_call_is_refused(here, halves):
    (here / "names.txt").write_text("a\nb\nc\n")
    image, before = here / "images/camera0/a/0.png", contents(here)
    times = image.stat().st_mtime_ns
    for out in ("f.npz", "g.npz"):
        for flag in ("--batch=6", "--size=16", "--fit=pad", "--classes=names.txt"):
            assert re.search(f"{out}.*{flag[2:].partition('=')[0]}=.*, now ", stopped(flag, out=out, code=2))
        image.unlink()
        assert 'images="12 images' in stopped(out=out, code=2)
        image.write_bytes(before["images/camera0/a/0.png"])
        assert 'images="12 images' in stopped(out=out, code=2)
        os.utime(image, ns=(times, times))
        (here / "mine.py").write_text(FUNCTION + "#")
        assert "made with encoder_sha256=" in stopped(out=out, code=2)
        (here / "mine.py").write_text(FUNCTION)
    assert "left as it is" in stopped()
    assert contents(here) | {"g.npz.part/lock": 0} == before | {"g.npz.part/lock": 0}
    assert "goes on after 10 images" in stopped(out="g.npz") and not (here / "g.npz.part").exists()
    assert (here / "f.npz").read_bytes() == (here / "g.npz").read_bytes()


def test_what_is_damaged_or_of_others_is_refused(here, halves):
    for name in ("rows.f32", "state.json"):
        kept = (here / "g.npz.part" / name).read_bytes()
        flip(here / "g.npz.part" / name)
        said = stopped(out="g.npz", code=2)
        assert f"g.npz.part/{name}: " in said and "delete g.npz.part" in said
        (here / "g.npz.part" / name).write_bytes(kept)
    (here / "g.npz.part" / "state.json").unlink()
    assert "rows.f32: not written by this command" in stopped(out="g.npz", code=2)
    cut(here / "f.npz", 300)
    assert "f.npz: not written by this command" in stopped(code=2)


@pytest.mark.parametrize(("function", "said"), [
    ("nothing", "logits"), ("tensor", "logits"), ("few", "logits"), ("two", "--classes"), ("shares", "probabilities"),
    ("first", "map"), ("mistaken", "IndexError"), ("not_finite", "0.png: logits"), ("centred", "logits"),
    ("dropped", "style"),
])  # fmt: skip
def test_an_answer_that_is_no_description_of_each_image_is_named(function, said):
    """Such as one that changes with the other images of a batch, or by chance."""
    line = features(encoder=f"mine:{function}", code=2)
    assert said in line and line.count("\n") == 1 and len(line) < 210


def weights():
    sizes = {"conv1": (4, 3, 3, 3), "scale": (4,), "shift": (4,), "mean": (4,), "var": (4,), "conv2": (6, 4, 3, 3),
             "dense": (CLASSES, 6), "bias": (CLASSES,)}  # fmt: skip
    made = {name: RNG.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    return made | {"var": np.abs(made["var"]) + 0.1}


def save_onnx(path, w, channels_last=False, batch="n", side="side", dense=False, padded=False):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    node, info = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    first = [node("Transpose", ["image"], ["x"], perm=[0, 3, 1, 2])] if channels_last else []
    nodes = [
        *first, node("Conv", ["x" if channels_last else "image", "conv1"], ["c1"], pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["c1", "scale", "shift", "mean", "var"], ["b1"]), node("Relu", ["b1"], ["r1"]),
        *([node("Mul", ["no", "no"], ["pads"]), node("Pad", ["r1", "pads"], ["p1"])] if padded else []),
        node("Conv", ["p1" if padded else "r1", "conv2"], ["c2"], strides=[2, 2]), node("GlobalAveragePool", ["c2"], ["pooled"]),
        node("Flatten", ["image" if dense else "pooled"], ["flat"]),
        node("Gemm", ["flat", "dense", "bias"], ["answer"], transB=1),
        node("Softmax", ["answer"], ["shares"]),
    ]  # fmt: skip
    form = [batch, side, side, 3] if channels_last else [batch, 3, side, side]
    outputs = [info(name, 1, [batch, CLASSES]) for name in ("answer", "shares")]
    constants = [onnx.numpy_helper.from_array(value, name) for name, value in w.items()]
    graph = onnx.helper.make_graph(nodes, "tiny", [info("image", 1, form)], outputs, constants)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)


def normalised(paths):
    pixels = [np.asarray(Image.open(path).resize((SIDE, SIDE), Image.Resampling.BILINEAR)) for path in paths]
    return ((np.stack(pixels).astype(np.float32) / 255 - MEAN) / STD).transpose(0, 3, 1, 2)


def by_torch(w, paths, maps):
    """Logits, features and style by PyTorch's layers and formulas of the images at these paths."""
    torch = pytest.importorskip("torch")
    f, w = torch.nn.functional, {name: torch.from_numpy(value) for name, value in w.items()}
    x = torch.from_numpy(normalised(paths))
    early = f.batch_norm(f.conv2d(x, w["conv1"], padding=1), w["mean"], w["var"], w["scale"], w["shift"]).relu()
    late = f.conv2d(early, w["conv2"], stride=2)
    chosen = [x, *({"r1": early, "c2": late}[name] for name in maps)]
    style = [moment for m in chosen for moment in (m.mean((2, 3)), m.std((2, 3), correction=0))]
    flat = late.mean((2, 3)) if maps else x.flatten(1)
    return {"logits": f.linear(flat, w["dense"], w["bias"]), "features": flat, "style": torch.cat(style, 1)}


@pytest.mark.slow
@pytest.mark.parametrize(("options", "maps"), [
    ({}, ["r1"]), ({"channels_last": True}, ["r1"]), ({"batch": 5}, ["r1", "c2"]), ({"side": SIDE}, ["r1", "c2"]),
    ({"dense": True}, []), ({"padded": True}, ["r1"]),
], ids=str)  # fmt: skip
def test_a_graph_gives_what_pytorch_computes(options, maps, here):
    """Of its own choice r1 alone is a map: b1 and c1 become r1, c2 is a convolution, and of p1, whose padding is
    computed, the channels are unknown."""
    w = weights() | ({} if maps else {"dense": np.ones((CLASSES, 3 * SIDE**2), np.float32) / SIDE})
    save_onnx("tiny.onnx", w | ({"no": np.zeros(8, np.int64)} if options.get("padded") else {}), **options)
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


def save_vit(path):
    """A vision transformer without logits: tokens of the class and of patches, and layer norms in parts, as PyTorch
    writes them for ONNX 14. Gives the names of its last norm and of its blocks' sums."""
    onnx, nodes, sums = pytest.importorskip("onnx"), [], []
    sizes = {"patch": (5, 3, 8, 8), "cls": (1, 1, 5), "place": (1, 5, 5), "gain": 5, "bias": 5, "dense": (5, 5)}
    w = {name: RNG.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    w |= {"ones": [1, 1, 1], "never": [False] * 3, "flat": [0, 5, -1], "least": np.float32(1e-6)}

    def op(kind, *inputs, **options):
        nodes.append(onnx.helper.make_node(kind, inputs, [f"t{len(nodes)}"], **options))
        return f"t{len(nodes) - 1}"

    def norm(x):
        apart = op("Sub", x, op("ReduceMean", x, axes=[-1]))
        variance = op("Add", op("ReduceMean", op("Mul", apart, apart), axes=[-1]), "least")
        return op("Add", op("Mul", op("Div", apart, op("Sqrt", variance)), "gain"), "bias")

    patches = op("Transpose", op("Reshape", op("Conv", "image", "patch", strides=[8, 8]), "flat"), perm=[0, 2, 1])
    shape = op("Where", "never", "ones", op("Shape", op("ReduceMean", patches, axes=[1])))  # which nobody infers
    x = op("Add", op("Concat", op("Expand", "cls", shape), patches, axis=1), "place")
    for _ in range(2):
        h = norm(x)
        seen = op("Softmax", op("MatMul", h, op("Transpose", h, perm=[0, 2, 1])))
        sums.append(op("Add", op("MatMul", seen, h), x))
        sums.append(x := op("Add", op("MatMul", norm(sums[-1]), "dense"), sums[-1]))
    last = norm(x)
    outputs = [onnx.helper.make_tensor_value_info(name, 1, None) for name in (last, *sums)]
    image = onnx.helper.make_tensor_value_info("image", 1, ["n", 3, SIDE, SIDE])
    constants = [onnx.numpy_helper.from_array(np.array(value), name) for name, value in w.items()]
    graph = onnx.helper.make_graph(nodes, "vit", [image], outputs, constants)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 14)], ir_version=7), path)
    return last, sums


def test_tokens_of_a_vision_transformer_are_features_and_maps_without_logits(here):
    """The features are the class beside the patches' mean; the maps are sums of early blocks, without the class."""
    runtime, (last, sums) = pytest.importorskip("onnxruntime"), save_vit("v.onnx")
    ask = functools.partial(features, "--batch=4", encoder="v.onnx")
    for named, *flags in (("--logits: ",), ("--features: ", "--logits=none"), ("=t0: ", "--logits=none", "--features=t0")):  # fmt: skip
        assert named in ask(*flags, code=2)
    assert "there are no logits" in ask("--logits=none", f"--features={last}")
    found, about = read(), json.loads(str(read()["about"]))
    image = normalised(here / "images" / path for path in found["paths"])
    x, *maps = runtime.InferenceSession("v.onnx").run([last, *sums[:2]], {"image": image})
    np.testing.assert_allclose(found["features"], np.concatenate([x[:, 0], x[:, 1:].mean(1)], 1), atol=1e-4)
    maps = [image.reshape(12, 3, -1).swapaxes(1, 2), *(m[:, 1:] for m in maps)]
    style = [moment for m in maps for moment in (m.mean(1), m.std(1))]
    np.testing.assert_allclose(found["style"], np.concatenate(style, 1), atol=1e-4)
    assert about["maps"] == sums[:2] and "logits" not in found and {*found["labels"]} == {0, 1, 2}
    assert "made with features=" in ask("--logits=none", f"--features={sums[3]}", code=2)


@pytest.mark.slow
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


@pytest.mark.slow
def test_weights_beside_a_graph_are_files_of_its_own_folder(here):
    onnx = pytest.importorskip("onnx")
    save_onnx("whole.onnx", weights())
    (here / "pair").mkdir()
    onnx.save(onnx.load("whole.onnx"), "pair/m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    ask = functools.partial(features, "--logits=answer", "--size=16", encoder="pair/m.onnx")
    assert "12 images" in ask()
    shutil.move(here / "pair" / "w.bin", here / "w.bin")
    (here / "pair" / "w.bin").symlink_to(here / "w.bin")
    (here / "pair" / "sub").symlink_to(here)
    for place in ("w.bin", "../w.bin", f"{here}/w.bin", "sub/w.bin", "sub/../w.bin"):
        model = onnx.load(here / "pair" / "m.onnx", load_external_data=False)
        for tensor in model.graph.initializer:
            next(entry for entry in tensor.external_data if entry.key == "location").value = place
        (here / "pair" / "m.onnx").write_bytes(model.SerializeToString())
        line = ask(out="g.npz", code=2)
        assert "outside its folder" in line and line.count("\n") == 1
