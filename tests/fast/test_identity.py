"""What happens between two commands: another config, other data, another machine, links, and unfinished runs."""

import contextlib
import json
import shutil
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest

from cxda_jax.config.reading import read, replaced
from cxda_jax.data.store import Domain, open_store, write_store
from cxda_jax.disk import files, manifest
from cxda_jax.disk.reading import metrics_line
from cxda_jax.errors import UserError
from cxda_jax.machine import backend, hosts, mesh
from cxda_jax.studies import identity
from cxda_jax.studies.folders import read_results
from tests.commands import command
from tests.conftest import INFO, make_domains
from tests.lines import one_line, refused, write_run


@pytest.fixture
def config():
    return read("glyphs:cxda,smoke")


def test_a_run_goes_on_with_its_own_data_and_config_alone(tmp_path, store, config, monkeypatch):
    write_store(tmp_path / "other", INFO, make_domains(seed=1))
    other, said = open_store(tmp_path / "other"), []

    def claim(config=config, store=store, **more):
        return identity.claim(tmp_path, config, store, log=said.append, **more)

    claim(replaced(config, seed=1))  # it saves nothing, so another config may follow
    assert claim().data_hash == store.sha256 and identity.read_config(tmp_path) == config
    (tmp_path / "last" / "5").mkdir(parents=True)
    record = claim()
    assert record == identity.read_record(tmp_path) and record.marks == () and not said
    assert (record.threads, record.machine) == (backend.threads(), backend.machine())
    with refused(f"{store.sha256[:12]}.*{other.sha256[:12]}.*--other_data", tmp_path):
        claim(store=other)
    marked = claim(store=other, other_data=True)
    assert marked.data_hash == other.sha256 and marked.marks == ("trained on other data before step 5",)
    assert identity.read_record(tmp_path) == marked
    monkeypatch.setattr(backend, "threads", lambda: 77)
    monkeypatch.setattr(backend, "machine", lambda: "abacus")
    said.clear()
    claim(store=other)
    assert "threads" in said[0] and "77" in said[0] and "abacus" in said[1]
    with refused("config.seed=0, not 1", tmp_path):
        claim(replaced(config, seed=1), other)
    with refused("", tmp_path, named="config.method='cxda'"):
        claim(read("glyphs:bn,smoke"), other)
    (tmp_path / "config.json").unlink()
    with refused("", tmp_path, named="config.json"):
        claim(store=other)


def test_processes_that_were_started_with_other_facts_are_refused_by_all(config, monkeypatch):
    first = {"package": "1", "config": config}
    other = {"package": "1", "config": {**config, "optimizer": {**config["optimizer"], "learning_rate": 7.0}}}
    monkeypatch.setattr(mesh, "processes", lambda: 2)
    monkeypatch.setattr(mesh, "from_first", lambda work: json.loads(json.dumps(first)))
    for number, facts, heard, said in (
        (1, other, 1, "config.optimizer.learning_rate: 7.0 in process 1, 0.03 in process 0; start all"),
        (0, first, 1, "process 1 was started with other facts than process 0"),
        (1, first, 0, ""),
    ):
        monkeypatch.setattr(mesh, "process", lambda number=number: number)
        monkeypatch.setattr(mesh, "largest", lambda array, heard=heard: np.maximum(array, heard))
        with refused(said) if said else contextlib.nullcontext():
            identity.insist_on_agreement(facts)
    monkeypatch.setattr(jax.distributed, "initialize", mock.Mock(side_effect=ValueError("no address.")))
    with refused("--distributed: .* --coordinator=HOST:PORT --num_processes=N"):
        hosts._meet("", -1, -1)


def test_a_process_is_gone_once_it_has_given_no_sign_of_life_for_a_while(monkeypatch):
    """However long it has given some before. Process 0 looks at these seconds, and finds this sign of process 1."""
    watch, seen = hosts._Watch(), {1: ("", 0.0)}
    assert hosts.SILENT == 20
    for now, sign, gone in (0, "1", False), (15, "2", False), (30, "3", False), (49, "3", False), (51, "3", True):
        monkeypatch.setattr(hosts, "time", SimpleNamespace(monotonic=lambda now=now: now))
        assert watch._silent({"cxda/beat/1": sign}, seen).startswith("process 1 of ") is gone


def test_nothing_is_written_through_a_link(tmp_path, monkeypatch):
    (tmp_path / "precious").write_text("kept")
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "7" * 16)
    for name in ("a.json", "lock"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="a link"), files.locked(tmp_path):
        pass
    files.write_text(tmp_path / "a.json", "new")
    assert (tmp_path / "precious").read_text() == "kept" and (tmp_path / "a.json").read_text() == "new"
    assert not (tmp_path / "a.json").is_symlink()
    (tmp_path / f".cxda-{'7' * 16}.a.json").symlink_to(tmp_path / "precious")
    with pytest.raises(FileExistsError):
        files.write_text(tmp_path / "a.json", "newer")
    assert (tmp_path / "precious").read_text() == "kept"


def test_a_report_names_what_rotted_or_was_trained_on_other_data(tmp_path):
    """And shows none of it."""
    run = tmp_path / "run"
    for name, change, said in [
        ("result.json", ('"seed": 0', '"seed": 1'), "result.json differs from its recorded hash"),
        ("manifest.json", None, "trained on other data since it was tested"),
        ("metrics.jsonl", ('"loss": ', '"loss": 1'), "line 1 is damaged"),
    ]:
        write_run(run)
        row = json.loads((run / "result.json").read_text()) | {"trained_on": "1"}
        (run / "result.json").write_text(json.dumps(files.sealed(row)))
        (run / "metrics.jsonl").write_text("".join(metrics_line({"step": step, "loss": 0.5}) for step in (1, 2)))
        assert read_results([run])[1] == []
        if change:
            (run / name).write_text((run / name).read_text().replace(*change, 1))
        else:
            manifest.write(run, ["config.json"], about=identity.read_record(run)._replace(data_hash="2")._asdict())
        results, faults = read_results([run])
        assert len(faults) == 1 and said in faults[0] and one_line(faults[0], tmp_path)
        assert not results or name == "metrics.jsonl" and all(line["step"] > 1 for line in results[0].curve())
        shutil.rmtree(run)


@pytest.mark.slow
def test_other_data_are_refused_by_training_and_by_tests(smoke, tmp_path):
    run, data = (shutil.copytree(smoke[0] / name, tmp_path / name) for name in ("run", "data"))
    store = open_store(path := next(p for p in data.iterdir() if (p / "store.json").exists()))
    rows = zip(store.domain_names, store.split, store.offsets, store.offsets[1:], strict=False)
    domains = [Domain(name, split, 255 - np.array(store.images[a:b]), store.labels[a:b]) for name, split, a, b in rows]
    shutil.rmtree(path)
    write_store(path, store.info, domains)  # other images under the same name
    old, new = store.sha256, open_store(path).sha256
    before = (run / "result.json").read_text()
    train, test = ("train", "--config=glyphs:cxda,smoke", f"--workdir={run}"), ("evaluate", f"--runs={run}")
    for arguments in (train, (*train, "--replay_step=1"), test, ("evaluate", f"--runs={run}/model")):
        error = command(*arguments, f"--data_dir={data}", code=2)
        assert error.count("\n") == 1 and old[:12] in error and new[:12] in error and "--other_data" in error
    assert (run / "result.json").read_text() == before
    command(*test, f"--data_dir={data}", "--other_data")
    row = json.loads((run / "result.json").read_text())
    assert (row["trained_on"], row["data_hash"]) == (old, new) and row["data_marks"] == [identity.MARK]
