"""Other things that happen to runs: a second signal, a second process, a folder that vanishes, a disk that fills up."""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
from pathlib import Path

from tests.reliability.processes import Child

CLONE_NEWNS, CLONE_NEWUSER, MS_PRIVATE, MS_REC = 1 << 17, 1 << 28, 1 << 18, 1 << 14  # linux/sched.h, sys/mount.h


def mishaps(folder: Path) -> dict[str, tuple[int, str, str]]:
    """Each mishap's exit code, last line, and how the run ends when it is started again."""
    data, found = folder / "data", {}

    def end(name: str, child: Child, workdir: Path) -> None:
        code, line, again = child.wait(), child.last_line(folder), Child(workdir, data)
        found[name] = code, line, "done" if again.wait() == 0 else again.last_line(folder)

    child = Child(folder / "twice", data).wait_for_mark("c")
    for _ in range(2):
        child.wait_for_time(0.02)
        child.send(signal.SIGTERM)
    assert not child.wait_for_time(5), "the second signal took its time"
    end("a second signal", child, folder / "twice")
    end("a file too large", Child(folder / "large", data, largest_file=30_000), folder / "large")
    found |= full_and_fixed(folder, data)
    child = Child(folder / "gone", data).wait_for_mark("v")
    shutil.rmtree(folder / "gone", ignore_errors=True)
    end("a vanished folder", child, folder / "gone")
    first = Child(folder / "shared", data).wait_for_mark("s").send(signal.SIGSTOP)  # so that it does not end meanwhile
    end("a second process", Child(folder / "shared2" / ".." / "shared", data), folder / "twice")
    found["the first process"] = first.send(signal.SIGCONT).wait(), "", ""
    end("a replay", Child(folder / "twice", data, options=["--replay_step=5"]), folder / "twice")
    return found


def full_and_fixed(folder: Path, data: Path) -> dict[str, tuple[int, str, str]]:
    """A disk that fills up while a run saves, and one that becomes read-only and is mended, where we may mount one."""
    libc, own = ctypes.CDLL(None, use_errno=True), CLONE_NEWNS if os.geteuid() == 0 else CLONE_NEWNS | CLONE_NEWUSER
    if libc.unshare(own) or libc.mount(b"none", b"/", None, MS_PRIVATE | MS_REC, None):
        return {}
    disk, found = folder / "disk", {}
    disk.mkdir()

    def mount(options: str) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], check=True)

    def start() -> Child:
        return Child(disk / "run", data, log=folder / "disk.log")

    mount("size=16m")
    child = start().wait_for_mark("s", 2)
    with open(disk / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(2**12))
    found["a full disk"] = child.wait(), child.last_line(folder), ""
    (disk / "filler").unlink()
    start().wait_for_mark("s").send(signal.SIGTERM).wait()
    for name, options in (("a read-only disk", "remount,ro"), ("a disk that is mended", "remount,rw")):
        mount(options)
        child = start()
        found[name] = child.wait(), child.last_line(folder), ""
    subprocess.run(["umount", str(disk)], check=True)
    return found
