"""The benchmark's arithmetic and its records. Whether anything is fast, the benchmark itself must say."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax.bench import buffer, suites
from cxda_jax.bench.cases import SHAPES, Case, random_episodes, random_store
from cxda_jax.bench.measure import ROOT, interleave, repeated, top_operations
from cxda_jax.config import read
from cxda_jax.experiment import build_method
from launch import benchmark
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


@gate
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
    assert 0 <= found["others"] <= 1 and found["versions"]["jax"] and found["peer"]["torch"]
    peers = {(row["case"]["work"], row["case"]["statistics"]): set(row["peers"]) for row in found["rows"]}
    assert "exact" in peers["train", "flow"] & peers["infer", "flow"] and peers["train", "stop"] == {"buffers"}
    operations = found["profile"]["operations"]
    assert 0 < sum(o["share"] for o in operations) <= 1.001
    assert [o["ms"] for o in operations] == sorted((o["ms"] for o in operations), reverse=True)


@gate
def test_flags_name_what_there_is_to_measure(tmp_path):
    known = {"suite": suites.SUITES, "shapes": SHAPES, "cases": suites.METHODS_TIMED}
    assert [tuple(names) for names in known.values()] == [benchmark.SUITES, benchmark.SHAPES, benchmark.CASES]
    for flag in ("shapes", "cases"):
        assert ", ".join(known[flag]) in benchmark.flags.FLAGS[flag].help
        line = command("benchmark", f"--out={tmp_path / 'record.json'}", f"--{flag}=zzz", code=2)
        assert re.search(f"--{flag}=zzz.*{', '.join(known[flag])}", line)
    assert re.search("--out=.*/no/a.*create it", command("benchmark", f"--out={tmp_path}/no/a", code=2))


@gate
def test_contenders_take_turns_and_the_product_that_takes_longest_is_named():
    called = []
    contenders = {name: lambda calls, name=name: called.append(name) or 1.0 for name in "ab"}
    assert interleave(contenders, repeats=3) == {"a": [1.0] * 3, "b": [1.0] * 3}
    assert called == ["a", "a", "b", "b", *["a", "b"] * 3]
    large, small = (jax.device_put(np.ones((side, side), np.float32)) for side in (900, 30))
    work = jax.jit(lambda large, small: (jnp.matmul(large, large), jnp.matmul(small, small)))
    found = top_operations(repeated(lambda: work(large, small)))
    assert found[0]["share"] > 0.8 and found[0]["ms"] > 0


@gate
def test_the_bytes_that_a_method_keeps_of_a_buffer():
    """Of the networks of configs/unipen.py: 256 flat features of an image, 200 before the last layer."""
    store, found = random_store("femnist", domains=3, images=1), {}
    for label in ("erm", "t3a", "cxda_any", "cxda_any,prior=0", "icrm"):
        name, _, running = label.partition(",")
        kept = []
        for size in (4, 8):
            settings = read(f"unipen:{name}")
            settings["icrm"]["context"] = size
            settings["cxda_any"]["prior"] *= not running
            episodes = random_episodes(Case("femnist", name, "infer", support=size))
            method, support = build_method(settings, store), jax.tree.map(lambda x: np.asarray(x)[0], episodes.support)
            kept.append(buffer.bytes_kept(method, support) if method.uses_support else 0)
        found[label] = kept[0], (kept[1] - kept[0]) // 4
    keys_and_values, statistics = 2 * 256 // 2 * 4, 3 * 2 * 16 * 4
    blocks, which_and_where = 12 * 2 * 128 * 4, 1 + 4  # whether a place holds an image, and where one of the support is
    assert found == {
        "erm": (0, 0),
        "t3a": ((200 + 1) * 62 * 4, 0),
        "cxda_any": (4 * keys_and_values + statistics, keys_and_values),
        "cxda_any,prior=0": (4 * keys_and_values, keys_and_values),
        "icrm": (4 * (blocks + which_and_where), blocks + which_and_where),
    }
    rows = {row["method"]: row for row in published("buffer")["buffer"]}
    assert rows["t3a"]["kept"] == found["t3a"][0] and rows["icrm"]["per_image"] == found["icrm"][1]


@gate
def test_the_page_of_large_stores_says_what_was_measured():
    page, found = (ROOT / "docs" / "scaling.md").read_text(), published("large")
    for row in found["large"]:
        assert f"{row['images_per_s']:,.0f} images/s, {row['own_mb']:,.0f} MB" in page
    assert not found["settings"]["small"] and found["others"] < 0.1


@exhaustive
@pytest.mark.parametrize("suite", ["task", "data", "scale", "layers", "buffer", "large"])
def test_other_suites_leave_a_record_and_a_plot(tmp_path, suite):
    pytest.importorskip("tensorflow")
    found = run(suite, tmp_path / "record.json", shapes=("femnist", "cifar_c"))
    assert format_of(found) == format_of(published(suite))
    assert found["suite"] == suite and found["settings"]["small"]
    layers = [row for shape in found.get("layers", {}).values() for row in shape["rows"]]
    rows = (
        layers + [row["predict"] for row in found.get("buffer", ())] + found.get("tasks", []) + found.get("growth", [])
    )
    assert len(rows or found["large"]) > 2
    assert all(0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"] for row in rows)
    assert all(row["images_per_s"] > 0 and row["own_mb"] > 10 for row in found.get("large", ()))
    for suffix in (".svg", ".png"):
        assert (tmp_path / "record").with_suffix(suffix).exists() == ("growth" in found)


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
    assert {row["x"] for row in found["growth"]} == {"support images", "seeds in one program"}
    assert len(run("gpu", tmp_path / "record.json", only=only, peers=False, budget_s=0)["left_out"]) == 4
