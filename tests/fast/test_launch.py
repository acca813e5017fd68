"""The commands that train and evaluate, as a user types them: what they leave behind, and what they print."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from cxda_jax.config.reading import read
from cxda_jax.disk.files import locked
from cxda_jax.machine import backend
from cxda_jax.studies.identity import read_config
from cxda_jax.studies.result import Result, ScoredTasks
from cxda_jax.studies.settings import USUAL, Setting, reshaped
from cxda_jax.studies.text import comparison, table
from cxda_jax.training.experiment import open_data
from tests.commands import command
from tests.lines import refused


@pytest.fixture
def folder(smoke):
    return smoke[0]


def row_of(folder):
    return json.loads((folder / "result.json").read_text())


def files(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


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
    assert f"{row['avg']:.1f}" in output and "eta" in output and "validation" in output and "\ncost: " in output
    assert f"of 200 queries, adapting corrected {row['corrected']} and spoiled {row['spoiled']}" in output
    passport = json.loads((folder / "cost.json").read_text())
    assert passport["steps"] == 20 and passport["steps_per_s"] > 0 and passport["step_gflop"] > 0.1
    kept = dict(np.load(folder / "attention.npz"))
    assert kept["weights"].shape == (10, 20, 8, 100)
    np.testing.assert_allclose(kept["weights"].astype(float).sum(-1), 1, atol=2e-2)  # float16
    domains = open_data(read_config(folder), smoke[0] / "data").row_domains()
    for name in ("support", "query"):
        np.testing.assert_array_equal(kept[f"{name}_domain"], domains[stored[name]])


def test_a_folder_in_use_is_refused_and_untouched(smoke):
    folder = smoke[0] / "run"
    before = files(folder / "last")
    options = "--config=glyphs:cxda,smoke", f"--workdir={folder}", f"--data_dir={smoke[0]}/data"
    with locked(folder):
        assert "run is in use by process" in command("train", *options, code=69)
    assert files(folder / "last") == before


def test_settings_say_how_many_queries_there_are():
    """As many as images of a domain, or as usual where the config says so."""
    config = read("glyphs:cxda")
    fixed = read("glyphs:cxda", [("evaluation.reshaped_queries", "fixed"), ("episode.num_query", "15")])
    for setting, (*shape, queries) in {
        Setting("num_domains", 10): (10, 10, 10), Setting("support_size", 10): (5, 2, 2), USUAL: (5, 20, 20),
    }.items():  # fmt: skip
        for of, expected in ((config, queries), (fixed, 15)):
            episode = reshaped(of, setting)["episode"]
            assert [episode[name] for name in ("num_domains", "per_domain", "num_query")] == [*shape, expected]


def made(label="m", seed=0, scores=(1, 1, 0, 0), **other):
    row = {"benchmark": "b", "label": label, "seed": seed, "num_tasks": 5, "avg": 50.0, "w10": 10.0, "steps": 9,
           "adapt_ms": 2, "predict_ms": 1, "metric": "accuracy"}  # fmt: skip
    tasks = ScoredTasks(np.array(scores, float), np.ones(4), 1, "queries", "supports")
    return Result({"method": label} | row | other, {}, Path(label), Path(label), tasks)


def test_the_table_shows_mean_and_standard_error_and_differences_pair_the_seeds_that_both_have():
    results = [made(seed=s, avg=a) for s, a in enumerate((50.0, 52.0, 54.0))]
    assert "52.0 +- 1.2" in table(results) and "0,1,2" in table(results) and "nan" not in table(results[:1])
    results = [made("bn", 0), made("bn", 1, (0, 0, 0, 0)), made("cxda", 1, (1, 1, 1, 1)), made("cxda", 2)]
    assert "\ncxda - bn  +100.00  [+100.00, +100.00]  seeds 1" in comparison(results, "bn")


def test_two_stores_of_one_name_are_never_averaged_or_compared():
    results = [made(label, seed, scores, data_name="mine", data_hash=digest, avg=avg)
               for digest, avg in (("1" * 64, 10.0), ("2" * 64, 90.0)) for seed in (0, 1)
               for label, scores in (("bn", (0, 0, 0, 0)), ("cxda", (avg > 50,) * 4))]  # fmt: skip
    lines = table(results).splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == ["mine [11111111]"] * 2 + ["mine [22222222]"] * 2
    assert "10.0 +- 0.0" in lines[1] and "90.0 +- 0.0" in lines[3]
    first, second = comparison(results, "bn").splitlines()[1:]
    assert first == "mine [11111111]: cxda - bn  +0.00  [+0.00, +0.00]  seeds 0,1"
    assert second == "mine [22222222]: cxda - bn  +100.00  [+100.00, +100.00]  seeds 0,1"


def test_unfinished_seeds_have_a_line_of_their_own():
    results = [made("cxda", s, steps=2880, reached_step=2880 if s else 500, avg=50.0 * s) for s in range(3)]
    lines = table(results).splitlines()
    assert lines[1].startswith("b ") and "cxda†" in lines[1] and "cxda  " in lines[2] and "75.0 +- 25.0" in lines[2]
    assert lines[3] == "† b, cxda seed 0: unfinished, at step 500 of 2880; in no mean with finished seeds"
    told = comparison([*results, made("bn", 0)], "bn")
    assert "cxda - bn" not in told and "left out: b, cxda seed 0: unfinished, at step 500 of 2880" in told


def test_compiled_programs_are_kept_where_others_cannot_write(tmp_path, monkeypatch):
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    backend.keep_compiled()
    (folder,) = (tmp_path / "cxda_jax" / "compiled").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with refused(r"^{tmp}/\S+: others can write", tmp_path):
        backend.keep_compiled()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/file")
    assert backend.keep_compiled(warn=(said := []).append) is None and "every start compiles again" in said[0]
