"""A result, what it is of, and results by their stores."""

import collections
import hashlib
import io
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cxda_jax import metrics
from cxda_jax.disk.folders import current
from cxda_jax.disk.reading import MAYBE, NUMBER, read_lines, reason, require
from cxda_jax.errors import brief
from cxda_jax.results.settings import STEPS, USUAL, Setting, parse

METRICS = "metrics.jsonl"
_DERIVED = ("avg", "w10")
_UNSHOWN = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
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
_CHOICES: dict[str, Any] = {
    "metric": tuple(metrics.METRICS),
    "split": ("val", "test"),
    **dict.fromkeys(("smoke", "uses_support"), (True, False)),
}


class Identity(NamedTuple):
    """The training and the test that a result is of, but for its store and its seed.

    Attributes:
      method: its name.
      start: the training that the method starts from, where that is not the usual one.
      changes: the fields that the test changed, as FIELD=VALUE; several are joined by commas.
      setting: the form of its tasks.
    """

    method: str
    start: str = ""
    changes: str = ""
    setting: Setting = USUAL

    @property
    def label(self) -> str:
        """The method and what was changed, without the setting."""
        return ",".join(filter(None, [self.method, self.start and f"from={self.start}", self.changes]))

    def __str__(self) -> str:
        """The label of a row, and the name of a folder."""
        return ",".join(filter(None, [self.label, str(self.setting)]))


def parse_identity(row: Mapping[str, Any]) -> Identity:
    """The identity that a row tells by its label and setting."""
    setting = parse(row.get("setting", ""))
    method, *parts = (row.get("label") or row["method"]).split(",")
    parts = [part for part in parts if part != str(setting)]
    start = parts.pop(0).removeprefix("from=") if parts and parts[0].startswith("from=") else ""
    # A number of steps is a setting, however the test was asked for it.
    steps = next((part for part in parts if part.startswith(f"{STEPS}=")), "")
    if steps and setting == USUAL:
        setting = parse(steps)
        parts.remove(steps)
    return Identity(method, start, ",".join(parts), setting)


class ScoredTasks(NamedTuple):
    """The tasks of a result, and how it did.

    Attributes:
      scores: of each task, [tasks].
      shares: the weight of each in their mean: its part of all queries, divided by the mean part, [tasks].
      queries: the number of queries of each; 0 where they differ in it.
      query: a hash of the queries of all tasks.
      support: a hash of their support images.
    """

    scores: np.ndarray
    shares: np.ndarray
    queries: int
    query: str
    support: str

    @property
    def weighted(self) -> np.ndarray:
        """Scores whose mean is that of all queries, [tasks]."""
        return self.scores * self.shares


def make_tasks(scores: np.ndarray, stored: Mapping[str, np.ndarray]) -> ScoredTasks:
    """The tasks with these scores [tasks], of the arrays that a test stored: labels, query and support."""
    labels = stored["labels"]
    query, support = (hashlib.sha256(stored[name].tobytes()).hexdigest()[:16] for name in ("query", "support"))
    whole = bool((labels >= 0).all())
    return ScoredTasks(scores, metrics.shares(labels), labels.shape[1] * whole, query, support)


def read_arrays(path: Path, told: str = "") -> dict[str, np.ndarray]:
    """The arrays of an .npz file, whose SHA-256 must be the one told, if one is."""
    try:
        data = path.read_bytes()
        if not zipfile.is_zipfile(io.BytesIO(data)):
            raise ValueError("cut short, or no such file at all")
        if told and hashlib.sha256(data).hexdigest() != told:
            raise ValueError("differs from the hash in result.json")
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            return dict(file)
    except FileNotFoundError:
        raise
    except Exception as e:  # whatever numpy and its archives make of a broken file
        raise ValueError(f"{path.name}: {reason(e)}") from None


class Result(NamedTuple):
    """One test of one checkpoint.

    Attributes:
      row: as in result.json.
      config: of its run.
      folder: of the result; where it was read from a record, nothing lies there.
      run: of the training: config.json, metrics.jsonl.
      tasks: what paired differences need.
      store: the name to show of its data, once named() gave it.
    """

    row: Mapping[str, Any]
    config: Mapping[str, Any]
    folder: Path
    run: Path
    tasks: ScoredTasks
    store: str = ""

    @property
    def identity(self) -> Identity:
        return parse_identity(self.row)

    @property
    def setting(self) -> Setting:
        """The form of its tasks."""
        return self.identity.setting

    @property
    def label(self) -> str:
        """The method and what was changed, without the setting."""
        return self.identity.label

    def stored(self, name: str = "predictions") -> dict[str, np.ndarray]:
        """The arrays of NAME.npz, whose hash must be the one in the row, if the row has one."""
        return read_arrays(current(self.folder) / f"{name}.npz", self.row.get(f"{name}_sha256", ""))

    def curve(self) -> list[dict[str, float]]:
        """The lines of metrics.jsonl; none where they did not come along."""
        path = self.run / METRICS
        return read_lines(path) if path.is_file() else []


def check_row(row: Mapping[str, Any], config: Mapping[str, Any], place: Path, fix: str) -> dict[str, Any]:
    """The row with what older results lack. A UserError, or a ValueError of a value, where one cannot be shown.

    Args:
      config: of the run, of which the parts that results need are checked too.
      place: the folder of the result.
      fix: what helps.
    """
    known = {name: kind for name, kind in _LATER.items() if name in row}
    require(row, _FIELDS | known, f"{place}/result.json", fix)
    require(config, {"method": str, "episode": dict}, f"{place}: config", fix)
    require(config["episode"], {"num_domains": int, "per_domain": int}, f"{place}: config.episode", fix)
    require(config.get("finetune", {"steps": 0}), {"steps": int}, f"{place}: config.finetune", fix)
    row = {"smoke": config.get("smoke", False)} | dict(row) | {"label": row.get("label") or row["method"]}
    for name, value in row.items():
        kind = (_FIELDS | _LATER).get(name)
        texts = {str: [value], list: value}.get(kind, ())
        # Terminals obey such characters, and files refuse them.
        if any(not isinstance(text, str) or _UNSHOWN.search(text) for text in texts):
            raise ValueError(f"{name}={brief(repr(value), 40)} is no text that can be shown")
        if kind is int and not 0 <= value < 2**63:
            raise ValueError(f"{name}={brief(repr(value), 40)}, expected a whole number from 0 on")
        if kind in (NUMBER, MAYBE) and name not in _DERIVED and not 0 <= (value or 0) < 1e18:
            raise ValueError(f"{name}={brief(repr(value), 40)}, expected a finite number from 0 on")
        if name in _CHOICES and value not in _CHOICES[name]:
            raise ValueError(f"{name}={brief(repr(value), 40)} is not one of {', '.join(map(str, _CHOICES[name]))}")
    parse_identity(row)
    return row


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
