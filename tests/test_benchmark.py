"""The benchmark's arithmetic and its record; whether anything is fast is for the benchmark itself to say."""

import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest

from launch.benchmark import QUERY, ROOT, SHAPES, SUPPORT, Case, flops

HAS_TORCH = importlib.util.find_spec("torch") is not None


def run(out, *flags):
    command = [sys.executable, "-m", "launch.benchmark", "--suite=step", "--width=4", "--repeats=1", "--gemm=64"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, f"--out={out}", *flags], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def numbers(tree):
    if isinstance(tree, dict | list):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from numbers(child)
    elif isinstance(tree, int | float):
        yield tree


def check(record, rows):
    assert len(record["rows"]) == rows
    for part in ("rows", "data", "gemm_gflop_per_s", "settings"):
        assert all(math.isfinite(x) and x > 0 for x in numbers(record[part])), part
    for row in record["rows"]:
        assert row["ratio"] == {n: row["ours"]["median_ms"] / m["median_ms"] for n, m in row["peers"].items()}
        for m in (row["ours"], *row["peers"].values()):
            assert m["min_ms"] <= m["median_ms"] <= m["max_ms"]
            assert m["gflop_per_s"] == pytest.approx(1e3 * row["gflop"] / m["median_ms"])


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
def test_record_with_peers(tmp_path):
    done = run(tmp_path / "record.json", "--shapes=femnist", "--cases=cxda", "--date=2020-02-02")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    check(record, rows=3)
    assert record["date"] == "2020-02-02" and set(record["gemm_gflop_per_s"]) == {"ours", "torch"}
    assert 0 <= record["others"] <= 1 and record["versions"]["jax"] and record["peer"]["torch"]
    peers = {(row["work"], row["statistics"]): set(row["peers"]) for row in record["rows"]}
    assert "exact" in peers["train", "flow"] & peers["infer", "flow"] and peers["train", "stop"] == {"buffers"}


def test_record_without_peers(tmp_path):
    done = run(tmp_path / "record.json", "--shapes=femnist", "--cases=bn", "--nopeers")
    assert done.returncode == 0, done.stderr
    assert "peers skipped" in done.stdout
    record = json.loads((tmp_path / "record.json").read_text())
    check(record, rows=3)
    assert all(row["peers"] == row["ratio"] == {} for row in record["rows"])


@pytest.mark.parametrize("flag", ["--shapes=imagenet", "--cases=bn,erm", "--out=/nowhere/record.json"])
def test_a_wrong_flag_is_one_line(tmp_path, flag):
    done = run(tmp_path / "record.json", flag)
    assert done.returncode == 2
    assert done.stderr.startswith("error: " + flag.split("=")[0]) and done.stderr.count("\n") == 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", ["bn", "cxda"])
@pytest.mark.parametrize(("work", "statistics"), [("train", "flow"), ("train", "stop"), ("infer", "flow")])
def test_operations_are_those_that_torch_counts(shape, method, work, statistics):
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    from tests.peers import torch_peer as peer

    (side, _, channels), classes, _, _ = SHAPES[shape]
    attention = peer.TorchAttention(16) if method == "cxda" else None
    statistics_of_peer = "buffers" if statistics == "stop" else "flow"
    module = peer.TorchCXDA(peer.TorchCNN(channels, classes, 16), attention, statistics=statistics_of_peer)
    images = [torch.rand(n, channels, side, side) for n in (SUPPORT, QUERY)]
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(work == "train"):
        logits = module(*images)
        if work == "train":
            logits.sum().backward()
    assert counter.get_total_flops() == flops(Case(shape, method, work, statistics, 16))


def test_operations_at_full_width():
    assert flops(Case("cifar_c", "bn", "train", "flow", 128)) == pytest.approx(265e9, rel=0.01)
    assert flops(Case("femnist", "bn", "train", "flow", 128)) == pytest.approx(190e9, rel=0.01)
