"""All results of a study as one small file, which goes into a repository and is read as the runs themselves are.

The file is a zip archive: results.jsonl has a line for each result (its row and its folder), configs.json the configs
by their hashes, and scores.npz how many queries of each task each result has right. That is all that tables, figures of
scores and paired differences need. Single predictions, attention and training curves are left out.
"""

import contextlib
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cxda_jax import metrics
from cxda_jax.config import config_hash
from cxda_jax.disk import files
from cxda_jax.disk.reading import reason
from cxda_jax.errors import UserError, brief
from cxda_jax.experiment import METHODS
from cxda_jax.study.results import Result

SUFFIX = ".records"
RESULTS, CONFIGS, SCORES = "results.jsonl", "configs.json", "scores.npz"
CARDS = "model/card.json", "card.json"  # of a run, and of a model that is tested as a run
RECORDED = "recorded"  # in a row: hashes of the tasks, and the commit of the training
MADE = (files.SEAL, "predictions_sha256")  # in a row, of the files that unpack() writes anew
_EARLY = (1980, 1, 1, 0, 0, 0)  # of all entries, so that equal results give equal files


class Recorded(NamedTuple):
    """One recorded result.

    Attributes:
      row: as in result.json, with the hashes of the tasks and the commit of the training.
      config: of its run.
      folder, run: of the result and of its run, below a folder of all.
      right: how many queries of each task are right, [tasks].
      queries: of a task.
    """

    row: Mapping[str, Any]
    config: Mapping[str, Any]
    folder: str
    run: str
    right: np.ndarray
    queries: int

    @property
    def scores(self) -> np.ndarray:
        """The accuracy of each task, [tasks]."""
        return self.right / self.queries


def write(path: Path, results: Sequence[Result]) -> None:
    """Writes the records of results whose metric is the accuracy. Equal results give the same bytes, in any order."""
    lines, configs, tables = [], {}, {}
    for result in sorted(results, key=lambda r: (r.row["benchmark"], str(r.folder))):
        if result.row["metric"] != "accuracy":
            raise UserError(
                f"{result.folder}: {result.row['metric']} cannot be recorded by the task, only accuracy can"
            )
        stored = result.stored()
        labels = stored["labels"]
        if (labels < 0).any():
            raise UserError(
                f"{result.folder}: its tasks differ in size (evaluation.tasks=exhaustive) and cannot be recorded"
            )
        known = {
            "support": hashlib.sha256(stored["support"].tobytes()).hexdigest()[:16],
            "query": hashlib.sha256(stored["query"].tobytes()).hexdigest()[:16],
            "commit": _commit(result.run),
        }
        number = config_hash(result.config)[:16]
        configs[number] = result.config
        right = (stored["predictions"] == labels).sum(1)
        table = tables.setdefault(shape := f"{len(right)}x{labels.shape[1]}", [])
        lines.append(
            {
                "folder": _place(result), "run": _place(result, whole=False), "config": number, "table": shape, "line": len(table),
                "row": {RECORDED: known} | {name: value for name, value in result.row.items() if name not in MADE},
            }
        )  # fmt: skip
        table.append(right.astype(np.uint16))
    scores = io.BytesIO()
    arrays: Any = {name: np.stack(rows) for name, rows in tables.items()}
    np.savez_compressed(scores, **arrays)
    text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)
    parts = {RESULTS: text.encode(), CONFIGS: json.dumps(configs, sort_keys=True).encode(), SCORES: scores.getvalue()}
    files.write_bytes(path, _zipped(parts))


def read(path: Path) -> list[Recorded]:
    """All results in a file of records."""
    with _explained(path), zipfile.ZipFile(path) as archive:
        lines = [json.loads(line) for line in archive.read(RESULTS).splitlines()]
        configs = json.loads(archive.read(CONFIGS))
        with np.load(io.BytesIO(archive.read(SCORES)), allow_pickle=False) as scores:
            tables = {name: scores[name] for name in scores.files}
        found = [
            Recorded(
                line["row"], configs[line["config"]], line["folder"], line["run"],
                tables[line["table"]][line["line"]], int(line["table"].split("x")[1]),
            )
            for line in lines
        ]  # fmt: skip
        if not found:
            raise ValueError("it holds no result")
        for number, config in configs.items():
            if config_hash(config)[:16] != number:
                raise ValueError(f"config {brief(number, 20)} has another hash")
        for number, one in enumerate(found, 1):
            if fault := _fault_in(one):
                raise ValueError(f"result {number} {fault}")
        return found


def _fault_in(one: Recorded) -> str:
    """A value that cannot be in a recorded result; "" where all can."""
    row = one.row
    if row["method"] not in METHODS or row["seed"] != one.config["seed"]:
        return f"is of {brief(repr(row['method']), 20)}, seed {row['seed']!r}, which its config is not"
    if one.right.shape != (row["num_tasks"],) or one.right.max(initial=0) > one.queries:
        most = f"{one.right.max(initial=0)} right answers of {one.queries} in a task"
        return f"has {most}, and {len(one.right)} of {row['num_tasks']} tasks"
    for name, score in (("avg", one.scores.mean()), ("w10", metrics.worst_decile(one.scores))):
        if abs(100 * score - row[name]) > 0.011:
            return f"has {name}={row[name]}, but its answers have {100 * score:.2f}"
    return ""


def unpack(path: Path, folder: Path) -> list[Path]:
    """Writes the recorded results into a folder, as evaluations leave them, and returns the folders of the runs.

    Labels and predictions are stand-ins that have as many right answers in each task.
    """
    found, runs = read(path), []
    with _explained(path):
        for one in found:
            place, run = (_inside(folder, name) for name in (one.folder, one.run))
            tasks, queries = len(one.right), one.queries
            arrays: Any = {
                "labels": np.zeros((tasks, queries), np.int32),
                "predictions": (np.arange(queries) >= one.right[:, None]).astype(np.int32),
                "query": np.tile(_numbers(one.row[RECORDED]["query"], queries), (tasks, 1)),
                "support": np.tile(_numbers(one.row[RECORDED]["support"], 1), (tasks, 1)),
            }
            data = io.BytesIO()
            np.savez_compressed(data, **arrays)
            place.mkdir(parents=True, exist_ok=True)
            (place / "predictions.npz").write_bytes(data.getvalue())
            row = {**one.row, "predictions_sha256": hashlib.sha256(data.getvalue()).hexdigest()}
            (place / "result.json").write_text(json.dumps(files.sealed(row)))
            (run / "config.json").write_text(json.dumps(one.config))
            runs.append(run)
    return list(dict.fromkeys(runs))


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """A context in which whatever a broken file causes becomes one line."""
    try:
        yield
    except (OSError, UserError):
        raise
    except Exception as e:
        raise UserError(f"{path}: not a file of records ({reason(e)}); make it again by cxda report --record") from None


def _place(result: Result, whole: bool = True) -> str:
    """The folder of a result, or of its run, below that of its data set."""
    run = os.path.join(result.row.get("data_name") or result.row["benchmark"], *result.run.parts[-2:])
    inside = result.folder.relative_to(result.run)
    return os.path.join(run, *inside.parts) if whole else run


def _inside(folder: Path, name: str) -> Path:
    place = Path(os.path.normpath(folder / name))
    if not place.is_relative_to(os.path.normpath(folder)):
        raise ValueError(f"{name} leads outside")
    return place


def _numbers(digest: str, count: int) -> np.ndarray:
    """Stand-ins for row numbers, which are equal where the tasks are."""
    return np.random.default_rng(int(digest, 16)).integers(0, 2**31, count)


def _commit(run: Path) -> str:
    """The commit that a run was trained at, if its model's card knows it."""
    for name in CARDS:
        with contextlib.suppress(OSError, ValueError):
            card: Any = json.loads((run / name).read_text())
            return str(card.get("commit", ""))
    return ""


def _zipped(parts: dict[str, bytes]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in parts.items():
            archive.writestr(zipfile.ZipInfo(name, _EARLY), part, zipfile.ZIP_DEFLATED)
    return data.getvalue()
