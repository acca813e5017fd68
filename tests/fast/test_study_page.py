"""The published study: its tables follow from its records, its numbers from formulas, its rates from a written rule."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from cxda_jax.config import reading
from cxda_jax.studies.statistics import Difference, Span
from docs.study import make, tables

STUDY = Path(make.__file__).parent


@pytest.fixture(scope="module")
def studies():
    return tables.load()


@pytest.fixture(scope="module")
def points():
    """Of unipen, by label and seed: the points of each task, read without the package."""
    found = {}
    for path in sorted(tables.RECORDS.glob("unipen-?.records")):
        with zipfile.ZipFile(path) as archive, archive.open("scores.npz") as file, np.load(file) as counts:
            for line in map(json.loads, archive.read("results.jsonl").splitlines()):
                right = counts[line["table"]][line["line"]]
                found[line["row"]["label"], line["row"]["seed"]] = right * (100 / int(line["table"].split("x")[1]))
    return found


def of_seeds(points, label):
    return [points[key] for key in sorted(points) if key[0] == label]


def lowest(scores):
    return np.partition(scores, len(scores) // 10 - 1)[: len(scores) // 10].mean()


def test_tables_hold_the_statistics_of_the_scores(studies, points):
    one = {"unipen": studies["unipen"]}

    def cells(table, label):
        return next(line for line in table(one).splitlines() if label in line).split(" | ")

    cxda, base = of_seeds(points, "cxda"), of_seeds(points, "erm_iid")
    levels = [[score(task) for task in cxda] for score in (np.mean, lowest)]
    text = " / ".join(f"{np.mean(each):.1f} ± {stats.sem(each):.1f}" for each in levels)
    assert cells(tables.levels, "| `cxda` ")[1] == f"{text} |"
    each = [(a - b).mean() for a, b in zip(cxda, base, strict=True)]
    mean, ends = np.mean(each), stats.ttest_1samp(each, 0).confidence_interval(0.95)
    told = cells(tables.over_seeds, "`cxda` minus `erm_iid`")
    assert told[1] == ", ".join(f"{x:+.1f}" for x in each)
    assert told[2] == f"**{mean:+.1f} ({ends.low:+.1f} to {ends.high:+.1f})** |"
    told = cells(tables.buffers, "`cxda_any`")
    for cell, n in zip(told[1:], tables.SHOWN, strict=False):
        arrived = of_seeds(points, f"cxda_any,context={n}")
        assert cell.startswith(f"**{np.mean(arrived) - np.mean(base[: len(arrived)]):+.1f} (")


def test_a_verdict_needs_the_interval_and_every_seed_and_more_than_seeds_move():
    gap = Difference(Span(1.0, 0.5, 1.5), None, {0: 0.8, 1: 1.2})
    assert gap.sign == 1 and gap._replace(avg=Span(-1.0, -1.5, -0.5), of_seeds={0: -0.8, 1: -1.2}).sign == -1
    assert gap._replace(of_seeds={0: -0.1, 1: 2.1}).sign == 0 and gap._replace(avg=Span(1.0, -0.1, 2.1)).sign == 0
    assert gap._replace(avg=Span(0.0, 0.0, 0.0), of_seeds={0: 0.0, 1: 0.0}).sign == 0
    # Two seeds each tell 2 standard deviations of one seed apart; methods on the same weights ask for nothing.
    assert [tables.verdict("bn", gap, moved) for moved in (0.49, 0.51)] == [1, 0]
    assert tables.verdict("bn_alpha,from=erm_iid", gap, 9.0) == 1


def test_configs_take_the_rates_with_the_highest_validation_of_equal_ones_the_smaller():
    told = json.loads((STUDY / "tuning.json").read_text())
    assert {data: {m: entry["rate"] for m, entry in of.items()} for data, of in told["rates"].items()} == reading.RATES
    for entry in (entry for part in ("rates", "shares") for of in told[part].values() for entry in of.values()):
        tried = {float(rate): scores["val"] for rate, scores in entry["tried"].items()}
        assert entry["rate"] == min(tried, key=lambda rate: (-tried[rate], rate))
    for spec, data, method in ("unipen:cxda_p2p,sizes", "unipen", "cxda"), ("cifar10_c:cml,small", "cifar10_c", "cml"):
        assert reading.read(spec)["optimizer"]["learning_rate"] == reading.RATES[data][method]
    assert reading.read("cifar10_c:cxda")["optimizer"]["learning_rate"] == 0.01, "the paper's"


@pytest.mark.weekly
def test_pages_hold_what_follows_from_the_records(studies):
    """All tables that are made, the leaderboard and the CSV."""
    for path, text in make.made(studies).items():
        assert path.read_text() == text, f"{path} differs from the records: python -m docs.study.make"
