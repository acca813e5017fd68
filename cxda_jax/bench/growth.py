"""The suites data and scale of launch.benchmark, which time work against its size, and their plot."""

import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cxda_jax import augment, backend, memory
from cxda_jax.bench.cases import SHAPES, SUPPORT, Case, make_runner, random_episodes, random_store, seeds_timing
from cxda_jax.bench.measure import interleave, repeated, seconds_of, show, spread
from cxda_jax.bench.suites import Options, time_case
from cxda_jax.data.episodes import EpisodeSpec, sample_plans
from cxda_jax.data.sources import SOURCES
from cxda_jax.data.store import DomainStore
from cxda_jax.errors import UserError

COLUMNS = 3  # panels side by side in a plot
STYLES = [("o", "-"), ("s", "--"), ("^", ":"), ("D", "-."), ("v", (0, (1, 3)))]  # marker and dashes of a line


class Growth:
    """Times against the size of the work: the record's rows, each a point of the plot."""

    def __init__(self, o: Options) -> None:
        self.o, self.rows = o, []

    def add(self, what: str, x: str, at: int, seconds: list[float], units: int = 1) -> None:
        """Adds the row of a kind of work whose size `x` is `at`, from the seconds of calls that do `units` of it each."""
        self.rows.append({"what": what, "x": x, "at": at, **spread(seconds, units)})
        show(f"{what}: {at} {x}", self.rows[-1])
        self.o.keep({"growth": self.rows})


def data_suite(o: Options) -> None:
    """Times what feeding costs: choosing, gathering, streaming and augmenting images."""
    one, many = choosing(EpisodeSpec(), 262), choosing(EpisodeSpec(), 262, tasks=512, times=o.repeats)
    plans = {"one_ms": spread(one)["median_ms"], "512_ms": spread(many)["median_ms"]}
    show("choosing a step's images", spread(one))
    o.keep({"data": {"plans": plans, "augmentation": {n: time_augmentation(n, o) for n in ("femnist", "cifar_c")}}})
    growth = Growth(o)
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in (8, 16) if o.small else (50, 200, 800, 3200, 8000):
            store = sparse_store(Path(folder) / f"{megabytes}.u8", megabytes)
            left = memory.left_on_device()
            left = memory.available() if left is None else left
            if left is None or left > 2e6 * megabytes:
                growth.add("device", "store MB", megabytes, time_feeding("device", store, o))
            try:
                growth.add("tfdata", "store MB", megabytes, time_feeding("tfdata", store, o))
            except UserError as e:
                print(f"tfdata left out: {e}", flush=True)


def sparse_store(path: Path, megabytes: int) -> DomainStore:
    """A store of CIFAR-C's shape in a sparse file, which the system reads as zeros."""
    shape, domains = SHAPES["cifar_c"].image, 50
    images = megabytes * 10**6 // int(np.prod(shape)) // domains
    pixels = np.memmap(path, np.uint8, "w+", shape=(domains * images, *shape))
    return random_store("cifar_c", domains, images, pixels)


def time_feeding(kind: str, store: DomainStore, o: Options) -> list[float]:
    """Seconds from one episode of a source (the key of SOURCES) to the next, while the host does nothing else."""
    source, domains = SOURCES[kind](store), store.domains("train")
    batches = source.batches(
        lambda step: sample_plans(EpisodeSpec(), store.offsets, domains, 0, range(step, step + 1)), 0, 10**9
    )
    gather = backend.jit(source.assemble)

    def feed() -> Any:
        batch = next(batches)  # of tf.data, this is the episode
        return jax.block_until_ready(gather(source.resident, batch)) if kind == "device" else batch

    for _ in range(20):  # until tf.data reads as far ahead as it may
        feed()
    return seconds_of(repeated(feed), o.repeats)


def choosing(spec: EpisodeSpec, domains: int, tasks: int = 1, times: int = 100) -> list[float]:
    """Seconds to choose the images of some tasks out of domains of 10,000 images."""
    offsets, ids, seconds = np.arange(domains + 1, dtype=np.int64) * 10_000, np.arange(domains), []
    for i in range(times + 10):
        began = time.perf_counter()
        sample_plans(spec, offsets, ids, 0, range(i, i + tasks))
        seconds.append(time.perf_counter() - began)
    return seconds[10:]


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
    growth = Growth(o)

    def task(method: str, support: int = SUPPORT, tasks: int = 1) -> list[float]:
        return time_case(Case("femnist", method, "infer", width=o.width, support=support, tasks=tasks), o)

    for method in ("cxda",) if o.small else ("bn", "cxda", "cxda_p2p"):
        for n in (10, 20) if o.small else (10, 20, 50, 100, 200, 500, 1000, 2000):
            growth.add(f"{method} task", "support images", n, task(method, support=n))
    for n in (2,) if o.small else (1, 2, 4, 8):
        step = time_case(Case("femnist", "cxda", "train", width=o.width, tasks=n), o)
        growth.add("cxda training, an episode", "tasks a step", n, step, n)
        growth.add("cxda task", "tasks at once", n, task("cxda", tasks=n), n)
    for n in (1, 5) if o.small else (1, 2, 5, 10, 20, 50, 100):
        spec = EpisodeSpec(n, SUPPORT // n, SUPPORT // n)
        growth.add("choosing a task's images", "domains of the support", n, choosing(spec, 262))
    for n in (50, 500) if o.small else (50, 500, 5_000, 50_000):
        growth.add("choosing a task's images", "domains of the data set", n, choosing(EpisodeSpec(), n))
    for n in (2,) if o.small else (1, 2, 3):
        seconds = seconds_of(seeds_timing(Case("femnist", "bn", "train", width=o.width), n, o.small), o.repeats)
        growth.add("bn training, a seed's step", "seeds in one program", n, seconds, n)


def draw_growth(rows: list[dict[str, Any]], out: Path) -> None:
    """Draws the rows of a Growth beside the record, as .svg and .png: a panel for each x, a line for each kind of work.

    Both axes are logarithmic, so a line of slope 1 is linear growth. A panel that hardly grows is drawn from zero.
    """
    from matplotlib.figure import Figure

    panels: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        panels.setdefault(row["x"], {}).setdefault(row["what"], []).append(row)
    columns, height = min(COLUMNS, len(panels)), -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(4.2 * columns, 3.4 * height), layout="constrained")
    axes = figure.subplots(height, columns, squeeze=False).ravel()
    for axis in axes[len(panels) :]:
        axis.axis("off")
    for axis, (x, lines) in zip(axes, panels.items(), strict=False):
        for i, (what, points) in enumerate(lines.items()):
            marker, dashes = STYLES[i % len(STYLES)]
            sizes, times = zip(*((p["at"], p["median_ms"]) for p in points), strict=True)
            axis.plot(sizes, times, marker=marker, linestyle=dashes, label=what)
        found = [p["median_ms"] for points in lines.values() for p in points]
        ticks = sorted({p["at"] for points in lines.values() for p in points})
        axis.set(xscale="log", xlabel=x, ylabel="ms")
        axis.set(**({"yscale": "log"} if max(found) > 4 * min(found) else {"ylim": (0, 1.2 * max(found))}))
        axis.set_xticks(ticks, map(str, ticks), rotation=45)
        axis.xaxis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    for suffix in (".svg", ".png"):
        figure.savefig(out.with_suffix(suffix), dpi=110)
