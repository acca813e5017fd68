"""Where memory does not suffice, one line says so: before a program starts where that can be known, else once it fails."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from cxda_jax import backend
from cxda_jax.types import UserError

_CGROUPS = {"0": ("/sys/fs/cgroup", "memory.max"), "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")}


@contextlib.contextmanager
def named(fields: str) -> Iterator[None]:
    """Around work, or above a function: running out of memory in it becomes a UserError that names the fields to lower."""
    try:
        yield
    except TooLarge as e:
        raise UserError(f"out of memory: {e}; lower {fields}") from e
    except (MemoryError, jax.errors.JaxRuntimeError) as e:
        if not isinstance(e, MemoryError) and "RESOURCE_EXHAUSTED" not in str(e):
            raise
        raise UserError(f"out of memory{_asked(str(e))}; lower {fields}") from e


class TooLarge(MemoryError):
    """A program that needs more memory than there is."""


def _asked(text: str) -> str:
    """How much was asked for, where numpy or XLA tells it."""
    found = re.search(r"allocat\w+ ([\d.]+) ?(\w+)", text)
    if not found:
        return ""
    number, unit = found.groups()
    return f": {_gb(float(number)) if unit == 'bytes' else f'{number} {unit}'} asked for at once"


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


def check(program: Any, *arguments: Any) -> None:
    """Raises TooLarge if a jitted function will not fit, on CPUs: systems promise more memory than they have, and end who
    takes it without a word. Devices refuse it themselves. It compiles the program, which JAX keeps for the call."""
    room = available()
    if jax.default_backend() != "cpu" or room is None:
        return
    found = program.lower(*arguments).compile().memory_analysis()
    needed = found.temp_size_in_bytes + found.output_size_in_bytes if found else 0
    if needed > room + backend.freed_memory():
        raise TooLarge(f"a program needs {_gb(needed)}, {_gb(room)} are free")


def checked(program: Any) -> Callable[..., Any]:
    """The jitted function, which is checked at its first call."""
    called = False

    def call(*arguments: Any) -> Any:
        nonlocal called
        if not called:
            check(program, *arguments)
            called = True
        return program(*arguments)

    return call


def available() -> int | None:
    """Bytes that this process may still take, swap included; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    told = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    if "MemAvailable" not in told:
        return None
    return min(1024 * (told["MemAvailable"] + told.get("SwapFree", 0)), *_limits())


def _limits() -> list[int]:
    """What cgroups, as Slurm and containers make them, allow this process in all."""
    found = [2**63]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        root, file = _CGROUPS.get(number if number == "0" else controllers, ("", ""))
        folder = Path(root) / path.lstrip("/")
        for parent in (folder, *folder.parents) if root else ():
            with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                found.append(int((parent / file).read_text()))
    return found


def left_on_device() -> int | None:
    """Bytes that the first device has left; None where it does not say, as on CPUs."""
    found = jax.local_devices()[0].memory_stats()
    return (
        found["bytes_limit"] - found["bytes_in_use"]
        if found and {"bytes_limit", "bytes_in_use"} <= set(found)
        else None
    )
