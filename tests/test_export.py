"""Exported programs: they answer as the model does, in every format, and what does not is not written."""

import functools
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

import cxda_jax
from cxda_jax.errors import UserError
from cxda_jax.experiment import METHODS
from cxda_jax.export import exporting, formats
from cxda_jax.export.exporting import Task, compare, export
from cxda_jax.export.formats import FORMATS
from cxda_jax.export.pair import pair_of
from tests.commands import command
from tests.test_web import random_model

PLACES = 25
RANDOM = 1e-3  # differences of random networks, which may blow up the last bits; trained ones have 1e-6
REFUSED = {
    "cxda_supervised": "must know the domain", "ft_em": "has no program", "ft_im": "has no program",
    "sf_ocda": "has no program", "cotta": "has no program",
}  # fmt: skip
UNKNOWN = {
    ("litert", "lame"),
    ("litert", "sla"),
    ("onnx", "lame"),
}  # an operation of theirs is unknown to the converter
EXPORTED = [name for name in METHODS if name not in REFUSED]
NETS = {"cnn": {}, "resnet": {"net__name": "resnet50", "side": 24}}


@functools.cache
def model_of(method, net):
    # LAME's nearest neighbours jump where two images are equally near, which a last bit decides in a random network.
    return random_model(method, **NETS[net], lame__affinity="rbf")


def tasks_of(model, count=20, queries=5, seed=0):
    """Blocks of grey, so that images differ in more than noise. Buffers hold 0, 1, 5, 20 images and all places, in turn."""
    rng, side = np.random.default_rng(seed), model.card.shape[0]
    coarse = rng.integers(0, 256, (count, PLACES + queries, 6, 6, 1), np.uint8)
    pixels = np.repeat(np.repeat(coarse, 5, 2), 5, 3)[:, :, :side, :side]
    return [Task(own[queries:][: exporting.fill_of(i, PLACES)], own[:queries], None) for i, own in enumerate(pixels)]


def parity_of(kind, model, folder):
    for name in FORMATS[kind].needs:
        pytest.importorskip(name)
    pair = pair_of(model, PLACES)
    exporting.write(FORMATS[kind], pair, folder, f"{kind}: {model.method.name}")
    form = FORMATS[kind]._replace(error=max(FORMATS[kind].error, RANDOM))
    return compare(model, form, FORMATS[kind].run(pair, folder), tasks_of(model), PLACES)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("method", EXPORTED)
@pytest.mark.parametrize("kind", ["jax", "litert", "onnx"])
def test_programs_answer_as_the_model_does_at_every_fill(kind, method, net, tmp_path):
    model = model_of(method, net)
    if (kind, method) in UNKNOWN:
        with pytest.raises(UserError, match=f"{kind}: {method} cannot be converted"):
            parity_of(kind, model, tmp_path)
        return
    parity = parity_of(kind, model, tmp_path)
    assert parity["tasks"] == 20 and parity["images"] == [0, 1, 5, 20, PLACES] and parity["same_classes"] == 1
    assert parity["logits"] <= RANDOM and parity["attention"] <= RANDOM
    if model.method.uses_support:  # the memory says something
        encode, predict = FORMATS[kind].run(pair_of(model, PLACES), tmp_path)
        task, images = tasks_of(model)[4], np.zeros((PLACES, *model.card.shape), np.uint8)
        images[:] = task.support
        some, none = (encode({"images": images, "present": np.full(PLACES, x, np.float32)}) for x in (1, 0))
        answers = [np.asarray(predict({**memory, "image": task.query[:1]})["logits"]) for memory in (some, none)]
        assert np.abs(answers[0] - answers[1]).max() > 1e-4


@pytest.mark.parametrize("kind", ["litert_float16", "litert_int8"])
def test_smaller_weights_answer_nearly_so(kind, tmp_path):
    model = cxda_jax.load("glyphs")
    parity = parity_of(kind, model, tmp_path)
    assert 1e-6 < parity["logits"] <= FORMATS[kind].error and parity["same_classes"] >= FORMATS[kind].same
    size = (tmp_path / formats.LITERT).stat().st_size
    weights = sum(4 * x.size for x in jax.tree.leaves(model.variables))
    assert size < {"litert_float16": 0.65, "litert_int8": 0.45}[kind] * weights


@pytest.mark.parametrize("method", REFUSED)
def test_a_method_without_such_functions_is_refused_by_name(method):
    with pytest.raises(UserError, match=f"export: {method} {REFUSED[method]}"):
        pair_of(random_model(method), PLACES)


def test_programs_of_other_platforms_are_in_their_own_forms(tmp_path):
    """Those of CPUs rewrite sums as products; those of accelerators do not."""
    pair = pair_of(model_of("cxda_any", "cnn"), PLACES)
    FORMATS["jax"].write(pair, tmp_path)
    texts = {}
    for name in formats.PLATFORMS:
        exported = jax.export.deserialize(bytearray((tmp_path / f"encode.{name}.jax").read_bytes()))
        assert exported.platforms == (name,)
        texts[name] = exported.mlir_module()
    assert texts["cpu"].count("dot_general") > texts["cuda"].count("dot_general")
    assert "reduce_window" in texts["tpu"] and "reduce_window" not in texts["cuda"]


def test_weights_are_there_once(tmp_path):
    model = cxda_jax.load("glyphs")
    weights = sum(x.size * 4 for x in jax.tree.leaves(model.variables))
    pytest.importorskip("ai_edge_litert")
    for kind in ("jax", "litert"):
        (tmp_path / kind).mkdir()
        FORMATS[kind].write(pair_of(model, PLACES), tmp_path / kind)
        total = sum(path.stat().st_size for path in (tmp_path / kind).iterdir())
        assert weights < total < 1.5 * weights


@pytest.fixture
def photos(tmp_path):
    """A folder of 60 images of another size, and a file that is none."""
    folder, rng = tmp_path / "photos", np.random.default_rng(0)
    folder.mkdir()
    for i in range(60):
        Image.fromarray(np.repeat(np.repeat(rng.integers(0, 256, (7, 7), np.uint8), 5, 0), 5, 1)).save(
            folder / f"{i:02}.png"
        )
    (folder / "broken.png").write_text("no image")
    return folder


def test_the_command_writes_programs_and_says_how_they_compare(photos, tmp_path):
    out = tmp_path / "out"
    said = command(
        "export", "--model=glyphs", "--format=jax", f"--out={out}", f"--check_images={photos}", "--places=30"
    )
    known = json.loads((out / exporting.REPORT).read_text())
    assert f"{out}/encode.tpu.jax" in said and "100.0 % of the classes of 400 queries are equal" in said
    assert "left out" in said and "broken.png" in said
    assert {path.name for path in out.iterdir()} == {exporting.REPORT, *known["files"]}
    for name, facts in known["files"].items():
        data = (out / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (facts["bytes"], facts["sha256"])
    assert known["encode"]["takes"]["images"] == {"shape": [30, 28, 28, 1], "dtype": "uint8"}
    assert known["predict"]["gives"]["logits"]["shape"] == [1, 62] and len(known["class_names"]) == 62
    assert set(known["predict"]["takes"]) == {*known["encode"]["gives"], "image"}
    assert known["parity"]["images"] == [0, 1, 5, 20, 30] and "accuracy" not in known["parity"]
    assert known["images"]["fit"] == "pad" and known["card"]["data"] == "glyphs" and known["versions"]["jax"]
    command("export", "--model=glyphs", "--format=jax", f"--out={out}", f"--check_images={photos}")  # in its place
    assert json.loads((out / exporting.REPORT).read_text())["encode"]["takes"]["present"]["shape"] == [100]


def test_test_tasks_of_the_models_own_data_are_the_usual_check(smoke, tmp_path, capsys):
    folder = smoke[0]
    export(str(folder / "run"), "", "jax", tmp_path / "out", 0, str(folder / "data"), 5, "")
    parity = json.loads((tmp_path / "out" / exporting.REPORT).read_text())["parity"]
    assert parity["accuracy"] == parity["accuracy_of_the_model"] and parity["tasks"] == 5
    with pytest.raises(UserError, match="no prepared data.*or images of your own"):
        export("unipen", "", "jax", tmp_path / "no", 0, str(folder / "data"), 5, "")
    assert not (tmp_path / "no").exists()
    capsys.readouterr()


def test_programs_that_do_not_agree_are_not_kept(photos, tmp_path, monkeypatch, capsys):
    def write(pair, folder):
        head = next(name for name in pair.weights if "head" in name and name.endswith("kernel"))
        FORMATS_JAX.write(pair._replace(weights={**pair.weights, head: pair.weights[head] * 1.01}), folder)

    FORMATS_JAX = FORMATS["jax"]
    monkeypatch.setitem(FORMATS, "jax", FORMATS_JAX._replace(write=write))
    with pytest.raises(UserError, match="do not agree with the model: logits differ by .*; nothing is written"):
        export("glyphs", "", "jax", tmp_path / "out", 30, "", 5, str(photos))
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    capsys.readouterr()


def test_faults_are_one_line(photos, tmp_path):
    flags = ["--model=glyphs", f"--out={tmp_path}/out", f"--check_images={photos}"]
    assert "--format='tflite'" in command("export", *flags, "--format=tflite", code=2)
    assert "--format" in command("export", *flags, code=2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("")
    said = command("export", *flags[:1], f"--out={tmp_path}/full", flags[2], "--format=jax", code=2)
    assert "holds other files" in said and (tmp_path / "full" / "mine.txt").exists()


def test_a_missing_package_is_named_with_its_installation(monkeypatch):
    monkeypatch.setitem(sys.modules, "ai_edge_litert", None)
    with pytest.raises(UserError, match="ai_edge_litert is missing; pip install tensorflow ai-edge-litert"):
        formats.insist_on({"ai_edge_litert": "tensorflow ai-edge-litert"})


def test_the_example_of_a_device_runs_without_this_package(photos, tmp_path):
    """In an interpreter that cannot import JAX or cxda_jax."""
    pytest.importorskip("ai_edge_litert")
    (photos / "broken.png").unlink()
    command(
        "export",
        "--model=glyphs",
        "--format=litert",
        f"--out={tmp_path}/out",
        f"--check_images={photos}",
        "--places=30",
    )
    example = Path(__file__).parent.parent / "docs" / "examples" / "phone.py"
    code = (
        "import sys, runpy\nfor name in ('jax', 'cxda_jax', 'tensorflow'): sys.modules[name] = None\n"
        f"sys.argv[1:] = [{str(tmp_path / 'out')!r}, {str(photos)!r}]\nrunpy.run_path({str(example)!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 60 and all(line.count("%") == 2 for line in lines)
    answers = [[text.split()[0] for text in line.split("  ")[1:]] for line in lines]
    model = cxda_jax.load("glyphs")
    paths = sorted(photos.glob("*.png"))
    squashed = [np.asarray(Image.open(path).convert("L").resize((28, 28)))[..., None] for path in paths]
    assert [before for before, _ in answers] == list(model.predict(squashed).names)
    adapted = model.adapt(squashed[:30])
    assert [after for _, after in answers[30:40]] == list(adapted.predict(squashed[30:40]).names)
