"""Runs that are killed and stopped, and files that rot: fewer times than `python -m tests.reliability` tries by hand."""

import multiprocessing
import re
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.reliability import flips, processes, soak


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """Children get a compilation cache of their own, and forks must not meet threads: no JAX computation before them."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))


def test_twenty_runs_killed_at_random_times_end_as_the_one_that_was_not():
    found = processes.disturb("kill", times=20, seed=0, workers=1)
    assert found["failures"] == 0, [trial for trial in found["trials"] if trial["faults"]]
    assert found["good"] == 20 and found["signals"] >= 10  # beside other work, some runs end before they are hit


def test_runs_stopped_in_each_phase_say_so_and_end_as_the_one_that_was_not():
    found = processes.disturb("stop", times=4, seed=0, workers=1)
    assert found["failures"] == 0, [trial for trial in found["trials"] if trial["faults"]]
    assert found["good"] == 4 and found["signals"] >= 3


def test_other_mishaps_cost_one_line_and_nothing_that_was_saved(tmp_path):
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # forks there meet no thread of ours
        found = pool.apply(processes.mishaps, (tmp_path,))
    code, _, again = found["a second signal"]
    assert (code, again) == (128 + signal.SIGTERM, "done")
    code, line, again = found["a file too large"]
    assert (code, again) == (2, "done") and line.startswith("error: FOLDER/large/") and len(line) <= 210
    assert "File too large" in line or "cannot be written" in line
    code, line, _ = found["a vanished folder"]
    assert code == 2 and line.startswith("error: FOLDER/gone") and len(line) <= 210
    code, line, _ = found["a second process"]
    assert code == 2 and "shared is in use by process" in line and line.endswith("or choose another folder")
    assert found["the first process"][0] == 0
    code, line, _ = found["a replay"]
    assert code == 0 and re.fullmatch(
        r"step 5: loss \d\.\d+, accuracy \d\.\d+, with the weights of step 12; FOLDER/twice/step5.png", line
    )
    if "a full disk" not in found:
        pytest.skip("this system lets us mount nothing: no full and no read-only disk")
    code, line, _ = found["a full disk"]
    assert code == 2 and line.startswith("error: FOLDER/disk/run/") and len(line) <= 210
    assert "No space left on device" in line or "the disk has 0 MB left" in line
    code, line, _ = found["a read-only disk"]
    assert (code, line) == (
        2,
        "error: --workdir=FOLDER/disk/run: cannot be written (Read-only file system); choose another",
    )
    assert found["a disk that is mended"][0] == 0


def test_a_signal_that_is_swallowed_comes_again():
    """As a callback of the garbage collector, or __del__, would."""
    code = """
        import os, signal, sys, time
        from launch import stops
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
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=processes.ROOT
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "", "")


def test_watching_again_leaves_no_thread_and_no_pipe_behind():
    code = """
        import os, threading, time
        from launch import stops
        found = []
        for _ in range(5):
            stops.watch()
            time.sleep(0.05)
            found.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
        assert found[0] == found[-1] and found[0][0] == 2, found
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=processes.ROOT)


def test_a_hundred_flipped_bits_are_noticed_or_change_nothing():
    found = flips.flip(100, seed=0)
    assert found["failures"] == 0, found["trials"]
    noticed = sum(count for name, count in found["outcomes"].items() if "noticed" in name)
    assert (
        noticed > 80 and set(found["files"]) == {"last", "best", "model", "run", "data"} and found["files"]["run"] >= 7
    )


def test_a_soak_of_some_cycles(tmp_path):
    found = soak.soak(0.0, tmp_path / "soak.json")
    assert found["cycles"] >= 2 and "weights differ from cycle to cycle" not in found["faults"]
    assert (tmp_path / "soak.svg").stat().st_size > 5000 and found["samples"][-1]["open_files"] > 3


def test_growth_is_what_a_line_adds():
    flat = [{"seconds": float(t), "memory_mb": 100.0} for t in range(100)]
    rising = [{"seconds": float(t), "memory_mb": 100.0 + t} for t in range(100)]
    assert soak.growth(flat, "memory_mb") == pytest.approx(0.0, abs=1e-12)
    assert soak.growth(rising, "memory_mb") == pytest.approx(79 / 159.5, rel=0.05)
