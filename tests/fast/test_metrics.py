"""Scores of tasks and their intervals, beside scikit-learn, SciPy and formulas."""

import math

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from cxda_jax.training import metrics


def test_macro_f1_has_the_form_of_a_config():
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
    found = metrics.trust(predictions, labels, confidence)
    assert found["risk"] == pytest.approx({"1.0": 2 / 5, "0.8": 2 / 4, "0.5": 1 / 2})
    gaps = [0.05, 0.85, 0.25, 0.65, 0.45]  # each has a bin of its own
    assert found["calibration_error"] == pytest.approx(np.mean(gaps))


def test_an_interval_over_groups_is_student_s_over_their_means():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(6), rng.integers(5, 9, 6))
    values = rng.normal(size=(2, len(groups))) + rng.normal(size=6)[groups]
    means = np.array([[row[groups == g].mean() for g in range(6)] for row in values])
    for found, of_row in zip(metrics.interval_over_groups(values, groups), means, strict=True):
        span = scipy.stats.ttest_1samp(of_row, 0).confidence_interval(0.95)
        np.testing.assert_allclose(found, [of_row.mean(), *span])
    one = metrics.interval_over_groups(values[:1], np.zeros(len(groups)))[0]  # of one group, over its tasks
    np.testing.assert_allclose(one[1:], scipy.stats.ttest_1samp(values[0], 0).confidence_interval(0.95))


@pytest.mark.parametrize(("groups", "truth"), [(3, 4.0), (6, 1.5), (20, 1.0)])
def test_what_is_told_because_it_is_sure_is_half_the_time_too_much(groups, truth):
    """Means that were told since their interval lies above 0 are too large on average; the estimates are not."""
    values = np.random.default_rng(0).normal(truth, 2, (1500, groups))
    spans = np.stack([metrics.interval_over_groups(v[None], np.arange(groups))[0] for v in values])
    told = spans[spans[:, 1] > 0][:300]
    error = 2 / np.sqrt(groups)  # known here; the estimate has to guess it
    found = np.array([metrics.after_selection(span, groups) for span in told])
    assert len(told) > 100 and (told[:, 0] > truth).mean() > 0.6
    assert (found > truth).mean() < 0.58 and found.mean() - truth < 0.1 * error and (found >= 0).all()
    assert metrics.after_selection((0.5, -0.1, 1.1), 5) == 0.5  # it was not selected
    assert metrics.after_selection((50.0, 49.0, 51.0), 20) == pytest.approx(50.0, abs=1e-6)


@pytest.mark.parametrize("groups", [2, 5, 8, 10, 20, 100])
def test_what_is_told_of_means_of_any_size_grows_with_them(groups):
    """Also for means of 20 errors and more, which few domains of almost equal gains have."""
    limit = metrics.student_limit(groups - 1)
    means = np.linspace(limit + 0.01, limit + 31, 100)
    found = np.array([metrics.after_selection((mean, mean - limit, mean + limit), groups) for mean in means])
    assert (found >= 0).all() and (found <= means).all() and (np.diff(found) > -1e-6).all()
    for mean, shift in [pair for pair in zip(means, found, strict=True) if pair[0] <= 30][5::30]:
        selected, above = scipy.stats.nct.sf([limit, mean], groups - 1, shift)
        assert above / selected == pytest.approx(0.5, abs=1e-6) if shift else above / selected >= 0.5


def test_a_threshold_keeps_to_its_risk_on_new_domains():
    """Of 200 draws of domains, whose errors differ, at most one in twenty passes the risk, give or take four."""
    rng = np.random.default_rng(1)

    def counted(domains, images):
        surety = rng.normal(1.5, 1.8, (domains, images))
        confidence = 1 / (1 + np.exp(-np.abs(surety)))
        right = rng.random(surety.shape) < 1 / (1 + np.exp(-np.abs(surety) - rng.normal(0, 0.5, (domains, 1))))
        return confidence, right

    confidence, right = counted(4000, 100)
    passed, used = 0, 0
    for _ in range(200):
        own, ok = counted(20, 100)
        thresholds = np.quantile(own, 1 - np.arange(1, 101) / 100)
        inside = own[:, :, None] >= thresholds
        level = metrics.surest_within(0.05, inside.sum(1), (inside & ~ok[:, :, None]).sum(1))
        if level:
            given = confidence >= thresholds[level - 1]
            passed, used = passed + ((given & ~right).sum() > 0.05 * given.sum()), used + 1
    assert used > 150 and passed <= 14, (used, passed)


def test_a_level_has_both_bounds_against_their_formulas():
    accepted = np.array([[20, 40, 80, 160], [10, 30, 60, 160], [30, 50, 90, 160]])
    wrong = np.array([[0, 0, 2, 20], [0, 1, 1, 30], [0, 0, 3, 40]])

    def holds(risk, level):
        images, errors = accepted[:, level].sum(), wrong[:, level].sum()
        upper = scipy.stats.binomtest(int(errors), int(images)).proportion_ci(0.9, "exact").high  # 95 % on one side
        rest = wrong[:, level] - errors / images * accepted[:, level]  # Cochran's variance of a ratio
        ratio = errors / images + scipy.stats.t.ppf(0.975, 2) * np.sqrt((rest**2).sum() / 2 * 3) / images
        return upper <= risk and ratio <= risk

    for risk in (0.04, 0.05, 0.06, 0.07, 0.1, 0.3, 0.5):
        held = [holds(risk, level) for level in range(4)]
        found = metrics.surest_within(risk, accepted, wrong)
        assert found == 0 or (held[found - 1] and (found == 4 or not held[found])), (risk, held, found)
    assert metrics.surest_within(0.5, accepted, wrong) == 4 and metrics.surest_within(0.001, accepted, wrong) == 0
    assert metrics.surest_within(1.0, accepted, wrong) == 4 and metrics.surest_within(0.0, accepted, wrong) == 0


SEEDS = st.integers(0, 2**32 - 1)
ANSWERS = st.tuples(st.integers(1, 6), st.integers(1, 40)).flatmap(
    lambda drawn: hnp.arrays(np.int32, (2, drawn[1]), elements=st.integers(0, drawn[0]))
)


@settings(max_examples=60)
@given(ANSWERS, SEEDS)
def test_scores_equal_scikit_learns_and_ignore_the_order_of_queries(answers, seed):
    sklearn = pytest.importorskip("sklearn.metrics")
    predictions, labels = answers
    theirs = {
        "accuracy": sklearn.accuracy_score(labels, predictions),
        "macro_f1": sklearn.f1_score(labels, predictions, labels=np.unique(labels), average="macro", zero_division=0),
        "macro_f1_union": sklearn.f1_score(labels, predictions, average="macro", zero_division=0),
    }
    order = np.random.default_rng(seed).permutation(len(labels))
    for name, score in metrics.METRICS.items():
        found = score(predictions, labels)
        assert found == pytest.approx(theirs[name], abs=1e-12) and 0 <= found <= 1
        assert score(predictions[order], labels[order]) == pytest.approx(found, abs=1e-12)
        np.testing.assert_array_equal(metrics.scores(name, predictions[None], labels[None]), [found])


@given(hnp.arrays(float, st.integers(1, 60), elements=st.floats(0, 1)))
def test_the_worst_decile_is_the_mean_of_the_lowest_tenth(scores):
    count = max(1, math.floor(len(scores) / 10))
    assert metrics.worst_decile(scores) == pytest.approx(np.partition(scores, count - 1)[:count].mean(), abs=1e-12)


@given(hnp.arrays(float, st.integers(1, 30), elements=st.floats(-1e6, 1e6)))
def test_mean_and_standard_error_equal_scipys(values):
    scipy = pytest.importorskip("scipy.stats")
    mean, error = metrics.mean_sem(values)
    assert mean == pytest.approx(math.fsum(values) / len(values), rel=1e-9, abs=1e-6)
    assert error == pytest.approx(scipy.sem(values) if len(values) > 1 else math.nan, rel=1e-9, abs=1e-6, nan_ok=True)
