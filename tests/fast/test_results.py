"""What evaluations left, read back; what is broken is named and the rest is read."""

import hashlib

import numpy as np
from absl import flags

from cxda_jax.studies.folders import find_runs, read_results
from cxda_jax.studies.jobs import listed
from tests.lines import refused
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


def test_runs_are_found_by_patterns_and_by_odd_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["a,b[1]/x", "a,b[1]/y", "a", "b", "c*", "cd", 'q"r, s']
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").touch()

    def find(text):
        return [str(path) for path in find_runs(flags.ListParser().parse(text))]

    assert find("a,b[1]/*") == names[:2] and find("./a/,b") == ["a", "b"]
    assert find("c*") == ["c*"], "a name that stands there comes before what it would match"
    assert find(listed(names)) == names, "a list that we write is read as it was"
    with refused("^--runs=none: "):
        find("a,none,b")
