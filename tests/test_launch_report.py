"""launch.report: everything from files; what is broken is named and does not stop the rest."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cxda_jax import metrics
from cxda_jax.analysis.results import read_results
from cxda_jax.experiment import build
from launch import cli
from launch.report import make_report
from tests.test_report import embedded
from tests.test_tables import result as make_row

ROOT = Path(__file__).parent.parent
TASKS = 6
METHODS = {"erm": 0.4, "bn": 0.5, "cxda": 0.7, "cxda_supervised": 0.6, "cxda_p2p": 0.65, "ft_em": 0.3}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study as evaluations leave it, of predictions that are right with a given probability; and where the data lie."""
    root, data = tmp_path_factory.mktemp("study"), str(tmp_path_factory.mktemp("data"))
    config = cli.resolve(cli.load_config("configs/glyphs.py:cxda,smoke"))
    experiment = build(config, data, splits=("test",))
    store, plan = experiment.store, experiment.task_plans("test")(range(TASKS))
    rng, domains = np.random.default_rng(0), experiment.store.row_domains()
    for (method, chance), seed in [(item, seed) for item in METHODS.items() for seed in (0, 1)]:
        run = root / ("erm" if method == "ft_em" else method) / str(seed)
        folder = run / "ft_em" if method == "ft_em" else run
        folder.mkdir(parents=True)
        labels = store.labels[plan.query]
        predictions = np.where(rng.random(labels.shape) < chance, labels, (labels + 1) % 62)
        scores = metrics.scores("accuracy", predictions, labels)
        row = dict(make_row(method, seed, "glyphs", config=config).row)
        row |= {"avg": 100 * scores.mean(), "w10": 100 * metrics.worst_decile(scores), "data_hash": store.sha256,
                "num_tasks": TASKS}  # fmt: skip
        (folder / "result.json").write_text(json.dumps(row))
        np.savez(folder / "predictions.npz", **plan._asdict(), predictions=predictions, labels=labels)
        if method.startswith("cxda"):
            support, query = domains[plan.support], domains[plan.query]
            same = query[:, :, None, None] == support[:, None, None, :]
            raw = rng.random((*query.shape, 8, support.shape[1])) * np.where(
                same, 2, 0 if method == "cxda_supervised" else 1
            )
            weights = (raw / raw.sum(-1, keepdims=True)).astype(np.float16)
            np.savez(folder / "attention.npz", weights=weights, support_domain=support, query_domain=query)
        if method != "ft_em":
            (run / "config.json").write_text(json.dumps({**config, "method": method, "seed": seed}))
            curve = [{"step": step, "val_score": 0.1 * step} for step in (1, 2, 3)]
            (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in curve))
    return root, data


def report(root, data, out, paper=True):
    results, faults = read_results(p.parent for p in root.glob("*/*/config.json"))
    make_report(out, results, faults, paper, data)
    return (out / "report.html").read_text()


def test_a_report_holds_all_there_is(study, tmp_path, capsys):
    root, data = study
    page = report(root, data, tmp_path)
    out = capsys.readouterr().out
    assert out.startswith(f"{tmp_path}/report.html: 12 results, 5 tables, 6 figures, ")
    names = {"accuracy_time", "learning_curves", "attention_cxda", "attention_heads_cxda", "attention_grid_cxda",
             "attention_cxda_p2p"}  # fmt: skip
    drawn = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {f"glyphs_{name}.{kind}" for name in names for kind in ("png", "svg")} <= drawn
    assert page.count("<figure ") == 6 and page.count('<table class="sortable">') == 6
    assert "paper 78.3 ± 0.0" in page and 'href="#run-' in page and 'id="run-11"' in page and "Faults" not in page
    for kind, text in {"md": "| cxda\\_supervised |", "tex": r"cxda\_supervised &"}.items():
        assert text in (tmp_path / f"tables.{kind}").read_text()
    tasks = embedded(page)
    assert [task["name"] for task in tasks[:2]] == ["task 1 (cxda, seed 0)", "task 2 (cxda, seed 0)"] and len(
        tasks
    ) == 10
    stored = np.load(root / "cxda" / "0" / "predictions.npz")
    answers = dict(tasks[0]["query"]["answers"])
    assert set(answers) == set(METHODS)
    right = [a == label for a, label in zip(answers["cxda"], tasks[0]["query"]["labels"], strict=True)]
    assert right == (stored["predictions"][0] == stored["labels"][0]).tolist()


def test_the_same_files_give_the_same_report(study, tmp_path):
    root, data = study
    first, again = (report(root, data, tmp_path / name) for name in "ab")
    assert first == again
    for path in (tmp_path / "a" / "figures").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / "figures" / path.name).read_bytes()


def test_what_is_broken_is_named_and_the_rest_is_reported(study, tmp_path):
    root, data = shutil.copytree(study[0], tmp_path / "study"), study[1]
    (root / "bn" / "0" / "result.json").unlink()  # as where the checkpoint was missing
    predictions = root / "bn" / "1" / "predictions.npz"
    predictions.write_bytes(predictions.read_bytes()[:-200])
    attention = root / "cxda_p2p" / "0" / "attention.npz"
    attention.write_bytes(attention.read_bytes()[:-200])
    shutil.copytree(root / "erm" / "1", root / "erm" / "2")
    page = report(root, data, tmp_path / "report")
    named = (
        f"{root}/bn/0: no result.json; evaluate it: python -m launch.evaluate --runs={root}/bn/0",
        f"{root}/bn/1: not readable (",
        f"{root}/cxda_p2p/0: no attention shown (",
        f"{root}/erm/2: left out, since {root}/erm/1 has the same method, setting and seed",
        f"{root}/erm/2/ft_em: left out, since {root}/erm/1/ft_em has the same method, setting and seed",
    )
    for fault in named:
        assert fault in page
    lines = csv.DictReader((tmp_path / "report" / "tables.csv").read_text().splitlines())
    main = {line["method"]: line["seeds"] for line in lines if line["table"] == "main"}
    assert main == {name: "0 1" for name in METHODS if name != "bn"}
    assert "task 1 (cxda, seed 0)" in page and "task 1 (cxda_p2p" not in page


def test_other_data_are_not_shown_for_those_it_was_tested_on(study, tmp_path):
    root = shutil.copytree(study[0] / "cxda", tmp_path / "study" / "cxda").parent
    for path in root.glob("cxda/*/result.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "data_hash": "0" * 64}))
    page = report(root, study[1], tmp_path / "report")
    assert f"no attention shown (the data in --data_dir={study[1]} is not what it was tested on)" in page
    assert embedded(page) == [] and page.count("<figure ") == 2


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "launch.report", *arguments], cwd=ROOT, capture_output=True, text=True)


def test_the_command(study, tmp_path):
    root, data = study
    done = run(f"--runs={root}/*/0", f"--report={tmp_path}/r", f"--data_dir={data}")
    assert done.returncode == 0 and "6 results, 5 tables" in done.stdout, done.stderr
    assert "paper" not in (tmp_path / "r" / "tables.md").read_text(), "it was not asked for"


@pytest.mark.parametrize("arguments, message", [
    (("--report=r",), "--runs is missing; give a run directory or a quoted pattern such as 'runs/glyphs/*/*'"),
    (("--runs=x/*", "--report=r"), "--runs=x/*: nothing matches; name run directories that launch.train made"),
    (("--runs={root}/erm/0",), "--report is missing; name the folder to write, such as --report=runs/report"),
    (("--runs={root}/erm/0", "--report=r", "--against=bn"), "--against=bn: a report compares with the paper alone"),
    (("--runs={root}/erm/0", "--report=r", "--config.seed=1"), "--config.seed: a trained run fixes it"),
])  # fmt: skip
def test_mistakes_cost_one_line(study, arguments, message):
    done = run(*(argument.format(root=study[0]) for argument in arguments))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and message in done.stderr
