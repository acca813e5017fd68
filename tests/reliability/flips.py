"""One bit of one file, flipped, and what comes of it."""

import collections
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cxda_jax import artefact, checkpoints, train
from cxda_jax.data.store import Domain, StoreInfo, open_store, write_store
from cxda_jax.experiment import build_on
from cxda_jax.types import UserError
from launch import cli


def flip(times: int, seed: int) -> dict[str, Any]:
    """Trials over a checkpoint of a training, the best weights, a model's files and a data set; files are chosen alike,
    so that the small ones have their turn."""
    rng, outcomes, failures = random.Random(seed), collections.Counter(), []
    folder = Path(tempfile.mkdtemp(prefix="flips-"))
    try:
        things = make(folder)
        files = {
            name: sorted(p for p in path.rglob("*") if p.is_file() and p.stat().st_size)
            for name, (path, _) in things.items()
        }
        whole = {name: read() for name, (_, read) in things.items()}
        for number in range(times):
            name = rng.choice(list(things))
            path = rng.choice(files[name])
            data = bytearray(path.read_bytes())
            bit = rng.randrange(8 * len(data))
            data[bit // 8] ^= 1 << bit % 8
            kept = path.read_bytes()
            path.write_bytes(data)
            where = f"{name}: bit {bit} of {path.relative_to(folder)}"
            try:
                same = things[name][1]() == whole[name]
                outcome = "without effect" if same else "silently wrong"
            except UserError as e:
                outcome = (
                    "noticed" if len(" ".join(str(e).replace(str(folder), "").split())) <= 200 else "noticed at length"
                )
            except Exception as e:  # a traceback is a failure too
                outcome, where = f"{type(e).__name__}", f"{where}: {str(e)[:200]}"
            outcomes[f"{name}: {outcome}"] += 1
            if outcome not in ("noticed", "without effect"):
                failures.append(f"{where}: {outcome}")
                print(failures[-1], flush=True)
            path.write_bytes(kept)
            if (number + 1) % 200 == 0:
                print(f"{number + 1}/{times}", dict(outcomes), flush=True)
        assert {name: read() for name, (_, read) in things.items()} == whole
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    counted = {name: len(found) for name, found in files.items()}
    return {"times": times, "failures": len(failures), "outcomes": dict(outcomes), "files": counted, "trials": failures}


def make(folder: Path) -> dict[str, tuple[Path, Callable[[], Any]]]:
    """Folders, each with what reads it and returns the identity of all it read."""
    rng = np.random.default_rng(0)
    domains = [
        Domain(f"d{i}", split, rng.integers(0, 256, (12, 16, 16, 1), np.uint8), rng.integers(0, 4, 12))
        for i, split in enumerate(["train", "train", "val", "test"])
    ]
    write_store(folder / "data", StoreInfo("tiny", tuple("abcd"), (0.5,), (0.5,)), domains)
    store = open_store(folder / "data")
    config = cli.resolve(cli.load_config("configs/glyphs.py:cxda,smoke"))
    config["net"]["width"], config["attention"]["heads"] = 8, 1
    config["episode"] = {**config["episode"], "num_domains": 1, "per_domain": 4, "num_query": 4}
    experiment = build_on(config, store, ("train",))
    state = train.init_state(experiment.method, experiment.optimizer, 0, experiment.example)
    state = jax.tree.map(
        lambda x: x if x.dtype.kind != "f" else x + jax.numpy.asarray(rng.normal(size=x.shape), x.dtype), state
    )
    notes = {"best": {"score": 0.5, "step": 4}, "seconds": 1.5}
    with checkpoints.Folder(folder / "last") as last, checkpoints.Folder(folder / "best") as best:
        last.save(4, state, notes)
        best.save(4, state.variables, notes["best"])
    artefact.write_model(folder / "model", state.variables, config, notes)

    def identity(found: Any) -> tuple[str, Any]:
        return checkpoints.weights_hash(found[0]), found[1]

    def reopened() -> Any:
        found = checkpoints.restore(folder / "last", state)
        with checkpoints.Folder(folder / "last"):  # which training opens too, to go on
            return identity(found)

    def data() -> Any:
        opened = open_store(folder / "data")
        return (
            opened.info,
            opened.domain_names,
            opened.split,
            opened.offsets.tolist(),
            opened.images.tobytes(),
            opened.labels.tobytes(),
        )

    return {
        "last": (folder / "last", reopened),
        "best": (folder / "best", lambda: identity(checkpoints.restore(folder / "best", state.variables))),
        "model": (folder / "model", lambda: identity(artefact.read_model(folder / "model", state.variables))),
        "data": (folder / "data", data),
    }
