"""--help of every command: quick and complete, and the command `cxda`, which leads to all of them."""

import os
import subprocess
import sys

import pytest

from cxda_jax.__main__ import COMMANDS
from tests.lines import ROOT

FILES = {path.stem: path.read_text() for path in (ROOT / "launch").glob("*.py") if "cli.run(main)" in path.read_text()}


def cxda(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "cxda_jax", *arguments],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment},
    )  # fmt: skip


def test_the_command_knows_each_file_of_launch():
    assert set(COMMANDS) == set(FILES)
    wrong = cxda("trian")
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1 and "did you mean 'train'?" in wrong.stderr


@pytest.mark.parametrize("name", sorted(FILES))
def test_help_imports_nothing_heavy(name, tmp_path):
    for heavy in ("jax", "numpy", "ml_collections", "matplotlib"):
        (tmp_path / f"{heavy}.py").write_text(f"raise SystemExit('{heavy} is imported')")
    done = cxda(name, "--help", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
