"""What launch.benchmark measures: the suites step and task, and what all suites share.

Training and evaluation run through the package's own code paths.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cxda_jax import augment, backend, cost, train
from cxda_jax.data.sources import Source
from cxda_jax.data.store import DomainStore, StoreInfo
from cxda_jax.evaluate import compile_task
from cxda_jax.experiment import METHODS, build_method, make_optimizer
from cxda_jax.types import Array, Episode, Images, Method, Variables
from launch import cli
from launch.measure import Peer, Timing, chained, interleave, repeated, spread, top_operations

SUPPORT, QUERY = 100, 20
KEY = jax.random.key
OFF = augment.Weak(crop=False, flip=False, rotate=0.0)


class Shape(NamedTuple):
    """Images of a benchmark, and what the paper spends on it."""

    image: tuple[int, int, int]
    classes: int
    net: str
    steps: int  # of the paper's training: decision 2's epochs of images // 100 tasks
    validations: int
    paper_minutes: float  # of CXDA's training, on the paper's GPU


SHAPES = {
    "femnist": Shape((28, 28, 1), 62, "cnn", 120_000, 20, 110),
    "cifar_c": Shape((32, 32, 3), 10, "cnn", 56_000, 10, 63.2),
    "tiny_imagenet_c": Shape((64, 64, 3), 200, "resnet50", 51_000, 10, 168),
    "iwildcam": Shape((112, 112, 3), 182, "resnet50", 64_750, 10, 492),
}
METHODS_TIMED = {"bn": "cnn", "cxda": "cnn", "erm_iid": "resnet50"}  # the net that step times each with
# What is timed, and the peers that do the same work.
WORK = {
    ("cnn", "train", "flow"): ("exact", "exact_channels_last"),
    ("cnn", "train", "stop"): ("buffers",),
    ("cnn", "infer", "flow"): ("exact", "buffers", "buffers_channels_last"),
    ("resnet50", "train", "flow"): ("exact", "exact_channels_last"),
    ("resnet50", "infer", "flow"): ("exact", "exact_channels_last"),
}
FINE_TUNING = ("ft_em", "ft_im", "sf_ocda", "cotta")


class Options(NamedTuple):
    """The command line."""

    peer: Peer | None
    keep: Callable[[dict[str, Any]], None]  # into the record, which is then written
    width: int
    repeats: int
    gemm: int
    budget_s: float
    small: bool
    shapes: tuple[str, ...]
    cases: tuple[str, ...]
    only: tuple[str, ...] = ()  # parts of the gpu suite, by how their names begin; all if empty


class Case(NamedTuple):
    """A piece of work."""

    shape: str
    method: str
    work: str  # train, infer
    statistics: str = "flow"  # flow, stop
    width: int = 128
    dtype: str = "float32"
    tasks: int = 1  # at once
    steps: int = 1  # in one program
    support: int = SUPPORT

    @property
    def net(self) -> str:
        return SHAPES[self.shape].net

    @property
    def mixed(self) -> bool:
        return self.method == "erm_iid"

    @property
    def counts(self) -> tuple[int, int]:
        """Support and query images."""
        return (0, self.support + QUERY) if self.mixed else (self.support, QUERY)


class Program(NamedTuple):
    """A case made ready."""

    timing: Timing
    again: Callable[[], Any]
    lower: Callable[[], Any]


def step_suite(o: Options) -> None:
    peaks = gemm_peaks(o)
    o.keep({"settings": settings(o), "gemm_gflop_per_s": peaks, "rows": []})
    print("ms per episode, median (min-max); ratio = ours / peer", flush=True)
    rows: list[dict[str, Any]] = []
    for shape in (name for name in o.shapes if name != "iwildcam"):
        for method in (name for name in o.cases if METHODS_TIMED[name] == SHAPES[shape].net):
            for (net, work, kind), peers in WORK.items():
                if net != SHAPES[shape].net:
                    continue
                rows.append(measure(Case(shape, method, work, kind, o.width), o, peers, peaks))
                print(line(rows[-1]), flush=True)
                o.keep({"rows": rows})
    trained = [row["case"] for row in rows if row["case"]["work"] == "train"]
    if trained:
        o.keep({"profile": profile(Case(**trained[0]), o.small)})


def measure(case: Case, o: Options, peers: Iterable[str], peaks: dict[str, float]) -> dict[str, Any]:
    """A case and its peers in turns."""
    ours = program(case, o.small)
    contenders = {"ours": ours.timing}
    if o.peer:
        contenders |= {name: peer_timing(o.peer, case, name, o.small) for name in peers}
    seconds = interleave(contenders, o.repeats)
    if o.peer:
        for name in peers:
            o.peer.ask("forget", name=name)
    lowered, units = ours.lower(), case.tasks * case.steps
    gflop = cost.flops(lowered) / case.tasks / 1e9  # XLA counts a loop's body once
    found = {name: spread(times, units if name == "ours" else 1) for name, times in seconds.items()}
    for name, row in found.items():
        row["gflop_per_s"] = 1e3 * gflop / row["median_ms"]
        row["of_gemm_peak"] = (
            row["gflop_per_s"] / peaks[peak_name(case.dtype if name == "ours" else dtype_of(name), name)]
        )
    mine = found.pop("ours")
    return {
        "case": case._asdict(),
        "gflop": gflop,
        "temporary_bytes": temporary_bytes(lowered),
        "ours": mine,
        "peers": found,
        "ratio": {name: mine["median_ms"] / theirs["median_ms"] for name, theirs in found.items()},
    }


def program(case: Case, small: bool = False) -> Program:
    """Training steps or test tasks on random images, through the code that trains and evaluates."""
    method = build(case, small)
    episodes = random_episodes(case, small)
    source = Source((), lambda *_: iter(()), lambda resident, batch: batch)
    variables = backend.jit(method.init)(KEY(0), jax.tree.map(lambda x: x[0, :2], episodes.query))
    if case.work == "infer":
        answer: Any = compile_task(method, source).answer
        keys = jax.random.split(KEY(0), case.tasks)
        again = lambda: answer(variables, episodes, keys)  # noqa: E731
        return Program(repeated(again), again, lambda: answer.lower(variables, episodes, keys))
    tx = make_optimizer("sgd", 1e-4, 0.9, 1e-4)
    run = backend.jit(functools.partial(train.train_call, method, tx, OFF, source, case.steps))
    state = train.TrainState(jnp.zeros((), jnp.int32), variables, tx.init(variables["params"]))
    batch = episodes
    if case.steps > 1:
        batch = jax.tree.map(lambda x: jnp.broadcast_to(x, (case.steps, *x.shape)), episodes)
    step = lambda state: run(state, (), batch, KEY(0))  # noqa: E731
    return Program(chained(step, state), lambda: step(state), lambda: run.lower(state, (), batch, KEY(0)))


def build(case: Case, small: bool = False) -> Method:
    shape = SHAPES[case.shape]
    config = cli.resolve(cli.load_config(f"configs/{case.shape}.py:{case.method}"))
    config["net"] |= {"width": case.width, "dtype": case.dtype}
    config["attention"]["heads"] = 8 if case.width % 16 == 0 or shape.net == "resnet50" else 1
    config["batch_norm"]["statistics"] = case.statistics
    if small:
        config["net"]["stages"] = (1, 1, 1)
        config["finetune"]["steps"], config["cotta"]["copies"] = 1, 2
    return build_method(config, random_store(case.shape, domains=3, images=1))


def random_episodes(case: Case, small: bool = False) -> Episode:
    """[tasks, ...] of random images and labels."""
    shape, rng = SHAPES[case.shape], np.random.default_rng(0)
    counts = [min(4, n) for n in case.counts] if small else case.counts
    parts = []
    for n in counts:
        pixels = rng.integers(0, 256, (case.tasks, n, *shape.image), np.uint8)
        images = Images(
            jnp.asarray(pixels), jnp.asarray(np.arange(case.tasks * n).reshape(case.tasks, n) % 5, jnp.int32)
        )
        parts.append((images, jnp.asarray(rng.integers(0, shape.classes, (case.tasks, n)), jnp.int32)))
    (support, support_label), (query, label) = parts
    return Episode(support, query, label, support_label)


def peer_timing(peer: Peer, case: Case, name: str, small: bool = False) -> Timing:
    shape = SHAPES[case.shape]
    counts = [min(4, n) for n in case.counts] if small else case.counts
    peer.ask(
        "episode", name=name, net=shape.net, shape=shape.image, num_classes=shape.classes, counts=counts,
        width=case.width, heads=8 if case.width % 16 == 0 else 1, train=case.work == "train",
        statistics="buffers" if "buffers" in name else "flow", attention=case.method == "cxda",
        channels_last="channels_last" in name or "compiled" in name, compiled="compiled" in name, dtype=dtype_of(name),
    )  # fmt: skip
    return peer.timer(name)


def dtype_of(peer_name: str) -> str:
    return "bfloat16" if peer_name.endswith("_bf16") else "float32"


def peak_name(dtype: str, contender: str) -> str:
    return ("ours" if contender == "ours" else "torch") + ("_bf16" if dtype == "bfloat16" else "")


def gemm_peaks(o: Options, dtypes: Iterable[str] = ("float32",)) -> dict[str, float]:
    """Best GFLOP/s of a matrix product, ours and PyTorch's, by peak_name()."""
    print(f"timing matrix products of side {o.gemm}", flush=True)
    found = {}
    for dtype in dtypes:
        contenders = {peak_name(dtype, "ours"): repeated(cost.matrix_product(o.gemm, dtype))}
        if o.peer:
            o.peer.ask("gemm", name=f"gemm {dtype}", size=o.gemm, dtype=dtype)
            contenders[peak_name(dtype, "torch")] = o.peer.timer(f"gemm {dtype}")
        seconds = interleave(contenders, o.repeats)
        if o.peer:
            o.peer.ask("forget", name=f"gemm {dtype}")
        found |= {name: 2e-9 * o.gemm**3 / min(times) for name, times in seconds.items()}
    print("GFLOP/s: " + ", ".join(f"{name} {value:.0f}" for name, value in found.items()), flush=True)
    return found


def temporary_bytes(lowered: Any) -> int | None:
    """What a compiled program holds besides its arguments and results."""
    found = lowered.compile(backend.compiler_options()).memory_analysis()
    return int(found.temp_size_in_bytes) if found else None


def profile(case: Case, small: bool = False) -> dict[str, Any]:
    return {"case": case._asdict(), "operations": top_operations(program(case, small).again)}


def task_suite(o: Options) -> None:
    """Milliseconds a test task on FEMNIST's shape."""
    shape, at_once, several = ("femnist", (1, 2), 2) if o.small else ("femnist", (1, 4, 16), 4)
    rows: list[dict[str, Any]] = []
    for name in ("erm", "ft_em") if o.small else METHODS:
        if name in FINE_TUNING:
            rows += [
                {"method": name, "form": form, "tasks": several, **spread(seconds, several)}
                for form, seconds in interleave(
                    forms(Case(shape, name, "infer", width=o.width, tasks=several), o), 1
                ).items()
            ]
        else:
            for tasks in at_once:
                timing = program(Case(shape, name, "infer", width=o.width, tasks=tasks), o.small).timing
                seconds = interleave({"batched": timing}, o.repeats)["batched"]
                rows.append({"method": name, "form": "batched", "tasks": tasks, **spread(seconds, tasks)})
        print("\n".join(f"{r['method']:16} {r['form']:9} {r['tasks']:3} at once  {r['median_ms']:9.2f} ms/task"
                        for r in rows if r["method"] == name), flush=True)  # fmt: skip
        o.keep({"settings": settings(o), "tasks": rows})


def forms(case: Case, o: Options) -> dict[str, Timing]:
    """Fine-tuning several tasks: one program after another, all unrolled in one, or grouped by vmap."""
    method, episodes, keys = build(case, o.small), random_episodes(case, o.small), jax.random.split(KEY(0), case.tasks)
    variables = backend.jit(method.init)(KEY(0), jax.tree.map(lambda x: x[0, :2], episodes.query))
    if method.calibrate:
        variables = method.calibrate(variables, episodes.query.pixels[0])

    def one(variables: Variables, episode: Episode, key: Array) -> Array:
        return method.predict(method.adapt(variables, episode.support, key), episode.query)

    def task(i: int, episodes: Episode, keys: Array) -> Any:
        return jax.tree.map(lambda x: x[i], (episodes, keys))

    def each(variables: Variables, episodes: Episode, keys: Array) -> list[Array]:
        return [one(variables, *task(i, episodes, keys)) for i in range(case.tasks)]

    alone, unrolled, grouped = backend.jit(one), backend.jit(each), backend.jit(jax.vmap(one, in_axes=(None, 0, 0)))
    return {
        "looped": repeated(lambda: [alone(variables, *task(i, episodes, keys)) for i in range(case.tasks)]),
        "unrolled": repeated(lambda: unrolled(variables, episodes, keys)),
        "grouped": repeated(lambda: grouped(variables, episodes, keys)),
    }


def random_store(name: str, domains: int, images: int, pixels: np.ndarray | None = None) -> DomainStore:
    """In memory: a third of the domains each for train, val and test."""
    shape, rng = SHAPES[name], np.random.default_rng(0)
    rows = domains * images
    if pixels is None:
        pixels = np.frombuffer(rng.bytes(rows * int(np.prod(shape.image))), np.uint8).reshape(rows, *shape.image)
    channels = shape.image[-1]
    info = StoreInfo(f"random {name}", tuple(map(str, range(shape.classes))), (0.5,) * channels, (0.25,) * channels)
    split = tuple(("train", "val", "test")[3 * i // domains] for i in range(domains))
    labels = rng.integers(0, shape.classes, rows).astype(np.int32)
    offsets = np.arange(domains + 1, dtype=np.int64) * images
    return DomainStore(info, pixels, labels, offsets, split, tuple(map(str, range(domains))), "")


def settings(o: Options) -> dict[str, Any]:
    return {
        "support": SUPPORT, "query": QUERY, "width": o.width, "repeats": o.repeats, "gemm_side": o.gemm, "small": o.small,
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    c, mine = row["case"], row["ours"]
    name = f"{c['shape']} {c['method']} {c['work']}" + (f" {c['statistics']}" if c["work"] == "train" else "")
    several = f" {c['dtype']}" * (c["dtype"] != "float32") + f" x{c['tasks'] * c['steps']}" * (
        c["tasks"] * c["steps"] > 1
    )
    parts = [f"{name + several:32} ours {_milliseconds(mine)} {mine['of_gemm_peak']:4.0%} of GEMM"]
    parts += [f"{peer} {_milliseconds(m)} ratio {row['ratio'][peer]:.2f}" for peer, m in row["peers"].items()]
    return " | ".join(parts)


def _milliseconds(m: dict[str, float]) -> str:
    return f"{m['median_ms']:8.2f} ({m['min_ms']:.2f}-{m['max_ms']:.2f})"
