"""`cxda adapt` and `cxda demo`: what they write and leave out, when they fall back, and what a user gets wrong."""

import csv
import json
import os
import re
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import cxda_jax
from cxda_jax.device import adapting, demo
from cxda_jax.device.model import Model
from cxda_jax.device.page import Answered
from cxda_jax.disk import manifest, models
from tests.commands import command
from tests.nets import CARD, build_method
from tests.raw_fixtures import write_images

GAIN = {**dict.fromkeys(("score", "mean", "low", "high"), (0.0, -1.0, 0.5, 2.0)), "sizes": (0, 1, 5, 100), "tasks": 4}


@pytest.fixture(scope="module")
def model(smoke, tmp_path_factory):
    """A model whose card says that adapting helps from 5 images on."""
    folder = shutil.copytree(smoke[0] / "run" / "model", tmp_path_factory.mktemp("model") / "model")
    card = json.loads((folder / models.CARD).read_text()) | {"gain": GAIN}
    (folder / models.CARD).write_text(json.dumps(card))
    manifest.write(folder, [path.name for path in folder.iterdir() if path.name != manifest.NAME])
    return folder


@pytest.fixture
def folders(tmp_path):
    return write_images(tmp_path / "buffer", 12, 1), write_images(tmp_path / "images", 70, 2)


def test_images_unlike_those_of_the_training_are_told():
    light, dark = (np.full((9, 28, 28, 1), value, np.uint8) for value in (200, 0))
    looks = models.Looks(round(200 / 255, 4), 0.02, 0.0, 0.02)
    assert models.Looks.of(light) == looks
    model = Model(CARD._replace(looks=looks), build_method("cxda"), None, None)
    assert model.unlike(np.concatenate([light, dark[:8]])) == ""
    assert model.unlike(dark).startswith("100 % of the images are brighter, darker, flatter")


def test_a_gain_is_expected_from_the_nearest_smaller_size():
    def expected(count, gain=GAIN, name="cxda"):
        card = CARD._replace(method="cxda", gain=gain and models.Gain(**gain))
        return adapting.expected(Model(card, build_method(name), None, None), count)

    for count, helps, start in ((0, False, 0), (4, False, 1), (5, True, 5), (700, True, 100)):
        found, said = expected(count)
        assert found is helps and said.startswith(f"With {start} images")
    assert not expected(100, GAIN | {"low": (0.0, 2.0, 0.5, -0.1)})[0], "no sure gain at the largest size"
    assert expected(0, gain=None)[0] and "was not measured" in expected(0, gain=None)[1]
    assert not expected(9, name="erm")[0]


def test_cells_that_a_spreadsheet_would_run_or_a_terminal_obey_stay_text():
    answer = Answered("=run().png", None, "-5", 0.5, "+", 0.25, 0.75, np.ones((1, 1)), "@x")
    assert adapting.line_of(answer, [Path("-1+1.png")], True) == [
        "'=run().png", "+", "-5", "0.5000", "+", "0.2500", "0.7500", "'-1+1.png", "", "", "", "", "'@x",
    ]  # fmt: skip
    odd = answer._replace(file="a\x1b[2J\u202e\r\nb.png", after="\x9b")
    assert adapting.line_of(odd, [Path("\x07.png")], True)[:2] == [r"a\x1b[2J\u202e\r\nb.png", r"\x9b"]


def read(out):
    with open(out / "predictions.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def adapt(model, buffer, images, out, *flags, code=0):
    where = f"--model={model}", f"--buffer={buffer}", f"--images={images}", f"--out={out}"
    return command("adapt", *where, *flags, code=code)


def test_the_csv_says_what_the_model_says_and_what_cannot_be_read_is_left_out(model, folders, tmp_path):
    buffer, images = folders
    (images / "folder").mkdir()
    shutil.copy(images / "image000.png", images / "folder" / "inner.png")
    files, held = [images / "folder" / "inner.png", *sorted(images.glob("image*"))], sorted(buffer.iterdir())
    (images / "broken.jpg").write_bytes((images / "image001.jpg").read_bytes()[:200])
    (images / "notes.txt").write_text("no image")
    said = adapt(model, buffer, images, tmp_path / "out")
    rows, loaded = read(tmp_path / "out"), cxda_jax.load(model)
    assert [row["file"] for row in rows] == [str(path.relative_to(images)) for path in files] and len(rows) == 71
    before, adapted = loaded.predict(files), loaded.adapt(held)
    after, weights = adapted.predict(files), adapted.attention(files).mean(1)
    moved = 0.5 * np.abs(before.probabilities - after.probabilities).sum(1)
    for i, row in enumerate(rows):
        assert (row["before"], row["after"], row["answer"]) == (before.names[i], after.names[i], after.names[i])
        numbers = {"before_confidence": before.confidences, "after_confidence": after.confidences, "moved": moved}
        assert all(abs(float(row[name]) - values[i]) < 1e-4 for name, values in numbers.items())
        assert row["nearest_1"] == held[weights[i].argmax()].name
    assert "With 5 images, adapting brought +0.5 points" in said and "so the adapted answer counts" in said
    assert re.search(r"left out: .*broken.jpg: not readable as an image", said)
    page = (tmp_path / "out" / "adapted.html").read_text()
    assert all(path.name in page for path in (*files, *held)) and "broken.jpg" in page


def test_it_falls_back_below_the_size_where_adapting_helped_and_labels_give_scores(model, folders, tmp_path):
    """Of a large buffer the newest images count: here three."""
    (buffer, images), labels = folders, tmp_path / "labels.csv"
    for i, path in enumerate(sorted(buffer.iterdir())):
        os.utime(path, (1000 + (i * 5) % 12, 1000 + (i * 5) % 12))
    newest = {path.name for path in sorted(buffer.iterdir(), key=lambda p: p.stat().st_mtime)[-3:]}
    names = cxda_jax.load(model).predict(sorted(images.iterdir())[:20]).names  # right before adapting
    known = zip(sorted(images.iterdir()), names, strict=False)
    labels.write_text("file,label\n" + "".join(f"{path.name},{name}\n" for path, name in known))
    given = f"--labels={labels}", "--capacity=3"
    said, rows = adapt(model, buffer, images, tmp_path / "out", *given), read(tmp_path / "out")
    assert "It surely helps from 5 images on, here are 3, so the answer without it counts" in said
    assert all(row["answer"] == row["before"] for row in rows) and "the newest 3 of 12 images count" in said
    right = 100 * np.mean([row["before"] == row["after"] for row in rows[:20]])
    assert f"Right of 20 with labels: before 100.0 %, after {right:.1f} %" in said
    assert sum(row["label"] != "" for row in rows) == 20
    assert {row[f"nearest_{i}"] for row in rows for i in range(1, 6)} - {""} == newest
    said = adapt(model, buffer, images, tmp_path / "always", "--always", "--capacity=3")
    assert "here are 3, but --always makes the adapted answer count." in said and "without it counts" not in said
    always = read(tmp_path / "always")
    assert [row["answer"] for row in always] == [row["after"] for row in always] == [row["after"] for row in rows]


def test_the_demo_gains_and_shows_a_page(tmp_path):
    with mock.patch.object(demo, "adapt_folder"):
        command("demo", f"--out={tmp_path}/demo", "--seed=3")
    said, rows = command("demo", f"--out={tmp_path}/demo"), read(tmp_path / "demo")
    assert "400 images of an earlier demonstration are deleted" in said
    assert len([*(tmp_path / "demo" / "buffer").iterdir()]) == 100
    assert "Right of 300 with labels: before" in said and "left out" not in said
    assert len(rows) == 300 and all(row["label"] for row in rows) and (tmp_path / "demo" / "adapted.html").exists()
    before, after = (sum(row[when] == row["label"] for row in rows) for when in ("before", "after"))
    assert after > before + 3
    kinds = [(row["before"] == row["label"], row["after"] == row["label"]) for row in rows]
    assert f"{kinds.count((False, True))} corrected and {kinds.count((True, False))} spoiled" in said
