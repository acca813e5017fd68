"""Makes tables of docs/results.md, the leaderboard and the CSV from docs/study/records. In a clone:

python -m docs.study.make
python -m docs.study.make --check    # changes nothing, and says what differs from the records

A table stands between two marks of a page, `<!-- NAME, and any words -->` and `<!-- end -->`.
"""

import argparse
import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cxda_jax.disk.files import write_text
from cxda_jax.studies.result import Result
from cxda_jax.studies.statistics import Difference, Span
from docs.study import tables
from docs.study.tables import APART, BASE, Studies, gaps, level

HERE = Path(__file__).parent
TABLES = {f.__name__: f for f in (tables.summary, tables.levels, tables.buffers, tables.own_images, tables.over_seeds)}
PAGE = HERE.parent / "results.md"


def usual(studies: Studies) -> Iterator[tuple[str, str, list[Result]]]:
    """Store, label and results of all seeds on the usual tasks."""
    for store, study in sorted(studies.items()):
        for (label, setting), of in sorted(study.items(), key=lambda item: item[0]):
            if not setting:
                yield store, label, list(of.values())


def leaderboard(studies: Studies) -> list[dict[str, Any]]:
    """An entry for each method and benchmark; leaderboard.schema.json says what the fields mean."""
    entries = []
    for store, label, of in (part for part in usual(studies) if not part[0].endswith(APART)):
        study, first, pair = studies[store], of[0], ((label, ""), (BASE, ""))
        lead = gaps(study, [pair]).get(pair) if label != BASE else Difference(Span(0.0, 0.0, 0.0), None, {})
        entries.append({
            "benchmark": store, "data_hash": first.data_hash, "method": label, "version": first.version,
            "seeds": sorted(r.seed for r in of), "tasks": first.num_tasks,
            "avg": round(float(level(study, label, "avg").mean()), 4),
            "w10": round(float(level(study, label, "w10").mean()), 4),
            "lead": [round(x, 4) for x in lead.avg] if lead else None,
            "train_minutes": round(float(np.mean([r.train_minutes or 0 for r in of])), 1),
            "adapt_ms": round(float(np.median([r.adapt_ms for r in of])), 2),
            "config_hashes": sorted({r.config_hash for r in of}),
            "commits": sorted({r.commit for r in of}),
        })  # fmt: skip
    return sorted(entries, key=lambda e: (e["benchmark"], -e["avg"]))


def results_csv(studies: Studies) -> str:
    """A line for each result on the usual tasks."""
    fields = ("seed", "avg", "w10", "num_tasks", "train_minutes", "best_step", "steps", "adapt_ms", "predict_ms",
              "device", "package", "config_hash", "data_hash", "weights_hash")  # fmt: skip
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["study", "label", *fields, "commit"])
    for store, label, of in usual(studies):
        for result in of:
            cells = [f"{x:.4f}" if isinstance(x := getattr(result, name), float) else x for name in fields]
            writer.writerow([store, label, *cells, result.commit])
    return text.getvalue()


def made(studies: Studies) -> dict[Path, str]:
    """The text of each file that follows from the records."""
    filling = {name: make(studies) for name, make in TABLES.items()}
    mark = re.compile(r"(<!-- (\w+)[^>]*-->)\n.*?<!-- end -->", re.S)
    page = mark.sub(lambda m: f"{m[1]}\n{filling[m[2]]}\n<!-- end -->", PAGE.read_text())
    board = json.dumps(leaderboard(studies), indent=1) + "\n"
    return {PAGE: page, HERE / "leaderboard.json": board, HERE / "results.csv": results_csv(studies)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and end with 1 where a file would change")
    args = parser.parse_args()
    stale = {path: text for path, text in made(tables.load()).items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        print(f"{path}: {'differs from the records' if args.check else 'written'}")
        if not args.check:
            write_text(path, text)
    raise SystemExit(1 if args.check and stale else 0)


if __name__ == "__main__":
    main()
