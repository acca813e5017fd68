"""Ctrl-C and SIGTERM: at once while a command is still imported, answered at once in a line while it has work to save."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from cxda_jax import stops
from tests.lines import ROOT


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("module", ["absl", "jax", "matplotlib"])
def test_a_signal_while_imports_run_is_one_line(tmp_path, module, sent):
    """Also where the import swallows whatever is raised in it."""
    code = f"""
        import os, time
        try:
            os.kill(os.getpid(), {int(sent)})
            time.sleep(1)
        except BaseException:
            pass
        raise SystemExit("the signal was swallowed")
    """
    (tmp_path / f"{module}.py").write_text(textwrap.dedent(code))
    done = subprocess.run(
        [sys.executable, "-m", "launch.train", "--config=configs/glyphs.py:cxda,smoke", f"--workdir={tmp_path}/w"],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (128 + sent, "")
    assert done.stderr == stops.LINE.format(sent.name) + "\n"


BUSY = """
import hashlib, sys
from launch import stops
def compute():  # outside Python's own instructions, as a compilation does
    print("begun", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 4_000_000)
    stops.say("computed")
try:
    stops.watch()
    {work}
except stops.Stopped as e:
    stops.say(stops.LINE.format(e.name))
    sys.exit(e.code)
"""


def stop(work, *signals):
    """Exit code and lines of work that is sent signals once it has begun."""
    with subprocess.Popen(
        [sys.executable, "-c", BUSY.format(work=work)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "begun\n"
        for sent in signals:
            time.sleep(0.1)
            process.send_signal(sent)
        return process.communicate(timeout=60)[1].splitlines(), process.returncode


@pytest.mark.parametrize("work", ["with stops.deferred(): compute()", "compute()"])
def test_the_first_signal_is_answered_before_what_cannot_be_broken_off_ends(work):
    lines, code = stop(work, signal.SIGINT)
    held = ["computed"] if "deferred" in work else []
    assert (lines, code) == ([stops.SOON, *held, stops.LINE.format("SIGINT")], 130)


def test_the_second_signal_ends_it_at_once_after_what_must_not_outlive_it():
    lines, code = stop(
        "with stops.before_second_signal(lambda: stops.say('killed')): compute()", signal.SIGINT, signal.SIGTERM
    )
    assert (lines, code) == (["killed"], 143)


def test_in_a_job_of_slurm_only_a_person_hurries(monkeypatch):
    """Slurm repeats SIGTERM while a job saves."""
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    lines, code = stop("with stops.deferred(): compute()", signal.SIGUSR2, signal.SIGTERM, signal.SIGTERM)
    assert (lines, code) == ([stops.SOON, "computed", stops.LINE.format("SIGUSR2")], 140)
    lines, code = stop("with stops.deferred(): compute()", signal.SIGTERM, signal.SIGINT)
    assert (lines, code) == ([stops.SOON], 130)


def test_what_ends_soon_says_so_once():
    lines, code = stop("print('begun', flush=True); import time; time.sleep(30)", signal.SIGTERM)
    assert (lines, code) == ([stops.LINE.format("SIGTERM")], 143)


def test_signals_are_given_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    stops.watch()
    assert signal.getsignal(signal.SIGINT) != before[0]
    stops.unwatch()
    stops.unwatch()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)] == before
