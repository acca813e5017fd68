"""What a checkpoint costs, the part of its hashes in that, and what orbax's own format costs beside."""

import contextlib
import hashlib
import statistics
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from cxda_jax import checkpoints, files, manifest

SIZES = {"the CNN's state": 7, "ResNet-50's state": 205}  # MB: parameters, statistics and momentum


def hashing(repeats: int = 10) -> dict[str, Any]:
    """Milliseconds that the training waits for a save, of the whole save, and of reading it again: ours and ours
    without hashes in turn, ten times as often, then orbax's, which leaves the disk with more to do."""
    rows = []
    for name, megabytes in SIZES.items():
        tree = {str(i): jax.random.normal(jax.random.key(i), (25_000,)) for i in range(10 * megabytes)}
        tree = jax.block_until_ready(jax.tree.map(jnp.asarray, tree))
        rows.append({"state": name, "megabytes": megabytes, "repeats": repeats, **measure(tree, repeats)})
    return {"failures": 0, "rows": rows}


def measure(tree: Any, repeats: int) -> dict[str, dict[str, float]]:
    target = ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, tree))
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True, enable_async_checkpointing=True)
    with contextlib.ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ours, bare = (stack.enter_context(checkpoints.Folder(path / name)) for name in ("ours", "bare"))
        manager = stack.enter_context(ocp.CheckpointManager(path / "orbax", options=options))
        saves: dict[str, tuple[Callable[[int], Any], Callable[[], Any]]] = {
            "ours": (lambda step: ours.save(step, tree, {}), ours.wait),
            "without_hashes": (lambda step: bare.save(step, tree, {}), bare.wait),
            "orbax": (lambda step: manager.save(step, args=ocp.args.StandardSave(tree)), manager.wait_until_finished),
        }
        restores: dict[str, Callable[[], Any]] = {
            "ours": lambda: checkpoints.restore(ours.path, tree),
            "without_hashes": lambda: checkpoints.restore(bare.path, tree),
            "orbax": lambda: manager.restore(repeats, args=target),
        }
        times: dict[str, dict[str, list[float]]] = {
            name: {"call_ms": [], "whole_ms": [], "restore_ms": []} for name in saves
        }
        pair = ["ours", "without_hashes"]
        rounds = [(step, pair[:: 1 - 2 * (step % 2)]) for step in range(10 * repeats + 1)]
        for step, order in rounds + [(step, ["orbax"]) for step in range(repeats + 1)]:
            for name in order:
                save, wait = saves[name]
                with unhashed() if name == "without_hashes" else contextlib.nullcontext():
                    began = time.perf_counter()
                    save(step)
                    times[name]["call_ms"].append(time.perf_counter() - began)
                    wait()
                    times[name]["whole_ms"].append(time.perf_counter() - began)
        for _ in range(repeats + 1):
            for name, restore in restores.items():
                with unhashed() if name == "without_hashes" else contextlib.nullcontext():
                    began = time.perf_counter()
                    jax.block_until_ready(restore())
                    times[name]["restore_ms"].append(time.perf_counter() - began)
    medians = {
        name: {what: 1e3 * statistics.median(found[1:]) for what, found in kinds.items()}
        for name, kinds in times.items()
    }
    hashed, bare_times = (times[name]["whole_ms"][1:] for name in ("ours", "without_hashes"))
    ratios = [a / b - 1 for a, b in zip(hashed, bare_times, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    error = 1.25 * (high - low) / 1.35 / len(ratios) ** 0.5  # of a median of normal values with these quartiles
    return medians | {"hashes": {"share_of_save": statistics.median(ratios), "standard_error": error}}


@contextlib.contextmanager
def unhashed() -> Iterator[None]:
    """Saving and restoring with no manifest."""

    class Nothing:
        def update(self, _: Any) -> None: ...

        def hexdigest(self) -> str:
            return ""

    with (
        mock.patch.object(files, "hashlib", types.SimpleNamespace(sha256=Nothing)),
        mock.patch.object(manifest, "write"),
        mock.patch.object(manifest, "find_fault", return_value=""),
    ):
        yield
    assert files.hashlib is hashlib
