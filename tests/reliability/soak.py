"""Works for hours in one process, and looks whether the process grows."""

import gc
import itertools
import resource
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cxda_jax import backend, train
from cxda_jax.config import read
from cxda_jax.data import glyphs
from cxda_jax.disk import checkpoints
from cxda_jax.evaluation import compile_task, evaluate
from cxda_jax.experiment import build_on

WARM_UP = 0.2  # of the time, in which caches and pools fill
# What may be added after the warm-up, as a share of the mean. Resident memory creeps towards the heap's size, as blocks come to
# lie in pages that were not touched before. The memory in use says whether anything is lost.
LIMITS = {"memory_mb": 0.03, "heap_mb": 0.03, "in_use_mb": 0.03, "open_files": 1e-9, "threads": 1e-9}
PANELS = {
    "memory, MB": {"memory_mb": "resident", "heap_mb": "the C library's heap", "in_use_mb": "of the heap in use"},
    "open files": {"open_files": ""},
    "threads": {"threads": ""},
}


def soak(seconds: float, out: Path | None) -> dict[str, Any]:
    """Cycles of training half a run, resuming it to its end, and testing it from its checkpoint."""
    samples, hashes, began = [], set(), time.monotonic()
    config = read("glyphs:cxda,smoke")
    config["net"]["width"], config["attention"]["heads"] = 8, 1
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        run, workdir = build_on(config, glyphs.open_glyphs(Path(folder), **config["data"])), Path(folder, "run")
        evaluator = compile_task(run.method, run.source)
        like = jax.eval_shape(run.method.init, jax.random.key(0), run.example)

        def test(variables: Any, split: str) -> float:
            return evaluate(evaluator, variables, run.source, run.task_plans(split), 4, "accuracy").mean

        def training(calls: int) -> None:
            count, state = itertools.count(), train.init_state(run.method, run.optimizer, 0, run.example)
            train.train(
                run.method, run.optimizer, run.weak, run.source, run.train_plans, state, 0, run.schedule,
                lambda variables: test(variables, "val"), workdir, log=lambda line: None,
                stopping=lambda: next(count) >= calls,
            )  # fmt: skip

        while time.monotonic() - began < seconds or len(samples) < 2:
            workdir.mkdir()
            training(run.schedule.steps // 2)
            training(10**9)
            found = checkpoints.restore(workdir / "best", like)
            assert found
            test(found[0], "test")
            hashes.add(checkpoints.weights_hash(found[0]))
            shutil.rmtree(workdir)
            gc.collect()
            samples.append({"seconds": time.monotonic() - began, **measure_process()})
            if len(samples) % 20 == 0:
                print(f"{len(samples)} cycles: {samples[-1]}", flush=True)
    added = {name: share_added(samples, name) for name in LIMITS}
    faults = [name for name, limit in LIMITS.items() if added[name] > limit]
    faults += ["weights differ from cycle to cycle"] * (len(hashes) != 1)
    if out:
        draw(samples, out)
    return {"cycles": len(samples), "minutes": samples[-1]["seconds"] / 60, "growth_after_warm_up": added,
            "last": samples[-1], "failures": len(faults), "faults": faults, "samples": samples}  # fmt: skip


def measure_process() -> dict[str, float]:
    found = backend.heap()
    return {
        "heap_mb": (found.arena + found.hblkhd) / 1e6,
        "in_use_mb": (found.uordblks + found.hblkhd) / 1e6,
        "memory_mb": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6,
        "open_files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
    }


def share_added(samples: list[dict[str, float]], name: str) -> float:
    """How much a straight line through the samples rises after the warm-up, as a share of their mean."""
    kept = [s for s in samples if s["seconds"] > WARM_UP * samples[-1]["seconds"]]
    if len(kept) < 3:
        return 0.0
    t, y = (np.array([s[k] for s in kept]) for k in ("seconds", name))
    return float(np.polyfit(t, y, 1)[0] * (t[-1] - t[0]) / y.mean())


def draw(samples: list[dict[str, float]], out: Path) -> None:
    """Draws the samples beside the record, as .svg and .png."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    for axis, (label, lines) in zip(axes, PANELS.items(), strict=True):
        for name, text in lines.items():
            axis.plot([s["seconds"] / 60 for s in samples], [s[name] for s in samples], label=text)
        axis.set(ylabel=label, ylim=(0, 1.15 * max(s[name] for s in samples for name in lines)))
        axis.grid(alpha=0.3)
        if len(lines) > 1:
            axis.legend(loc="center right")
    axes[-1].set_xlabel("minutes of training, stopping, resuming and testing in one process")
    for suffix in (".svg", ".png"):
        figure.savefig(out.with_suffix(suffix), dpi=120)
