"""Tries to lose or to falsify a run, and counts how often that succeeds.

python -m tools.reliability kill --times=200 --out=docs/results/reliability-kill.json

  kill    kills runs of launch.train (SIGKILL) at random times, and resumes them until they end: state, best weights,
          metrics and results must be those of an undisturbed run, bit by bit
  stop    the same with SIGTERM and SIGINT while a run compiles, trains, validates and saves; checks codes and lines
  flip    flips one bit of one file of a run (of any file) or of a data set: it must be noticed, or change nothing
  disk    fills a disk; it mounts one, so start it under unshare --mount
  save    kills writers of adapters, models, exports, results, features and buffers at random times: the old one or the
          new one is there, whole, and the same call goes on; half of the writers stand in the folder
  refuse  limits the size of files, and fills a disk of one megabyte where we may mount one, while those are saved
  damage  flips a bit of one of these files, or cuts it: it must be noticed, or change nothing

Each ends with an exit code other than 0 if anything was lost or wrong. Runs are forked from a process that has imported
everything and has started no thread. JAX starts its threads in the child. So a start takes no six seconds.
"""

import argparse
import collections
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from PIL import Image

import cxda_jax
from cxda_jax.adapter import adapter as adapters
from cxda_jax.adapter import features
from cxda_jax.adapter.encoders import Encoder
from cxda_jax.disk import checkpoints, files, folders, manifest, models, safetensors
from cxda_jax.disk.reading import read_object
from cxda_jax.errors import UserError
from cxda_jax.export import exporting
from cxda_jax.machine import cost, stops
from cxda_jax.studies import identity, testing, training
from cxda_jax.studies.folders import FILES, read_results, write_arrays
from cxda_jax.studies.result import read_arrays, to_row
from cxda_jax.training import loop
from cxda_jax.training.experiment import open_data
from launch import cli
from launch import train as trainer
from tools.bench.measure import describe_machine

FORKS = multiprocessing.get_context("forkserver")
PHASES = {"c": "compiling", "t": "training", "v": "validating", "s": "saving", "e": "testing"}  # by their marks
OPTIONS = ["--config=glyphs:bn,smoke", "--config.train.steps=12", "--config.train.save_every=2",
           "--config.train.log_every=1", "--config.evaluation.every_steps=4", "--config.evaluation.val_tasks=4",
           "--config.evaluation.test_tasks=2", "--config.net.width=8"]  # fmt: skip
SAME = ("weights_hash", "avg", "w10", "best_step", "config_hash", "data_hash", "predictions_sha256")


class Run(FORKS.Process):
    """A run of launch.train that has begun. Data and compiled programs lie beside its folder."""

    def __init__(self, workdir, *options):
        super().__init__(daemon=True)
        self.workdir, self.options = workdir, options
        self.path("marks").write_text("")
        self.start()

    def path(self, end):
        return Path(f"{self.workdir}.{end}")

    def run(self):
        """In the child: the command, its phases marked in a file."""
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(self.workdir.with_name("compiled"))
        log, marks = (os.open(self.path(end), os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for end in ("log", "marks"))
        for output in (1, 2):
            os.dup2(log, output)

        def mark(sign, where, name):
            work = getattr(where, name)

            def marked(*arguments, **options):
                os.write(marks, sign)
                done = work(*arguments, **options)
                os.write(marks, b"t")
                return done

            setattr(where, name, marked)

        mark(b"c", loop, "init_state")
        mark(b"s", checkpoints.Folder, "save")
        mark(b"v", training, "score")
        mark(b"e", training, "evaluate_run")
        testing.time_task = lambda *_: (0.0, 0.0)
        cost.matmul_peak = lambda **_: 1e9  # these two measure the machine, for as long as such a small training takes
        where = f"--workdir={self.workdir}", f"--data_dir={self.workdir.with_name('data')}"
        sys.argv = ["train", *OPTIONS, *where, *self.options]
        cli.run(trainer.main)

    def after(self, seconds):
        self.join(seconds)
        return self

    def at(self, mark, count=1):
        """Waits until a phase has begun so many times, or the run has ended."""
        while self.path("marks").read_text().count(mark) < count and self.is_alive():
            time.sleep(0.002)
        return self

    def send(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
        return self

    def ends(self, code, line=""):
        """Asserts an exit code, or minus the number of a signal, and the last line. Returns all lines."""
        if self.after(300).is_alive():
            self.send(signal.SIGKILL).after(60)
        output = self.path("log").read_text(errors="replace").replace(str(self.workdir.parent), "FOLDER")
        lines = output.splitlines() or [""]
        found = f"{self.exitcode}, not {code} {line}: {output[-600:]}"
        assert self.exitcode == code and re.match(line, lines[-1]), found
        assert "Traceback" not in output and (len(lines[-1]) <= 210 or code != 2), output[-600:]
        return lines


def evidence(workdir):
    """What must not depend on where a run was broken off."""
    row = json.loads((workdir / "result.json").read_text())
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    newest = workdir / "last" / str(checkpoints.steps(workdir / "last")[0])
    folders = newest, workdir / "best" / str(row["best_step"]), workdir / "model"
    told = [json.loads((folder / manifest.NAME).read_text()) for folder in folders]
    return {
        "result": {name: row[name] for name in SAME},
        "metrics": [[line.get(name) for name in ("step", "loss", "accuracy", "val_score")] for line in lines],
        "weights": [each["sha256"][f"tree/{checkpoints.ARRAYS}"] for each in told[:2]],
        "notes": json.loads((newest / "notes" / "metadata").read_text())["best"],
        "model": told[2],
        "faults": [manifest.find_fault(*each) for each in zip(folders, (one["sha256"] for one in told), strict=True)],
    }


def strike(run, what, number, rng, marks, seconds):
    """Sends a signal to a run, and says in which phase, or "" where it had ended. `marks` are those of a whole run."""
    mark = "ctvs"[number % 4] if what == "stop" else rng.choice("ctvse")
    if what == "kill" and rng.random() < 0.5:
        run.after(rng.uniform(0, seconds))
    else:
        run.at(mark, rng.randint(1, min(2, marks.count(mark)))).after(rng.expovariate(1 / 0.05))
    sent = signal.SIGKILL if what == "kill" else signal.SIGINT if number % 5 == 4 else signal.SIGTERM
    phase = PHASES[(run.path("marks").read_text() or "t")[-1]]
    if run.send(sent).after(300).exitcode == 0:
        return ""
    lines = run.ends(-sent if what == "kill" else 128 + sent)
    said = [line for line in lines if line.startswith("stopped by")]
    assert said == ([] if what == "kill" else [stops.LINE.format(sent.name)]), lines
    return phase


def disturb(what, folder, times):
    """Runs are disturbed and then started again: how often a signal came in each phase, and what was wrong."""
    began, whole = time.monotonic(), Run(folder / "whole")
    whole.ends(0)
    marks, seconds = whole.path("marks").read_text(), time.monotonic() - began
    expected = evidence(folder / "whole")

    def trial(number):
        rng, workdir, phase, fault = random.Random(f"{what} {number}"), folder / f"run{number}", "", ""
        try:
            phase = strike(Run(workdir), what, number, rng, marks, seconds)
            Run(workdir).ends(0)
            assert evidence(workdir) == expected, [n for n, x in evidence(workdir).items() if x != expected[n]]
        except AssertionError as e:
            fault = f"{what} {number}, {phase}: {e}"
        shutil.rmtree(workdir, ignore_errors=True)
        print(fault or f"{what} {number}: {phase}", flush=True)
        return phase, fault

    with ThreadPoolExecutor(2) as pool:
        phases, faults = zip(*pool.map(trial, range(times)), strict=True)
    return collections.Counter(filter(None, phases)), list(filter(None, faults))


def read(folder, likes):
    """All that training, tests and reports read of a run and its data. What they say to the user counts as noticed."""
    run, config = folder / "run", identity.read_config(folder / "run")
    found = [part_of(at) for part_of in (identity.read_config, identity.read_record) for at in (run, run / "model")]
    for part, like in zip((run / "last", run / "best"), likes[:2], strict=True):
        found.append(checkpoints.restore(part, like))
        with checkpoints.Folder(part):  # a training that goes on opens this too
            pass
    found += [models.read_model(run / "model", likes[2]), models.read_card(run / "model")]
    results, faults = read_results([run])
    if faults:
        raise UserError(faults[0])
    try:
        found += [results[0].stored(), results[0].stored("attention"), to_row(results[0]), results[0].curve()]
    except ValueError as e:
        raise UserError(str(e)) from e
    data = open_data(config, folder / "data")
    found += [data.info, data.domain_names, data.split, data.offsets, data.images, data.labels]
    return [x.tobytes() if hasattr(x, "tobytes") else x for x in jax.tree.leaves(found)]


def flip(folder, times):
    """Flips bits of a trained run and its data: how often what came of it, and what was wrong."""
    rng, outcomes, faults = random.Random(0), collections.Counter(), []
    arrays = [max((folder / "run" / part).glob(f"*/tree/{checkpoints.ARRAYS}")) for part in ("last", "best")]
    likes = [safetensors.read(path, "", "")[0] for path in (*arrays, folder / "run" / "model" / models.WEIGHTS)]
    whole = read(folder, likes)
    parts = {"run": "*", "run/last": "**/*", "run/best": "**/*", "run/model": "*", "data": "**/*"}
    for _ in range(times):
        part = rng.choice(list(parts))
        path = rng.choice(sorted(p for p in (folder / part).glob(parts[part]) if p.is_file() and p.stat().st_size))
        kept = path.read_bytes()
        bit, changed = rng.randrange(8 * len(kept)), bytearray(kept)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            outcome = "without effect" if read(folder, likes) == whole else "silently wrong"
        except UserError as e:
            line = " ".join(str(e).replace(str(folder), "").split())
            outcome = "noticed" if len(line) <= 200 else "noticed at length"
        except Exception as e:  # a traceback is a fault too
            outcome = repr(e)[:200]
        outcomes[outcome] += 1
        if outcome not in ("noticed", "without effect"):
            faults.append(f"bit {bit} of {path.relative_to(folder)}: {outcome}")
        path.write_bytes(kept)
    return outcomes, faults


def fill_disk(folder):
    """A run on a full disk ends with a line, and goes on once there is room."""
    run = folder / "run"
    run.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(run)], check=True)
    full = Run(run).at("s", 2)
    with open(run / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(2**12))
    full.ends(2, r"error: FOLDER/run/.*No space left on device")
    (run / "filler").unlink()
    Run(run).ends(0)
    subprocess.run(["umount", str(run)], check=True)


@functools.cache
def like_of_tiny():
    example = adapters.as_images(np.zeros((1, 5), np.float32))
    return jax.eval_shape(adapters.method_of(3).init, jax.random.key(0), example)


PART = 2**-20  # so that shares are below 1


def tiny_adapter(number):
    """An adapter of three classes and two numbers of a style, in which every number is this one, or this PART of 1."""
    report = {
        "overall": {"plain": 1.0, **dict.fromkeys(map(str, adapters.SIZES), [1.0] * 3)}, "steps": number, "tasks": 1,
        "calibration": dict.fromkeys(map(str, adapters.SIZES), {"temperature": 1.0}), "drift": {"limit": None},
    }  # fmt: skip
    shapes = {"scale": (), "bias": 3, "shares": 3, **dict.fromkeys(("centre", "between", "within"), 2)}
    shapes |= {"thresholds": (2, 9), **dict.fromkeys(("accepted", "wrong"), (2, 4, 9))}
    known = {name: np.full(shape, number * PART, np.float32) for name, shape in shapes.items()}
    variables = jax.tree.map(lambda leaf: np.full(leaf.shape, number * PART, leaf.dtype), like_of_tiny())
    return adapters.Adapter(3, 2, "style", number, variables, known, report, "tiny")


def only(*found):
    """The number that all numbers are; an AssertionError where they mix."""
    numbers = {int(x) for each in found for x in np.unique(np.asarray(each))}
    assert len(numbers) == 1, numbers
    return numbers.pop()


def read_adapter(place):
    found = cxda_jax.load_adapter(place)
    leaves = (np.asarray(leaf) / PART for leaf in jax.tree.leaves([dict(found.known), found.variables]))
    return only(found.seed, found.report["steps"], *leaves)


def save_model(place, number):
    calibration = {"bn": {"a": np.full(9, number)}} if number % 2 else {}
    models.write_model(place, {"a": np.full(999, number)}, {"seed": number}, {"step": number}, calibration=calibration)


def read_model(place):
    def parts(where):
        (tree, notes), config = (
            models.read_model(where, {"a": np.zeros(999, int)}),
            read_object(where / models.CONFIG, ""),
        )
        known = models.read_calibration(where, "bn")
        assert len(known) == notes["step"] % 2
        return tree["a"], notes["step"], config["seed"], *known.values()

    return only(*folders.read(place, parts))


def save_export(place, number):
    """As the command writes programs."""
    with contextlib.redirect_stdout(None):
        exporting.insist_on_place(place)
    with folders.replaced(place, exporting.claimed) as new:
        for name in ("encode.bin", "predict.bin", f"{number}.bin"):
            (new / name).write_text(f"{number}" * 999)
        written = {path.name: {"sha256": files.hash_file(path)} for path in new.iterdir()}
        files.write_text(new / exporting.REPORT, json.dumps({"files": written, "number": number}))


def read_export(place):
    where = folders.current(place)
    number = read_object(where / exporting.REPORT, "")["number"]
    if lost := {exporting.REPORT, "encode.bin", "predict.bin", f"{number}.bin"} - exporting.claimed(where):
        raise UserError(f"{lost}: not as it was written")
    return number


def save_record(place, number):
    """As a test writes its result."""
    with folders.replaced(place, lambda _: FILES) as new:
        digest = write_arrays(new / "predictions.npz", {"a": np.full(999, number)})
        row = files.sealed({"number": number, "predictions_sha256": digest})
        files.write_text(new / "result.json", json.dumps(row))


def read_record(place):
    where = folders.current(place)
    row = read_object(where / "result.json", "")
    if files.is_falsified(row):
        raise UserError("result.json differs from its seal")
    return only(row["number"], read_arrays(where / "predictions.npz", row["predictions_sha256"])["a"])


def save_features(place, number):
    """A file of its own for each number, since none is replaced."""
    for i in range(6):
        path = place / "images" / "d" / "c" / f"{i}.png"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8)).save(path)
    about = {"encoder": "tiny", "number": number}
    answer = {name: np.full((2, 1), number, np.float32) for name in ("logits", "style")}
    encoder = Encoder(lambda _: answer, (8, 8, 3), 2, about)
    with contextlib.redirect_stdout(None):
        features.write_features(features.listed(place / "images"), encoder, place / f"{number}.npz", "squash", ["c"])


def read_features(place):
    newest = 0
    for path in place.glob("[0-9]*.npz"):
        found = features.read_labelled(path)
        assert len(found.logits) == 6
        newest = max(newest, only(found.logits, found.style, found.origin["number"], path.stem))
    return newest


@functools.cache
def buffer_model():
    return cxda_jax.load("glyphs")


def save_buffer(place, number):
    place.mkdir(parents=True, exist_ok=True)
    buffer = cxda_jax.SupportBuffer(buffer_model(), 3, keep="reservoir", seed=number)
    for _ in range(4):
        buffer.observe(np.full((28, 28, 1), number % 256, np.uint8))
    buffer.save(place / "it.npz")


def read_buffer(place):
    buffer = cxda_jax.SupportBuffer.load(place / "it.npz", buffer_model())
    assert (len(buffer), buffer.seen, buffer._drawn_from, only(buffer.images())) == (3, 4, 4, buffer.seed % 256)
    return buffer.seed


SAVES = {  # by what is saved: how the one with a number is written into a folder, and how the number is read from it
    "adapter": (lambda place, number: tiny_adapter(number).save(place), read_adapter),
    "model": (save_model, read_model),
    "export": (save_export, read_export),
    "record": (save_record, read_record),
    "features": (save_features, read_features),
    "buffer": (save_buffer, read_buffer),
}


WRONG = AssertionError, OSError, ValueError, LookupError


class Saver(FORKS.Process):
    """Saves one number after the other, from a first one on, and appends a byte to a file after each."""

    def __init__(self, kind, place, first, done):
        super().__init__(daemon=True)
        self.kind, self.place, self.first, self.done = kind, place, first, done
        done.write_bytes(b"")
        self.start()

    def run(self):
        os.nice(10)
        if self.place.name.endswith("1"):
            os.chdir(self.place)  # which is then not exchanged
        with open(self.done, "ab", buffering=0) as done, open(os.devnull, "w") as sys.stdout:
            for number in itertools.count(self.first):
                SAVES[self.kind][0](self.place, number)
                done.write(b".")


def kill_saves(folder, times):
    """Kills writers: how many of each kind, and what was lost."""
    rng, counts, faults = random.Random(0), collections.Counter(), []
    for trial in range(times):
        kind = list(SAVES)[trial % len(SAVES)]
        (save, read), place = SAVES[kind], folder / f"{kind}{trial // len(SAVES) % 2}"
        try:
            if not place.exists():
                save(place, 1)
            first = read(place) + 1
            saver = Saver(kind, place, first, folder / "done")
            while saver.is_alive() and not saver.done.stat().st_size:
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.2))
            saver.kill()
            saver.join()
            saved, found = first + saver.done.stat().st_size, read(place)
            assert saver.exitcode == -signal.SIGKILL and saved > first, saver.exitcode
            assert found in (saved - 1, saved), f"{found} after {saved - 1} was saved"
            save(place, found + 1)
            assert read(place) == found + 1
        except WRONG as e:
            faults.append(f"{kind} {trial}: {e!r}")
            shutil.rmtree(place, ignore_errors=True)
        counts[kind] += 1
    return counts, faults


def refuse_saves(folder, times):
    """Saves while files may not grow beyond some size, and then on a full disk: what came of it, and what was lost."""
    rng, counts, faults = random.Random(0), collections.Counter(), []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    @contextlib.contextmanager
    def short_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(10 ** rng.uniform(1, 4)), limits[1]))
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    @contextlib.contextmanager
    def full_disk():
        there = os.statvfs(folder)
        (filler := folder / ".cxda-filler").write_bytes(
            bytes(there.f_bsize * max(0, there.f_bavail - int(10 ** rng.uniform(0, 1.7))))
        )
        yield
        filler.unlink()

    def attempt(kind, place, refusing):
        save, read = SAVES[kind]
        save(place, 1)
        for number in range(2, 2 + times):
            with refusing():
                try:
                    save(place, number)
                    outcome = "room enough"
                except (UserError, OSError):
                    outcome = refusing.__name__.replace("_", " ")
            counts[f"{kind}: {outcome}"] += 1
            try:
                assert read(place) in (number - 1, number)
                save(place, number)
                assert read(place) == number
            except WRONG as e:
                faults.append(f"{kind}, {outcome}: {e!r}")

    for kind in SAVES:
        attempt(kind, folder / "files" / kind, short_files)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        return counts, faults
    for kind in SAVES:
        for place in (folder / kind, folder):  # the disk itself can be exchanged with nothing
            attempt(kind, place, full_disk)
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    subprocess.run(["umount", str(folder)], check=True)
    return counts, faults


def damage_saves(folder, times):
    """Flips bits of saved files and cuts them: how often what came of it, and what was wrong."""
    rng, outcomes, faults = random.Random(0), collections.Counter(), []
    for kind, (save, _) in SAVES.items():
        save(folder / kind, 7)
    for trial in range(times):
        kind = list(SAVES)[trial % len(SAVES)]
        path = rng.choice(sorted(p for p in (folder / kind).glob("*") if p.is_file()))
        kept = path.read_bytes()
        bit, changed = rng.randrange(8 * len(kept)), bytearray(kept)
        if is_cut := rng.random() < 0.3:
            del changed[bit // 8 :]
        else:
            changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            outcome = "without effect" if SAVES[kind][1](folder / kind) == 7 else "silently wrong"
        except AssertionError:
            outcome = "silently wrong"
        except (UserError, ValueError, LookupError):
            outcome = "noticed"
        except Exception as e:
            outcome = repr(e)[:200]
        outcomes[outcome] += 1
        if outcome not in ("noticed", "without effect"):
            faults.append(f"{'cut at ' * is_cut}bit {bit} of {path.relative_to(folder)}: {outcome}")
        path.write_bytes(kept)
    return outcomes, faults


OF_SAVES = {"save": kill_saves, "refuse": refuse_saves, "damage": damage_saves}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kill", "stop", "flip", "disk", *OF_SAVES])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    a = parser.parse_args()
    os.environ |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    began, machine = time.monotonic(), describe_machine(None)  # now, so that the commit is that of what is tried
    counts, faults = {}, []
    with tempfile.TemporaryDirectory(prefix="reliability-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if a.what in ("kill", "stop"):
            counts, faults = disturb(a.what, folder, a.times)
        elif a.what in OF_SAVES:
            counts, faults = OF_SAVES[a.what](folder, a.times)
        elif a.what == "flip":
            Run(folder / "run", "--config=glyphs:cxda,smoke").ends(0)
            counts, faults = flip(folder, a.times)
        else:
            fill_disk(folder)
    found = {"what": a.what, "times": a.times, "counts": counts, "faults": faults}
    text = json.dumps(found | {"seconds": time.monotonic() - began} | machine, indent=1)
    print(text)
    if a.out:
        a.out.write_text(text + "\n")
    sys.exit(bool(faults))


if __name__ == "__main__":
    FORKS.set_forkserver_preload(["tools.reliability"])
    main()
