"""Kills and stops runs and flips bits of files, fewer times than `python -m tests.reliability` does by hand."""

import contextlib
import ctypes
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest

from tests import reliability
from tests.lines import ROOT
from tests.reliability import Child

gate, exhaustive = pytest.mark.gate, pytest.mark.exhaustive
CLONE_NEWNS, CLONE_NEWUSER, MS_PRIVATE, MS_REC = 1 << 17, 1 << 28, 1 << 18, 1 << 14  # linux/sched.h, sys/mount.h


@exhaustive
@pytest.mark.parametrize(("what", "times", "signals"), [("kill", 6, 3), ("stop", 4, 3)])
def test_runs_that_are_disturbed_end_as_the_one_that_was_not(what, times, signals):
    """Killed at random times, or stopped in each phase. Beside other work, some runs end before they are hit."""
    found = reliability.disturb(what, times, seed=0, workers=1)
    assert found["failures"] == 0, [trial for trial in found["trials"] if trial["faults"]]
    assert found["good"] == times and found["signals"] >= signals


def mishaps(folder):
    """What happens to runs beside one signal: what is wrong with how they end, and whether we may mount a disk."""
    data, wrong = folder / "data", []

    def ends(child, code, line=""):
        found, output = child.wait()
        last = (output.splitlines() or [""])[-1].replace(str(folder), "FOLDER")
        if found != code or not re.match(line, last) or len(last) > 210 and code == 2:
            wrong.append((found, last, code, line))

    twice = Child(folder / "twice", data).at("c")
    for _ in range(2):
        twice.after(0.02).send(signal.SIGTERM)
    assert twice.after(5).ended, "the second signal took its time"
    ends(twice, 143)
    ends(Child(folder / "twice", data), 0)
    replayed = r"step 5: loss \d\.\d+, accuracy \d\.\d+, with the weights of step 12; FOLDER/twice/step5.png$"
    ends(Child(folder / "twice", data, "--replay_step=5"), 0, replayed)
    large = r"error: FOLDER/large/.*(File too large|cannot be written)"
    ends(Child(folder / "large", data, largest_file=30_000), 2, large)
    ends(Child(folder / "large", data), 0)
    gone = Child(folder / "gone", data).at("v")
    shutil.rmtree(folder / "gone", ignore_errors=True)
    ends(gone, 2, "error: FOLDER/gone")
    first = Child(folder / "shared", data).at("s").send(signal.SIGSTOP)  # so that it does not end meanwhile
    ends(Child(folder / "shared", data), 2, r"error: .*shared is in use by process.*or choose another folder$")
    ends(first.send(signal.SIGCONT), 0)
    libc, own = ctypes.CDLL(None, use_errno=True), CLONE_NEWNS if os.geteuid() == 0 else CLONE_NEWNS | CLONE_NEWUSER
    if libc.unshare(own) or libc.mount(b"none", b"/", None, MS_PRIVATE | MS_REC, None):
        return wrong, False
    disk = folder / "disk"
    disk.mkdir()

    def mount(options):
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], check=True)

    mount("size=16m")
    full = Child(disk / "run", data).at("s", 2)
    with open(disk / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(2**12))
    ends(full, 2, r"error: FOLDER/disk/run/.*(No space left on device|the disk has 0 MB left)")
    (disk / "filler").unlink()
    ends(Child(disk / "run", data).at("s").send(signal.SIGTERM), 143)
    mount("remount,ro")
    read_only = r"error: --workdir=FOLDER/disk/run: .*\(Read-only file system\); choose another$"
    ends(Child(disk / "run", data), 2, read_only)
    mount("remount,rw")
    ends(Child(disk / "run", data), 0)
    subprocess.run(["umount", str(disk)], check=True)
    return wrong, True


@exhaustive
def test_other_mishaps_cost_one_line_and_nothing_that_was_saved(tmp_path, monkeypatch):
    """A second signal, a file too large, a folder that vanishes, a second process, a full and a read-only disk."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # forks there meet no thread of ours
        wrong, mounted = pool.apply(mishaps, (tmp_path,))
    assert wrong == []
    if not mounted:
        pytest.skip("this system lets us mount nothing: no full and no read-only disk")


@gate
def test_a_signal_that_is_swallowed_comes_again_and_watching_again_leaves_nothing_behind():
    """As in a callback of the garbage collector, or in __del__."""
    code = """
        import os, signal, sys, threading, time
        from cxda_jax import stops
        class Swallows:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.05)
        found = []
        for _ in range(5):
            stops.watch()
            time.sleep(0.05)
            found.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
        assert found[0] == found[-1] and found[0][0] == 2, found
        try:
            Swallows()
            time.sleep(5)
        except stops.Stopped as e:
            sys.exit(e.code)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout + done.stderr) == (128 + signal.SIGTERM, "")


@gate
def test_a_hundred_flipped_bits_are_noticed_or_change_nothing(smoke):
    found = reliability.flip(100, 0, smoke[0])
    assert found["failures"] == 0, found["trials"]
    assert sum(count for name, count in found["outcomes"].items() if "noticed" in name) > 60
    assert set(found["files"]) == {"last", "best", "model", "run", "data"} and found["files"]["run"] >= 7


@exhaustive
def test_a_soak_of_some_cycles():
    found = reliability.soak(0.0)
    assert found["cycles"] >= 2 and "weights differ from cycle to cycle" not in found["faults"]
    assert found["samples"][-1]["open_files"] > 3
    samples = [{"seconds": float(t), "flat": 100.0, "rising": 100.0 + t} for t in range(100)]
    assert reliability.share_added(samples, "flat") == pytest.approx(0.0, abs=1e-12)
    assert reliability.share_added(samples, "rising") == pytest.approx(79 / 159.5, rel=0.05)
