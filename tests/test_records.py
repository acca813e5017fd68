"""Records: results in one small file, from which the same tables and differences follow."""

import io
import json
import zipfile

import numpy as np
import pytest

from cxda_jax.errors import UserError
from cxda_jax.report import formats
from cxda_jax.report.making import report_runs
from cxda_jax.report.tables import build_tables
from cxda_jax.study import records
from cxda_jax.study.comparing import paired_differences
from cxda_jax.study.contexts import printed
from cxda_jax.study.results import read_results
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
            for setting in ("", "context=0", "context=10"):
                size = int(setting[8:]) if setting else 100
                predictions = np.where(rng.random(labels.shape) < 0.6, labels, -1)
                result = make_result(method, seed, config=config, setting=setting)
                folder = run / result.row["label"] if setting else run
                write_result(result, folder, labels, predictions, support[:, :size], query, run)
            (run / "config.json").write_text(json.dumps({**config, "method": method, "seed": seed}))
    return sorted((tmp_path / "runs").glob("*/*"))


def said(results):
    """All that is said of results, but where they lie."""
    tables = [formats.to_markdown(table) for table in build_tables(results, "", [])]
    return (
        tables,
        paired_differences([r for r in results if not r.row["setting"]])[0],
        list(printed(results, "erm_iid")),
    )


def test_unpacked_records_say_what_the_results_say(runs, tmp_path):
    results, faults = read_results(runs)
    assert len(results) == 12 and not faults
    records.write(tmp_path / "a.records", results)
    unpacked, faults = read_results(records.unpack(tmp_path / "a.records", tmp_path / "out"))
    assert not faults and said(unpacked) == said(results)
    scores = ("avg", "w10", "seed", "config_hash", "data_hash", "train_minutes", "device")
    assert [[r.row[name] for name in scores] for r in unpacked] == [[r.row[name] for name in scores] for r in results]
    read = records.read(tmp_path / "a.records")
    assert [100 * r.scores.mean() for r in read] == pytest.approx([r.row["avg"] for r in read], abs=1e-6) and len(
        read
    ) == 12
    assert [dict(r.config) for r in unpacked] == [dict(r.config) for r in results]
    records.write(tmp_path / "b.records", unpacked[::-1])
    assert (tmp_path / "a.records").read_bytes() == (tmp_path / "b.records").read_bytes()
    assert (tmp_path / "a.records").stat().st_size < 8_000


def test_the_commit_is_that_of_the_card_of_a_run_or_of_a_bare_model(runs, tmp_path):
    for run, name in zip(runs, records.CARDS, strict=False):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(json.dumps({"commit": f"of {name}"}))
    (runs[2] / "card.json").write_text("cut sho")
    records.write(tmp_path / "a.records", read_results(runs)[0])
    found = {one.run: one.row["recorded"]["commit"] for one in records.read(tmp_path / "a.records")}
    assert [*found.values()] == ["of model/card.json", "of card.json", "", ""]


def test_results_of_other_tasks_stay_apart(runs, tmp_path):
    """The hashes of queries and support are kept."""
    folder = runs[-1]
    with np.load(folder / "predictions.npz") as file:
        stored = dict(file)
    np.savez(folder / "predictions.npz", **{**stored, "query": stored["query"] + 1})
    records.write(tmp_path / "a.records", read_results(runs)[0])
    unpacked, _ = read_results(records.unpack(tmp_path / "a.records", tmp_path / "out"))
    _, _, faults = paired_differences([r for r in unpacked if not r.row["setting"]])
    assert len(faults) == 1 and "its tasks are not those of the others" in faults[0]


def test_a_report_writes_records_and_reads_them(runs, tmp_path, capsys):
    pattern, kept = str(tmp_path / "runs" / "*" / "*"), str(tmp_path / "kept.records")
    report_runs([pattern], str(tmp_path / "a"), str(tmp_path), "", False, kept)
    report_runs([kept], str(tmp_path / "b"), str(tmp_path), "", False)
    capsys.readouterr()
    tables = [(tmp_path / name / "tables.md").read_text() for name in "ab"]
    assert tables[0] == tables[1] and r"cxda\_any" in tables[0]
    halves = str(tmp_path / "half-*.records")
    with pytest.raises(
        UserError, match=r"^--runs=.*half-\*\.records: nothing matches; name files that --record wrote$"
    ):
        report_runs([halves], str(tmp_path / "c"), str(tmp_path), "", False)
    results = read_results(runs)[0]
    for i in (0, 1):
        records.write(tmp_path / f"half-{i}.records", results[i::2])
    report_runs([halves], str(tmp_path / "c"), str(tmp_path), "", False)
    assert (tmp_path / "c" / "tables.md").read_text() == tables[0]
    # Two files of one name, of different data with one name.
    for i, data in enumerate("ab"):
        (tmp_path / str(i)).mkdir()
        changed = [r._replace(row={**r.row, "data_hash": 64 * data}) for r in results]
        records.write(tmp_path / str(i) / "half.records", changed)
    capsys.readouterr()
    report_runs([str(tmp_path / "[01]" / "half.records")], str(tmp_path / "d"), str(tmp_path), "", False)
    assert f"comparing {2 * len(results)} results" in capsys.readouterr().out


def rewritten(path, **changes):
    """The archive, with some of its parts made by functions of the old ones."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, part in parts.items():
            change = changes.get(name.partition(".")[0], lambda part: part)
            if (new := change(part)) is not None:
                archive.writestr(name, new)
    path.write_bytes(data.getvalue())


@pytest.mark.parametrize(
    "change",
    [
        {"configs": lambda part: None},
        {"configs": lambda part: b"{}"},
        {"results": lambda part: part.replace(b'"line": 3', b'"line": 333')},
        {"results": lambda part: part.replace(b'"folder": "', b'"folder": "../../', 1)},
        {"scores": lambda part: part[:100]},
    ],
)
def test_broken_records_are_named_in_one_line(change, runs, tmp_path):
    path = tmp_path / "a.records"
    records.write(path, read_results(runs)[0])
    rewritten(path, **change)
    with pytest.raises(UserError) as e:
        records.unpack(path, tmp_path / "out")
    assert str(e.value).startswith(f"{path}: not a file of records (") and "\n" not in str(e.value)


def test_a_changed_number_is_noticed(runs, tmp_path):
    path = tmp_path / "a.records"
    records.write(path, read_results(runs)[0])
    rewritten(path, results=lambda part: part.replace(b'"avg": ', b'"avg": 1', 1))
    _, faults = read_results(records.unpack(path, tmp_path / "out"))
    assert len(faults) == 1 and "but the predictions give" in faults[0]


def test_what_cannot_be_recorded_is_refused(runs, tmp_path):
    results, _ = read_results(runs[:1])
    with pytest.raises(UserError, match="only accuracy can"):
        records.write(tmp_path / "a.records", [results[0]._replace(row={**results[0].row, "metric": "macro_f1"})])
