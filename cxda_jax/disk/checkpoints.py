"""Checkpoints by orbax, with a manifest that holds the SHA-256 of every file.

A run keeps two folders. last/ holds the newest two states of the training; best/ holds the variables of the best three
validations. So if one checkpoint is damaged, another is left. The manifest is written in the background, into the temporary
folder that orbax then renames: a checkpoint with its final name has all its files.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import future

from cxda_jax.disk import files, manifest, safetensors
from cxda_jax.disk.reading import reason
from cxda_jax.errors import UserError

TREE, ARRAYS = "tree", "arrays.safetensors"
SPARE = 2**20  # bytes, for what comes with the arrays
UNREAD = ("_CHECKPOINT_METADATA", "commit_success.txt")  # orbax writes them after the manifest; restore() does without


class _Arrays(ocp.AsyncCheckpointHandler):
    """Has orbax write arrays as one plain file.

    Orbax's own format takes several times as long (docs/reliability.md), and tensorstore, which writes it, keeps some memory
    at each save.
    """

    async def async_save(self, directory: Any, args: "_SaveArrays") -> list[Any]:
        async def write() -> None:
            args.unsealed.append(Path(directory).parent)
            if jax.process_index() == 0:
                written = files.write_hashed(Path(directory) / ARRAYS, safetensors.pieces(args.arrays))
                args.hashes[f"{TREE}/{ARRAYS}"] = written

        return [future.CommitFutureAwaitingContractedSignals(write(), name=ARRAYS)]

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError  # orbax asks for it, and calls async_save alone

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError  # restore() below reads the file


@ocp.args.register_with_handler(_Arrays, for_save=True, for_restore=True)
@dataclasses.dataclass
class _SaveArrays(ocp.args.CheckpointArgs):
    arrays: dict[str, np.ndarray]
    hashes: dict[str, str]  # takes the SHA-256 of what is written, by its name in the checkpoint
    unsealed: list[Path]  # takes the temporary folder that it is written into


class Folder:
    """A folder of numbered checkpoints, which keeps the newest `keep`. Writing goes on in the background."""

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.path = path.absolute()
        self._hashes: dict[str, str] = {}
        self._unsealed: list[Path] = []
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=True,
            cleanup_tmp_directories=True,  # which killed writers left
            enable_async_checkpointing=True,
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._seal),
        )
        self._manager = _one_line(self.path, lambda: ocp.CheckpointManager(self.path, options=options))

    def save(self, step: int, tree: Any, notes: dict[str, Any]) -> None:
        """Writes a pytree and notes, of types that JSON has, as checkpoint `step`. A step that is there already is kept."""
        self.wait()
        if not self.path.is_dir():
            raise UserError(f"{self.path}: the folder has vanished during training; bring it back, or train again")
        if step in self._manager.all_steps():
            return
        leaves = safetensors.named(tree)
        needed, free = sum(leaf.nbytes for leaf in leaves.values()), shutil.disk_usage(self.path).free
        if free < 1.1 * needed + SPARE:
            raise UserError(
                f"{self.path}: a checkpoint takes {needed / 1e6:.0f} MB and the disk has {free / 1e6:.0f} MB left; free some "
                "space and run the same command again"
            )
        self._hashes, self._unsealed = {}, []
        arrays = _SaveArrays(jax.device_get(leaves), self._hashes, self._unsealed)
        items = ocp.args.Composite(**{TREE: arrays, "notes": ocp.args.JsonSave(notes)})
        _one_line(self.path, lambda: self._manager.save(step, args=items))

    def wait(self) -> None:
        """Returns when all is on the disk. A failure to write is raised here."""
        _one_line(self.path, self._manager.wait_until_finished)

    def _seal(self) -> None:
        """Called by orbax when all files are written and before they get their final name."""
        manifest.write(self._unsealed[0], known=self._hashes, unread=UNREAD)

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            _one_line(self.path, self._manager.close)
        except UserError:
            if kind is None:  # an exception that is on its way says more
                raise


def restore(path: Path, like: Any, damaged: Callable[[str], None] | None = None) -> tuple[Any, dict[str, Any]] | None:
    """The newest checkpoint under `path` with its notes; None where there is none.

    Args:
      path: the folder of checkpoints.
      like: a pytree whose structure, shapes, types and devices the checkpoint takes.
      damaged: called with a line about a checkpoint that differs from its manifest. That one is renamed, and the one
        before it is taken. Without `damaged` it is an error.
    """
    for step in steps(path):
        fault = manifest.find_fault(path / str(step))
        if not fault:
            return _load(path / str(step), like)
        if damaged is None:
            raise UserError(f"{path}/{step}: {fault}; copy it again from where it is whole, or train again")
        damaged(f"{path}/{step} is damaged: {fault}; set aside as damaged-{step}")
        os.replace(path / str(step), _free(path / f"damaged-{step}"))
        if not steps(path):
            raise UserError(
                f"{path}: no good checkpoint is left; copy one back, or delete the folder to train from the start"
            )
    return None


def steps(path: Path) -> list[int]:
    """The steps of the checkpoints under `path`, newest first."""
    return sorted((int(p.name) for p in path.glob("*") if p.name.isdecimal()), reverse=True)


def _load(path: Path, like: Any) -> tuple[Any, dict[str, Any]]:
    file = path / TREE / ARRAYS
    if not file.is_file():
        raise UserError(f"{path}: from another version (it has no {TREE}/{ARRAYS}); train again")
    arrays, _ = safetensors.read(file, str(file), "train again")
    try:
        return safetensors.fit(arrays, like), json.loads((path / "notes" / "metadata").read_bytes())
    except (ValueError, OSError) as e:  # its bytes are those that were written
        raise UserError(f"{path}: from another version or another network ({reason(e)}); train again") from e


def _free(path: Path) -> Path:
    """The path, or the first name like it that is not in use."""
    taken = [path, *(path.with_name(f"{path.name}.{i}") for i in range(1, 1000))]
    return next(p for p in taken if not p.exists())


def _one_line(path: Path, work: Callable[[], Any]) -> Any:
    """Runs `work`, and makes one line of an error of orbax or tensorstore, which may be pages long."""
    try:
        return work()
    except UserError:
        raise
    except Exception as e:
        raise UserError(f"{path}: the checkpoint cannot be written ({reason(e)}); the last whole one stays") from e


def weights_hash(variables: Any) -> str:
    """SHA-256 over names, shapes and bytes of all arrays: the identity of a set of weights."""
    digest = hashlib.sha256()
    for path, leaf in sorted(((jax.tree_util.keystr(p), x) for p, x in jax.tree_util.tree_leaves_with_path(variables))):
        array = np.asarray(leaf)
        digest.update(f"{path} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
