"""Encoders: a batch of images becomes logits, style and perhaps features, by an ONNX graph, a model of timm and the
like, or a function of the user.

The style of an image is the means and deviations, over its places, of the channels of the input and of some maps. The
features are the input of the last dense layer, or a tensor that is named: of tokens, the first one (the class's)
beside the mean of the others. An encoder may have features without logits; then `cxda fit` learns a head.
"""

import functools
import hashlib
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cxda_jax.adapter.adapter import as_array, as_probabilities, faults
from cxda_jax.adapter.own_style import fitting
from cxda_jax.adapter.torch_models import SOURCES, TorchEncoder, weights_hash
from cxda_jax.config.fields import choose
from cxda_jax.data.readers.raw import IMAGENET
from cxda_jax.disk.files import hash_file
from cxda_jax.disk.reading import insist_on_file
from cxda_jax.errors import UserError, brief, needing
from cxda_jax.machine import stops

SIDE, BATCH = 224, 32  # pixels where nothing says the size; images at once
FLOATS = {1: np.float32, 10: np.float16}  # ONNX's numbers of types
RAW = ("Conv", "MatMul", "Sigmoid", "Erf")  # no map of theirs is taken where there are others
MOVE = ("Transpose", "Reshape", "Einsum")  # after these, channels may be another axis
FINISH = (  # what these take is no finished map
    "BatchNormalization", "Relu", "PRelu", "LeakyRelu", "Elu", "Celu", "Selu", "Clip", "Sigmoid", "HardSigmoid",
    "HardSwish", "Gelu", "Erf", "Tanh", "Softplus", "Swish", "Mish",
)  # fmt: skip
NONE = "none"  # in place of the name of logits
AGREE = 0.01  # of the largest number: by rounding alone, answers to the same image differ by less
MOST = 2**27  # pixels at once, of which a batch and its maps fit into memory
PATIENCE = 1.0  # seconds that a batch may take after a signal
Insist = Callable[[Mapping[str, Any]], None]
Encode = Callable[[np.ndarray], dict[str, np.ndarray]]


class Encoder(NamedTuple):
    """What turns images into arrays.

    Attributes:
      encode: `batch` images, uint8 [n, h, w, c] -> float32 style [n, d]; logits [n, classes], features [n, d] or both.
      shape: of an image, (h, w, c).
      batch: images at once.
      about: all that the arrays depend on, for JSON.
      fit: how an image that is no square becomes one, where nobody says; see data/store.py.
    """

    encode: Encode
    shape: tuple[int, int, int]
    batch: int
    about: dict[str, Any]
    fit: str = "squash"


class Options(NamedTuple):
    """What launch/features.py says of them. A function takes the first two; timm:MODEL takes no tensors."""

    size: int | None = None
    batch: int = BATCH
    mean: Sequence[str] = ()
    std: Sequence[str] = ()
    logits: str = ""
    features: str = ""
    maps: Sequence[str] = ()


def open_encoder(name: str, options: Options, insist: Insist = lambda about: None, *, plain: bool = False) -> Encoder:
    """The encoder in a file that ends in .onnx, or the one that timm:MODEL or the like or module:function names.

    insist() raises a UserError if a graph has another hash than it should. Only then is its content looked at.
    plain: one thread of the CPU computes a graph as it is written, with no operations joined.
    """
    if name.endswith(".onnx"):
        return _of_onnx(Path(name).expanduser(), options, insist, plain)
    module, _, function = name.partition(":")
    of_package = module in SOURCES and bool(function)
    if not (of_package or module and function.isidentifier()):
        raise UserError("give a file that ends in .onnx, timm:MODEL or module:function", "encoder", name)
    for_others = ("logits", "features") if of_package else ("mean", "std", "logits", "features", "maps")
    if given := [option for option in for_others if getattr(options, option)]:
        raise UserError("for ONNX, and a model or a function decides this itself", given[0], fix="leave it out")
    return _of_package(name, module, function, options) if of_package else _of_function(name, module, function, options)


def moments(maps: Iterable[tuple[Any, int]]) -> np.ndarray:
    """Means and deviations [n, 2 * all channels] over the places of maps, each with the axis of its channels."""
    found = []
    for x, axis in maps:
        x, places = x.astype(np.float32, copy=False), tuple(i for i in range(1, x.ndim) if i != axis % x.ndim)
        found += [x.mean(places), x.std(places)]
    return np.concatenate(found, axis=1)


def _checked(given: Mapping[str, Any], count: int, name: str) -> dict[str, np.ndarray]:
    """The arrays of so many images as float32. A UserError names the first that cannot be."""
    for key in ("logits", "style"):
        if key not in given and not (key == "logits" and "features" in given):
            raise UserError(f"no {key!r}{' and no maps' * (key == 'style')} in its answer; add it", "encoder", name)
    for key, x in given.items():
        least = 2 if key == "logits" else 1
        if x.ndim != 2 or len(x) != count or x.shape[1] < least:
            what = f"{key!r} has the form {list(x.shape)}"
            raise UserError(f"{what}; give [{count}, columns], with {least} columns or more", "encoder", name)
    if "logits" in given and (told := as_probabilities(given["logits"])):
        raise UserError(f"logits: {told}; give the values before the softmax or sigmoid", "encoder", name)
    return {key: x.astype(np.float32, copy=False) for key, x in given.items()}


def _steady(encode: Encode, name: str, fix: str) -> Encode:
    """What encodes, and asks twice more for its first images: a UserError if they get other answers then."""
    first = True

    def insist(pixels: np.ndarray, answer: dict[str, np.ndarray]) -> None:
        half = -(-len(pixels) // 2)
        others = np.concatenate([255 - pixels[half:], pixels[:half]])
        for asked, count, when in (
            (pixels, len(pixels), "when it is asked for again"),
            (others, half, "by the other images of its batch"),
        ):
            again = encode(asked)
            for key, x in answer.items():
                near = AGREE * np.abs(x[np.isfinite(x)]).max(initial=0)
                if not np.allclose(x[:count], again[key][-count:], rtol=0, atol=near, equal_nan=True):
                    raise UserError(f"{key!r} of an image changes {when}; {fix}", "encoder", name)

    def steady(pixels: np.ndarray) -> dict[str, np.ndarray]:
        nonlocal first
        answer = encode(pixels)
        if first:
            insist(pixels, answer)
        first = False
        return answer

    return steady


def _of_function(text: str, module: str, name: str, options: Options) -> Encoder:
    sys.path.insert(0, os.getcwd())
    with faults("encoder", text, f"{module} must be a module of this folder, or an installed one"):
        function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise UserError(f"{module} has no function {name}; name one of that module", "encoder", text)
    try:
        of_torch = isinstance(function, TorchEncoder)
        source = weights_hash(function.model) if of_torch else hash_file(Path(inspect.getsourcefile(function) or ""))
    except (TypeError, OSError):  # it was not written in a file of Python
        source = ""
    side, batch = options.size or SIDE, options.batch
    _insist_on_size(side, batch)
    about = {"encoder": text, "encoder_sha256": source, "size": side, "batch": batch}
    steady = _steady(_called(function, text), brief(text), "call model.eval(), or its like")
    return Encoder(steady, (side, side, 3), batch, about)


def _of_package(text: str, package: str, name: str, options: Options) -> Encoder:
    with needing(f"--encoder={brief(text)}", package):
        module = importlib.import_module(package)
    with faults("encoder", text, f"give a name of {package} whose weights are in its cache or can be loaded"):
        found = SOURCES[package](module, name)
    size, batch = options.size or found.size, options.batch
    side = found.side * size // found.size
    _insist_on_size(side, batch)
    mean, std = normalisation(options._replace(mean=options.mean or found.mean, std=options.std or found.std), 3)
    encode = TorchEncoder(found.model, mean, std, options.maps, size, found.logits)
    with faults("encoder", text, "give another --size"):
        encode(np.zeros((1, side, side, 3), np.uint8))  # it chooses its maps
    about = {"encoder": text, "encoder_sha256": weights_hash(found.model), "size": size, "batch": batch, "side": side}
    about |= {"mean": mean, "std": std, "maps": encode.maps}
    return Encoder(_steady(_called(encode, text), brief(text), "report it"), (side, side, 3), batch, about, found.fit)


def _called(function: Callable[[np.ndarray], Any], text: str) -> Encode:
    """What asks a function of others, and checks what it gives."""

    def encode(pixels: np.ndarray) -> dict[str, np.ndarray]:
        with faults("encoder", text, "mend the function; --debug shows where"):
            given: Any = function(pixels.copy())  # which it may change
            if not isinstance(given, Mapping):
                what = f"it gives a {type(given).__name__}"
                raise UserError(f"{what}; give a dict with logits, and with style or maps", "encoder", text)
            names = [key for key in ("logits", "features", "style") if key in given]
            what = f"--encoder={brief(text)}"
            answer = {key: as_array(f"{what}: {key}", given[key], np.float32) for key in names}
            if "maps" in given and "style" not in given:
                own = [as_array(f"{what}: maps", x, np.float32) for x in given["maps"]]
                maps = [pixels.astype(np.float32) / 255, *own]
                for x in maps:
                    channels_first = x.ndim == 4 and x.shape[1] != x.shape[2] == x.shape[3]
                    if x.ndim not in (3, 4) or len(x) != len(pixels) or channels_first:
                        what = f"a map has the form {list(x.shape)}"
                        raise UserError(f"{what}; give [{len(pixels)}, h, w, channels]", "encoder", text)
                answer["style"] = moments((x, -1) for x in maps)
        return _checked(answer, len(pixels), brief(text))

    return encode


class Graph(NamedTuple):
    """An ONNX graph that gives what an encoder needs.

    Attributes:
      model: of onnx, whose outputs are `names`.
      names: of the tensors.
      rows: the names of the logits and of the features, by "logits" and "features", where there are such.
      maps: names of maps, each with the axis of its channels.
      classed: names of those tensors [n, tokens, d] whose first token is of the class.
      taken: the type of the input's numbers.
      axis: of the input's channels.
      shape: of an image, (h, w, c).
      batch: images at once.
      sha256: of the file's content.
    """

    model: Any
    names: list[str]
    rows: dict[str, str]
    maps: dict[str, int]
    classed: frozenset[str]
    taken: Any
    axis: int
    shape: tuple[int, int, int]
    batch: int
    sha256: str


def read_graph(path: Path, options: Options, insist: Insist = lambda about: None) -> Graph:
    with needing(f"--encoder={path}", "onnx"):
        import onnx
        import onnxruntime  # noqa: F401
    if not path.is_file():
        raise UserError("no such file; give one that ends in .onnx, timm:MODEL or module:function", "encoder", path)
    with faults("encoder", str(path), "export it again"):
        model = onnx.load(path, load_external_data=False)
        _insist_on_beside(model, path.parent)
        onnx.load_external_data_for_model(model, str(path.parent))
        source, graph = hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest(), model.graph
        insist({"encoder_sha256": source})
        if given := {*options.maps} & {v.name for v in graph.input}:
            raise UserError("the input's moments are in the style already; leave it out", "maps", given.pop())
        image, axis, side = _sized(graph, options)
        del graph.value_info[:]  # of other sizes
        known = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        tensors = {v.name: v for v in (*known.input, *known.value_info, *known.output)}
        shapes = {name: [d.dim_value for d in v.type.tensor_type.shape.dim] for name, v in tensors.items()}
        rows = _logits(graph, shapes, options)
        nodes = _before(graph, rows.get("logits", options.features))
        rows |= _features(nodes, shapes, options.features)
        maps, form = _maps(nodes, shapes, options.maps), shapes[rows["features"]] if options.features else []
        classed = frozenset(
            n for n in (*rows.values(), *maps) if len(form) == 3 == len(shapes[n]) and shapes[n][1] == form[1]
        )
        names = list(dict.fromkeys([*rows.values(), *maps]))
        del graph.output[:]
        graph.output.extend(tensors[name] for name in names)
    shape, batch = (side, side, image.shape.dim[axis].dim_value), image.shape.dim[0].dim_value
    return Graph(model, names, rows, maps, classed, FLOATS[image.elem_type], axis, shape, batch, source)


def _insist_on_beside(model: Any, folder: Path) -> None:
    """Raises a UserError unless all weights outside of the graph are plain files in its folder."""
    for tensor in _tensors(model):
        for place in (entry.value for entry in tensor.external_data if entry.key == "location"):
            path = folder / place
            steps = [path, *path.parents][: len(Path(place).parts)]
            if os.path.isabs(place) or ".." in Path(place).parts or any(step.is_symlink() for step in steps):
                what = f"the weights {brief(repr(place), 60)} of the graph lie outside its folder, or are a link"
                raise UserError(f"{what}; put the file itself beside the graph, or export it again", "encoder")
            insist_on_file(path, "put it back, or export the graph again")


def _tensors(message: Any) -> Iterator[Any]:
    """All tensors in a message of ONNX, at any depth."""
    if message.DESCRIPTOR.name == "TensorProto":
        yield message
    for field, value in message.ListFields():
        if field.message_type:
            for inner in [value] if hasattr(value, "DESCRIPTOR") else value:
                yield from _tensors(inner)


def _interruptible(work: Callable[[], Any], stop: Callable[[], None]) -> Any:
    """What work() gives. Python hears no signal while code of others computes, so another thread does it; a signal
    calls stop(), and nobody waits for that thread any more."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as e:  # the waiting thread raises it
            done.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    try:
        while not wait([done], PATIENCE / 5).done:
            stops.raise_if_late(PATIENCE)
    except BaseException:
        stop()
        raise
    return done.result()


def normalisation(options: Options, channels: int) -> tuple[list[float], list[float]]:
    """The mean and the deviation of each channel, of pixels of 0..1."""
    mean, std = options.mean or IMAGENET[0], options.std or IMAGENET[1]
    return _numbers("mean", mean, channels), _numbers("std", std, channels)


def _of_onnx(path: Path, options: Options, insist: Insist, plain: bool) -> Encoder:
    found = read_graph(path, options, insist)
    import onnxruntime

    with faults("encoder", str(path), "export it again"):
        providers, computing = onnxruntime.get_available_providers(), onnxruntime.SessionOptions()
        if plain:
            providers, computing.intra_op_num_threads = ["CPUExecutionProvider"], 1
            computing.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        content = found.model.SerializeToString()
        opening = functools.partial(onnxruntime.InferenceSession, content, computing, providers=providers)
        session = _interruptible(opening, lambda: None)
    mean, std = normalisation(options, found.shape[-1])

    def encode(pixels: np.ndarray) -> dict[str, np.ndarray]:
        x = (pixels.astype(np.float32) / 255 - np.array(mean, np.float32)) / np.array(std, np.float32)
        x = np.ascontiguousarray(np.moveaxis(x, -1, found.axis), found.taken)
        with faults("encoder", str(path), "give another --size or --batch, or export it again"):
            running, given = onnxruntime.RunOptions(), {session.get_inputs()[0].name: x}
            running.log_severity_level = 4  # what fails is raised
            told: Any = _interruptible(
                lambda: session.run(found.names, given, running), lambda: setattr(running, "terminate", True)
            )
        by_name = dict(zip(found.names, told, strict=True))
        patches = by_name | {name: by_name[name][:, 1:] for name in found.classed}
        style = moments([(x, found.axis), *((patches[name], axis) for name, axis in found.maps.items())])
        rows = {key: by_name[name] for key, name in found.rows.items()}
        for key in (key for key, name in found.rows.items() if name in found.classed):
            rest = patches[found.rows[key]].mean(1, dtype=np.float32)
            rows[key] = np.concatenate([rows[key][:, 0], rest], axis=1, dtype=np.float32)
        return _checked({**rows, "style": style}, len(pixels), str(path))

    about = {"encoder": path.name, "encoder_sha256": found.sha256, "size": found.shape[0], "batch": found.batch}
    about |= {"mean": mean, "std": std, "logits": found.rows.get("logits", NONE), "maps": list(found.maps)}
    about |= {"features": options.features} if options.features else {}
    steady = _steady(encode, str(path), "export it in evaluation mode")
    return Encoder(steady, found.shape, found.batch, about | {"onnxruntime": onnxruntime.__version__})


def _sized(graph: Any, options: Options) -> tuple[Any, int, int]:
    """The type of the graph's input, whose free axes it sets; the axis of the channels; the side of an image."""
    weights = {weight.name for weight in graph.initializer}
    inputs = [v.type.tensor_type for v in graph.input if v.name not in weights]
    dims: Any = inputs[0].shape.dim if len(inputs) == 1 else ()
    axis = next((i for i in (1, 3) if len(dims) == 4 and dims[i].dim_value in (1, 3)), 0)
    if not axis or inputs[0].elem_type not in FLOATS:
        raise UserError("its input is not one of float images [n, 3, h, w] or [n, h, w, 3]; export it so", "encoder")
    places = [dims[i] for i in range(1, 4) if i != axis]
    side = options.size or max(d.dim_value for d in places) or SIDE
    if any(d.dim_value not in (0, side) for d in places):
        fixed = " x ".join(str(d.dim_value) for d in places)
        raise UserError(f"the graph takes {fixed} pixels; give its side, or export it with a free size", "size", side)
    for d in places:
        d.dim_value = side
    dims[0].dim_value = dims[0].dim_value or options.batch
    _insist_on_size(side, dims[0].dim_value)
    return inputs[0], axis, side


def _insist_on_size(side: int, batch: int) -> None:
    if not 0 < batch * side**2 <= MOST:
        told = f"{batch} images of {side} x {side} pixels at once are more than {MOST:,} pixels"
        raise UserError(told, "size", side, "give a smaller size or a smaller batch, or export the graph for one")


def _numbers(name: str, given: Sequence[Any], channels: int) -> list[float]:
    """A number for each channel, such as 0.5 or 1/255; one stands for all."""
    try:
        numbers = [float(Fraction(each)) for each in given]
    except (ValueError, ZeroDivisionError):
        numbers = []
    if len(numbers) not in (1, channels) or name == "std" and min(numbers) <= 0:
        told = f"give one number, or one for each of {channels} channels{', above 0' * (name == 'std')}"
        raise UserError(told, name, ",".join(map(str, given)))
    return numbers * (channels // len(numbers))


def _logits(graph: Any, shapes: Mapping[str, list[int]], options: Options) -> dict[str, str]:
    if options.logits == NONE:
        if not options.features:
            raise UserError(f"missing beside logits={NONE}; name a tensor [n, d] or [n, tokens, d]", "features")
        return {}
    found = [v.name for v in graph.output if len(shapes[v.name]) == 2]
    if not options.logits and len(found) != 1:
        what = f"{len(found)} outputs have the form [n, classes] ({brief(', '.join(found))})"
        raise UserError(f"{what}; name a tensor of the graph, or {NONE}", "logits")
    return {"logits": choose("logits", options.logits or found[0], shapes)}


def _before(graph: Any, name: str) -> list[Any]:
    """The nodes on which a tensor depends, in their order."""
    needed, nodes = {name}, []
    for node in reversed(graph.node):
        if needed & {*node.output}:
            needed.update(node.input)
            nodes.insert(0, node)
    return nodes


def _features(nodes: Sequence[Any], shapes: Mapping[str, list[int]], asked: str) -> dict[str, str]:
    """The tensor that is asked for, or the last dense layer's input [n, d]; none where a convolution comes later."""
    if asked:
        form = shapes[choose("features", asked, shapes)]
        if len(form) not in (2, 3) or len(form) == 3 and form[1] == 1:
            raise UserError(f"has the form {form}", "features", asked, "name a tensor [n, d] or [n, tokens, d]")
        return {"features": asked}
    last = [node for node in nodes if node.op_type in ("Gemm", "MatMul", "Conv")][-1:]
    inputs = [node.input[0] for node in last if node.op_type != "Conv"]
    return {"features": inputs[0]} if inputs and len(shapes.get(inputs[0], ())) == 2 else {}


def _maps(nodes: Sequence[Any], shapes: Mapping[str, list[int]], asked: Sequence[str]) -> dict[str, int]:
    """Some maps spread over the depth, as many as fit() can correct by, or those that are asked for, with the axis of
    their channels.

    A map comes from a convolution, whose channels are axis 1, or from a layer norm, where they are the last one. Where
    blocks add to tokens [n, tokens, d], the early ones of these sums are the maps.
    """
    axes: dict[str, int] = {}
    sums: list[str] = []
    for node in nodes:
        name, form = node.output[0], shapes.get(node.output[0], [])
        rank, own = len(form), [shapes.get(i, []) for i in node.input]
        before = [axes[i] for i in node.input if i in axes and len(shapes[i]) == rank]
        if rank in (3, 4) and (node.op_type in ("Conv", "LayerNormalization") or _centres(node, own)):
            axes[name] = 1 if node.op_type == "Conv" else rank - 1
            if rank == 3 and node.op_type != "Conv":
                axes.setdefault(node.input[0], 2)
        elif before and node.op_type not in MOVE:
            axes[name] = before[0]
            if node.op_type == "Add" and before[0] == 2 and all(each[1:] == form[1:] for each in own):
                sums.append(name)
    if wrong := [name for name in asked if len(shapes[choose("maps", name, shapes)]) not in (3, 4)]:
        raise UserError(f"has the form {shapes[wrong[0]]}; name tensors of 3 or 4 axes", "maps", wrong[0])
    if asked:
        return {name: axes.get(name, 1 if len(shapes[name]) == 4 else 2) for name in asked}
    if sums:
        return {sums[i]: 2 for i in fitting([shapes[name][2] for name in sums], -(-len(sums) // 2))}
    unfinished = {node.input[0] for node in nodes if node.op_type in FINISH}
    kinds = {node.output[0]: node.op_type for node in nodes}
    wide = [
        name
        for name, axis in axes.items()
        if name not in unfinished and any(d != 1 for i, d in enumerate(shapes[name]) if i not in (0, axis))
    ]
    known = [name for name in wide if shapes[name][axes[name]]] or wide  # padding of a computed size hides the channels
    found = [name for name in known if kinds.get(name) not in RAW] or known
    return {found[i]: axes[found[i]] for i in fitting([shapes[name][axes[name]] for name in found], len(found))}


def _centres(node: Any, forms: Sequence[list[int]]) -> bool:
    """Whether it takes from tokens their means over the channels, as a layer norm does that is written in parts."""
    return node.op_type == "Sub" and len(forms[0]) == 3 and forms[1] == [*forms[0][:2], 1]
