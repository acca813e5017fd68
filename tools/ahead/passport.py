"""The needs of a training on an accelerator that is not there: does it fit, what does it move,
what do the chips exchange.

The compiler of that accelerator answers. Nothing is run, and no time is told.
"""

import contextlib
import functools
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from cxda_jax.config.reading import Config
from cxda_jax.data import augment
from cxda_jax.data.episodes import EpisodeSpec, Plan, mixed_spec
from cxda_jax.data.published import PUBLISHED, empty_store
from cxda_jax.data.sources import Source, gather, rows_of
from cxda_jax.data.store import DomainStore
from cxda_jax.errors import UserError, brief
from cxda_jax.machine import backend, cost
from cxda_jax.machine.mesh import AXIS, CUT, WHOLE
from cxda_jax.machine.progress import compiling
from cxda_jax.studies.training import commit
from cxda_jax.training import loop
from cxda_jax.training.evaluation import compile_task
from cxda_jax.training.experiment import (
    CALIBRATION_IMAGES,
    build_method,
    make_optimizer,
    open_data,
)
from cxda_jax.types import Images, Known
from cxda_jax.version import VERSION

# Bytes of the memory of one chip, as the makers state them.
MEMORY = {"v4": 32 * 2**30, "v5e": 16 * 2**30, "v5p": 95 * 2**30, "v6e": 32 * 2**30, "h100": 80e9}
SMALL = 1024  # bytes; smaller exchanges are not shown
_TOPOLOGY = re.compile(r"(h100):([1-9]\d{0,3})|(v4|v5e|v5p|v6e):([1-9]\d{0,3}(?:x[1-9]\d{0,3}){1,2})")
_COLLECTIVE = re.compile(
    r" = (.+?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)(?:-start)?\("
)
_ARRAY = re.compile(r"\b(pred|(?:bf|f|s|u)(8|16|32|64))\[([\d,]*)\]")  # the type, its bits, the sides
_NO_ROOM = re.compile(r"[Uu]sed ([\d.]+)([KMG]) of ([\d.]+)([KMG])")
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
    kind: str  # a key of MEMORY
    chips: int

    @property
    def platform(self) -> str:
        return "gpu" if self.kind == "h100" else "tpu"


class Program(NamedTuple):
    """A lowered program."""

    what: str  # "step" or "evaluation"
    lowered: Any
    tasks: int  # in one run, on all devices together


def read_target(text: str) -> Target:
    """A text such as v5e:2x4 or h100:8, as a Target."""
    if not (found := _TOPOLOGY.fullmatch(text)):
        expected = "h100:8, the number of GPUs, or v5e:2x4, the sides of a slice of v4, v5e, v5p or v6e"
        raise UserError(f"topology {brief(repr(text))}: expected such as {expected}")
    kind, size = filter(None, found.groups())
    return Target(text, kind, math.prod(map(int, size.split("x"))))


def passport(config: Config, target: Target, data_dir: str, log: Callable[[str], None]) -> dict[str, Any]:
    """The needs of the programs of a config on the target.

    A published data set that is not prepared has black images.
    """
    benchmark, programs = config.benchmark, {}
    prepared = (Path(data_dir) / str(config.data.get("name")) / "store.json").exists()
    store = empty_store(benchmark) if benchmark in PUBLISHED and not prepared else open_data(config, data_dir)
    with devices(target) as mesh:
        log(f"lowering for {target.text}: {mesh.devices.flat[0].device_kind}")
        for program in lower_all(config, store, mesh):
            with compiling(f"the {program.what} of {program.tasks} tasks", log):
                programs[program.what] = examine(program, MEMORY[target.kind])
    return {
        "commit": commit(),
        "benchmark": benchmark,
        "method": config.method,
        "dtype": config.net.dtype,
        "precision": config.net.precision,
        "topology": target.text,
        "tasks_per_step": config.train.tasks_per_step,
        "versions": {"cxda_jax": VERSION, "jax": jax.__version__},
        "programs": programs,
    }


def examine(program: Program, memory: float) -> dict[str, Any]:
    """The compiler's account of a program. All figures but `tasks` are of one chip."""
    began, lowered = time.perf_counter(), program.lowered
    try:
        compiled, refused = lowered.compile(backend.compiler_options()), None
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        compiled, refused = None, _NO_ROOM.search(str(e))
    found = {"tasks": program.tasks, "fits": False, "compile_s": round(time.perf_counter() - began, 1)}
    if compiled is None:
        return found | {"peak_bytes": refused and float(refused[1]) * 2 ** {"K": 10, "M": 20, "G": 30}[refused[2]]}
    needs, counted = compiled.memory_analysis(), compiled.cost_analysis() or {}
    peak = needs.argument_size_in_bytes + needs.output_size_in_bytes - needs.alias_size_in_bytes
    peak += needs.temp_size_in_bytes + needs.generated_code_size_in_bytes
    return found | {
        "fits": peak <= memory,
        "peak_bytes": peak,
        "flops": counted.get("flops") or cost.flops(lowered),  # the compiler for GPUs counts none
        "bytes_accessed": counted.get("bytes accessed"),
        "exchanges": exchanges(compiled.as_text()),
    }


def exchanges(text: str) -> list[dict[str, Any]]:
    """The exchanges between devices in a compiled program: the operation, the types and the bytes,
    the largest first."""
    found = []
    for kinds, operation in _COLLECTIVE.findall(text):
        types, count = set(), 0
        for kind, bits, sides in _ARRAY.findall(kinds):
            types.add(kind)
            count += int(bits or 8) // 8 * math.prod(map(int, filter(None, sides.split(","))))
        found.append({"operation": operation, "types": " ".join(sorted(types)), "bytes": count})
    return sorted(found, key=lambda exchange: -exchange["bytes"])


def table(found: dict[str, Any]) -> str:
    """A passport as a Markdown table, a row for each program."""
    names = "program", "tasks", "fits", "peak GB", "GFLOP", "GB accessed", "exchanged", "compiled in"
    rows = [names, ("---",) * len(names)]
    for what, program in found["programs"].items():
        sums = [
            f"{e['operation']} {e['types']} {e['bytes'] / 1e6:.2f} MB"
            for e in program.get("exchanges", ())
            if e["bytes"] > SMALL
        ]
        counts = [program.get(name) for name in ("peak_bytes", "flops", "bytes_accessed")]
        giga = ["?" if count is None else f"{count / 1e9:.2f}" for count in counts]
        fits = "yes" if program["fits"] else "no"
        rows.append((what, str(program["tasks"]), fits, *giga, ", ".join(sums), f"{program['compile_s']:.0f} s"))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


@contextlib.contextmanager
def devices(target: Target) -> Iterator[Mesh]:
    """A mesh with the axis "tasks" of the target's devices, for which programs can be compiled but not run.

    Within the context programs are traced for the target's platform.
    """
    describe = _describe_tpu if target.platform == "tpu" else _describe_gpu
    with backend.target(target.platform), _names_of_cuda():
        try:
            topology = describe(target)
        except UserError:
            raise
        except Exception as e:  # of several types, by the compiler's library
            said = brief(" ".join(str(e).split()), 160)
            raise UserError(f"topology {target.text!r}: the compiler refuses it: {said}") from e
        yield jax.make_mesh((target.chips,), (AXIS,), (jax.sharding.AxisType.Auto,), devices=topology.devices)


def _describe_tpu(target: Target) -> Any:
    from jax.experimental import topologies

    # Process-wide: else libtpu complains on several lines that it finds no TPU's hosts, and a second process that
    # compiles at the same time is refused. Running the command twice at once shows it, and no test.
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        import libtpu  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(f"topology {target.text!r} needs the TPU compiler: pip install --no-deps libtpu") from None
    return topologies.get_topology_desc(platform="tpu", topology_name=target.text)


def _describe_gpu(target: Target) -> Any:
    from jax.experimental import topologies

    try:
        import jax_plugins.xla_cuda12 as plugin  # pyright: ignore[reportMissingImports]
    except ImportError:
        names = (
            " ".join(f"jax-cuda12-{part}=={jax.__version__}" for part in ("plugin", "pjrt")) + " nvidia-cuda-nvcc-cu12"
        )
        raise UserError(f"topology {target.text!r} needs the GPU compiler: pip install --no-deps {names}") from None
    from jax._src import xla_bridge

    # Private: JAX looks for its plugins with its devices, but keeps that of CUDA only where there is a GPU.
    jax.devices()
    if "cuda" not in xla_bridge._topology_factories:
        plugin.initialize()
    return topologies.get_topology_desc(platform="cuda", target_config=_H100, topology=f"1x1x{target.chips}")


@contextlib.contextmanager
def _names_of_cuda() -> Iterator[None]:
    """Within it JAX knows that "gpu" means CUDA, which it does not know on a machine without GPUs."""
    # Private: JAX's issue 23971. Compiling for h100:1 shows it, and no test, since GPUs' compiler is not at hand there.
    from jax._src import xla_bridge

    before = xla_bridge.canonicalize_platform
    xla_bridge.canonicalize_platform = lambda name: "cuda" if name in ("gpu", "cuda") else before(name)
    try:
        yield
    finally:
        xla_bridge.canonicalize_platform = before


def lower_all(config: Config, store: DomainStore, mesh: Mesh) -> Iterator[Program]:
    """The training step, unless the method trains as another one, and the evaluation. The context is devices()."""
    method, chips, tasks = build_method(config, store), mesh.size, config.train.tasks_per_step
    if tasks % chips and not method.trains_as:
        raise UserError(f"tasks_per_step={tasks} cannot be shared by {chips} chips; make it a multiple of {chips}")

    def whole(tree: Any) -> Any:
        return _placed(tree, NamedSharding(mesh, WHOLE))

    def cut(tree: Any) -> Any:
        return _placed(tree, NamedSharding(mesh, CUT))

    source = Source((), lambda *_: iter(()), gather(store), mesh if chips > 1 else None)
    resident, image, key = rows_of(store), store.images.shape[1:], jax.eval_shape(lambda: jax.random.key(0))
    example: Any = Images(_array((2, *image), jnp.uint8), _array((2,)))
    variables = jax.eval_shape(method.init, key, example)
    if not method.trains_as:
        optimizer = make_optimizer(**config.optimizer)
        learner = loop.Learner(method, optimizer, augment.Weak(**config.augment))
        state = jax.eval_shape(lambda: loop.init_state(method, optimizer, 0, example))
        one = functools.partial(loop.train_call, learner, source, 1)
        step = backend.jit(loop.over_devices(learner, source, mesh, 1) if chips > 1 else one, donate_argnums=0)
        plan = _plan(config, tasks, method.trains_mixed)
        yield Program("step", step.lower(whole(state), whole(resident), cut(plan), whole(key)), tasks)
    if method.calibrate:
        images, labels = _array((CALIBRATION_IMAGES, *image), jnp.uint8), _array((CALIBRATION_IMAGES,))
        variables = jax.eval_shape(method.calibrate, variables, Known(images, labels, images, labels, labels))
    evaluator: Any = compile_task(method, source)
    per_chip = config.evaluation.per_call or backend.default_tasks_per_call()
    tasks = per_chip * chips if method.feed_forward else 1
    episodes = jax.eval_shape(source.assemble, resident, _plan(config, tasks))
    if method.feed_forward:
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), tasks))
        yield Program("evaluation", evaluator.answer.lower(whole(variables), cut(episodes), cut(keys)), tasks)
    else:  # the program that adapts to a task
        support = jax.tree.map(lambda x: _array(x.shape[1:], x.dtype), episodes.support)
        yield Program("evaluation", evaluator.adapt.lower(whole(variables), whole(support), whole(key)), tasks)


def _plan(config: Config, tasks: int, mixed: bool = False) -> Plan:
    """The shapes of a Plan of the config's tasks."""
    spec = EpisodeSpec(**config.episode)
    spec = mixed_spec(spec) if mixed else spec
    return Plan(_array((tasks, spec.num_domains * spec.per_domain)), _array((tasks, spec.num_query)))


def _array(shape: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _placed(tree: Any, sharding: NamedSharding) -> Any:
    """The shapes of the arrays of a tree, each placed so."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
