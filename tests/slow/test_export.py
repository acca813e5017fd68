"""Exported programs: they answer as the model does, in every format, and what does not is not written."""

import hashlib
import json

import jax
import numpy as np
import pytest
from PIL import Image
from scipy.special import expit

import cxda_jax
from cxda_jax.errors import UserError
from cxda_jax.export import exporting, formats
from cxda_jax.export.exporting import Check, Source, export
from cxda_jax.export.formats import FORMATS, PLATFORMS
from cxda_jax.export.pair import pair_of
from tests.commands import command
from tests.fast.test_export import PLACES, RANDOM, parity_of, tasks_of  # noqa: F401
from tests.nets import random_model


@pytest.mark.parametrize(("kind", "least", "most"), [("litert", 1.0, 1.5), ("litert_int8", 0.25, 0.45)])
def test_weights_are_there_once_and_smaller_ones_answer_nearly_so(kind, least, most, tmp_path):
    """In the size of the file, of the weights' own."""
    model = cxda_jax.load("glyphs")
    parity = parity_of(kind, model, tmp_path, tasks_of(model, 20))
    assert (parity["logits"] < 1e-5) == (kind == "litert") and parity["logits"] <= FORMATS[kind].error
    assert parity["same_classes"] >= FORMATS[kind].same
    size = (tmp_path / formats.LITERT).stat().st_size / sum(4 * x.size for x in jax.tree.leaves(model.variables))
    assert least < size < most


@pytest.fixture
def photos(tmp_path):
    folder, rng = tmp_path / "photos", np.random.default_rng(0)
    folder.mkdir()
    for i in range(24):
        pixels = np.repeat(np.repeat(rng.integers(0, 256, (7, 7), np.uint8), 5, 0), 5, 1)
        Image.fromarray(pixels).save(folder / f"{i:02}.png")
    return folder


def test_the_command_writes_programs_and_says_how_they_compare(photos, tmp_path):
    """In the place of an earlier export. Programs of CPUs rewrite sums as products; those of accelerators do not."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "encode.cpu.jax").write_text("of an earlier export")
    earlier = {"encode.cpu.jax": {"sha256": hashlib.sha256(b"of an earlier export").hexdigest()}}
    (out / exporting.REPORT).write_text(json.dumps({"files": earlier}))
    flags = "--model=glyphs", f"--out={out}", f"--check_images={photos}", f"--places={PLACES}"
    said = command("export", "--format=jax", *flags)
    known = json.loads((out / exporting.REPORT).read_text())
    assert (
        f"{out}: replaces" in said
        and f"{out}/encode.tpu.jax" in said
        and "100.0 % of the classes of 400 queries are equal" in said
    )
    assert {path.name for path in out.iterdir()} == {exporting.REPORT, *known["files"]} and len(known["files"]) == 7
    for name, facts in known["files"].items():
        data = (out / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (facts["bytes"], facts["sha256"])
    assert known["encode"]["takes"]["images"] == {"shape": [PLACES, 28, 28, 1], "dtype": "uint8"}
    assert set(known["predict"]["takes"]) == {*known["encode"]["gives"], "image"}
    assert known["parity"]["images"] == [0, 1, 5, PLACES] and known["images"]["fit"] == "pad"
    encode = {name: jax.export.deserialize(bytearray((out / f"encode.{name}.jax").read_bytes())) for name in PLATFORMS}
    assert all(exported.platforms == (name,) for name, exported in encode.items())
    texts = {name: exported.mlir_module() for name, exported in encode.items()}
    assert texts["cpu"].count("dot_general") > texts["cuda"].count("dot_general")
    assert "reduce_window" in texts["tpu"] and "reduce_window" not in texts["cuda"]


def test_test_tasks_of_the_models_own_data_are_the_usual_check_and_what_disagrees_is_not_kept(
    smoke, tmp_path, monkeypatch, capsys
):
    folder, form = smoke[0], FORMATS["jax"]
    monkeypatch.setattr(formats, "PLATFORMS", {"cpu": "cpu"})
    given = Source(str(folder / "run")), "jax"
    export(*given, tmp_path / "out", 20, Check(str(folder / "data"), 5))
    known = json.loads((tmp_path / "out" / exporting.REPORT).read_text())
    parity = known["parity"]
    assert parity["accuracy"] == parity["accuracy_of_the_model"] and parity["tasks"] == 5
    assert known["encode"]["takes"]["present"]["shape"] == [20]

    def write(pair, folder):
        head = next(name for name in pair.weights if "head" in name and name.endswith("kernel"))
        form.write(pair._replace(weights={**pair.weights, head: pair.weights[head] * 1.01}), folder)

    monkeypatch.setitem(FORMATS, "jax", form._replace(write=write))
    with pytest.raises(UserError, match="do not agree with the model: logits differ by .*; nothing is written"):
        export(*given, tmp_path / "no", 20, Check(str(folder / "data"), 5))
    assert not (tmp_path / "no").exists() and not list(tmp_path.glob(".no*"))
    capsys.readouterr()


def test_small_sigmoids_are_right_in_onnx(tmp_path):
    """To rounding, which onnxruntime's own are not."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    ends = (onnx.helper.make_tensor_value_info(name, 1, [61]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Sigmoid", ["x"], ["y"])], "g", *([end] for end in ends))
    formats._spell_sigmoids(graph)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "m.onnx")
    x = np.linspace(-30, 30, 61, dtype=np.float32)
    np.testing.assert_allclose(formats.open_onnx(tmp_path / "m.onnx")({"x": x})["y"], expit(np.float64(x)), rtol=1e-6)


def test_what_is_not_an_earlier_export_stays(photos, tmp_path):
    """Under names that an export gives."""
    given = f"--out={tmp_path}/out", "--model=glyphs", f"--check_images={photos}"
    (tmp_path / "out").mkdir()
    for name in ("weights.safetensors", "model.tflite", "index.html", "parity.json"):
        (tmp_path / "out" / name).write_text("{}")
        assert name in command("export", *given, "--format=web", code=2)
        assert (tmp_path / "out" / name).read_text() == "{}"
        (tmp_path / "out" / name).unlink()
    with pytest.raises(UserError, match="ft_em"):
        pair_of(random_model("ft_em"), PLACES)
