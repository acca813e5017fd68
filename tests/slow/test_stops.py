"""Ctrl-C and SIGTERM: what has work to save ends after it, with a line; an import ends at once."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from cxda_jax.machine import stops
from tests.lines import ROOT


@pytest.fixture
def said(monkeypatch):
    """What is said while signals are watched."""
    lines = []
    monkeypatch.setattr(stops, "say", lines.append)
    stops.watch()
    yield lines
    stops.unwatch()


def test_work_that_is_deferred_is_done_before_the_signal_ends_it(said):
    with pytest.raises(stops.Stopped) as stopped, stops.deferred():
        signal.raise_signal(signal.SIGINT)
        stops.say("saved")
    assert "saved" in said and stopped.value.code == 128 + signal.SIGINT
    stops.watch()  # anew: a second signal would end this process
    with pytest.raises(stops.Stopped):  # without work to save
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.weekly
def test_a_signal_while_imports_run_is_one_line(tmp_path):
    """Also where the import swallows whatever is raised in it."""
    sent = signal.SIGTERM
    code = f"""
        import os, time
        try:
            os.kill(os.getpid(), {int(sent)})
            time.sleep(1)
        except BaseException:
            pass
        raise SystemExit("the signal was swallowed")
    """
    (tmp_path / "jax.py").write_text(textwrap.dedent(code))
    start = [sys.executable, "-m", "launch.train", "--config=glyphs:cxda,smoke", f"--workdir={tmp_path}/w"]
    around = {"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": str(tmp_path)}}
    done = subprocess.run(start, capture_output=True, text=True, **around)
    assert (done.returncode, done.stdout) == (128 + sent, "")
    assert done.stderr == stops.EARLY.format(sent.name) + "\n"
