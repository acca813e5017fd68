"""Tries to lose or to falsify a run, and counts how often that succeeds.

python -m tests.reliability kill --times=200 --out=docs/results/reliability-kill.json

  kill   kills runs of launch.train (SIGKILL) at random times, a fifth of them three times, and resumes them until they
         end: state, best weights, metrics and results must be those of an undisturbed run, bit by bit
  stop   the same with SIGTERM and SIGINT while a run compiles, trains, validates and saves; checks exit codes and lines
  flip   flips one bit of one file of a run (of any file) or of a data set: it must be noticed, or change nothing
  soak   trains, stops, resumes and tests in one process, again and again: measures memory, open files and threads

Each ends with exit code 1 if anything was lost or wrong. Runs are processes that are forked from one which has imported
everything and has started no thread. JAX starts its threads in the child. So a start takes no six seconds.
"""

import argparse
import collections
import contextlib
import gc
import itertools
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
import threading
import time
import warnings
from pathlib import Path

import jax
import numpy as np

from cxda_jax import backend, cost, train
from cxda_jax.bench.measure import describe_machine
from cxda_jax.config import read
from cxda_jax.disk import checkpoints, manifest, models, safetensors
from cxda_jax.errors import UserError
from cxda_jax.evaluation import compile_task, evaluate
from cxda_jax.experiment import build_on, open_data
from cxda_jax.progress import MetricsFile
from cxda_jax.study import identity, testing, training
from cxda_jax.study.results import read_results
from launch import cli
from launch import train as trainer

PHASES = {"c": "compiling", "t": "training", "v": "validating", "s": "saving", "e": "testing"}  # by their marks
OPTIONS = ["--config=glyphs:bn,smoke", "--config.train.steps=12", "--config.train.save_every=2",
           "--config.train.log_every=1", "--config.evaluation.every_steps=4", "--config.evaluation.val_tasks=4",
           "--config.evaluation.test_tasks=2", "--config.net.width=8"]  # fmt: skip
# What a soak may add, as a share of the mean. Resident memory creeps towards the heap's size.
LIMITS = {"memory_mb": 0.03, "heap_mb": 0.03, "in_use_mb": 0.03, "open_files": 1e-9, "threads": 1e-9}


class Child:
    """A run of launch.train in a forked process that tells of its phases over a pipe."""

    def __init__(self, workdir, data, *options, largest_file=0):
        """With `largest_file`, no file that is written after the first checkpoint has begun may have more bytes."""
        self.log, self.marks, self.ended = data.with_name(f"{workdir.name}.log"), "", False
        self.reading, self.writing = os.pipe()
        with warnings.catch_warnings(action="ignore"):  # JAX warns of forks; this process has started no thread
            self.pid = os.fork()
        if not self.pid:
            sys.argv = ["train", *OPTIONS, f"--workdir={workdir}", f"--data_dir={data}", *options]
            try:
                self.work(largest_file)
            except SystemExit as e:
                os._exit(int(e.code or 0))
            finally:
                os._exit(1)
        os.close(self.writing)

    def work(self, largest_file):
        """In the child: the command, its phases marked."""
        file = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1), os.dup2(file, 2)

        def mark(sign, where, name):
            work = getattr(where, name)

            def marked(*arguments, **options):
                os.write(self.writing, sign)
                if sign == b"s" and largest_file:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
                try:
                    return work(*arguments, **options)
                finally:
                    os.write(self.writing, b"t")

            setattr(where, name, marked)

        testing.time_task = lambda *_: (0.0, 0.0)
        cost.matmul_peak = lambda **_: 1e9  # these two measure the machine, for as long as such a small training takes
        mark(b"c", train, "init_state"), mark(b"s", checkpoints.Folder, "save")
        mark(b"v", training, "score"), mark(b"e", training, "evaluate_run")
        cli.run(trainer.main)

    def listen(self, seconds):
        """Takes in what the run tells; False once it has ended or the time is over."""
        if self.ended or not select.select([self.reading], [], [], max(0, seconds))[0]:
            return False
        told = os.read(self.reading, 100).decode()
        self.marks, self.ended = self.marks + told, not told
        return bool(told)

    def after(self, seconds, mark="", count=0):
        """Waits so long, or until the phase has begun `count` times, or until the run has ended."""
        until = time.monotonic() + seconds
        while not (mark and self.marks.count(mark) >= count) and self.listen(until - time.monotonic()):
            pass
        return self

    def at(self, mark, count=1):
        return self.after(300, mark, count)

    def send(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
        return self

    def wait(self):
        """Exit code, or minus the number of the signal that ended the run, and output. Two minutes are enough."""
        if not self.after(120).ended:
            self.send(signal.SIGKILL)
        os.close(self.reading)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return code, self.log.read_text(errors="replace") if self.log.exists() else ""


def evidence(workdir):
    """What must not depend on where a run was broken off. Reading it starts no thread, for this process forks again."""
    row = json.loads((workdir / "result.json").read_text())
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    newest = workdir / "last" / str(checkpoints.steps(workdir / "last")[0])
    best, model = workdir / "best" / str(row["best_step"]), workdir / "model"
    told = {folder: json.loads((folder / manifest.NAME).read_text()) for folder in (newest, best, model)}
    same = "weights_hash", "avg", "w10", "best_step", "config_hash", "data_hash", "predictions_sha256"
    return {
        "result": {name: row[name] for name in same},
        "metrics": [[line.get(name) for name in ("step", "loss", "accuracy", "val_score")] for line in lines],
        "weights": [told[folder]["sha256"][f"tree/{checkpoints.ARRAYS}"] for folder in (newest, best)],
        "notes": json.loads((newest / "notes" / "metadata").read_text())["best"],
        "model": told[model],
        "faults": [manifest.find_fault(folder) for folder in told],
    }


def aim(child, what, rng, number, whole):
    """Waits for the moment of a signal, which it returns.

    SIGKILL comes at any time, or soon after a phase has begun, which may be a short one. SIGTERM, or SIGINT each fifth
    time, comes in each phase in turn.
    """
    mark = "ctvs"[number % 4] if what == "stop" else rng.choice("ctvse")
    if what == "stop":
        child.at(mark, 1 if mark == "c" else rng.randint(1, 2)).after(rng.uniform(0, 0.03 if mark in "vs" else 0.3))
    elif rng.random() < 0.5:
        child.after(rng.uniform(0, whole["seconds"]))
    else:
        child.at(mark, rng.randint(1, min(4, whole["marks"].count(mark)))).after(rng.expovariate(1 / 0.05))
    return signal.SIGKILL if what == "kill" else signal.SIGINT if number % 5 == 4 else signal.SIGTERM


def trial(what, number, seed, folder, whole=None):
    """A run that is disturbed and started again until it ends; without `whole`, one that is not disturbed."""
    rng, workdir, anew = random.Random(f"{what} {seed} {number}"), folder / f"run{number}", folder / f"compiled{number}"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(anew if number % 10 == 3 else folder / "compiled")
    hits, faults, times = [], [], 0 if not whole else 3 if what == "kill" and number % 5 == 4 else 1
    for attempt in range(times + 1):
        began, child, wanted, hit = time.monotonic(), Child(workdir, folder / "data"), 0, {}
        if attempt < times:
            sent = aim(child, what, rng, number, whole)
            child.listen(0)
            hit, struck = {"phase": PHASES[child.marks[-1]] if child.marks else "starting"}, time.monotonic()
            child.send(sent)
            wanted = -sent if what == "kill" else 128 + sent
        code, output = child.wait()
        if code == 0:  # it may have ended before it was hit
            break
        if what == "stop" and hit:
            hit |= {"signal": sent.name, "seconds": time.monotonic() - struck}
            said = [line for line in output.splitlines() if line.startswith("stopped by")]
            if len(said) != 1 or sent.name not in said[0] or "Traceback" in output:
                faults.append(f"said {hit}: {output[-600:]}")
        hits += [hit] if hit else []
        if code != wanted:
            faults.append(f"exit code {code} {hit}: {output[-600:]}")
    found = {} if faults else evidence(workdir)
    if not whole:
        assert not faults, faults
        return {"evidence": found, "seconds": time.monotonic() - began, "marks": child.marks}
    faults += [f"{name} differs" for name, value in found.items() if value != whole["evidence"][name]]
    for path in (workdir, anew):
        shutil.rmtree(path, ignore_errors=True)
    return {"number": number, "hits": hits, "faults": faults}


def disturb(what, times, seed, workers=2):
    """Trials of one kind, "kill" or "stop", in several processes."""
    began, trials = time.monotonic(), []
    os.environ |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    with (
        tempfile.TemporaryDirectory(prefix="reliability-", ignore_cleanup_errors=True) as name,
        multiprocessing.get_context("spawn").Pool(workers) as pool,
    ):
        folder = Path(name)
        first, whole = (pool.apply(trial, (what, number, seed, folder)) for number in (-1, -2))
        assert first["evidence"] == whole["evidence"], "the same seed twice gave different bits"
        waiting = [pool.apply_async(trial, (what, number, seed, folder, whole)) for number in range(times)]
        for one in waiting:
            trials.append(one.get())
            if trials[-1]["faults"] or len(trials) % 20 == 0:
                print(f"{len(trials)}/{times}", *trials[-1]["faults"], flush=True)
    hits = collections.Counter(hit["phase"] for trial in trials for hit in trial["hits"])
    failures = sum(bool(trial["faults"]) for trial in trials)
    return {"times": times, "good": times - failures, "failures": failures, "signals": hits.total(),
            "signals_by_phase": dict(hits), "seconds_of_a_whole_run": whole["seconds"],
            "seconds": time.monotonic() - began, "trials": trials}  # fmt: skip


def readers(folder):
    """Folders of a trained run and its data, each with a function that reads it and returns what it read."""
    run, data, config = folder / "run", folder / "data", identity.read_config(folder / "run")
    weights, _ = safetensors.read(run / "model" / models.WEIGHTS, "", "")

    def restored(part):
        newest = run / part / str(checkpoints.steps(run / part)[0])
        like, _ = safetensors.read(newest / "tree" / checkpoints.ARRAYS, "", "")

        def read():
            tree, notes = checkpoints.restore(run / part, like)
            with checkpoints.Folder(run / part):  # a training that goes on opens this too
                return checkpoints.weights_hash(tree), notes

        return run / part, read

    def model():
        tree, notes = models.read_model(run / "model", weights)
        about = identity.read_config(run / "model"), identity.read_record(run / "model")
        return checkpoints.weights_hash(tree), notes, models.read_card(run / "model"), about

    def results():
        """What training, tests and reports read beside the checkpoints. What they say to the user counts as noticed."""
        shutil.copy(run / "metrics.jsonl", folder)
        said, about, (found, faults) = [], (identity.read_config(run), identity.read_record(run)), read_results([run])
        with MetricsFile(folder / "metrics.jsonl", 4, log=said.append):
            pass
        if said or faults:
            raise UserError((said + faults)[0])
        try:
            arrays = [found[0].stored(name) for name in ("predictions", "attention")]
        except ValueError as e:
            raise UserError(str(e)) from e
        read = [{name: array.tolist() for name, array in stored.items()} for stored in arrays]
        return about, found[0].row, read, found[0].curve(), (folder / "metrics.jsonl").read_text()

    def images():
        found = open_data(config, data)
        arrays = [array.tobytes() for array in (found.offsets, found.images, found.labels)]
        return found.info, found.domain_names, found.split, arrays

    return {"last": restored("last"), "best": restored("best"), "model": (run / "model", model),
            "run": (run, results), "data": (data, images)}  # fmt: skip


def flip(times, seed, trained=None):
    """Flips bits of a run and its data, which may lie below `trained`. Each file is chosen as often as any other."""
    rng, outcomes, failures = random.Random(seed), collections.Counter(), []
    with tempfile.TemporaryDirectory(prefix="flips-") as name:
        folder = Path(name)
        if trained:
            for part in ("run", "data"):
                shutil.copytree(
                    trained / part, folder / part, ignore=shutil.ignore_patterns("*,*")
                )  # other tests' results
        else:
            from tests.commands import command  # not above, for it imports the tests' settings

            command("train", "--config=glyphs:cxda,smoke", f"--workdir={folder}/run", f"--data_dir={folder}/data")
        things = readers(folder)
        files = {
            name: sorted(p for p in path.glob("*" if name == "run" else "**/*") if p.is_file() and p.stat().st_size)
            for name, (path, _) in things.items()
        }
        whole = {name: read() for name, (_, read) in things.items()}
        for _ in range(times):
            name = rng.choice(list(things))
            path = rng.choice(files[name])
            kept, told = path.read_bytes(), ""
            bit, data = rng.randrange(8 * len(kept)), bytearray(kept)
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            try:
                outcome = "without effect" if things[name][1]() == whole[name] else "silently wrong"
            except UserError as e:
                line = " ".join(str(e).replace(str(folder), "").split())
                outcome = "noticed" if len(line) <= 200 else "noticed at length"
            except Exception as e:  # a traceback is a failure too
                outcome, told = type(e).__name__, f": {str(e)[:200]}"
            outcomes[f"{name}: {outcome}"] += 1
            if outcome not in ("noticed", "without effect"):
                failures.append(f"{name}: bit {bit} of {path.relative_to(folder)}{told}: {outcome}")
            path.write_bytes(kept)
        assert {name: read() for name, (_, read) in things.items()} == whole
    return {"times": times, "failures": len(failures), "outcomes": dict(outcomes),
            "files": {name: len(found) for name, found in files.items()}, "trials": failures}  # fmt: skip


def soak(seconds):
    """Cycles of training half a run, resuming it to its end, and testing it from its checkpoint."""
    samples, hashes, began = [], set(), time.monotonic()
    config = read("glyphs:cxda,smoke", [("net.width", "8"), ("attention.heads", "1")])
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        workdir, run = Path(folder, "run"), build_on(config, open_data(config, Path(folder)))
        evaluator = compile_task(run.method, run.source)
        like = jax.eval_shape(run.method.init, jax.random.key(0), run.example)

        def test(variables, split="val"):
            return evaluate(evaluator, variables, run.source, run.task_plans(split), 4, "accuracy").mean

        while time.monotonic() - began < seconds or len(samples) < 2:
            workdir.mkdir()
            for calls in (run.schedule.steps // 2, 10**9):
                count, state = itertools.count(), train.init_state(run.method, run.optimizer, 0, run.example)
                parts = run.method, run.optimizer, run.weak, run.source, run.train_plans, state, 0, run.schedule, test
                stopping = lambda count=count, calls=calls: next(count) >= calls  # noqa: E731
                train.train(*parts, workdir, log=lambda line: None, stopping=stopping)
            best, _ = checkpoints.restore(workdir / "best", like)
            test(best, "test")
            hashes.add(checkpoints.weights_hash(best))
            shutil.rmtree(workdir)
            gc.collect()
            heap, pages = backend.heap(), int(Path("/proc/self/statm").read_text().split()[1])
            samples.append({
                "seconds": time.monotonic() - began, "heap_mb": (heap.arena + heap.hblkhd) / 1e6,
                "in_use_mb": (heap.uordblks + heap.hblkhd) / 1e6, "memory_mb": pages * resource.getpagesize() / 1e6,
                "open_files": len(os.listdir("/proc/self/fd")), "threads": threading.active_count(),
            })  # fmt: skip
    added = {name: share_added(samples, name) for name in LIMITS}
    faults = [name for name, limit in LIMITS.items() if added[name] > limit]
    faults += ["weights differ from cycle to cycle"] * (len(hashes) != 1)
    return {"cycles": len(samples), "minutes": samples[-1]["seconds"] / 60, "growth_after_warm_up": added,
            "last": samples[-1], "failures": len(faults), "faults": faults, "samples": samples}  # fmt: skip


def share_added(samples, name):
    """How much a line through the samples rises after the first fifth, in which caches fill, as a share of the mean."""
    kept = [s for s in samples if s["seconds"] > samples[-1]["seconds"] / 5]
    if len(kept) < 3:
        return 0.0
    t, y = (np.array([s[k] for s in kept]) for k in ("seconds", name))
    return float(np.polyfit(t, y, 1)[0] * (t[-1] - t[0]) / y.mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kill", "stop", "flip", "soak"])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--workers", type=int, default=2, help="runs at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    a = parser.parse_args()
    backend.keep_freed_memory()  # before JAX's threads begin, as commands do: each would get an arena of its own
    machine = describe_machine(None)  # before the work, so that the commit is that of the code which is tried
    if a.what in ("kill", "stop"):
        found = disturb(a.what, a.times, a.seed, a.workers)
    else:
        found = flip(a.times, a.seed) if a.what == "flip" else soak(60 * a.minutes)
    print(json.dumps({k: v for k, v in found.items() if k not in ("trials", "samples")}, indent=1))
    if a.out:
        a.out.write_text(json.dumps({"what": a.what, "seed": a.seed} | found | machine, indent=1) + "\n")
    sys.exit(bool(found["failures"]))


if __name__ == "__main__":
    main()
