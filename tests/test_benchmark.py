"""The benchmark's arithmetic and its records. Whether anything is fast, the benchmark itself must say."""

import importlib.util
import json
import re

import jax
import jax.numpy as jnp
import pytest

from cxda_jax.bench import measure, suites
from cxda_jax.bench.cases import SHAPES
from cxda_jax.bench.measure import ROOT, interleave, repeated, top_operations
from cxda_jax.errors import UserError
from launch import benchmark
from tests.commands import command

HAS_TORCH = importlib.util.find_spec("torch") is not None


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
    return format_of(load(ROOT / "docs" / "results" / f"benchmark-{name}.json"))


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
def test_the_command_leaves_a_record_with_peers_and_what_ran_most(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "record.json"
    flags = [
        "--shapes=femnist",
        "--cases=cxda",
        "--small",
        "--date=2020-02-02",
        "--width=4",
        "--repeats=1",
        "--gemm=64",
    ]
    command("benchmark", "--suite=step", f"--out={out}", *flags)
    found = load(out)
    check(found, rows=3)
    assert format_of(found) == published("femnist")
    assert found["date"] == "2020-02-02" and set(found["gemm_gflop_per_s"]) == {"ours", "torch"}
    assert 0 <= found["others"] <= 1 and found["versions"]["jax"] and found["peer"]["torch"]
    peers = {(row["case"]["work"], row["case"]["statistics"]): set(row["peers"]) for row in found["rows"]}
    assert "exact" in peers["train", "flow"] & peers["infer", "flow"] and peers["train", "stop"] == {"buffers"}
    operations = found["profile"]["operations"]
    assert 0 < sum(o["share"] for o in operations) <= 1.001
    assert [o["ms"] for o in operations] == sorted((o["ms"] for o in operations), reverse=True)


def test_flags_name_what_there_is_to_measure(tmp_path):
    known = {"suite": suites.SUITES, "shapes": SHAPES, "cases": suites.METHODS_TIMED}
    assert [tuple(names) for names in known.values()] == [benchmark.SUITES, benchmark.SHAPES, benchmark.CASES]
    for flag in ("shapes", "cases"):
        assert ", ".join(known[flag]) in benchmark.flags.FLAGS[flag].help
        line = command("benchmark", f"--out={tmp_path / 'record.json'}", f"--{flag}=zzz", code=2)
        assert re.search(f"--{flag}=zzz.*{', '.join(known[flag])}", line)
    assert re.search("--out=.*/no/a.*create it", command("benchmark", f"--out={tmp_path}/no/a", code=2))


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
def test_the_peer_answers_wherever_the_command_is_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with measure.open_peer(True) as peer:
        assert peer.ask("describe")["torch"]
        with pytest.raises(UserError, match="nothing.*--nopeers"):
            peer.ask("nothing")


def test_contenders_take_turns():
    called = []
    contenders = {name: lambda calls, name=name: called.append(name) or 1.0 for name in "ab"}
    assert interleave(contenders, repeats=3) == {"a": [1.0] * 3, "b": [1.0] * 3}
    assert called == ["a", "a", "b", "b", *["a", "b"] * 3]


def test_the_product_that_takes_longest_is_named():
    large, small = jnp.ones((900, 900)), jnp.ones((30, 30))
    work = jax.jit(lambda large, small: (large @ large, small @ small))
    found = top_operations(repeated(lambda: work(large, small)))
    assert found[0]["share"] > 0.8 and found[0]["ms"] > 0


@pytest.mark.parametrize("suite", ["task", "data", "scale", "layers"])
def test_other_suites_leave_a_record_and_a_plot(tmp_path, suite):
    found = run(suite, tmp_path / "record.json", shapes=("femnist", "cifar_c"))
    assert format_of(found) == published(suite)
    assert found["suite"] == suite and found["settings"]["small"]
    layers = [row for shape in found.get("layers", {}).values() for row in shape["rows"]]
    rows = layers or found["tasks" if suite == "task" else "growth"]
    assert len(rows) > 2 and all(0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"] for row in rows)
    for suffix in (".svg", ".png"):
        assert (tmp_path / "record").with_suffix(suffix).exists() == ("growth" in found)


def test_the_large_suite_streams_and_trains_in_processes_of_their_own(tmp_path):
    pytest.importorskip("tensorflow")
    found = run("large", tmp_path / "record.json")
    assert format_of(found) == published("large")
    rows = {(row["store"], row["what"]): row for row in found["large"]}
    assert len(rows) == 7 and found["settings"]["small"]
    for (_, what), row in rows.items():
        assert row["images_per_s"] > 0 and row["own_mb"] > 10 and row["gigabytes"] < 1e-3
        assert ("waiting_s" in row) == (what == "train") and ("open_s" in row) == (what != "train")


def test_the_page_of_large_stores_says_what_was_measured():
    page, found = (ROOT / "docs" / "scaling.md").read_text(), load(ROOT / "docs" / "results" / "benchmark-large.json")
    for row in found["large"]:
        assert f"{row['images_per_s']:,.0f} images/s, {row['own_mb']:,.0f} MB" in page
    assert not found["settings"]["small"] and found["others"] < 0.1


def test_the_buffer_suite_times_what_a_device_does_and_counts_what_it_keeps(tmp_path):
    """Four images, and the networks of configs/unipen.py: 256 flat features of an image, 200 before the last layer."""
    out = run("buffer", tmp_path / "record.json")
    assert format_of({**out, "buffer": out["buffer"][:1]}) == published("buffer")
    rows = {row["method"]: row for row in out["buffer"]}
    kept = {name: (row["kept"], row["per_image"]) for name, row in rows.items()}
    keys_and_values, statistics = 2 * 256 // 2 * 4, 3 * 2 * 16 * 4
    blocks, which_and_where = (
        12 * 2 * 128 * 4,
        1 + 4,
    )  # whether a place holds an image, and where an image of the support is
    assert kept == {
        "erm": (0, 0),
        "t3a": ((200 + 1) * 62 * 4, 0),
        "cxda_any": (4 * keys_and_values + statistics, keys_and_values),
        "cxda_any,prior=0": (4 * keys_and_values, keys_and_values),
        "icrm": (4 * (blocks + which_and_where), blocks + which_and_where),
    }
    assert rows["erm"]["take_in"] is None and rows["t3a"]["take_in"] == rows["t3a"]["adapt"]
    for row in rows.values():
        for times in filter(None, (row.get(part) for part in ("predict", "adapt", "take_in"))):
            assert 0 < times["min_ms"] <= times["median_ms"] <= times["max_ms"]


def test_the_gpu_suite_runs_on_what_there_is_and_names_what_it_left_out(tmp_path, capsys):
    only = ("step bfloat16", "training cifar_c", "support images 10", "seeds 3")
    found = run("gpu", tmp_path / "record.json", only=only, peers=False)
    assert found["left_out"] == [] and "peers skipped" in capsys.readouterr().out
    check(found, rows=1)
    assert all(row["peers"] == row["ratio"] == {} for row in found["rows"])
    assert {row["case"]["dtype"] for row in found["rows"]} == {"bfloat16"}
    assert [(row["benchmark"], row["whole"]) for row in found["trainings"]] == [("cifar_c", False), ("cifar_c", True)]
    for row in found["trainings"]:
        validations = SHAPES[row["benchmark"]].validations * row["validation_s"]
        assert row["reckoned_minutes"] == pytest.approx((row["paper_steps"] / row["steps_per_s"] + validations) / 60)
    assert {row["x"] for row in found["growth"]} == {"support images", "seeds in one program"}
    assert len(run("gpu", tmp_path / "record.json", only=only, peers=False, budget_s=0)["left_out"]) == 5
