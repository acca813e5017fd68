"""Camera traps by commands: features, fit and adapt on files of predictions, beside the device of the adapter."""

import copy
import csv
import functools
import json
import re
import shutil

import numpy as np
import pytest

import cxda_jax
from cxda_jax.adapter import fit as fitting
from cxda_jax.adapter.predictions import read_predictions
from tests import traps
from tests.commands import command
from tests.lines import ROOT, contents
from tests.logits import fewer_tasks  # noqa: F401
from tests.slow.test_readme import blocks
from tests.traps import OTHER, write_json, write_table

EACH = 60
NEW = traps.survey(4, EACH, 5, "new")
PAGE = (ROOT / "docs" / "camera_traps.md").read_text()
UNCHANGED = [
    {"filepath": "survey/new00/blank.jpg", "detections": [], "model_version": "4.0.3a"},
    {"filepath": "survey/new00/broken.jpg", "failures": ["CLASSIFIER", "DETECTOR"], "model_version": "4.0.3a"},
    {"filepath": "survey/lonely/0.jpg", "model_version": "4.0.3a", "detections": [traps.box(0.5) | {"raw_classifications": {
        "classes": [OTHER, *[*traps.SPECIES.values()][:4]], "scores": [0.4, 0.3, 0.2, 0.05, 0.01]}}]},
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the commands of the page make of twelve cameras, and predictions of four new ones."""
    folder = tmp_path_factory.mktemp("traps")
    traps.write_survey(folder, 12, 4, EACH)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(fitting, "fit", functools.partial(fitting.fit, steps=60))
        for line in re.findall(r"^cxda (.+)$", blocks(PAGE, "")[0], re.M):
            command(*line.split())
    content = read(folder / "new.json")
    content["predictions"] += copy.deepcopy(UNCHANGED)
    write_json(folder / "new.json", content)
    return folder


def adapt(folder, out, *flags, model="adapter", predictions="new.json", code=0):
    asked = f"--model={folder}/{model}", f"--predictions={folder}/{predictions}", f"--out={out}"
    return command("adapt", *asked, *flags, code=code)


def read(path):
    return json.loads(path.read_text())


def written(out):
    return {name: content for name, content in contents(out).items() if name != "lock"}


def table_in(out):
    with open(out / "predictions.csv", newline="") as file:
        return [*csv.DictReader(file)]


@pytest.mark.parametrize("capacity", [EACH, 30])
def test_each_camera_is_a_device_of_its_own(capacity, folder, tmp_path):
    said = adapt(folder, tmp_path, f"--labels={folder}/new.csv", f"--capacity={capacity}")
    adapter, found = cxda_jax.load_adapter(folder / "adapter"), read_predictions(folder / "new.json")
    assert adapter.helps and adapter.keys == "logits"
    names = adapter.origin["classes"]
    logits, _ = found.logits({name: i for i, name in enumerate(names)})
    old, new = read(folder / "new.json"), read(tmp_path / "predictions.json")
    for camera in range(4):
        own = slice(camera * EACH, (camera + 1) * EACH)
        spread = np.linspace(0, EACH - 1, capacity).astype(int)
        proba = adapter.adapt(logits[own][spread]).predict_proba(logits[own])
        answers = [p["detections"][0]["raw_classifications"]["classes"][0] for p in new["predictions"][own]]
        known = [text.rpartition(";")[2] for text in answers]
        likeliest = [names[i] for i in proba.argmax(1)]
        lynx = sum(name == "lynx" for name in known)  # keep their scores
        assert lynx < 5 and sum(a == b for a, b in zip(known, likeliest, strict=True)) == EACH - lynx
    for before, after in zip(old["predictions"], new["predictions"], strict=True):
        for detection in (*before.get("detections", ()), *after.get("detections", ())):
            detection.pop("raw_classifications", None)
        assert before == after
    assert new["info"] == {"adapted_by": f"cxda_jax {cxda_jax.__version__}", **old["info"]}
    assert read(tmp_path / "predictions.json")["predictions"][-3:] == UNCHANGED
    rows = table_in(tmp_path)
    answers = {(row["before"] == "lynx", row["after"] == "lynx") for row in rows}
    assert answers == {(False, False), (True, True)}  # nobody labelled a lynx, so such an answer stays
    assert re.search(r"^class +images +right before +after\n", said, re.M)
    right = [np.mean([row[part] == row["label"] for row in rows[:-1]]) for part in ("before", "after")]
    assert right[1] > right[0] + 0.02 and rows[-1]["after"] == rows[-1]["before"] == "lynx"
    assert f"before {100 * right[0]:.1f} %, after {100 * right[1]:.1f} %" in said and "so unchanged: 2" in said
    assert "Cameras that adapt: 4 of 5; 1 keep their answers: fewer than" in said


def test_what_was_adapted_is_not_adapted_again_and_an_input_is_not_replaced(folder, tmp_path):
    adapt(folder, tmp_path / "out")
    first = written(tmp_path / "out")
    assert "out/predictions.csv: replaces" in adapt(folder, tmp_path / "out") and written(tmp_path / "out") == first
    shutil.copy(tmp_path / "out" / "predictions.json", folder / "again.json")
    assert "info.adapted_by=" in adapt(folder, tmp_path / "b", predictions="again.json", code=2)
    (tmp_path / "in").mkdir()
    shutil.copy(folder / "new.json", tmp_path / "in" / "predictions.json")
    before = contents(tmp_path / "in")
    assert "not replaced" in adapt(folder, tmp_path / "in", code=2)
    assert contents(tmp_path / "in") == before


def test_cameras_of_a_table(folder, tmp_path):
    write_table(
        tmp_path / "one.csv", "location", [p["filepath"] for p in read(folder / "new.json")["predictions"]], ["x"] * 243
    )
    assert "Cameras that adapt: 1 of 1" in adapt(folder, tmp_path / "one", f"--locations={tmp_path}/one.csv")
    adapt(folder, tmp_path / "all")
    changed = {}
    for name in ("all", "one"):
        changed[name] = {row["file"] for row in table_in(tmp_path / name) if row["before"] != row["after"]}
    assert changed["all"] != changed["one"]


def test_an_adapter_that_is_not_trusted_changes_nothing_unless_it_is_asked_to(folder, tmp_path):
    adapter = cxda_jax.load_adapter(folder / "adapter")
    overall = {**adapter.report["overall"], **dict.fromkeys(("5", "20", "100"), [0.5, -0.5, 1.5])}
    adapter._replace(report={**adapter.report, "overall": overall}).save(folder / "unsure")
    assert "5 keep their answers: no sure gain" in adapt(folder, tmp_path / "kept", model="unsure")
    kept = read(tmp_path / "kept" / "predictions.json")
    assert kept["predictions"] == read(folder / "new.json")["predictions"]
    assert "Cameras that adapt: 0 of 5" not in adapt(folder, tmp_path / "always", "--always", model="unsure")
    assert read(tmp_path / "always" / "predictions.json") != kept


def test_predictions_of_another_kind_than_fit_had_are_named(folder, tmp_path):
    adapter = cxda_jax.load_adapter(folder / "adapter")
    for name, content, said in (
        ("md.json", traps.megadetector(NEW[0], NEW[2]), "classifier='made up'"),
        ("top2.json", traps.speciesnet(NEW[0], NEW[2], most=2), "listed=2"),
        ("targets.json", traps.speciesnet(NEW[0], NEW[2], targets=True), "read='target_logits'"),
        ("version.json", traps.older_speciesnet(NEW[0], NEW[2]), "classifier='4.0.1a'"),
    ):  # fmt: skip
        write_json(folder / name, content)
        assert said in adapt(folder, tmp_path / "out", predictions=name, code=2)
    adapter._replace(origin={**adapter.origin, "classes": [f"class {i}" for i in range(5)]}).save(folder / "others")
    assert "class 0, class 1" in adapt(folder, tmp_path / "out", model="others", code=2)
    adapter._replace(origin={}).save(folder / "arrays")
    assert "was not fitted to predictions" in adapt(folder, tmp_path / "out", model="arrays", code=2)
    write_table(tmp_path / "labels.csv", "label", NEW[0], ["Deer"] * len(NEW[0]))
    assert "label='Deer'" in adapt(folder, tmp_path / "out", f"--labels={tmp_path}/labels.csv", code=2)
    assert not (tmp_path / "out").exists()


def test_the_other_commands_take_features_without_a_style(folder):
    assert "Dirichlet" in command("diagnose", f"--features={folder}/features.npz")
    asked = f"--adapter={folder}/adapter", f"--features={folder}/features.npz"
    assert "calibration error" in command("evaluate", *asked)
