"""The benchmark's arithmetic and its records. Whether anything is fast, the benchmark itself must say."""

import json

import pytest

from tests.commands import command


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
