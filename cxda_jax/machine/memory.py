"""Out of memory becomes one line: before a program starts if that can be known, otherwise when it fails."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from cxda_jax.errors import UserError
from cxda_jax.machine import backend

# The hierarchy of control groups (cgroups), which Slurm and containers make: its folder, and the file with the limit.
_CGROUPS = {"0": ("/sys/fs/cgroup", "memory.max"), "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")}


@contextlib.contextmanager
def named(fields: str) -> Iterator[None]:
    """A context, or a decorator, in which running out of memory becomes a UserError that names the fields to lower."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as e:
        if not isinstance(e, MemoryError) and "RESOURCE_EXHAUSTED" not in str(e):
            raise
        told = f": {e}" if isinstance(e, TooLarge) else _asked(str(e))
        raise UserError(f"out of memory{told}; lower {fields}") from e


class TooLarge(MemoryError):
    """A program needs more memory than is free."""


def _asked(text: str) -> str:
    """The size of the request in an error of numpy or XLA, if the error contains it."""
    if not (request := re.search(r"allocat\w+ ([\d.]+) ?(\w+)", text)):
        return ""
    number, unit = request.groups()
    return f": {_gb(float(number)) if unit == 'bytes' else f'{number} {unit}'} asked for at once"


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


def insist_it_fits(program: Any, *arguments: Any) -> None:
    """Raises TooLarge if a jitted function will not fit, where the backend does not report this itself. It compiles the
    program, which JAX keeps for the call that follows."""
    if (room := available()) is None or not backend.checks_memory_first():
        return
    analysis = program.lower(*arguments).compile().memory_analysis()
    needed = analysis.temp_size_in_bytes + analysis.output_size_in_bytes if analysis else 0
    if needed > room + backend.freed_memory():
        raise TooLarge(f"a program needs {_gb(needed)}, {_gb(room)} are free")


def available() -> int | None:
    """Bytes that this process may still take, swap included; None if the system does not say."""
    try:
        lines = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
        kilobytes = {name: int(count) for name, count, *_ in lines}
        return min(1024 * (kilobytes["MemAvailable:"] + kilobytes.get("SwapFree:", 0)), *_limits())
    except (OSError, KeyError):
        return None


def _limits() -> list[int]:
    """The limits in bytes that control groups set to the memory of this process."""
    limits = [2**63]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        root, file = _CGROUPS.get(number if number == "0" else controllers, ("", ""))
        folder = Path(root) / path.lstrip("/")
        for parent in (folder, *folder.parents) if root else ():
            with contextlib.suppress(OSError, ValueError):  # the file is missing, or says "max"
                limits.append(int((parent / file).read_text()))
    return limits


def left_on_device() -> int | None:
    """Bytes that the first device has left; None if it does not say, as on CPUs."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats["bytes_limit"] - stats["bytes_in_use"] if {"bytes_limit", "bytes_in_use"} <= stats.keys() else None
