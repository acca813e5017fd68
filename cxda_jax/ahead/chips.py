"""The accelerators that programs are compiled for: what their makers state, and the devices that JAX compiles for."""

import contextlib
import math
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from cxda_jax import backend
from cxda_jax.errors import UserError, brief


class Chip(NamedTuple):
    """One accelerator, as its maker states it. All rates are of one chip and one second, and without sparsity."""

    platform: str  # as backend.target() takes it
    clock: float  # cycles; 0 where the compiler estimates none
    bfloat16: float  # operations
    float32: float  # operations of a float32 product at JAX's default precision: bfloat16 on TPUs, TF32 on GPUs
    bandwidth: float  # bytes of its memory
    memory: float  # bytes
    link: float  # bytes that it sends in an all-reduce to the chips nearby
    nearby: int  # chips that are nearby
    far: float  # bytes that it sends in an all-reduce to more chips than these
    latency: float  # seconds of one exchange between two chips; assumed, not stated by the makers
    source: str
    slower: tuple[float, float] = (3, 6)  # times that float32 products take longer with net.precision high and highest


_TPU = "cloud.google.com/tpu/docs (system architecture); links: jax-ml.github.io/scaling-book/tpus (a ring on one axis)"
CHIPS = {
    "v4": Chip("tpu", 1.05e9, 275e12, 275e12, 1228e9, 32 * 2**30, 90e9, 4096, 90e9, 1e-6, _TPU),
    "v5e": Chip("tpu", 1.5e9, 197e12, 197e12, 819e9, 16 * 2**30, 90e9, 256, 6.25e9, 1e-6, _TPU),
    "v5p": Chip("tpu", 1.75e9, 459e12, 459e12, 2765e9, 95 * 2**30, 180e9, 8960, 180e9, 1e-6, _TPU),
    "v6e": Chip("tpu", 1.75e9, 918e12, 918e12, 1640e9, 32 * 2**30, 180e9, 256, 6.25e9, 1e-6, _TPU),
    "h100": Chip(
        "gpu", 0, 989e12, 494e12, 3350e9, 80e9, 450e9, 8, 50e9, 5e-6,
        "NVIDIA H100 SXM data sheet (half of the NVLink rate is each direction's); 400 Gbit/s for each GPU between hosts",
        (1, 494 / 67),
    ),
}  # fmt: skip

# What XLA needs to know of an H100 in order to compile for it without one.
_H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 memory_bandwidth: 3352320000000
  device_memory_size: 84942979072 l2_cache_size: 52428800
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


class Target(NamedTuple):
    """Accelerators of one kind."""

    text: str  # such as v5e:2x4
    kind: str  # a key of CHIPS
    chips: int

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]


def read_target(text: str) -> Target:
    """A text such as v5e:2x4 or h100:8, as a Target."""
    found = re.fullmatch(r"(\w+):(\d{1,4}(?:x\d{1,4}){0,2})", text)
    if not found or found[1] not in CHIPS:
        known = ", ".join(CHIPS)
        raise UserError(f"topology {brief(repr(text))}: expected KIND:SHAPE such as v5e:2x4 or h100:8; kinds: {known}")
    kind, sides = found[1], [int(side) for side in found[2].split("x")]
    if not math.prod(sides):
        raise UserError(f"topology {brief(repr(text))} has no chips; write v5e:1x1 or h100:1 for a single one")
    if (CHIPS[kind].platform == "gpu") != (len(sides) == 1):
        form = "h100:8, the number of GPUs" if CHIPS[kind].platform == "gpu" else f"{kind}:2x4, the sides of the slice"
        raise UserError(f"topology {brief(repr(text))}: expected such as {form}")
    return Target(text, kind, math.prod(sides))


@contextlib.contextmanager
def devices(target: Target) -> Iterator[Any]:
    """A mesh with the axis "tasks" of the target's devices, for which programs can be compiled but not run.

    Within the context programs are traced for the target's platform.
    """
    from jax.experimental import topologies

    describe = _describe_tpu if target.chip.platform == "tpu" else _describe_gpu
    with backend.target(target.chip.platform), _names_of_cuda():
        try:
            topology = describe(topologies, target)
        except UserError:
            raise
        except Exception as e:  # of several types, by the compiler's library
            said = brief(" ".join(str(e).split()), 160)
            raise UserError(f"topology {target.text!r}: the compiler refuses it: {said}") from e
        yield jax.make_mesh((target.chips,), ("tasks",), (jax.sharding.AxisType.Auto,), devices=topology.devices)


def _describe_tpu(topologies: Any, target: Target) -> Any:
    # There is no TPU whose facts could be asked, no other host, and nothing that only one process may use.
    for name, value in (
        ("TPU_SKIP_MDS_QUERY", "1"), ("TPU_WORKER_HOSTNAMES", "localhost"), ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
    ):  # fmt: skip
        os.environ.setdefault(name, value)
    try:
        import libtpu  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(f"topology {target.text!r} needs the TPU compiler: pip install --no-deps libtpu") from None
    return topologies.get_topology_desc(platform="tpu", topology_name=target.text)


def _describe_gpu(topologies: Any, target: Target) -> Any:
    try:
        import jax_plugins.xla_cuda12 as plugin  # pyright: ignore[reportMissingImports]
    except ImportError:
        names = (
            " ".join(f"jax-cuda12-{part}=={jax.__version__}" for part in ("plugin", "pjrt")) + " nvidia-cuda-nvcc-cu12"
        )
        raise UserError(f"topology {target.text!r} needs the GPU compiler: pip install --no-deps {names}") from None
    from jax._src import xla_bridge

    jax.devices()  # JAX looks for its plugins
    if "cuda" not in xla_bridge._topology_factories:
        plugin.initialize()
    return topologies.get_topology_desc(platform="cuda", target_config=_H100, topology=f"1x1x{target.chips}")


@contextlib.contextmanager
def _names_of_cuda() -> Iterator[None]:
    """Without a GPU JAX does not know that "gpu" means CUDA (its issue 23971)."""
    from jax._src import xla_bridge

    before = xla_bridge.canonicalize_platform
    xla_bridge.canonicalize_platform = lambda name: "cuda" if name in ("gpu", "cuda") else before(name)
    try:
        yield
    finally:
        xla_bridge.canonicalize_platform = before
