"""Looks for what the package needs on this machine, and says how to mend what is missing."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cxda_jax.errors import UserError
from cxda_jax.version import VERSION

NEEDED = ("jax", "flax", "optax", "orbax-checkpoint", "ml_collections", "numpy", "scipy", "matplotlib", "pillow",
          "absl-py", "safetensors")  # fmt: skip
OPTIONAL = {
    "tensorflow": ("streams images larger than the device (train.source=tfdata)", "pip install 'cxda_jax[data]'"),
    "torch": ("reads .pth weights, and is the peer of python -m tools.bench", "pip install 'cxda_jax[torch]'"),
    "ai_edge_litert": ("runs exports to LiteRT", "pip install 'cxda_jax[export]'"),
    "onnxruntime": ("runs encoders of cxda features", "pip install 'cxda_jax[onnx]'"),
    "sklearn": ("is what cxda_jax.CXDAClassifier fits in", "pip install 'cxda_jax[sklearn]'"),
    "jax2onnx": ("exports to ONNX", "pip install 'cxda_jax[export]'"),
}
GB, LEAST = 1e9, 2e9  # bytes; the least of memory, and on the disk of the data sets


class Finding(NamedTuple):
    """One thing that was looked for: its state, and the remedy where something is wrong."""

    name: str
    found: str
    fix: str = ""
    wrong: bool = False  # work is not possible without the fix

    def __str__(self) -> str:
        mark = "WRONG" if self.wrong else "missing" if self.fix else "ok"
        return f"{mark:<8}{self.name:<15}{self.found}" + (f"; {self.fix}" if self.fix else "")


def examine(data_dir: str | Path) -> Iterator[Finding]:
    """Looks at one thing after another. `data_dir` is where data sets are kept."""
    yield Finding("cxda_jax", f"{VERSION} in {Path(__file__).parents[1]}, Python {platform.python_version()}")
    if missing := [name for name in NEEDED if not _version(name)]:
        yield Finding("packages", f"no {', '.join(missing)}", f"pip install {' '.join(missing)}", wrong=True)
        return
    yield Finding("packages", ", ".join(f"{name} {_version(name)}" for name in NEEDED[:4]))
    yield _devices()
    for name, (what, fix) in OPTIONAL.items():
        there = importlib.util.find_spec(name) is not None
        yield Finding(name, _version(name) or "is there" if there else f"is not there; it {what}", "" if there else fix)
    node = shutil.which("node")
    yield Finding(
        "node", node or "is not there; it checks pages that cxda export writes", "" if node else "install Node.js 18"
    )
    from cxda_jax.machine import memory  # which needs the packages

    if (free := memory.available()) is not None:
        low = free < LEAST
        yield Finding("memory", f"{free / GB:.1f} GB free", "end other programs" if low else "", wrong=low)
    yield _data(Path(data_dir))
    yield _cache()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _devices() -> Finding:
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as e:
        return Finding("devices", " ".join(str(e).split())[:100], "JAX_PLATFORMS=cpu works without them", wrong=True)
    what = f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform}), {os.cpu_count()} CPU cores"
    unused = devices[0].platform == "cpu" and shutil.which("nvidia-smi")
    fix = "pip install -U 'jax[cuda12]' or 'jax[cuda13]'" if unused else ""
    return Finding("devices", what + (", but an NVIDIA GPU is there" if unused else ""), fix)


def _data(folder: Path) -> Finding:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(there, os.W_OK):
        return Finding("data", f"{folder} cannot be written", "set $CXDA_DATA_DIR to a folder that can be", wrong=True)
    if (free := shutil.disk_usage(there).free) < LEAST:
        return Finding("data", f"{folder}: {free / GB:.1f} GB free", "free some space", wrong=True)
    stores = ", ".join(sorted(path.parent.name for path in folder.glob("*/store.json")))
    return Finding("data", f"{folder}: {free / GB:.0f} GB free; {f'stores: {stores}' if stores else 'no store yet'}")


def _cache() -> Finding:
    from cxda_jax.machine import backend

    try:
        folder = backend.keep_compiled(warn=lambda _: None)
    except UserError as e:
        return Finding("cache", str(e), wrong=True)
    if folder is None:
        fix = "set $JAX_COMPILATION_CACHE_DIR to one that can be written"
        return Finding("cache", "no folder for compiled programs", fix)
    held = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return Finding("cache", f"{folder}: {len(held)} compiled programs, {sum(held) / GB:.2f} GB")
