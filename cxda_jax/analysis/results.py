"""What evaluations left on disk, read back: no device, no data set and no compiler is needed.

A folder of results holds result.json (the row), predictions.npz (plans, labels, predictions) and, for methods that
attend, attention.npz. What cannot be read, or contradicts itself, becomes a fault of one line, and the rest goes on.
"""

import hashlib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cxda_jax import metrics
from cxda_jax.reading import MAYBE, NUMBER, read_lines, read_object, reason, require
from cxda_jax.types import UserError, brief

_DERIVED = ("avg", "w10")
# Of result.json, what tables, figures and the page cannot do without.
_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("method", "version", "benchmark", "metric", "device", "package"), str),
    **dict.fromkeys(("config_hash", "weights_hash", "data_hash"), str),
    **dict.fromkeys(("seed", "num_tasks", "steps"), int),
    **dict.fromkeys((*_DERIVED, "task_ms", "adapt_ms", "predict_ms"), NUMBER),
    "train_minutes": MAYBE,
}
_ARRAYS = ("support", "query", "labels", "predictions")


class Result(NamedTuple):
    """One evaluation of one checkpoint."""

    row: Mapping[str, Any]  # result.json
    config: Mapping[str, Any]  # of its run
    folder: Path  # of the results
    run: Path  # of the training: config.json, metrics.jsonl

    def stored(self, name: str = "predictions") -> dict[str, np.ndarray]:
        """The arrays of NAME.npz; of predictions, those whose hash the row holds, if it holds one."""
        told = self.row.get(f"{name}_sha256")
        try:
            with open(self.folder / f"{name}.npz", "rb") as opened:
                if not zipfile.is_zipfile(opened):
                    raise ValueError("cut short, or no such file at all")
                opened.seek(0)
                if told and hashlib.file_digest(opened, "sha256").hexdigest() != told:
                    raise ValueError("differs from the hash in result.json")
                opened.seek(0)
                with np.load(opened, allow_pickle=False) as file:
                    return dict(file)
        except FileNotFoundError:
            raise
        except Exception as e:  # whatever numpy and its archives make of a broken file
            raise ValueError(f"{name}.npz: {reason(e)}") from None

    def scores(self) -> np.ndarray:
        """Of each task, from the stored predictions [tasks]."""
        stored = self.stored()
        return metrics.scores(self.row["metric"], stored["predictions"], stored["labels"])

    def curve(self) -> list[dict[str, float]]:
        """The lines of metrics.jsonl; none where they did not come along."""
        path = self.run / "metrics.jsonl"
        return read_lines(path) if path.exists() else []


def read_results(runs: Iterable[Path]) -> tuple[list[Result], list[str]]:
    """All results in the folders of runs, and the faults met."""
    found, faults = [], []
    for run in sorted(set(runs)):
        paths = sorted(run.glob("**/result.json"))
        if not paths:
            faults.append(f"{run}: no result.json; evaluate it: python -m launch.evaluate --runs={run}")
        for path in paths:
            try:
                found.append(_read(run, path.parent))
            except FileNotFoundError as e:
                faults.append(f"{e.filename}: missing; {_again(run)}")
            except UserError as e:
                faults.append(str(e))
            except (OSError, ValueError) as e:
                faults.append(f"{path.parent}: not readable ({reason(e, 120)}); {_again(run)}")
    return found, faults


def distinct(results: Iterable[Result]) -> tuple[list[Result], list[str]]:
    """The first result of each benchmark, label and seed; the others become faults."""
    kept: dict[tuple, Result] = {}
    faults = []
    for result in results:
        row = result.row
        first = kept.setdefault((row["benchmark"], row.get("label") or row["method"], row["seed"]), result)
        if first is not result:
            faults.append(f"{result.folder}: left out, since {first.folder} has the same method, setting and seed")
    return list(kept.values()), faults


def _again(run: Path) -> str:
    return f"evaluate again: python -m launch.evaluate --runs={run}"


def _read(run: Path, folder: Path) -> Result:
    row = read_object(folder / "result.json", _again(run))
    require(row, _FIELDS, f"{folder}/result.json", _again(run))
    row.setdefault("label", row["method"])
    if row["metric"] not in metrics.METRICS:
        raise ValueError(f"metric={brief(repr(row['metric']))} is not one of {', '.join(metrics.METRICS)}")
    config = read_object(run / "config.json", _again(run))
    require(config, {"method": str, "episode": dict}, f"{run}/config.json", _again(run))
    require(config["episode"], {"num_domains": int, "per_domain": int}, f"{run}/config.json: episode", _again(run))
    result = Result(row, config, folder, run)
    stored = result.stored()
    lacking = [name for name in _ARRAYS if name not in stored]
    if lacking:
        raise ValueError(f"predictions.npz: no {lacking[0]}")
    shape = stored["labels"].shape
    if len(shape) != 2 or 0 in shape or stored["predictions"].shape != shape:
        raise ValueError(f"predictions.npz: predictions {stored['predictions'].shape} for labels {shape}")
    scores = result.scores()
    again = {"avg": 100 * float(scores.mean()), "w10": 100 * metrics.worst_decile(scores)}
    for name in _DERIVED:
        if not abs(row[name] - again[name]) <= 1e-6:
            raise ValueError(f"{name} is {row[name]:.4f}, but the predictions give {again[name]:.4f}")
    return result
