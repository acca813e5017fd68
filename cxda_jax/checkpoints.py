"""Checkpoints: orbax behind open_folder(), save() and restore().

A run keeps two folders, because one manager that keeps only the best step would delete the newest, from which a run
resumes: last/ holds the whole training state, best/ the variables of the best validation score.
"""

import hashlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

Folder = ocp.CheckpointManager


def open_folder(path: Path, keep: int = 1) -> Folder:
    """A folder of numbered checkpoints of which the newest `keep` stay; writing goes on in the background."""
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True)
    return ocp.CheckpointManager(path.absolute(), options=options)


def save(folder: Folder, step: int, tree: Any, notes: dict[str, Any]) -> None:
    """Writes a pytree and JSON notes as checkpoint `step`; a step that is already there is left alone."""
    if step in folder.all_steps():
        return
    folder.save(step, args=ocp.args.Composite(tree=ocp.args.StandardSave(tree), notes=ocp.args.JsonSave(notes)))


def restore(path: Path, like: Any) -> tuple[Any, dict[str, Any]] | None:
    """The newest checkpoint under `path` in the shapes, types and devices of `like`; None where there is none."""
    if not path.is_dir():
        return None
    with ocp.CheckpointManager(path.absolute()) as folder:
        step = folder.latest_step()
        if step is None:
            return None
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        found = folder.restore(
            step, args=ocp.args.Composite(tree=ocp.args.StandardRestore(target), notes=ocp.args.JsonRestore())
        )
        return found["tree"], found["notes"]


def weights_hash(variables: Any) -> str:
    """SHA-256 over names, shapes and bytes of all arrays: the identity of a set of weights."""
    digest = hashlib.sha256()
    for path, leaf in sorted(((jax.tree_util.keystr(p), x) for p, x in jax.tree_util.tree_leaves_with_path(variables))):
        array = np.asarray(leaf)
        digest.update(f"{path} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
