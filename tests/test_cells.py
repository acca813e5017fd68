"""One cell of a study, done again beside its record."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cxda_jax.errors import UserError
from cxda_jax.study import records
from cxda_jax.study.cells import compare_cell
from cxda_jax.study.jobs import Study, make_study
from cxda_jax.study.results import read_results
from tests.commands import command
from tests.results import PROTOCOL, make_result, write_result

ROOT = Path(__file__).parent.parent
TASKS, QUERIES = 40, 20


def written(folder, share, **row):
    """The study of one run of bn, seed 1, that is right in this share of the queries of each task."""
    rng, config = np.random.default_rng(0), PROTOCOL["cifar_c"]
    labels, query = rng.integers(0, 10, (TASKS, QUERIES)), rng.integers(0, 999, (TASKS, QUERIES))
    support = rng.integers(0, 999, (TASKS, 100))
    right = np.arange(QUERIES) < np.round(share * QUERIES)[:, None]
    run = folder / "bn" / "1"
    result = make_result("bn", 1, config={**config, "method": "bn"}, **row)
    write_result(result, run, labels, np.where(right, labels, -1), support, query + row.get("moved", 0))
    return Study("cifar_c", folder, (1,), ("bn",), False)


def test_the_difference_is_the_closed_form(tmp_path):
    then, now = np.full(TASKS, 0.6), np.full(TASKS, 0.6)
    now[::2] += 0.1
    written(tmp_path / "then", then)
    records.write(tmp_path / "a.records", read_results([tmp_path / "then" / "bn" / "1"])[0])
    study = written(tmp_path / "now", now, weights_hash="other")
    heading, was, is_now, interval, weights = compare_cell(study, tmp_path / "a.records").splitlines()
    assert heading == "cifar_c, bn, seed 1" and weights == "the weights are not equal, bit for bit"
    assert was.startswith("recorded  Avg 60.00  W10% 60.00") and is_now.startswith("again     Avg 65.00  W10% 60.00")
    # Differences of 0 and 10 points, half and half: the mean of 40 of them has a standard error of 10 / 2 / sqrt(40).
    low, high = (float(x) for x in interval.split("[")[1].split("]")[0].split(","))
    assert interval.startswith("again - recorded: +5.00 ") and interval.endswith("on 40 tasks")
    assert abs((high - low) / 2 - 1.96 * 5 / 40**0.5) < 0.2
    same = compare_cell(written(tmp_path / "same", then), tmp_path / "a.records")
    assert "again - recorded: +0.00 [+0.00, +0.00] on 40 tasks\nthe weights are equal, bit for bit" in same


def test_what_cannot_be_compared_costs_one_line(tmp_path):
    share = np.full(TASKS, 0.6)
    study = written(tmp_path / "then", share)
    path = tmp_path / "a.records"
    records.write(path, read_results([tmp_path / "then" / "bn" / "1"])[0])
    for row, message in (
        ({"moved": 1}, "cifar_c, bn, seed 1 was tested on other tasks"),
        ({"data_hash": "2e4b"}, "no result of cifar_c, bn, seed 1 on these data"),
    ):
        with pytest.raises(UserError, match=message):
            compare_cell(written(tmp_path / str(row), share, **row), path)
    with pytest.raises(UserError, match="no result of cifar_c, bn, seed 2; a log"):
        compare_cell(study._replace(seeds=(2,)), path)
    for flags, message in (
        (("--cell=cxda",), "--records is missing; name the file that holds the cell"),
        (("--cell=cxda", f"--records={path}"), "--cell=cxda: give a method and a seed, such as cxda/1"),
        (("--cell=cxdaa/1", f"--records={path}"), "--only='cxdaa' is unknown; did you mean 'cxda'?"),
        (("--tests=context",), "--tests='context' is unknown; did you mean 'contexts'?"),
    ):
        assert message in command("reproduce", "--benchmark=glyphs", *flags, f"--data_dir={tmp_path}", code=2)


def test_a_variant_has_its_own_config_and_folder():
    study = make_study("unipen", None, ["1"], ["cxda"], variant="sizes", tests=["usual"])
    assert study.config("cxda")["data"]["name"] == "unipen_sizes" and str(study.folder) == "runs/study/unipen_sizes"
    assert make_study("cifar10_c", None, [], [], True, "small").config_flag("bn") == "cifar10_c:bn,small,smoke"


def test_a_cell_is_done_again_by_one_command(tmp_path):
    def reproduce(name, *flags):
        where = [f"--study={tmp_path}/{name}", f"--data_dir={tmp_path}/data"]
        flags = ["--benchmark=glyphs", "--smoke", *where, *flags]
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
        arguments = [sys.executable, "-m", "launch.reproduce", *flags]
        done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "1 jobs, 0 done before" in reproduce("study", "--seeds=0", "--only=erm", "--tests=usual")
    records.write(tmp_path / "a.records", read_results([tmp_path / "study" / "erm" / "0"])[0])
    said = reproduce("again", "--cell=erm/0", f"--records={tmp_path}/a.records")
    row = json.loads((tmp_path / "study" / "erm" / "0" / "result.json").read_text())
    assert f"recorded  Avg {row['avg']:.2f}" in said and "again - recorded: +0.00 [+0.00, +0.00] on 10 tasks" in said
    assert "the weights are equal, bit for bit" in said
