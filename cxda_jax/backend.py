"""What depends on the machine: the compiler options that XLA's CPU backend needs, and nothing else."""

import ctypes
import functools
import os
import platform
from pathlib import Path
from typing import Any

import jax

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8  # malloc.h
# Without it XLA's CPU backend expands each convolution into gigabytes of im2col: 2 to 3 times slower.
_CPU_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": ""}
_GPU_DETERMINISM = {"xla_gpu_deterministic_ops": True}  # on other devices all operations are deterministic
_deterministic = False


def make_deterministic() -> None:
    """Has programs made from now on give the same bits in every run on a GPU of the same kind, at some cost in speed."""
    global _deterministic
    _deterministic = True
    compiler_options.cache_clear()


@functools.cache
def compiler_options() -> dict[str, Any] | None:
    """Options for jit on this backend: on CPUs where this jaxlib knows the option, on GPUs where determinism is wanted.

    Passed with the function rather than through XLA_FLAGS: an unknown name is then an error to catch, not an abort,
    and the environment stays as the user left it.
    """
    if jax.default_backend() == "gpu" and _deterministic:
        return _GPU_DETERMINISM
    if jax.default_backend() != "cpu":
        return None
    try:
        jax.jit(lambda x: x + 1, compiler_options=_CPU_OPTIONS).lower(0.0).compile()
    except Exception:  # jaxlib names its refusal differently from version to version
        return None
    return _CPU_OPTIONS


def jit(fun: Any, **kwargs: Any) -> Any:
    """jax.jit with this backend's compiler options, for outermost functions."""
    return jax.jit(fun, compiler_options=compiler_options(), **kwargs)


def machine() -> str:
    """The kind of machine that the last bits of a result depend on: its accelerator, or else its processor."""
    if jax.default_backend() != "cpu":
        return jax.devices()[0].device_kind
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def threads() -> int:
    """How many threads XLA's CPU backend shares its sums among: other numbers of them round otherwise."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    told = os.environ.get("NPROC", "")
    return int(told) if told.isdecimal() and int(told) else usable


def keep_freed_memory() -> None:
    """Has the C library keep large freed blocks for the next step instead of returning them to the system.

    On CPUs each step otherwise faults its activations in anew, page by page. Call it before jax starts its threads: later,
    each of them has a pool of its own, that fills up and stays. It does nothing where there is no glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_TOP_PAD, 2**28)


def freed_memory() -> int:
    """Bytes of freed blocks that the C library keeps for this process, for the next ones; 0 where it does not say."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):
        return 0
    mallinfo.restype = _Mallinfo
    return mallinfo().fordblks


class _Mallinfo(ctypes.Structure):  # malloc.h
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]  # fmt: skip
