"""Evaluation in which each image of a split is a query once, and the forms of scores that a config may choose."""

import json

import jax
import numpy as np
import pytest
import scipy.special

from cxda_jax.data.episodes import counting
from cxda_jax.studies import testing
from cxda_jax.studies.finding import Evaluation
from cxda_jax.studies.identity import Record
from cxda_jax.studies.settings import count_tasks
from cxda_jax.training.evaluation import compile_task
from tests.fast.test_exhaustive import SPEC, experiment_on, uneven  # noqa: F401
from tests.nets import fill


def test_the_mean_is_over_all_images_and_the_worst_tenth_over_tasks(uneven, tmp_path, monkeypatch):
    """ERM answers an image alone, so all test images in one batch have the same answers."""
    sklearn = pytest.importorskip("sklearn.metrics")
    experiment = experiment_on(uneven._replace(info=uneven.info._replace(metric="accuracy")))
    method, count = experiment.method, count_tasks(experiment.config, uneven, "test")
    variables = fill(jax.eval_shape(method.init, jax.random.key(0), experiment.example))
    evaluator = compile_task(method, experiment.source)
    tasks = testing.score(experiment, evaluator, variables, "test", count)
    test = slice(*uneven.offsets[[6, 9]])
    everything = experiment.example.replace(pixels=uneven.images[test])
    by_row = np.zeros(uneven.offsets[-1])
    logits = np.asarray(jax.jit(method.predict)(variables, everything))
    by_row[test] = logits.argmax(-1) == uneven.labels[test]
    assert 0 < by_row[test].mean() < 1 and tasks.mean == pytest.approx(by_row[test].mean(), abs=1e-12)
    plan = experiment.task_plans("test")(range(count))
    each = [by_row[np.unique(rows)].mean() for rows in plan.query]
    np.testing.assert_allclose(tasks.scores, each, atol=1e-12)
    assert tasks.worst_decile == pytest.approx(min(each)) and count == 2 + 3 + 6
    counted = counting(plan.query)
    np.testing.assert_array_equal(tasks.labels[counted], uneven.labels[plan.query[counted]])
    assert ((tasks.labels >= 0) == counted).all() and counted.sum() == 58
    sure = scipy.special.softmax(logits, -1).max(-1)[plan.query[counted] - test.start]
    np.testing.assert_allclose(tasks.confidence[counted], sure, rtol=1e-4)

    monkeypatch.setattr(testing, "restore_best", lambda *_: (variables, {"step": 20}))
    experiment = experiment_on(uneven, f1="union")
    (tmp_path / "config.json").write_text(json.dumps(experiment.config))
    record = Record("tiny", uneven.sha256, "cpu", 2, "0")
    evaluation = Evaluation(tmp_path, tmp_path, "erm", experiment.config, record)
    result = testing.evaluate_run(evaluation, experiment, evaluator)
    stored, scores, sizes = result.stored(), [], []
    for predictions, labels in zip(stored["predictions"], stored["labels"], strict=True):
        kept = labels >= 0
        sizes.append(kept.sum())
        scores.append(sklearn.f1_score(labels[kept], predictions[kept], average="macro", zero_division=0))
    assert result.row["metric"] == "macro_f1_union" and result.row["num_tasks"] == len(sizes) == 11
    assert result.row["avg"] == pytest.approx(100 * np.average(scores, weights=sizes))
    assert result.row["w10"] == pytest.approx(100 * min(scores))
