import numpy as np
import pytest

from cxda_jax import metrics
from cxda_jax.types import UserError


def test_macro_f1_equals_scikit_learn_over_the_classes_present():
    sklearn = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    for _ in range(1000):
        labels, predictions = rng.integers(0, rng.integers(1, 9), 20), rng.integers(0, 9, 20)
        theirs = sklearn.f1_score(labels, predictions, labels=np.unique(labels), average="macro", zero_division=0)
        assert metrics.macro_f1(predictions, labels) == pytest.approx(theirs, abs=1e-12)


def test_accuracy_and_scores():
    predictions, labels = np.array([[1, 2, 3, 4], [0, 0, 0, 0]]), np.array([[1, 2, 0, 0], [1, 1, 1, 1]])
    np.testing.assert_array_equal(metrics.scores("accuracy", predictions, labels), [0.5, 0])


@pytest.mark.parametrize("tasks, kept", [(1, 1), (9, 1), (10, 1), (19, 1), (20, 2), (420, 42)])
def test_worst_decile_takes_a_tenth_and_at_least_one(tasks, kept):
    scores = np.random.default_rng(0).permutation(tasks) / tasks
    assert metrics.worst_decile(scores) == pytest.approx(np.mean(np.arange(kept)) / tasks)


def test_mean_sem():
    mean, sem = metrics.mean_sem([1.0, 2.0, 4.0])
    assert mean == pytest.approx(7 / 3) and sem == pytest.approx(np.std([1, 2, 4], ddof=1) / np.sqrt(3))
    assert np.isnan(metrics.mean_sem([3.0])[1])


def test_paired_difference_matches_scipy_and_the_normal_interval():
    scipy = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    a = rng.normal(0.6, 0.2, (3, 500))
    b = a - 0.02 + rng.normal(0, 0.1, (3, 500))
    mean, low, high = metrics.paired_difference(a, b)
    d = (a - b).mean(0)
    theirs = scipy.bootstrap((d,), np.mean, method="percentile", n_resamples=5000, rng=0).confidence_interval
    assert mean == pytest.approx(d.mean())
    # Two bootstraps differ by their own sampling: a tenth of the interval's half width.
    slack = 0.1 * (high - low) / 2
    assert abs(low - theirs.low) < slack and abs(high - theirs.high) < slack
    assert abs((high - low) / 2 - 1.96 * d.std() / np.sqrt(500)) < slack
    assert metrics.paired_difference(a, a) == (0, 0, 0)


def test_an_unknown_metric_is_named():
    with pytest.raises(UserError, match="metric='f1' is not one of accuracy, macro_f1"):
        metrics.scores("f1", np.zeros((1, 2)), np.zeros((1, 2)))
