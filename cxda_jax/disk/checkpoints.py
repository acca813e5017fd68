"""Checkpoints by orbax, with a manifest that holds the SHA-256 of every file.

A run keeps two folders. last/ holds the newest two states of the training; best/ holds the variables of the best
three validations. So if one checkpoint is damaged, another is left. The manifest is written in the background, into
the temporary folder that orbax then renames: a checkpoint with its final name has all its files.
"""

import contextlib
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
READ = (f"{TREE}/{ARRAYS}", "notes/metadata")
UNREAD = ("_CHECKPOINT_METADATA", "commit_success.txt")  # orbax writes them after the manifest; restore() does without


class _Arrays(ocp.AsyncCheckpointHandler):
    """Has orbax write arrays as one plain file: its own takes much longer (docs/reliability.md),
    and some memory for good."""

    async def async_save(self, directory: Any, args: "_SaveArrays") -> list[Any]:
        async def write() -> None:
            args.folder.unsealed = Path(directory).parent
            args.folder.written = files.write_hashed(Path(directory) / ARRAYS, safetensors.pieces(args.arrays))

        return [future.CommitFutureAwaitingContractedSignals(write(), name=ARRAYS)]

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError  # orbax asks for both, and calls async_save alone

    restore = save


@ocp.args.register_with_handler(_Arrays, for_save=True, for_restore=True)
@dataclasses.dataclass
class _SaveArrays(ocp.args.CheckpointArgs):
    arrays: dict[str, np.ndarray]
    folder: "Folder"


class Folder(contextlib.AbstractContextManager["Folder"]):
    """A folder of numbered checkpoints, which keeps the newest `keep`. Writing goes on in the background."""

    unsealed: Path  # the temporary folder of the checkpoint that is being written
    written = ""  # SHA-256 of its arrays

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.path = path.absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            cleanup_tmp_directories=True,  # which killed writers left
            multiprocessing_options=_alone(),
            create=False,  # orbax cannot, for one process alone
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._seal),
        )
        _one_line(self.path, lambda: self.path.mkdir(parents=True, exist_ok=True))
        self._manager = _one_line(self.path, lambda: ocp.CheckpointManager(self.path, options=options))

    def save(self, step: int, tree: Any, notes: dict[str, Any]) -> None:
        """Writes a pytree and notes, of types that JSON has, as checkpoint `step`.

        A step that is there already is kept.
        """
        self.wait()
        if not self.path.is_dir():
            raise UserError(f"{self.path}: the folder has vanished during training; bring it back, or train again")
        if step in self._manager.all_steps():
            return
        leaves = safetensors.named(tree)
        needed, free = sum(leaf.nbytes for leaf in leaves.values()), shutil.disk_usage(self.path).free
        if free < 1.1 * needed + SPARE:
            sizes = f"a checkpoint takes {needed / 1e6:.0f} MB and the disk has {free / 1e6:.0f} MB left"
            raise UserError(f"{self.path}: {sizes}; free some space and run the same command again")
        items = {TREE: _SaveArrays(jax.device_get(leaves), self), "notes": ocp.args.JsonSave(notes)}
        _one_line(self.path, lambda: self._manager.save(step, args=ocp.args.Composite(**items)))

    def wait(self) -> None:
        """Returns when all is on the disk. A failure to write is raised here."""
        _one_line(self.path, self._manager.wait_until_finished)

    def _seal(self) -> None:
        """Called by orbax when all files are written and before they get their final name."""
        names = {p.relative_to(self.unsealed).as_posix() for p in self.unsealed.rglob("*") if p.is_file()}
        manifest.write(self.unsealed, names.difference(UNREAD), {f"{TREE}/{ARRAYS}": self.written})

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            _one_line(self.path, self._manager.close)
        except UserError:
            if kind is None:  # an exception that is on its way says more
                raise


def _alone() -> ocp.options.MultiprocessingOptions:
    """Has orbax wait for no other process: each folder is written by one process."""
    own = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process{own}"
    )


def restore(path: Path, like: Any, damaged: Callable[[str], None] | None = None) -> tuple[Any, dict[str, Any]] | None:
    """The newest checkpoint under `path` as a tree like `like`, on its devices, and the notes;
    None where there is none.

    One that differs from its manifest is an error. With `damaged`, which gets a line about it, it is renamed,
    and the one before it is taken.
    """
    for step in steps(path):
        if not (fault := manifest.find_fault(path / str(step), READ)):
            return _load(path / str(step), like)
        if damaged is None:
            raise UserError(f"{path}/{step}: {fault}; copy it again from where it is whole, or train again")
        damaged(f"{path}/{step} is damaged: {fault}; set aside as damaged-{step}")
        names = (path / f"damaged-{step}{more}" for more in ("", *(f".{i}" for i in range(1, 1000))))
        os.replace(path / str(step), next(name for name in names if not name.exists()))
        if not steps(path):
            what = "no good checkpoint is left; copy one back, or delete the folder to train from the start"
            raise UserError(f"{path}: {what}")
    return None


def steps(path: Path) -> list[int]:
    """The steps of the checkpoints under `path`, newest first."""
    return sorted((int(p.name) for p in path.glob("*") if p.name.isdecimal()), reverse=True)


def _load(path: Path, like: Any) -> tuple[Any, dict[str, Any]]:
    arrays_file, notes_file = (path / name for name in READ)
    arrays, _ = safetensors.read(arrays_file, str(arrays_file), "train again")
    try:
        return safetensors.fit(arrays, like), json.loads(notes_file.read_bytes())
    except (ValueError, OSError) as e:  # its bytes are those that were written
        raise UserError(f"{path}: from another version or another network ({reason(e)}); train again") from e


def _one_line(path: Path, work: Callable[[], Any]) -> Any:
    """Runs `work`, and makes one line of an error of orbax or tensorstore, which may be pages long."""
    try:
        return work()
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
