"""Results written into the folders of runs and read back. No device, no data set and no compiler is needed.

A folder of results holds result.json (the fields of a Result), predictions.npz (plans, labels, predictions) and, for
methods that attend, attention.npz. A result that cannot be read, or contradicts itself, becomes a fault of one line;
the rest goes on.
"""

import dataclasses
import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cxda_jax.disk import files, folders, manifest
from cxda_jax.disk.reading import read_lines, read_object, reason
from cxda_jax.errors import UserError
from cxda_jax.studies import records
from cxda_jax.studies.result import METRICS, Result, from_row, make_tasks, read_arrays, to_row
from cxda_jax.training import metrics

FILES = ("predictions.npz", "attention.npz", "result.json")  # of a result
COMMAS = 20  # in the path of a run, at most


def find_runs(patterns: Sequence[str]) -> list[Path]:
    """Directories that match and hold a config.json."""
    found: list[Path] = []
    matches, rest = [], list(patterns)
    while rest:
        for count in range(min(len(rest), COMMAS + 1), 0, -1):  # the list was split at commas, which names may have too
            matches = matching(",".join(rest[:count]))
            if runs := [path for path in matches if (path / "config.json").exists()]:
                break
        else:
            what = "nothing that matches holds a config.json" if matches else "nothing matches"
            raise UserError(f"--runs={rest[0]}: {what}; name run directories that cxda train made")
        found += [run for run in runs if run not in found]
        del rest[:count]
    return found


def matching(pattern: str) -> list[Path]:
    """The paths that a pattern matches.

    As far as it names what exists it is taken as it stands: names may have brackets too.
    """
    literal, parts = "", list(Path(pattern).parts or [pattern])
    while parts and os.path.exists(os.path.join(literal, parts[0])):
        literal = os.path.join(literal, parts.pop(0))
    return [Path(p) for p in sorted(glob.glob(os.path.join(glob.escape(literal), *parts)))]


def read_results(
    places: Iterable[Path], said: Callable[[int], None] = lambda done: None
) -> tuple[list[Result], list[str]]:
    """All results in folders of runs and in files of records, and the faults met.

    `said` is called with the number of places read so far.
    """
    results, faults = [], []
    for done, run in enumerate(sorted(set(places))):
        said(done)
        if run.suffix == records.SUFFIX and run.is_file():
            results += records.read(run)
            continue
        paths = [path for path in sorted(run.glob("**/result.json")) if not path.parent.name.startswith(folders.HIDDEN)]
        damaged: list[int] = []
        if (run / METRICS).is_file():
            read_lines(run / METRICS, damaged.extend)
        if damaged:
            what = f"line {damaged[0]} is" if len(damaged) == 1 else f"{len(damaged)} lines are"
            faults.append(f"{run / METRICS}: {what} damaged and left out of curves and minutes")
        if not paths:
            faults.append(f"{run}: no result.json; evaluate it: cxda evaluate --runs={run}")
        for path in paths:
            try:
                results.append(read_result(run, path.parent))
            except FileNotFoundError as e:
                faults.append(f"{e.filename}: missing; {_again(run)}")
            except UserError as e:
                faults.append(str(e))
            except (OSError, ValueError, ArithmeticError) as e:
                faults.append(f"{path.parent}: not readable ({reason(e, 120)}); {_again(run)}")
    return results, faults


def read_study(folder: Path, benchmark: str) -> tuple[list[Result], list[str]]:
    """All results of a study's folder that are of its benchmark, and the faults met."""
    results, faults = read_results(path.parent for path in folder.glob("*/*/config.json"))
    others = [r for r in results if r.benchmark != benchmark]
    faults += [f"{r.folder}: left out, since it is of {r.benchmark}" for r in others]
    return [r for r in results if r.benchmark == benchmark], faults


def _check_run(result: Result) -> None:
    """Raises a ValueError where a run's config, or the data that it was trained on, are not those of the result.

    Runs of older versions have no manifest to tell it.
    """
    if not (result.run / manifest.NAME).is_file():
        return
    if fault := manifest.find_fault(result.run, ["config.json"]):
        raise ValueError(fault)
    known, told = manifest.read_about(result.run).get("data_hash", ""), result.trained_on
    if known and told not in (None, known):
        raise ValueError("the run has been trained on other data since it was tested")
    if told not in (None, result.data_hash) and not result.data_marks:
        raise ValueError("it was tested on other data than its run was trained on, and has no mark that says so")


def _again(run: Path) -> str:
    return f"evaluate again: cxda evaluate --runs={run}"


def write_result(result: Result) -> Result:
    """Writes a result into its folder, all files at once, and returns it as it is read from there."""
    with folders.replaced(result.folder, lambda _: FILES) as new:
        hashes = {f"{name}_sha256": write_arrays(new / f"{name}.npz", kept) for name, kept in result.arrays.items()}
        result = dataclasses.replace(result, arrays={}, unadapted=None, **hashes)
        files.write_text(new / "result.json", json.dumps(files.sealed(to_row(result)), indent=1) + "\n")
    return result


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> str:
    """Writes a .npz file and returns its SHA-256."""
    files.write_whole(path, lambda partial: np.savez_compressed(partial, **arrays))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_result(run: Path, folder: Path) -> Result:
    """The result in a folder of a run, of which every number is checked against what is stored beside it."""
    again = _again(run)
    where = folders.current(folder)
    row, config = read_object(where / "result.json", again), read_object(run / "config.json", again)
    if files.is_falsified(row):
        raise ValueError("result.json differs from its recorded hash")
    known = from_row(row, config, folder, again)
    stored = read_arrays(where / "predictions.npz", known.get("predictions_sha256", ""))
    scores = _scores(stored, known["metric"])
    result = Result(**known, config=config, folder=folder, run=run, tasks=make_tasks(scores, stored))
    _check_run(result)
    if result.num_tasks != len(scores):
        raise ValueError(f"num_tasks is {result.num_tasks}, but the predictions are of {len(scores)}")
    for name, right in metrics.averages(scores, stored["labels"]).items():
        if not abs(getattr(result, name) - right) <= 1e-6:
            raise ValueError(f"{name} is {getattr(result, name):.4f}, but the predictions give {right:.4f}")
    return result


def _scores(stored: Mapping[str, np.ndarray], metric: str) -> np.ndarray:
    """The scores [tasks] of stored predictions; a ValueError where the arrays are not those of a test."""
    names = ("support", "query", "labels", "predictions")
    if lacking := [name for name in names if name not in stored]:
        raise ValueError(f"predictions.npz: no {lacking[0]}")
    support, query, labels, predictions = (stored[name] for name in names)
    shape = labels.shape
    if labels.ndim != 2 or predictions.shape != shape or query.shape != shape or support.shape[:-1] != shape[:1]:
        shapes = f"predictions {predictions.shape} and query {query.shape} for labels {shape}"
        raise ValueError(f"predictions.npz: {shapes} and support {support.shape}")
    if labels.dtype.kind not in "biuf" or not labels.size or not (labels >= 0).any(1).all():
        raise ValueError("predictions.npz: a task has no label that is a class number")
    return metrics.scores(metric, predictions, labels)
