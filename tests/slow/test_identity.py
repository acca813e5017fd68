"""What happens between two commands: another config, other data, another machine, links, and unfinished runs."""

import fcntl
import json
import shutil

import numpy as np
import pytest

from cxda_jax.data.store import Domain, open_store, write_store
from cxda_jax.studies import identity
from cxda_jax.studies.folders import read_results
from cxda_jax.studies.text import summary
from tests.commands import command
from tests.fast.test_identity import config  # noqa: F401
from tests.lines import at_the_root, one_line, refused, write_config, write_run  # noqa: F401


@pytest.fixture
def copied(smoke, tmp_path):
    """A finished run and its data, to be spoiled."""
    for name in ("run", "data"):
        shutil.copytree(smoke[0] / name, tmp_path / name)
    return tmp_path


def store_of(copied):
    return next(p for p in (copied / "data").iterdir() if (p / "store.json").exists())


def row_of(copied):
    return json.loads((copied / "run" / "result.json").read_text())


def test_other_data_are_refused_by_training_and_by_tests(copied):
    store = open_store(path := store_of(copied))
    rows = zip(store.domain_names, store.split, store.offsets, store.offsets[1:], strict=False)
    domains = [Domain(name, split, 255 - np.array(store.images[a:b]), store.labels[a:b]) for name, split, a, b in rows]
    shutil.rmtree(path)
    write_store(path, store.info, domains)  # other images under the same name
    old, new = store.sha256, open_store(path).sha256
    data, before = f"--data_dir={copied}/data", row_of(copied)
    train, test = ("train", "--config=glyphs:cxda,smoke", f"--workdir={copied}/run", data), ("evaluate", data)
    model = (*test, f"--runs={copied}/run/model")  # its plain files know their data too
    for arguments in (train, (*train, "--replay_step=1"), (*test, f"--runs={copied}/run"), model):
        error = command(*arguments, code=2)
        assert error.count("\n") == 1 and old[:12] in error and new[:12] in error and "--other_data" in error
    assert row_of(copied) == before
    command(*test, f"--runs={copied}/run", "--other_data")
    row = row_of(copied)
    assert (row["trained_on"], row["data_hash"]) == (old, new) and row["data_marks"] == [identity.MARK]


def test_what_cannot_be_tested_is_named_and_the_rest_goes_on(copied, config):
    """The rest is a run that was not finished, and is called so."""
    foreign, held, sent = (copied / name for name in ("foreign", "held", "sent"))
    foreign.mkdir()
    (foreign / "config.json").write_text('{"compilerOptions": {}}')
    for folder in (held, sent):
        shutil.copytree(copied / "run", folder)
    (sent / "last").rename(copied / "elsewhere")
    (sent / "last").symlink_to(copied / "elsewhere")
    (copied / "run" / "result.json").unlink()
    config["train"]["steps"] = 40
    shutil.rmtree(copied / "run" / "model")
    write_config(copied / "run", config, open_store(store_of(copied)).sha256)
    with open(held / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        runs = ",".join(map(str, (foreign, held, sent, copied / "run")))
        error = command("evaluate", f"--runs={runs}", f"--data_dir={copied}/data", code=2)
    assert error.count("\n") == 1 and "3 of 4 evaluations failed; the first: " in error
    assert "foreign/config.json: no 'method'" in error
    row = row_of(copied)
    assert (row["reached_step"], row["steps"]) == (20, 40) and row["best_step"] <= 20
    (result,), _ = read_results([copied / "run"])
    assert "UNFINISHED: step 20 of 40" in summary(result.row)
