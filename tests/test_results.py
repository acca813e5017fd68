"""What evaluations left, read back; what is broken is named and the rest is read."""

import hashlib
import json
import shutil

import numpy as np
import pytest

from cxda_jax import metrics
from cxda_jax.analysis.results import read_results


def write_result(folder, seed=0, label="cxda"):
    """A run with its result."""
    rng = np.random.default_rng(seed)
    labels, predictions = rng.integers(0, 3, (2, 30, 5))
    scores = metrics.scores("accuracy", predictions, labels)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({"method": label, "seed": seed, "episode": {"num_domains": 5, "per_domain": 20}})
    )
    row = {
        **dict.fromkeys(("label", "method"), label),
        **dict.fromkeys(("version", "benchmark", "device", "package"), "one"),
        **dict.fromkeys(("config_hash", "weights_hash", "data_hash"), "c0ffee"),
        **dict.fromkeys(("steps", "train_minutes", "task_ms", "adapt_ms", "predict_ms"), 1),
        "seed": seed,
        "metric": "accuracy",
        "avg": 100 * scores.mean(),
        "w10": 100 * np.sort(scores)[:3].mean(),
        "num_tasks": 30,
    }
    (folder / "result.json").write_text(json.dumps(row))
    plans = dict.fromkeys(("support", "query"), np.zeros((30, 5), np.int32))
    np.savez_compressed(folder / "predictions.npz", labels=labels, predictions=predictions, **plans)
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 1, "val_score": 0.5}\n')
    return scores


def test_results_are_read_with_their_scores(tmp_path):
    scores = {seed: write_result(tmp_path / str(seed), seed) for seed in (0, 1)}
    write_result(tmp_path / "0" / "cxda,support_size=10", 5)
    results, faults = read_results(tmp_path.iterdir())
    assert not faults and [r.folder.name for r in results] == ["cxda,support_size=10", "0", "1"]
    for result in results[1:]:
        np.testing.assert_array_equal(result.scores(), scores[result.row["seed"]])
        assert result.config["seed"] == result.row["seed"] and result.run == result.folder
        assert [line.get("val_score") for line in result.curve()] == [None, 0.5]
    assert results[0].run == tmp_path / "0"


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda f: (f / "result.json").unlink(), "0: no result.json; evaluate it: python -m launch.evaluate --runs="),
        (lambda f: (f / "result.json").write_text("{"), "0/result.json: not readable as JSON (Expecting property name"),
        (lambda f: (f / "result.json").write_text("{}"), "0/result.json: no 'method'; evaluate again: "),
        (lambda f: (f / "predictions.npz").unlink(), "0/predictions.npz: missing; evaluate again: "),
        (lambda f: (f / "predictions.npz").write_bytes((f / "predictions.npz").read_bytes()[:-90]), "0: not readable ("),
        (lambda f: (f / "predictions.npz").write_bytes(b""), "0: not readable (predictions.npz: cut short, or no such file at all)"),
        (lambda f: (f / "config.json").unlink(), "0/config.json: missing; evaluate again: "),
        (lambda f: shutil.copy(f.parent / "1" / "predictions.npz", f), "0: not readable (avg is "),
    ],
)  # fmt: skip
def test_what_is_broken_is_named_and_the_rest_is_read(tmp_path, spoil, message):
    for seed in (0, 1):
        write_result(tmp_path / str(seed), seed)
    spoil(tmp_path / "0")
    results, faults = read_results(tmp_path.iterdir())
    assert [r.row["seed"] for r in results] == [1]
    assert len(faults) == 1 and faults[0].startswith(f"{tmp_path}/{message}") and "\n" not in faults[0]


def test_objects_among_predictions_are_not_loaded(tmp_path):
    write_result(tmp_path / "0")
    np.savez(tmp_path / "0" / "predictions.npz", labels=np.array([{}], object), predictions=np.zeros((1, 5)))
    results, faults = read_results(tmp_path.iterdir())
    assert not results and "not readable (predictions.npz: Object arrays cannot be loaded" in faults[0]


def test_predictions_of_another_evaluation_are_not_taken_for_its_own(tmp_path):
    write_result(tmp_path / "0")
    row = json.loads((tmp_path / "0" / "result.json").read_text())
    digest = hashlib.sha256((tmp_path / "0" / "predictions.npz").read_bytes()).hexdigest()
    (tmp_path / "0" / "result.json").write_text(json.dumps({**row, "predictions_sha256": digest}))
    assert not read_results([tmp_path / "0"])[1]
    with np.load(tmp_path / "0" / "predictions.npz") as found:
        arrays = {**found, "support": found["support"] + 1}  # the same answers to other images
    np.savez_compressed(tmp_path / "0" / "predictions.npz", **arrays)
    results, faults = read_results([tmp_path / "0"])
    assert not results and "predictions.npz: differs from the hash in result.json; evaluate again" in faults[0].replace(
        ")", ""
    )
