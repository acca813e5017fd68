"""The instrument behind launch.benchmark: contenders that take turns, PyTorch in a process of its own, what ran most, and
a record of the machine."""

import collections
import contextlib
import importlib.util
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from cxda_jax import backend
from cxda_jax.types import UserError

ROOT = Path(__file__).parents[1]
CPU_THREADS = ("tf_XLAPjRtCpuClient", "tf_XLAExecute")  # as JAX 0.10 and 0.12 call those that run operations
SHORTEST = 0.1  # seconds; what takes less is called several times in a row

Timing = Callable[[int], float]  # number of calls in a row -> mean seconds of one


def interleave(contenders: Mapping[str, Timing], repeats: int) -> dict[str, list[float]]:
    """Seconds of one call, `repeats` for each contender, who take turns after a warm-up."""
    calls = {}
    for name, timing in contenders.items():
        timing(1)  # compiles and allocates
        calls[name] = max(1, math.ceil(SHORTEST / timing(1)))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, timing in contenders.items():
            seconds[name].append(timing(calls[name]))
    return seconds


def spread(seconds: list[float], units: int = 1) -> dict[str, float]:
    """Milliseconds of one of `units` units of work."""
    return {
        "median_ms": 1e3 * statistics.median(seconds) / units,
        "min_ms": 1e3 * min(seconds) / units,
        "max_ms": 1e3 * max(seconds) / units,
    }


def chained(work: Callable[[Any], tuple[Any, Any]], state: Any) -> Timing:
    """Times work(state) -> (state, answer), each call from the state that the last one left."""
    held = [state]

    def timing(calls: int) -> float:
        began, answer = time.perf_counter(), None
        for _ in range(calls):
            held[0], answer = work(held[0])
        jax.block_until_ready((held, answer))
        return (time.perf_counter() - began) / calls

    return timing


def repeated(work: Callable[[], Any]) -> Timing:
    """Times work(), whose answer is waited for."""
    return chained(lambda _: (None, work()), None)


def top_operations(work: Callable[[], Any], count: int = 12) -> list[dict[str, Any]]:
    """What a call of `work` spends its time in, by JAX's profiler: [{name, ms, share}], most first.

    The share is of the time of all operations, which overlap on several threads or streams.
    """
    jax.block_until_ready(work())
    found: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(work())
        for path in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                for line in plane.lines:
                    if ("/device:" in plane.name and line.name == "XLA Ops") or line.name.startswith(CPU_THREADS):
                        for event in line.events:
                            found[event.name] += event.duration_ns
    waits = ("Await", "wait for completion", "ThreadpoolListener", "end: ")
    operations = {name: ns for name, ns in found.items() if not any(wait in name for wait in waits)}
    total = sum(operations.values())
    ordered = sorted(operations.items(), key=lambda item: -item[1])[:count]
    return [{"name": name, "ms": ns / 1e6, "share": ns / total} for name, ns in ordered]


class Peer:
    """PyTorch in a process of its own, commanded over pipes: neither shares threads or an allocator with us."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.peers.torch_peer"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"do": do} | arguments) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"the process ended with {self._process.wait()}"}
        if "error" in answer:
            raise UserError(f"PyTorch failed at {do}: {answer['error']}; --nopeers leaves it out")
        return answer

    def timer(self, name: str) -> Timing:
        return lambda calls: self.ask("time", name=name, calls=calls)["seconds"]

    def close(self) -> None:
        self._process.communicate()


@contextlib.contextmanager
def open_peer(wanted: bool) -> Iterator[Peer | None]:
    if not wanted or importlib.util.find_spec("torch") is None:
        print("peers skipped" + (": PyTorch is not installed" if wanted else ""), flush=True)
        yield None
        return
    if not (ROOT / "tests" / "peers" / "torch_peer.py").is_file():
        raise UserError(f"--peers: no tests/peers/torch_peer.py in {ROOT}; run from a checkout, or give --nopeers")
    peer = Peer()
    try:
        yield peer
    finally:
        peer.close()


def describe(peer: Peer | None) -> dict[str, Any]:
    """Versions and machine."""
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")}
    cpu = next((x.split(":", 1)[1].strip() for x in _read("/proc/cpuinfo") if x.startswith("model name")), "")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip() or None,
        "versions": versions | {"python": platform.python_version()},
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "processor": cpu or platform.processor(),
        "cores": os.cpu_count(),
        "compiler_options": backend.compiler_options(),
        "environment": {name: os.environ[name] for name in ("XLA_FLAGS", "GLIBC_TUNABLES") if name in os.environ},
        "peer": peer.ask("describe") if peer else None,
    }


def watch_others(peer: Peer | None) -> Callable[[], float | None]:
    """Begins to watch the processors; the answer is the share of all cores that other processes took since."""

    def used() -> tuple[float, float, float]:
        ours = time.process_time() + (peer.ask("cpu")["seconds"] if peer else 0.0)
        # user nice system idle iowait irq softirq steal
        ticks = [float(x) for x in _read("/proc/stat")[0].split()[1:9]]
        return time.perf_counter(), ours, (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")

    if not _read("/proc/stat"):
        return lambda: None
    start = used()

    def others() -> float:
        wall, ours, all_processes = (now - then for now, then in zip(used(), start, strict=True))
        return max(0.0, all_processes - ours) / wall / (os.cpu_count() or 1)

    return others


def _read(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).is_file() else []
