"""The parts that the suites of python -m tools.bench share: their options, and rows of the record,
which is written with each."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from cxda_jax.data.published import PUBLISHED
from cxda_jax.machine import backend, cost
from tools.bench.cases import Case, make_runner
from tools.bench.measure import Peer, Timing, interleave, repeated, spread


class Options(NamedTuple):
    """The options of a suite, as the flags of python -m tools.bench say."""

    peer: Peer | None  # PyTorch, unless it is left out
    record: dict[str, Any]
    keep: Callable[[dict[str, Any]], None]  # adds entries to the record and writes it
    width: int  # channels of the CNN
    repeats: int  # timings of each contender
    gemm: int  # rows and columns of the matrices whose product gives the peak
    budget_s: float  # seconds after which the suite gpu begins no other part
    small: bool  # few images and steps: the suite only shows that it runs
    shapes: tuple[str, ...]  # of the suite step; all if empty
    only: tuple[str, ...]  # how the names of the parts of the suite gpu begin; all if empty

    def add(self, name: str, row: Any) -> None:
        """Adds a row to a list of the record, and writes the record."""
        self.keep({name: [*self.record[name], row]})


def in_turn(o: Options, ours: dict[str, Timing], peers: Iterable[str], what: str, **how: Any) -> dict[str, list[float]]:
    """Seconds of ours and of the peers by name. `what` and `how` are arguments of Peer.prepare()."""
    theirs = {name: o.peer.prepare(what, name, **how) for name in peers} if o.peer else {}
    seconds = interleave(ours | theirs, o.repeats)
    if o.peer:
        o.peer.ask("forget")
    return seconds


def add_beside_peers(o: Options, peaks: dict[str, float], case: Case, peers: Iterable[str] = ()) -> None:
    """Adds the row of a case that takes turns with its peers. `peaks` are those of gemm_peaks()."""
    runner, shape = make_runner(case, o.small), PUBLISHED[case.shape]
    seconds = in_turn(
        o, {"ours": runner.timing}, peers, "episode", resnet=case.method == "erm_iid", image=shape.image,
        classes=shape.classes, width=case.width, heads=case.heads if case.method == "cxda" else 0,
        counts=case.counts(o.small), train=case.work == "train",
    )  # fmt: skip
    lowered = runner.lower()
    gflop = (cost.flops(lowered) or 0.0) / case.tasks / 1e9  # XLA counts a loop's body once
    found, ratio = {}, {}
    for name, times in seconds.items():
        ours = name == "ours"
        found[name] = row = spread(times, case.tasks * case.steps if ours else 1)
        row["gflop_per_s"] = 1e3 * gflop / row["median_ms"]
        bf16 = case.dtype == "bfloat16" if ours else name.endswith("_bf16")
        row["of_gemm_peak"] = row["gflop_per_s"] / peaks[("ours" if ours else "torch") + ("_bf16" if bf16 else "")]
        said = f"{row['median_ms']:9.3f} ms ({row['min_ms']:.3f}-{row['max_ms']:.3f})"
        said += f" {row['of_gemm_peak']:4.0%} of GEMM"
        if not ours:
            ratio[name] = found["ours"]["median_ms"] / row["median_ms"]
            said += f" ratio {ratio[name]:.2f}"
        print(f"{f'{case.shape} {case.method} {case.work} {case.dtype}: {name}':48} {said}", flush=True)
    memory = lowered.compile(backend.compiler_options()).memory_analysis()
    o.add("rows", {
        "case": case._asdict(), "gflop": gflop, "ours": found.pop("ours"), "peers": found, "ratio": ratio,
        "temporary_bytes": int(memory.temp_size_in_bytes) if memory else None,
    })  # fmt: skip


def gemm_peaks(o: Options, dtypes: Iterable[str]) -> dict[str, float]:
    """Best GFLOP/s of a matrix product: "ours" and "torch", with "_bf16" behind that for bfloat16."""
    print(f"timing matrix products of side {o.gemm}", flush=True)
    found = {}
    for dtype in dtypes:
        suffix, product = "_bf16" if dtype == "bfloat16" else "", repeated(cost.matrix_product(o.gemm, dtype))
        seconds = in_turn(o, {"ours" + suffix: product}, ["torch" + suffix], "gemm", size=o.gemm, dtype=dtype)
        found |= {name: 2e-9 * o.gemm**3 / min(times) for name, times in seconds.items()}
    print("GFLOP/s: " + ", ".join(f"{name} {value:.0f}" for name, value in found.items()), flush=True)
    return found
