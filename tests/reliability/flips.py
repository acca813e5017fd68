"""Flips one bit of one file, and looks whether that is noticed."""

import collections
import hashlib
import json
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cxda_jax import train
from cxda_jax.config import read
from cxda_jax.data.store import open_store, write_store
from cxda_jax.disk import checkpoints, models
from cxda_jax.disk.files import sealed
from cxda_jax.disk.reading import metrics_line
from cxda_jax.errors import UserError
from cxda_jax.experiment import build_on
from cxda_jax.progress import MetricsFile
from cxda_jax.study import identity
from cxda_jax.study.results import read_results
from tests.lines import write_config, write_run


def flip(times: int, seed: int) -> dict[str, Any]:
    """Flips bits of a run's files (its checkpoints, its model, and those beside them) and of a data set's.

    Each file is chosen as often as any other, so that small ones have their turn.
    """
    rng, outcomes, failures = random.Random(seed), collections.Counter(), []
    with tempfile.TemporaryDirectory(prefix="flips-") as name:
        folder = Path(name)
        things = make(folder)
        files = {
            name: sorted(p for p in path.glob("*" if name == "run" else "**/*") if p.is_file() and p.stat().st_size)
            for name, (path, _) in things.items()
        }
        whole = {name: read() for name, (_, read) in things.items()}
        for number in range(times):
            name = rng.choice(list(things))
            path = rng.choice(files[name])
            kept, told = path.read_bytes(), ""
            bit, data = rng.randrange(8 * len(kept)), bytearray(kept)
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            try:
                outcome = "without effect" if things[name][1]() == whole[name] else "silently wrong"
            except UserError as e:
                line = " ".join(str(e).replace(str(folder), "").split())
                outcome = "noticed" if len(line) <= 200 else "noticed at length"
            except Exception as e:  # a traceback is a failure too
                outcome, told = type(e).__name__, f": {str(e)[:200]}"
            outcomes[f"{name}: {outcome}"] += 1
            if outcome not in ("noticed", "without effect"):
                failures.append(f"{name}: bit {bit} of {path.relative_to(folder)}{told}: {outcome}")
                print(failures[-1], flush=True)
            path.write_bytes(kept)
            if (number + 1) % 200 == 0:
                print(f"{number + 1}/{times}", dict(outcomes), flush=True)
        assert {name: read() for name, (_, read) in things.items()} == whole
    return {"times": times, "failures": len(failures), "outcomes": dict(outcomes),
            "files": {name: len(found) for name, found in files.items()}, "trials": failures}  # fmt: skip


def make(folder: Path) -> dict[str, tuple[Path, Callable[[], Any]]]:
    """Folders, each with a function that reads it and returns something that equals itself only if all it read is the same."""
    from tests import conftest  # not above: it makes JAX compile in another way than what is measured beside this

    rng = np.random.default_rng(0)
    write_store(folder / "data", conftest.INFO, conftest.make_domains(sizes=(12,) * 4))
    store = open_store(folder / "data")
    config = read("glyphs:cxda,smoke")
    config["net"]["width"], config["attention"]["heads"] = 8, 1
    config["episode"] |= {"num_domains": 1, "per_domain": 4, "num_query": 4}
    experiment = build_on(config, store, ("train",))

    def noisy(x: Any) -> Any:
        return x + jax.numpy.asarray(rng.normal(size=x.shape), x.dtype) if x.dtype.kind == "f" else x

    state = train.init_state(experiment.method, experiment.optimizer, 0, experiment.example)
    state, notes, run = jax.tree.map(noisy, state), {"best": {"score": 0.5, "step": 4}, "seconds": 1.5}, folder / "run"
    write_run(run)
    with checkpoints.Folder(run / "last") as last, checkpoints.Folder(run / "best") as best:
        last.save(4, state, notes)
        best.save(4, state.variables, notes["best"])
    about = identity.new_record(store)._replace(steps=4, reached_step=4)._asdict()
    models.write_model(run / "model", state.variables, config, notes, about)
    add_results(run, config)

    def of_weights(found: Any) -> tuple[str, Any]:
        return checkpoints.weights_hash(found[0]), found[1]

    def reopened() -> Any:
        found = checkpoints.restore(run / "last", state)
        with checkpoints.Folder(run / "last"):  # a training that goes on opens this too
            return of_weights(found)

    def a_model() -> Any:
        found = models.read_model(run / "model", state.variables)
        return of_weights(found), identity.read_config(run / "model"), identity.read_record(run / "model")

    def data() -> Any:
        found = open_store(folder / "data")
        arrays = [array.tobytes() for array in (found.offsets, found.images, found.labels)]
        return found.info, found.domain_names, found.split, arrays

    return {
        "last": (run / "last", reopened),
        "best": (run / "best", lambda: of_weights(checkpoints.restore(run / "best", state.variables))),
        "model": (run / "model", a_model),
        "run": (run, lambda: read_run(run)),
        "data": (folder / "data", data),
    }


def add_results(run: Path, config: dict[str, Any]) -> None:
    """What training and testing leave beside the checkpoints: curves, costs, a sealed result and attention weights."""
    rng = np.random.default_rng(1)
    write_config(run, config, "1")
    lines = [{"step": i, "loss": float(rng.normal()), "accuracy": 0.5} for i in range(1, 5)]
    lines.append({"step": 4, "val_score": 0.5, "seconds": 1.5})
    (run / "metrics.jsonl").write_text("".join(map(metrics_line, lines)))
    (run / "cost.json").write_text('{"seconds": 1.5}')
    np.savez(run / "attention.npz", weights=rng.random((2, 4, 1, 6)))
    row = json.loads((run / "result.json").read_text())
    row |= {f"{path.stem}_sha256": hashlib.sha256(path.read_bytes()).hexdigest() for path in run.glob("*.npz")}
    (run / "result.json").write_text(json.dumps(sealed(row)))


def read_run(run: Path) -> Any:
    """Everything that training, tests and reports read of a run. Anything that they say to the user counts as noticed."""
    said: list[str] = []
    kept = run.parent / "metrics.jsonl"
    shutil.copy(run / "metrics.jsonl", kept)
    with MetricsFile(kept, 4, log=said.append):
        pass
    config, record = identity.read_config(run), identity.read_record(run)
    results, faults = read_results([run])
    if said or faults:
        raise UserError((said + faults)[0])
    (result,) = results
    try:
        arrays = [{k: v.tolist() for k, v in result.stored(name).items()} for name in ("predictions", "attention")]
    except ValueError as e:
        raise UserError(str(e)) from e
    return config, record, result.row, arrays, result.curve(), kept.read_text()
