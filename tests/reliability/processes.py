"""Runs of launch.train that are killed or stopped at random moments and started again until they end.

Each run is a process forked from one that has imported everything and has started no thread: JAX's own come later, in the
child. So a start takes a fraction of a second in place of six.
"""

import collections
import contextlib
import ctypes
import hashlib
import json
import multiprocessing
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PHASES = {"c": "compiling", "t": "training", "v": "validating", "s": "saving", "e": "testing"}
OPTIONS = ["--config=configs/glyphs.py:bn,smoke", "--config.train.steps=12", "--config.train.save_every=2",
           "--config.train.log_every=1", "--config.evaluation.every_steps=4", "--config.evaluation.val_tasks=4",
           "--config.evaluation.test_tasks=2", "--config.net.width=8"]  # fmt: skip
CLONE_NEWNS, CLONE_NEWUSER = 1 << 17, 1 << 28  # of linux/sched.h
SAME = ("weights_hash", "avg", "w10", "best_step", "config_hash", "data_hash")


def disturb(what: str, times: int, seed: int, workers: int = 2) -> dict[str, Any]:
    """Trials of one kind in several processes; the record that is written."""
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="reliability-"))
    try:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            whole = pool.apply(_reference, (folder / "whole", folder / "data"))
        with context.Pool(workers, maxtasksperchild=None) as pool:
            jobs = [(what, i, seed, folder, whole) for i in range(times)]
            trials = []
            for trial in pool.imap_unordered(_trial, jobs):
                trials.append(trial)
                if trial["faults"] or len(trials) % 20 == 0:
                    print(f"{len(trials)}/{times}", *trial["faults"], flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    hits = collections.Counter(hit["phase"] for trial in trials for hit in trial["hits"])
    failures = [trial for trial in trials if trial["faults"]]
    return {
        "times": times, "good": times - len(failures), "failures": len(failures), "signals": sum(hits.values()),
        "signals_by_phase": dict(hits), "seconds_of_a_whole_run": whole["seconds"],
        "seconds": time.monotonic() - began, "trials": sorted(trials, key=lambda t: t["number"]),
    }  # fmt: skip


def _reference(workdir: Path, data: Path) -> dict[str, Any]:
    """What an undisturbed run leaves, the same twice; and how long its phases last once programs are cached."""
    found = []
    for name in ("first", "second"):
        began = time.monotonic()
        child = Child(workdir / name, data)
        code = child.wait()
        assert code == 0, child.output()
        found.append(evidence(workdir / name))
    assert found[0] == found[1], "the same seed twice gave different bits"
    return {"evidence": found[0], "seconds": time.monotonic() - began, "marks": child.marks}


def _trial(job: tuple[str, int, int, Path, dict[str, Any]]) -> dict[str, Any]:
    what, number, seed, folder, whole = job
    rng, workdir = random.Random(f"{what} {seed} {number}"), folder / f"run{number}"
    if number % 10 == 3:  # a tenth of the runs compile anew
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / f"compiled{number}")
    else:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
    disturbance: Callable[..., dict[str, Any] | None] = kill if what == "kill" else stop
    hits, faults, times = [], [], 3 if what == "kill" and number % 5 == 4 else 1
    for attempt in range(10):
        child = Child(workdir, folder / "data")
        hit = disturbance(child, rng, number, whole) if attempt < times else None
        code = child.wait()
        if hit:
            hits.append(hit)
            faults += hit.pop("faults")
        if code == 0:
            break
        if not hit:
            faults.append(f"exit code {code}: {child.output()[-600:]}")
            break
    if not faults and evidence(workdir) != whole["evidence"]:
        mine = evidence(workdir)
        faults.append("differs in " + ", ".join(k for k in mine if mine[k] != whole["evidence"][k]))
    shutil.rmtree(workdir, ignore_errors=True)
    shutil.rmtree(folder / f"compiled{number}", ignore_errors=True)
    return {"number": number, "hits": hits, "faults": faults}


def kill(child: "Child", rng: random.Random, number: int, whole: dict[str, Any]) -> dict[str, Any] | None:
    """SIGKILL at any time, or at the beginning of one of the phases that an undisturbed run has; they may be short."""
    del number
    if rng.random() < 0.5:
        child.wait_for_time(rng.uniform(0, whole["seconds"]))
    else:
        mark = rng.choice("ctvse")
        child.wait_for_mark(mark, rng.randint(1, min(4, sum(m == mark for m, _ in whole["marks"]))))
        child.wait_for_time(rng.expovariate(1 / 0.05))
    phase = child.phase
    child.send(signal.SIGKILL)
    code = child.wait()
    faults = [] if code in (0, -signal.SIGKILL) else [f"exit code {code}: {child.output()[-600:]}"]
    return {"phase": phase, "faults": faults} if code else None


def stop(child: "Child", rng: random.Random, number: int, whole: dict[str, Any]) -> dict[str, Any] | None:
    """SIGTERM, or SIGINT each fifth time, in each phase in turn."""
    del whole
    sent = signal.SIGINT if number % 5 == 4 else signal.SIGTERM
    mark = "ctvs"[number % 4]
    child.wait_for_mark(mark, 1 if mark == "c" else rng.randint(1, 2))
    child.wait_for_time(rng.uniform(0, 0.03 if mark in "vs" else 0.3))
    phase = child.phase
    child.send(sent)
    began = time.monotonic()
    code, faults = child.wait(), []
    if code == 0:
        return None
    if code != 128 + sent:
        faults.append(f"exit code {code} after {sent.name} while {phase}: {child.output()[-600:]}")
    said = [line for line in child.output().splitlines() if line.startswith("stopped by")]
    if len(said) != 1 or sent.name not in said[0] or "Traceback" in child.output():
        faults.append(f"said after {sent.name} while {phase}: {child.output()[-600:]}")
    return {"phase": phase, "signal": sent.name, "seconds": time.monotonic() - began, "faults": faults}


class Child:
    """A run of launch.train in a forked process that tells of its phases over a pipe."""

    def __init__(
        self, workdir: Path, data: Path, largest_file: int = 0, options: Sequence[str] = (), log: Path | None = None
    ) -> None:
        """From its first checkpoint on, the run's files may have no more than `largest_file` bytes: like a full disk."""
        workdir.parent.mkdir(parents=True, exist_ok=True)
        self._log = log or workdir.with_suffix(".log")
        self.marks: list[tuple[str, float]] = []
        self._code: int | None = None
        _import_everything()
        self._reading, writing = os.pipe()
        self._began = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns of forks; this process has started no thread
            self._pid = os.fork()
        if not self._pid:
            os.close(self._reading)
            _run(workdir, data, self._log, writing, largest_file, options)
        os.close(writing)

    @property
    def phase(self) -> str:
        self._listen(0)
        return PHASES[self.marks[-1][0]] if self.marks else "starting"

    def wait_for_time(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self._listen(left):
            pass

    def wait_for_mark(self, mark: str, count: int) -> None:
        """Until the phase has begun `count` times, or the run has ended."""
        while sum(m == mark for m, _ in self.marks) < count and self._listen(60):
            pass

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def wait(self) -> int:
        """The exit code; minus the signal's number where one ended it. After two minutes the run is killed."""
        if self._code is None:
            until = time.monotonic() + 120
            while self._listen(max(0.0, until - time.monotonic())):
                pass
            if time.monotonic() >= until:
                self.send(signal.SIGKILL)
            os.close(self._reading)
            self._reading = -1
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._code

    def output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def _listen(self, seconds: float) -> bool:
        """Takes in what the run has told; False once it has ended or the time is over."""
        if self._reading < 0 or not select.select([self._reading], [], [], seconds)[0]:
            return False
        told = os.read(self._reading, 100).decode()
        self.marks += [(mark, time.monotonic() - self._began) for mark in told]
        return bool(told)


def _import_everything() -> None:
    import launch.train  # noqa: F401


def _run(workdir: Path, data: Path, log: Path, writing: int, largest_file: int, options: Sequence[str]) -> None:
    """In the child: the command, its phases marked."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code: Any = 1
    try:
        os.chdir(ROOT)
        from cxda_jax import checkpoints, cost, train
        from launch import cli
        from launch import evaluate as command_test
        from launch import train as command

        def marking(mark: str, work: Callable[..., Any]) -> Callable[..., Any]:
            def marked(*args: Any, **kwargs: Any) -> Any:
                os.write(writing, mark.encode())
                if mark == "s" and largest_file:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
                try:
                    return work(*args, **kwargs)
                finally:
                    os.write(writing, b"t")

            return marked

        command_test.time_task = lambda *_: (0.0, 0.0)
        cost.matmul_peak = lambda **_: 1e9  # these two measure the machine, for as long as such a small training takes
        command.score = marking("v", command.score)
        command.evaluate_run = marking("e", command.evaluate_run)
        checkpoints.Folder.save = marking("s", checkpoints.Folder.save)
        train.init_state = marking("c", train.init_state)
        sys.argv = ["launch.train", *OPTIONS, f"--workdir={workdir}", f"--data_dir={data}", *options]
        cli.run(command.main)
    except SystemExit as e:
        code = e.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def mishaps(folder: Path) -> dict[str, tuple[int, str, str]]:
    """What else happens to runs: each one's exit code, its last line, and how it ends when it is started again."""
    data, found = folder / "data", {}

    def again(workdir: Path) -> str:
        child = Child(workdir, data)
        return "done" if child.wait() == 0 else child.output().splitlines()[-1]

    def end(name: str, child: Child, workdir: Path) -> None:
        code, lines = child.wait(), child.output().splitlines() or [""]
        found[name] = code, lines[-1].replace(str(folder), "FOLDER"), again(workdir)

    child = Child(folder / "twice", data)
    child.wait_for_mark("c", 1)
    child.send(signal.SIGTERM)
    child.wait_for_time(0.02)
    child.send(signal.SIGTERM)
    began = time.monotonic()
    child.wait()
    assert time.monotonic() - began < 5, "the second signal took its time"
    end("a second signal", child, folder / "twice")
    child = Child(folder / "large", data, largest_file=30_000)
    end("a file too large", child, folder / "large")
    found |= full_and_fixed(folder, data) if may_mount() else {}
    child = Child(folder / "gone", data)
    child.wait_for_mark("v", 1)
    shutil.rmtree(folder / "gone", ignore_errors=True)
    end("a vanished folder", child, folder / "gone")
    child = Child(folder / "shared", data)
    child.wait_for_mark("s", 1)
    child.send(signal.SIGSTOP)  # so that it does not end meanwhile
    end("a second process", Child(folder / "shared2" / ".." / "shared", data), folder / "twice")
    child.send(signal.SIGCONT)
    found["the first process"] = child.wait(), "", ""
    child = Child(folder / "twice", data, options=["--replay_step=5"])
    end("a replay", child, folder / "twice")
    return found


def may_mount() -> bool:
    """Gives this process, and those it starts, mounts of their own; false where the system does not let it."""
    libc, private = ctypes.CDLL(None, use_errno=True), 1 << 18 | 1 << 14  # MS_PRIVATE | MS_REC
    own = CLONE_NEWNS if os.geteuid() == 0 else CLONE_NEWNS | CLONE_NEWUSER
    return not libc.unshare(own) and not libc.mount(b"none", b"/", None, private, None)


def full_and_fixed(folder: Path, data: Path) -> dict[str, tuple[int, str, str]]:
    """A disk that fills up while a run saves, and one that nothing can be written to any more."""

    def mount(path: Path, options: str) -> None:
        path.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)

    def line(child: Child) -> tuple[int, str]:
        return child.wait(), (child.output().splitlines() or [""])[-1].replace(str(folder), "FOLDER")

    disk, log, found = folder / "disk", folder / "disk.log", {}
    mount(disk, "size=16m")
    child = Child(disk / "run", data, log=log)
    child.wait_for_mark("s", 2)
    with open(disk / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(2**12))
    found["a full disk"] = *line(child), ""
    (disk / "filler").unlink()
    child = Child(disk / "run", data, log=log)
    child.wait_for_mark("s", 1)
    child.send(signal.SIGTERM)
    child.wait()
    mount(disk, "remount,ro")
    found["a read-only disk"] = *line(Child(disk / "run", data, log=log)), ""
    mount(disk, "remount,rw")
    found["a disk that is mended"] = *line(Child(disk / "run", data, log=log)), ""
    subprocess.run(["umount", str(disk)], check=True)
    return found


def evidence(workdir: Path) -> dict[str, Any]:
    """What must not depend on where a run was broken off; found in a process of its own, so that this one starts no thread."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(writing, json.dumps(_evidence(workdir)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def _evidence(workdir: Path) -> dict[str, Any]:
    from cxda_jax import checkpoints, manifest

    row = json.loads((workdir / "result.json").read_text())
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    curve = {line["step"]: [line[k] for k in ("loss", "accuracy")] for line in lines if "loss" in line}
    scores = {line["step"]: line["val_score"] for line in lines if "val_score" in line}
    newest = workdir / "last" / str(checkpoints.steps(workdir / "last")[0])
    return {
        "result": {k: row[k] for k in SAME},
        "predictions": row["predictions_sha256"],
        "losses": curve,
        "validation": scores,
        "state": _hash(newest),
        "best": _hash(workdir / "best" / str(row["best_step"])),
        "notes": json.loads((newest / "notes" / "metadata").read_text())["best"],
        "model": [(workdir / "model" / "manifest.json").read_text()],
        "faults": [
            manifest.find_fault(p) for p in (newest, workdir / "best" / str(row["best_step"]), workdir / "model")
        ],
    }


def _hash(checkpoint: Path) -> str:
    from cxda_jax import checkpoints

    return hashlib.sha256((checkpoint / "tree" / checkpoints.ARRAYS).read_bytes()).hexdigest()
