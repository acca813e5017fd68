"""Results that evaluations left on disk, read back. No device, no data set and no compiler is needed.

A folder of results holds result.json (the row), predictions.npz (plans, labels, predictions) and,
for methods that attend, attention.npz. A result that cannot be read, or contradicts itself, becomes
a fault of one line; the rest goes on.
"""

import collections
import hashlib
import io
import unicodedata
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cxda_jax import metrics
from cxda_jax.disk import files, manifest
from cxda_jax.disk.reading import MAYBE, NUMBER, read_lines, read_object, reason, require
from cxda_jax.errors import UserError, brief
from cxda_jax.study.settings import Setting, parse

_DERIVED = ("avg", "w10")
# Of result.json, what tables, figures and the page cannot do without.
_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("method", "version", "benchmark", "metric", "device", "package", "config_hash"), str),
    **dict.fromkeys(("weights_hash", "data_hash"), str),
    **dict.fromkeys(("seed", "num_tasks", "steps"), int),
    **dict.fromkeys((*_DERIVED, "task_ms", "adapt_ms", "predict_ms"), NUMBER),
    "train_minutes": MAYBE,
}
# What older results lack.
_LATER: dict[str, Any] = {
    **dict.fromkeys(("label", "setting", "data_name", "started_from", "predictions_sha256"), str),
    **dict.fromkeys(("trained_on", "attention_sha256", "split"), str),
    **dict.fromkeys(("best_step", "reached_step"), int),
    "data_marks": list,
}
METRICS = "metrics.jsonl"


class Result(NamedTuple):
    """One evaluation of one checkpoint."""

    row: Mapping[str, Any]  # result.json
    config: Mapping[str, Any]  # of its run
    folder: Path  # of the results
    run: Path  # of the training: config.json, metrics.jsonl
    store: str = ""  # the name to show of its data, once named() gave it

    @property
    def setting(self) -> Setting:
        """The form of its tasks."""
        return parse(self.row.get("setting", ""))

    @property
    def label(self) -> str:
        """The method and what was changed, without the setting."""
        return self.setting.left_out_of(self.row["label"])

    def stored(self, name: str = "predictions") -> dict[str, np.ndarray]:
        """The arrays of NAME.npz, whose hash must be the one in the row, if the row has one."""
        told = self.row.get(f"{name}_sha256")
        try:
            data = (self.folder / f"{name}.npz").read_bytes()
            if not zipfile.is_zipfile(io.BytesIO(data)):
                raise ValueError("cut short, or no such file at all")
            if told and hashlib.sha256(data).hexdigest() != told:
                raise ValueError("differs from the hash in result.json")
            with np.load(io.BytesIO(data), allow_pickle=False) as file:
                return dict(file)
        except FileNotFoundError:
            raise
        except Exception as e:  # whatever numpy and its archives make of a broken file
            raise ValueError(f"{name}.npz: {reason(e)}") from None

    def curve(self) -> list[dict[str, float]]:
        """The lines of metrics.jsonl; none where they did not come along."""
        path = self.run / METRICS
        return read_lines(path) if path.is_file() else []


def named(results: Iterable[Result]) -> list[Result]:
    """The results, each with the name of its store among those of all results.

    Stores of one name get the start of their hashes too, so that results on two stores are never averaged or compared.
    Nor are those on validation and test domains, or the two forms of macro-F1 on one store.
    """
    keys, results = [], list(results)
    for row in (r.row for r in results):
        name = (row.get("data_name") or row["benchmark"]) + " (smoke)" * bool(row.get("smoke"))
        name += " (validation)" * (row.get("split") == "val") + " (union F1)" * (row.get("metric") == "macro_f1_union")
        keys.append((name, row.get("data_hash", "")))
    stores = set(keys)
    uses, names = collections.Counter(name for name, _ in stores), []
    for digits in (8, 16, None):
        names = [f"{name} [{digest[:digits]}]" if uses[name] > 1 else name for name, digest in keys]
        if len(set(names)) == len(stores):
            break
    return [r if r.store else r._replace(store=name) for r, name in zip(results, names, strict=True)]


def by_store(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results of each store, by its name."""
    stores: dict[str, list[Result]] = {}
    for result in named(results):
        stores.setdefault(result.store, []).append(result)
    return dict(sorted(stores.items()))


def is_unfinished(row: Mapping[str, Any]) -> bool:
    """Its training had not reached the last step when it was tested."""
    return row.get("reached_step", row.get("steps", 0)) < row.get("steps", 0)


def unfinished_said(rows: Sequence[Mapping[str, Any]], left_out: bool = False) -> str:
    """The number of these rows, the seeds of a cell, that are unfinished, in words; "" where none is."""
    reached = [f"{row['reached_step']} of {row['steps']}" for row in rows if is_unfinished(row)]
    seeds = f"{len(reached)} of {len(rows)} seeds unfinished{' and left out' * left_out}"
    return f"{seeds}: step {', '.join(dict.fromkeys(reached))}" if reached else ""


def read_results(
    runs: Iterable[Path], said: Callable[[int], None] = lambda done: None
) -> tuple[list[Result], list[str]]:
    """All results in the folders of runs, and the faults met. `said` is called with the number of runs read so far."""
    results, faults = [], []
    for done, run in enumerate(sorted(set(runs))):
        said(done)
        paths = sorted(run.glob("**/result.json"))
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
    others = [r for r in results if r.row["benchmark"] != benchmark]
    faults += [f"{r.folder}: left out, since it is of {r.row['benchmark']}" for r in others]
    return [r for r in results if r.row["benchmark"] == benchmark], faults


def distinct(results: Sequence[Result]) -> tuple[list[Result], list[str]]:
    """One result for each store, label and seed, a finished one if there is one. The others become faults."""
    kept: dict[tuple, Result] = {}
    faults = []
    for result in sorted(named(results), key=lambda r: is_unfinished(r.row)):
        row = result.row
        first = kept.setdefault((result.store, row.get("label") or row["method"], row["seed"]), result)
        if first is not result:
            faults.append(f"{result.folder}: left out, since {first.folder} has the same method, setting and seed")
    return list(kept.values()), faults


def _check_run(row: Mapping[str, Any], run: Path) -> None:
    """Raises a ValueError where a run's config, or the data that it was trained on, are not those of the result.

    Runs of older versions have no manifest to tell it.
    """
    if not (run / manifest.NAME).is_file():
        return
    if fault := manifest.find_fault(run, ["config.json"]):
        raise ValueError(fault)
    trained_on = manifest.read_about(run).get("data_hash", "")
    if trained_on and row.get("trained_on", trained_on) != trained_on:
        raise ValueError("the run has been trained on other data since it was tested")
    if row.get("trained_on", row["data_hash"]) != row["data_hash"] and not row.get("data_marks"):
        raise ValueError("it was tested on other data than its run was trained on, and has no mark that says so")


def _again(run: Path) -> str:
    return f"evaluate again: cxda evaluate --runs={run}"


def _check(row: Mapping[str, Any]) -> None:
    """Raises a ValueError where a field has its type, but no value that can be shown."""
    if row["metric"] not in metrics.METRICS:
        raise ValueError(f"metric={brief(repr(row['metric']))} is not one of {', '.join(metrics.METRICS)}")
    for name, value in row.items():
        said = f"{name}={brief(repr(value), 40)}"
        kind = (_FIELDS | _LATER).get(name)
        if kind in (str, list) and any(unicodedata.category(c) in ("Cc", "Cs") for c in "".join(map(str, value))):
            raise ValueError(f"{said} has characters that cannot be shown")  # terminals obey them, files refuse them
        if kind is int and not 0 <= value < 2**63:
            raise ValueError(f"{said}, expected a whole number from 0 on")
        if kind in (NUMBER, MAYBE) and name not in _DERIVED and not 0 <= (value or 0) < 1e18:
            raise ValueError(f"{said}, expected a finite number from 0 on")
    parse(row.get("setting", ""))
    if row.get("split", "test") not in ("val", "test"):
        raise ValueError(f"split={brief(repr(row['split']), 40)}, expected val or test")
    if not all(isinstance(mark, str) for mark in row.get("data_marks", [])):
        raise ValueError(f"data_marks={brief(repr(row['data_marks']), 40)}, expected a list of texts")
    for name in ("smoke", "uses_support"):
        if not isinstance(row.get(name, False), bool):
            raise ValueError(f"{name}={brief(repr(row[name]), 40)}, expected true or false")


def read_result(run: Path, folder: Path) -> Result:
    """The result in a folder of a run, of which every number is checked against what is stored beside it."""
    path, again = run / "config.json", _again(run)
    row = read_object(folder / "result.json", again)
    require(row, _FIELDS | {k: kind for k, kind in _LATER.items() if k in row}, f"{folder}/result.json", again)
    if files.is_falsified(row):
        raise ValueError("result.json differs from its recorded hash")
    row["label"] = row.get("label") or row["method"]
    _check(row)
    config = read_object(path, again)
    require(config, {"method": str, "episode": dict}, f"{path}", again)
    require(config["episode"], {"num_domains": int, "per_domain": int}, f"{path}: episode", again)
    require(config.get("finetune", {}), {}, f"{path}: finetune", again)
    require({"steps": 0} | config.get("finetune", {}), {"steps": int}, f"{path}: finetune", again)
    _check_run(row, run)
    result = Result({"smoke": config.get("smoke", False)} | row, config, folder, run)
    stored = result.stored()
    lacking = [name for name in ("support", "query", "labels", "predictions") if name not in stored]
    if lacking:
        raise ValueError(f"predictions.npz: no {lacking[0]}")
    shape = stored["labels"].shape
    if len(shape) != 2 or 0 in shape or stored["predictions"].shape != shape:
        raise ValueError(f"predictions.npz: predictions {stored['predictions'].shape} for labels {shape}")
    if stored["query"].shape != shape or stored["support"].ndim != 2 or len(stored["support"]) != shape[0]:
        raise ValueError(f"predictions.npz: queries {stored['query'].shape} for labels {shape}")
    if stored["labels"].dtype.kind not in "biuf" or not (stored["labels"] >= 0).any(1).all():
        raise ValueError("predictions.npz: a task has no label that is a class number")
    if row["num_tasks"] != shape[0]:
        raise ValueError(f"num_tasks is {row['num_tasks']}, but the predictions are of {shape[0]}")
    for name, right in averages(row["metric"], stored["predictions"], stored["labels"]).items():
        if not abs(row[name] - right) <= 1e-6:
            raise ValueError(f"{name} is {row[name]:.4f}, but the predictions give {right:.4f}")
    return result


def averages(metric: str, predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The mean score of tasks [tasks, queries], and that of their lowest tenth, in points."""
    scores = metrics.scores(metric, predictions, labels)
    return {"avg": 100 * float((scores * metrics.shares(labels)).mean()), "w10": 100 * metrics.worst_decile(scores)}
