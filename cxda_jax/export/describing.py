"""The ONNX graph of a classifier as a program that gives what the adapter's programs take: a row of logits and style.

describe(image) -> row      once for each image, which is asked for, joins the buffer, or both
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cxda_jax.adapter.adapter import Adapter, Head
from cxda_jax.adapter.encoders import Graph, Options, normalisation, read_graph
from cxda_jax.errors import UserError

DESCRIBE = "describe"
PIXELS, ROWS = "pixels", "rows"
OURS, PREFIX = "described ", "encoder/"  # of the names of what is added, and then of all names of the classifier
MANY = 2**31 - 1  # more than all tokens
AXES_ARE_INPUTS = 18  # the operations of ONNX from which on ReduceMean takes its axes as an input


def options_of(origin: Mapping[str, Any]) -> Options:
    """The options of an adapter's encoder, for one image at a time."""
    return Options(**{key: origin[key] for key in Options._fields if key in origin})._replace(batch=1)


def write_describe(adapter: Adapter, file: Path, folder: Path) -> None:
    """Writes describe.onnx.

    Args:
      adapter: whose head gives the logits where the encoder has none.
      file: of the encoder.
      folder: of the programs.
    """
    import onnx

    options = options_of(adapter.origin)
    graph = read_graph(file, options)
    if graph.batch != 1:
        raise UserError(
            f"encoder={file}: it takes {graph.batch} images at once; export it with a free number, or for 1"
        )
    model = onnx.compose.add_prefix(fronted(graph, options, adapter.head), PREFIX)
    names = {PREFIX + PIXELS: "image", PREFIX + OURS + ROWS: "row"}
    for node in model.graph.node:
        for ends in (node.input, node.output):
            ends[:] = [names.get(end, end) for end in ends]
    for value in (*model.graph.input, *model.graph.output):
        value.name = names[value.name]
    onnx.checker.check_model(model)
    (folder / f"{DESCRIBE}.onnx").write_bytes(model.SerializeToString())


def fronted(graph: Graph, options: Options, head: Head | None = None) -> Any:
    """The graph as one from images, uint8 [n, h, w, c], to rows of logits and style, [n, 1, 1, columns]."""
    import onnx

    node, model, channels = onnx.helper.make_node, graph.model, graph.shape[-1]
    opset = next(each.version for each in model.opset_import if each.domain in ("", "ai.onnx"))
    constants, before, after = [], [], []

    def constant(name: str, value: Any) -> str:
        constants.append(onnx.numpy_helper.from_array(np.array(value), OURS + name))
        return OURS + name

    def of(operation: str, name: str, *inputs: str, **options: Any) -> str:
        (before if name.startswith("in ") else after).append(node(operation, list(inputs), [OURS + name], **options))
        return OURS + name

    def mean_over(places: list[int], name: str, x: str, keepdims: int) -> str:
        if opset < AXES_ARE_INPUTS:
            return of("ReduceMean", name, x, axes=places, keepdims=keepdims)
        return of("ReduceMean", name, x, constant(f"places of {name}", np.array(places, np.int64)), keepdims=keepdims)

    def tokens(name: str, x: str, first: int, last: int) -> str:
        ends = (constant(f"{end} of {name}", np.array([at], np.int64)) for end, at in
                (("start", first), ("end", last), ("axis", 1)))  # fmt: skip
        return of("Slice", name, x, *ends)

    mean, std = (np.array(numbers, np.float32) for numbers in normalisation(options, channels))
    x = of("Cast", "in floats", PIXELS, to=onnx.TensorProto.FLOAT)
    x = of("Div", "in parts", x, constant("most", np.float32(255)))
    x = of("Div", "in normal", of("Sub", "in centred", x, constant("mean", mean)), constant("std", std))
    if graph.axis == 1:
        x = of("Transpose", "in turned", x, perm=[0, 3, 1, 2])
    weights = {each.name for each in model.graph.initializer}
    image = next(value for value in model.graph.input if value.name not in weights)
    x = of("Cast", "in image", x, to=image.type.tensor_type.elem_type)
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in model.graph.output}
    columns = [of("Cast", "told", graph.rows.get("logits") or graph.rows["features"], to=onnx.TensorProto.FLOAT)]
    if "logits" not in graph.rows:
        if head is None:
            raise UserError("logits: missing, and the adapter has no head; fit it again to a file of cxda features")
        if graph.rows["features"] in graph.classed:
            first = mean_over([1], "class token", tokens("first", columns[0], 0, 1), 0)
            rest = mean_over([1], "patches", tokens("others", columns[0], 1, MANY), 0)
            columns = [of("Concat", "features", first, rest, axis=1)]
        scores = of("MatMul", "scores", columns[0], constant("weights", head.weights))
        columns = [of("Add", "logits", scores, constant("bias", head.bias))]
    for i, (name, axis) in enumerate([(x, graph.axis), *graph.maps.items()]):
        places = [place for place in range(1, ranks.get(name, 4)) if place != axis]
        floats = of("Cast", f"map {i}", name, to=onnx.TensorProto.FLOAT)
        if name in graph.classed:
            floats = tokens(f"patches of {i}", floats, 1, MANY)
        apart = of("Sub", f"apart {i}", floats, mean_over(places, f"middle {i}", floats, 1))
        variance = mean_over(places, f"variance {i}", of("Mul", f"square {i}", apart, apart), 0)
        columns += [mean_over(places, f"mean {i}", floats, 0), of("Sqrt", f"std {i}", variance)]
    joined = of("Concat", "columns", *columns, axis=1)
    rows = of("Unsqueeze", ROWS, joined, constant("axes", np.array([1, 2], np.int64)))
    for each in model.graph.node:
        each.input[:] = [OURS + "in image" if name == image.name else name for name in each.input]
    info = onnx.helper.make_tensor_value_info
    pixels = info(PIXELS, onnx.TensorProto.UINT8, [graph.batch, *graph.shape])
    ends = info(rows, onnx.TensorProto.FLOAT, [graph.batch, 1, 1, None])
    made = onnx.helper.make_graph(
        [*before, *model.graph.node, *after], "classifier", [pixels], [ends], [*model.graph.initializer, *constants]
    )
    opsets = [onnx.helper.make_opsetid(each.domain, each.version) for each in model.opset_import]
    return onnx.helper.make_model(made, opset_imports=opsets, ir_version=model.ir_version)
