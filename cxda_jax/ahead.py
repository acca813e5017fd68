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
import numpy as np
from jax.sharding import NamedSharding

from cxda_jax import augment, backend, cost, train
from cxda_jax.config import Config
from cxda_jax.data.episodes import Plan, mixed_spec
from cxda_jax.data.published import PUBLISHED, empty_store
from cxda_jax.data.sources import Source, gather, rows_of
from cxda_jax.data.store import DomainStore
from cxda_jax.errors import UserError, brief
from cxda_jax.evaluation import compile_task
from cxda_jax.experiment import CALIBRATION_IMAGES, build_method, episode_spec, make_optimizer, make_schedule, open_data
from cxda_jax.progress import compiling
from cxda_jax.runs.training import commit
from cxda_jax.types import Images, Method
from cxda_jax.version import VERSION

# Bytes of the memory of one chip, as the makers state them.
MEMORY = {"v4": 32 * 2**30, "v5e": 16 * 2**30, "v5p": 95 * 2**30, "v6e": 32 * 2**30, "h100": 80e9}
SMALL = 1024  # bytes; smaller exchanges are not shown
_COLLECTIVE = re.compile(
    r" = (.+?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)(?:-start)?\("
)
_ARRAY = re.compile(r"\b(pred|bf16|f16|f32|f64|[su]8|[su]16|[su]32|[su]64)\[([\d,]*)\]")
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
    flops: float  # of one device, counted before compilation, where the device's compiler counts none; else 0


def read_target(text: str) -> Target:
    """A text such as v5e:2x4 or h100:8, as a Target."""
    found = re.fullmatch(r"(\w+):(\d{1,4}(?:x\d{1,4}){0,2})", text)
    if not found or found[1] not in MEMORY:
        known = ", ".join(MEMORY)
        raise UserError(f"topology {brief(repr(text))}: expected KIND:SHAPE such as v5e:2x4 or h100:8; kinds: {known}")
    sides = [int(side) for side in found[2].split("x")]
    target = Target(text, found[1], math.prod(sides))
    if not target.chips:
        raise UserError(f"topology {brief(repr(text))} has no chips; write v5e:1x1 or h100:1 for a single one")
    if (target.platform == "gpu") != (len(sides) == 1):
        form = "h100:8, the number of GPUs" if target.platform == "gpu" else f"{found[1]}:2x4, the sides of the slice"
        raise UserError(f"topology {brief(repr(text))}: expected such as {form}")
    return target


def passport(config: Config, target: Target, data_dir: str, log: Callable[[str], None]) -> dict[str, Any]:
    """The needs of the programs of a config on the target.

    A published data set that is not prepared has black images.
    """
    benchmark, programs = config["benchmark"], {}
    prepared = (Path(data_dir) / str(config["data"].get("name")) / "store.json").exists()
    store = empty_store(benchmark) if benchmark in PUBLISHED and not prepared else open_data(config, data_dir)
    with devices(target) as mesh:
        log(f"lowering for {target.text}: {mesh.devices.flat[0].device_kind}")
        for program in lower_all(config, store, mesh, target.platform != "gpu"):
            with compiling(f"the {program.what} of {program.tasks} tasks", log):
                programs[program.what] = examine(program, MEMORY[target.kind])
    return {
        "commit": commit(),
        "benchmark": benchmark,
        "method": config["method"],
        "dtype": config["net"]["dtype"],
        "precision": config["net"]["precision"],
        "topology": target.text,
        "tasks_per_step": config["train"]["tasks_per_step"],
        "versions": {"cxda_jax": VERSION, "jax": jax.__version__},
        "programs": programs,
    }


def examine(program: Program, memory: float) -> dict[str, Any]:
    """Compiles a program, and says what the compiler tells of it. All figures but `tasks` are of one chip."""
    began, refused = time.perf_counter(), None
    try:
        compiled = program.lowered.compile(backend.compiler_options())
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
        "flops": program.flops or counted.get("flops", 0.0),
        "bytes_accessed": counted.get("bytes accessed"),
        "exchanges": exchanges(compiled.as_text()),
    }


def exchanges(text: str) -> list[dict[str, Any]]:
    """The exchanges between devices in a compiled program: the operation, the types and the bytes,
    the largest first."""
    found = []
    for kinds, operation in _COLLECTIVE.findall(text):
        arrays = _ARRAY.findall(kinds)
        count = sum(
            jnp.dtype(_dtype(name)).itemsize * math.prod(map(int, filter(None, sides.split(","))))
            for name, sides in arrays
        )
        found.append({"operation": operation, "types": " ".join(sorted({name for name, _ in arrays})), "bytes": count})
    return sorted(found, key=lambda exchange: -exchange["bytes"])


def _dtype(name: str) -> str:
    """XLA's name of a type as numpy's."""
    whole = {"pred": "bool", "bf16": "bfloat16"}
    return whole.get(name) or {"f": "float", "s": "int", "u": "uint"}[name[0]] + name[1:]


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
def devices(target: Target) -> Iterator[Any]:
    """A mesh with the axis "tasks" of the target's devices, for which programs can be compiled but not run.

    Within the context programs are traced for the target's platform.
    """
    from jax.experimental import topologies

    describe = _describe_tpu if target.platform == "tpu" else _describe_gpu
    with backend.target(target.platform), _names_of_cuda():
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


def lower_all(config: Config, store: DomainStore, mesh: Any, counts: bool) -> Iterator[Program]:
    """The training step, unless the method trains as another one, and the evaluation. The context is devices().

    `counts` says whether the target's compiler counts operations.
    """
    method, chips, tasks = build_method(config, store), mesh.size, config["train"]["tasks_per_step"]
    if tasks % chips and not method.trains_as:
        fix = f"make it a multiple of {chips}"
        raise UserError(f"tasks_per_step={tasks} cannot be shared by {chips} chips; {fix}")
    source = Source((), lambda *_: iter(()), gather(store))
    image = store.images.shape[1:]
    pixels: Any = jax.ShapeDtypeStruct((2, *image), jnp.uint8)
    domains: Any = jax.ShapeDtypeStruct((2,), jnp.int32)
    example = Images(pixels, domains)
    variables = jax.eval_shape(method.init, _keys(()), example)
    if not method.trains_as:
        optimizer = make_optimizer(**config["optimizer"], steps=make_schedule(config, store).steps)
        learner = train.Learner(method, optimizer, augment.Weak(**config["augment"]))
        yield _step(config, learner, source, _shapes(rows_of(store)), variables, mesh, counts)
    if method.calibrate:
        images = jax.ShapeDtypeStruct((CALIBRATION_IMAGES, *image), jnp.uint8)
        variables = jax.eval_shape(method.calibrate, variables, images)
    yield _evaluation(config, method, source, _shapes(rows_of(store)), variables, mesh, counts)


def _step(
    config: Config, learner: train.Learner, source: Source, resident: Any, variables: Any, mesh: Any, counts: bool
) -> Program:
    method, tasks = learner.method, config["train"]["tasks_per_step"]
    call = functools.partial(train.train_call, learner, source, 1)
    flag: Any = jax.ShapeDtypeStruct((), jnp.bool_)
    number: Any = jax.ShapeDtypeStruct((), jnp.int32)
    state = train.TrainState(number, variables, jax.eval_shape(learner.optimizer.init, variables["params"]), flag)
    whole, cut = NamedSharding(mesh, jax.P()), NamedSharding(mesh, jax.P("tasks"))
    step = backend.jit(train.over_devices(learner, source, mesh, 1) if mesh.size > 1 else call, donate_argnums=0)
    batch = _plan(config, method, tasks)
    lowered = step.lower(_at(whole, state), _at(whole, resident), _at(cut, batch), _at(whole, _keys(())))
    own = _plan(config, method, tasks // mesh.size)
    flops = 0.0 if counts else cost.flops(jax.jit(call).lower(state, resident, own, _keys(()))) or 0.0
    return Program("step", lowered, tasks, flops)


def _evaluation(
    config: Config, method: Method, source: Source, resident: Any, variables: Any, mesh: Any, counts: bool
) -> Program:
    """The program that adapts to some tasks and answers, or for a method that
    fine-tunes the one that adapts to a task."""
    each = (config["evaluation"]["per_call"] or backend.default_tasks_per_call()) if method.feed_forward else 1
    tasks, evaluator = each * mesh.size if method.feed_forward else 1, compile_task(method, source)
    whole, cut = NamedSharding(mesh, jax.P()), NamedSharding(mesh, jax.P("tasks"))

    def arguments(count: int) -> tuple[Any, Any]:
        plan = _plan(config, method, count, training=False)
        return jax.eval_shape(source.assemble, resident, plan), _keys((count,))

    if method.feed_forward:
        program: Any = evaluator.answer
        episodes, keys = arguments(tasks)
        placed, plain = (_at(cut, episodes), _at(cut, keys)), arguments(each)
    else:
        program = evaluator.adapt
        episodes, keys = arguments(1)
        plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (episodes.support, keys))
        placed = _at(whole, plain)
    lowered = program.lower(_at(whole, variables), *placed)
    flops = 0.0 if counts else cost.flops(program.lower(variables, *plain)) or 0.0
    return Program("evaluation", lowered, tasks, flops)


def _plan(config: Config, method: Method, tasks: int, training: bool = True) -> Plan:
    """The shapes of a Plan of the config's tasks."""
    spec = episode_spec(config)
    spec = mixed_spec(spec) if training and method.trains_mixed else spec
    rows = (spec.num_domains * spec.per_domain, spec.num_query)
    shapes: list[Any] = [jax.ShapeDtypeStruct((tasks, count), jnp.int32) for count in rows]
    return Plan(*shapes)


def _keys(shape: tuple[int, ...]) -> Any:
    """The shape of keys for random numbers."""
    return jax.eval_shape(lambda: jax.random.split(jax.random.key(0), shape) if shape else jax.random.key(0))


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), tree)


def _at(sharding: NamedSharding, tree: Any) -> Any:
    """The shapes of a tree, each placed so."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
