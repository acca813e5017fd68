"""Reports from files: everything is shown; what is broken is named and does not stop the rest."""

import html
import itertools
import re
import shutil

import numpy as np
import pytest

from cxda_jax.config.reading import read
from cxda_jax.studies import reporting
from cxda_jax.studies.folders import read_results
from cxda_jax.training.experiment import build
from tests.pages import embedded
from tests.results import edit, make_result, write_result

METHODS = {"erm": 0.4, "bn": 0.5, "cxda": 0.7, "cxda_supervised": 0.6, "cxda_p2p": 0.65, "ft_em": 0.3}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study whose predictions are right with a given chance; and where the data lie."""
    root, data = tmp_path_factory.mktemp("study"), str(tmp_path_factory.mktemp("data"))
    config = read("glyphs:cxda,smoke")
    experiment = build(config, data, splits=("test",))
    store, plan = experiment.store, experiment.task_plans("test")(range(6))
    rng, domains, labels = np.random.default_rng(0), store.row_domains(), store.labels[plan.query]
    for (method, chance), seed in itertools.product(METHODS.items(), (0, 1)):
        run, attention = root / ("erm" if method == "ft_em" else method) / str(seed), {}
        if method.startswith("cxda"):
            support, query = domains[plan.support], domains[plan.query]
            same = query[:, :, None, None] == support[:, None, None, :]
            raw = rng.random((*query.shape, 8, support.shape[1])) * np.where(same, 2, method != "cxda_supervised")
            weights = (raw / raw.sum(-1, keepdims=True)).astype(np.float16)
            attention = {"weights": weights, "support_domain": support, "query_domain": query}
        predictions = np.where(rng.random(labels.shape) < chance, labels, (labels + 1) % 62)
        row = {"data_hash": store.sha256, "data_name": "glyphs", "smoke": True}
        result = make_result(method, seed, "glyphs", config=config, **row)
        folder = run / "ft_em" if method == "ft_em" else run
        write_result(result, folder, labels, predictions, **plan._asdict(), run=run, **attention)
    return root, data


def report(root, data, out, against="paper_stand_ins", unfinished=False):
    results, faults = read_results(p.parent for p in root.glob("*/*/config.json"))
    reporting.make_report(out, results, faults, data, against, unfinished)
    return (out / "report.html").read_text()


def test_a_report_holds_all_there_is(study, tmp_path, capsys):
    root, data = study
    page = report(root, data, tmp_path)
    assert f"\n{tmp_path}/report.html: 12 results, 5 tables, 4 figures, " in capsys.readouterr().out
    assert page.count("<figure ") == 4 and page.count('<table class="sortable">') == 6
    assert len(list((tmp_path / "figures").iterdir())) == 8
    assert "paper 78.3 ± 0.0" in page and 'id="run-11"' in page and "Faults" not in page
    assert r"| cxda\_supervised |" in (tmp_path / "tables.md").read_text()
    tasks = embedded(page)
    assert [task["name"] for task in tasks[:2]] == [f"glyphs (smoke): task {i} (cxda, seed 0)" for i in (1, 2)]
    assert len(tasks) == 10
    stored, answers = dict(np.load(root / "cxda" / "0" / "predictions.npz")), dict(tasks[0]["query"]["answers"])
    right = [a == label for a, label in zip(answers["cxda"], tasks[0]["query"]["labels"], strict=True)]
    assert set(answers) == set(METHODS) and right == (stored["predictions"][0] == stored["labels"][0]).tolist()


def few(study, folder, *left):
    """A copy of the study with few methods and nothing to explore, which is drawn in no time."""
    return shutil.copytree(study[0], folder, ignore=shutil.ignore_patterns("cxda_*", "ft_em", "attention*", *left))


def test_names_of_files_stay_in_the_reports_folder(study, tmp_path):
    root, out = few(study, tmp_path / "a" / "b" / "study"), tmp_path / "a" / "b" / "r"
    hostile = ("../../../X", "/etc/passwd", "<b>&\"'$\\alpha_{", "a" * 300)
    for name, path in zip(itertools.cycle(hostile), sorted(root.rglob("result.json"))):
        method = path.parent.parent.name
        edit(path, benchmark=name, data_name=name, **({"label": f"{method},{name}"} if method == "cxda" else {}))
    before = {path for path in tmp_path.rglob("*") if root not in path.parents}
    page = report(root, study[1], out)
    written = {path for path in tmp_path.rglob("*") if root not in path.parents} - before - {out}
    assert {path.parent for path in written} == {out, out / "figures"}
    drawn = [path for path in written if path.parent.name == "figures"]
    assert len(drawn) == 2 * page.count("<figure ") >= 12, "each figure has its own files"
    assert all(re.fullmatch(r"[A-Za-z0-9_][\w.,=+-]{0,110}\.(png|svg)", path.name) for path in drawn)
    assert html.escape(hostile[2]) in page and "<b>&" not in page
