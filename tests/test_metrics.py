"""Scores of tasks and their intervals; test_properties.py has those of a task, of the worst ones and over seeds."""

import numpy as np
import pytest

from cxda_jax import metrics
from cxda_jax.errors import UserError
from cxda_jax.evaluation import TaskTable
from cxda_jax.runs.testing import trust


def test_each_task_has_a_score_of_a_metric_that_there_is():
    predictions, labels = np.array([[1, 2, 3, 4], [0, 0, 0, 0]]), np.array([[1, 2, 0, 0], [1, 1, 1, 1]])
    np.testing.assert_array_equal(metrics.scores("accuracy", predictions, labels), [0.5, 0])
    unlike = metrics.scores("macro_f1", predictions, labels), metrics.scores("macro_f1_union", predictions, labels)
    np.testing.assert_allclose(unlike, [[(1 + 1 + 0) / 3, 0], [(1 + 1 + 0 + 0 + 0) / 5, 0]])
    with pytest.raises(UserError, match="metric='f1' is not one of accuracy, macro_f1"):
        metrics.scores("f1", predictions, labels)
    for metric, forms in {"macro_f1": ["macro_f1", "macro_f1_union"], "accuracy": ["accuracy"] * 2}.items():
        assert [metrics.metric_of(metric, f1) for f1 in ("labels", "union")] == forms


def test_queries_that_do_not_count_change_no_score_and_their_tasks_count_less():
    rng = np.random.default_rng(0)
    labels, predictions = rng.integers(0, 4, (2, 30, 12))
    sizes = rng.integers(1, 13, 30)
    cut = np.where(np.arange(12) < sizes[:, None], labels, -1)
    for name, score in metrics.METRICS.items():
        alone = [score(p[:n], y[:n]) for p, y, n in zip(predictions, labels, sizes, strict=True)]
        np.testing.assert_array_equal(metrics.scores(name, predictions, cut), alone)
    of_all = (metrics.scores("accuracy", predictions, cut) * metrics.shares(cut)).mean()
    assert of_all == pytest.approx((predictions == labels)[cut >= 0].mean(), abs=1e-12)
    np.testing.assert_array_equal(metrics.shares(labels), 1)


def test_a_result_says_how_far_the_surest_answers_are_right():
    """Of five queries that count, in the order of confidence: right, wrong, right, wrong, right."""
    predictions, labels = np.array([[1, 2, 3], [4, 5, 6]]), np.array([[1, 0, 3], [0, 5, -1]])
    confidence = np.array([[0.95, 0.85, 0.75], [0.65, 0.55, 0.99]], np.float32)
    found = trust(TaskTable(predictions, labels, np.zeros(2), confidence, 1.0))
    assert found["risk"] == pytest.approx({"1.0": 2 / 5, "0.8": 2 / 4, "0.5": 1 / 2})
    gaps = [0.05, 0.85, 0.25, 0.65, 0.45]  # each has a bin of its own
    assert found["calibration_error"] == pytest.approx(np.mean(gaps))


def test_an_interval_over_groups_has_the_variance_of_groups_and_of_their_tasks():
    rng = np.random.default_rng(0)
    values = rng.normal(0, 1, (12, 1)) + rng.normal(0, 2, (12, 25))
    groups = np.repeat(np.arange(12) * 7, 25)
    within, between = values.var(1).mean(), values.mean(1).var()
    half = 1.96 * np.sqrt((between + within / 25) / 12)
    (low, other_low), (high, _) = metrics.interval_over_groups(np.stack([values.ravel()] * 2), groups, 4000)
    np.testing.assert_allclose([low, high], values.mean() + np.array([-half, half]), atol=0.06 * half)
    assert low == other_low
    one = metrics.interval_over_groups(values[:1], np.zeros(25), 4000)[:, 0]  # the usual bootstrap over tasks
    np.testing.assert_allclose(one, metrics.bootstrap_interval(values[0]), atol=0.1)
