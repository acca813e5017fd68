"""The passport of a config on an accelerator: what its programs need there, by the compiler's own account, and bounds on their time.

No time here was measured. A bound is the larger of operations / peak and bytes / bandwidth, as the chip's maker states them.
"""

import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from cxda_jax import backend
from cxda_jax.ahead import hlo
from cxda_jax.ahead.chips import Chip, Target, devices
from cxda_jax.ahead.programs import Program, lower_all, open_sizes
from cxda_jax.config import Config
from cxda_jax.data.published import PUBLISHED
from cxda_jax.disk import files
from cxda_jax.errors import UserError
from cxda_jax.progress import compiling, duration
from cxda_jax.study.training import commit
from cxda_jax.version import VERSION

SMALL = 1024  # bytes; smaller exchanges are not shown
CHIPS = tuple(2**i for i in range(9))  # for which an efficiency is predicted
_NO_ROOM = re.compile(r"[Uu]sed ([\d.]+)([KMG]) of ([\d.]+)([KMG])")


def issue(config: Config, target: Target, data_dir: str, log: Callable[[str], None]) -> dict[str, Any]:
    """The passport of a config on the target."""
    store, programs, exchanged = open_sizes(config, data_dir), {}, 0
    with devices(target) as mesh:
        log(f"lowering for {target.text}: {mesh.devices.flat[0].device_kind}")
        for program in lower_all(config, store, mesh, target.chip.platform != "gpu"):
            with compiling(f"the {program.what} of {program.tasks} tasks", log):
                exchanged += program.exchanged
                programs[program.what] = examine(program, target, config["net"])
    return {
        "commit": commit(),
        "benchmark": config["benchmark"],
        "method": config["method"],
        "dtype": config["net"]["dtype"],
        "precision": config["net"]["precision"],
        "topology": target.text,
        "tasks_per_step": config["train"]["tasks_per_step"],
        "versions": {"cxda_jax": VERSION, "jax": jax.__version__, "compiler": _compiler(target)},
        "programs": programs,
        **predict(programs, target, exchanged),
    }


def examine(program: Program, target: Target, net: Config) -> dict[str, Any]:
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
    text = compiled.as_text()
    parsed, cycles = hlo.parse(text), hlo.cycles(text)
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak += memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    flops, traffic = program.flops or counted.get("flops", 0.0), hlo.traffic(parsed)
    return found | {
        "flops": flops,
        "bytes_accessed": counted.get("bytes accessed"),  # by the compiler's count, which the GPU's does not make
        "bytes_in_text": traffic,
        "peak_bytes": peak,
        "temporary_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "fits": peak <= chip.memory,
        "fusions": hlo.fusions(parsed),
        "collectives": [exchange._asdict() for exchange in hlo.collectives(parsed)],
        **roofline(flops, traffic, chip, net["dtype"], net["precision"]),
        "estimated_ms": 1e3 * cycles / chip.clock if cycles and chip.clock else None,
    }


def roofline(flops: float, moved: float, chip: Chip, dtype: str, precision: str = "default") -> dict[str, float]:
    """The least milliseconds that so many operations and bytes take."""
    slower = 1.0 if dtype == "bfloat16" else (1.0, *chip.slower)[("default", "high", "highest").index(precision)]
    products, memory = 1e3 * flops * slower / getattr(chip, dtype), 1e3 * moved / chip.bandwidth
    return {"products_ms": products, "memory_ms": memory, "bound_ms": max(products, memory)}


def all_reduce_ms(count: float, chips: int, chip: Chip) -> float:
    """The least milliseconds in which so many bytes are summed over chips and each gets the sum.

    2 (n - 1) / n * bytes / rate + 2 log2(n) * latency, with the rate of the links nearby, or of those between hosts or slices
    if there are more chips than are nearby.
    """
    rate = chip.link if chips <= chip.nearby else chip.far
    return 1e3 * (2 * (chips - 1) / chips * count / rate + 2 * math.log2(chips) * chip.latency)


def predict(programs: dict[str, Any], target: Target, exchanged: int) -> dict[str, Any]:
    """Bounds on the time of a whole training with its evaluations, and the efficiency of more chips with as many tasks each."""
    if not all(program["fits"] for program in programs.values()):
        return {}
    evaluation, found = programs["evaluation"], {}
    if step := programs.get("step"):
        steps = {chips: step["bound_ms"] + all_reduce_ms(exchanged, chips, target.chip) for chips in CHIPS}
        own = step["bound_ms"] + all_reduce_ms(exchanged, target.chips, target.chip)
        found["exchanged_bytes"] = exchanged
        found["training_s"] = step["runs"] * own / 1e3
        found["efficiency"] = {str(chips): step["bound_ms"] / ms for chips, ms in steps.items()}
    return found | {"evaluation_s": evaluation["runs"] * evaluation["bound_ms"] / 1e3}


def _compiler(target: Target) -> str:
    from importlib.metadata import version

    return (
        f"libtpu {version('libtpu')}" if target.chip.platform == "tpu" else f"CUDA plugin {version('jax-cuda12-pjrt')}"
    )


def write(path: Path, passport: dict[str, Any]) -> None:
    files.write_text(path, json.dumps(passport, indent=1) + "\n")


def read_all(folder: Path) -> list[dict[str, Any]]:
    """The passports of a folder, in the order of their files' names."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise UserError(f"{folder}: no passports in it, which are files .json")
    return found


def table(passports: list[dict[str, Any]]) -> str:
    """Passports as a Markdown table, a row for each program. Counts and times are of one chip and one run of the program."""
    names = (
        "benchmark",
        "type",
        "chips",
        "tasks",
        "program",
        "GFLOP",
        "GB accessed",
        "GB in text",
        "peak GB",
        "temporary GB",
    )
    names = *names, "fits", "fusions", "exchanged", "products ms", "memory ms", "whole training", "compiled in"
    rows = [names, ("---",) * len(names)]
    for passport in sorted(passports, key=_place):
        for what, program in passport["programs"].items():
            rows.append(_row(passport, what, program))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _place(passport: dict[str, Any]) -> tuple[Any, ...]:
    benchmark = passport["benchmark"]
    order = list(PUBLISHED).index(benchmark) if benchmark in PUBLISHED else len(PUBLISHED)
    return passport["topology"], order, passport["dtype"], passport["tasks_per_step"]


def _row(passport: dict[str, Any], what: str, program: dict[str, Any]) -> tuple[str, ...]:
    precision = "" if (it := passport.get("precision", "default")) == "default" else f", {it}"
    first = passport["benchmark"], passport["dtype"] + precision, passport["topology"], str(program["tasks"]), what
    compiled = f"{program['compile_s']:.0f} s"
    if "flops" not in program:  # the compiler refused it
        peak = f"{program['peak_bytes'] / 1e9:.1f}" if program["peak_bytes"] else "?"
        return *first, "", "", "", peak, "", "no", "", "", "", "", "", compiled
    kinds = [f"{c['types']} {c['bytes'] / 1e6:.2f} MB" for c in program["collectives"] if c["bytes"] > SMALL]
    whole = {"step": "training_s", "evaluation": "evaluation_s"}[what]
    gigabytes = [program[name] for name in ("bytes_accessed", "bytes_in_text", "peak_bytes", "temporary_bytes")]
    return (
        *first, f"{program['flops'] / 1e9:.1f}", *("" if n is None else f"{n / 1e9:.2f}" for n in gigabytes),
        "yes" if program["fits"] else "no", str(program["fusions"]), ", ".join(kinds),
        f"{program['products_ms']:.2f}", f"{program['memory_ms']:.2f}",
        duration(passport[whole]) if whole in passport else "", compiled,
    )  # fmt: skip
