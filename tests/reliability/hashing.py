"""What the manifest of a checkpoint costs."""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from cxda_jax import checkpoints

SIZES = {"the CNN's state": 7, "ResNet-50's state": 205}  # MB: parameters, statistics and momentum


def hashing(repeats: int = 5) -> dict[str, Any]:
    """Seconds of the training's thread, of the whole save, and of the hashing in the background."""
    rows, write = [], checkpoints.write_manifest
    for name, megabytes in SIZES.items():
        tree = {str(i): jax.random.normal(jax.random.key(i), (25_000,)) for i in range(10 * megabytes)}
        tree = jax.block_until_ready(jax.tree.map(jnp.asarray, tree))
        called, whole, hashed = [], [], []

        def timed(*args: Any, hashed: list[float] = hashed) -> None:
            began = time.perf_counter()
            write(*args)
            hashed.append(time.perf_counter() - began)

        checkpoints.write_manifest = timed
        try:
            with tempfile.TemporaryDirectory() as path, checkpoints.Folder(Path(path) / "last") as folder:
                for step in range(repeats + 1):
                    began = time.perf_counter()
                    folder.save(step, tree, {})
                    called.append(time.perf_counter() - began)
                    folder.wait()
                    whole.append(time.perf_counter() - began)
        finally:
            checkpoints.write_manifest = write
        times = {k: 1e3 * statistics.median(v[1:]) for k, v in
                 {"call_ms": called, "whole_ms": whole, "hashing_ms": hashed}.items()}  # fmt: skip
        rows.append({"state": name, "megabytes": megabytes, **times})
    return {"failures": 0, "rows": rows}
