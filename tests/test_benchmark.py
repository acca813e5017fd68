"""The benchmark's arithmetic and its records. Whether anything is fast, the benchmark itself must say."""

import json

import pytest

from cxda_jax.bench import suites
from cxda_jax.bench.cases import SHAPES
from cxda_jax.bench.measure import ROOT, interleave
from tests.commands import command

gate, exhaustive = pytest.mark.gate, pytest.mark.exhaustive


def run(suite, out, **options):
    """The record of a small run."""
    few = {"width": 4, "repeats": 1, "gemm": 64, "small": True, "budget_s": 480, "only": (), "shapes": ("femnist",)}
    suites.run(suite, out, **few | {"cases": ("bn",)} | options)
    return load(out)


def load(path):
    return json.loads(path.read_text(), parse_constant=pytest.fail)  # which JSON calls NaN and Infinity


def check(found, rows):
    assert len(found["rows"]) == rows and min(found["gemm_gflop_per_s"].values()) > 0
    for row in found["rows"]:
        assert row["ratio"] == {n: row["ours"]["median_ms"] / m["median_ms"] for n, m in row["peers"].items()}
        for m in (row["ours"], *row["peers"].values()):
            assert 0 < m["min_ms"] <= m["median_ms"] <= m["max_ms"] and m["of_gemm_peak"] > 0
            assert m["gflop_per_s"] == pytest.approx(1e3 * row["gflop"] / m["median_ms"])


def format_of(found):
    """The keys of a record and of the first of its rows: what its readers rely on."""
    if isinstance(found, dict):
        return {k: format_of(v) for k, v in found.items() if k not in ("peers", "ratio", "environment", "versions")}
    return [format_of(found[0])] if isinstance(found, list) and found else None


def published(name):
    return load(ROOT / "docs" / "results" / f"benchmark-{name}.json")


@exhaustive
def test_the_command_leaves_a_record_with_peers_and_what_ran_most(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)  # the peer answers wherever the command is started
    small = "--small", "--width=4", "--repeats=1", "--gemm=64", "--date=2020-02-02"
    command("benchmark", "--suite=step", "--out=record.json", "--shapes=femnist", "--cases=bn", *small)
    found = load(tmp_path / "record.json")
    check(found, rows=3)
    assert format_of(found) == format_of(published("femnist"))
    assert found["date"] == "2020-02-02" and set(found["gemm_gflop_per_s"]) == {"ours", "torch"}
    peers = {(row["case"]["work"], row["case"]["statistics"]): set(row["peers"]) for row in found["rows"]}
    assert "exact" in peers["train", "flow"] & peers["infer", "flow"] and peers["train", "stop"] == {"buffers"}
    times = [operation["ms"] for operation in found["profile"]["operations"]]
    assert times and times == sorted(times, reverse=True)


@gate
def test_contenders_take_turns():
    called = []
    contenders = {name: lambda calls, name=name: called.append(name) or 1.0 for name in "ab"}
    assert interleave(contenders, repeats=3) == {"a": [1.0] * 3, "b": [1.0] * 3}
    assert called == ["a", "a", "b", "b", *["a", "b"] * 3]


@exhaustive
def test_the_gpu_suite_runs_on_what_there_is_and_names_what_it_left_out(tmp_path):
    only = ("step bfloat16", "training cifar_c", "support images 10", "seeds 3")
    found = run("gpu", tmp_path / "record.json", only=only, peers=False)
    assert found["left_out"] == []
    check(found, rows=1)
    assert [(row["benchmark"], row["whole"]) for row in found["trainings"]] == [("cifar_c", True)]
    for row in found["trainings"]:
        validations = SHAPES[row["benchmark"]].validations * row["validation_s"]
        assert row["reckoned_minutes"] == pytest.approx((row["paper_steps"] / row["steps_per_s"] + validations) / 60)
    assert len(run("gpu", tmp_path / "record.json", only=only, peers=False, budget_s=0)["left_out"]) == 4
