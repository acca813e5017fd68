"""The published study: its pages follow from its records, its numbers from formulas, its rates from a written rule."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from cxda_jax import config
from docs.study import answers, detail_tables, details, evidence, make, spread_tables, tables, tune

STUDY = Path(make.__file__).parent


@pytest.fixture(scope="module")
def studies():
    return evidence.load()


@pytest.fixture(scope="module")
def points():
    """Of unipen, by label and seed: the points of each task, read without the package."""
    found = {}
    for path in sorted(evidence.RECORDS.glob("unipen-?.records")):
        with zipfile.ZipFile(path) as archive, archive.open("scores.npz") as file, np.load(file) as counts:
            for line in map(json.loads, archive.read("results.jsonl").splitlines()):
                right = counts[line["table"]][line["line"]]
                found[line["row"]["label"], line["row"]["seed"]] = right * (100 / int(line["table"].split("x")[1]))
    return found


def of_seeds(points, label):
    return [points[key] for key in sorted(points) if key[0] == label]


def lowest(scores):
    return np.partition(scores, len(scores) // 10 - 1)[: len(scores) // 10].mean()


@pytest.mark.exhaustive
def test_pages_hold_what_follows_from_the_records(studies):
    """All tables and answers, README's, the leaderboard and the CSV."""
    for path, text in make.made(studies).items():
        assert path.read_text() == text, f"{path} differs from the records: python -m docs.study.make"
    nothing = evidence.load(Path("none"))
    assert {answer(nothing) for answer in make.ANSWERS.values()} == {answers.NOTHING} == {tables.buffers(nothing)}


def test_a_gap_is_a_mean_with_a_bootstrap_interval(studies, points):
    pair = ("cxda", ""), ("erm_iid", "")
    gap, ours, theirs = studies["unipen"].gaps([pair], worst=True)[pair], *(of_seeds(points, key[0]) for key in pair)
    by_task = np.mean(ours, axis=0) - np.mean(theirs, axis=0)
    assert gap.seeds == (0, 1, 2, 3, 4) and gap.avg[0] == pytest.approx(by_task.mean(), abs=1e-5)
    assert gap.of_seeds == pytest.approx([(a - b).mean() for a, b in zip(ours, theirs, strict=True)], abs=1e-5)
    half = 1.96 * by_task.std(ddof=1) / len(by_task) ** 0.5  # what the bootstrap's interval of a mean tends to
    assert gap.avg[1:] == pytest.approx((by_task.mean() - half, by_task.mean() + half), abs=0.05)
    rng, drawn = np.random.default_rng(1), []
    for _ in range(500):
        rows = rng.integers(0, len(by_task), len(by_task))
        drawn.append(np.mean([lowest(a[rows]) - lowest(b[rows]) for a, b in zip(ours, theirs, strict=True)]))
    assert gap.w10[1:] == pytest.approx(np.percentile(drawn, [2.5, 97.5]), abs=0.25)
    middle = np.mean([lowest(a) - lowest(b) for a, b in zip(ours, theirs, strict=True)])
    assert gap.w10[0] == pytest.approx(middle, abs=1e-5)


def test_tables_hold_the_statistics_of_the_scores(studies, points):
    assert "cifar10_c_full" not in detail_tables.kinds({**studies, "cifar10_c_full": studies["cifar10_c"]})
    one = {"unipen": studies["unipen"]}

    def cells(table, label):
        return next(line for line in table(one).splitlines() if label in line).split(" | ")

    cxda, base = of_seeds(points, "cxda"), of_seeds(points, "erm_iid")
    levels = [[score(task) for task in cxda] for score in (np.mean, lowest)]
    text = " / ".join(f"{np.mean(each):.1f} ± {stats.sem(each):.1f}" for each in levels)
    assert cells(tables.levels, "| `cxda` ")[1] == f"{text} |"
    deviation, told = np.std(levels[0], ddof=1), cells(spread_tables.spread, "`unipen`, `cxda`")
    assert told[2:5:2] == [f"{deviation:.2f}", f"{2 * deviation * (2 / 5) ** 0.5:.1f}"]
    each = [(a - b).mean() for a, b in zip(cxda, base, strict=True)]
    mean, ends = np.mean(each), stats.ttest_1samp(each, 0).confidence_interval(0.95)
    told = cells(spread_tables.over_seeds, "`cxda` minus `erm_iid`")
    assert told[1] == ", ".join(f"{x:+.1f}" for x in each)
    assert told[2] == f"**{mean:+.1f} ({ends.low:+.1f} to {ends.high:+.1f})** |"
    assert cells(tables.rivals, "| `erm_iid` ")[1].startswith(f"**{mean:+.1f} (")
    told = cells(tables.buffers, "`cxda_any`")
    for cell, n in zip(told[1:], tables.SHOWN, strict=False):
        arrived = of_seeds(points, f"cxda_any,context={n}")
        assert cell.startswith(f"**{np.mean(arrived) - np.mean(base[: len(arrived)]):+.1f} (")


def test_a_verdict_needs_the_interval_and_every_seed_and_more_than_seeds_move():
    gap = evidence.Gap((1.0, 0.5, 1.5), None, (0, 1), (0.8, 1.2))
    assert gap.sign == 1 and gap._replace(avg=(-1.0, -1.5, -0.5), of_seeds=(-0.8, -1.2)).sign == -1
    assert gap._replace(of_seeds=(-0.1, 2.1)).sign == 0 and gap._replace(avg=(1.0, -0.1, 2.1)).sign == 0
    assert gap._replace(avg=(0.0, 0.0, 0.0), of_seeds=(0.0, 0.0)).sign == 0
    # Two seeds each tell 2 standard deviations of one seed apart; methods on the same weights ask for nothing.
    assert [tables.verdict(gap, moved) for moved in (0.49, 0.51)] == [1, 0]
    assert [tables.lead_verdict("bn", gap, moved) for moved in (0.49, 0.51)] == [1, 0]
    assert tables.lead_verdict("bn_alpha,from=erm_iid", gap, 9.0) == 1


def test_attention_is_measured_as_the_closed_forms_say():
    support = np.tile(np.arange(10), (3, 1))  # of five domains and two classes
    stored = {"support": support, "labels": np.tile([0, 1], (3, 1)), "predictions": np.tile([0, 1], (3, 1))}
    kept = {"support_domain": support // 2, "query_domain": np.tile([0, 4], (3, 1)),
            "weights": np.full((3, 2, 4, 10), 0.05, np.float16)}  # fmt: skip
    even = details.attention(kept, stored, support[0] % 2, None)
    known = {"on_images": 0.5, "effective_images": 10, "own_domain": 0.2, "same_class": 0.5}
    assert {name: even[name][0] for name in known} == pytest.approx(known, rel=1e-3)
    assert even["own_domain_chance"] == pytest.approx(0.2) and even["same_class_chance"] == pytest.approx(0.5)
    own = (kept["query_domain"][:, :, None] == kept["support_domain"][:, None])[:, :, None]
    kept["weights"] = np.where(own, 0.5, 0.0).repeat(4, 2)
    found = details.attention(kept, stored, support[0] % 2, np.array([[0, 0], [1, 1], [1, 0]]))
    assert found["own_domain"] == pytest.approx([1, 1, 1]) and found["effective_images"][0] == pytest.approx(2)
    assert found["gain_correlation"]["own_domain"] == [0, 0, 0], "what never differs correlates with nothing"
    x, y = np.random.default_rng(0).normal(size=(2, 40, 20))
    r, low, high = details.correlation(x, x + y)
    assert low < 0.5**0.5 < high and r == pytest.approx(np.corrcoef(x.ravel(), (x + y).ravel())[0, 1])


def test_the_rule_for_rates():
    def tried(*scores):
        rates = (0.003, 0.01, 0.03, 0.1, 0.3)
        return {rate: {"val": score} for rate, score in zip(rates, scores, strict=True) if score}

    assert tune.next_rate({}) == 0.1 and tune.next_rate(tried(0, 0, 0, 70, 0)) == 0.03
    assert tune.next_rate(tried(0, 60, 71, 70, 0)) is None, "the best is in the middle"
    assert tune.next_rate(tried(0, 72, 71, 70, 0)) == 0.003 and tune.next_rate(tried(0, 60, 71, 72, 0)) == 0.3
    assert tune.next_rate(tried(73, 72, 71, 70, 0)) is None and tune.next_rate(tried(0, 60, 71, 72, 73)) is None
    assert tune.chosen(tried(0, 71, 71, 70, 0)) == 0.01, "of equal ones the smaller"


def test_configs_take_the_rates_that_were_chosen():
    told = json.loads((STUDY / "tuning.json").read_text())
    assert {data: {m: entry["rate"] for m, entry in of.items()} for data, of in told["rates"].items()} == config.RATES
    for entry in (entry for part in ("rates", "shares") for of in told[part].values() for entry in of.values()):
        assert entry["rate"] == tune.chosen({float(rate): scores for rate, scores in entry["tried"].items()})
    for spec, data, method in (
        ("unipen:cxda_p2p,sizes", "unipen", "cxda"),
        ("glyphs:ft_em", "unipen", "erm"),
        ("cifar10_c:cml,small", "cifar10_c", "cml"),
    ):
        assert config.read(spec)["optimizer"]["learning_rate"] == config.RATES[data][method]
    assert config.read("cifar10_c:cxda")["optimizer"]["learning_rate"] == 0.01, "the paper's"
