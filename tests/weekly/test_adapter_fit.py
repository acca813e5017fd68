"""fit() on what a classifier says: what it gains and what it says of that, and what is wrong with its arguments."""

import numpy as np
import pytest

import cxda_jax
from docs.study import promises
from tests.fast.test_adapter_fit import fewer_tasks  # noqa: F401


@pytest.mark.filterwarnings("ignore")  # of checks that scikit-learn skips
def test_the_estimator_is_one_of_scikit_learn():
    from sklearn.utils.estimator_checks import check_estimator

    check_estimator(cxda_jax.CXDAClassifier())  # none is expected to fail


def test_what_fit_promises_is_what_new_domains_get():
    for row in promises.intervals(1000):
        assert all(row[f"coverage at {gain:g}"] > 0.93 for gain in promises.GAINS), row
        assert row["trusted at 0"] < 0.04 and row["optimism"] < 0.5, row
    for row in promises.thresholds(100):
        assert row["passed"] <= 0.15, row
    assert np.mean([row["passed"] for row in promises.thresholds(100)]) < 0.06
    found = [promises.fits("skewed", seed, steps=200) for seed in (0, 1)]
    assert all(row["trusted"] and row["expected"] < row["found"][0] + 2 for row in found), found
