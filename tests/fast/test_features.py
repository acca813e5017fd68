"""cxda features: an ONNX graph beside PyTorch's layers with its weights, a function, what goes on, and mistakes."""

import json
import os
import re
import signal
import sys

import numpy as np
import pytest
from PIL import Image

from cxda_jax.machine import stops
from tests.commands import command
from tests.lines import cases, contents, flip

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
nothing, no_style, tensor = of(style=style), of(logits=logits), of(logits=logits[:, :, None], style=style)
few, shares, one = (lambda images: {"logits": logits, "style": style}), of(logits=logits / 3, style=style), of(logits=logits[:, :1], style=style)
not_finite = of(logits=logits * np.nan, style=style)
def first(images): return {"logits": logits[:32], "maps": [images.transpose(0, 3, 1, 2)]}
def flat(images): return {"logits": logits[:32], "maps": [style[:32]]}
two = of(logits=logits[:, :2], style=style)
calls = []
def stopped(images):
    calls.append(1)
    number, sent = map(int, Path("signal").read_text().split()) if os.path.exists("signal") else (0, 0)
    if len(calls) == number:
        os.kill(os.getpid(), sent)
    return encoder(images)
def careless(images):
    answer = encoder(images.copy())
    images[:] = 0
    return answer
def centred(images):
    answer = encoder(images)
    return answer | {"logits": answer["logits"] - answer["logits"].mean(0)}
def dropped(images): return encoder(images) | {"style": np.random.default_rng().random((len(images), 5))}
masked, imaginary = of(logits=np.ma.masked_equal(2 * logits, 2), style=style), of(logits=logits, style=style * 1j)
def array(images): return logits
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
    images = np.stack(
        [Image.open(f"images/{path}").resize((16, 16), Image.Resampling.BILINEAR) for path in found["paths"]]
    )
    np.testing.assert_allclose(found["logits"], images.mean((1, 2)) - 100, rtol=1e-5)
    np.testing.assert_array_equal(found["features"], found["logits"][:, :2])
    maps = images / 255, images[:, ::2], images[:, :, :1] / 255
    style = np.concatenate([g(m, (1, 2)) for m in maps for g in (np.mean, np.std)], axis=1)
    np.testing.assert_allclose(found["style"], style, rtol=1e-4)


def test_a_function_may_change_its_input():
    features("--size=16", "--batch=5")
    features("--size=16", "--batch=5", encoder="mine:careless", out="g.npz")
    for name in ("logits", "style"):
        np.testing.assert_array_equal(read("g.npz")[name], read()[name])


def test_a_list_and_a_folder_without_classes(here):
    lines = [f"images/camera{i % 2}/{'abc'[i // 2 % 3]}/{i}.png,d{i},{'' if i else 2}" for i in range(12)]
    (here / "list.csv").write_text("path,domain,label\n" + "\n".join(lines))
    features(images="list.csv")
    found = read()
    assert list(found["labels"]) == [2, *[-1] * 11] and found["domains"][11] == "d11"
    assert list(found["classes"]) == ["0", "1", "2"]
    features(images="images/camera0", out="g.npz")  # its classes are domains here
    assert set(read("g.npz")["labels"]) == {-1} and set(read("g.npz")["domains"]) == {*"abc"}
    (here / "names.txt").write_text("z\nc\nb\n")
    assert "label 'a' is none" in features("--classes=names.txt", out="h.npz", code=2)
    (here / "names.txt").write_text("c\nb\na\n")
    features("--classes=names.txt", out="i.npz")
    assert read("i.npz")["labels"][read("i.npz")["paths"] == "camera0/a/0.png"] == [2]


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
    Image.new("L", (9, 9)).save(here / "images/camera0/a/0.png")
    assert "1 images of 1 domains, 11 left out" in features(out="g.npz")


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
        for flag, said in (("--batch=6", "--batch=5, now 6"), ("--size=16", "--size=224, now 16"),
                           ("--fit=pad", "squash.*now.*pad"), ("--classes=names.txt", r"--classes=\[\], now")):  # fmt: skip
            assert re.search(f"{out}.*made with.*{said}.*choose another --out", stopped(flag, out=out, code=2))
        image.unlink()
        assert '--images="12 images' in stopped(out=out, code=2)
        image.write_bytes(before["images/camera0/a/0.png"])
        assert '--images="12 images' in stopped(out=out, code=2)
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
    for content in (b"mine", (here / "f.npz").read_bytes()[:-300]):
        (here / "f.npz").write_bytes(content)
        assert "f.npz: not written by this command" in stopped(code=2)


def test_a_mistake_that_is_mended_is_in_nobodys_way(here):
    """All that an earlier call left is an empty f.npz.part."""
    features(encoder="mine:two", code=2)
    (here / "images/camera0/a/0.png").unlink()
    assert "11 images" in features() and not (here / "f.npz.part").exists()


MISTAKES = [
    ("no colon", {"encoder": "mine"}, "--encoder=mine: give a file that ends in .onnx, or module:function"),
    ("no module", {"encoder": "nowhere:f"}, "--encoder=nowhere:f: No module named 'nowhere'"),
    ("no function", {"encoder": "mine:g"}, "--encoder=mine:g: mine has no function g"),
    ("no graph", {"encoder": "no.onnx"}, "--encoder=no.onnx: no such file"),
    ("text", {"encoder": "text.onnx"}, "--encoder=text.onnx: Error parsing message"),
    ("ONNX alone", {"flags": ["--mean=0"]}, "--mean is for ONNX"),
    ("no folder", {"images": "nowhere"}, "--images=nowhere: no images; give a folder DOMAIN/CLASS/IMAGE"),
    ("no column", {"images": "names.txt"}, "names.txt: no column 'path'"),
    ("no array file", {"out": "f.csv"}, "--out=f.csv: give the name of a file that ends in .npz"),
    ("no logits", {"encoder": "mine:nothing"}, "--encoder=mine:nothing: no 'logits' in its answer"),
    ("no style", {"encoder": "mine:no_style"}, "--encoder=mine:no_style: no 'style' and no maps"),
    ("three axes", {"encoder": "mine:tensor"}, "'logits' has the form [32, 3, 1]; give [32, columns]"),
    ("other rows", {"encoder": "mine:few"}, "'logits' has the form [99, 3]; give [32, columns]"),
    (
        "one column",
        {"encoder": "mine:one"},
        "'logits' has the form [32, 1]; give [32, columns], with 2 columns or more",
    ),
    ("two columns", {"encoder": "mine:two"}, "--classes: 3 are known (a, b, c), but the logits have 2 columns"),
    ("probabilities", {"encoder": "mine:shares"}, "sums to 1, so they are probabilities"),
    ("no dict", {"encoder": "mine:array"}, "--encoder=mine:array: it gives a ndarray; give a dict"),
    ("flat maps", {"encoder": "mine:flat"}, "a map has the form [32, 5]; give [32, h, w, channels]"),
    ("channels first", {"encoder": "mine:first"}, "a map has the form [32, 3, 224, 224]; give [32, h, w, channels]"),
    ("a fault inside", {"encoder": "mine:mistaken"}, "(IndexError); mend the function; --debug shows where"),
    ("not finite", {"encoder": "mine:not_finite"}, "camera0/a/0.png: logits of the encoder are not finite"),
    (
        "batch statistics",
        {"encoder": "mine:centred"},
        "'logits' of an image changes by the other images of its batch; call",
    ),
    (
        "chance",
        {"encoder": "mine:dropped"},
        "'style' of an image changes when it is asked for again; call model.eval()",
    ),
    ("masked", {"encoder": "mine:masked"}, "--encoder=mine:masked: logits: 96 values are masked"),
    (
        "complex",
        {"encoder": "mine:imaginary"},
        "--encoder=mine:imaginary: style: ndarray is no array of numbers (complex",
    ),
    ("empty classes", {"flags": ["--classes=empty"]}, "--classes=empty: it is empty, or a line is"),
]


@cases(("wrong", "said"), MISTAKES)
def test_a_mistake_costs_one_line(wrong, said, here):
    (here / "empty").touch()
    (here / "text.onnx").write_text("text")
    (here / "names.txt").write_text("a\n")
    wrong = dict(wrong)
    line = features(*wrong.pop("flags", []), code=2, **wrong)
    assert said in line and line.count("\n") == 1 and len(line) < 210
