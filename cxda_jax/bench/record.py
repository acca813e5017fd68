"""Runs a suite of launch.benchmark and writes its record: facts about the machine, and every figure that was measured."""

import datetime
import json
from pathlib import Path
from typing import Any

import jax

from cxda_jax.bench import gpu, growth, suites
from cxda_jax.bench.cases import QUERY, SUPPORT
from cxda_jax.bench.measure import describe_machine, open_peer, watch_others

SUITES = {
    "step": suites.step_suite,
    "layers": suites.layers_suite,
    "task": suites.task_suite,
    "data": growth.data_suite,
    "scale": growth.scale_suite,
    "gpu": gpu.gpu_suite,
}


def run(suite: str, out: Path, peers: bool = True, date: str | None = None, gemm: int = 0, **options: Any) -> None:
    """Runs a suite. The record is written anew with each part of it, so that a run which is broken off leaves what it found.

    Args:
      suite: The key of SUITES.
      out: The JSON file. Plots of what grows lie beside it, as .svg and .png.
      peers: Whether PyTorch is timed too, where the suite does so.
      date: Date of the record; today's by default.
      gemm: Rows and columns of the matrices whose product gives the peak; 0 chooses by the device.
      **options: The other fields of suites.Options.
    """
    gemm = gemm or (4096 if jax.default_backend() == "cpu" else 8192)
    with open_peer(peers and suite in ("step", "gpu")) as peer:
        record: dict[str, Any] = {"suite": suite, "date": date or datetime.date.today().isoformat()}
        record |= describe_machine(peer)
        others = watch_others(peer)

        def keep(part: dict[str, Any]) -> None:
            record.update(part, others=others())
            out.write_text(json.dumps(record, indent=1) + "\n")

        o = suites.Options(peer, keep, gemm=gemm, **options)
        record["settings"] = {
            "support": SUPPORT, "query": QUERY, "width": o.width, "repeats": o.repeats, "gemm_side": gemm, "small": o.small,
        }  # fmt: skip
        SUITES[suite](o)
    if record.get("growth"):
        growth.draw_growth(record["growth"], out)
    if (record["others"] or 0) > 0.05:
        print(f"warning: other processes took {record['others']:.0%} of the cores; do not quote these figures")
    print(f"written to {out}")
