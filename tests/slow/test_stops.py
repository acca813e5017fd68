"""Ctrl-C and SIGTERM: they end a command at once while it is imported, and get a line while it has work to save."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from cxda_jax.machine import stops
from tests.lines import ROOT

BUSY = """
import hashlib, sys, time
from launch import stops
def compute():  # outside Python's own instructions, as a compilation does
    print("begun", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)
    stops.say("computed")
def wait():
    print("begun", flush=True)
    time.sleep(30)
try:
    stops.watch()
    {work}
except stops.Stopped as e:
    stops.say(stops.LINE.format(e.name))
    sys.exit(e.code)
"""

DEFERRED = "with stops.deferred(): compute()"

TERM, INT, USR2 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR2

ENDS = {number: stops.LINE.format(number.name) for number in (TERM, INT, USR2)}


@pytest.mark.parametrize(("work", "job", "signals", "lines", "code"), [
    pytest.param(DEFERRED, "", [INT], [stops.SOON, "computed", ENDS[INT]], 130, id="answered before the work ends"),
    pytest.param("wait()", "", [TERM], [ENDS[TERM]], 143, id="what ends soon says so once"),
    pytest.param("with stops.before_second_signal(lambda: stops.say('killed')): compute()", "", [INT, TERM],
                 ["killed"], 143, id="the second ends it after what must not outlive it"),
    # Slurm repeats SIGTERM while a job saves: there only a person hurries.
    pytest.param(DEFERRED, "1", [USR2, TERM, TERM], [stops.SOON, "computed", ENDS[USR2]], 140, id="Slurm repeats"),
    pytest.param(DEFERRED, "1", [TERM, INT], [stops.SOON], 130, id="a person in a job of Slurm"),
])  # fmt: skip
def test_signals_are_answered_in_lines(work, job, signals, lines, code):
    variables = {**os.environ, "SLURM_JOB_ID": job} if job else os.environ
    start = [sys.executable, "-c", BUSY.format(work=work)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(start, cwd=ROOT, env=variables, **pipes) as process:
        assert process.stdout.readline() == "begun\n"
        for sent in signals:
            time.sleep(0.1)
            process.send_signal(sent)
        assert (process.communicate(timeout=60)[1].splitlines(), process.returncode) == (lines, code)


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
    done = subprocess.run(
        [sys.executable, "-m", "launch.train", "--config=configs/glyphs.py:cxda,smoke", f"--workdir={tmp_path}/w"],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (128 + sent, "")
    assert done.stderr == stops.EARLY.format(sent.name) + "\n"
