"""The examples that draw figures run, with fewer tasks for fit(), and show what their texts say."""

import runpy
import sys

import numpy as np
import pytest
from PIL import Image

from tests.lines import ROOT
from tests.logits import fewer_tasks  # noqa: F401

FOLDER = ROOT / "docs" / "examples"


@pytest.fixture(scope="module")
def draw(tmp_path_factory):
    """A function that runs an example and gives its names. All of them share one adapter."""
    folder = tmp_path_factory.mktemp("examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        import cameras

        patch.setattr(cameras, "KEPT", folder / "kept")

        def run(name):
            path = folder / f"{name}.png"
            patch.setattr(sys, "argv", [name, str(path)])
            names = runpy.run_path(str(FOLDER / f"{name}.py"))
            assert np.asarray(Image.open(path).convert("L")).std() > 10
            names["plt"].close("all")
            return names

        yield run


def test_new_cameras_gain_what_fit_says(draw):
    names = draw("plot_fit")
    gains = np.mean(names["gains"], axis=0)
    error = np.std(names["gains"], axis=0) / np.sqrt(len(names["gains"]))
    assert (gains > names["low"] - 2 * error).all() and gains.min() > 5


def test_the_surest_answers_are_right(draw):
    names = draw("plot_abstention")
    (_, plain), (_, adapted) = (np.concatenate(kept, axis=1) for kept in names["answers"].values())
    sure = names["confidence"] >= names["fitted"].threshold_for(0.1)
    assert sure.mean() > 0.5 and adapted[sure].mean() < 0.1 and adapted.mean() < plain.mean() - 0.1


def test_a_stream_adapts_and_forgets(draw):
    names = draw("plot_stream")
    classifier, device = names["right"]
    assert len(names["device"].images) == names["LAST"] and device.mean() > classifier.mean() + 0.1
    np.testing.assert_allclose(names["device"].images[:, :6], names["logits"][-100:], rtol=1e-5)


def test_attention_is_of_images_in_the_buffer(draw):
    names = draw("plot_attention")
    total = names["weights"].sum(1)  # the rest goes to the question itself
    assert (total > 0.9).all() and (total < 1).all()
    assert names["weights"].shape == (4, 50) and len(names["after"]) == 4
