"""What is said where a package is not installed, and the extras of this one, which bring it."""

import re
import sys
import tomllib

import cxda_jax
from cxda_jax.adapter import sklearn
from cxda_jax.data.readers import cifar_c
from cxda_jax.data.sources import tfdata_source
from cxda_jax.machine import doctor
from cxda_jax.machine.progress import MetricsFile
from cxda_jax.nets.pretrained import read_weights
from tests.commands import command
from tests.lines import ROOT, cases, one_line, refused

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
EXTRA = re.compile(r"pip install (?:-q )?(?:-e )?'(?:cxda_jax|\.)\[([\w,]+)\]'")
FEATURES = "features", "--encoder=model.onnx", "--images=x", "--out=x.npz"
EXPORT = "export", "--out=x", "--model=glyphs"


@cases("arguments, field, missing, extra", [
    ("features", FEATURES, FEATURES[1], "onnx", "onnx"),
    ("features that run", FEATURES, FEATURES[1], "onnxruntime", "onnx"),
    ("export", (*EXPORT, "--format=onnx"), "--format=onnx", "jax2onnx", "export"),
    ("export to LiteRT", (*EXPORT, "--format=litert"), "--format=litert", "ai_edge_litert", "export"),
    ("export in 8 bits", (*EXPORT, "--format=litert_int8"), "--format=litert_int8", "tensorflow", "export"),
])  # fmt: skip
def test_a_command_names_the_extra_that_brings_what_is_missing(arguments, field, missing, extra, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)
    error = command(*arguments, code=2)
    assert error.count("\n") == 1 and EXTRA.findall(line := one_line(error)) == [extra], error
    assert line.startswith(f"error: {field}: {missing} is not installed")


@cases("call, field, missing, extra", [
    ("scikit-learn", lambda _: cxda_jax.CXDAClassifier, "CXDAClassifier", "sklearn.base", "sklearn"),
    ("weights", lambda tmp: read_weights(tmp / "a.pth"), "net.weights={tmp}/a.pth", "torch", "torch"),
    ("tfdata", lambda _: tfdata_source(None), "source='tfdata'", "tensorflow", "data"),
    ("tfds", lambda tmp: cifar_c._tfds_builder("cifar10", tmp), "--tfds=True", "tensorflow_datasets", "data"),
    ("tensorboard", lambda tmp: MetricsFile(tmp / "m.jsonl", 0, True), "tensorboard=True", "tensorflow", "data"),
])  # fmt: skip
def test_so_does_python(call, field, missing, extra, tmp_path, monkeypatch):
    (tmp_path / "a.pth").touch()
    monkeypatch.delitem(vars(sklearn), "CXDAClassifier", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with refused(rf"^{re.escape(field)}: {missing} is not installed; .*cxda_jax\[{extra}\]", tmp_path):
        call(tmp_path)


def test_each_extra_that_is_named_is_there_and_brings_what_it_is_named_for():
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("launch/*.py"), *ROOT.glob("cxda_jax/**/*.py")]
    named = {extra for file in files for both in EXTRA.findall(file.read_text()) for extra in both.split(",")}
    assert named <= {*EXTRAS} and {"onnx", "export", "sklearn", "dev"} <= named
    for module, (_, fix) in doctor.OPTIONAL.items():
        project = {"sklearn": "scikit-learn", "tensorflow": "tensorflow-cpu"}.get(module, module.replace("_", "-"))
        (extra,) = EXTRA.findall(fix)
        assert project in {re.split(r"[<>=]", asked)[0] for asked in brought(extra)}


def brought(extra):
    for asked in EXTRAS[extra]:
        for own in re.findall(r"^cxda_jax\[([\w,]+)\]", asked):
            for each in own.split(","):
                yield from brought(each)
        yield asked
