"""The benchmark's arithmetic and its record; whether anything is fast is for the benchmark itself to say."""

import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest

from launch.measure import ROOT, interleave, top_operations
from launch.suites import SHAPES

HAS_TORCH = importlib.util.find_spec("torch") is not None


def run(out, *flags, suite="step"):
    command = [sys.executable, "-m", "launch.benchmark", f"--suite={suite}", "--width=4", "--repeats=1", "--gemm=64"]
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
    for part in ("rows", "gemm_gflop_per_s"):
        assert all(math.isfinite(x) and x >= 0 for x in numbers(record[part])), part
    for row in record["rows"]:
        assert row["ratio"] == {n: row["ours"]["median_ms"] / m["median_ms"] for n, m in row["peers"].items()}
        for m in (row["ours"], *row["peers"].values()):
            assert m["min_ms"] <= m["median_ms"] <= m["max_ms"]
            assert m["gflop_per_s"] == pytest.approx(1e3 * row["gflop"] / m["median_ms"])


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
def test_record_with_peers(tmp_path):
    done = run(tmp_path / "record.json", "--shapes=femnist", "--cases=cxda", "--small", "--date=2020-02-02")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    check(record, rows=3)
    assert record["date"] == "2020-02-02" and set(record["gemm_gflop_per_s"]) == {"ours", "torch"}
    assert 0 <= record["others"] <= 1 and record["versions"]["jax"] and record["peer"]["torch"]
    peers = {(row["case"]["work"], row["case"]["statistics"]): set(row["peers"]) for row in record["rows"]}
    assert "exact" in peers["train", "flow"] & peers["infer", "flow"] and peers["train", "stop"] == {"buffers"}


def test_record_without_peers(tmp_path):
    done = run(tmp_path / "record.json", "--shapes=femnist", "--cases=bn", "--small", "--nopeers")
    assert done.returncode == 0, done.stderr
    assert "peers skipped" in done.stdout
    record = json.loads((tmp_path / "record.json").read_text())
    check(record, rows=3)
    assert all(row["peers"] == row["ratio"] == {} for row in record["rows"])
    operations = record["profile"]["operations"]
    assert 0 < sum(o["share"] for o in operations) <= 1.001
    assert [o["ms"] for o in operations] == sorted((o["ms"] for o in operations), reverse=True)


def test_contenders_take_turns():
    called = []

    def contender(name):
        def timing(calls):
            called.append(name)
            return 1.0 * calls

        return timing

    seconds = interleave({"a": contender("a"), "b": contender("b")}, repeats=3)
    assert called == ["a", "a", "b", "b", *["a", "b"] * 3]
    assert seconds == {"a": [1.0] * 3, "b": [1.0] * 3}


def test_the_product_that_takes_longest_is_named():
    import jax
    import jax.numpy as jnp

    large, small = jnp.ones((900, 900)), jnp.ones((30, 30))
    work = jax.jit(lambda large, small: (large @ large, small @ small))
    found = top_operations(lambda: work(large, small))
    assert found[0]["share"] > 0.8 and found[0]["ms"] > 0


@pytest.mark.parametrize(
    ("suite", "key"), [("task", "tasks"), ("data", "growth"), ("scale", "growth"), ("layers", "layers")]
)
def test_other_suites_leave_a_record_and_a_plot(tmp_path, suite, key):
    done = run(tmp_path / "record.json", "--small", suite=suite)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["suite"] == suite and record["settings"]["small"]
    rows = record[key] if key != "layers" else [row for name in record[key] for row in record[key][name]["rows"]]
    assert len(rows) > 2 and all(0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"] for row in rows)
    assert (tmp_path / "record.svg").exists() == (key == "growth")


def test_the_gpu_suite_runs_on_what_there_is_and_names_what_it_left_out(tmp_path):
    parts = "--only=step bfloat16,training cifar_c,support images 10,seeds 3"
    flags = ("--small", "--nopeers", parts)
    done = run(tmp_path / "record.json", *flags, suite="gpu")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["left_out"] == []
    assert {row["case"]["dtype"] for row in record["rows"]} == {"bfloat16"}
    assert [(row["benchmark"], row["whole"]) for row in record["trainings"]] == [
        ("cifar_c", False), ("cifar_c", True)]  # fmt: skip
    for row in record["trainings"]:
        assert row["reckoned_minutes"] == pytest.approx(
            (row["paper_steps"] / row["steps_per_s"] + SHAPES[row["benchmark"]].validations * row["validation_s"]) / 60
        )
    assert {row["x"] for row in record["growth"]} == {"support images", "seeds in one program"}
    assert run(tmp_path / "record.json", *flags, "--budget_s=0", suite="gpu").returncode == 0
    assert len(json.loads((tmp_path / "record.json").read_text())["left_out"]) == 5
