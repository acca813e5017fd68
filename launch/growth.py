"""What launch.benchmark measures against the size of the work: the suites data and scale, and their plot."""

import functools
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cxda_jax import augment, backend, train
from cxda_jax.data.episodes import EpisodeSpec, sample_plans
from cxda_jax.data.sources import Source, device_source, tfdata_source
from cxda_jax.data.store import DomainStore
from cxda_jax.experiment import make_optimizer
from cxda_jax.types import UserError
from launch.measure import Timing, chained, interleave, repeated, spread
from launch.suites import (
    KEY,
    OFF,
    SHAPES,
    SUPPORT,
    Case,
    Options,
    build,
    program,
    random_episodes,
    random_store,
    settings,
)

COLUMNS = 3  # panels side by side in a plot


def data_suite(o: Options) -> None:
    """What feeding costs: choosing, gathering, streaming, augmenting. Large stores are sparse files, read as zeros."""
    o.keep({"settings": settings(o), "data": {"plans": plan_times(o), "augmentation": augmentation_times(o)}})
    sizes = (8, 16) if o.small else (50, 200, 800, 3200, 8000)
    image, growth = SHAPES["cifar_c"].image, []
    spec = EpisodeSpec()
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in sizes:
            rows = megabytes * 10**6 // int(np.prod(image))
            path = Path(folder) / f"{megabytes}.u8"
            with open(path, "wb") as file:
                file.truncate(rows * int(np.prod(image)))
            pixels = np.memmap(path, np.uint8, "r", shape=(rows, *image))
            store = random_store("cifar_c", domains=50, images=rows // 50, pixels=pixels[: rows // 50 * 50])
            plans = functools.partial(sample_plans, spec, store.offsets, store.domains("train"), 0)
            if 2 * megabytes * 10**6 < free_memory():
                source = device_source(store)
                gather = backend.jit(source.assemble)
                timing = functools.partial(_timed_gathers, source=source, gather=gather, plans=plans)
                seconds = interleave({"gather": timing}, o.repeats)["gather"]
                growth.append({"what": "device", "x": "store MB", "at": megabytes, **spread(seconds)})
                del source, timing
            growth.append({"what": "tfdata", "x": "store MB", "at": megabytes, **_streaming(store, plans, o)})
            print("\n".join(f"{g['what']:8} {g['at']:6} MB  {g['median_ms']:8.3f} ms an episode" for g in growth[-2:]
                            if g["at"] == megabytes), flush=True)  # fmt: skip
            o.keep({"growth": growth})


def _timed_gathers(calls: int, source: Source, gather: Any, plans: Any) -> float:
    began = time.perf_counter()
    for i in range(calls):
        jax.block_until_ready(gather(source.resident, plans(range(i, i + 1))))
    return (time.perf_counter() - began) / calls


def _streaming(store: DomainStore, plans: Any, o: Options) -> dict[str, float]:
    """From one next() to the next, the host doing nothing else."""
    try:
        source = tfdata_source(store)
    except UserError:
        return {"median_ms": float("nan"), "min_ms": float("nan"), "max_ms": float("nan")}
    batches, seconds = source.batches(lambda step: plans(range(step, step + 1)), 0, 10_000), []
    for _ in range(20):
        next(batches)
    for _ in range(o.repeats):
        began = time.perf_counter()
        for _ in range(20):
            next(batches)
        seconds.append((time.perf_counter() - began) / 20)
    return spread(seconds)


def plan_times(o: Options) -> dict[str, float]:
    """Choosing the images of one step, and of 512, out of 262 domains of 10,000."""
    found = {
        "one_ms": spread(choosing(EpisodeSpec(), 262))["median_ms"],
        "512_ms": spread(choosing(EpisodeSpec(), 262, tasks=512, times=o.repeats))["median_ms"],
    }
    print(f"choosing a step's images {found['one_ms']:.3f} ms", flush=True)
    return found


def choosing(spec: EpisodeSpec, domains: int, tasks: int = 1, times: int = 100) -> list[float]:
    """Seconds to choose the images of some tasks out of domains of 10,000 images."""
    offsets, ids, seconds = np.arange(domains + 1, dtype=np.int64) * 10_000, np.arange(domains), []
    for i in range(times + 10):
        began = time.perf_counter()
        sample_plans(spec, offsets, ids, 0, range(i, i + tasks))
        seconds.append(time.perf_counter() - began)
    return seconds[10:]


def augmentation_times(o: Options) -> dict[str, Any]:
    """An episode's weak augmentation beside the training step that it is fused into."""
    found = {}
    for name in ("femnist", "cifar_c"):
        pixels = random_episodes(Case(name, "bn", "train"), o.small)
        pixels = jnp.concatenate([pixels.support.pixels[0], pixels.query.pixels[0]])
        weak = backend.jit(lambda key, pixels: augment.weak(key, pixels, augment.Weak()))
        step = program(Case(name, "bn", "train", width=o.width), o.small).timing
        seconds = interleave({"weak": repeated(functools.partial(weak, KEY(0), pixels)), "step": step}, o.repeats)
        found[name] = {key: spread(times) for key, times in seconds.items()}
        found[name]["share"] = found[name]["weak"]["median_ms"] / found[name]["step"]["median_ms"]
        print(f"augmentation {name}: {found[name]['weak']['median_ms']:.2f} ms, {found[name]['share']:.1%} of a step")
    return found


def scale_suite(o: Options) -> None:
    growth: list[dict[str, Any]] = []

    def add(what: str, x: str, at: int, case: Case, units: int = 1) -> None:
        seconds = interleave({"ours": program(case, o.small).timing}, o.repeats)["ours"]
        growth.append({"what": what, "x": x, "at": at, **spread(seconds, units)})
        print(f"{what}: {at} {x}  {growth[-1]['median_ms']:9.2f} ms", flush=True)
        o.keep({"settings": settings(o), "growth": growth})

    shape = "femnist"
    for method in ("cxda",) if o.small else ("bn", "cxda", "cxda_p2p"):
        for support in (10, 20) if o.small else (10, 20, 50, 100, 200, 500, 1000, 2000):
            add(
                f"{method} task",
                "support images",
                support,
                Case(shape, method, "infer", width=o.width, support=support),
            )
    for tasks in (2,) if o.small else (1, 2, 4, 8):
        add(
            "cxda training, an episode",
            "tasks a step",
            tasks,
            Case(shape, "cxda", "train", width=o.width, tasks=tasks),
            tasks,
        )
        add("cxda task", "tasks at once", tasks, Case(shape, "cxda", "infer", width=o.width, tasks=tasks), tasks)
    for domains in (1, 5) if o.small else (1, 2, 5, 10, 20, 50, 100):
        spec = EpisodeSpec(domains, SUPPORT // domains, SUPPORT // domains)
        seconds = choosing(spec, 262)
        growth.append(
            {"what": "choosing a task's images", "x": "domains of the support", "at": domains, **spread(seconds)}
        )
    for domains in (50, 500) if o.small else (50, 500, 5_000, 50_000):
        seconds = choosing(EpisodeSpec(), domains)
        growth.append(
            {"what": "choosing a task's images", "x": "domains of the data set", "at": domains, **spread(seconds)}
        )
    for seeds in (2,) if o.small else (1, 2, 3):
        seconds = interleave({"ours": several_seeds(shape, seeds, o)}, o.repeats)["ours"]
        growth.append(
            {"what": "bn training, a seed's step", "x": "seeds in one program", "at": seeds, **spread(seconds, seeds)}
        )
        print(f"{growth[-1]['what']}: {seeds} seeds  {growth[-1]['median_ms']:9.2f} ms", flush=True)
    o.keep({"growth": growth})


def several_seeds(shape: str, seeds: int, o: Options, dtype: str = "float32") -> Timing:
    """A training step of as many models side by side."""
    case = Case(shape, "bn", "train", width=o.width, dtype=dtype)
    method, episodes, tx = build(case), random_episodes(case, o.small), make_optimizer("sgd", 1e-4, 0.9, 1e-4)
    images = jax.tree.map(lambda x: x[0, :2], episodes.query)
    states = jax.vmap(lambda key: train.TrainState(
        jnp.zeros((), jnp.int32), v := method.init(key, images), tx.init(v["params"])))(jax.random.split(KEY(0), seeds))  # fmt: skip
    run = backend.jit(jax.vmap(lambda state: train.train_step(method, tx, OFF, state, episodes, KEY(0))))
    return chained(run, states)


def free_memory() -> float:
    """Bytes that the first device, or this machine, can still give."""
    found = jax.local_devices()[0].memory_stats()
    if found and "bytes_limit" in found:
        return found["bytes_limit"] - found["bytes_in_use"]
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    return next((1024.0 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable")), 4e9)


def draw_growth(growth: list[dict[str, Any]], path: Path) -> None:
    """One panel for each horizontal axis, one line for each kind of work. Both axes are logarithmic, so linear is slope 1,
    but for what hardly grows, which is drawn from zero."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    axes = list(dict.fromkeys(row["x"] for row in growth))
    rows = -(-len(axes) // COLUMNS)
    figure = Figure(figsize=(4.2 * min(COLUMNS, len(axes)), 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, min(COLUMNS, len(axes)), squeeze=False).ravel()
    for panel in panels[len(axes) :]:
        panel.axis("off")
    styles = [("o", "-"), ("s", "--"), ("^", ":"), ("D", "-."), ("v", (0, (1, 3)))]
    for x, panel in zip(axes, panels, strict=False):
        for i, what in enumerate(dict.fromkeys(row["what"] for row in growth if row["x"] == x)):
            line = [row for row in growth if row["x"] == x and row["what"] == what]
            marker, dashes = styles[i % len(styles)]
            panel.plot(
                [r["at"] for r in line], [r["median_ms"] for r in line], marker=marker, linestyle=dashes, label=what
            )
        found = [row["median_ms"] for row in growth if row["x"] == x]
        panel.set(xscale="log", xlabel=x, ylabel="ms")
        if max(found) > 4 * min(found):
            panel.set_yscale("log")
        else:
            panel.set_ylim(0, 1.2 * max(found))
        panel.set_xticks(sorted({r["at"] for r in growth if r["x"] == x}), minor=False)
        panel.set_xticklabels([str(t) for t in sorted({r["at"] for r in growth if r["x"] == x})], rotation=45)
        panel.xaxis.minorticks_off()
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    figure.savefig(path, dpi=110)
