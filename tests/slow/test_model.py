"""A trained model by itself: its files, its card, and answers that are those of the evaluation."""

import json
import shutil

import jax
import numpy as np
import pytest

import cxda_jax
from cxda_jax.disk import models
from cxda_jax.studies.folders import read_result
from cxda_jax.training.experiment import open_data
from tests.commands import command


@pytest.fixture(scope="module")
def runs(smoke, erm_run):
    return smoke[0]


def run_of(runs, name):
    """A run whose network a method may have, and the folder of its test."""
    data = f"--data_dir={runs}/data"
    if name == "cxda":
        return runs / "run", runs / "run"
    if name in ("t3a", "feature_shift", "cotta"):
        command("evaluate", f"--runs={runs}/erm", f"--methods={name}", "--num_tasks=10", data)
        return runs / "erm", runs / "erm" / name
    folder, short = runs / f"of_{name}", ("--config.train.steps=4", "--config.evaluation.every_steps=4")
    command("train", f"--config=glyphs:{name},smoke", f"--workdir={folder}", data, *short)
    return folder, folder


@pytest.mark.parametrize("name", [
    pytest.param("cxda", marks=pytest.mark.slow), pytest.param("feature_shift", marks=pytest.mark.slow),
    *(pytest.param(n, marks=pytest.mark.weekly) for n in ("t3a", "cotta", "cxda_any", "cxda_shares", "cxda_supervised", "icrm")),
])  # fmt: skip
def test_a_loaded_model_answers_as_the_evaluation_does(runs, name):
    run, folder = run_of(runs, name)
    result, model = read_result(run, folder), cxda_jax.load(run, name)
    stored, store = result.stored(), open_data(result.config, runs / "data")
    domains, classes = store.row_domains(), list(model.card.class_names)
    key = jax.random.fold_in(jax.random.key(result.config["evaluation"]["seed"]), 2**32 - 1)
    assert len(stored["support"]) > 3
    for task, (support, query) in enumerate(zip(stored["support"], stored["query"], strict=True)):
        of = (domains[support], domains[query]) if model.method.uses_domains else (None, None)
        adapted = model.adapt(store.images[support], of[0], jax.random.fold_in(key, task))
        answers = adapted.predict(store.images[query], of[1])
        np.testing.assert_allclose(answers.probabilities.sum(1), 1, atol=1e-9)
        np.testing.assert_array_equal(answers.confidences, answers.probabilities.max(1))
        np.testing.assert_array_equal([classes.index(n) for n in answers.names], stored["predictions"][task])


RNG = np.random.default_rng(0)


def test_a_model_alone_in_a_folder_is_enough(runs, tmp_path):
    model = cxda_jax.load(shutil.copytree(runs / "run" / "model", tmp_path / "it"))
    assert repr(model) == "<Model cxda of glyphs: 62 classes, images 28x28x1, not adapted>" and "load" in dir(cxda_jax)
    assert model.card.class_names[:3] == ("0", "1", "2") and model.card.shape == (28, 28, 1)
    assert (model.card.fit, model.card.background) == ("pad", (255, 255, 255))
    images = [RNG.integers(0, 256, (28, 28, 1), np.uint8) for _ in range(5)]
    before, after = model.predict(images), model.adapt(images[:3]).predict(images)
    assert np.abs(before.probabilities - after.probabilities).max() > 1e-4
    for same in (model, model.adapt([])):
        np.testing.assert_array_equal(same.predict(images).probabilities, before.probabilities)
    assert model.predict([]).names == () and model.predict([]).probabilities.shape == (0, 62)
    many = model.predict(images * 30)  # more than one program takes at once
    np.testing.assert_allclose(many.probabilities, np.tile(before.probabilities, (30, 1)), atol=1e-6)
    one = [model.predict([image]).probabilities[0] for image in images]
    np.testing.assert_allclose(one, before.probabilities, atol=1e-6)


def test_the_card_says_what_was_trained_and_what_adapting_brought(runs):
    """The gain is measured by one program with places. It equals what --context measures by a program of its own."""
    result, card = read_result(runs / "run", runs / "run"), models.read_card(runs / "run" / "model")
    stored, gain, test = result.stored(), card.gain, card.test
    assert (card.method, card.seed, card.data_hash, card.step) == ("cxda", 0, result.data_hash, result.best_step)
    assert gain.sizes == (0, 1, 2, 5, 10, 20, 50, 100) and gain.tasks == 4
    assert gain.mean[0] == gain.low[0] == gain.high[0] == 0
    assert all(low <= mean <= high for low, mean, high in zip(gain.low, gain.mean, gain.high, strict=True))
    np.testing.assert_allclose(np.subtract(gain.score, gain.score[0]), gain.mean, atol=0.011)
    options = "--validation", "--context=10", "--num_tasks=4", f"--data_dir={runs}/data"
    command("evaluate", f"--runs={runs}/run", *options)
    measured = json.loads((runs / "run" / "cxda,context=10,validation" / "result.json").read_text())
    assert abs(measured["avg"] - gain.score[gain.sizes.index(10)]) < 0.01
    scores = 100 * (stored["predictions"] == stored["labels"]).mean(1)
    assert test["num_tasks"] == len(scores) == result.num_tasks
    assert abs(test["avg"] - scores.mean()) < 1e-6 and test["w10"] == result.w10
    assert test["w10_low"] <= test["w10_high"]
    half = 1.96 * scores.std() / np.sqrt(len(scores))  # the normal approximation
    assert abs(test["avg_high"] - test["avg_low"] - 2 * half) < half
