"""What a checkpoint costs, its manifest's share of that, and what orbax's own format costs beside."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from cxda_jax import checkpoints

SIZES = {"the CNN's state": 7, "ResNet-50's state": 205}  # MB: parameters, statistics and momentum


def hashing(repeats: int = 5) -> dict[str, Any]:
    """Milliseconds that the training waits for a save, of the whole save, of its hashing, and of reading it again."""
    rows = []
    for name, megabytes in SIZES.items():
        tree = {str(i): jax.random.normal(jax.random.key(i), (25_000,)) for i in range(10 * megabytes)}
        tree = jax.block_until_ready(jax.tree.map(jnp.asarray, tree))
        ours, theirs = measure_ours(tree, repeats), measure_orbax(tree, repeats)
        rows.append({"state": name, "megabytes": megabytes, **ours, "orbax": theirs})
    return {"failures": 0, "rows": rows}


def measure_ours(tree: Any, repeats: int) -> dict[str, float]:
    hashed, write = [], checkpoints.write_manifest

    def timed(*args: Any) -> None:
        began = time.perf_counter()
        write(*args)
        hashed.append(time.perf_counter() - began)

    checkpoints.write_manifest = timed
    try:
        with tempfile.TemporaryDirectory() as path, checkpoints.Folder(Path(path) / "last") as folder:
            times = measure(
                lambda step: folder.save(step, tree, {}),
                folder.wait,
                lambda: checkpoints.restore(folder.path, tree),
                repeats,
            )
    finally:
        checkpoints.write_manifest = write
    return times | {"hashing_ms": 1e3 * statistics.median(hashed[1:])}


def measure_orbax(tree: Any, repeats: int) -> dict[str, float]:
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True, enable_async_checkpointing=True)
    target = ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, tree))
    with tempfile.TemporaryDirectory() as path, ocp.CheckpointManager(Path(path) / "last", options=options) as manager:
        return measure(
            lambda step: manager.save(step, args=ocp.args.StandardSave(tree)),
            manager.wait_until_finished,
            lambda: manager.restore(repeats, args=target),
            repeats,
        )


def measure(
    save: Callable[[int], Any], wait: Callable[[], Any], restore: Callable[[], Any], repeats: int
) -> dict[str, float]:
    times: dict[str, list[float]] = {"call_ms": [], "whole_ms": [], "restore_ms": []}
    for step in range(repeats + 1):
        began = time.perf_counter()
        save(step)
        times["call_ms"].append(time.perf_counter() - began)
        wait()
        times["whole_ms"].append(time.perf_counter() - began)
    for _ in range(repeats + 1):
        began = time.perf_counter()
        jax.block_until_ready(restore())
        times["restore_ms"].append(time.perf_counter() - began)
    return {name: 1e3 * statistics.median(found[1:]) for name, found in times.items()}
