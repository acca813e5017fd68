"""A trained model by itself: its files, its card, and answers that are those of the evaluation."""

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


def test_adapting_helps_from_where_it_gains_at_every_larger_size():
    for means, since in ((0, 1, 2), 1), ((0, -1, 2), 2), ((0, 1, 0), None):
        means = tuple(map(float, means))
        assert models.Gain(tuple(range(len(means))), means, (9.0,) * 3, means, (9.0,) * 3, 5).helps_from() == since
