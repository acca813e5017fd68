"""Checkpoints by orbax, as plain files that prove themselves.

A run keeps two folders. last/ holds the newest two states of the training; best/ holds the variables of the best
three validations. So if one checkpoint is damaged, another is left.
"""

# Orbax numbers the checkpoints, writes each on a thread of its own into a temporary folder, renames that folder when it
# is whole, and deletes old checkpoints and what killed writers left. Three things here are beside it, since orbax 0.12
# does not do them:
# - The arrays go into one safetensors file. Orbax's own format takes several times as long and loses some memory for
#   good in each save; see docs/reliability.md.
# - A manifest holds the SHA-256 of the files that are read, and restore() compares them. Orbax restores flipped bits.
# - In the place of a damaged checkpoint the one before it is taken. Orbax raises, or restores what it finds.

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
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
READ = (f"{TREE}/{ARRAYS}", "notes/metadata")  # what restore() reads of a checkpoint, and its manifest names


class _Arrays(ocp.AsyncCheckpointHandler):
    """Has orbax write arrays as one plain file."""

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
        self.path, own = path.absolute(), jax.process_index()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            cleanup_tmp_directories=True,  # which killed writers left
            multiprocessing_options=ocp.options.MultiprocessingOptions(  # each folder is written by one process
                primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process{own}"
            ),
            create=False,  # orbax cannot, for one process alone
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._seal),
        )
        with _one_line(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(self.path, options=options)

    def save(self, step: int, tree: Any, notes: dict[str, Any]) -> None:
        """Writes a pytree, and notes of types that JSON has, as checkpoint `step`; none where it or a later one is."""
        self.wait()
        if not self.path.is_dir():
            raise UserError(f"{self.path}: the folder has vanished during training; bring it back, or train again")
        items = {
            TREE: _SaveArrays(jax.device_get(safetensors.named(tree)), self),
            "notes": ocp.args.JsonSave(notes),
        }
        with _one_line(self.path):
            self._manager.save(step, args=ocp.args.Composite(**items))

    def wait(self) -> None:
        """Returns when all is on the disk. A failure to write is raised here."""
        with _one_line(self.path):
            self._manager.wait_until_finished()

    def _seal(self) -> None:
        """Called by orbax when all files are written and before they get their final name."""
        manifest.write(self.unsealed, READ, {READ[0]: self.written})

    def __exit__(self, kind: Any, *_: Any) -> None:
        # An exception that is on its way says more.
        with contextlib.suppress(UserError) if kind else contextlib.nullcontext(), _one_line(self.path):
            self._manager.close()


def restore(path: Path, like: Any, damaged: Callable[[str], None] | None = None) -> tuple[Any, dict[str, Any]] | None:
    """The newest checkpoint under `path` as a tree like `like`, on its devices, and the notes;
    None where there is none.

    One that differs from its manifest is an error. With `damaged`, which gets a line about it, it is renamed,
    and the one before it is taken.
    """
    found = steps(path)
    for step in found:
        if not (fault := manifest.find_fault(path / str(step), READ)):
            return _load(path / str(step), like)
        if damaged is None:
            raise UserError(f"{path}/{step}: {fault}; copy it again from where it is whole, or train again")
        aside = path / f"damaged-{step}"
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(path / str(step), aside)
        damaged(f"{path}/{step} is damaged: {fault}; set aside as {aside.name}")
    if found:
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
        return safetensors.as_tree(arrays, like), json.loads(notes_file.read_bytes())
    except ValueError as e:  # its bytes are those that were written
        raise UserError(f"{path}: from another version or another network ({reason(e)}); train again") from e


@contextlib.contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Makes one line of an error of orbax, which may be pages long."""
    try:
        yield
    except Exception as e:
        fix = "free some space or mend the folder, and give the same command again: the last whole one stays"
        raise UserError(f"{path}: the checkpoint cannot be written ({reason(e)}); {fix}") from e


def weights_hash(variables: Any) -> str:
    """SHA-256 over names, shapes and bytes of all arrays: the identity of a set of weights."""
    digest = hashlib.sha256()
    for path, leaf in sorted(((jax.tree_util.keystr(p), x) for p, x in jax.tree_util.tree_leaves_with_path(variables))):
        array = np.asarray(leaf)
        digest.update(f"{path} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
