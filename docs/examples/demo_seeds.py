"""Counts how often the answers of `cxda demo` are right, before and after adapting,
for ten groups of writers. In a clone:

python -m docs.examples.demo_seeds --out=docs/results/demo.json
"""

import argparse
import csv
import json
import tempfile
from pathlib import Path

import cxda_jax
from cxda_jax.device.demo import demo
from cxda_jax.study.training import commit

SEEDS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a JSON file to write")
    given = parser.parse_args()
    card, rows = cxda_jax.load("glyphs").card, []
    for seed in range(SEEDS):
        with tempfile.TemporaryDirectory() as folder:
            demo(Path(folder), seed)
            with open(Path(folder) / "predictions.csv", encoding="utf-8") as file:
                answers = list(csv.DictReader(file))
        right = {when: sum(row[when] == row["label"] for row in answers) for when in ("before", "after")}
        rows.append({"seed": seed, "answers": len(answers), **right})
    model = {"method": card.method, "commit": card.commit, "step": card.step}
    given.out.write_text(json.dumps({"commit": commit(), "model": model, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
