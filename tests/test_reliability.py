"""Kills and stops runs and flips bits of files, fewer times than `python -m tests.reliability` does by hand."""

import multiprocessing
import re
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.reliability import flips, mishaps, processes, soak


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """Children get a compilation cache of their own, and forks must not meet threads: no JAX computation before them."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))


@pytest.mark.parametrize(("what", "times", "signals"), [("kill", 20, 10), ("stop", 4, 3)])
def test_runs_that_are_disturbed_end_as_the_one_that_was_not(what, times, signals):
    """Killed at random times, or stopped in each phase. Beside other work, some runs end before they are hit."""
    found = processes.disturb(what, times, seed=0, workers=1)
    assert found["failures"] == 0, [trial for trial in found["trials"] if trial["faults"]]
    assert found["good"] == times and found["signals"] >= signals


MISHAPS = {  # exit code, last line, and how the run ends when it is started again
    "a second signal": (143, "", "done"),
    "a file too large": (2, r"error: FOLDER/large/.*(File too large|cannot be written)", "done"),
    "a vanished folder": (2, r"error: FOLDER/gone", ""),
    "a second process": (2, r"error: .*shared is in use by process.*or choose another folder$", ""),
    "the first process": (0, "", ""),
    "a replay": (
        0, r"step 5: loss \d\.\d+, accuracy \d\.\d+, with the weights of step 12; FOLDER/twice/step5.png$", ""),
    "a full disk": (2, r"error: FOLDER/disk/run/.*(No space left on device|the disk has 0 MB left)", ""),
    "a read-only disk": (2, r"error: --workdir=FOLDER/disk/run: .*\(Read-only file system\); choose another$", ""),
    "a disk that is mended": (0, "", ""),
}  # fmt: skip


def test_other_mishaps_cost_one_line_and_nothing_that_was_saved(tmp_path):
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # forks there meet no thread of ours
        found = pool.apply(mishaps.mishaps, (tmp_path,))
    for name, (code, line, again) in found.items():
        wanted_code, wanted_line, wanted_again = MISHAPS[name]
        assert code == wanted_code and again.startswith(wanted_again), (name, code, line, again)
        assert re.match(wanted_line, line) and (len(line) <= 210 or code != 2), (name, line)
    if "a full disk" not in found:
        assert len(found) == 6
        pytest.skip("this system lets us mount nothing: no full and no read-only disk")
    assert set(found) == set(MISHAPS)


def in_another_process(code):
    program = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(program, capture_output=True, text=True, cwd=processes.ROOT)
    return done.returncode, done.stdout + done.stderr


def test_a_signal_that_is_swallowed_comes_again():
    """As in a callback of the garbage collector, or in __del__."""
    code = """
        import os, signal, sys, time
        from cxda_jax import stops
        class Swallows:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.05)
        stops.watch()
        try:
            Swallows()
            time.sleep(5)
        except stops.Stopped as e:
            sys.exit(e.code)
    """
    assert in_another_process(code) == (128 + signal.SIGTERM, "")


def test_watching_again_leaves_no_thread_and_no_pipe_behind():
    code = """
        import os, threading, time
        from cxda_jax import stops
        found = []
        for _ in range(5):
            stops.watch()
            time.sleep(0.05)
            found.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
        assert found[0] == found[-1] and found[0][0] == 2, found
    """
    assert in_another_process(code) == (0, "")


def test_a_hundred_flipped_bits_are_noticed_or_change_nothing():
    found = flips.flip(100, seed=0)
    assert found["failures"] == 0, found["trials"]
    assert sum(count for name, count in found["outcomes"].items() if "noticed" in name) > 80
    assert set(found["files"]) == {"last", "best", "model", "run", "data"} and found["files"]["run"] >= 7


def test_a_soak_of_some_cycles(tmp_path):
    found = soak.soak(0.0, tmp_path / "soak.json")
    assert found["cycles"] >= 2 and "weights differ from cycle to cycle" not in found["faults"]
    assert (tmp_path / "soak.svg").stat().st_size > 5000 and found["samples"][-1]["open_files"] > 3


def test_the_share_added_is_what_a_line_rises():
    samples = [{"seconds": float(t), "flat": 100.0, "rising": 100.0 + t} for t in range(100)]
    assert soak.share_added(samples, "flat") == pytest.approx(0.0, abs=1e-12)
    assert soak.share_added(samples, "rising") == pytest.approx(79 / 159.5, rel=0.05)
