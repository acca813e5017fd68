"""Records: results in one small file, from which the same tables follow."""

import json
import zipfile

import numpy as np
import pytest

from cxda_jax.studies import formats, records
from cxda_jax.studies.folders import read_results
from cxda_jax.studies.result import to_row
from cxda_jax.studies.settings import USUAL
from cxda_jax.studies.statistics import paired_differences
from cxda_jax.studies.tables import build_tables
from cxda_jax.studies.text import context_curves
from tests.lines import refused
from tests.results import PROTOCOL, make_result, write_result

TASKS, QUERIES = 30, 20


@pytest.fixture
def runs(tmp_path):
    """Two methods, two seeds, the usual tasks and contexts of 0 and 10 images."""
    rng, config = np.random.default_rng(0), PROTOCOL["cifar_c"]
    labels, query = rng.integers(0, 10, (TASKS, QUERIES)), rng.integers(0, 999, (TASKS, QUERIES))
    support = rng.integers(0, 999, (TASKS, 100))
    for method in ("erm_iid", "cxda_any"):
        for seed in (0, 1):
            run = tmp_path / "runs" / method / str(seed)
            for setting, size in (("", 100), ("context=0", 0), ("context=10", 10)):
                predictions = np.where(rng.random(labels.shape) < 0.6, labels, -1)
                result = make_result(method, seed, config=config, setting=setting)
                folder = run / result.label if setting else run
                write_result(result, folder, labels, predictions, support[:, :size], query, run)
            (run / "config.json").write_text(json.dumps({**config, "method": method, "seed": seed}))
    return sorted((tmp_path / "runs").glob("*/*"))


def said(results):
    """All that is said of results, but where they lie."""
    usual = [r for r in results if r.setting == USUAL]
    tables = [formats.to_markdown(table) for table in build_tables(results, "", [])]
    return tables, paired_differences(usual)[0], list(context_curves(results, "erm_iid"))


def test_records_say_what_the_results_say(runs, tmp_path):
    (runs[0] / "model").mkdir()
    (runs[0] / "model" / "card.json").write_text('{"commit": "of a run"}')
    (runs[1] / "card.json").write_text('{"commit": "of a bare model"}')
    (runs[2] / "card.json").write_text("cut sho")
    results = read_results(runs)[0]
    records.write(tmp_path / "a.records", results)
    read, faults = read_results([tmp_path / "a.records"])
    assert len(results) == len(read) == 12 and not faults and said(read) == said(results)
    for ours, theirs in zip(read, results, strict=True):
        assert dict(ours.config) == dict(theirs.config)
        assert to_row(ours) == to_row(theirs)
        assert ours.tasks[2:] == theirs.tasks[2:], "so both can be paired"
        np.testing.assert_array_equal(ours.tasks.weighted, theirs.tasks.weighted)
    commits = {one.run: one.commit for one in read}
    assert [*commits.values()] == ["of a run", "of a bare model", "", ""]
    records.write(tmp_path / "b.records", read[::-1])
    assert (tmp_path / "a.records").read_bytes() == (tmp_path / "b.records").read_bytes()
    assert (tmp_path / "a.records").stat().st_size < 8_000
    for i in (0, 1):
        records.write(tmp_path / f"half-{i}.records", results[i::2])
    assert said(read_results(sorted(tmp_path.glob("half-*")))[0])[:2] == said(results)[:2]


def test_what_is_broken_or_changed_is_no_file_of_records(runs, tmp_path):
    path, whole = tmp_path / "a.records", {}
    records.write(path, read_results(runs)[0])
    with zipfile.ZipFile(path) as archive:
        whole = {name: archive.read(name) for name in archive.namelist()}
    lines = whole["results.jsonl"]
    for name, part in (
        ("configs.json", b"{}"), ("configs.json", whole["configs.json"].replace(b'"width": 128', b'"width": 127')),
        ("results.jsonl", b""), ("results.jsonl", lines.replace(b'"method": "erm_iid"', b'"method": "ours"')),
        ("results.jsonl", lines.replace(b'"folder": "', b'"folder": "../../', 1)), ("scores.npz", whole["scores.npz"][:100]),
        ("results.jsonl", lines.replace(b'"avg": ', b'"avg": 1', 1)),
    ):  # fmt: skip
        with zipfile.ZipFile(path, "w") as archive:
            for other, content in {**whole, name: part}.items():
                archive.writestr(other, content)
        with refused("", tmp_path, named="a.records"):
            read_results([path])
