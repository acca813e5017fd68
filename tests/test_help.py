"""--help of every command: quick, complete, and as absl would word it after all imports."""

import ast
import os
import resource
import subprocess
import sys
import textwrap

import pytest

from launch import usage
from tests.lines import ROOT

COMMANDS = sorted(path.stem for path in (ROOT / "launch").glob("*.py") if "cli.run(main)" in path.read_text())


@pytest.fixture(scope="module")
def by_absl():
    """What absl prints for each command, from one process that has imported what they share."""
    code = f"""
        import os, runpy, sys
        import cxda_jax.experiment, cxda_jax.analysis.report, cxda_jax.analysis.plots
        for name in {COMMANDS}:
            print("====" + name, flush=True)
            if not os.fork():
                sys.argv = [name, "--helpshort"]
                try:
                    runpy.run_module("launch." + name, run_name="__main__", alter_sys=True)
                except SystemExit as e:
                    sys.stdout.flush()
                    os._exit(e.code)
            assert os.waitstatus_to_exitcode(os.wait()[1]) == 0, name
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return dict(part.split("\n", 1) for part in done.stdout.split("====")[1:])


@pytest.mark.parametrize("name", COMMANDS)
def test_help_imports_nothing_heavy_and_is_absls(name, by_absl, tmp_path):
    for heavy in ("jax", "numpy", "ml_collections", "matplotlib"):
        (tmp_path / f"{heavy}.py").write_text(f"raise SystemExit('{heavy} is imported')")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", f"launch.{name}", "--help"],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stderr) == (0, "")
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1
    source = (ROOT / "launch" / f"{name}.py").read_text()
    assert done.stdout.startswith(ast.get_docstring(ast.parse(source), clean=False))
    for flag in (*usage.Source(f"launch.{name}").flags(), *usage.Source("launch.cli").flags()):
        assert f"]{flag[0].args[0].value}:" in done.stdout or f"--{flag[0].args[0].value}:" in done.stdout
    assert done.stdout == by_absl[name]


def test_all_flags_and_an_unreadable_one_are_left_to_absl(monkeypatch, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "launch.report", "--helpfull"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and "absl.logging" in done.stdout and "--report:" in done.stdout
    monkeypatch.setattr(usage, "ROOT", tmp_path)
    (tmp_path / "odd.py").write_text(
        "from absl import flags\n_ODD = flags.DEFINE_string('odd', open('x').read(), '')\n"
    )
    with pytest.raises(usage.Unreadable, match="open"):
        usage.usage("odd")
    assert usage.show("odd") is None and usage.show("missing") is None
