"""Hours of work in one process, and whether it grows."""

import ctypes
import gc
import resource
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cxda_jax import checkpoints, train
from cxda_jax.data import glyphs
from cxda_jax.evaluate import compile_task, evaluate
from cxda_jax.experiment import build_on
from launch import cli

WARM_UP = 0.2  # of the time: caches and pools fill
# Share of its mean that may be added after the warm-up. Resident memory creeps towards the heap's size, as blocks come to lie in
# pages that were not touched before; what is in use says whether anything is lost.
GROWTH = {"memory_mb": 0.03, "heap_mb": 0.03, "in_use_mb": 0.03, "open_files": 1e-9, "threads": 1e-9}


def soak(seconds: float, out: Path | None) -> dict[str, Any]:
    """Cycles of training half a run, resuming it to its end, and testing it from its checkpoint."""
    folder, samples, began = Path(tempfile.mkdtemp(prefix="soak-")), [], time.monotonic()
    config = cli.resolve(cli.load_config("configs/glyphs.py:cxda,smoke"))
    config["net"]["width"], config["attention"]["heads"] = 8, 1
    experiment = build_on(config, glyphs.open_glyphs(folder, **config["data"]))
    evaluator = compile_task(experiment.method, experiment.source)

    def test(variables: Any, split: str) -> float:
        return evaluate(evaluator, variables, experiment.source, experiment.task_plans(split), 4, "accuracy").mean

    def training(workdir: Path, calls: int) -> None:
        count = iter(range(10**9))
        state = train.init_state(experiment.method, experiment.optimizer, 0, experiment.example)
        train.train(
            experiment.method, experiment.optimizer, experiment.weak, experiment.source, experiment.train_plans, state, 0,
            experiment.schedule, lambda variables: test(variables, "val"), workdir, log=lambda line: None,
            stopping=lambda: next(count) >= calls,
        )  # fmt: skip

    hashes = set()
    try:
        while time.monotonic() - began < seconds or len(samples) < 2:
            workdir = folder / "run"
            workdir.mkdir()
            training(workdir, experiment.schedule.steps // 2)
            training(workdir, 10**9)
            like = jax.eval_shape(experiment.method.init, jax.random.key(0), experiment.example)
            found = checkpoints.restore(workdir / "best", like)
            assert found
            test(found[0], "test")
            hashes.add(checkpoints.weights_hash(found[0]))
            shutil.rmtree(workdir)
            gc.collect()
            samples.append({"seconds": time.monotonic() - began, **usage()})
            if len(samples) % 20 == 0:
                print(f"{len(samples)} cycles: {samples[-1]}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    grown = {name: growth(samples, name) for name in GROWTH}
    faults = [name for name, limit in GROWTH.items() if grown[name] > limit]
    faults += ["weights differ from cycle to cycle"] if len(hashes) != 1 else []
    if out:
        draw(samples, out.with_suffix(".svg"))
        draw(samples, out.with_suffix(".png"))
    return {"cycles": len(samples), "minutes": samples[-1]["seconds"] / 60, "growth_after_warm_up": grown,
            "last": samples[-1], "failures": len(faults), "faults": faults, "samples": samples}  # fmt: skip


class Mallinfo(ctypes.Structure):
    """What glibc's mallinfo2() returns."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]  # fmt: skip


def usage() -> dict[str, float]:
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    found = mallinfo()
    return {
        "heap_mb": (found.arena + found.hblkhd) / 1e6,
        "in_use_mb": (found.uordblks + found.hblkhd) / 1e6,
        "memory_mb": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6,
        "open_files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
    }


def growth(samples: list[dict[str, float]], name: str) -> float:
    """What a straight line through the samples adds after the warm-up, as a share of their mean."""
    kept = [s for s in samples if s["seconds"] > WARM_UP * samples[-1]["seconds"]]
    if len(kept) < 3:
        return 0.0
    t, y = (np.array([s[k] for s in kept]) for k in ("seconds", name))
    return float(np.polyfit(t, y, 1)[0] * (t[-1] - t[0]) / y.mean())


def draw(samples: list[dict[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    lines = {"memory_mb": "resident", "heap_mb": "the C library's heap", "in_use_mb": "of the heap in use"}
    panels = {"memory, MB": lines, "open files": {"open_files": ""}, "threads": {"threads": ""}}
    minutes = [s["seconds"] / 60 for s in samples]
    for axis, (label, lines) in zip(
        figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1)), panels.items(), strict=True
    ):
        for name, text in lines.items():
            axis.plot(minutes, [s[name] for s in samples], label=text)
        axis.set(ylabel=label, ylim=(0, 1.15 * max(s[name] for s in samples for name in lines)))
        axis.grid(alpha=0.3)
        if len(lines) > 1:
            axis.legend(loc="center right")
    axis.set_xlabel("minutes of training, stopping, resuming and testing in one process")
    figure.savefig(path, dpi=120)
