"""The suites of cxda benchmark, which write a record: facts about the machine, and every figure that was measured."""

import datetime
import functools
import itertools
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cxda_jax import augment, backend, memory
from cxda_jax.bench.buffer import buffer_suite
from cxda_jax.bench.cases import QUERY, SHAPES, SUPPORT, Case, make_runner, random_episodes, random_store, tuning_forms
from cxda_jax.bench.gpu import gpu_suite
from cxda_jax.bench.large import large_suite
from cxda_jax.bench.measure import Timing, describe_machine, interleave, open_peer, repeated, show, spread, watch_others
from cxda_jax.bench.rows import Options, add_beside_peers, draw_growth, gemm_peaks, grow, grow_seeds, profile, timed
from cxda_jax.data.episodes import EpisodeSpec, sample_plans
from cxda_jax.data.sources import SOURCES
from cxda_jax.data.store import DomainStore
from cxda_jax.errors import UserError
from cxda_jax.experiment import METHODS
from cxda_jax.nets.cnn import PADDINGS
from cxda_jax.nets.convolution import NUMBERS, convolve
from cxda_jax.progress import replacing

METHODS_TIMED = {"bn": "cnn", "cxda": "cnn", "erm_iid": "resnet50"}  # of the suite step, each with the net it takes
# Peers of the suite step by (net, Case.work, Case.statistics): torch_peer.py says what their names mean.
PEERS = {
    ("cnn", "train", "flow"): ("exact", "exact_channels_last"),
    ("cnn", "train", "stop"): ("buffers",),
    ("cnn", "infer", "flow"): ("exact", "buffers", "buffers_channels_last"),
    ("resnet50", "train", "flow"): ("exact", "exact_channels_last"),
    ("resnet50", "infer", "flow"): ("exact", "exact_channels_last"),
}


def step_suite(o: Options) -> None:
    """Times training steps and inference beside PyTorch, and lists what one step spends its time in."""
    peaks = gemm_peaks(o)
    o.keep({"gemm_gflop_per_s": peaks, "rows": []})
    print("ms of an episode: median (min-max); ratio = ours / peer", flush=True)
    cases = [
        (Case(shape, method, work, statistics, o.width), peers)
        for shape, method in itertools.product(o.shapes, o.cases)
        for (net, work, statistics), peers in PEERS.items()
        if shape != "iwildcam" and SHAPES[shape].net == METHODS_TIMED[method] == net
    ]
    for case, peers in cases:
        add_beside_peers(o, peaks, peers, case)
    if cases:
        o.keep({"profile": profile(cases[0][0], o.small)})


def task_suite(o: Options) -> None:
    """Times a test task of FEMNIST's shape, for each method."""
    for name in ("erm", "ft_em") if o.small else METHODS:
        case = Case("femnist", name, "infer", width=o.width)
        if name in ("ft_em", "ft_im", "sf_ocda", "cotta"):  # they fine-tune
            tasks = 2 if o.small else 4
            timings = tuning_forms(case._replace(tasks=tasks), o.small)
            found = [(form, tasks, spread(seconds, tasks)) for form, seconds in interleave(timings, 1).items()]
        else:
            several = (1, 2) if o.small else (1, 4, 16)
            found = [("batched", tasks, timed(case._replace(tasks=tasks), o, tasks)) for tasks in several]
        for form, tasks, times in found:
            row = {"method": name, "form": form, "tasks": tasks, **times}
            o.add("tasks", show(f"{name} {form}, a task of {tasks} at once", row))


def layers_suite(o: Options) -> None:
    """Times each convolution of the CNN, which says where a step's time goes: on CPUs the profiler sees only dispatches."""
    peak, found = gemm_peaks(o)["ours"], {}
    for name in (name for name in o.shapes if SHAPES[name].net == "cnn"):
        rows, (side, _, channels) = [], SHAPES[name].image
        for layer, pad in enumerate(PADDINGS["arm"]):
            rows += time_convolution(layer, side, channels, pad, peak, o)
            side, channels = (side + 2 * pad - 4) // (1 if layer == 0 else 2), o.width
        step = timed(Case(name, "bn", "train", width=o.width), o)
        outside = 1 - sum(row["median_ms"] for row in rows if row["by"] == "ours") / step["median_ms"]
        show(f"{name}: step, outside convolutions {outside:.0%}", step)
        found[name] = {"rows": rows, "step": step, "outside_convolutions": outside}
        o.keep({"gemm_gflop_per_s": peak, "layers": found})


def time_convolution(layer: int, side: int, channels: int, pad: int, peak: float, o: Options) -> list[dict[str, Any]]:
    """The record's rows of a convolution of [images, side, side, channels] and its gradients, by ours and by XLA's."""
    x = jax.random.normal(jax.random.key(0), (4 if o.small else SUPPORT + QUERY, side, side, channels))
    kernel = jax.random.normal(jax.random.key(1), (5, 5, channels, o.width))
    options = {"padding": ((pad, pad), (pad, pad)), "dimension_numbers": NUMBERS}
    functions = {
        "ours": functools.partial(convolve, strides=(1, 1), **options),
        "xla": functools.partial(jax.lax.conv_general_dilated, window_strides=(1, 1), **options),
    }
    passes: dict[str, Callable[..., Any]] = {
        "forward": lambda f, x, k, g: f(x, k),
        "gradient of the kernel": lambda f, x, k, g: jax.vjp(lambda k: f(x, k), k)[1](g),
        "gradient of the input": lambda f, x, k, g: jax.vjp(lambda x: f(x, k), x)[1](g),
    }
    grad = jnp.ones(jax.eval_shape(functions["xla"], x, kernel).shape)
    gflop = 2e-9 * grad.size * kernel.size / o.width  # multiplications and additions, those with padding included
    rows = []
    for what in list(passes)[: 2 if layer == 0 else 3]:  # the first layer's input, the images, needs no gradient
        programs = {by: backend.jit(functools.partial(passes[what], f)) for by, f in functions.items()}
        contenders = {by: repeated(functools.partial(run, x, kernel, grad)) for by, run in programs.items()}
        for by, seconds in interleave(contenders, o.repeats).items():
            row = {"layer": layer, "what": what, "by": by, "gflop": gflop, **spread(seconds)}
            row["of_gemm_peak"] = 1e3 * gflop / row["median_ms"] / peak
            rows.append(show(f"conv{layer} {what} {by}", row))
    return rows


def data_suite(o: Options) -> None:
    """Times what feeding costs: choosing, gathering, streaming and augmenting images."""
    one, many = (timed(choosing(EpisodeSpec(), 262, tasks), o) for tasks in (1, 512))
    show("choosing a step's images", one)
    plans = {"one_ms": one["median_ms"], "512_ms": many["median_ms"]}
    o.keep({"data": {"plans": plans, "augmentation": {n: time_augmentation(n, o) for n in ("femnist", "cifar_c")}}})
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in (8, 16) if o.small else (50, 200, 800, 3200, 8000):
            shape, path = SHAPES["cifar_c"].image, Path(folder, f"{megabytes}.u8")
            images = megabytes * 10**6 // math.prod(shape) // 50
            pixels = np.memmap(path, np.uint8, "w+", shape=(50 * images, *shape))  # a sparse file, which reads as zeros
            store, left = random_store("cifar_c", 50, images, pixels), memory.left_on_device() or memory.available()
            if left is None or left > 2e6 * megabytes:
                grow(o, "device", "store MB", megabytes, feeding("device", store))
            try:
                grow(o, "tfdata", "store MB", megabytes, feeding("tfdata", store))
            except UserError as e:
                print(f"tfdata left out: {e}", flush=True)


def feeding(kind: str, store: DomainStore) -> Timing:
    """Times a source (the key of SOURCES) from one episode to the next, while the host does nothing else."""
    source, domains = SOURCES[kind](store, None), store.domains("train")
    batches = source.batches(lambda step: sample_plans(EpisodeSpec(), store.offsets, domains, 0, [step]), 0, 10**9)
    gather = backend.jit(source.assemble)

    def feed() -> Any:
        batch = next(batches)  # of tf.data, this is the episode
        return jax.block_until_ready(gather(source.resident, batch)) if kind == "device" else batch

    for _ in range(20):  # until tf.data reads as far ahead as it may
        feed()
    return repeated(feed)


def choosing(spec: EpisodeSpec, domains: int, tasks: int = 1) -> Timing:
    """Times the choice of the images of some tasks out of domains of 10,000 images."""
    offsets, ids, first = np.arange(domains + 1, dtype=np.int64) * 10_000, np.arange(domains), itertools.count()
    return repeated(lambda: sample_plans(spec, offsets, ids, 0, range(start := next(first), start + tasks)))


def time_augmentation(name: str, o: Options) -> dict[str, Any]:
    """The weak augmentation of an episode beside the training step that it is fused into, and its share of that."""
    case = Case(name, "bn", "train", width=o.width)
    episodes = random_episodes(case, o.small)
    pixels = jnp.concatenate([episodes.support.pixels[0], episodes.query.pixels[0]])
    weak = backend.jit(lambda pixels: augment.weak(jax.random.key(0), pixels, augment.Weak()))
    contenders = {"weak": repeated(lambda: weak(pixels)), "step": make_runner(case, o.small).timing}
    found: dict[str, Any] = {key: spread(seconds) for key, seconds in interleave(contenders, o.repeats).items()}
    show(f"augmentation {name}", found["weak"], ratio := found["weak"]["median_ms"] / found["step"]["median_ms"])
    return found | {"share": ratio}


def scale_suite(o: Options) -> None:
    """Times work of FEMNIST's shape against support images, tasks, domains and seeds."""
    task = Case("femnist", "cxda", "infer", width=o.width)
    for method in ("cxda",) if o.small else ("bn", "cxda", "cxda_p2p"):
        for n in (10, 20) if o.small else (10, 20, 50, 100, 200, 500, 1000, 2000):
            grow(o, f"{method} task", "support images", n, task._replace(method=method, support=n))
    for n in (2,) if o.small else (1, 2, 4, 8):
        grow(o, "cxda training, an episode", "tasks a step", n, task._replace(work="train", tasks=n), n)
        grow(o, "cxda task", "tasks at once", n, task._replace(tasks=n), n)
    for n in (1, 5) if o.small else (1, 2, 5, 10, 20, 50, 100):
        spec = EpisodeSpec(n, SUPPORT // n, SUPPORT // n)
        grow(o, "choosing a task's images", "domains of the support", n, choosing(spec, 262))
    for n in (50, 500) if o.small else (50, 500, 5_000, 50_000):
        grow(o, "choosing a task's images", "domains of the data set", n, choosing(EpisodeSpec(), n))
    for n in (2,) if o.small else (1, 2, 3):
        grow_seeds(o, task._replace(method="bn", work="train"), n)


SUITES = {
    "step": step_suite, "layers": layers_suite, "task": task_suite, "buffer": buffer_suite,
    "data": data_suite, "scale": scale_suite, "large": large_suite, "gpu": gpu_suite,
}  # fmt: skip


def run(suite: str, out: Path, peers: bool = True, date: str | None = None, gemm: int = 0, **options: Any) -> None:
    """Runs a suite, with Options, and writes its record anew with each part, so that one that is broken off has some.

    A plot of what grows lies beside the record `out`. With `gemm` 0 the device decides on the size of the matrices.
    """
    replacing('"suite"', out)
    gemm = gemm or (4096 if jax.default_backend() == "cpu" else 8192)
    with open_peer(peers and suite in ("step", "gpu")) as peer:
        record: dict[str, Any] = {"suite": suite, "date": date or datetime.date.today().isoformat()}
        record |= describe_machine(peer)
        others = watch_others(peer)

        def keep(part: dict[str, Any]) -> None:
            record.update(part, others=others())
            out.write_text(json.dumps(record, indent=1) + "\n")

        record["settings"] = {"support": SUPPORT, "query": QUERY, "gemm_side": gemm}
        record["settings"] |= {name: options[name] for name in ("width", "repeats", "small")}
        SUITES[suite](Options(peer, record, keep, gemm=gemm, **options))
    if record.get("growth"):
        draw_growth(record["growth"], out)
    if (record["others"] or 0) > 0.05:
        print(f"warning: other processes took {record['others']:.0%} of the cores; do not quote these figures")
    print(f"written to {out}")
