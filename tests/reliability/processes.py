"""Runs of launch.train that are killed or stopped at random moments and started again until they end.

Each run is a process that is forked from one which has imported everything and has started no thread. JAX starts its threads in
the child. So a start takes a fraction of a second instead of six.
"""

import collections
import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cxda_jax import cost, train
from cxda_jax.disk import checkpoints, manifest
from cxda_jax.study import testing, training
from launch import cli
from launch import train as command

ROOT = Path(__file__).parents[2]
PHASES = {"c": "compiling", "t": "training", "v": "validating", "s": "saving", "e": "testing"}  # by their marks
OPTIONS = ["--config=configs/glyphs.py:bn,smoke", "--config.train.steps=12", "--config.train.save_every=2",
           "--config.train.log_every=1", "--config.evaluation.every_steps=4", "--config.evaluation.val_tasks=4",
           "--config.evaluation.test_tasks=2", "--config.net.width=8"]  # fmt: skip
SAME = ("weights_hash", "avg", "w10", "best_step", "config_hash", "data_hash")


def disturb(what: str, times: int, seed: int, workers: int = 2) -> dict[str, Any]:
    """Makes trials of one kind, "kill" or "stop", in several processes. Returns the record that is written."""
    began, trials = time.monotonic(), []
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    with (
        tempfile.TemporaryDirectory(prefix="reliability-", ignore_cleanup_errors=True) as name,
        multiprocessing.get_context("spawn").Pool(workers) as pool,
    ):
        whole = pool.apply(_undisturbed, (folder := Path(name),))
        for trial in pool.imap_unordered(_trial, [(what, i, seed, folder, whole) for i in range(times)]):
            trials.append(trial)
            if trial["faults"] or len(trials) % 20 == 0:
                print(f"{len(trials)}/{times}", *trial["faults"], flush=True)
    hits = collections.Counter(hit["phase"] for trial in trials for hit in trial["hits"])
    failures = sum(bool(trial["faults"]) for trial in trials)
    return {"times": times, "good": times - failures, "failures": failures, "signals": hits.total(),
            "signals_by_phase": dict(hits), "seconds_of_a_whole_run": whole["seconds"],
            "seconds": time.monotonic() - began, "trials": sorted(trials, key=lambda t: t["number"])}  # fmt: skip


def _undisturbed(folder: Path) -> dict[str, Any]:
    """What an undisturbed run leaves, which must be the same twice, and how long its phases last once programs are cached."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
    found = []
    for name in ("first", "second"):
        began, child = time.monotonic(), Child(folder / name, folder / "data")
        assert child.wait() == 0, child.output()
        found.append(evidence(folder / name))
    assert found[0] == found[1], "the same seed twice gave different bits"
    return {"evidence": found[0], "seconds": time.monotonic() - began, "marks": child.marks}


def _trial(job: tuple[str, int, int, Path, dict[str, Any]]) -> dict[str, Any]:
    what, number, seed, folder, whole = job
    rng, workdir, anew = random.Random(f"{what} {seed} {number}"), folder / f"run{number}", folder / f"compiled{number}"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(anew if number % 10 == 3 else folder / "compiled")
    hits, faults, times = [], [], 3 if what == "kill" and number % 5 == 4 else 1
    for attempt in range(10):
        child = Child(workdir, folder / "data")
        hit = (kill(child, rng, whole) if what == "kill" else stop(child, rng, number)) if attempt < times else None
        code = child.wait()
        if hit:
            hits.append(hit)
            faults += hit.pop("faults")
        elif code:
            faults.append(f"exit code {code}: {child.output()[-600:]}")
        if code == 0 or not hit:
            break
    if not faults and (mine := evidence(workdir)) != whole["evidence"]:
        faults.append("differs in " + ", ".join(k for k in mine if mine[k] != whole["evidence"][k]))
    for path in (workdir, anew):
        shutil.rmtree(path, ignore_errors=True)
    return {"number": number, "hits": hits, "faults": faults}


def kill(child: "Child", rng: random.Random, whole: dict[str, Any]) -> dict[str, Any] | None:
    """SIGKILL at any time, or soon after the beginning of a phase that an undisturbed run has, which may be a short one."""
    if rng.random() < 0.5:
        child.wait_for_time(rng.uniform(0, whole["seconds"]))
    else:
        mark = rng.choice("ctvse")
        child.wait_for_mark(mark, rng.randint(1, min(4, sum(m == mark for m, _ in whole["marks"]))))
        child.wait_for_time(rng.expovariate(1 / 0.05))
    phase, code = child.phase, child.send(signal.SIGKILL).wait()
    faults = [] if code == -signal.SIGKILL else [f"exit code {code}: {child.output()[-600:]}"]
    return {"phase": phase, "faults": faults} if code else None


def stop(child: "Child", rng: random.Random, number: int) -> dict[str, Any] | None:
    """SIGTERM, or SIGINT each fifth time, in each phase in turn."""
    sent, mark = signal.SIGINT if number % 5 == 4 else signal.SIGTERM, "ctvs"[number % 4]
    child.wait_for_mark(mark, 1 if mark == "c" else rng.randint(1, 2))
    child.wait_for_time(rng.uniform(0, 0.03 if mark in "vs" else 0.3))
    phase, began = child.phase, time.monotonic()
    code, output, when = child.send(sent).wait(), child.output(), f"after {sent.name} while {phase}"
    if code == 0:
        return None
    said = [line for line in output.splitlines() if line.startswith("stopped by")]
    faults = [] if code == 128 + sent else [f"exit code {code} {when}: {output[-600:]}"]
    if len(said) != 1 or sent.name not in said[0] or "Traceback" in output:
        faults.append(f"said {when}: {output[-600:]}")
    return {"phase": phase, "signal": sent.name, "seconds": time.monotonic() - began, "faults": faults}


class Child:
    """A run of launch.train in a forked process that tells of its phases over a pipe."""

    def __init__(self, workdir: Path, data: Path, largest_file=0, options: Sequence[str] = (), log: Path | None = None):
        """With `largest_file`, no file that is written after the first checkpoint has begun may have more bytes."""
        workdir.parent.mkdir(parents=True, exist_ok=True)
        self._log = log or workdir.with_suffix(".log")
        self.marks: list[tuple[str, float]] = []
        self._code: int | None = None
        self._reading, writing = os.pipe()
        self._began = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns of forks; this process has started no thread
            self._pid = os.fork()
        if not self._pid:
            os.close(self._reading)
            try:
                _run(workdir, data, self._log, writing, largest_file, options)
            except SystemExit as e:
                os._exit(int(e.code or 0))
            finally:
                os._exit(1)
        os.close(writing)

    @property
    def phase(self) -> str:
        self._listen(0)
        return PHASES[self.marks[-1][0]] if self.marks else "starting"

    def wait_for_time(self, seconds: float) -> bool:
        """Whether the run goes on after so long."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self._listen(left):
            pass
        return time.monotonic() >= until

    def wait_for_mark(self, mark: str, count: int = 1) -> "Child":
        """Until the phase has begun `count` times, or the run has ended."""
        while sum(m == mark for m, _ in self.marks) < count and self._listen(60):
            pass
        return self

    def send(self, number: int) -> "Child":
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)
        return self

    def wait(self) -> int:
        """The exit code, or minus the number of the signal that ended the run. After two minutes the run is killed."""
        if self._code is None:
            if self.wait_for_time(120):
                self.send(signal.SIGKILL)
            os.close(self._reading)
            self._reading = -1
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._code

    def output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def last_line(self, folder: Path) -> str:
        return (self.output().splitlines() or [""])[-1].replace(str(folder), "FOLDER")

    def _listen(self, seconds: float) -> bool:
        """Takes in what the run has told; False once it has ended or the time is over."""
        if self._reading < 0 or not select.select([self._reading], [], [], seconds)[0]:
            return False
        told = os.read(self._reading, 100).decode()
        self.marks += [(mark, time.monotonic() - self._began) for mark in told]
        return bool(told)


def _run(workdir: Path, data: Path, log: Path, told: int, largest_file: int, options: Sequence[str]) -> None:
    """In the child: the command, its phases marked."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(ROOT)

    def marking(mark: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*args: Any, **kwargs: Any) -> Any:
            os.write(told, mark.encode())
            if mark == "s" and largest_file:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
            try:
                return work(*args, **kwargs)
            finally:
                os.write(told, b"t")

        return marked

    testing.time_task = lambda *_: (0.0, 0.0)
    cost.matmul_peak = lambda **_: 1e9  # these two measure the machine, for as long as such a small training takes
    training.score, training.evaluate_run = marking("v", training.score), marking("e", training.evaluate_run)
    checkpoints.Folder.save = marking("s", checkpoints.Folder.save)
    train.init_state = marking("c", train.init_state)
    sys.argv = ["launch.train", *OPTIONS, f"--workdir={workdir}", f"--data_dir={data}", *options]
    cli.run(command.main)


def evidence(workdir: Path) -> dict[str, Any]:
    """What must not depend on where a run was broken off. Reading it starts no thread, since this process forks again."""

    def digest(checkpoint: Path) -> str:
        return hashlib.sha256((checkpoint / "tree" / checkpoints.ARRAYS).read_bytes()).hexdigest()

    row = json.loads((workdir / "result.json").read_text())
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    newest = workdir / "last" / str(checkpoints.steps(workdir / "last")[0])
    best, model = workdir / "best" / str(row["best_step"]), workdir / "model"
    return {
        "result": {k: row[k] for k in SAME}, "predictions": row["predictions_sha256"],
        "losses": {line["step"]: [line[k] for k in ("loss", "accuracy")] for line in lines if "loss" in line},
        "validation": {line["step"]: line["val_score"] for line in lines if "val_score" in line},
        "state": digest(newest), "best": digest(best), "model": (model / "manifest.json").read_text(),
        "notes": json.loads((newest / "notes" / "metadata").read_text())["best"],
        "faults": [manifest.find_fault(path) for path in (newest, best, model)],
    }  # fmt: skip
