"""A classifier that you have with its adapter as a model: its answers, its commands, and what programs of it answer."""

import csv
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image
from scipy.special import softmax

import cxda_jax
from cxda_jax.adapter.adapter import Head
from cxda_jax.adapter.correction import correction_in
from cxda_jax.adapter.device import programs
from cxda_jax.adapter.encoders import Options, open_encoder
from cxda_jax.device.adapting import shares_of
from cxda_jax.device.attached import Rows, attach
from cxda_jax.export import formats, script
from cxda_jax.export.describing import write_describe
from cxda_jax.types import Images
from tests.commands import command
from tests.fast.test_features import save_vit
from tests.pages import Elements
from tests.slow.test_received import CLASSES, MADE, WEIGHTS, write_adapter

SIDE, COUNT = 8, 8  # and numbers of a style: two of each of the input's channels and of the map's
TEMPERATURES = {0: 1.5, 5: 1.2, 20: 0.9, 100: 0.7}
RNG = np.random.default_rng(5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An ONNX classifier, the adapter of it, and images of one domain."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("pair")
    node, info = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    weights = {"conv": (1, 3, 3, 3), "dense": (CLASSES, 1), "bias": (CLASSES,)}
    nodes = [
        node("Conv", ["image", "conv"], ["c"]), node("Relu", ["c"], ["map"]),
        node("GlobalAveragePool", ["map"], ["p"]), node("Flatten", ["p"], ["f"]),
        node("Gemm", ["f", "dense", "bias"], ["logits"], transB=1),
    ]  # fmt: skip
    constants = [onnx.numpy_helper.from_array(RNG.normal(size=s).astype(np.float32), n) for n, s in weights.items()]
    ends = [info("image", 1, ["n", 3, SIDE, SIDE])], [info("logits", 1, ["n", CLASSES])]
    graph = onnx.helper.make_graph(nodes, "tiny", *ends, constants)
    opset = onnx.helper.make_opsetid("", 17)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8), folder / "m.onnx")
    encoder = open_encoder(str(folder / "m.onnx"), Options())
    origin = encoder.about | {"fit": "squash", "classes": [*"abcdef"]}
    report = {**MADE["report"], "drift": {"limit": None}}
    report["calibration"] = {str(n): {"temperature": t} for n, t in TEMPERATURES.items()} | {
        "plain": {"temperature": 1.2}
    }
    params = {n: np.array(RNG.normal(0, 0.5, x.shape), np.float32) for n, x in WEIGHTS.items() if "params" in n}
    write_adapter(folder / "adapter", {**MADE, "report": report, "origin": origin}, {**WEIGHTS, **params})
    for i in range(32):
        path = folder / "images" / f"{i:02}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(RNG.integers(0, 256, (SIDE, SIDE, 3), np.uint8)).save(path)
    return folder


@pytest.fixture(scope="module")
def described(folder):
    """The pixels, and what the encoder says of them."""
    pixels = np.stack([np.asarray(Image.open(path)) for path in sorted((folder / "images").iterdir())])
    return pixels, open_encoder(str(folder / "m.onnx"), Options()).encode(pixels)


def test_it_answers_as_the_adapter_does(folder, described):
    pixels, told = described
    model = cxda_jax.load(folder / "adapter", encoder=str(folder / "m.onnx"))
    adapter = cxda_jax.load_adapter(folder / "adapter")
    asked, encode = [], model.rows.encoder.encode
    model.rows.encoder = model.encoder._replace(encode=lambda x: asked.append(len(x)) or encode(x))
    before = model.predict(pixels)
    corrected = correction_in(adapter.variables)(told["logits"], told["style"])  # by the image's own style
    np.testing.assert_allclose(before.probabilities, softmax(corrected / 1.5, -1), atol=1e-5)
    adapted, device = model.adapt(pixels[:20]), adapter.adapt(told["logits"][:20], told["style"][:20])
    found = adapted.predict(pixels[20:])
    expected = device.predict_proba(told["logits"][20:], told["style"][20:])
    np.testing.assert_allclose(found.probabilities, expected, atol=1e-5)
    assert np.abs(found.probabilities - before.probabilities[20:]).max() > 0.05
    assert set(found.names) <= {*"abcdef"} and adapted.attention(pixels[:2]).shape == (2, 1, 20)
    buffer = cxda_jax.SupportBuffer(model, capacity=25)
    for image in pixels[:20]:
        buffer.observe(image)
    np.testing.assert_allclose(buffer.predict(pixels[20:]).probabilities, expected, atol=1e-5)
    assert len(asked) == 1, "an image is described once"
    nothing, plain = model.adapt([]), adapted.plain()
    np.testing.assert_array_equal(nothing.predict(pixels).probabilities, before.probabilities)
    np.testing.assert_allclose(plain.predict(pixels).probabilities, softmax(told["logits"] / 1.2, -1), atol=1e-6)


def test_drift_keeps_the_plain_answers_and_exports_know_nothing_of_it(folder, described, tmp_path):
    pixels, told = described
    adapter = cxda_jax.load_adapter(folder / "adapter")
    adapter._replace(report={**adapter.report, "drift": {"limit": 0.0}}).save(tmp_path / "strict")
    model = cxda_jax.load(tmp_path / "strict", encoder=str(folder / "m.onnx"))
    assert "the classifier's own answers stay" in model.unlike(pixels[:5]) and not model.unlike(pixels[:0])
    found = model.adapt(pixels[:5]).predict(pixels)
    np.testing.assert_allclose(found.probabilities, softmax(told["logits"] / 1.2, -1), atol=1e-6)
    free = cxda_jax.load(folder / "adapter", encoder=str(folder / "m.onnx")).adapt(pixels[:5])
    with_drift = attach(tmp_path / "strict", str(folder / "m.onnx"), tells_drift=False).adapt(pixels[:5])
    np.testing.assert_array_equal(with_drift.predict(pixels).probabilities, free.predict(pixels).probabilities)


def test_a_model_of_an_adapter_that_is_not_trusted_adapts_if_it_is_asked_to(folder, described, tmp_path):
    _, told = described
    adapter = cxda_jax.load_adapter(folder / "adapter")
    unsure = {**adapter.report, "overall": {**adapter.report["overall"], "100": [0.1, -0.2, 0.4]}}
    adapter._replace(report=unsure).save(tmp_path / "unsure")
    rows, model = [*np.concatenate([told["logits"], told["style"]], 1)], cxda_jax.load(tmp_path / "unsure")
    plain, buffer = model.predict(rows), cxda_jax.SupportBuffer(model.trusted(), capacity=9)
    np.testing.assert_array_equal(model.adapt(rows[:9]).predict(rows).probabilities, plain.probabilities)
    for row in rows[:9]:
        buffer.observe(row)
    device = adapter.adapt(told["logits"][:9], told["style"][:9])
    expected = device.predict_proba(told["logits"], told["style"])
    assert shares_of(model.trusted().adapt(rows[:9])) is None
    np.testing.assert_allclose(
        shares_of(cxda_jax.load(folder / "adapter").adapt(rows[:9])).found, device.shares(), atol=1e-6
    )
    for adapted in (model.trusted().adapt(rows[:9]), buffer):
        np.testing.assert_allclose(adapted.predict(rows).probabilities, expected, atol=1e-5)
    buffer.save(tmp_path / "it.npz")
    again = cxda_jax.SupportBuffer.load(tmp_path / "it.npz", model)
    np.testing.assert_array_equal(again.images()[:, 0, 0], rows[:9])
    export = "export", f"--model={tmp_path}/unsure", "--format=jax", f"--out={tmp_path}/out", "--check_images=none"
    assert "--always" in command(*export, code=2) and "check_images=none" in command(*export, "--always", code=2)


def test_the_commands_take_both(folder, tmp_path, described):
    asked = "adapt", f"--model={folder}/adapter", f"--buffer={folder}/images", f"--out={tmp_path}/out"
    pair = *asked, f"--encoder={folder}/m.onnx"
    said = command(*pair, f"--images={folder}/images")
    assert "With 20 images, adapting brought +2.0 points" in said
    with open(tmp_path / "out" / "predictions.csv") as file:
        table = [*csv.DictReader(file)]
    _, told = described
    device = cxda_jax.load_adapter(folder / "adapter").adapt(told["logits"], told["style"])
    proba = device.predict_proba(told["logits"], told["style"])
    assert [row["answer"] for row in table] == ["abcdef"[i] for i in proba.argmax(1)]
    assert [row["before"] for row in table] == ["abcdef"[i] for i in told["logits"].argmax(1)]  # the classifier's own
    page = Elements((tmp_path / "out" / "adapted.html").read_text())
    shares = WEIGHTS["variables/batch_stats/adapter/shares"], device.shares()
    for name, before, found in zip("abcdef", *shares, strict=True):
        assert f"{name}{100 * before:.1f} % → {100 * found:.1f} %" in page.text
    other = (folder / "m.onnx").read_bytes().replace(b"map", b"mop")
    (tmp_path / "m.onnx").write_bytes(other)
    adapter = cxda_jax.load_adapter(folder / "adapter")
    adapter._replace(report={**adapter.report, "takes": "none"}).save(tmp_path / "alone")
    said = command(*pair, f"--images={folder}/images", f"--model={tmp_path}/alone")
    assert "needs no buffer" in said and "With 20 images" not in said
    with open(tmp_path / "out" / "predictions.csv") as file:
        assert not any(row["nearest_1"] for row in csv.DictReader(file))
    for wrong, named in (
        ((), "--encoder"), ((f"--encoder={folder}/m.onnx", f"--out={folder}/m.onnx"), "is a file"), ((f"--encoder={tmp_path}/m.onnx",), "encoder_sha256="),
        ((f"--encoder={folder}/m.onnx", "--method=t3a"), "t3a"), ((f"--encoder={folder}/m.onnx", "--model=glyphs"), "glyphs"),
    ):  # fmt: skip
        assert named in command(*asked, f"--images={folder}/images", *wrong, code=2)


def exported(*flags):
    """What the command says. A test is skipped where the converter does not match this JAX."""
    try:
        return command("export", *flags)
    except AssertionError as e:
        if formats.NO_MATCH not in str(e):
            raise
        pytest.skip(str(e))


@pytest.mark.parametrize(("kind", "allowed"), [("litert", 1e-4), ("javascript", 0.25)])
def test_programs_answer_as_it_does(kind, allowed, folder, tmp_path, described):
    """With no image, one and all, however few tasks are asked for."""
    _, told = described
    labels = {"labels": np.zeros(32, int), "domains": ["x"] * 32, "classes": [*"abcdef"], "about": "{}"}
    np.savez(tmp_path / "f.npz", logits=told["logits"], style=told["style"], **labels)
    asked = f"--model={folder}/adapter", f"--format={kind}", f"--out={tmp_path}/out", "--places=5", "--check_tasks=1"
    tolerance = [f"--tolerance={allowed}"] * (kind == "javascript")
    said = exported(*asked, f"--check_images={tmp_path}/f.npz", *tolerance)
    assert "of the largest" in said and "100.0 % of the classes of 60 queries are equal" in said
    parity = json.loads((tmp_path / "out" / "export.json").read_text())["parity"]
    assert parity["logits"] < 1e-4 and parity["images"] == [0, 1, 5] and parity["logits_allowed"] == allowed


def test_three_programs_of_a_pair_answer_as_the_device(folder, tmp_path, described):
    """As docs/export.md calls them: with 0 to 5 images, which are all, and with those that took the place of the oldest."""
    pytest.importorskip("jax2onnx")
    pixels, told = described
    adapter = cxda_jax.load_adapter(folder / "adapter")
    asked = f"--model={folder}/adapter", f"--encoder={folder}/m.onnx", "--format=onnx", f"--out={tmp_path}/exported"
    exported(*asked, f"--check_images={folder}/images", "--places=5", "--check_tasks=1")
    report = json.loads((tmp_path / "exported" / "export.json").read_text())
    parity, row = report["parity"], [1, 1, CLASSES + COUNT]
    assert parity["images"] == [0, 1, 5] and parity["logits_allowed"] == max(1e-4, 4 * parity["noise"])
    assert report["describe"]["takes"]["image"] == {"shape": [1, SIDE, SIDE, 3], "dtype": "uint8"}
    assert report["describe"]["gives"]["row"] == report["predict"]["takes"]["image"]
    assert report["encode"]["takes"]["images"]["shape"] == [5, *row] and report["rows"]["shape"] == row
    page = (Path(formats.__file__).parents[2] / "docs" / "export.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "onnxruntime" in block)
    known = {}
    exec(code.replace("exported/", f"{tmp_path}/exported/"), known)
    for i in range(8):
        logits, first = known["answer"](pixels[i]), max(0, i - 5)
        device = adapter.adapt(told["logits"][first:i], told["style"][first:i])
        expected = device.predict_proba(told["logits"], told["style"])[i : i + 1]
        np.testing.assert_allclose(softmax(logits, -1), expected, atol=1e-5)


def test_a_head_gives_the_logits_of_features_in_the_model_and_in_its_program(tmp_path):
    options = Options(batch=4, logits="none", features=save_vit(tmp_path / "v.onnx")[0])
    encoder, pixels = open_encoder(str(tmp_path / "v.onnx"), options), RNG.integers(0, 256, (4, 16, 16, 3), np.uint8)
    told, head = encoder.encode(pixels), Head(np.float32(RNG.normal(size=(10, CLASSES))), np.float32(range(CLASSES)))
    adapter = cxda_jax.load_adapter(write_adapter(tmp_path / "a"))
    adapter = adapter._replace(origin=encoder.about, head=head, style=told["style"].shape[1])
    expected = np.concatenate([told["features"] @ head.weights + head.bias, told["style"]], axis=1)
    write_describe(adapter, tmp_path / "v.onnx", tmp_path)
    program = formats.open_onnx(tmp_path / "describe.onnx")
    rows = np.stack([program({"image": image[None]})["row"].ravel() for image in pixels])
    for found in (rows, Rows(encoder, adapter)(pixels)):
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_script_reads_the_images_that_count_most(folder, tmp_path):
    """Of more than 1000. Half of them are alike and far from every query, so the first of these count, as in lax.top_k."""
    if not shutil.which("node"):
        pytest.skip("no node")
    rng, model = np.random.default_rng(1), cxda_jax.load(folder / "adapter")
    rows = rng.normal(0, 0.5, (1100, CLASSES + COUNT)).astype(np.float32)
    rows[::2, CLASSES:] = 1
    rows[700:, :CLASSES] += 4 * np.eye(CLASSES, dtype=np.float32)[2]
    query = rows[1:17:2] + np.float32(0.1)
    script.write(model, tmp_path)
    found = script.answers(model, tmp_path, [(rows, query)])[0]
    adapt, predict = programs(CLASSES)
    buffer, asked = (Images(x[:, None, None], np.zeros(len(x), np.int32)) for x in (rows, query))
    told = np.asarray(predict(adapt(model.variables, buffer, jax.random.key(0)), asked))
    expected = told / model.adapter.temperature(1100)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
