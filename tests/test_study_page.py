"""The published study: its numbers follow from its records, and from closed forms."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from scipy import stats

from cxda_jax.study import records
from cxda_jax.study.results import read_results
from docs.study import answers, detail_tables, evidence, figures, make, spread_tables, tables, tune
from tests.results import PROTOCOL, make_result, write_result

TASKS, QUERIES, HASH = 120, 20, "ab" * 32


@pytest.fixture(scope="module")
def right():
    """By label, setting and seed: how many queries of each task are right."""
    rng, counts = np.random.default_rng(0), {}
    for label, settings, mean in (
        ("erm_iid", ("", "num_domains=2"), 0.6),
        ("cxda", ("", "context=0", "context=5", "context=100", "num_domains=2"), 0.7),
        ("erm", ("",), 0.5),
        ("bn_alpha,from=erm_iid", ("", "context=0", "context=5"), 0.6),
    ):
        for setting in settings:
            for seed in (0, 1, 2):
                counts[label, setting, seed] = rng.binomial(QUERIES, mean, TASKS)
    return counts


@pytest.fixture(scope="module")
def studies(right, tmp_path_factory):
    """Records of these, of two changes to cxda, and of two trainings of it again, read as the study's."""
    folder = tmp_path_factory.mktemp("records")
    rng, protocol = np.random.default_rng(1), PROTOCOL["cifar_c"]
    query, support = rng.integers(0, 999, (TASKS, QUERIES)), rng.integers(0, 999, (TASKS, 100))

    def write(label, setting, seed, counts, place, whole):
        run_folder = folder / place / label.split(",")[0] / str(seed)
        asked = query + 1 if setting.startswith("num") else query
        row = {"data_name": "unipen", "data_hash": HASH, "config_hash": HASH, "weights_hash": f"{whole}{seed}"}
        result = make_result(label.split(",")[0], seed, "unipen", setting, whole, protocol, **row)
        result = result._replace(row={**result.row, "num_tasks": TASKS})
        labels = np.zeros((TASKS, QUERIES), int)
        predictions = (np.arange(QUERIES) >= counts[:, None]).astype(int)
        at = run_folder if not setting and "," not in label else run_folder / whole
        write_result(result, at, labels, predictions, support, asked, run_folder)
        (run_folder / "config.json").write_text(json.dumps({**protocol, "method": label.split(",")[0], "seed": seed}))

    for (label, setting, seed), counts in right.items():
        write(label, setting, seed, counts, "runs", ",".join(filter(None, [label, setting])))
    for name in ("pooled", "labels_own"):
        write("cxda", "", 0, right["cxda", "", 0] - (right["cxda", "", 0] > 0), f"changes/{name}", "cxda")
    write("cxda", "", 0, right["cxda", "", 0], "again/cxda,again", "cxda")
    write("cxda", "", 0, right["cxda", "", 0] - (right["cxda", "", 0] > 0), "again/cxda,one core", "other")
    write("cxda", "", 0, right["cxda", "", 0], "cells", "cxda")
    write("cxda", "", 1, right["cxda", "", 1] - (right["cxda", "", 1] > 0), "more_cells", "cxda")
    records.write(folder / "unipen-0.records", read_results((folder / "runs").glob("*/*"))[0])
    # In a file of changes a run is named by its change.
    for part, names in (("changes", ("pooled", "labels_own")), ("again", ("cxda,again", "cxda,one core"))):
        for name in names:
            (folder / part / name / "cxda" / "0").rename(folder / part / name / "0")
    records.write(folder / "unipen_changes-0.records", read_results((folder / "changes").glob("*/0"))[0])
    records.write(folder / "unipen_spread-0.records", read_results((folder / "again").glob("*/0"))[0])
    records.write(folder / "unipen_cells-0.records", read_results((folder / "cells").glob("*/0"))[0])
    records.write(folder / "unipen_cells-1.records", read_results((folder / "more_cells").glob("*/1"))[0])
    return evidence.load(folder)


def test_records_are_the_scores(studies, right):
    assert set(studies) == {"unipen", "unipen_changes", "unipen_spread", "unipen_cells"}
    found = studies["unipen"].scores
    assert {(*key, seed) for key, seeds in found.items() for seed in seeds} == set(right)
    for (label, setting, seed), counts in right.items():
        np.testing.assert_array_equal(found[label, setting][seed], counts / QUERIES)
    assert set(studies["unipen_changes"].scores) == {("pooled", ""), ("labels_own", "")}


def test_gaps_are_means_and_bootstrap_intervals(studies, right):
    gap = studies["unipen"].gaps([(("cxda", ""), ("erm_iid", ""))], worst=True)[("cxda", ""), ("erm_iid", "")]
    by_task = np.mean([right["cxda", "", s] - right["erm_iid", "", s] for s in range(3)], axis=0) * 100 / QUERIES
    assert gap.seeds == (0, 1, 2) and gap.avg[0] == pytest.approx(by_task.mean(), abs=1e-5)
    half = 1.96 * by_task.std(ddof=1) / TASKS**0.5  # the bootstrap's interval of a mean tends to the normal one
    assert gap.avg[1:] == pytest.approx((by_task.mean() - half, by_task.mean() + half), abs=0.25)
    lowest = [np.sort(right[m, "", s])[: TASKS // 10].mean() for m in ("cxda", "erm_iid") for s in range(3)]
    assert gap.w10 and gap.w10[0] == pytest.approx(
        100 / QUERIES * (np.mean(lowest[:3]) - np.mean(lowest[3:])), abs=1e-5
    )
    assert gap.w10[1] < gap.w10[0] < gap.w10[2]
    assert studies["unipen"].gaps([(("cxda", ""), ("bn", ""))]) == {}, "what is not recorded is left out"
    with pytest.raises(AssertionError, match="different tasks"):
        studies["unipen"].gaps([(("cxda", "num_domains=2"), ("erm_iid", ""))])


def test_tables_hold_what_is_recorded(studies, right):
    def points(a, b):
        return np.mean([right[*a, s] - right[*b, s] for s in range(3)]) * 100 / QUERIES

    base = ("erm_iid", "")
    lines = tables.buffers(studies).splitlines()
    (cxda,) = [line for line in lines if "`cxda`" in line]
    for n in (0, 5, 100):
        assert f"{points(('cxda', f'context={n}'), base):+.1f} (" in cxda
    assert "| 0, 5, 100 | nowhere |" in cxda and any("`bn_alpha`" in line for line in lines)
    rival = next(line for line in tables.rivals(studies).splitlines() if line.startswith("| `erm` "))
    assert f"{points(('cxda', ''), ('erm', '')):+.1f} (" in rival and "| +1.1 |" in rival and "| +0.6 |" in rival, (
        "78.3 - 77.2"
    )
    assert "**-5.0 (-5.0 to -5.0)**" in tables.changes(studies), "one answer of twenty less"
    other = next(line for line in tables.other_tasks(studies).splitlines() if "2 domains" in line)
    assert f"{points(('cxda', 'num_domains=2'), ('erm_iid', 'num_domains=2')):+.1f} (" in other
    again, one_core, fresh, of_seed_1 = spread_tables.reruns(studies).splitlines()[2:]
    assert again.startswith("| `cxda`, again | +0.0 (+0.0 to +0.0) | of a fresh install on another day, of the first |")
    assert fresh.startswith("| `cxda`, a fresh install on another day | +0.0 (+0.0 to +0.0) | of again, of the first |")
    assert of_seed_1.startswith(
        "| `cxda`, a fresh install on another day, seed 1 | **-5.0 (-5.0 to -5.0)** | of the first |"
    )
    assert one_core.startswith("| `cxda`, one core | **-5.0 (-5.0 to -5.0)** | of none |")
    (_, _, *apart) = spread_tables.over_seeds(studies).splitlines()
    assert [line.split(" | ")[0] for line in apart] == [
        "| `unipen`, `cxda` minus `erm`",
        "| `unipen`, `cxda` minus `erm_iid`",
    ]
    each = [(right["cxda", "", s] - right["erm", "", s]).mean() * 100 / QUERIES for s in range(3)]
    found = stats.ttest_1samp(each, 0).confidence_interval(0.95)
    assert f" | {', '.join(f'{x:+.1f}' for x in each)} | " in apart[0]
    assert f"{np.mean(each):+.1f} ({found.low:+.1f} to {found.high:+.1f})" in apart[0]
    spread = next(line for line in spread_tables.spread(studies).splitlines() if "`cxda`" in line)
    means = [right["cxda", "", s].mean() * 100 / QUERIES for s in range(3)]
    assert f"| {np.std(means, ddof=1):.2f} |" in spread
    assert (
        detail_tables.attention(studies)
        == detail_tables.kinds(studies)
        == detail_tables.domains(studies)
        == "Nothing is recorded yet."
    )
    for name, table in make.TABLES.items():
        if name != "rates":
            widths = {line.count("|") for line in table(studies).splitlines()}
            assert len(widths) == 1, f"{name}: all rows have equally many cells"


def test_answers_say_what_the_records_say(studies, right):
    lead = np.mean([right["cxda", "", s] - right["erm_iid", "", s] for s in range(3)]) * 100 / QUERIES
    first = answers.rivals(studies)
    assert first.startswith(
        "- **On `unipen`** (3 seeds):\n    - `cxda` is ahead of 1 of 1 rival of the paper on average, and of 1 in"
    )
    assert "\n    - It is better than `erm`: these leads are larger than what seeds move.\n" in first
    assert "The nearest rival is `erm`, +" in first and "; in the paper, on femnist, it is `bn`, +0.3." in first
    assert f"It is better than `erm_iid`, {lead:+.1f} (" in first and "Not recorded yet: `bn`, `cml`, " in first
    blended = np.mean([right["cxda", "", s] - right["bn_alpha,from=erm_iid", "", s] for s in range(3)]) * 100 / QUERIES
    assert f"It is better than `bn_alpha`, {blended:+.1f} (" in first
    each = [(right["cxda", "", s] - right["erm_iid", "", s]).mean() * 100 / QUERIES for s in range(3)]
    apart = stats.ttest_1samp(each, 0).confidence_interval(0.95)
    table, _, short = answers.summary(studies).rpartition("\n\n")
    assert table == tables.summary(studies) and short == (
        f"On `unipen` the paper's `cxda` is better than `erm_iid` ({lead:+.1f}; {apart.low:+.1f} to {apart.high:+.1f} over the seeds). Better than `erm_iid` at every number of images shown, 0 to 100: `cxda`. "
        "Better at some and worse at none: `bn_alpha`."
    )
    second = answers.buffers(studies)
    assert "Better than `erm_iid`: `cxda` at every size, the empty one too, +" in second and "`bn_alpha`" not in second
    third = answers.changes(studies)
    assert third.startswith("- **Worse** with ") and "pooled features -5.0 (-5.0 to -5.0)" in third
    assert answers.domains(studies) == answers.attention(studies) == answers.NOTHING
    sixth = answers.spread(studies)
    methods = ("erm_iid", "erm", "cxda")
    sds = [np.std([right[m, "", s].mean() * 100 / QUERIES for s in range(3)], ddof=1) for m in methods]
    assert f"{np.sqrt(np.mean(np.square(sds))):.2f} points (root mean square of 3 methods" in sixth
    assert (
        "- **Over the seeds** of `unipen` the mean difference, with a t interval, is: above zero `cxda` minus `erm` +"
        in sixth
    )
    two_seeds = 2 * 2**0.5 * np.sqrt(np.mean(np.square(sds)))
    assert two_seeds < 5 and sixth.splitlines()[-5:] == [
        "    - Again: `cxda` +0.0 (+0.0 to +0.0).",
        "    - One core: `cxda` -5.0 (-5.0 to -5.0).",
        "    - A fresh install on another day: `cxda` +0.0 (+0.0 to +0.0).",
        "    - A fresh install on another day, seed 1: `cxda` -5.0 (-5.0 to -5.0).",
        f"    - Where the weights differ, 0 of 1 differences are within {two_seeds:.1f} points, what two seeds differ by; 1 of their intervals leave out zero, "
        "so an interval over tasks says little of another training.",
    ]
    assert {f(evidence.load(Path("none"))) for f in make.ANSWERS.values()} == {answers.NOTHING}


def test_rivals_that_fine_tune_count_with_the_rate_that_validation_chose(monkeypatch, tmp_path):
    told = {"shares": {"unipen": {"ft_em": {"rate": 0.03}, "cotta": {"rate": 0.1}}}}
    monkeypatch.setattr(tune, "CHOSEN", tmp_path / "tuning.json")
    tune.CHOSEN.write_text(json.dumps(told))
    rows, rng = {0: {"recorded": {"query": "the same"}}}, np.random.default_rng(0)
    level = {"cxda": 0.7, "ft_em": 0.4, "ft_em,finetune.rate=0.03": 0.6, "ft_im,finetune.rate=0.3": 0.9, "cotta": 0.5}
    scores = {(label, ""): {0: rng.binomial(QUERIES, mean, TASKS) / QUERIES} for label, mean in level.items()}
    studies = {"unipen": evidence.Evidence("unipen", scores, dict.fromkeys(scores, rows), {})}
    means = {label: 100 * of[0].mean() for (label, _), of in scores.items()}
    lines = {line.split(" | ")[0]: line for line in tables.rivals(studies).splitlines()}
    for name, label in (
        ("| `ft_em`", "ft_em"),
        ("| `ft_em`, rate chosen", "ft_em,finetune.rate=0.03"),
        ("| `cotta`, at the rate chosen too", "cotta"),
    ):
        assert f" | **{means['cxda'] - means[label]:+.1f} (" in lines[name]
    assert not any("ft_im" in name for name in lines), "a rate that nobody chose"
    nearest = means["cxda"] - means["ft_em,finetune.rate=0.03"]
    assert f"is then `ft_em`, {nearest:+.1f} (" in answers.rivals(studies)
    # A part of them says nothing of the others.
    del scores["ft_em,finetune.rate=0.03", ""]
    studies = {"unipen": evidence.Evidence("unipen", scores, dict.fromkeys(scores, rows), {})}
    said = answers.rivals(studies)
    assert "Not tested yet at the rate that validation chose: `ft_em`." in said and "is then" not in said


def panels(figure: Figure | None) -> list[tuple[Axes, list[ErrorbarContainer]]]:
    """Each panel of a figure, and what it draws with intervals."""
    assert figure
    return [(axes, [c for c in axes.containers if isinstance(c, ErrorbarContainer)]) for axes in figure.axes]


def test_figures_show_the_gaps_of_the_tables(studies, tmp_path):
    leads = tables.leads(studies["unipen"])
    ((_, drawn),) = panels(figures.buffers(studies))
    shown = {container.get_label(): container.lines[0].get_ydata() for container in drawn}
    for label, name in (("cxda", "cxda"), ("bn_alpha,from=erm_iid", "bn_alpha")):
        assert shown[name] == pytest.approx([leads[label, n].avg[0] for n in tables.SIZES if (label, n) in leads])
    gaps = studies["unipen"].gaps([(("cxda", ""), (rival, "")) for rival in ("erm", "erm_iid")])
    ((panel, drawn),) = panels(figures.rivals(studies))
    assert [np.ravel(c.lines[0].get_xdata())[0] for c in drawn] == pytest.approx([g.avg[0] for g in gaps.values()])
    assert [label.get_text() for label in panel.get_yticklabels()] == ["erm", "erm_iid"]
    assert [len(drawn) for _, drawn in panels(figures.changes(studies))] == [2, 2], "two changes, Avg and W10%"
    figures.draw(tmp_path, studies)
    names = {path.stem for path in tmp_path.glob("*.png")}
    assert names == {"buffers", "rivals", "changes", "spread"}, "what has no record has no figure"


def test_a_verdict_needs_the_interval_and_every_seed_and_more_than_seeds_move():
    gap = evidence.Gap((1.0, 0.5, 1.5), None, (0, 1), (0.8, 1.2))
    assert gap.sign == 1 and gap._replace(avg=(-1.0, -1.5, -0.5), of_seeds=(-0.8, -1.2)).sign == -1
    assert gap._replace(of_seeds=(-0.1, 2.1)).sign == 0 and gap._replace(avg=(1.0, -0.1, 2.1)).sign == 0
    assert gap._replace(avg=(0.0, 0.0, 0.0), of_seeds=(0.0, 0.0)).sign == 0
    # Two seeds each tell 2 standard deviations of one seed apart; methods on the same weights ask for nothing.
    assert (
        [tables.verdict(gap, moved) for moved in (0.49, 0.51)]
        == [1, 0]
        == [tables.lead_verdict("bn", gap, m) for m in (0.49, 0.51)]
    )
    assert tables.lead_verdict("bn_alpha,from=erm_iid", gap, 9.0) == 1
    sizes = [0, 1, 2, 5, 10]
    said = [answers.spans(of, sizes) for of in (sizes, [0], [1, 2], [0, 2, 5], [0, 2, 10])]
    one, two, three = "at 1 to 2 images", "at 0 and 2 to 5 images", "at 0, 2 and 10 images"
    assert said == ["at every size", "at 0 images", one, two, three]


def test_what_seeds_move_is_the_data_sets_own_and_at_least_that_of_all():
    def of(store, *by_seed):
        scores, rows = (
            {s: np.full(2, x / 100) for s, x in enumerate(by_seed)},
            {s: {"avg": x} for s, x in enumerate(by_seed)},
        )
        return evidence.Evidence(store, {("bn", ""): scores}, {("bn", ""): rows}, {})

    studies = {
        "unipen": of("unipen", 50.0, 54.0),
        "cifar10_c": of("cifar10_c", 50.0, 50.0),
        "qmnist": of("qmnist", 90.0),
    }
    own = np.std([50, 54], ddof=1)
    assert tables.seeds_move(studies) == {"unipen": {"bn": pytest.approx(own)}, "cifar10_c": {"bn": pytest.approx(0)}}
    found = [tables.moved_by_seeds(studies, store) for store in ("unipen", "cifar10_c", "qmnist")]
    np.testing.assert_allclose(found, [own, own / 2**0.5, own / 2**0.5], rtol=1e-9)
    assert tables.moved_by_seeds({}, "unipen") == 0


def test_a_page_keeps_its_own_words():
    page = "a\n<!-- levels -->\nold\n<!-- end -->\nb\n<!-- spread -->\n\n<!-- end -->\n"
    filled = make.filled(page, {"levels": "| new |", "spread": "| x |"})
    assert filled == "a\n<!-- levels -->\n| new |\n<!-- end -->\nb\n<!-- spread -->\n| x |\n<!-- end -->\n"
    assert make.filled(filled, {"levels": "| new |", "spread": "| x |"}) == filled


def check_schema(entries):
    """What leaderboard.schema.json asks, as far as JSON Schema's words in it go."""
    item = json.loads((Path(make.__file__).parent / "leaderboard.schema.json").read_text())["items"]
    kinds = {"string": str, "integer": int, "number": (int, float), "array": list, "null": type(None)}
    for entry in entries:
        assert set(entry) == set(item["required"]) == set(item["properties"])
        for name, value in entry.items():
            rule = item["properties"][name]
            allowed = rule.get("oneOf", [rule])
            (fits,) = [one for one in allowed if isinstance(value, kinds[one["type"]])]
            if isinstance(value, list):
                assert fits.get("minItems", 0) <= len(value) <= fits.get("maxItems", 10**6)
                assert all(isinstance(v, kinds[fits["items"]["type"]]) for v in value)
            if isinstance(value, int | float):
                assert fits.get("minimum", 0) <= value <= fits.get("maximum", 10**9)
            if "pattern" in fits and isinstance(value, str):
                assert len(value) == 64 and set(value) <= set("0123456789abcdef")


def test_the_leaderboard_has_one_entry_a_method_and_benchmark(studies, right):
    entries = make.leaderboard(studies)
    check_schema(entries)
    assert [e["method"] for e in entries] == sorted(
        {k[0] for k in right}, key=lambda m: -next(e["avg"] for e in entries if e["method"] == m)
    )
    best = entries[0]
    assert best["avg"] == pytest.approx(
        np.mean([right[best["method"], "", s] for s in range(3)]) * 100 / QUERIES, abs=1e-3
    )
    lines = make.results_csv(studies).splitlines()
    assert len(lines) == 1 + 4 * 3 + 6 and lines[0].startswith("study,label,seed,avg,w10")


def test_the_published_study_follows_from_its_records():
    """All of its tables, README's, the leaderboard and the CSV."""
    for path, text in make.made(evidence.load()).items():
        assert path.read_text() == text, f"{path} differs from the records: python -m docs.study.make"
    check_schema(json.loads((Path(make.__file__).parent / "leaderboard.json").read_text()))
