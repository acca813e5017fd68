"""What evaluations left, read back; what is broken is named and the rest is read."""

import hashlib

import numpy as np

from cxda_jax.studies.folders import read_results
from tests.results import edit, make_result, write_result


def write(folder, seed=0, run=None):
    """A result in a folder; gives the scores of its tasks."""
    labels, predictions = np.random.default_rng(seed).integers(0, 3, (2, 30, 5))
    plans = dict.fromkeys(("support", "query"), np.zeros((30, 5), np.int32))
    write_result(make_result(seed=seed), folder, labels, predictions, **plans, run=run)
    return (labels == predictions).mean(1)


def test_predictions_of_another_evaluation_are_not_taken_for_its_own(tmp_path):
    write(tmp_path)
    path = tmp_path / "predictions.npz"
    edit(tmp_path / "result.json", predictions_sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    assert not read_results([tmp_path])[1]
    with np.load(path) as arrays:
        np.savez(path, **{**arrays, "support": arrays["support"] + 1})  # the same answers to other images
    results, (fault,) = read_results([tmp_path])
    assert not results and "predictions.npz: differs from the hash in result.json); evaluate again" in fault
