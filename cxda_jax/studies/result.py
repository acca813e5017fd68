"""A result, what it is of, and results by their stores."""

import collections
import dataclasses
import functools
import hashlib
import io
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np

from cxda_jax.config.fields import SHARE, Range
from cxda_jax.disk.folders import current
from cxda_jax.disk.kinds import NUMBER, Kind, require
from cxda_jax.disk.reading import insist_on_file, read_lines, reason
from cxda_jax.errors import UserError
from cxda_jax.studies.settings import STEPS, USUAL, Setting, parse
from cxda_jax.training import metrics

METRICS = "metrics.jsonl"
_Text = Annotated[str, Kind(str, shown=True)]
_LaterText = Annotated[str | None, Kind(str, shown=True)]
_Count = Annotated[int, Kind(int, Range(0, 2**63 - 1))]
_LaterCount = Annotated[int | None, Kind(int, Range(0, 2**63 - 1))]
_Points = Annotated[float, Kind(NUMBER)]  # the predictions tell them
_Time = Annotated[float, Kind(NUMBER, Range(0, 1e18))]
_Scores = Kind(dict, each={"avg": Kind(NUMBER), "w10": Kind(NUMBER)})
_SHARES = {str(coverage): Kind(NUMBER, SHARE, absent=True) for coverage in metrics.COVERAGES}
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
    def variant(self) -> str:
        """The method and what was changed, without the setting."""
        return ",".join(filter(None, [self.method, self.start and f"from={self.start}", self.changes]))

    def __str__(self) -> str:
        """The label of a result, and the name of its folder."""
        return ",".join(filter(None, [self.variant, str(self.setting)]))


def parse_identity(label: str, setting: Setting = USUAL) -> Identity:
    """The identity that a label and the setting beside it tell."""
    method, *parts = label.split(",")
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """One test of one checkpoint. Fields with a Kind stand in result.json; older files lack those with a default.

    Attributes:
      label: the method, what was changed and the setting.
      uses_support: whether the method reads the support at all.
      also: scores of the method's other predictions, by their names.
      calibration_error: of the probabilities; `risk` has the part that is wrong among the surest answers.
      reached_step: of the training when it was tested; best_step is the tested one.
      started_from: the weights that the training started from.
      compared: queries that were answered without support too; of these adapting corrected and spoiled some.
      commit: of the training, in a result from a record.
      config: of its run; of a test that was just made, its own.
      folder: of the result; where it was read from a record, nothing lies there.
      run: of the training: config.json, metrics.jsonl.
      tasks: what paired differences need.
      arrays: by its name, the content of each .npz file that is still in memory.
      unadapted: the answers to the first tasks without support, [tasks, queries], while they are in memory.
      store: the name to show of its data, once named() gave it.
    """

    label: _Text = ""
    setting: Annotated[Setting, Kind(str, shown=True)] = USUAL
    split: Annotated[str, Kind(str, choices=("val", "test"))] = "test"
    method: _Text
    version: _Text
    benchmark: _Text
    smoke: Annotated[bool, Kind(bool)] = False
    uses_support: Annotated[bool, Kind(bool)] = True
    seed: _Count
    metric: Annotated[str, Kind(str, choices=tuple(metrics.METRICS))]
    avg: _Points
    w10: _Points
    calibration_error: Annotated[float | None, Kind(NUMBER, SHARE)] = None
    risk: Annotated[Mapping[str, float] | None, Kind(dict, each=_SHARES)] = None
    also: Annotated[Mapping[str, Mapping[str, float]], Kind(dict, each=_Scores)] = dataclasses.field(
        default_factory=dict
    )
    calibration: Annotated[Mapping[str, float], Kind(dict, each=NUMBER)] = dataclasses.field(default_factory=dict)
    num_tasks: _Count
    task_ms: _Time
    adapt_ms: _Time
    predict_ms: _Time
    steps: _Count
    best_step: _LaterCount = None
    reached_step: _LaterCount = None
    train_minutes: Annotated[float | None, Kind(NUMBER, Range(0, 1e18), null=True)]
    config_hash: _Text
    weights_hash: _Text
    started_from: _LaterText = None
    data_name: _LaterText = None
    data_hash: _Text
    trained_on: _LaterText = None
    data_marks: Annotated[Sequence[str], Kind(list, each=Kind(str, shown=True))] = ()
    threads: _LaterCount = None
    device: _Text
    package: _Text
    compared: _LaterCount = None
    corrected: _LaterCount = None
    spoiled: _LaterCount = None
    predictions_sha256: _LaterText = None
    attention_sha256: _LaterText = None

    config: Mapping[str, Any]
    folder: Path
    run: Path
    tasks: ScoredTasks
    arrays: Mapping[str, Mapping[str, np.ndarray]] = dataclasses.field(default_factory=dict)
    unadapted: np.ndarray | None = None
    commit: str = ""
    store: str = ""

    @functools.cached_property
    def identity(self) -> Identity:
        return parse_identity(self.label, self.setting)

    @property
    def variant(self) -> str:
        """The method and what was changed, without the setting."""
        return self.identity.variant

    @property
    def unfinished(self) -> bool:
        """Its training had not reached the last step when it was tested."""
        return self.reached_step is not None and self.reached_step < self.steps

    @property
    def answer_ms(self) -> float:
        """Milliseconds of one task by itself: of adapting and of its queries."""
        return self.adapt_ms + self.predict_ms

    def stored(self, name: str = "predictions") -> Mapping[str, np.ndarray]:
        """The arrays of NAME.npz, whose hash must be the one in result.json, if one is there."""
        if name in self.arrays:
            return self.arrays[name]
        return read_arrays(current(self.folder) / f"{name}.npz", getattr(self, f"{name}_sha256") or "")

    def curve(self) -> list[dict[str, float]]:
        """The lines of metrics.jsonl; none where they did not come along."""
        path = self.run / METRICS
        return read_lines(path) if path.is_file() else []


def _kinds() -> Iterator[tuple[str, Kind]]:
    """The fields of result.json, each with its Kind."""
    hints = get_type_hints(Result, include_extras=True)
    for field in dataclasses.fields(Result):
        if annotated := getattr(hints[field.name], "__metadata__", ()):
            needed = field.default is field.default_factory is dataclasses.MISSING
            yield field.name, annotated[0]._replace(absent=not needed)


_FIELDS = dict(_kinds())


def to_row(result: Result) -> dict[str, Any]:
    """The content of result.json. What is not known is left out."""
    row = {name: getattr(result, name) for name in _FIELDS} | {"setting": str(result.setting)}
    return {name: value for name, value in row.items() if value is not None or _FIELDS[name].null}


def from_row(row: Mapping[str, Any], config: Mapping[str, Any], place: Path, fix: str) -> dict[str, Any]:
    """The fields that a row tells, for a Result. A UserError, or a ValueError of a value, where one cannot be shown.

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
    label = row.get("label") or row["method"]
    setting = parse_identity(label, parse(row.get("setting", ""))).setting
    known = {"smoke": config.get("smoke", False)} | {name: row[name] for name in _FIELDS if name in row}
    return known | {"label": label, "setting": setting}


def named(results: Iterable[Result]) -> list[Result]:
    """The results, each with the name of its store among those of all results.

    Stores of one name get the start of their hashes too, so that results on two stores are never averaged or compared.
    Nor are those on validation and test domains, or the two forms of macro-F1 on one store.
    """
    keys, results = [], list(results)
    for result in results:
        name = (result.data_name or result.benchmark) + " (smoke)" * result.smoke
        name += " (validation)" * (result.split == "val") + " (union F1)" * (result.metric == "macro_f1_union")
        keys.append((name, result.data_hash))
    stores = set(keys)
    uses, names = collections.Counter(name for name, _ in stores), []
    for digits in (8, 16, None):
        names = [f"{name} [{digest[:digits]}]" if uses[name] > 1 else name for name, digest in keys]
        if len(set(names)) == len(stores):
            break
    return [r if r.store else dataclasses.replace(r, store=name) for r, name in zip(results, names, strict=True)]


def by_store(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results of each store, by its name."""
    stores: dict[str, list[Result]] = {}
    for result in named(results):
        stores.setdefault(result.store, []).append(result)
    return dict(sorted(stores.items()))


def unfinished_said(seeds: Sequence[Result], left_out: bool = False) -> str:
    """The number of these seeds of a cell that are unfinished, in words; "" where none is."""
    reached = [f"{r.reached_step} of {r.steps}" for r in seeds if r.unfinished]
    said = f"{len(reached)} of {len(seeds)} seeds unfinished{' and left out' * left_out}"
    return f"{said}: step {', '.join(dict.fromkeys(reached))}" if reached else ""


def distinct(results: Sequence[Result]) -> tuple[list[Result], list[str]]:
    """One result for each store, label and seed, a finished one if there is one. The others become faults."""
    kept: dict[tuple, Result] = {}
    faults = []
    for result in sorted(named(results), key=lambda r: r.unfinished):
        first = kept.setdefault((result.store, result.label, result.seed), result)
        if first is not result:
            faults.append(f"{result.folder}: left out, since {first.folder} has the same method, setting and seed")
    return list(kept.values()), faults
