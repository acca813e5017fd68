"""The passport of a config on an accelerator: what its programs need there, by the compiler's own account, and bounds on their time.

No time here was measured. A bound is the larger of operations / peak and bytes / bandwidth, as the chip's maker states them.
"""

import json
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from cxda_jax import backend
from cxda_jax.ahead import hlo
from cxda_jax.ahead.chips import Chip, Target, devices
from cxda_jax.ahead.programs import Program, lower_all, open_sizes
from cxda_jax.config import Config
from cxda_jax.disk import files
from cxda_jax.progress import compiling, duration
from cxda_jax.version import VERSION

CHIPS = tuple(2**i for i in range(9))  # for which an efficiency is predicted
_NO_ROOM = re.compile(r"[Uu]sed ([\d.]+)([KMG]) of ([\d.]+)([KMG])")


def issue(config: Config, target: Target, data_dir: str, log: Callable[[str], None]) -> dict[str, Any]:
    """The passport of a config on the target."""
    store, programs = open_sizes(config, data_dir), {}
    with devices(target) as mesh:
        log(f"lowering for {target.text}: {mesh.devices.flat[0].device_kind}")
        for program in lower_all(config, store, mesh):
            with compiling(f"the {program.what} of {program.tasks} tasks", log):
                programs[program.what] = examine(program, target, config["net"]["dtype"])
    return {
        "benchmark": config["benchmark"],
        "method": config["method"],
        "dtype": config["net"]["dtype"],
        "topology": target.text,
        "tasks_per_step": config["train"]["tasks_per_step"],
        "versions": {"cxda_jax": VERSION, "jax": jax.__version__, "compiler": _compiler(target)},
        "programs": programs,
        **predict(programs, target),
    }


def examine(program: Program, target: Target, dtype: str) -> dict[str, Any]:
    """Compiles a program, and says what the compiler tells of it. All figures but `tasks` and `runs` are of one chip."""
    chip, began = target.chip, time.perf_counter()
    found: dict[str, Any] = {"tasks": program.tasks, "runs": program.runs, "fits": False, "compile_s": 0.0}
    try:
        compiled = program.lowered.compile(backend.compiler_options())
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        needed = _NO_ROOM.search(str(e))
        peak = float(needed[1]) * 2 ** {"K": 10, "M": 20, "G": 30}[needed[2]] if needed else None
        return found | {"compile_s": round(time.perf_counter() - began, 1), "peak_bytes": peak}
    found["compile_s"] = round(time.perf_counter() - began, 1)
    memory, counted = compiled.memory_analysis(), compiled.cost_analysis() or {}
    parsed = hlo.parse(compiled.as_text())
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak += memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    stated = program.lowered.cost_analysis() or {}
    flops = counted.get("flops") or stated.get("flops", 0.0) / target.chips  # the GPU compiler counts nothing
    moved = hlo.traffic(parsed)
    return found | {
        "flops": flops,
        "flops_counted_by": "compiler" if counted.get("flops") else "before compilation",
        "bytes": counted.get("bytes accessed") or moved,
        "bytes_counted_by": "compiler" if counted.get("bytes accessed") else "program text",
        "bytes_in_text": moved,
        "peak_bytes": peak,
        "temporary_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "fits": peak <= chip.memory,
        "fusions": hlo.fusions(parsed),
        "collectives": [found._asdict() for found in hlo.collectives(parsed)],
        **roofline(flops, counted.get("bytes accessed") or moved, chip, dtype),
    }


def roofline(flops: float, moved: float, chip: Chip, dtype: str) -> dict[str, float]:
    """The least milliseconds that so many operations and bytes take."""
    products, memory = 1e3 * flops / getattr(chip, dtype), 1e3 * moved / chip.bandwidth
    return {"products_ms": products, "memory_ms": memory, "bound_ms": max(products, memory)}


def all_reduce_ms(count: float, chips: int, chip: Chip) -> float:
    """The least milliseconds in which so many bytes are summed over chips and each gets the sum.

    2 (n - 1) / n * bytes / rate + 2 log2(n) * latency, with the rate of the links nearby, or of those between hosts or slices
    if there are more chips than are nearby.
    """
    rate = chip.link if chips <= chip.nearby else chip.far
    return 1e3 * (2 * (chips - 1) / chips * count / rate + 2 * math.log2(chips) * chip.latency)


def predict(programs: dict[str, Any], target: Target) -> dict[str, Any]:
    """Bounds on the time of a whole training with its evaluations, and on the share of more chips' time that is not exchange."""
    if not all(program["fits"] for program in programs.values()):
        return {}
    step, chip = programs.get("step"), target.chip
    exchanged = step["gradient_bytes"] if step and "gradient_bytes" in step else 0.0
    found: dict[str, Any] = {}
    if step:
        exchanged = sum(c["bytes"] for c in step["collectives"])
        found["training_s"] = step["runs"] * (step["bound_ms"] + all_reduce_ms(exchanged, target.chips, chip)) / 1e3
    evaluation = programs["evaluation"]
    found["evaluation_s"] = evaluation["runs"] * evaluation["bound_ms"] / 1e3
    return found


def _compiler(target: Target) -> str:
    from importlib.metadata import version

    return f"libtpu {version('libtpu')}" if target.chip.platform == "tpu" else f"CUDA plugin {version('jax-cuda12-pjrt')}"


def write(path: Path, passport: dict[str, Any]) -> None:
    files.write_text(path, json.dumps(passport, indent=1) + "\n")
