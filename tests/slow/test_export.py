"""Exported programs: they answer as the model does, in every format, and what does not is not written."""

import hashlib
import itertools
import json

import jax
import numpy as np
import pytest
from scipy.special import expit

import cxda_jax
from cxda_jax.config.registry import METHODS
from cxda_jax.errors import UserError
from cxda_jax.export import exporting, formats
from cxda_jax.export.exporting import Allowed, Check, Source, Task, agreement, compare, export
from cxda_jax.export.formats import FORMATS, PLATFORMS
from cxda_jax.export.pair import pair_of
from tests.commands import command
from tests.nets import random_model
from tests.raw_fixtures import write_images

PLACES = 6
RANDOM = 1e-3  # differences of random networks, which may blow up the last bits; trained ones have 1e-6
REFUSED = ("cxda_supervised", "ft_em", "ft_im", "sf_ocda", "cotta")
# The converter does not know an operation of theirs.
UNKNOWN = {"litert-lame", "litert-sla", "litert-stata", "onnx-lame", "onnx-stata"}
EXPORTED = [name for name in METHODS if name not in REFUSED]
OFTEN = {"jax-erm", "jax-cml", "jax-t3a", "onnx-bn"}  # in the gate
CASES = [
    pytest.param(kind, method, marks=() if f"{kind}-{method}" in OFTEN else pytest.mark.weekly)
    for kind, method in itertools.product(("jax", "litert", "onnx"), EXPORTED)
    if f"{kind}-{method}" not in UNKNOWN
]


def tasks_of(model, count=5, queries=5, seed=0):
    """Blocks of grey, so that images differ in more than noise. Buffers hold 0, 1, 5 images and all places, in turn."""
    rng, side = np.random.default_rng(seed), model.card.shape[0]
    coarse = rng.integers(0, 256, (count, PLACES + queries, 6, 6, 1), np.uint8)
    pixels = np.repeat(np.repeat(coarse, 5, 2), 5, 3)[:, :, :side, :side]
    return [Task(own[queries:][: exporting.fill_of(i, PLACES)], own[:queries], None) for i, own in enumerate(pixels)]


def parity_of(kind, model, folder, tasks):
    for name in FORMATS[kind].needs:
        pytest.importorskip(name)
    pair = pair_of(model, PLACES)
    try:
        with exporting.converting(f"{kind}: {model.method.name}"):
            FORMATS[kind].write(pair, folder)
    except UserError as e:
        if formats.NO_MATCH not in str(e):
            raise
        pytest.skip(str(e))
    allowed = Allowed(max(FORMATS[kind].error, RANDOM), FORMATS[kind].same)
    return compare(model, allowed, FORMATS[kind].run(pair, folder), tasks, tasks, PLACES)


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_programs_answer_as_the_model_does_at_every_fill(kind, method, tmp_path, monkeypatch):
    # LAME's nearest neighbours jump where two images are equally near, which a last bit decides in a random network.
    model = random_model(method, lame__affinity="rbf", icrm__layers=2)
    tasks = tasks_of(model)
    monkeypatch.setattr(formats, "PLATFORMS", {"cpu": "cpu"})  # below the command writes those of all
    parity = parity_of(kind, model, tmp_path, tasks)
    assert parity["tasks"] == len(tasks) and parity["images"] == [0, 1, 5, PLACES]
    assert parity["same_classes"] == 1
    assert parity["logits"] <= RANDOM and parity["attention"] <= RANDOM
    if kind == "onnx":  # no constant of the shape of the support's maps
        weights = sum(4 * x.size for x in jax.tree.leaves(model.variables))
        assert (tmp_path / "encode.onnx").stat().st_size < weights + 150_000


def test_programs_agree_where_logits_and_answers_do():
    """A class counts as the model's where its own two likeliest are as near as the noise."""
    ours = [np.float32([[4, 1, 0], [0, 2, 1.99]])]
    assert agreement([ours[0] * 1.01], ours, Allowed(0.1)) == {"logits": pytest.approx(0.01), "same_classes": 1}
    swapped = [ours[0][:, [0, 2, 1]]]
    assert agreement(swapped, ours, Allowed(0.5, tie=0.01))["same_classes"] == 1
    with pytest.raises(UserError, match="50.0 %"):
        agreement(swapped, ours, Allowed(0.5))
    with pytest.raises(UserError, match="1.0e-02 .*1.0e-03.*--tolerance=2e-02"):
        agreement([ours[0] * 1.01], ours, Allowed(1e-3))
    with pytest.raises(UserError, match="differ by nan"):
        agreement([ours[0] * np.nan], ours, Allowed(0.5))


@pytest.mark.parametrize(("kind", "least", "most"), [("litert", 1.0, 1.5), ("litert_int8", 0.25, 0.45)])
def test_weights_are_there_once_and_smaller_ones_answer_nearly_so(kind, least, most, tmp_path):
    """In the size of the file, of the weights' own."""
    model = cxda_jax.load("glyphs")
    parity = parity_of(kind, model, tmp_path, tasks_of(model, 20))
    assert (parity["logits"] < 1e-5) == (kind == "litert") and parity["logits"] <= FORMATS[kind].error
    assert parity["same_classes"] >= FORMATS[kind].same
    size = (tmp_path / formats.LITERT).stat().st_size / sum(4 * x.size for x in jax.tree.leaves(model.variables))
    assert least < size < most


def test_the_command_writes_programs_and_says_how_they_compare(tmp_path):
    """In the place of an earlier export. Programs of CPUs rewrite sums as products; those of accelerators do not."""
    out, photos = tmp_path / "out", write_images(tmp_path / "photos", 24, 0)
    out.mkdir()
    (out / "encode.cpu.jax").write_text("of an earlier export")
    earlier = {"encode.cpu.jax": {"sha256": hashlib.sha256(b"of an earlier export").hexdigest()}}
    (out / exporting.REPORT).write_text(json.dumps({"files": earlier}))
    flags = "--model=glyphs", f"--out={out}", f"--check_images={photos}", f"--places={PLACES}"
    said = command("export", "--format=jax", *flags)
    known = json.loads((out / exporting.REPORT).read_text())
    assert f"{out}: replaces" in said and "100.0 % of the classes of 400 queries are equal" in said
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


def test_tasks_of_the_models_own_data_are_the_usual_check_and_what_disagrees_is_not_kept(smoke, tmp_path, monkeypatch):
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
    with pytest.raises(UserError, match="logits differ"):
        export(*given, tmp_path / "no", 20, Check(str(folder / "data"), 5))
    assert not (tmp_path / "no").exists() and not list(tmp_path.glob(".no*"))


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


def test_what_is_not_as_an_earlier_export_left_it_stays(tmp_path):
    """Neither a file that has changed since, nor a report that says nothing, is an earlier export's."""
    for name, now in (("a.jax", "a"), ("b.jax", "mine"), ("parity.json", "{}")):
        (tmp_path / name).write_text(now)
    left = {f"{name}.jax": {"sha256": hashlib.sha256(name.encode()).hexdigest()} for name in "ab"}
    (tmp_path / exporting.REPORT).write_text(json.dumps({"files": left}))
    assert exporting.claimed(tmp_path) == {exporting.REPORT, "a.jax"}


def test_a_method_that_trains_on_the_device_is_not_exported():
    with pytest.raises(UserError, match="ft_em"):
        pair_of(random_model("ft_em"), PLACES)
