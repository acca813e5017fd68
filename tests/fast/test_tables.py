"""Tables of results, beside the paper's; each format against a file that was read by eye.

After a wanted change of format: UPDATE_GOLDEN=1 pytest tests/fast/test_tables.py, and look at the difference.
"""

import csv
import dataclasses
import io
import os
from pathlib import Path

import numpy as np
import pytest
import scipy.stats as scipy

from cxda_jax.config.reading import read
from cxda_jax.studies import formats, tables
from cxda_jax.studies.result import distinct
from cxda_jax.studies.tables import build_tables, paired_table, paper_figures
from tests.results import PROTOCOL, write_result
from tests.results import make_result as result

GOLDEN = Path(__file__).parents[1] / "golden"


def cells(table, metric="mean_accuracy", setting=""):
    column = [(c.metric, str(c.setting)) for c in table.columns].index((metric, setting))
    return {label: row[column] for label, row in table.rows}


def build(results, against="", left_out=()):
    return {table.name: table for table in build_tables(results, against, left_out)}


def test_results_like_the_papers_give_the_papers_figures_back():
    """Three seeds of each figure's mean and standard error, through tables and CSV: all 308 come out, and agree."""
    figures, results = paper_figures(), []
    assert len(figures) == len(tables.PAPER.read_text().splitlines()) - 1 == 308
    assert figures["runtime", "iwildcam", "cotta", "", "adapt_and_infer"] == (8790.9, 335.7)
    for benchmark, method, setting in dict.fromkeys(key[1:4] for key in figures):
        found = {key[4]: value for key, value in figures.items() if key[1:4] == (benchmark, method, setting)}
        for seed in range(3):
            numbers = {m: mean + (seed - 1) * sem * np.sqrt(3) for m, (mean, sem) in found.items()}
            score = {"avg": next(v for m, v in numbers.items() if m.startswith("mean"))}
            score["w10"] = next((v for m, v in numbers.items() if m.startswith("worst10")), 0.0)
            times = {"adapt_ms": numbers.get("adapt_and_infer", 4.0) - 1.5, "predict_ms": 1.5, "num_tasks": 10_000}
            times |= {"train_minutes": numbers.get("pretrain_and_adapt", 5.0) - 1.0}  # and one for the tasks
            results.append(result(method, seed, benchmark, setting, **{**score, **times}))
    written = formats.to_csv(build_tables(results, "paper"))
    lines = [line for line in csv.DictReader(io.StringIO(written)) if line["paper_mean"]]
    assert len(lines) == 308
    for line in lines:
        key = tuple(line[k] for k in ("table", "benchmark", "method", "setting", "metric"))
        assert (float(line["paper_mean"]), float(line["paper_sem"])) == figures[key]
        assert (float(line["mean"]), float(line["sem"])) == pytest.approx(figures[key], abs=1e-4)
        assert abs(float(line["difference"])) < 1e-4 and line["agreement"] == "within s.e."


def marks(*results, table="main", setting=""):
    return next(iter(cells(build(results, "paper")[table], setting=setting).values())).marks


def three(**fields):
    return [result(seed=seed, **fields) for seed in range(3)]


def test_each_difference_to_the_paper_and_between_the_seeds_is_named():
    assert marks(*three()) == marks(*three(benchmark="tiny_imagenet_c")) == (), "the paper's own protocol"
    assert marks(*three(data_marks=["regenerated"])) == ("data: regenerated",)
    assert marks(*three(benchmark="tiny_imagenet_c", started_from="random")) == (
        "weights: from a random start; the paper's from ImageNet",)  # fmt: skip
    other = read("cifar_c:cxda", [("net.width", "16"), ("train.source", "tfdata"), ("evaluation.test_tasks", "9")])
    assert marks(*three(config=other, num_tasks=600)) == ("protocol: net.width 16 for 128, test tasks 600 for 11000",)
    # Tasks of another form are no difference where they were asked for.
    other = read("cifar_c:cxda", [(f"episode.{field}", "10") for field in ("num_domains", "per_domain", "num_query")])
    asked = [*three(), *three(config=other, setting="num_domains=10")]
    assert marks(*asked, table="num_domains", setting="num_domains=10") == ()
    assert "episode.num_domains 10 for 5" in marks(*three(config=other))[0]
    rate = result(seed=2, config=read("cifar_c:cxda", [("optimizer.learning_rate", "0.5")]))
    assert marks(*three()[:2], rate) == ("mixed: the seeds differ in optimizer.learning_rate",)
    assert marks(*three()[:2], result(seed=2, version="2")) == ("mixed: the seeds differ in their method's version",)


def test_the_papers_figures_stand_beside_the_papers_data_alone():
    for row, alone, stand_in in [
        *(({"benchmark": name}, True, True) for name in PROTOCOL),
        *(({"benchmark": name}, False, True) for name in ("glyphs", "glyphs_c", "unipen", "cifar10_c")),
        ({"benchmark": "folder", "data_name": "femnist"}, False, False),
        ({"benchmark": "femnist", "data_marks": ["regenerated"]}, False, True),
        ({"benchmark": "femnist", "smoke": True}, False, True),
    ]:
        for against, wanted in {"": False, "paper": alone, "paper_stand_ins": stand_in}.items():
            found = build_tables(three(**row), against)
            assert any(cell.paper for t in found for _, line in t.rows for cell in line if cell) == wanted, row


def test_two_stores_of_one_name_are_two_benchmarks_and_so_are_smoke_runs():
    mine, of = {"benchmark": "folder", "data_name": "mine"}, {"aaaaaaaa11": 10.0, "aaaaaaaa22": 90.0}
    results = [result(seed=s, avg=avg, data_hash=digest, **mine) for digest, avg in of.items() for s in (0, 1)]
    kept, faults = distinct([*results, result(avg=50.0, data_hash="c", benchmark="folder", data_name="yours")])
    assert len(kept) == 5 and not faults, "the same seed of another store is another result"
    found = [table for table in build_tables(kept) if table.name == "main"]
    assert {t.benchmark: cells(t)["cxda"].mean for t in found} == {
        "mine [aaaaaaaa11]": 10.0, "mine [aaaaaaaa22]": 90.0, "yours": 50.0}  # fmt: skip
    assert {t.benchmark for t in build_tables([result(smoke=True), result()])} == {"cifar_c", "cifar_c (smoke)"}


def test_unfinished_seeds_are_marked_and_in_no_mean():
    whole = [result(seed=s, avg=50.0 + s, steps=2880, reached_step=2880) for s in (0, 1)]
    late = result(seed=2, avg=5.0, steps=2880, reached_step=500)
    cell = cells(build(whole, left_out=[late])["main"])["cxda"]
    assert (cell.mean, cell.seeds) == (50.5, (0, 1))
    assert cell.marks == ("1 of 3 seeds unfinished and left out: step 500 of 2880",)
    cell = cells(build([*whole, late])["main"])["cxda"]
    assert (cell.seeds, cell.marks) == ((0, 1, 2), ("1 of 3 seeds unfinished: step 500 of 2880",))


def test_the_first_finished_result_of_a_seed_counts_and_the_others_are_named():
    late = dataclasses.replace(result(steps=2880, reached_step=500), folder=Path("late"))
    other = dataclasses.replace(result(), folder=Path("other"))
    kept, faults = distinct([late, result(), other, result(seed=1)])
    assert [str(r.folder) for r in kept] == ["runs/cifar_c/cxda/0", "runs/cifar_c/cxda/1"]
    said = "left out, since runs/cifar_c/cxda/0 has the same method, setting and seed"
    assert faults == [f"other: {said}", f"late: {said}"]


def stored(folder, method, seed, hits, rows, query=0, **row):
    """A result whose predictions are right at `hits` [tasks, queries], of the tasks with these support rows."""
    made = result(method, seed, **row)
    return write_result(made, folder / method / str(seed), np.zeros_like(hits), 1 - hits, rows, rows + query)


def test_paired_differences_match_scipy(tmp_path):
    rng, rows = np.random.default_rng(0), np.arange(400).reshape(100, 4)
    chances = {("erm", 0): 0.5, ("erm", 1): 0.5, ("cxda", 0): 0.7, ("cxda", 1): 0.7, ("bn", 1): 0.71}
    hits = {key: (rng.random((100, 20)) < chance).astype(int) for key, chance in chances.items()}
    results = [stored(tmp_path, m, s, h, rows) for (m, s), h in hits.items()]
    results.append(stored(tmp_path, "sla", 0, hits["erm", 0], rows, query=1))
    results.append(stored(tmp_path, "cml", 0, hits["erm", 0], rows + 1, query=-1))
    table, faults = paired_table(results)
    said = "not in the paired differences, since its tasks are not those of the others"
    assert sorted(faults) == [f"{tmp_path}/{method}/0: {said}" for method in ("cml", "sla")]
    assert [label for label, _ in table.rows] == ["erm", "bn", "cxda"]
    text = formats.to_markdown(table)
    for a, b, seeds, bold in [("cxda", "erm", (0, 1), True), ("cxda", "bn", (1,), False)]:
        cell = cells(table, f"mean_minus_{b}")[a]
        each = 100 * np.mean([hits[a, s].mean(1) - hits[b, s].mean(1) for s in seeds], axis=0)
        interval = scipy.bootstrap((each,), np.mean, method="percentile", n_resamples=5000, rng=0).confidence_interval
        assert cell.seeds == seeds and cell.mean == pytest.approx(each.mean())
        np.testing.assert_allclose(cell.interval, interval, atol=0.25)  # in steps of 0.05
        assert (f"**{cell.mean:+.1f} [" in text) == bold != (cell.interval[0] <= 0 <= cell.interval[1])


def test_formats():
    """Of a small study whose cells show all there is to show."""
    glyphs = read("femnist:cxda", [("net.width", "16")])
    results = [result(m, s, "glyphs", avg=60 + 5 * i + s, w10=40.0 + i, config=glyphs, num_tasks=600)
               for i, m in enumerate(["erm", "bn", "cxda", "cxda_supervised", "ft_em"]) for s in range(3)]  # fmt: skip
    results.append(result("erm_iid", 0, "glyphs", config=glyphs, avg=60.04))
    results.append(result("cxda_p2p", 0, "glyphs", config=glyphs))
    results += [result(m, s, "glyphs", f"num_domains={n}", avg=80 - n, config=glyphs)
                for m in ("bn", "cxda") for s in range(3) for n in (2, 10) if (m, n) != ("bn", 2)]  # fmt: skip
    results += three(avg=72.1, w10=49.0)
    found, alone = build_tables(results, "paper_stand_ins"), build_tables(results)[:3]
    kinds = {"md": formats.to_markdown, "html": lambda t: formats.to_html(t, "#{}".format)}
    texts = {f"tables.{kind}": "\n".join(map(write, found)) for kind, write in kinds.items()}
    texts |= {"tables.csv": formats.to_csv(found), "alone.md": "\n".join(map(formats.to_markdown, alone))}
    for name, text in texts.items():
        if os.environ.get("UPDATE_GOLDEN"):
            (GOLDEN / name).write_text(text)
        assert text == (GOLDEN / name).read_text(), name
