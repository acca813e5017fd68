"""What work costs: compilation as JAX reports it, operations as XLA counts them, and the peak to hold them against."""

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_COMPILED = "/jax/core/compile/backend_compile_duration"  # fetching from the cache is a part of it
_FOUND = "/jax/compilation_cache/cache_hits"


class Compilations:
    """Counts what JAX compiles from now on."""

    def __init__(self) -> None:
        self.programs = self.cached = 0
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._compiled)
        jax.monitoring.register_event_listener(self._found)

    def _compiled(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        del kwargs
        if event == _COMPILED:
            self.programs, self.seconds = self.programs + 1, self.seconds + duration_secs

    def _found(self, event: str, **kwargs: Any) -> None:
        del kwargs
        self.cached += event == _FOUND


def flops(lowered: Any) -> float:
    """Floating-point operations of a lowered jitted function: its own, before any backend rewrites them."""
    found = lowered.cost_analysis()
    return float(found.get("flops", 0.0)) if found else 0.0


def matmul_peak(side: int = 0, dtype: Any = jnp.float32, repeats: int = 5) -> float:
    """Best operations per second of a product of square matrices, by default of a side that fills this device."""
    side, times = side or (2048 if jax.default_backend() == "cpu" else 8192), []
    product = matrix_product(side, dtype)
    jax.block_until_ready(product())
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(product())
        times.append(time.perf_counter() - began)
    return 2 * side**3 / min(times)


def matrix_product(side: int, dtype: Any) -> Callable[[], jax.Array]:
    a, product = jax.random.uniform(jax.random.key(0), (side, side), dtype), jax.jit(jnp.matmul)
    return lambda: product(a, a)


def peak_memory() -> tuple[int, str]:
    """The most bytes held so far, and where: on the first device, or in this process where a device does not say."""
    found = jax.local_devices()[0].memory_stats()
    if found and "peak_bytes_in_use" in found:
        return found["peak_bytes_in_use"], "device"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process"
