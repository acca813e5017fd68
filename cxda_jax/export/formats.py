"""The formats that programs are written in, and how each is run to compare it with the model.

A format writes the two functions of pair.py into a folder. Its `run` opens them as a device would,
without this package's code.
"""

import collections
import contextlib
import functools
import importlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.extend
import numpy as np

from cxda_jax.disk import files, safetensors
from cxda_jax.disk.reading import reason
from cxda_jax.errors import UserError, needing
from cxda_jax.export.pair import Named, Pair, Shapes
from cxda_jax.machine import backend

PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}  # as JAX names them in programs, and in backend.target()
WEIGHTS, LITERT = "weights.safetensors", "model.tflite"
PARTS = ("encode", "predict")
LARGE, REPEATING = 4096, {"Where", "Add", "Sub", "Mul", "Div"}  # numbers; operations of ONNX that repeat an argument
Run = tuple[Callable[[Named], Named], Callable[[Named], Named]]  # encode and predict, on numpy arrays


class Format(NamedTuple):
    """One way to write programs.

    Attributes:
      write: (pair, folder) -> nothing; it writes the files.
      run: (pair, folder) -> encode and predict, read from these files.
      error: largest difference of logits to the model's that is accepted, relative to the largest logit.
      same: smallest share of equal classes that is accepted.
      needs: packages to import.
    """

    write: Callable[[Pair, Path], None]
    run: Callable[[Pair, Path], Run]
    error: float
    same: float
    needs: tuple[str, ...] = ()


NO_MATCH = "does not match JAX"


def insist_on(kind: str) -> None:
    """A UserError where the format needs what is not installed."""
    with needing(f"--format={kind}", "export"):
        for name in FORMATS[kind].needs:
            importlib.import_module(name)


def write_jax(pair: Pair, folder: Path) -> None:
    """A program of each function for each platform, in that platform's forms, and the weights beside them."""
    files.write_hashed(folder / WEIGHTS, safetensors.pieces({k: np.asarray(v) for k, v in pair.weights.items()}))
    like = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in pair.weights.items()}
    for name, target in PLATFORMS.items():
        with backend.target(target):
            for part, function, taken in zip(
                PARTS, (pair.encode, pair.predict), (pair.buffer, pair.asked), strict=True
            ):
                exported = jax.export.export(jax.jit(function), platforms=[name])(like, taken)
                (folder / f"{part}.{name}.jax").write_bytes(exported.serialize())


def run_jax(pair: Pair, folder: Path) -> Run:
    """The programs for this machine's platform."""
    weights = safetensors.read(folder / WEIGHTS, str(folder / WEIGHTS), "export the model again")[0]
    name = next(name for name, target in PLATFORMS.items() if target == backend.platform_name())

    def opened(part: str) -> Callable[[Named], Named]:
        program = jax.jit(jax.export.deserialize(bytearray((folder / f"{part}.{name}.jax").read_bytes())).call)
        return lambda inputs: jax.device_get(program(weights, inputs))

    return opened("encode"), opened("predict")


def write_litert(pair: Pair, folder: Path, kind: str = "float32") -> None:
    """One file with two signatures, which share the weights: float32, float16 or, for products,
    int8 with a scale of their own."""
    tf, jax2tf = _tensorflow()
    module: Any = tf.Module()
    module.kept = {name.replace("/", "_"): tf.Variable(np.asarray(array)) for name, array in pair.weights.items()}

    def signature(function: Callable[[Named, Named], Named], taken: Shapes) -> Any:
        converted = jax2tf.convert(function, with_gradient=False)
        spec = {k: tf.TensorSpec(like.shape, tf.dtypes.as_dtype(like.dtype), name=k) for k, like in taken.items()}

        @tf.function(autograph=False)
        def call(**inputs: Any) -> Any:
            return converted({name: module.kept[name.replace("/", "_")] for name in pair.weights}, inputs)

        return call.get_concrete_function(**spec)

    signatures = {"encode": signature(pair.encode, pair.buffer), "predict": signature(pair.predict, pair.asked)}
    with tempfile.TemporaryDirectory() as saved, _quiet():
        tf.saved_model.save(module, saved, signatures=signatures)
        converter = tf.lite.TFLiteConverter.from_saved_model(saved, signature_keys=list(PARTS))
        if kind != "float32":
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
        if kind == "float16":
            converter.target_spec.supported_types = [tf.float16]
        (folder / LITERT).write_bytes(converter.convert())


def run_litert(pair: Pair, folder: Path) -> Run:
    """By LiteRT's own interpreter, on one thread."""
    from ai_edge_litert.interpreter import Interpreter  # pyright: ignore[reportMissingImports]

    interpreter = Interpreter(model_path=str(folder / LITERT), num_threads=1)
    runners = [interpreter.get_signature_runner(part) for part in PARTS]
    encode, predict = (lambda inputs, runner=runner: runner(**inputs) for runner in runners)
    return encode, predict


def write_onnx(pair: Pair, folder: Path) -> None:
    """Two files, each with the weights that it needs."""
    from jax2onnx import to_onnx  # pyright: ignore[reportMissingImports]

    for part, function, taken, gives in zip(
        PARTS, (pair.encode, pair.predict), (pair.buffer, pair.asked), (pair.memory, pair.answers), strict=True
    ):

        def in_order(*arrays: Any, function: Any = function, taken: Shapes = taken, gives: Shapes = gives) -> tuple:
            found = function(pair.weights, dict(zip(taken, arrays, strict=True)))
            return tuple(found[name] for name in gives)

        with backend.target("gpu"), _quiet():  # the plain forms of all layers; those of CPUs are for XLA
            # Traced first, since the converter's own tracing replaces functions of JAX which Flax's loops need.
            traced = jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(in_order)(*taken.values()))
            try:
                model = to_onnx(
                    lambda *arrays, traced=traced: tuple(traced(*arrays)),
                    list(taken.values()),
                    input_names=list(taken),
                    output_names=list(gives),
                )
            except (AttributeError, ImportError) as e:  # it reads internals of JAX, which move
                fix = "pip install 'cxda_jax[export]' brings an older JAX"
                raise UserError(f"export: this jax2onnx {NO_MATCH} {jax.__version__} ({reason(e)}); {fix}") from None
        _shrink(model.graph)
        _spell_sigmoids(model.graph)
        (folder / f"{part}.onnx").write_bytes(model.SerializeToString())


def _shrink(graph: Any) -> None:
    """Drops constants that nothing takes.

    Of large ones of a single value, that are repeated anyway where they are taken, it keeps this value.
    """
    from onnx import numpy_helper  # pyright: ignore[reportMissingImports]

    takers, kept = collections.defaultdict(set), []
    for node in graph.node:
        for name in node.input:
            takers[name].add(node.op_type)
    for constant in graph.initializer:
        array, by = numpy_helper.to_array(constant), takers[constant.name]
        if array.size >= LARGE and by <= REPEATING and (array == array.flat[0]).all():
            constant = numpy_helper.from_array(array.reshape(-1)[:1].reshape((1,) * array.ndim), constant.name)
        kept += [constant] * bool(by)
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _spell_sigmoids(graph: Any) -> None:
    """Writes a sigmoid as 1 / (1 + exp(-x)).

    onnxruntime's own is wrong by up to 1e-7, which is much where all images of a buffer count for less than that.
    """
    from onnx import helper, numpy_helper  # pyright: ignore[reportMissingImports]

    one, nodes = "one of sigmoids", []
    for node in graph.node:
        if node.op_type != "Sigmoid":
            nodes.append(node)
            continue
        (x,), (y,) = node.input, node.output
        steps = ("Neg", [x]), ("Exp", [f"{y} Neg"]), ("Add", [f"{y} Exp", one]), ("Reciprocal", [f"{y} Add"])
        nodes += [helper.make_node(name, takes, [f"{y} {name}"]) for name, takes in steps]
        nodes[-1].output[:] = [y]
    if len(nodes) > len(graph.node):
        graph.initializer.append(numpy_helper.from_array(np.array(1, np.float32), one))
    del graph.node[:]
    graph.node.extend(nodes)


def run_onnx(pair: Pair, folder: Path) -> Run:
    """By onnxruntime, on one thread."""
    encode, predict = (open_onnx(folder / f"{part}.onnx") for part in PARTS)
    return encode, predict


def open_onnx(file: Path) -> Callable[[Named], Named]:
    import onnxruntime  # pyright: ignore[reportMissingImports]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    takes, gives = ([each.name for each in each_of] for each_of in (session.get_inputs(), session.get_outputs()))
    return lambda inputs: dict(
        zip(gives, session.run(gives, {name: np.asarray(inputs[name]) for name in takes}), strict=True)
    )


_LITERT = "ai_edge_litert", "tensorflow"
FORMATS = {
    "jax": Format(write_jax, run_jax, 1e-4, 1.0),
    "litert": Format(write_litert, run_litert, 1e-4, 1.0, _LITERT),
    "litert_float16": Format(functools.partial(write_litert, kind="float16"), run_litert, 1e-2, 0.99, _LITERT),
    "litert_int8": Format(functools.partial(write_litert, kind="int8"), run_litert, 5e-2, 0.97, _LITERT),
    "onnx": Format(write_onnx, run_onnx, 1e-4, 1.0, ("jax2onnx", "onnxruntime")),
}


def _tensorflow() -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with _quiet():
        import tensorflow as tf
        from jax.experimental import jax2tf
    tf.config.set_visible_devices([], "GPU")
    return tf, jax2tf


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of the converter on what it does inside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
