"""All decisions that depend on the backend (CPU, GPU or TPU) and on the machine.

No other module asks for the backend.
"""

import contextlib
import contextvars
import ctypes
import functools
import hashlib
import os
import platform
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from cxda_jax.errors import UserError
from cxda_jax.machine.progress import say

# Experimental: else XLA's CPU backend expands each convolution into gigabytes of im2col, and a step takes 2 to 3 times
# as long. test_a_training_step_moves_no_more_than_it_did_and_never_calls_the_host in tests/slow/test_cost.py shows it.
_CPU_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": ""}
_EFFORTS: dict[int, dict[str, Any]] = {  # the options by the effort of the compiler
    3: _CPU_OPTIONS,
    # The answers of cxda_jax.fit's adapters compile in two thirds of the time and run as fast. Networks gain nothing.
    2: {"xla_backend_optimization_level": 2, **_CPU_OPTIONS},
    # Programs of many small parts compile in half of the time: XLA's older emitters spare each part the passes of MLIR.
    # Programs of large arrays run slower so; a training step on FEMNIST takes 1.3 times as long.
    1: {"xla_backend_optimization_level": 1, **_CPU_OPTIONS, "xla_cpu_use_fusion_emitters": False},
}
_deterministic = False  # of GPUs alone: on other devices all operations are deterministic
_TARGET = contextvars.ContextVar("target", default="")


@contextlib.contextmanager
def target(platform: str) -> Iterator[None]:
    """Within it programs are traced for this platform ("cpu", "gpu" or "tpu"), which the machine need not have."""
    token = _TARGET.set(platform)
    # Process-wide: else JAX takes what it has traced in the forms of another platform. See
    # test_a_step_in_the_form_of_gpus_equals_that_of_cpus in tests/slow/test_layers.py.
    jax.clear_caches()
    try:
        yield
    finally:
        _TARGET.reset(token)
        jax.clear_caches()


def platform_name() -> str:
    """The platform that programs are traced for: that of target(), else this machine's."""
    return _TARGET.get() or jax.default_backend()


def _on_cpu() -> bool:
    return platform_name() == "cpu"


# Decisions. On CPUs XLA computes the gradients of convolutions inside a loop 50 times slower than outside. So one
# program takes one step there, and short loops are unrolled.


def default_steps_per_call() -> int:
    """The number of training steps in one program, where the config does not say."""
    return 1 if _on_cpu() else 20


def default_tasks_per_call() -> int:
    """The number of evaluation tasks in one program, where the config does not say."""
    return 1 if _on_cpu() else 16


def unrolls_loops() -> bool:
    """Whether a loop over gradient steps is written out in the program."""
    return _on_cpu()


def rewrites_layers() -> bool:
    """Whether layers replace convolutions and sums by other operations, which XLA's CPU backend compiles better."""
    return _on_cpu()


def pools_in_windows() -> bool:
    """Whether max-pooling is one operation of the compiler."""
    # TPUs' compiler has a fast backward pass of it, with half of the bytes of other forms. On CPUs and GPUs it is slow.
    return platform_name() == "tpu"


def convolves_by_cudnn() -> bool:
    """Whether convolutions are calls of cuDNN."""
    return platform_name() == "gpu"


def joins_images() -> bool:
    """Whether a training step passes support and query through the network together."""
    # On GPUs this spares a fifth of the kernels, and cuDNN is faster with more images.
    return platform_name() == "gpu"


def donates_state() -> bool:
    """Whether a training step may overwrite the state before it."""
    # On CPUs this saves nothing, and a checkpoint that is still being written may share the state's memory.
    return not _on_cpu()


def checks_memory_first() -> bool:
    """Whether a program's need of memory is compared with the free memory before the program starts."""
    # The system promises more memory than it has, and later kills the process without a message. Other devices report
    # the lack of memory themselves.
    return _on_cpu()


def peak_matrix_side() -> int:
    """The side of square matrices whose product keeps this device fully busy."""
    return 2048 if _on_cpu() else 8192


def make_deterministic() -> None:
    """Makes programs that are compiled from now on give the same bits on the same kind of GPU, somewhat more slowly."""
    global _deterministic
    _deterministic = True


def compiler_options(effort: int = 3) -> dict[str, Any] | None:
    """Options for jit: on CPUs those that this jaxlib knows, on GPUs if make_deterministic() was called. See jit().

    They do not go through XLA_FLAGS: an unknown name is an error that can be caught, and the environment stays as is.
    """
    if not _on_cpu():
        return {"xla_gpu_deterministic_ops": True} if _deterministic and platform_name() == "gpu" else None
    asked = [*_EFFORTS[effort].items()]
    while asked and not _knows(*asked):  # jax 0.12 does not know the last one
        asked.pop()
    return dict(asked) or None


@functools.cache
def _knows(*options: tuple[str, Any]) -> bool:
    """Whether this jaxlib knows these options of CPUs."""
    try:
        jax.jit(lambda x: x + 1, compiler_options=dict(options)).lower(0.0).compile()
    except Exception:  # versions of jaxlib refuse with different exceptions
        return False
    return True


def jit(fun: Any, effort: int = 3, **kwargs: Any) -> Any:
    """jax.jit with compiler_options(), for outermost functions.

    The compiler makes less of an `effort` for programs that take longer to compile than in all their runs: 1 or 2.
    """
    return jax.jit(fun, compiler_options=compiler_options(effort), **kwargs)


def machine() -> str:
    """The kind of accelerator, or else of processor. The last bits of a result depend on it."""
    return (processor() or platform.machine()) if _on_cpu() else jax.devices()[0].device_kind


def processor() -> str:
    """The processor's model; empty if the system does not say."""
    models = (line.split(":", 1)[1].strip() for line in _processor_facts() if line.startswith("model name"))
    return next(models, "") or platform.processor()


def _processor_facts() -> list[str]:
    """The lines in which Linux tells the first processor's model and abilities."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    return [line for line in lines if line.startswith(("model name", "flags"))][:2]


def cores() -> int:
    """The number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads() -> int:
    """The number of threads of XLA's CPU backend. The rounding of its sums depends on this number."""
    setting = os.environ.get("NPROC", "")
    return int(setting) if setting.isdecimal() and int(setting) else cores()


def in_threads(function: Callable[..., Any], *items: Iterable[Any]) -> Iterator[Any]:
    """The results of a function for each item, in their order, by as many threads as XLA has.

    That is faster where most of its time is not spent in Python: in a program that keeps one core busy, NumPy or files.
    """
    settings: Any = jax.config
    device = settings.jax_default_device  # other threads do not see the caller's

    def found(*item: Any) -> Any:
        with jax.default_device(device):
            return function(*item)

    with ThreadPoolExecutor(threads()) as pool:
        yield from pool.map(found, *items)


def keep_freed_memory() -> None:
    """Makes the C library keep large freed blocks for the next step, where it is glibc.

    Call it before JAX starts its threads. Threads that exist already have memory pools of their own, which only grow.
    """
    # Process-wide: else a step on CPUs fetches its activations anew, 71,000 pages in place of 8,000 (docs/speed.md).
    # No test shows it, since none measures time.
    if mallopt := _of_glibc("mallopt"):
        # M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD of malloc.h
        for option, value in ((-8, 1), (-4, 0), (-1, 2**31 - 1), (-2, 2**28)):
            mallopt(option, value)


def freed_memory() -> int:
    """Bytes of freed blocks that the C library keeps for this process; 0 if it does not say."""
    if not (mallinfo := _of_glibc("mallinfo2")):
        return 0
    mallinfo.restype = _Mallinfo
    return mallinfo().fordblks


class _Mallinfo(ctypes.Structure):  # from malloc.h
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]  # fmt: skip


def _of_glibc(name: str) -> Any:
    """A function of the C library; None if it has no such."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None


def keep_compiled(warn: Callable[[str], None] = say) -> Path | None:
    """Makes JAX keep compiled programs for later processes, in $JAX_COMPILATION_CACHE_DIR or the user's cache folder.

    Programs from there are run, so the folder must not be writable for others. Returns the folder, or None where it
    cannot be written. Then each process compiles its programs again, and a line warns of that.
    """
    # Machines of different kinds may share a home folder, but not programs.
    kind = hashlib.sha256("".join([platform.machine(), *_processor_facts()]).encode()).hexdigest()[:12]
    own = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "cxda_jax" / "compiled" / kind
    folder = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or own)
    try:
        folder = folder.expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):  # the last where no home is known
        fix = "name one in $JAX_COMPILATION_CACHE_DIR"
        warn(f"warning: {folder} cannot be written, so every start compiles again; {fix}")
        return None
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UserError(
            f"{folder}: others can write to this folder of compiled programs; chmod 700 it, or name another in "
            "$JAX_COMPILATION_CACHE_DIR"
        )
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Seconds of compiling from which a program is kept. By JAX's own 1.0 a later fit() would compile half of its anew.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return folder
