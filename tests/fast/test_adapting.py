"""`cxda adapt` and `cxda demo`: what they write and leave out, when they fall back, and what a user gets wrong."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cxda_jax.device import adapting
from cxda_jax.device.model import Model
from cxda_jax.device.page import Answered
from cxda_jax.disk import manifest, models
from tests.nets import CARD, build_method

GAIN = {**dict.fromkeys(("score", "mean", "low", "high"), (0.0, -1.0, 0.5, 2.0)), "sizes": (0, 1, 5, 100), "tasks": 4}


def write_images(folder, count, seed):
    """Of mixed sizes and kinds."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    for i in range(count):
        pixels = rng.integers(0, 256, (*rng.integers(10, 60, 2), 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"image{i:03d}.{('png', 'jpg', 'webp', 'bmp', 'tif')[i % 5]}")
    return folder


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


def test_cells_that_a_spreadsheet_would_run_are_quoted():
    answer = Answered("=run().png", None, "-5", 0.5, "+", 0.25, 0.75, np.ones((1, 1)), "@x")
    assert adapting.line_of(answer, [Path("-1+1.png")], True) == [
        "'=run().png", "+", "-5", "0.5000", "+", "0.2500", "0.7500", "'-1+1.png", "", "", "", "", "'@x",
    ]  # fmt: skip


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


def test_a_folder_without_rights_is_named_and_the_others_are_read(folders, monkeypatch):
    walk, told, no = os.walk, [], PermissionError(13, "Permission denied", "b")
    monkeypatch.setattr(os, "walk", lambda top, onerror: [onerror(no)] and walk(top))
    assert len(adapting.listed(folders[0], told.append)) == 12 and told[0].startswith("b: Permission denied; ")


def test_what_a_terminal_obeys_is_written_as_its_escape():
    name, odd = "a\x1b[2J\u202e\r\nb.png", "\t=1+1"
    answer = Answered(name, None, odd, 0.5, "\x9b", 0.5, 0.0, np.ones((1, 1)), "é")
    line = adapting.line_of(answer, [Path("\x07.png")], True)
    assert all(cell.isprintable() for cell in line)
    assert line[0] == r"a\x1b[2J\u202e\r\nb.png" and line[1] == r"\x9b" and line[-1] == "é" and r"\x07.png" in line
