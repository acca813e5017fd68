"""Reports from files: everything is shown; what is broken is named and does not stop the rest."""

import contextlib
import csv
import html
import itertools
import re
import resource
import shutil

import numpy as np
import pytest

from cxda_jax.disk.reading import system_fault
from cxda_jax.studies import reporting
from tests.fast.test_launch_report import METHODS, report, study  # noqa: F401
from tests.lines import contents, cut
from tests.pages import embedded
from tests.results import edit


def few(study, folder, *left):
    """A copy of the study with few methods and nothing to explore, which is drawn in no time."""
    return shutil.copytree(study[0], folder, ignore=shutil.ignore_patterns("cxda_*", "ft_em", "attention*", *left))


def seeds_of(folder):
    """The seeds of each method in the CSV's main table."""
    lines = csv.DictReader((folder / "tables.csv").read_text().splitlines())
    return {line["method"]: line["seeds"] for line in lines if line["table"] == "main"}


def test_what_is_broken_is_named_and_the_rest_is_reported(study, tmp_path, monkeypatch):
    for drawing in (reporting.plots, reporting.curve_figures):  # figures take most of the time
        monkeypatch.setattr(drawing, "drawings", lambda *_: [])
    monkeypatch.setattr(reporting.plots, "save", lambda figure, path: "<svg></svg>")
    root, data = shutil.copytree(study[0], tmp_path / "study"), study[1]
    (root / "bn" / "0" / "result.json").unlink()  # as where the checkpoint was missing
    cut(root / "cxda_p2p" / "0" / "attention.npz", 200)
    for seed in "01":
        edit(root / "cxda_supervised" / seed / "result.json", data_hash="0" * 64)
    shutil.copytree(root / "erm" / "1", root / "erm" / "2")
    run = shutil.copytree(root / "cxda" / "0", root / "cxda_nan" / "0")
    edit(run / "result.json", method="cxda_nan", label="cxda_nan")
    attention = dict(np.load(run / "attention.npz"))
    np.savez(run / "attention.npz", **{**attention, "weights": attention["weights"] * np.nan})
    page = report(root, data, tmp_path / "report")
    for fault in (
        f"{root}/bn/0: no result.json; evaluate it: cxda evaluate --runs={root}/bn/0",
        f"{root}/cxda_p2p/0: no attention shown (",
        f"{root}/cxda_nan/0: no attention shown (attention.npz: weights (6, ",
        f"{root}/erm/2: left out, since {root}/erm/1 has the same method, setting and seed",
        f"{root}/cxda_supervised/0: no attention shown (the data in --data_dir={data} is not what it was tested on)",
    ):
        assert fault in page
    assert seeds_of(tmp_path / "report") == dict.fromkeys(METHODS, "0 1") | {"bn": "1", "cxda_nan": "0"}
    assert {task["name"].partition("(cxda")[2] for task in embedded(page)} == {", seed 0)"}, "of cxda alone"


def test_a_full_disk_leaves_the_previous_report(study, tmp_path, capsys):
    """The fixture capsys keeps what is printed in memory: a file of it could not grow either."""
    root, out = few(study, tmp_path / "study", "cxda", "bn"), tmp_path / "r"
    report(root, study[1], out)
    before = contents(out)
    edit(root / "erm" / "0" / "result.json", device="another")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = max(len(content) for name, content in before.items() if not name.endswith(".html"))
    with contextlib.ExitStack() as stack, pytest.raises(OSError) as error:
        stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, limits[1]))
        report(root, study[1], out)
    assert system_fault(error.value).startswith(f"{out}/report.html: File too large")
    after = contents(out)
    assert after.keys() == before.keys() and after["report.html"] == before["report.html"]
    assert all(len(content) >= len(before[name]) for name, content in after.items()), "nothing half-written is left"


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
