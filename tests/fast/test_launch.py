"""The commands that train and evaluate, as a user types them: what they leave behind, and what they print."""

import json
import re
import shutil
import threading

import jax
import numpy as np
import pytest

from cxda_jax.config.reading import replaced
from cxda_jax.config.registry import METHODS
from cxda_jax.disk.reading import read_lines
from cxda_jax.machine import backend
from cxda_jax.studies import training
from cxda_jax.studies.folders import read_results
from cxda_jax.studies.identity import read_config, read_record
from cxda_jax.studies.result import by_store
from cxda_jax.training import metrics
from cxda_jax.training.experiment import open_data
from tests.commands import command
from tests.lines import contents, refused, write_config


@pytest.fixture
def folder(smoke):
    return smoke[0]


def row_of(folder):
    return json.loads((folder / "result.json").read_text())


def test_a_run_leaves_what_it_promises(smoke):
    folder, output = smoke[0] / "run", smoke[1]
    assert {p.name for p in folder.iterdir()} == {
        "config.json", "metrics.jsonl", "last", "best", "result.json", "predictions.npz", "attention.png",
        "attention.npz", "cost.json", "model", "lock", "manifest.json",
    }  # fmt: skip
    row, stored = row_of(folder), dict(np.load(folder / "predictions.npz"))
    scores = (stored["predictions"] == stored["labels"]).mean(1)
    assert row["avg"] == pytest.approx(100 * scores.mean()) and row["w10"] == pytest.approx(100 * scores.min())
    assert stored["support"].shape == (10, 100) and stored["query"].shape == (10, 20)
    assert (row["method"], row["seed"]) == ("cxda", 0) and row["device"].startswith(f"{backend.machine()} x1 (")
    assert f"{row['avg']:.1f}" in output
    assert f"of 200 queries, adapting corrected {row['corrected']} and spoiled {row['spoiled']}" in output
    passport = json.loads((folder / "cost.json").read_text())
    assert passport["steps"] == 20 and passport["steps_per_s"] > 0 and passport["step_gflop"] > 0.1
    kept = dict(np.load(folder / "attention.npz"))
    assert kept["weights"].shape == (10, 20, 8, 100)
    np.testing.assert_allclose(kept["weights"].astype(float).sum(-1), 1, atol=2e-2)  # float16


def test_compiled_programs_are_kept_where_others_cannot_write(tmp_path, monkeypatch):
    told: dict[str, object] = {}
    monkeypatch.setattr(jax.config, "update", told.__setitem__)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    backend.keep_compiled()
    (folder,) = (tmp_path / "cxda_jax" / "compiled").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700 and [*told.values()] == [str(folder), 0.1]
    folder.chmod(0o777)
    with refused(r"^{tmp}/\S+: others can write", tmp_path):
        backend.keep_compiled()


TIMES = ("task_ms", "adapt_ms", "predict_ms", "train_minutes", "seal")


@pytest.fixture
def copied(folder, tmp_path):
    """A run of one's own, and the flag of its data."""
    shutil.copytree(folder / "run", tmp_path / "run")
    return tmp_path, f"--data_dir={folder}/data"


def test_threads_work_side_by_side_on_the_callers_device_and_keep_the_order(monkeypatch):
    monkeypatch.setattr(backend, "threads", lambda: 2)
    met, device = threading.Barrier(2, timeout=60), jax.devices()[0]

    def found(x, y):
        met.wait()  # for the other thread
        return x * y, jax.config.jax_default_device

    with jax.default_device(device):
        assert [*backend.in_threads(found, [1, 2, 3, 4], [5, 6, 7, 8])] == [(x, device) for x in (5, 12, 21, 32)]
    with pytest.raises(ZeroDivisionError):
        [*backend.in_threads(lambda x: 1 / x, [1, 0])]


def result(folder):
    return {k: v for k, v in row_of(folder).items() if k not in TIMES}, dict(np.load(folder / "predictions.npz"))


@pytest.mark.slow
def test_a_run_that_is_trained_and_tested_is_left_alone_until_its_test_is_damaged(copied, monkeypatch):
    monkeypatch.setattr(training, "has_changes", lambda commit: False)  # whatever this clone holds
    folder, data = copied[0] / "run", copied[1]
    again = "train", "--config=glyphs:cxda,smoke", f"--workdir={folder}", data
    before = contents(folder)
    assert "trained and tested already" in command(*again)
    assert {name: data for name, data in contents(folder).items() if name != "lock"}.items() <= before.items()
    (folder / "predictions.npz").write_bytes(b"cut")
    assert "already" not in command(*again) and row_of(folder)["avg"] == result(folder)[0]["avg"]
    assert (folder / "predictions.npz").read_bytes() == before["predictions.npz"]


@pytest.mark.slow
def test_a_run_and_its_model_alone_are_tested_again_with_the_same_row(folder, tmp_path):
    """In a folder whose name holds what patterns and lists are made of, with nothing but its weights."""
    copy, model = tmp_path / "co,py[1]", tmp_path / "model"
    gone = shutil.ignore_patterns("result.json", "predictions.npz", "attention.png", "metrics.jsonl", "last")
    shutil.copytree(folder / "run", copy, ignore=gone)
    shutil.copytree(folder / "run" / "model", model)
    output = command("evaluate", f"--runs={copy},{model}", f"--data_dir={folder}/data")
    (before, arrays), (after, same) = result(folder / "run"), result(copy)
    assert before == after and row_of(folder / "run")["train_minutes"] > 0 and row_of(copy)["train_minutes"] is None
    jax.tree.map(np.testing.assert_array_equal, arrays, same)
    for field in ("avg", "w10", "weights_hash", "best_step", "config_hash", "data_hash", "predictions_sha256"):
        assert row_of(model)[field] == before[field]
    assert f"weights {before['weights_hash'][:12]}" in output


@pytest.mark.slow
def test_methods_that_start_from_erm_leave_it_untouched(erm_run, tmp_path):
    """Each is tested in a folder of its own, as are changed fields and a start from erm_iid, here of equal weights."""
    names, erm, data = ["cotta", "t3a"], tmp_path / "erm", f"--data_dir={erm_run.parent}/data"
    shutil.copytree(erm_run, erm)
    shutil.copytree(erm_run, iid := tmp_path / "iid", ignore=shutil.ignore_patterns("*,*", *METHODS))
    write_config(iid, replaced(read_config(erm_run), method="erm_iid"), read_record(erm_run).data_hash)
    weights, (trained, arrays) = contents(erm / "best"), result(erm)
    options = (data, "--num_tasks=3")
    output = command("evaluate", f"--runs={erm}", f"--methods=erm,{','.join(names)}", *options)
    alone, alone_arrays = result(erm)
    assert weights == contents(erm / "best") and alone["weights_hash"] == trained["weights_hash"]
    np.testing.assert_array_equal(alone_arrays["predictions"], arrays["predictions"][:3])
    found = {name: result(erm / name) for name in names}
    row, arrays = found["cotta"]
    teacher = metrics.scores("accuracy", arrays["teacher"], arrays["labels"])
    assert row["also"]["teacher"]["avg"] == pytest.approx(100 * teacher.mean()) and "teacher: " in output
    changed = (f"--runs={erm}", "--methods=bn", "--config.batch_norm.test_time_only=True")
    command("evaluate", *changed, *options)
    row, _ = result(erm / "bn,batch_norm.test_time_only=True")
    assert row["method"] == "bn" and row["weights_hash"] == alone["weights_hash"] and result(erm)[0] == alone
    both = f"--runs={erm},{iid}", "--methods=erm_iid,t3a", "--from=erm_iid", "--against=t3a,from=erm_iid"
    output = command("evaluate", *both, *options)
    assert "erm_iid - t3a,from=erm_iid  " in output and not (iid / "t3a").exists()
    row, arrays = result(iid / "t3a,from=erm_iid")
    jax.tree.map(np.testing.assert_array_equal, found["t3a"][1], arrays)
    assert (row["label"], row["method"]) == ("t3a,from=erm_iid", "t3a")
    refused = command("evaluate", f"--runs={erm}", "--methods=t3a", changed[2], *options, code=2)
    assert "config.batch_norm.test_time_only: t3a does not read it, only bn, cxda" in refused
    assert not list(erm.glob("*from*"))


@pytest.mark.slow
def test_other_tasks_and_what_fails_among_them(copied):
    here, data = copied
    shutil.copytree(here / "run", here / "broken", ignore=shutil.ignore_patterns("best"))
    runs = (f"--runs={here}/run,{here}/broken", data)
    error = command("evaluate", *runs, "--num_domains=2", "--support_size=10", "--num_tasks=4", code=2)
    first = "error: 2 of 4 evaluations failed; the first: cxda,num_domains=2 of "
    assert error.count("\n") == 1 and error.startswith(first) and "no checkpoint in best/" in error
    for label, shape in {"num_domains=2": (100, 50), "support_size=10": (10, 2)}.items():
        row, stored = result(here / "run" / f"cxda,{label}")
        assert (row["label"], row["setting"], row["num_tasks"]) == (f"cxda,{label}", label, 4)
        assert (stored["support"].shape, stored["query"].shape) == ((4, shape[0]), (4, shape[1]))
        assert row["avg"] == pytest.approx(100 * np.mean(stored["predictions"] == stored["labels"]))


@pytest.mark.slow
def test_validation_domains_are_tested_apart(copied):
    """With the score that the training had there, in a folder and a line of their own."""
    here, data = copied
    output = command("evaluate", f"--runs={here}/run", data, "--validation")
    row, arrays = result(here / "run" / "cxda,validation")
    best = max(line["val_score"] for line in read_lines(here / "run" / "metrics.jsonl") if "val_score" in line)
    assert row["avg"] == pytest.approx(100 * best) and (row["label"], row["split"]) == ("cxda", "val")
    assert re.search(r"^glyphs \(smoke\) \(validation\) +cxda ", output, re.MULTILINE)
    store = open_data(read_config(here / "run"), data.partition("=")[2])
    assert set(store.row_domains()[arrays["query"]].ravel()) <= set(store.domains("val"))
    results, faults = read_results([here / "run"])
    assert not faults and sorted(by_store(results)) == ["glyphs (smoke)", "glyphs (smoke) (validation)"]
