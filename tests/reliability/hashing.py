"""Times checkpoints, with and without their hashes, and those of orbax's own format beside them."""

import contextlib
import hashlib
import statistics
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import orbax.checkpoint as ocp

from cxda_jax.disk import checkpoints, files, manifest

SIZES = {"the CNN's state": 7, "ResNet-50's state": 205}  # MB: parameters, statistics and momentum


def time_checkpoints(repeats: int = 10) -> dict[str, Any]:
    """Milliseconds that the training waits for a save, of the whole save, and of reading it again.

    Ours with and without hashes take turns, ten times as often as orbax's, which come last: they leave the disk with more to do.
    """
    rows = []
    for name, megabytes in SIZES.items():
        tree = {str(i): jax.random.normal(jax.random.key(i), (25_000,)) for i in range(10 * megabytes)}
        jax.block_until_ready(tree)
        rows.append({"state": name, "megabytes": megabytes, "repeats": repeats, **time_state(tree, repeats)})
    return {"failures": 0, "rows": rows}


def time_state(tree: Any, repeats: int) -> dict[str, dict[str, float]]:
    target = ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, tree))
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True, enable_async_checkpointing=True)
    with contextlib.ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ours, bare = (stack.enter_context(checkpoints.Folder(path / name)) for name in ("ours", "bare"))
        manager = stack.enter_context(ocp.CheckpointManager(path / "orbax", options=options))

        def of(folder: checkpoints.Folder) -> Any:
            return lambda step: folder.save(step, tree, {}), folder.wait, lambda: checkpoints.restore(folder.path, tree)

        actions = {"ours": of(ours), "without_hashes": of(bare), "orbax": (  # save, wait, restore
            lambda step: manager.save(step, args=ocp.args.StandardSave(tree)), manager.wait_until_finished,
            lambda: manager.restore(repeats, args=target),
        )}  # fmt: skip
        times = {name: {"call_ms": [], "whole_ms": [], "restore_ms": []} for name in actions}
        pair = ["ours", "without_hashes"]
        saves = [(step, name) for step in range(10 * repeats + 1) for name in pair[:: 1 - 2 * (step % 2)]]
        for step, name in saves + [(step, "orbax") for step in range(repeats + 1)]:
            save, wait, _ = actions[name]
            with hashes_of(name):
                began = time.perf_counter()
                save(step)
                times[name]["call_ms"].append(time.perf_counter() - began)
                wait()
                times[name]["whole_ms"].append(time.perf_counter() - began)
        for name in list(actions) * (repeats + 1):
            with hashes_of(name):
                began = time.perf_counter()
                jax.block_until_ready(actions[name][2]())
                times[name]["restore_ms"].append(time.perf_counter() - began)
    medians = {
        name: {what: 1e3 * statistics.median(s[1:]) for what, s in kinds.items()} for name, kinds in times.items()
    }
    hashed, unhashed = (times[name]["whole_ms"][1:] for name in pair)
    ratios = [a / b - 1 for a, b in zip(hashed, unhashed, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    error = 1.25 * (high - low) / 1.35 / len(ratios) ** 0.5  # of a median of normal values with these quartiles
    return medians | {"hashes": {"share_of_save": statistics.median(ratios), "standard_error": error}}


@contextlib.contextmanager
def hashes_of(name: str) -> Iterator[None]:
    """Inside, "without_hashes" saves and restores with no hash and no manifest."""
    if name != "without_hashes":
        yield
        return
    nothing = types.SimpleNamespace(update=lambda data: None, hexdigest=lambda: "")
    with (
        mock.patch.object(files, "hashlib", types.SimpleNamespace(sha256=lambda: nothing)),
        mock.patch.object(manifest, "write"),
        mock.patch.object(manifest, "find_fault", return_value=""),
    ):
        yield
    assert files.hashlib is hashlib
