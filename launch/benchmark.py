"""Times training and inference beside eager PyTorch doing the same work, and writes every figure to a JSON file.

python -m launch.benchmark --suite=step --out=docs/results/benchmark-cpu.json
python -m launch.benchmark --suite=step --out=/tmp/femnist.json --shapes=femnist --cases=bn --repeats=3
python -m launch.benchmark --suite=step --out=/tmp/alone.json --nopeers

One unit of work is an episode of 100 support and 20 query images. Run it from the repository's root on an idle machine:
ours and the peers take turns, but PyTorch's threads spin while they wait for each other, and on a machine with other
work that makes it many times slower, which would flatter us. The record holds `others`, the share of the cores that
other processes took, and a warning is printed where it exceeds 5 %. With two cores it takes about five minutes.
  train flow   loss, gradients and the SGD update; gradients flow through the support's statistics, as by default
  train stop   the same without those gradients (--config.batch_norm.statistics=stop)
  infer        adapt to the support and predict the queries
  exact        the peer that computes the same numbers; _channels_last: in that memory layout
  buffers      the peer as one writes it by habit, with running buffers: it must be compared with `stop`
PyTorch runs in a process of its own, in its default setting. ratio = our median / the peer's: below 1 we are faster.
"""

import contextlib
import datetime
import importlib.util
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from cxda_jax import backend
from cxda_jax.experiment import make_optimizer
from cxda_jax.methods.cxda import cxda
from cxda_jax.methods.erm import bn
from cxda_jax.nets.attention import CrossAttention
from cxda_jax.nets.classifier import Classifier
from cxda_jax.nets.cnn import CNNHead, CNNTrunk
from cxda_jax.types import Episode, Images, Method, UserError
from launch import cli

ROOT = Path(__file__).parents[1]
SUPPORT, QUERY = 100, 20
SHAPES = {  # image, classes, mean, deviation
    "femnist": ((28, 28, 1), 62, (1.0,), (-1.0,)),
    "cifar_c": ((32, 32, 3), 10, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
METHODS = ("bn", "cxda")
# What is timed, and the peers that do the same work.
WORK = {
    ("train", "flow"): ("exact", "exact_channels_last"),
    ("train", "stop"): ("buffers",),
    ("infer", "flow"): ("exact", "buffers", "buffers_channels_last"),
}
SHORTEST = 0.1  # seconds; what takes less is called several times in a row

Timing = Callable[[int], float]  # number of calls in a row -> mean seconds of one

flags.adopt_module_key_flags(cli)
_SUITE = flags.DEFINE_enum("suite", "step", ["step"], "What to measure.")
_OUT = flags.DEFINE_string("out", None, "The JSON file to write.", required=True)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timings of each contender, in turns.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 128, "Channels of the CNN.", lower_bound=2)
_GEMM = flags.DEFINE_integer("gemm", 4096, "Side of the float32 matrices whose product gives the peak.", lower_bound=1)
_SHAPES = flags.DEFINE_list("shapes", list(SHAPES), "Image shapes, of " + ",".join(SHAPES) + ".")
_CASES = flags.DEFINE_list("cases", list(METHODS), "Methods, of " + ",".join(METHODS) + ".")
_PEERS = flags.DEFINE_bool("peers", True, "Time PyTorch too.")
_DATE = flags.DEFINE_string("date", None, "Date written to the record; today's by default.")


class Case(NamedTuple):
    """One row of the benchmark."""

    shape: str
    method: str
    work: str  # train, infer
    statistics: str  # flow, stop
    width: int

    @property
    def heads(self) -> int:
        return 8 if self.width % 16 == 0 else 1


def main() -> None:
    if jax.default_backend() == "cpu":
        backend.keep_freed_memory()
    for flag, known in ((_SHAPES, SHAPES), (_CASES, METHODS)):
        for name in flag.value:
            if name not in known:
                raise UserError(f"--{flag.name}={name} is not one of {', '.join(known)}")
    out = Path(_OUT.value)
    if not out.parent.is_dir():
        raise UserError(f"--out={out}: no folder {out.parent}; create it first")
    with open_peer(_PEERS.value) as peer:
        record = {"suite": _SUITE.value, "date": _DATE.value or datetime.date.today().isoformat()} | describe(peer)
        others = watch_others(peer)
        record |= step_suite(peer, _SHAPES.value, _CASES.value, _WIDTH.value, _REPEATS.value, _GEMM.value)
        record["others"] = others()
    out.write_text(json.dumps(record, indent=1) + "\n")
    if (record["others"] or 0) > 0.05:
        print(f"warning: other processes took {record['others']:.0%} of the cores; do not quote these figures")
    print(f"written to {out}")


def step_suite(
    peer: "Peer | None", shapes: list[str], methods: list[str], width: int, repeats: int, gemm: int
) -> dict[str, Any]:
    """The peak, each case and the sampling of plans, as a record."""
    settings = {"support": SUPPORT, "query": QUERY, "width": width, "repeats": repeats, "gemm_side": gemm}
    print(f"timing matrix products of side {gemm}", flush=True)
    peak = gemm_peak(peer, gemm, repeats)
    print("GFLOP/s: " + ", ".join(f"{name} {value:.0f}" for name, value in peak.items()))
    print("ms per episode, median (min-max); ratio = ours / peer", flush=True)
    rows = []
    for shape in shapes:
        for method in methods:
            for (work, kind), peers in WORK.items():
                case = Case(shape, method, work, kind, width)
                rows.append(measure(case, peer, peers if peer else (), repeats, peak))
                print(line(rows[-1]), flush=True)
    data = data_wait(min(row["ours"]["median_ms"] for row in rows if row["work"] == "train"), repeats)
    print(f"data_wait {data['plan_ms']:.2f} ms a plan, {data['of_fastest_step']:.2%} of the fastest training step")
    return {"settings": settings, "gemm_gflop_per_s": peak, "rows": rows, "data": data}


def measure(
    case: Case, peer: "Peer | None", peers: tuple[str, ...], repeats: int, peak: Mapping[str, float]
) -> dict[str, Any]:
    """One case: ours and its peers in turns."""
    contenders = {"ours": our_timing(case)} | {name: peer.timing(case, name) for name in peers if peer}
    seconds = interleave(contenders, repeats)
    if peer:
        for name in peers:
            peer.ask("forget", name=name)
    gflop = flops(case) / 1e9
    found = {
        name: summary(times, gflop, peak["ours" if name == "ours" else "torch"]) for name, times in seconds.items()
    }
    ours = found.pop("ours")
    ratio = {name: ours["median_ms"] / theirs["median_ms"] for name, theirs in found.items()}
    return case._asdict() | {"gflop": gflop, "ours": ours, "peers": found, "ratio": ratio}


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


def summary(seconds: list[float], gflop: float, peak: float) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {
        "median_ms": 1e3 * median,
        "min_ms": 1e3 * min(seconds),
        "max_ms": 1e3 * max(seconds),
        "gflop_per_s": gflop / median,
        "of_gemm_peak": gflop / median / peak,
    }


def our_timing(case: Case) -> Timing:
    """Our training step (value and gradient of the loss, SGD) or inference (adapt, predict) on random images."""
    shape, classes, _, _ = SHAPES[case.shape]
    rng = np.random.default_rng(0)

    def images(n: int) -> Images:
        return Images(jnp.asarray(rng.integers(0, 256, (n, *shape), np.uint8)), jnp.zeros(n, jnp.int32))

    def labels(n: int) -> jax.Array:
        return jnp.asarray(rng.integers(0, classes, n), jnp.int32)

    episode = Episode(images(SUPPORT), images(QUERY), labels(QUERY), labels(SUPPORT))
    method, key = our_method(case), jax.random.key(0)
    variables = backend.jit(method.init)(key, images(2))
    tx = make_optimizer(name="sgd", learning_rate=1e-4, momentum=0.9, weight_decay=1e-4)
    state = (variables, tx.init(variables["params"]))

    def step(state: Any) -> tuple[Any, jax.Array]:
        variables, optimizer = state

        def objective(params: Any) -> tuple[jax.Array, Any]:
            return method.loss({**variables, "params": params}, episode, key)

        (loss, aux), grads = jax.value_and_grad(objective, has_aux=True)(variables["params"])
        updates, optimizer = tx.update(grads, optimizer, variables["params"])
        params = optax.apply_updates(variables["params"], updates)
        return ({"params": params, "batch_stats": aux["batch_stats"]}, optimizer), loss

    def infer(state: Any) -> tuple[Any, jax.Array]:
        return state, method.predict(method.adapt(state[0], episode.support, key), episode.query)

    return chained(step if case.work == "train" else infer, state)


def chained(work: Callable[[Any], tuple[Any, jax.Array]], state: Any) -> Timing:
    """Times work(state) -> (state, answer), each call from the state that the last one left."""
    run, held = backend.jit(work), [state]

    def timing(calls: int) -> float:
        began, answer = time.perf_counter(), None
        for _ in range(calls):
            held[0], answer = run(held[0])
        jax.block_until_ready((held, answer))
        return (time.perf_counter() - began) / calls

    return timing


def our_method(case: Case) -> Method:
    _, classes, mean, std = SHAPES[case.shape]
    attention = CrossAttention(case.width, heads=case.heads) if case.method == "cxda" else None
    net = Classifier(CNNTrunk(case.width), CNNHead(classes), mean, std, attention)
    return {"bn": bn, "cxda": cxda}[case.method](net, statistics=case.statistics)


def flops(case: Case) -> float:
    """Floating-point operations of convolutions, dense layers and attention; a multiplication and an addition are two.

    Backward passes count twice the forward one, but the first convolution needs no gradient of its input, and a
    support that only gives statistics without gradients none at all.
    """
    (side, _, channels), classes, _, _ = SHAPES[case.shape]
    w, train = case.width, case.work == "train"
    sides = (side, side - 4, (side - 4) // 2 - 4)
    convs = [2 * 25 * s * s * c * w for s, c in zip(sides, (channels, w, w), strict=True)]
    backward = convs[0] + 2 * sum(convs[1:]) if train else 0
    idle = case.method == "bn" and case.statistics == "stop"
    images = (SUPPORT + QUERY) * sum(convs) + ((0 if idle else SUPPORT) + QUERY) * backward
    dense = QUERY * 2 * (w * 200 + 200 * classes)
    if case.method == "cxda":
        dense += 2 * (SUPPORT * w * w + QUERY * w * w + 2 * QUERY * SUPPORT * w // 2)
    return images + dense * (3 if train else 1)


def gemm_peak(peer: "Peer | None", side: int, repeats: int) -> dict[str, float]:
    """Best GFLOP/s of a float32 matrix product, ours and PyTorch's."""
    a = jax.random.uniform(jax.random.key(0), (side, side))
    contenders = {"ours": chained(lambda a: (a, a @ a), a)}
    if peer:
        peer.ask("gemm", name="gemm", size=side)
        contenders["torch"] = peer.timer("gemm")
    seconds = interleave(contenders, repeats)
    if peer:
        peer.ask("forget", name="gemm")
    return {name: 2e-9 * side**3 / min(times) for name, times in seconds.items()}


def data_wait(step_ms: float, repeats: int) -> dict[str, float]:
    """Time to choose the images of one step, and of 512, out of 262 domains of 10,000."""
    from cxda_jax.data.episodes import EpisodeSpec, sample_plans

    spec, offsets, domains = EpisodeSpec(), np.arange(263, dtype=np.int64) * 10_000, np.arange(262)

    def sample(tasks: range) -> float:
        began = time.perf_counter()
        sample_plans(spec, offsets, domains, 0, tasks)
        return 1e3 * (time.perf_counter() - began)

    sample(range(10))
    one = statistics.median(sample(range(i, i + 1)) for i in range(100))
    many = statistics.median(sample(range(512)) for _ in range(repeats))
    return {"plan_ms": one, "plans_512_ms": many, "of_fastest_step": one / step_ms}


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

    def timing(self, case: Case, name: str) -> Timing:
        shape, classes, _, _ = SHAPES[case.shape]
        self.ask(
            "episode", name=name, shape=shape, num_classes=classes, counts=[SUPPORT, QUERY], width=case.width,
            heads=case.heads, train=case.work == "train", statistics="buffers" if "buffers" in name else "flow",
            attention=case.method == "cxda", channels_last=name.endswith("channels_last"),
        )  # fmt: skip
        return self.timer(name)

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
        ticks = [
            float(x) for x in _read("/proc/stat")[0].split()[1:9]
        ]  # user nice system idle iowait irq softirq steal
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


def line(row: Mapping[str, Any]) -> str:
    """A row for the terminal."""
    name = f"{row['shape']} {row['method']} {row['work']}" + (f" {row['statistics']}" if row["work"] == "train" else "")
    parts = [f"{name:24} ours {_milliseconds(row['ours'])} {row['ours']['of_gemm_peak']:3.0%} of GEMM"]
    parts += [f"{peer} {_milliseconds(m)} ratio {row['ratio'][peer]:.2f}" for peer, m in row["peers"].items()]
    return " | ".join(parts)


def _milliseconds(m: Mapping[str, float]) -> str:
    return f"{m['median_ms']:7.1f} ({m['min_ms']:.1f}-{m['max_ms']:.1f})"


if __name__ == "__main__":
    cli.run(main)
