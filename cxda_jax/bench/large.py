"""Stores larger than the memory: how fast tasks stream from disk, and how much memory that takes.

The suite `large` of cxda benchmark makes each store, and starts this file once for each figure:

python -m cxda_jax.bench.large STORE stream TASKS STEPS
python -m cxda_jax.bench.large STORE train TASKS STEPS

A process of its own is what memory can be measured of. It prints one line of JSON.
"""

import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cxda_jax.bench.rows import Options
from cxda_jax.data.episodes import EpisodeSpec, sample_plans
from cxda_jax.data.sources import SOURCES
from cxda_jax.data.store import Domain, StoreInfo, open_store, write_store
from cxda_jax.disk import files


class Large(NamedTuple):
    """A store to make: as many images in each of its domains, of which the middle tenth validates and the last tenth tests."""

    images: int
    side: int
    empty: bool  # zeros, in a file that takes no space on the disk
    domains: int = 100


STORES = {
    "200,000 images of 112 pixels": Large(200_000, 112, empty=False),
    "10 million images of 32 pixels": Large(10_000_000, 32, empty=True),
}
SMALL = {
    "2,000 images of 12 pixels": Large(2_000, 12, empty=False, domains=50),
    "4,000 images of 8 pixels": Large(4_000, 8, empty=True, domains=50),
}
CLASSES = 10
EPISODE = EpisodeSpec().num_domains * EpisodeSpec().per_domain + EpisodeSpec().num_query  # images


def large_suite(o: Options) -> None:
    """Streams tasks from stores on disk, before and after the system has the file in memory, and trains a few steps on them."""
    for name, large in (SMALL if o.small else STORES).items():
        with tempfile.TemporaryDirectory() as folder:
            path, began = Path(folder, "large"), time.perf_counter()
            make(path, large)
            gigabytes = large.images * large.side**2 * 3 / 1e9
            print(f"{name}: {gigabytes:.1f} GB, made in {time.perf_counter() - began:.0f} s", flush=True)
            for what, tasks, steps, cold in (
                ("stream, read from the disk", 8, 100, True),
                ("stream, a task at a time", 1, 300, False),
                ("stream", 8, 100, False),
                ("train", 2, 10, False),
            ):
                if cold and large.empty:
                    continue
                found = apart(path, what.partition(",")[0], tasks, 2 if o.small else steps, cold)
                row = {"store": name, "gigabytes": gigabytes, "what": what, "tasks": tasks, **found}
                o.add("large", row)
                print(
                    f"{name}: {what}, {tasks} task{'s' * (tasks > 1)} a step: {row['images_per_s']:.0f} images/s, {row['own_mb']:.0f} MB",
                    flush=True,
                )


def make(path: Path, large: Large) -> None:
    """Writes the store: random images, or zeros that take no space on the disk."""
    each, shape = large.images // large.domains, (large.side, large.side, 3)
    info = StoreInfo("large", tuple(map(str, range(CLASSES))), (0.5,) * 3, (0.25,) * 3)
    rng = np.random.default_rng(0)
    splits = [("train", "val", "test")[max(0, 10 * i // large.domains - 7)] for i in range(large.domains)]

    def domain(i: int, count: int) -> Domain:
        pixels = np.frombuffer(rng.bytes(count * math.prod(shape)), np.uint8).reshape(count, *shape)
        return Domain(f"d{i:04}", splits[i], pixels, rng.integers(0, CLASSES, count))

    if not large.empty:
        return write_store(path, info, (domain(i, each) for i in range(large.domains)))
    write_store(
        path, info, (domain(i, 1) for i in range(large.domains))
    )  # its card, whose sizes and hashes then change
    card = json.loads((path / "store.json").read_text())
    card = {**card, "domains": [{**d, "rows": each} for d in card["domains"]]}
    rng.integers(0, CLASSES, large.images).astype("<i4").tofile(path / "labels.i32")
    with open(path / "images.u8", "wb") as file:
        file.truncate(large.images * math.prod(shape))
    card["sha256"] = {n: hash_of(path / f) for n, f in (("images", "images.u8"), ("labels", "labels.i32"))}
    card.pop(files.SEAL)
    (path / "store.json").write_text(json.dumps(files.sealed(card)))


def hash_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def apart(path: Path, what: str, tasks: int, steps: int, cold: bool) -> dict[str, Any]:
    """What a process of its own measures. If `cold`, the system has nothing of the file in memory when reading begins."""
    arguments = [str(path), what, str(tasks), str(steps), "cold" * cold]
    done = subprocess.run(
        [sys.executable, "-m", "cxda_jax.bench.large", *arguments], stdout=subprocess.PIPE, text=True, check=True,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


class Memory(threading.Thread):
    """The most megabytes of its own that this process holds: without files that are mapped, which the system may take back."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0.0

    def run(self) -> None:
        while True:
            self.look()
            time.sleep(0.02)

    def look(self) -> float:
        own = re.search(r"RssAnon:\s*(\d+)", Path("/proc/self/status").read_text())
        self.most = max(self.most, int(own[1]) / 1e3 if own else 0.0)
        return self.most


def stream(path: Path, tasks: int, steps: int, cold: bool) -> dict[str, float]:
    """Reads steps of so many tasks as fast as they come."""
    began, store = time.perf_counter(), open_store(path)
    opened = time.perf_counter() - began
    if cold:  # opening has read all of it, to compare its hash
        with open(path / "images.u8", "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    spec, domains = EpisodeSpec(), store.domains("train")

    def plan(step: int) -> Any:
        return sample_plans(spec, store.offsets, domains, 0, range(step * tasks, (step + 1) * tasks))

    batches = SOURCES["tfdata"](store, None).batches(plan, 0, steps + 1)
    next(batches)
    first = time.perf_counter()
    read = sum(episode.support_label.size + episode.label.size for episode in batches)
    return {"open_s": opened, "first_s": first - began, "images_per_s": read / (time.perf_counter() - first)}


def train(path: Path, tasks: int, steps: int) -> dict[str, float]:
    """A real training of a small network, by the command's own function."""
    from cxda_jax.config import read
    from cxda_jax.study.training import train_run

    changes = {
        "data.name": path.name, "train.source": "tfdata", "train.steps": str(steps), "train.tasks_per_step": str(tasks),
        "train.log_every": "1", "evaluation.every_steps": str(steps), "evaluation.val_tasks": "1", "evaluation.test_tasks": "1",
        "net.width": "4", "attention.heads": "1", "net.padding": "same",
    }  # fmt: skip
    run = path.parent / "run"
    train_run(read("folder:cxda", list(changes.items())), run, path.parent)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(line["loss"]) for line in lines if "loss" in line)
    cost = json.loads((run / "cost.json").read_text())
    return {"images_per_s": EPISODE * tasks * cost["steps_per_s"], "waiting_s": cost["waiting_for_data_s"]}


if __name__ == "__main__":
    store, what, tasks, steps, cold = sys.argv[1:6]
    memory = Memory()
    memory.start()
    sizes = int(tasks), int(steps)
    found = stream(Path(store), *sizes, bool(cold)) if what == "stream" else train(Path(store), *sizes)
    print(json.dumps(found | {"own_mb": memory.look()}))
