"""The cost of work: compilations, operations as XLA counts them, the peak speed of the device, and memory."""

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.backend import get_backend

from cxda_jax.machine import backend

_COMPILED = "/jax/core/compile/backend_compile_duration"  # also sent when a program comes from the cache
_FROM_CACHE = "/jax/compilation_cache/cache_hits"


class Compilations:
    """Counts the programs that JAX compiles from now on, those that come from its cache, and the time of all."""

    def __init__(self) -> None:
        self.programs, self.cached, self.seconds = 0, 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._count)
        jax.monitoring.register_event_listener(self._count_cached)

    def _count(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILED:
            self.programs, self.seconds = self.programs + 1, self.seconds + duration_secs

    def _count_cached(self, event: str, **_: Any) -> None:
        self.cached += event == _FROM_CACHE


def flops(lowered: Any) -> float | None:
    """Floating-point operations of a lowered jitted function, before a backend rewrites it;
    None where nothing counts them."""
    try:
        analysis = lowered.cost_analysis()
    except jax.errors.JaxRuntimeError:  # the device is not there, as in ahead.py
        analysis = None
    analysis = analysis or _analysis_on_cpu(lowered)
    return float(analysis["flops"]) if "flops" in analysis else None


def _analysis_on_cpu(lowered: Any) -> dict[str, float]:
    """The same count by the CPU's part of XLA; empty where this cannot be had."""
    # Private: JAX gives no counts for GPUs and TPUs, so a training there told zero operations. See
    # test_operations_of_a_product_are_counted_on_gpus_and_tpus_too in tests/slow/test_cost.py.
    try:
        from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

        count = _jax.hlo_module_cost_analysis
    except (ImportError, AttributeError):  # a later JAX may have another name for it
        return {}
    return count(get_backend("cpu"), lowered.compiler_ir("hlo").as_hlo_module())


def matmul_peak(dtype: Any) -> float:
    """The best operations per second in five products of matrices that keep this device busy."""
    side, times = backend.peak_matrix_side(), []
    product = matrix_product(side, dtype)
    for _ in range(1 + 5):  # the first one is compiled
        began = time.perf_counter()
        jax.block_until_ready(product())
        times.append(time.perf_counter() - began)
    return 2 * side**3 / min(times[1:])


def matrix_product(side: int, dtype: Any) -> Callable[[], jax.Array]:
    """A function that multiplies a random matrix [side, side] with itself."""
    a, product = jax.random.uniform(jax.random.key(0), (side, side), dtype), jax.jit(jnp.matmul)
    return lambda: product(a, a)


def peak_memory() -> tuple[int, str]:
    """The most bytes held so far, and where: on the first device, or in this process if the device does not say."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"], "device"
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process"
