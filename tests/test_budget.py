"""What a run of the tests costs is counted, and what one run compiled is kept for the next."""

import os
import re
import subprocess
import sys
import zlib

import pytest

from tests import budget, compiled
from tests.lines import ROOT

COUNTED = """
import os, jax, numpy as np, subprocess, sys
jax.jit(lambda x: 2 * x)(np.ones(3))
os.environ["PYTEST_CURRENT_TEST"] = "tests/test_b.py::test_c (call)"
jax.jit(lambda x: 2 * x)(np.ones(3)), jax.jit(lambda x: 3 * x)(np.ones(3))
subprocess.run([sys.executable, "-c", ""])
"""


@pytest.mark.gate
def test_programs_and_processes_are_counted_for_the_file_that_asked_for_them(tmp_path):
    told = {"CXDA_TESTS_COUNTS": str(tmp_path), "PYTEST_CURRENT_TEST": "tests/test_a.py::test_b[::] (call)"}
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    environment = {**os.environ, **told, **cache, "PYTHONPATH": str(budget.HOOKS)}
    subprocess.run([sys.executable, "-c", COUNTED], env=environment, check=True)
    (tmp_path / "cache").rename(tmp_path.parent / "cache")
    counts = budget.Counts(tmp_path)
    assert [len(counts.of("program", f"tests/test_{x}.py")) for x in "ab"] == [1, 2]
    assert len(counts.of("program")) == len(counts.of("compiled")) == 2, "equal programs are one"
    assert [len(counts.of("process", f"tests/test_{x}.py")) for x in "ab"] == [1, 1]
    lines = budget.table(counts, {"tests/test_a.py": 1.0, "tests/test_b.py": 2.5})
    assert [line.split() for line in lines[1:]] == [
        ["2.5", "2", "1", "1", "0", "tests/test_b.py"],
        ["1.0", "1", "1", "1", "0", "tests/test_a.py"],
        ["3.5", "2", "2", "2", "0", "all"],
    ]


@pytest.mark.gate
def test_a_program_has_one_name_in_the_folder_of_every_run(tmp_path):
    told = re.findall(r"^export (JAX_\w+)=(\w+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    script = [sys.executable, "-c", "import jax, numpy as np; jax.jit(lambda x: 2 * x)(np.ones(3))"]
    for folder in "ab":
        cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / folder)}
        subprocess.run(script, env=os.environ | dict(told) | cache, check=True)
    one, other = ([path.name for path in (tmp_path / folder).glob("*-cache")] for folder in "ab")
    assert one == other and len(one) == 1


def test_a_ring_above_its_ceiling_is_told(tmp_path, monkeypatch):
    (tmp_path / "1").write_text("process\ttests/test_a.py\t1\nfound\t\tp0\nfound\ttests/test_a.py\tp1\n")
    (tmp_path / "2").write_text("process\ttests/test_a.py\t2\ncompiled\ttests/test_a.py\tp2\n")
    counts = budget.Counts(tmp_path)
    monkeypatch.setattr(budget, "CEILINGS", {"gate": budget.Ceiling(programs=2, processes=2)})
    assert budget.excess("gate", counts) == budget.excess("some of it", counts) == []
    monkeypatch.setattr(budget, "CEILINGS", {"gate": budget.Ceiling(programs=2, processes=1)})
    (line,) = budget.excess("gate", counts)
    assert line.startswith("tests/budget.py: 2 of kind process in this ring, at most 1 ")


def test_a_kept_program_is_taken_again_and_what_is_broken_is_not(tmp_path):
    run, cache, entries = tmp_path / "run", tmp_path / "cache", {}
    run.mkdir()
    for name in ("one", "two"):
        entries[f"jit_{name}-1-cache"] = zlib.compress(name.encode() * 99)
        (run / f"jit_{name}-1-cache").write_bytes(entries[f"jit_{name}-1-cache"])
    (run / "jit_half-1-cache").write_bytes(zlib.compress(b"half" * 99)[:-3])  # its process was killed
    (run / "jit_other-1-cache").write_bytes(b"no stream")
    (run / "jit_one-1-atime").write_bytes(b"")
    assert compiled.take(tmp_path / "cold", cache) == 0
    assert (compiled.keep(run, cache), compiled.keep(run, cache)) == (2, 0)

    def taken(folder):
        assert compiled.take(folder, cache) == len(list(folder.iterdir()))
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    assert taken(tmp_path / "warm") == entries
    first = next(cache.glob("jit_one*"))
    first.write_bytes(first.read_bytes()[:-1])
    (cache / "foreign").write_bytes(b"x")
    (cache / "folder").mkdir()
    assert taken(tmp_path / "again") == {"jit_two-1-cache": entries["jit_two-1-cache"]}
    assert not first.exists() and not (cache / "foreign").exists()
    old = next(cache.glob("jit_two*"))
    os.utime(old, (0, 0))
    assert taken(tmp_path / "old") == {} and not old.exists()
