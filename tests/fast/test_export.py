"""Exported programs: they answer as the model does, in every format, and what does not is not written."""

import itertools

import jax
import numpy as np
import pytest

from cxda_jax.config.registry import METHODS
from cxda_jax.errors import UserError
from cxda_jax.export import exporting, formats
from cxda_jax.export.exporting import Allowed, Task, agreement, compare
from cxda_jax.export.formats import FORMATS
from cxda_jax.export.pair import pair_of
from tests.nets import random_model

PLACES = 6
RANDOM = 1e-3  # differences of random networks, which may blow up the last bits; trained ones have 1e-6
REFUSED = ("cxda_supervised", "ft_em", "ft_im", "sf_ocda", "cotta")
# The converter does not know an operation of theirs.
UNKNOWN = {"litert-lame", "litert-sla", "litert-stata", "onnx-lame", "onnx-stata"}
EXPORTED = [name for name in METHODS if name not in REFUSED]
OFTEN = {"jax-erm", "jax-cml", "jax-t3a", "onnx-bn"}  # in the gate
CASES = [
    pytest.param(kind, method, marks=pytest.mark.slow if f"{kind}-{method}" in OFTEN else pytest.mark.weekly)
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
        assert (tmp_path / "encode.onnx").stat().st_size < weights + 100_000


def test_programs_agree_where_logits_and_answers_do():
    """A class counts as the model's where its own two likeliest are as near as the noise."""
    ours = [np.float32([[4, 1, 0], [0, 2, 1.99]])]
    assert agreement([ours[0] * 1.01], ours, Allowed(0.1)) == {"logits": pytest.approx(0.01), "same_classes": 1}
    swapped = [ours[0][:, [0, 2, 1]]]
    assert agreement(swapped, ours, Allowed(0.5, tie=0.01))["same_classes"] == 1
    with pytest.raises(UserError, match="50.0 % of the classes are equal .*; nothing is written$"):
        agreement(swapped, ours, Allowed(0.5))
    with pytest.raises(UserError, match=r"differ by 1.0e-02 .*allowed 1.0e-03.*--tolerance=2e-02"):
        agreement([ours[0] * 1.01], ours, Allowed(1e-3))
    with pytest.raises(UserError, match="differ by nan"):
        agreement([ours[0] * np.nan], ours, Allowed(0.5))
