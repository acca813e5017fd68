"""Context curves: which images have arrived, how the curves are paired and measured, and what the command leaves."""

import csv
import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.stats

from cxda_jax import metrics
from cxda_jax.config import read
from cxda_jax.data.episodes import Context, EpisodeSpec, check_context, sample_plans
from cxda_jax.experiment import build
from cxda_jax.report import contexts as report
from cxda_jax.report import formats, making, plots
from cxda_jax.report.tables import build_tables
from cxda_jax.study.comparing import paired_differences
from cxda_jax.study.contexts import AREA, area_weights, differences, draw_samples, find_curves, printed
from cxda_jax.study.identity import read_config
from cxda_jax.study.results import by_store, read_results
from cxda_jax.study.runs import restore_best
from cxda_jax.study.settings import Setting, asked, parse
from cxda_jax.types import Images
from tests.commands import command
from tests.lines import refused
from tests.results import edit, make_result, write_result
from tests.test_plots import check_readable, drawn

# Which images have arrived

SPEC = EpisodeSpec(num_domains=3, per_domain=4, num_query=5)
USUAL = 12  # support images
OFFSETS = np.cumsum([0, 30, 33, 40, 25, 0, 31])  # one domain that is not drawn is empty
DOMAINS = np.array([0, 1, 2, 5])
OWNER = np.repeat(np.arange(6), np.diff(OFFSETS))
ORDERS = pytest.mark.parametrize("by_domain", [False, True], ids=["mixed", "by_domain"])


def plans(size=None, by_domain=False, tasks=range(40), seed=3):
    context = None if size is None else Context(size, by_domain)
    return sample_plans(SPEC, OFFSETS, DOMAINS, seed, tasks, 2, context)


@ORDERS
def test_a_context_is_the_beginning_of_every_larger_one_and_queries_stay(by_domain):
    usual, largest = plans(), plans(60, by_domain)
    for size in (0, 1, 2, 5, 11, 12, 13, 24, 30, 59):
        plan = plans(size, by_domain)
        assert plan.support.dtype == plan.query.dtype == np.int32
        np.testing.assert_array_equal(plan.support, largest.support[:, :size])
        np.testing.assert_array_equal(plan.query, usual.query)


@ORDERS
def test_a_round_is_the_usual_support_and_later_ones_are_new_images_of_its_domains(by_domain):
    usual, largest = plans(), plans(60, by_domain)
    np.testing.assert_array_equal(np.sort(largest.support[:, :USUAL]), np.sort(usual.support))
    for support, query, first in zip(largest.support, usual.query, usual.support, strict=True):
        assert len({*support, *query}) == 60 + 5, "no image twice, and none among the queries"
        for round_of in support.reshape(5, USUAL):
            np.testing.assert_array_equal(np.sort(OWNER[round_of]), np.sort(OWNER[first]))
    other = plans(60, not by_domain).support.reshape(-1, 5, USUAL)
    np.testing.assert_array_equal(np.sort(other), np.sort(largest.support.reshape(-1, 5, USUAL)))


def test_domain_after_domain_keeps_the_order_of_the_task():
    usual = plans()
    np.testing.assert_array_equal(plans(USUAL, True).support, usual.support)
    later = OWNER[plans(3 * USUAL, True).support[:, USUAL:]].reshape(-1, 2, USUAL)
    np.testing.assert_array_equal(later, np.stack([OWNER[usual.support]] * 2, axis=1))


def test_mixed_images_come_in_uniform_order_so_a_small_context_may_lack_the_queries_domain():
    count = 1500
    usual, plan = plans(tasks=range(count)), plans(2, tasks=range(count))
    places = np.argmax(usual.support[:, :, None] == plan.support[:, None, :], axis=1)  # of the first two, in the plan
    for drawn_at in (places[:, 0], places[:, 1]):
        assert scipy.stats.chisquare(np.bincount(drawn_at, minlength=USUAL)).pvalue > 1e-9
    pairs = np.bincount(places @ [USUAL, 1], minlength=USUAL**2).reshape(USUAL, USUAL)
    assert not np.diag(pairs).any()
    assert scipy.stats.chisquare(pairs[~np.eye(USUAL, dtype=bool)]).pvalue > 1e-9
    lacking = (OWNER[plan.support] != OWNER[plan.query[:, :1]]).all(1).mean()
    expected = 8 / 12 * 7 / 11  # neither is of the queries' domain
    assert abs(lacking - expected) < 5 * np.sqrt(expected * (1 - expected) / count)


@ORDERS
def test_a_context_is_the_same_in_whatever_company(by_domain):
    together = plans(30, by_domain)
    for task in (0, 17, 39):
        alone = plans(30, by_domain, tasks=[task])
        np.testing.assert_array_equal(alone.support[0], together.support[task])


def test_contexts_that_the_domains_cannot_give_are_refused(fixed_store):
    """Test domains have 30 images, of which 5 are queries: 6 rounds of 4."""
    most = 6 * USUAL
    check_context(Context(most), SPEC, fixed_store, "test")
    assert (
        sample_plans(SPEC, fixed_store.offsets, fixed_store.domains("test"), 0, [0], 0, Context(most)).support.max() > 0
    )
    said = rf"a context of {most + 1} images takes 28 of a domain beside 5 queries, and domain 'd6' has 30; .* most {most}$"
    with refused(said):
        check_context(Context(most + 1, True), SPEC, fixed_store, "test")
    full = SPEC._replace(per_domain=25)
    check_context(Context(75), full, fixed_store, "test")
    with refused("ask for at most 75"):
        check_context(Context(76), full, fixed_store, "test")


# Settings and rows


def test_settings_are_read_as_they_are_written():
    for kind, by_domain in (("context", False), ("by_domain", True)):
        (setting,) = asked(kind, ["0"])
        assert setting.context == Context(0, by_domain) and not setting.changes
        assert parse(str(setting)) == setting == Setting(kind, 0)
        assert setting.left_out_of(f"bn,batch_norm.momentum=0.5,{setting}") == "bn,batch_norm.momentum=0.5"
        with refused("--context=-1: give whole numbers of at least 0, such as 0,10"):
            asked(kind, ["-1"])
    assert Setting("support_size", 5).context is None


def write(folder, method, kind, size, chance, seed=0, tasks=60, noise=0, **row):
    """A result in a context, whose predictions are right with a given chance: the same draw for all, so they are alike."""
    rng = np.random.default_rng(seed)
    hits = rng.random((tasks, 5)) * 0.7 + np.random.default_rng((noise, size, seed)).random((tasks, 5)) * 0.3 < chance
    query, support = np.arange(tasks * 5).reshape(tasks, 5), np.full((tasks, size), size)
    setting = f"{kind}={size}" if kind else ""
    run = folder / method / str(seed)
    made = make_result(method, seed, "glyphs", setting, config=read("glyphs:cxda"), steps=9, reached_step=9, **row)
    if not run.exists():
        write_result(made, run, np.zeros_like(query), np.zeros_like(query), query, query)
        (run / "result.json").unlink()
    arrays = np.zeros_like(query), 1 - hits.astype(int), support, query
    return write_result(made, run / made.row["label"], *arrays, run=run)


SIZES = (0, 5, 100, 200)
CHANCES = {"bn": (0.60, 0.50, 0.64, 0.66), "cxda_loo": (0.58, 0.66, 0.72, 0.74)}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Results of three methods in contexts of four sizes, two seeds each, as evaluations leave them."""
    folder = tmp_path_factory.mktemp("contexts")
    for seed in (0, 1):
        write(folder, "erm_iid", "context", 0, 0.62, seed, noise=7, uses_support=False)
        for noise, (method, chances) in enumerate(CHANCES.items()):
            for size, chance in zip(SIZES, chances, strict=True):
                write(folder, method, "context", size, chance, seed, noise=noise, uses_support=True)
        write(folder, "bn", "", 9, 0.64, seed)
    results, faults = read_results(folder.glob("*/*"))
    assert not faults
    return by_store(results)["glyphs"]


def test_rows_are_read_back(study, tmp_path):
    found = {(r.label, r.setting.kind, r.setting.number) for r in study}
    expected = {(m, "context", n) for m in CHANCES for n in SIZES} | {("erm_iid", "context", 0), ("bn", "", 0)}
    assert found == expected and {r.row["seed"] for r in study} == {0, 1}
    made = write(tmp_path, "bn", "by_domain", 5, 0.5)
    edit(made.folder / "result.json", uses_support="no")
    results, (fault,) = read_results([made.run])
    assert not results and "uses_support='no', expected true or false" in fault


# Measures


def test_the_worst_tenth_of_bootstrap_samples_is_that_of_repeated_tasks():
    scores = np.random.default_rng(0).integers(0, 6, (3, 47)) / 5
    found = metrics.bootstrap_worst_decile(scores, 200)
    assert found.shape == (3, 200)
    counts = np.random.default_rng(0).multinomial(47, np.full(47, 1 / 47), 100)  # the first hundred samples
    for row, drawn_row in zip(scores, found, strict=True):
        expected = [metrics.worst_decile(np.repeat(row, times)) for times in counts]
        np.testing.assert_allclose(drawn_row[:100], expected, atol=1e-12)


@pytest.mark.parametrize("sizes", [(0, 100), (0, 1, 2, 5, 10, 20, 50, 100, 200, 500), (0, 3, 100)])
def test_the_area_is_the_mean_over_the_logarithm(sizes):
    weights, inside = area_weights(sizes), [n for n in sizes if n <= 100]
    assert list(weights) == inside and sum(weights.values()) == pytest.approx(1)
    values = np.random.default_rng(0).random(len(inside))
    area = sum(w * v for w, v in zip(weights.values(), values, strict=True))
    x = np.log1p(inside)
    assert area == pytest.approx(scipy.integrate.trapezoid(values, x) / np.log(101))
    straight = sum(w * (2 + 3 * np.log1p(n)) for n, w in weights.items())
    assert straight == pytest.approx(2 + 3 * np.log(101) / 2)


def test_there_is_no_area_without_its_ends():
    assert area_weights([0, 10, 200]) == area_weights([1, 100]) == area_weights([]) == {}


def test_what_uses_no_support_is_alike_at_all_sizes_and_others_have_their_own_area(study):
    curves = {curve.label: curve for curve in find_curves(study, "context")}
    assert list(curves["bn"].points) == list(SIZES) and curves["erm_iid"].constant and not curves["bn"].constant
    rows = {(r.label, r.setting.number, r.row["seed"]): r.row["avg"] for r in study if r.setting.kind}
    for size in (*SIZES, AREA):
        assert curves["erm_iid"].level(size, "avg") == {s: rows["erm_iid", 0, s] for s in (0, 1)}
    for seed, area in curves["bn"].level(AREA, "avg").items():
        values = [rows["bn", n, seed] for n in (0, 5, 100)]
        assert area == pytest.approx(scipy.integrate.trapezoid(values, np.log1p([0, 5, 100])) / np.log(101))
    assert curves["bn"].level(3, "avg") == {}
    assert find_curves([r for r in study if r.label == "erm_iid"], "context") == [], "nothing that could vary"
    assert find_curves(study, "by_domain") == []


def test_differences_are_those_of_any_paired_results_and_of_scipys_bootstrap(study):
    curves = find_curves(study, "context")
    samples = draw_samples(curves)
    assert not samples.faults
    for against, base in (("", "{},context=0"), ("erm_iid", "erm_iid,context=0")):
        found = differences(curves, samples, against)
        assert {label for label, _ in found} == set(CHANCES)
        assert {n for _, n in found} == {*SIZES, AREA} - ({0} if not against else set())
        for (label, size), scores in found.items():
            if size == AREA:
                continue
            pair = f"{label},context={size}", base.format(label)
            theirs = paired_differences([r for r in study if r.row["label"] in pair], pair[1])[0][pair]
            np.testing.assert_allclose(scores["avg"][:3], theirs[:3], atol=1e-9)
            assert scores["avg"].seeds == scores["w10"].seeds == theirs.seeds == (0, 1)
    hits = [[samples.scores[f"{m},context=0", s] for s in (0, 1)] for m in ("cxda_loo", "erm_iid")]

    def statistic(mine0, mine1, theirs0, theirs1, axis):
        def deciles(of):
            return np.sort(of, axis=axis)[..., :6].mean(axis)

        return 50 * (deciles(mine0) + deciles(mine1) - deciles(theirs0) - deciles(theirs1))

    theirs = scipy.stats.bootstrap(
        (*hits[0], *hits[1]), statistic, paired=True, method="percentile", n_resamples=4000, rng=0
    )
    ours = found["cxda_loo", 0]["w10"]
    point = np.mean([r.row["w10"] * (1 if r.label == "cxda_loo" else -1) for r in study
                     if r.label in ("cxda_loo", "erm_iid") and r.setting.number == 0]) * 2  # fmt: skip
    assert ours.mean == pytest.approx(point)
    np.testing.assert_allclose((ours.low, ours.high), theirs.confidence_interval, atol=1.0)  # in steps of 0.33


def test_the_area_of_differences_is_that_of_the_levels(study):
    curves = find_curves(study, "context")
    samples, by_label = draw_samples(curves), {curve.label: curve for curve in curves}
    found = differences(curves, samples, "erm_iid")
    for label, (score, _) in [(label, pair) for label in CHANCES for pair in (("avg", 0), ("w10", 1))]:
        mine, theirs = (list(by_label[name].level(AREA, score).values()) for name in (label, "erm_iid"))
        d = found[label, AREA][score]
        assert d.mean == pytest.approx(np.mean(mine) - np.mean(theirs)) and d.low < d.mean < d.high


def test_results_in_contexts_pair_with_the_usual_ones_and_other_tasks_do_not(study, tmp_path):
    measured, tasks, faults = paired_differences([r for r in study if r.label == "bn"], "bn")
    assert tasks == 60 and not faults and {a for a, _ in measured} == {f"bn,context={n}" for n in SIZES}
    other = write(tmp_path, "cml", "context", 5, 0.5, uses_support=True)
    with np.load(other.folder / "predictions.npz") as stored:
        np.savez(other.folder / "predictions.npz", **{**stored, "query": stored["query"] + 1})
    samples = draw_samples(find_curves([*study, other], "context"))
    assert len(samples.faults) == 1 and "cml,context=5: not in the paired differences" in samples.faults[0]


# What is shown


def test_the_command_prints_a_table_and_differences(study):
    text = "\n".join(printed(study, "erm_iid"))
    title, head, *lines = text.splitlines()
    assert title == "glyphs: Avg/W10% against the number of support images, arriving mixed"
    assert head.split() == ["method", "0", "5", "100", "200", "area"]
    row = next(line.split() for line in lines if line.startswith("bn "))
    means = [np.mean([r.row[f] for r in study if r.row["label"] == "bn,context=5"]) for f in ("avg", "w10")]
    assert row[2] == "{:.1f}/{:.1f}".format(*means)
    constant = next(line.split() for line in lines if line.startswith("erm_iid "))
    assert len(constant) == 6 and len(set(constant[1:])) == 1
    found = differences(curves := find_curves(study, "context"), draw_samples(curves), "erm_iid")
    d = found["bn", 5]
    said = "  ".join(
        f"{name} {d[s].mean:+.2f} [{d[s].low:+.2f}, {d[s].high:+.2f}]" for s, name in (("avg", "Avg"), ("w10", "W10%"))
    )
    assert f"\nbn,context=5 - erm_iid  {said}  seeds 0,1\n" in text
    assert text.count(" - erm_iid  ") == 2 * 5
    late = [r._replace(row={**r.row, "reached_step": 4}) if (r.label, r.row["seed"]) == ("bn", 1) else r for r in study]
    said = "\n".join(printed(late, "erm_iid"))
    assert "bn,context=5 - erm_iid" in said and "seeds 0\n" in said
    assert "left out: glyphs, bn,context=5 seed 1: unfinished, at step 4 of 9" in said


def test_tables_of_contexts(study):
    (measured,), faults = report.measure(study)
    assert not faults
    tables = {(t.name, t.columns[0].metric.partition("_")[0]): t for t in report.context_tables(measured)}
    kinds = ("context", "context_minus_none", "context_minus_erm_iid")
    assert list(tables) == [(kind, metric) for metric in ("mean", "worst10") for kind in kinds]
    level = tables["context", "mean"]
    assert [c.title for c in level.columns] == ["0", "5", "100", "200", "area"]
    assert [label for label, _ in level.rows] == ["erm_iid", "bn", "cxda_loo"], "in the order of all tables"
    cells = dict(level.rows)
    values = [r.row["avg"] for r in study if r.row["label"] == "bn,context=100"]
    assert (cells["bn"][2].mean, cells["bn"][2].sem) == pytest.approx((np.mean(values), scipy.stats.sem(values)))
    assert len({cell.mean for cell in cells["erm_iid"]}) == 1
    assert any("One test stands for all columns of erm_iid" in note for note in level.notes)
    gains, leads = tables["context_minus_none", "mean"], tables["context_minus_erm_iid", "worst10"]
    assert [c.title for c in gains.columns] == ["5", "100", "200", "area"]
    assert [label for label, _ in gains.rows] == [label for label, _ in leads.rows] == ["bn", "cxda_loo"]
    assert all(
        cell.interval[0] <= cell.mean <= cell.interval[1] for _, row in (*gains.rows, *leads.rows) for cell in row
    )
    written = formats.to_csv(tables.values())
    assert "\ncontext,glyphs,bn,context=5,mean_accuracy,%," in written
    assert "\ncontext_minus_erm_iid,glyphs,cxda_loo,,area_worst10_accuracy_minus_erm_iid,points," in written
    (late,) = [r for r in study if r.row["label"] == "bn,context=5" and r.row["seed"] == 0]
    late = late._replace(row={**late.row, "seed": 2, "reached_step": 4})
    level, gains, _ = (dict(table.rows)["bn"] for table in report.context_tables(measured, [late])[:3])
    assert level[1].marks == gains[0].marks == ("1 of 3 seeds unfinished and left out: step 4 of 9",)
    assert level[0].marks == level[2].marks == ()


def test_contexts_are_in_no_other_table_or_figure(study):
    usual = [r for r in study if not r.setting.kind]
    assert build_tables(study) == build_tables(usual)
    styles = plots.method_styles(study)
    assert set(styles) == set(plots.STYLES)
    for results in (study, usual):
        assert list(drawn(plots.accuracy_time(results, styles).axes[0])) == ["bn"]
        assert plots.variable(results, "support_size", styles) is None
    assert report.measure(usual) == ([], [])


def test_the_figure_of_contexts(study):
    (measured,), _ = report.measure(study)
    styles = plots.method_styles(study)
    (drawing,) = report.drawings([measured], styles)
    assert drawing.name == "context" and drawing.title == "context curves, arriving mixed"
    check_readable(drawing.figure)
    axes = np.array(drawing.figure.axes).reshape(3, 2)
    assert list(axes[0, 0].get_xticks()) == list(SIZES) and axes[0, 0].get_xlim()[0] < 0
    pixels = axes[0, 0].transData.transform([(n, 50) for n in (0, 9, 99)])[:, 0]  # even steps of log(1 + n)
    assert pixels[2] - pixels[1] == pytest.approx(pixels[1] - pixels[0])
    for column, score in enumerate(("avg", "w10")):
        levels = drawn(axes[0, column])
        assert list(levels) == ["erm_iid", "bn", "cxda_loo"]
        assert list(levels["erm_iid"].x) == list(SIZES) and len(set(levels["erm_iid"].y)) == 1
        values = [np.mean([r.row[score] for r in study if r.row["label"] == f"bn,context={n}"]) for n in SIZES]
        np.testing.assert_allclose(levels["bn"].y, values)
        for row, found, first in ((1, measured.gains, 1), (2, measured.leads, 0)):
            lines = drawn(axes[row, column])
            assert list(lines) == ["bn", "cxda_loo"] and list(lines["bn"].x) == list(SIZES[first:])
            expected = [found["bn", n][score] for n in SIZES[first:]]
            np.testing.assert_allclose(np.array(lines["bn"].y, float), [d.mean for d in expected])
            ends = np.array([segment[:, 1] for segment in lines["bn"].bars.get_segments()])
            np.testing.assert_allclose(ends, [(d.low, d.high) for d in expected], atol=1e-9)
    alone = report.measure([r for r in study if r.label == "bn"])[0]
    (drawing,) = report.drawings(alone, styles)
    assert len(drawing.figure.axes) == 4, "without a rival there is nothing to lead"


def test_a_report_has_tables_and_a_figure_for_each_order(study, tmp_path, capsys):
    for n, chance in ((0, 0.5), (100, 0.6)):
        write(tmp_path / "runs", "bn", "by_domain", n, chance, uses_support=True)
    other, faults = read_results((tmp_path / "runs").glob("*/*"))
    making.make_report(tmp_path / "report", [*study, *other], faults, str(tmp_path), "")
    assert "left out" not in capsys.readouterr().out
    names = {path.stem for path in (tmp_path / "report" / "figures").iterdir()}
    assert names == {"glyphs_accuracy_time", "glyphs_learning_curves", "glyphs_context", "glyphs_by_domain"}
    cells = list(csv.DictReader((tmp_path / "report" / "tables.csv").read_text().splitlines()))
    assert {cell["table"] for cell in cells} == {
        "main", "runtime", "context", "context_minus_none", "context_minus_erm_iid", "by_domain", "by_domain_minus_none",
    }  # fmt: skip
    assert {cell["setting"] for cell in cells if cell["table"] == "by_domain"} == {"by_domain=0", "by_domain=100", ""}


# The command


def test_runs_are_tested_in_contexts(smoke, erm_run, tmp_path):
    """Each n has the queries of the usual test, and n = 0 the answers of the method without any support."""
    for run in (smoke[0] / "run", erm_run):  # other tests share these
        shutil.copytree(run, tmp_path / run.name)
    data_dir, folder, erm_run = smoke[0] / "data", tmp_path, tmp_path / "erm"
    options = (f"--data_dir={data_dir}", "--num_tasks=4")
    output = command("evaluate", f"--runs={folder}/run,{erm_run}", "--context=0,5,100,200", "--against=erm", *options)
    assert {p.name for p in erm_run.iterdir() if "context" in p.name} == {"erm,context=0"}, "it uses no support"
    stored = {n: dict(np.load(folder / "run" / f"cxda,context={n}" / "predictions.npz")) for n in (0, 5, 100, 200)}
    stored["erm"] = dict(np.load(erm_run / "erm,context=0" / "predictions.npz"))
    usual = dict(np.load(folder / "run" / "predictions.npz"))
    for n, arrays in stored.items():
        for name in ("query", "labels"):
            np.testing.assert_array_equal(arrays[name], usual[name][:4])
        if n != "erm":
            assert arrays["support"].shape == (4, n)
            np.testing.assert_array_equal(arrays["support"], stored[200]["support"][:, :n])
    np.testing.assert_array_equal(np.sort(stored[100]["support"]), np.sort(usual["support"][:4]))
    # The order of images only changes rounding.
    assert (stored[100]["predictions"] == usual["predictions"][:4]).mean() > 0.95
    np.testing.assert_array_equal(stored["erm"]["predictions"], np.load(erm_run / "predictions.npz")["predictions"][:4])
    experiment = build(read_config(folder / "run"), data_dir, splits=("test",))
    variables, _ = restore_best(folder / "run", experiment)
    empty = Images(jnp.zeros((0, 28, 28, 1), jnp.uint8), jnp.zeros(0, jnp.int32))
    adapted = experiment.method.adapt(variables, empty, jax.random.key(0))
    queries = Images(jnp.asarray(experiment.store.images[usual["query"][:4].ravel()]), jnp.zeros(80, jnp.int32))
    alone = np.asarray(experiment.method.predict(adapted, queries).argmax(-1)).reshape(4, 20)
    np.testing.assert_array_equal(stored[0]["predictions"], alone)
    assert (stored[0]["predictions"] != stored[100]["predictions"]).any(), "nothing that could be told apart"
    row = json.loads((folder / "run" / "cxda,context=5" / "result.json").read_text())
    assert (row["label"], row["setting"], row["uses_support"], row["num_tasks"]) == (
        "cxda,context=5",
        "context=5",
        True,
        4,
    )
    assert "corrected" not in row and not (folder / "run" / "cxda,context=5" / "attention.npz").exists()
    assert "\ncxda,context=5 - erm  Avg " in output and "\ncxda,area - erm  Avg " in output
    assert output.count("(first time only)") == 5, "each n is a program"
    error = command("evaluate", f"--runs={folder}/run", "--context=501", *options, code=2)
    assert error.count("\n") == 1 and "error: a context of 501 images takes 120 of a domain beside 20 queries" in error
    error = command("evaluate", f"--runs={folder}/run", "--arrival=by_domain", *options, code=2)
    assert error.count("\n") == 1 and "--arrival=by_domain orders the images of --context; give it too" in error


def test_images_arrive_domain_after_domain_and_runs_share_a_program(smoke, tmp_path):
    folder = smoke[0]
    for name in "ab":
        shutil.copytree(folder / "run", tmp_path / name)
    options = (f"--data_dir={folder}/data", "--num_tasks=2", "--context=30,2", "--arrival=by_domain")
    output = command("evaluate", f"--runs={tmp_path}/[ab]", *options)
    usual = dict(np.load(folder / "run" / "predictions.npz"))
    for name, size in itertools.product("ab", (2, 30)):
        with np.load(tmp_path / name / f"cxda,by_domain={size}" / "predictions.npz") as stored:
            np.testing.assert_array_equal(stored["support"], usual["support"][:2, :size])
    assert output.count("(first time only)") == 2 and "arriving domain after domain" in output
