"""The suites of python -m tools.bench, which write a record: facts about the machine, and every figure that was measured."""

import datetime
import json
from pathlib import Path
from typing import Any

from cxda_jax.config.fields import lookup
from cxda_jax.machine import backend
from cxda_jax.machine.progress import replacing
from tools.bench.cases import QUERY, SUPPORT, Case
from tools.bench.gpu import gpu_suite
from tools.bench.measure import describe_machine, open_peer, watch_others
from tools.bench.rows import Options, add_beside_peers, gemm_peaks

TIMED = {"femnist": ("bn", "cxda"), "cifar_c": ("bn", "cxda"), "tiny_imagenet_c": ("erm_iid",)}  # of the suite step
EXACT = "exact", "exact_channels_last"  # torch_peer.py says what the peers' names mean


def step_suite(o: Options) -> None:
    """Times training steps and inference beside PyTorch."""
    pairs = [(shape, method) for shape in o.shapes or TIMED for method in lookup("shapes", shape, TIMED)]
    peaks = gemm_peaks(o, ["float32"])
    o.keep({"gemm_gflop_per_s": peaks, "rows": []})
    print("ms of an episode: median (min-max); ratio = ours / peer", flush=True)
    for shape, method in pairs:
        peers = EXACT if method == "erm_iid" else ("exact", "buffers", "buffers_channels_last")
        add_beside_peers(o, peaks, Case(shape, method, "train", width=o.width), EXACT)
        add_beside_peers(o, peaks, Case(shape, method, "infer", width=o.width), peers)


def run(suite: str, out: Path, peers: bool = True, gemm: int = 0, **options: Any) -> None:
    """Runs a suite, with Options, and writes its record anew with each part, so that one that is broken off has some.

    With `gemm` 0 the device decides on the size of the matrices.
    """
    replacing('"suite"', out)
    gemm = gemm or backend.peak_matrix_side()
    with open_peer(peers) as peer:
        record: dict[str, Any] = {"suite": suite, "date": datetime.date.today().isoformat()}
        record |= describe_machine(peer)
        others = watch_others(peer)

        def keep(part: dict[str, Any]) -> None:
            record.update(part, others=others())
            out.write_text(json.dumps(record, indent=1) + "\n")

        record["settings"] = {"support": SUPPORT, "query": QUERY, "gemm_side": gemm}
        record["settings"] |= {name: options[name] for name in ("width", "repeats", "small")}
        {"step": step_suite, "gpu": gpu_suite}[suite](Options(peer, record, keep, gemm=gemm, **options))
    if (record["others"] or 0) > 0.05:
        print(f"warning: other processes took {record['others']:.0%} of the cores; do not quote these figures")
    print(f"written to {out}")
