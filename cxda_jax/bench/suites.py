"""The suites step, task and layers of launch.benchmark, and what all suites share."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cxda_jax import backend, cost
from cxda_jax.bench.cases import QUERY, SHAPES, SUPPORT, Case, fine_tuning_timings, make_runner
from cxda_jax.bench.measure import Peer, interleave, repeated, seconds_of, show, spread, top_operations
from cxda_jax.experiment import METHODS
from cxda_jax.nets.cnn import PADDINGS
from cxda_jax.nets.convolution import NUMBERS, convolve
from cxda_jax.types import Array

METHODS_TIMED = {"bn": "cnn", "cxda": "cnn", "erm_iid": "resnet50"}  # of the suite step, each with the net it takes
# Peers of the suite step by (net, Case.work, Case.statistics): torch_peer.py says what their names mean.
PEERS = {
    ("cnn", "train", "flow"): ("exact", "exact_channels_last"),
    ("cnn", "train", "stop"): ("buffers",),
    ("cnn", "infer", "flow"): ("exact", "buffers", "buffers_channels_last"),
    ("resnet50", "train", "flow"): ("exact", "exact_channels_last"),
    ("resnet50", "infer", "flow"): ("exact", "exact_channels_last"),
}
FINE_TUNING = ("ft_em", "ft_im", "sf_ocda", "cotta")


class Options(NamedTuple):
    """What a suite is asked for, as the flags of launch.benchmark say."""

    peer: Peer | None  # PyTorch, unless it is left out
    keep: Callable[[dict[str, Any]], None]  # adds entries to the record and writes it
    width: int  # channels of the CNN
    repeats: int  # timings of each contender
    gemm: int  # rows and columns of the matrices whose product gives the peak
    budget_s: float  # seconds after which the suite gpu begins no other part
    small: bool  # few images and steps: the suite only shows that it runs
    shapes: tuple[str, ...]  # of the suites step and layers
    cases: tuple[str, ...]  # methods of the suite step
    only: tuple[str, ...]  # how the names of the parts of the suite gpu begin; all if empty


def time_case(case: Case, o: Options) -> list[float]:
    """Seconds of a case alone, once for each repeat."""
    return seconds_of(make_runner(case, o.small).timing, o.repeats)


def step_suite(o: Options) -> None:
    """Times training steps and inference beside PyTorch, and lists what one step spends its time in."""
    rows: list[dict[str, Any]] = []
    peaks = gemm_peaks(o)
    o.keep({"gemm_gflop_per_s": peaks, "rows": rows})
    print("ms of an episode: median (min-max); ratio = ours / peer", flush=True)
    for shape in (name for name in o.shapes if name != "iwildcam"):
        for method in (name for name in o.cases if METHODS_TIMED[name] == SHAPES[shape].net):
            for (net, work, statistics), peers in PEERS.items():
                if net == SHAPES[shape].net:
                    rows.append(time_beside_peers(Case(shape, method, work, statistics, o.width), o, peers, peaks))
                    o.keep({"rows": rows})
    trained = [row["case"] for row in rows if row["case"]["work"] == "train"]
    if trained:
        o.keep({"profile": profile(Case(**trained[0]), o.small)})


def time_beside_peers(case: Case, o: Options, peers: Iterable[str], peaks: dict[str, float]) -> dict[str, Any]:
    """The record's row of a case that takes turns with its peers. `peaks` are those of gemm_peaks()."""
    runner, shape = make_runner(case, o.small), SHAPES[case.shape]
    contenders = {"ours": runner.timing}
    if o.peer:
        contenders |= {name: o.peer.prepare(
            "episode", name, net=shape.net, shape=shape.image, num_classes=shape.classes, width=case.width, heads=case.heads,
            counts=case.reduced_counts(o.small), train=case.work == "train", attention=case.method == "cxda",
        ) for name in peers}  # fmt: skip
    seconds = interleave(contenders, o.repeats)
    if o.peer:
        o.peer.ask("forget")
    lowered = runner.lower()
    gflop = cost.flops(lowered) / case.tasks / 1e9  # XLA counts a loop's body once
    found = {}
    for name, times in seconds.items():
        ours = name == "ours"
        found[name] = row = spread(times, case.tasks * case.steps if ours else 1)
        row["gflop_per_s"] = 1e3 * gflop / row["median_ms"]
        bf16 = case.dtype == "bfloat16" if ours else name.endswith("_bf16")
        row["of_gemm_peak"] = row["gflop_per_s"] / peaks[("ours" if ours else "torch") + ("_bf16" if bf16 else "")]
        ratio = None if ours else found["ours"]["median_ms"] / row["median_ms"]
        show(f"{case.shape} {case.method} {case.work} {case.statistics} {case.dtype}: {name}", row, ratio)
    mine, memory = found.pop("ours"), lowered.compile(backend.compiler_options()).memory_analysis()
    return {
        "case": case._asdict(), "gflop": gflop, "temporary_bytes": int(memory.temp_size_in_bytes) if memory else None,
        "ours": mine, "peers": found, "ratio": {name: mine["median_ms"] / row["median_ms"] for name, row in found.items()},
    }  # fmt: skip


def gemm_peaks(o: Options, dtypes: Iterable[str] = ("float32",)) -> dict[str, float]:
    """Best GFLOP/s of a matrix product: "ours" and "torch", with "_bf16" behind that for bfloat16."""
    print(f"timing matrix products of side {o.gemm}", flush=True)
    found = {}
    for dtype in dtypes:
        suffix = "_bf16" if dtype == "bfloat16" else ""
        contenders = {f"ours{suffix}": repeated(cost.matrix_product(o.gemm, dtype))}
        if o.peer:
            contenders[f"torch{suffix}"] = o.peer.prepare("gemm", "gemm", size=o.gemm, dtype=dtype)
        found |= {name: 2e-9 * o.gemm**3 / min(times) for name, times in interleave(contenders, o.repeats).items()}
        if o.peer:
            o.peer.ask("forget")
    print("GFLOP/s: " + ", ".join(f"{name} {value:.0f}" for name, value in found.items()), flush=True)
    return found


def profile(case: Case, small: bool) -> dict[str, Any]:
    """What a case spends most time in, as a record says it."""
    timing = make_runner(case, small).timing
    return {"case": case._asdict(), "operations": top_operations(lambda: timing(1))}


def task_suite(o: Options) -> None:
    """Times a test task of FEMNIST's shape, for each method."""
    rows: list[dict[str, Any]] = []

    def add(method: str, form: str, tasks: int, seconds: list[float]) -> None:
        rows.append({"method": method, "form": form, "tasks": tasks, **spread(seconds, tasks)})
        show(f"{method} {form}, a task of {tasks} at once", rows[-1])
        o.keep({"tasks": rows})

    for name in ("erm", "ft_em") if o.small else METHODS:
        case = Case("femnist", name, "infer", width=o.width)
        if name in FINE_TUNING:
            several = 2 if o.small else 4
            for form, seconds in interleave(fine_tuning_timings(case._replace(tasks=several), o.small), 1).items():
                add(name, form, several, seconds)
        else:
            for tasks in (1, 2) if o.small else (1, 4, 16):
                add(name, "batched", tasks, time_case(case._replace(tasks=tasks), o))


def layers_suite(o: Options) -> None:
    """Times each convolution of the CNN, which says where a step's time goes: on CPUs the profiler sees only dispatches."""
    peak, found = gemm_peaks(o)["ours"], {}
    for name in (name for name in o.shapes if SHAPES[name].net == "cnn"):
        rows, (side, _, channels) = [], SHAPES[name].image
        for layer, pad in enumerate(PADDINGS["arm"]):
            rows += time_convolution(layer, side, channels, pad, peak, o)
            side, channels = (side + 2 * pad - 4) // (1 if layer == 0 else 2), o.width
        step = spread(time_case(Case(name, "bn", "train", width=o.width), o))
        outside = 1 - sum(row["median_ms"] for row in rows if row["by"] == "ours") / step["median_ms"]
        found[name] = {"rows": rows, "step": step, "outside_convolutions": outside}
        show(f"{name}: step, outside convolutions {outside:.0%}", step)
        o.keep({"gemm_gflop_per_s": peak, "layers": found})


def time_convolution(layer: int, side: int, channels: int, pad: int, peak: float, o: Options) -> list[dict[str, Any]]:
    """The record's rows of a convolution: forward and its gradients, by ours and by XLA's.

    The input is [images, side, side, channels] with `pad` pixels of padding on each side. `peak` is in GFLOP/s. Layer 0 needs
    no gradient of its input, the images.
    """
    x = jax.random.normal(jax.random.key(0), (4 if o.small else SUPPORT + QUERY, side, side, channels))
    kernel = jax.random.normal(jax.random.key(1), (5, 5, channels, o.width))

    def convolution(by: Callable[..., Array]) -> Callable[[Array, Array], Array]:
        return lambda x, kernel: by(x, kernel, (1, 1), ((pad, pad), (pad, pad)), dimension_numbers=NUMBERS)

    functions = {"ours": convolution(convolve), "xla": convolution(jax.lax.conv_general_dilated)}
    grad = jnp.ones(jax.eval_shape(functions["xla"], x, kernel).shape)
    gflop = 2e-9 * grad.size * kernel.size / o.width  # multiplications and additions, those with padding included
    passes: dict[str, Callable[[Any], Callable[..., Any]]] = {
        "forward": lambda f: lambda x, k, g: f(x, k),
        "gradient of the kernel": lambda f: lambda x, k, g: jax.vjp(lambda k: f(x, k), k)[1](g),
        "gradient of the input": lambda f: lambda x, k, g: jax.vjp(lambda x: f(x, k), x)[1](g),
    }
    rows = []
    for what in list(passes)[: 2 if layer == 0 else 3]:
        programs = {by: backend.jit(passes[what](f)) for by, f in functions.items()}
        contenders = {by: repeated(lambda run=run: run(x, kernel, grad)) for by, run in programs.items()}
        for by, seconds in interleave(contenders, o.repeats).items():
            row = {"layer": layer, "what": what, "by": by, "gflop": gflop, **spread(seconds)}
            rows.append(row | {"of_gemm_peak": 1e3 * gflop / row["median_ms"] / peak})
            show(f"conv{layer} {what} {by}", rows[-1])
    return rows
