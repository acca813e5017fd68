"""A result, what it is of, and results by their stores."""

import collections
import hashlib
import io
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cxda_jax.config.fields import SHARE, Range
from cxda_jax.disk.folders import current
from cxda_jax.disk.kinds import NUMBER, Kind, require
from cxda_jax.disk.reading import insist_on_file, read_lines, reason
from cxda_jax.errors import UserError
from cxda_jax.studies.settings import STEPS, USUAL, Setting, parse
from cxda_jax.training import metrics

METRICS = "metrics.jsonl"
_TEXT, _LATER_TEXT = Kind(str, shown=True), Kind(str, shown=True, absent=True)
_COUNT = Kind(int, Range(0, 2**63 - 1))
_TIME, _POINTS = Kind(NUMBER, Range(0, 1e18)), Kind(NUMBER)  # the predictions tell the points
_SHARES = {str(coverage): Kind(NUMBER, SHARE, absent=True) for coverage in metrics.COVERAGES}
# Of result.json, what tables, figures and the page cannot do without; and what older results lack.
_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("method", "version", "benchmark", "device", "package"), _TEXT),
    **dict.fromkeys(("config_hash", "weights_hash", "data_hash"), _TEXT),
    "metric": Kind(str, choices=tuple(metrics.METRICS)),
    **dict.fromkeys(("seed", "num_tasks", "steps"), _COUNT),
    **dict.fromkeys(("avg", "w10"), _POINTS),
    **dict.fromkeys(("task_ms", "adapt_ms", "predict_ms"), _TIME),
    "train_minutes": _TIME._replace(null=True),
    **dict.fromkeys(("label", "setting", "data_name", "started_from", "predictions_sha256"), _LATER_TEXT),
    **dict.fromkeys(("trained_on", "attention_sha256"), _LATER_TEXT),
    "split": Kind(str, choices=("val", "test"), absent=True),
    **dict.fromkeys(("best_step", "reached_step", "compared", "corrected", "spoiled"), _COUNT._replace(absent=True)),
    **dict.fromkeys(("smoke", "uses_support"), Kind(bool, absent=True)),
    "data_marks": Kind(list, each=_TEXT, absent=True),
    "calibration_error": Kind(NUMBER, SHARE, absent=True),
    "risk": Kind(dict, each=_SHARES, absent=True),
    "calibration": Kind(dict, each=NUMBER, absent=True),
    "also": Kind(dict, each=Kind(dict, each={"avg": _POINTS, "w10": _POINTS}), absent=True),
}
_OF_CONFIG = {
    "method": str,
    "episode": Kind(dict, each={"num_domains": int, "per_domain": int}),
    "finetune": Kind(dict, each={"steps": int}, absent=True),
    "smoke": Kind(bool, absent=True),
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
    if path.exists():
        insist_on_file(path, "test again")
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
    require(row, _FIELDS, f"{place}/result.json", fix)
    require(config, _OF_CONFIG, f"{place}: config", fix)
    for name in ("best_step", "reached_step"):
        if row.get(name, 0) > row["steps"]:
            raise UserError(f"{place}/result.json: {name}={row[name]} is above steps={row['steps']}; {fix}")
    row = {"smoke": config.get("smoke", False)} | dict(row) | {"label": row.get("label") or row["method"]}
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
