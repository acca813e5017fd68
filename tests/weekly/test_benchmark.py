"""The benchmark's arithmetic and its records. Whether anything is fast, the benchmark itself must say."""

import json

import pytest

from tests.commands import command
from tools.bench import suites


def run_gpu(out, only, budget_s):
    suites.run("gpu", out, False, 64, width=4, repeats=1, small=True, budget_s=budget_s, shapes=(), only=only)
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


def test_the_command_leaves_a_record_with_peers(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)  # the peer answers wherever the command is started
    few = "--shapes=femnist", "--small", "--width=4", "--repeats=1", "--gemm=64"
    command("bench", "--suite=step", "--out=record.json", *few)
    found = load(tmp_path / "record.json")
    check(found, rows=4)
    assert set(found["gemm_gflop_per_s"]) == {"ours", "torch"}
    for row in found["rows"]:
        assert "exact" in row["peers"] and ("buffers" in row["peers"]) == (row["case"]["work"] == "infer")


def test_the_gpu_suite_runs_on_what_there_is_and_names_what_it_left_out(tmp_path):
    out, only = tmp_path / "record.json", ("step bfloat16", "training cifar_c")
    found = run_gpu(out, only, budget_s=480)
    check(found, rows=1)
    (row,) = found["trainings"]
    assert not found["left_out"] and row["benchmark"] == "cifar_c" and row["whole"]
    assert (row["paper_steps"], row["paper_validations"]) == (56_000, 10)
    assert row["reckoned_minutes"] == pytest.approx((56_000 / row["steps_per_s"] + 10 * row["validation_s"]) / 60)
    assert len(run_gpu(out, only, budget_s=0)["left_out"]) == 2
