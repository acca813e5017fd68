"""What evaluations left on disk, read back: no device, no data set and no compiler is needed.

A folder of results holds result.json (the row), predictions.npz (plans, labels, predictions) and, for methods that
attend, attention.npz. What cannot be read, or contradicts itself, becomes a fault of one line, and the rest goes on.
"""

import json
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cxda_jax import metrics

_DERIVED = ("avg", "w10")


class Result(NamedTuple):
    """One evaluation of one checkpoint."""

    row: Mapping[str, Any]  # result.json
    config: Mapping[str, Any]  # of its run
    folder: Path  # of the results
    run: Path  # of the training: config.json, metrics.jsonl

    def stored(self, name: str = "predictions") -> dict[str, np.ndarray]:
        """The arrays of NAME.npz."""
        try:
            with open(self.folder / f"{name}.npz", "rb") as opened, np.load(opened, allow_pickle=False) as file:
                return dict(file)
        except zipfile.BadZipFile as e:
            raise ValueError(f"{name}.npz: {e}") from None

    def scores(self) -> np.ndarray:
        """Of each task, from the stored predictions [tasks]."""
        stored = self.stored()
        return metrics.scores(self.row["metric"], stored["predictions"], stored["labels"])

    def curve(self) -> list[dict[str, float]]:
        """The lines of metrics.jsonl; none where they did not come along."""
        path = self.run / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


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
                faults.append(f"{e.filename}: missing; evaluate again: python -m launch.evaluate --runs={run}")
            except (OSError, ValueError, KeyError, EOFError) as e:
                faults.append(
                    f"{path.parent}: not readable ({e}); evaluate again: python -m launch.evaluate --runs={run}"
                )
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


def _read(run: Path, folder: Path) -> Result:
    row = json.loads((folder / "result.json").read_text())
    result = Result(row, json.loads((run / "config.json").read_text()), folder, run)
    scores = result.scores()
    again = {"avg": 100 * float(scores.mean()), "w10": 100 * metrics.worst_decile(scores)}
    for name in _DERIVED:
        if abs(row[name] - again[name]) > 1e-6:
            raise ValueError(f"{name} is {row[name]:.4f}, but the predictions give {again[name]:.4f}")
    return result
