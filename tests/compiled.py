"""Keeps what one run of the tests compiled for the next run on the same machine.

    python -m tests.compiled take FOLDER    fills a run's own cache of JAX from the user's
    python -m tests.compiled keep FOLDER    brings what is new in it back

JAX writes an entry of its cache in place, so a process that is killed leaves half of one. The user's cache holds whole
entries alone: each is a compressed stream that ends, is written beside its place and then renamed, and has its hash in
its name. What is not so there is removed, and costs the time to compile it again.
"""

import atexit
import contextlib
import hashlib
import os
import platform
import shutil
import sys
import tempfile
import time
import zlib
from importlib.metadata import version
from pathlib import Path

DAY = 24 * 3600.0
DAYS = 30  # an entry is compiled anew after these


def user_cache() -> Path:
    """One folder for each processor, version and set of flags, since a processor may not run another one's programs."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    cpu = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "JAX_PLATFORMS")]
    told = repr([platform.machine(), cpu, flags, version("jaxlib"), platform.python_version()])
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "cxda_jax" / "compiled" / hashlib.sha256(told.encode()).hexdigest()[:16]


def whole(entry: bytes) -> bool:
    """Whether a stream of zlib ends where the file ends. JAX prefers Zstandard where that is installed: not kept."""
    stream = zlib.decompressobj()
    try:
        stream.decompress(entry)
    except zlib.error:
        return False
    return stream.eof and not stream.unused_data


def name_of(kept: Path) -> str | None:
    """The name that JAX gave to an entry; None for what is no entry, or is not what was written."""
    name, _, digest = kept.name.rpartition("~")
    if name and kept.is_file() and hashlib.sha256(kept.read_bytes()).hexdigest() == digest:
        return name
    return None


def take(folder: Path, cache: Path | None = None) -> int:
    """How many programs it found."""
    cache, found = cache or user_cache(), 0
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for kept in cache.iterdir() if cache.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):  # another run may remove or rename it meanwhile
            name, age = name_of(kept), time.time() - kept.stat().st_mtime
            if name and age < DAYS * DAY:
                shutil.copyfile(kept, folder / name)
                found += 1
            elif kept.is_file() and (age > DAY or not kept.name.startswith(".")):  # else it may be being written
                kept.unlink()
    return found


def keep(folder: Path, cache: Path | None = None) -> int:
    """How many programs were new."""
    cache, new = cache or user_cache(), 0
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    known = {path.name.rpartition("~")[0] for path in cache.iterdir()}
    for path in folder.glob("*-cache"):
        entry = path.read_bytes()
        if path.name not in known and whole(entry):
            beside = cache / f".{os.getpid()}"
            beside.write_bytes(entry)
            beside.replace(cache / f"{path.name}~{hashlib.sha256(entry).hexdigest()}")
            new += 1
    return new


def share_programs():
    """Equal programs of all tests and of their commands are compiled once. The first process makes the folder."""
    # Else a program's name depends on that folder, and no later run finds it.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "none")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="cxda_jax_compiled_"))
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
        take(folder)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        atexit.register(keep, folder)  # what is registered last runs first


if __name__ == "__main__":
    done = {"take": take, "keep": keep}[sys.argv[1]](Path(sys.argv[2]))
    print(f"{user_cache()}: {'found' if sys.argv[1] == 'take' else 'added'} {done} programs")
