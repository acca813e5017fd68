"""All results of a study as one small file, which goes into a repository and is read as the runs themselves are.

The file is a zip archive: results.jsonl has a line for each result (its row and its folder), configs.json the configs
by their hashes, and scores.npz how many queries of each task each result has right. That is all that tables, figures of
scores and paired differences need. Single predictions, attention and training curves are left out.
"""

import contextlib
import dataclasses
import io
import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cxda_jax.config.reading import config_hash
from cxda_jax.config.registry import METHODS
from cxda_jax.disk import files
from cxda_jax.disk.reading import read_object, reason
from cxda_jax.errors import UserError, brief
from cxda_jax.studies.result import Result, ScoredTasks, from_row, to_row
from cxda_jax.training import metrics

SUFFIX = ".records"
RESULTS, CONFIGS, SCORES = "results.jsonl", "configs.json", "scores.npz"
CARDS = "model/card.json", "card.json"  # of a run, and of a model that is tested as a run
RECORDED = "recorded"  # beside the fields of a result: hashes of the tasks, and the commit of the training
_EARLY = (1980, 1, 1, 0, 0, 0)  # of all entries, so that equal results give equal files


def write(path: Path, results: Sequence[Result]) -> None:
    """Writes the records of results whose metric is the accuracy. Equal results give the same bytes, in any order."""
    lines, configs, tables = [], {}, {}
    for result in sorted(results, key=lambda r: (r.benchmark, str(r.folder))):
        tasks = result.tasks
        if result.metric != "accuracy" or not tasks.queries:
            what = "only accuracy can be recorded, and only of tasks of one size (evaluation.tasks=random)"
            raise UserError(f"{result.folder}: {what}; leave it out of --runs")
        known = {"support": tasks.support, "query": tasks.query, "commit": result.commit or _commit(result.run)}
        number = config_hash(result.config)[:16]
        configs[number] = result.config
        right = np.rint(tasks.scores * tasks.queries)
        table = tables.setdefault(shape := f"{len(right)}x{tasks.queries}", [])
        run = os.path.join(result.data_name or result.benchmark, *result.run.parts[-2:])
        lines.append({
            "folder": os.path.join(run, *result.folder.relative_to(result.run).parts), "run": run, "config": number,
            "table": shape, "line": len(table),
            "row": {RECORDED: known} | to_row(dataclasses.replace(result, predictions_sha256=None)),
        })  # fmt: skip
        table.append(right.astype(np.uint16))
    scores = io.BytesIO()
    arrays: Any = {name: np.stack(rows) for name, rows in tables.items()}
    np.savez_compressed(scores, **arrays)
    text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)
    parts = {RESULTS: text.encode(), CONFIGS: json.dumps(configs, sort_keys=True).encode(), SCORES: scores.getvalue()}
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, part in parts.items():
            archive.writestr(zipfile.ZipInfo(name, _EARLY), part, zipfile.ZIP_DEFLATED)
    files.write_bytes(path, data.getvalue())


def read(path: Path) -> list[Result]:
    """All results in a file of records. Nothing lies in the folders that they name below it."""
    with _explained(path), zipfile.ZipFile(path) as archive:
        lines = [json.loads(line) for line in archive.read(RESULTS).splitlines()]
        configs = json.loads(archive.read(CONFIGS))
        with np.load(io.BytesIO(archive.read(SCORES)), allow_pickle=False) as scores:
            tables = {name: scores[name] for name in scores.files}
        for number, config in configs.items():
            if config_hash(config)[:16] != number:
                raise ValueError(f"config {brief(number, 20)} has another hash")
        found = []
        for number, line in enumerate(lines, 1):
            right, queries = tables[line["table"]][line["line"]], int(line["table"].split("x")[1])
            row, config, known = line["row"], configs[line["config"]], line["row"][RECORDED]
            if fault := _fault_in(row, config, right, queries):
                raise ValueError(f"result {number} {fault}")
            folder, run = (_inside(path, line[name]) for name in ("folder", "run"))
            tasks = ScoredTasks(right / queries, np.ones(len(right)), queries, known["query"], known["support"])
            told = from_row(row, config, folder, "record it again") | {"commit": known.get("commit", "")}
            found.append(Result(**told, config=config, folder=folder, run=run, tasks=tasks))
        if not found:
            raise ValueError("it holds no result")
        return sorted(found, key=lambda r: r.folder / "result.json")  # as folders are read


def _fault_in(row: Mapping[str, Any], config: Mapping[str, Any], right: np.ndarray, queries: int) -> str:
    """A value that cannot be in a recorded result; "" where all can. `right` [tasks] are numbers of right queries."""
    if row["method"] not in METHODS or row["seed"] != config["seed"]:
        return f"is of {brief(repr(row['method']), 20)}, seed {row['seed']!r}, which its config is not"
    if right.shape != (row["num_tasks"],) or right.max(initial=0) > queries:
        most = f"{right.max(initial=0)} right answers of {queries} in a task"
        return f"has {most}, and {len(right)} of {row['num_tasks']} tasks"
    for name, score in (("avg", (right / queries).mean()), ("w10", metrics.worst_decile(right / queries))):
        if abs(100 * score - row[name]) > 0.011:
            return f"has {name}={row[name]}, but its answers have {100 * score:.2f}"
    return ""


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """A context in which whatever a broken file causes becomes one line."""
    try:
        yield
    except (OSError, UserError):
        raise
    except Exception as e:
        raise UserError(f"{path}: not a file of records ({reason(e)}); make it again by cxda report --record") from None


def _inside(path: Path, name: str) -> Path:
    """A place below the file, where nothing can lie; a ValueError for one elsewhere."""
    if os.path.isabs(name) or ".." in Path(name).parts:
        raise ValueError(f"{brief(name, 40)} leads outside")
    return path / name


def _commit(run: Path) -> str:
    """The commit that a run was trained at, if its model's card knows it."""
    for name in CARDS:
        with contextlib.suppress(OSError, ValueError):
            return str(read_object(run / name, "").get("commit", ""))
    return ""
