"""The suites of cxda benchmark, which write a record: facts about the machine, and every figure that was measured."""

import datetime
import itertools
import json
from pathlib import Path
from typing import Any

import jax

from cxda_jax.bench.cases import QUERY, SHAPES, SUPPORT, Case
from cxda_jax.bench.gpu import gpu_suite
from cxda_jax.bench.measure import describe_machine, open_peer, watch_others
from cxda_jax.bench.rows import Options, add_beside_peers, gemm_peaks, profile
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


SUITES = {"step": step_suite, "gpu": gpu_suite}


def run(suite: str, out: Path, peers: bool = True, date: str | None = None, gemm: int = 0, **options: Any) -> None:
    """Runs a suite, with Options, and writes its record anew with each part, so that one that is broken off has some.

    With `gemm` 0 the device decides on the size of the matrices.
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
    if (record["others"] or 0) > 0.05:
        print(f"warning: other processes took {record['others']:.0%} of the cores; do not quote these figures")
    print(f"written to {out}")
