"""The means of python -m tools.bench: contenders that take turns, PyTorch in a process of its own,
and facts about the machine."""

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

from cxda_jax.errors import UserError
from cxda_jax.machine import backend
from cxda_jax.studies.training import commit

ROOT = Path(__file__).parents[2]
CPU_THREADS = ("tf_XLAPjRtCpuClient", "tf_XLAExecute")  # names of the threads that run operations, in JAX 0.10 and 0.12
WAITS = ("Await", "wait for completion", "ThreadpoolListener", "end: ")  # in names of events that are no operations
SHORTEST = 0.1  # seconds; a call that takes less is made several times in a row

Timing = Callable[[int], float]  # timing(calls) makes so many calls in a row and returns the mean seconds of one


def interleave(contenders: Mapping[str, Timing], repeats: int) -> dict[str, list[float]]:
    """Seconds of one call, `repeats` times for each contender. They take turns after a warm-up."""
    calls = {}
    for name, timing in contenders.items():
        timing(1)  # compiles and allocates
        calls[name] = max(1, math.ceil(SHORTEST / timing(1)))
    rounds = [{name: timing(calls[name]) for name, timing in contenders.items()} for _ in range(repeats)]
    return {name: [seconds[name] for seconds in rounds] for name in contenders}


def spread(seconds: list[float], units: int = 1) -> dict[str, float]:
    """Median, least and most milliseconds of a unit of work, from the seconds of calls that do `units` of them."""
    ms = [1e3 * s / units for s in seconds]
    return {"median_ms": statistics.median(ms), "min_ms": min(ms), "max_ms": max(ms)}


def chained(call: Callable[[Any], tuple[Any, Any]], state: Any) -> Timing:
    """Times call(state) -> (state, answer). Each call starts from the state that the one before has left."""
    held = [state]

    def timing(calls: int) -> float:
        began, answer = time.perf_counter(), None
        for _ in range(calls):
            held[0], answer = call(held[0])
        jax.block_until_ready((held, answer))
        return (time.perf_counter() - began) / calls

    return timing


def repeated(call: Callable[[], Any]) -> Timing:
    """Times call() until its answer is there."""
    return chained(lambda _: (None, call()), None)


def top_operations(timing: Timing, count: int = 12) -> list[dict[str, Any]]:
    """The operations that a call spends most time in, the longest first; shares are of those on all threads."""
    timing(1)  # compiles
    found: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            timing(1)
        for path in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                for line in plane.lines:
                    if ("/device:" in plane.name and line.name == "XLA Ops") or line.name.startswith(CPU_THREADS):
                        for event in line.events:
                            found[event.name] += 0 if any(wait in event.name for wait in WAITS) else event.duration_ns
    return [{"name": name, "ms": ns / 1e6, "share": ns / found.total()} for name, ns in found.most_common(count) if ns]


class Peer:
    """PyTorch in a process of its own, which shares neither threads nor an allocator with ours. See torch_peer.py."""

    def __init__(self) -> None:
        command, pipe = [sys.executable, "-m", "tools.bench.torch_peer"], subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)

    def ask(self, do: str, **arguments: Any) -> Any:
        """Calls the method `do` of torch_peer.Timer, and returns its answer."""
        assert self.process.stdin and self.process.stdout
        print(json.dumps({"do": do} | arguments), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        found = json.loads(line) if line else {"error": f"the process ended with {self.process.wait()}"}
        if "error" in found:
            raise UserError(f"PyTorch failed at {do}: {found['error']}; --nopeers leaves it out")
        return found["answer"]

    def prepare(self, what: str, name: str, **arguments: Any) -> Timing:
        """Has torch_peer.Timer prepare work, "gemm" or "episode", which it holds
        under a name until it is asked to forget."""
        self.ask(what, name=name, **arguments)
        return lambda calls: self.ask("time", name=name, calls=calls)


@contextlib.contextmanager
def open_peer(wanted: bool) -> Iterator[Peer | None]:
    """PyTorch's process, or None where it is not wanted or not installed."""
    if not wanted or importlib.util.find_spec("torch") is None:
        print("peers skipped" + (": PyTorch is not installed" if wanted else ""), flush=True)
        yield None
        return
    peer = Peer()
    try:
        yield peer
    finally:
        peer.process.communicate()


def describe_machine(peer: Peer | None) -> dict[str, Any]:
    """The part of a record about versions, the code's commit and the machine."""
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")}
    return {
        "commit": commit(),
        "versions": versions | {"python": platform.python_version()},
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "processor": backend.processor(),
        "cores": os.cpu_count(),
        "compiler_options": backend.compiler_options(),
        "environment": {name: os.environ[name] for name in ("XLA_FLAGS", "GLIBC_TUNABLES") if name in os.environ},
        "peer": peer.ask("describe") if peer else None,
    }


def watch_others(peer: Peer | None) -> Callable[[], float | None]:
    """Watches the processors from now on.

    The function it returns gives the share of all cores that other processes took.
    """
    counters = Path("/proc/stat")
    if not counters.is_file():
        return lambda: None

    def used() -> tuple[float, float, float]:
        ended = os.times()[2:4]  # seconds of processes that this one started and waited for
        ours = time.process_time() + sum(ended) + (peer.ask("cpu") if peer else 0.0)
        # of all processors, after their name: user nice system idle iowait irq softirq steal
        ticks = [float(x) for x in counters.read_text().split()[1:9]]
        return time.perf_counter(), ours, (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")

    def others() -> float:
        wall, ours, all_processes = (now - then for now, then in zip(used(), start, strict=True))
        return max(0.0, all_processes - ours) / wall / (os.cpu_count() or 1)

    start = used()
    return others
