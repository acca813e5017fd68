"""Arrays as .safetensors files. The format's library reads them.

The writer is ours: it gives the file in pieces, so that hashing them goes on while they are written. The library's
writer needs the whole file in memory or on the disk first.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cxda_jax.disk.reading import reason, refuse_html
from cxda_jax.errors import UserError, brief

# The element types that the format names, but for those of eight bits that NumPy has not.
TYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jax.numpy.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
NAMES = {np.dtype(kind): name for name, kind in TYPES.items()}


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their path: params/head/kernel."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    found = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    for name, leaf in found.items():
        if (kind := getattr(leaf, "dtype", type(leaf).__name__)) not in NAMES:
            raise UserError(f"{brief(name, 60)}: {kind} cannot be saved; keep an array, of a random key its key_data()")
    return found


def as_tree(arrays: Mapping[str, np.ndarray], like: Any) -> Any:
    """The arrays as a tree with the structure and the devices of `like`; a
    ValueError names the first that is not as there."""
    wanted = named(like)
    for name, leaf in wanted.items():
        if name not in arrays or (arrays[name].shape, arrays[name].dtype) != (leaf.shape, leaf.dtype):
            raise ValueError(f"{name} is missing or of another shape")
    if extra := sorted(set(arrays) - set(wanted)):
        raise ValueError(f"the network has no {extra[0]}")

    def place(leaf: Any) -> Any:
        """Where a leaf is. Committed arrays would make JAX compile another program than those of a fresh state."""
        return getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None

    placed = [jax.device_put(arrays[name], place(leaf)) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), placed)


def pieces(arrays: Mapping[str, np.ndarray], notes: Mapping[str, str] | None = None) -> list[bytes | memoryview]:
    """The bytes of a file, of which those of contiguous arrays are not copied; `notes` become the header's text."""
    header: dict[str, Any] = {"__metadata__": dict(notes)} if notes else {}
    bodies, end = [], 0
    for name, array in sorted(arrays.items()):
        start, end = end, end + array.nbytes
        kind = NAMES[array.dtype.newbyteorder("=")]
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [start, end]}
        bodies.append(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the arrays begin at a multiple of eight
    return [len(text).to_bytes(8, "little") + text, *bodies]


def read(path: Path, where: str, fix: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays by name, and the header's text. An error says `where` it was found and how to `fix` it."""
    from safetensors import SafetensorError, safe_open

    refuse_html(path)
    try:
        with safe_open(path, framework="np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError) as e:
        raise UserError(f"{where}: not a safetensors file of weights ({reason(e, 100)}); {fix}") from None
