"""Makes the tables and figures of docs/study/index.md, the leaderboard and the CSV from docs/study/records. In a clone:

python -m docs.study.make
python -m docs.study.make --check    # changes nothing, and says what differs from the records

A table stands between two marks of the page, `<!-- NAME -->` and `<!-- end -->`. README.md may have such marks too.
"""

import argparse
import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cxda_jax.disk.files import write_text
from docs.study import answers, detail_tables, figures, full_size, record_tables, spread_tables, tables
from docs.study.evidence import APART, load
from docs.study.tables import BASE, Studies

HERE = Path(__file__).parent
TABLES: dict[str, Callable[[Studies], str]] = {
    f.__name__: f
    for f in (
        *(tables.levels, tables.rivals, tables.buffers, tables.elsewhere, tables.own_images),
        *(tables.full, tables.changes, tables.other_tasks),
        *(detail_tables.kinds, detail_tables.domains, detail_tables.attention),
        *(spread_tables.spread, spread_tables.over_seeds, spread_tables.reruns),
        *(record_tables.rates, record_tables.benchmarks, record_tables.plan, record_tables.cost),
    )
}
ANSWERS: dict[str, Callable[[Studies], str]] = {
    f"answer_{i}": f
    for i, f in enumerate(
        (answers.rivals, answers.buffers, answers.changes, answers.domains, answers.attention, answers.spread), 1
    )
} | {"summary": answers.summary, "answer_full": full_size.full}
PAGES = (HERE / "index.md", HERE.parents[1] / "README.md")


def filled(text: str, tables: dict[str, str]) -> str:
    """A page with the text between its marks replaced."""
    return re.sub(
        r"<!-- (\w+) -->\n.*?<!-- end -->", lambda m: f"<!-- {m[1]} -->\n{tables[m[1]]}\n<!-- end -->", text, flags=re.S
    )


def usual_rows(studies: Studies) -> Iterator[tuple[str, str, dict[int, dict[str, Any]]]]:
    """Store, label and rows by seed of all results on the usual tasks."""
    for store, evidence in sorted(studies.items()):
        for (label, setting), of in sorted(evidence.rows.items()):
            if not setting:
                yield store, label, of


def leaderboard(studies: Studies) -> list[dict[str, Any]]:
    """An entry for each method and benchmark; leaderboard.schema.json says what the fields mean."""
    entries = []
    for store, label, of in usual_rows(studies):
        evidence, first = studies[store], next(iter(of.values()))
        if store.endswith(APART):
            continue
        lead = evidence.gaps([((label, ""), (BASE, ""))]).get(((label, ""), (BASE, "")))
        entry = {
            "benchmark": store, "data_hash": first["data_hash"], "method": label, "version": first["version"], "seeds": sorted(of),
            "tasks": first["num_tasks"], "avg": round(float(evidence.level((label, ""), "avg").mean()), 4),
            "w10": round(float(evidence.level((label, ""), "w10").mean()), 4),
            "lead": [round(x, 4) for x in lead.avg] if lead else None,
            "train_minutes": round(float(np.mean([r["train_minutes"] or 0 for r in of.values()])), 1),
            "adapt_ms": round(float(np.median([r["adapt_ms"] for r in of.values()])), 2),
            "config_hashes": sorted({r["config_hash"] for r in of.values()}), "commits": sorted({r["recorded"]["commit"] for r in of.values()}),
        }  # fmt: skip
        entries.append(entry)
    return sorted(entries, key=lambda e: (e["benchmark"], -e["avg"]))


def results_csv(studies: Studies) -> str:
    """A line for each result on the usual tasks."""
    fields = ("seed", "avg", "w10", "num_tasks", "train_minutes", "best_step", "steps", "adapt_ms", "predict_ms", "device", "package",
              "config_hash", "data_hash", "weights_hash")  # fmt: skip
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["study", "label", *fields, "commit"])
    for store, label, of in usual_rows(studies):
        for r in of.values():
            cells = [f"{x:.4f}" if isinstance(x := r.get(name, ""), float) else x for name in fields]
            writer.writerow([store, label, *cells, r["recorded"]["commit"]])
    return text.getvalue()


def made(studies: Studies) -> dict[Path, str]:
    """The text of each file that follows from the records."""
    filling = {name: make(studies) for name, make in (TABLES | ANSWERS).items()}
    pages = {page: filled(page.read_text(), filling) for page in PAGES}
    board = json.dumps(leaderboard(studies), indent=1) + "\n"
    return {**pages, HERE / "leaderboard.json": board, HERE / "results.csv": results_csv(studies)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and end with 1 where a file would change")
    args = parser.parse_args()
    texts = made(studies := load())
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{path}: {'differs from the records' if args.check else 'written'}")
        if not args.check:
            write_text(path, texts[path])
    if args.check:
        raise SystemExit(1 if stale else 0)
    figures.draw(HERE, studies)


if __name__ == "__main__":
    main()
