"""A trained model as plain files: weights.safetensors, config.json, and a manifest of both."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cxda_jax import checkpoints, files
from cxda_jax.nets.pretrained import read_weights
from cxda_jax.types import UserError, Variables

WEIGHTS, CONFIG = "weights.safetensors", "config.json"
_TYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64"}  # as read_weights() knows them


def write_model(folder: Path, variables: Variables, config: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
    """`notes`, such as the step and its validation score, become the header's text."""
    folder.mkdir(exist_ok=True)
    (folder / checkpoints.MANIFEST).unlink(missing_ok=True)
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    arrays = {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in leaves}
    told = {name: json.dumps(value) for name, value in notes.items()}
    files.write_whole(folder / WEIGHTS, lambda partial: partial.write_bytes(safetensors(arrays, told)))
    files.write_text(folder / CONFIG, json.dumps(config, indent=1) + "\n")
    checkpoints.write_manifest(folder, [WEIGHTS, CONFIG])


def is_model(folder: Path) -> bool:
    return (folder / WEIGHTS).exists()


def read_model(folder: Path, like: Variables) -> tuple[Variables, dict[str, Any]]:
    """The variables, of the names, shapes and types of `like`, and the notes."""
    fault = checkpoints.find_fault(folder)
    if fault:
        raise UserError(f"{folder}: {fault}; copy it again from where it is whole")
    arrays = read_weights(folder / WEIGHTS)
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    names = ["/".join(key.key for key in path) for path, _ in leaves]
    for name, (_, leaf) in zip(names, leaves, strict=True):
        if name not in arrays or (arrays[name].shape, arrays[name].dtype) != (leaf.shape, leaf.dtype):
            raise UserError(f"{folder}/{WEIGHTS}: {name} is missing or of another shape; is {CONFIG} the model's own?")
    if extra := sorted(set(arrays) - set(names)):
        raise UserError(f"{folder}/{WEIGHTS}: the network has no {extra[0]}; is {CONFIG} the model's own?")
    with open(folder / WEIGHTS, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    notes = {name: json.loads(text) for name, text in header.get("__metadata__", {}).items()}
    return jax.tree.unflatten(structure, [jax.numpy.asarray(arrays[name]) for name in names]), notes


def safetensors(arrays: Mapping[str, np.ndarray], notes: Mapping[str, str]) -> bytes:
    """A file in the format of that name: the header's length, the header, the arrays in the order of their names."""
    header: dict[str, Any] = {"__metadata__": dict(notes)} if notes else {}
    parts, end = [], 0
    for name, array in sorted(arrays.items()):
        parts.append(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
        header[name] = {
            "dtype": _TYPES[array.dtype.name],
            "shape": array.shape,
            "data_offsets": [end, end + len(parts[-1])],
        }
        end += len(parts[-1])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the arrays begin at a multiple of eight
    return len(text).to_bytes(8, "little") + text + b"".join(parts)
