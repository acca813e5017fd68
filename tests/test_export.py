"""Exported programs: they answer as the model does, in every format, and what does not is not written."""

import functools
import hashlib
import itertools
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

pytestmark = pytest.mark.gate
PLACES = 6
RANDOM = 1e-3  # differences of random networks, which may blow up the last bits; trained ones have 1e-6
REFUSED = {
    "cxda_supervised": "must know the domain", "ft_em": "has no program", "ft_im": "has no program",
    "sf_ocda": "has no program", "cotta": "has no program",
}  # fmt: skip
UNKNOWN = {"litert-lame", "litert-sla", "onnx-lame"}  # the converter does not know an operation of theirs
EXPORTED = [name for name in METHODS if name not in REFUSED]
RESNET = {"net__name": "resnet50", "side": 24}
NETS = {"cnn": {}, "short_resnet": {**RESNET, "net__stages": (1, 1, 1, 1)}, "resnet50": RESNET}
CONVERTED = {"litert-cxda_any", "litert-t3a", "litert-lame", "onnx-bn", "onnx-icrm", "onnx-sla"}  # in the gate
CASES = [
    *(("jax", method, "cnn") for method in EXPORTED),
    ("jax", "bn", "short_resnet"),
    pytest.param("onnx", "cxda_any", "short_resnet", marks=pytest.mark.exhaustive),
    pytest.param("litert", "bn", "resnet50", marks=pytest.mark.exhaustive),
    *(
        pytest.param(kind, method, "cnn", marks=[] if f"{kind}-{method}" in CONVERTED else pytest.mark.exhaustive)
        for kind, method in itertools.product(("litert", "onnx"), EXPORTED)
    ),
]


@functools.cache
def model_of(method, net="cnn"):
    # LAME's nearest neighbours jump where two images are equally near, which a last bit decides in a random network.
    return random_model(method, **NETS[net], lame__affinity="rbf")


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
    exporting.write(FORMATS[kind], pair, folder, f"{kind}: {model.method.name}")
    form = FORMATS[kind]._replace(error=max(FORMATS[kind].error, RANDOM))
    return compare(model, form, FORMATS[kind].run(pair, folder), tasks, PLACES)


@pytest.mark.parametrize("kind, method, net", CASES)
def test_programs_answer_as_the_model_does_at_every_fill(kind, method, net, tmp_path):
    model = model_of(method, net)
    fills = slice(None) if net == "cnn" else slice(2, 3)  # a ResNet takes long to compile
    tasks = tasks_of(model)[fills]
    if f"{kind}-{method}" in UNKNOWN:
        with pytest.raises(UserError, match=f"{kind}: {method} cannot be converted"):
            parity_of(kind, model, tmp_path, tasks)
        return
    parity = parity_of(kind, model, tmp_path, tasks)
    assert parity["tasks"] == len(tasks) and parity["images"] == sorted({0, 1, 5, PLACES} if net == "cnn" else {5})
    assert parity["same_classes"] == 1
    assert parity["logits"] <= RANDOM and parity["attention"] <= RANDOM
    if model.method.uses_support:  # the memory says something
        encode, predict = FORMATS[kind].run(pair_of(model, PLACES), tmp_path)
        task = tasks_of(model)[4]
        some, none = (encode({"images": task.support, "present": np.full(PLACES, x, np.float32)}) for x in (1, 0))
        answers = [np.asarray(predict({**memory, "image": task.query[:1]})["logits"]) for memory in (some, none)]
        assert np.abs(answers[0] - answers[1]).max() > 1e-4


SIZES = {"litert": (1.0, 1.5), "litert_float16": (0.5, 0.65), "litert_int8": (0.25, 0.45)}  # of the weights' own


@pytest.mark.parametrize("kind", SIZES)
def test_weights_are_there_once_and_smaller_ones_answer_nearly_so(kind, tmp_path):
    model = cxda_jax.load("glyphs")
    parity = parity_of(kind, model, tmp_path, tasks_of(model, 20))
    assert (parity["logits"] < 1e-5) == (kind == "litert") and parity["logits"] <= FORMATS[kind].error
    assert parity["same_classes"] >= FORMATS[kind].same
    least, most = SIZES[kind]
    size, weights = (
        (tmp_path / formats.LITERT).stat().st_size,
        sum(4 * x.size for x in jax.tree.leaves(model.variables)),
    )
    assert least * weights < size < most * weights


def test_programs_of_all_platforms_are_in_their_own_forms_and_share_the_weights(tmp_path):
    """Those of CPUs rewrite sums as products; those of accelerators do not."""
    model = model_of("cxda_any")
    FORMATS["jax"].write(pair_of(model, PLACES), tmp_path)
    texts = {}
    for name in formats.PLATFORMS:
        exported = jax.export.deserialize(bytearray((tmp_path / f"encode.{name}.jax").read_bytes()))
        assert exported.platforms == (name,)
        texts[name] = exported.mlir_module()
    assert texts["cpu"].count("dot_general") > texts["cuda"].count("dot_general")
    assert "reduce_window" in texts["tpu"] and "reduce_window" not in texts["cuda"]
    FORMATS["jax"].write(pair_of(cxda_jax.load("glyphs"), PLACES), tmp_path)
    weights = sum(4 * x.size for x in jax.tree.leaves(cxda_jax.load("glyphs").variables))
    assert weights < sum(path.stat().st_size for path in tmp_path.iterdir()) < 1.5 * weights


@pytest.fixture
def photos(tmp_path):
    """A folder of 24 images of another size, and a file that is none."""
    folder, rng = tmp_path / "photos", np.random.default_rng(0)
    folder.mkdir()
    for i in range(24):
        pixels = np.repeat(np.repeat(rng.integers(0, 256, (7, 7), np.uint8), 5, 0), 5, 1)
        Image.fromarray(pixels).save(folder / f"{i:02}.png")
    (folder / "broken.png").write_text("no image")
    return folder


def test_the_command_writes_programs_and_says_how_they_compare(photos, tmp_path):
    """In the place of an earlier export."""
    out = tmp_path / "out"
    out.mkdir()
    (out / formats.LITERT).write_text("of an earlier export")
    flags = "--model=glyphs", f"--out={out}", f"--check_images={photos}", f"--places={PLACES}"
    said = command("export", "--format=jax", *flags)
    known = json.loads((out / exporting.REPORT).read_text())
    assert f"{out}/encode.tpu.jax" in said and "100.0 % of the classes of 400 queries are equal" in said
    assert "left out" in said and "broken.png" in said
    assert {path.name for path in out.iterdir()} == {exporting.REPORT, *known["files"]} and len(known["files"]) == 7
    for name, facts in known["files"].items():
        data = (out / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (facts["bytes"], facts["sha256"])
    assert known["encode"]["takes"]["images"] == {"shape": [PLACES, 28, 28, 1], "dtype": "uint8"}
    assert known["predict"]["gives"]["logits"]["shape"] == [1, 62] and len(known["class_names"]) == 62
    assert set(known["predict"]["takes"]) == {*known["encode"]["gives"], "image"}
    assert known["parity"]["images"] == [0, 1, 5, PLACES] and "accuracy" not in known["parity"]
    assert known["images"]["fit"] == "pad" and known["card"]["data"] == "glyphs" and known["versions"]["jax"]


def test_test_tasks_of_the_models_own_data_are_the_usual_check(smoke, tmp_path, capsys):
    folder = smoke[0]
    export(str(folder / "run"), "", "jax", tmp_path / "out", 0, str(folder / "data"), 5, "")
    known = json.loads((tmp_path / "out" / exporting.REPORT).read_text())
    episode = cxda_jax.load(folder / "run").config["episode"]
    parity, usual = known["parity"], episode["num_domains"] * episode["per_domain"]
    assert parity["accuracy"] == parity["accuracy_of_the_model"] and parity["tasks"] == 5
    assert known["encode"]["takes"]["present"]["shape"] == [usual]
    with pytest.raises(UserError, match="no prepared data.*or images of your own"):
        export("unipen", "", "jax", tmp_path / "no", 0, str(folder / "data"), 5, "")
    assert not (tmp_path / "no").exists()
    capsys.readouterr()


def test_programs_that_do_not_agree_are_not_kept(photos, tmp_path, monkeypatch, capsys):
    def write(pair, folder):
        head = next(name for name in pair.weights if "head" in name and name.endswith("kernel"))
        form.write(pair._replace(weights={**pair.weights, head: pair.weights[head] * 1.01}), folder)

    form = FORMATS["jax"]
    monkeypatch.setitem(FORMATS, "jax", form._replace(write=write))
    with pytest.raises(UserError, match="do not agree with the model: logits differ by .*; nothing is written"):
        export("glyphs", "", "jax", tmp_path / "out", PLACES, "", 5, str(photos))
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    capsys.readouterr()


def test_faults_are_one_line(photos, tmp_path, monkeypatch):
    for method, said in REFUSED.items():
        with pytest.raises(UserError, match=f"export: {method} {said}"):
            pair_of(random_model(method), PLACES)
    out, *others = f"--out={tmp_path}/out", "--model=glyphs", f"--check_images={photos}"
    assert "--format='tflite'" in command("export", out, *others, "--format=tflite", code=2)
    assert "--format" in command("export", out, *others, code=2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("")
    assert "holds other files" in command("export", out, *others, "--format=jax", code=2)
    assert (tmp_path / "out" / "mine.txt").exists()
    monkeypatch.setitem(sys.modules, "ai_edge_litert", None)
    with pytest.raises(UserError, match="ai_edge_litert is missing; pip install tensorflow ai-edge-litert"):
        formats.insist_on({"ai_edge_litert": "tensorflow ai-edge-litert"})


def test_the_example_of_a_device_runs_without_this_package(photos, tmp_path):
    """In an interpreter that cannot import JAX or cxda_jax. It adapts after the tenth and the twentieth photograph."""
    pytest.importorskip("ai_edge_litert")
    (photos / "broken.png").unlink()
    out = tmp_path / "out"
    command(
        "export", "--model=glyphs", "--format=litert", f"--out={out}", f"--check_images={photos}", f"--places={PLACES}"
    )
    example = Path(__file__).parent.parent / "docs" / "examples" / "phone.py"
    code = (
        "import sys, runpy\nfor name in ('jax', 'cxda_jax', 'tensorflow'): sys.modules[name] = None\n"
        f"sys.argv[1:] = [{str(out)!r}, {str(photos)!r}]\nrunpy.run_path({str(example)!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 24 and all(line.count("%") == 2 for line in lines)
    answers = [[text.split()[0] for text in line.split("  ")[1:]] for line in lines]
    model = cxda_jax.load("glyphs")
    paths = sorted(photos.glob("*.png"))
    squashed = [np.asarray(Image.open(path).convert("L").resize((28, 28)))[..., None] for path in paths]
    assert [before for before, _ in answers] == list(model.predict(squashed).names)
    adapted = model.adapt(squashed[10 - PLACES : 10])
    assert [after for _, after in answers[10:20]] == list(adapted.predict(squashed[10:20]).names)
