"""The benchmark's records. Whether anything is fast, the benchmark itself must say."""

import json

import pytest

from tests.commands import command


def test_the_command_leaves_a_record_with_peers(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)  # the peer answers wherever the command is started
    few = "--shapes=femnist", "--small", "--width=4", "--repeats=1", "--gemm=64"
    command("bench", "--suite=step", "--out=record.json", *few)
    found = json.loads((tmp_path / "record.json").read_text(), parse_constant=pytest.fail)  # NaN and Infinity
    assert len(found["rows"]) == 4 and set(found["gemm_gflop_per_s"]) == {"ours", "torch"}
    for row in found["rows"]:
        assert "exact" in row["peers"] and ("buffers" in row["peers"]) == (row["case"]["work"] == "infer")
        assert all(0 < m["min_ms"] <= m["median_ms"] <= m["max_ms"] for m in (row["ours"], *row["peers"].values()))
