"""Tables and sentences of a page under docs/, and what its records in docs/results have."""

import json
import re
from itertools import product
from pathlib import Path

import numpy as np

DOCS = Path(__file__).parent.parent / "docs"
STORES, SIZES = ("unipen", "unipen_sizes", "qmnist", "cifar10_c", "glyphs"), (0, 1, 2, 5, 10, 20, 50, 100)
SCORES = {"avg": "Avg", "w10": "W10%"}


def load(name):
    return json.loads((DOCS / "results" / f"{name}.json").read_text())


def read(page):
    """All tables of a page, as lists of cells, and its text in one line."""
    text = (DOCS / page).read_text()
    lines = [[[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
             for table in re.findall(r"(?:^\|.*\|\n)+", text, re.M)]  # fmt: skip
    return [[header, *rows] for header, _, *rows in lines], " ".join(text.split())


def grouped(name, *keys, part="rows"):
    """The rows of a record by the values that they have under some keys."""
    groups = {}
    for row in load(name)[part]:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def single(*arguments, **options):
    """The same, where no two rows have the same values."""
    return {key: row for key, (row,) in grouped(*arguments, **options).items()}


def ordered(found, *names):
    """What a record has, in the order of the page. What the page does not show is an error."""
    return sorted(set(found), key=names.index)


def mean(rows, score="avg"):
    return float(np.mean([row[score] for row in rows]))


def spreads(rows):
    """Means and their standard errors over the seeds."""
    assert [row["seed"] for row in rows] == [0, 1, 2] and {row["num_tasks"] for row in rows} == {600}
    errors = {score: np.std([row[score] for row in rows], ddof=1) / 3**0.5 for score in SCORES}
    return " / ".join(f"{mean(rows, score):.1f} ± {error:.1f}" for score, error in errors.items())


def level(row, size=None):
    return " / ".join(f"{row[score] if size is None else row[score][str(size)]:.1f}" for score in SCORES)


def rounded(x, form="+.1f"):
    """The texts of what a record has with two digits: a last 5 may be rounded either way, as it was rounded itself."""
    return {f"{y:{form}}" for y in ((x - 0.001, x + 0.001) if round(100 * x) % 10 == 5 else (x,))}


def gap(values, bold=False):
    texts = {f"{x} ({low} to {high})" for x, low, high in product(*map(rounded, values))}
    return {f"**{text}**" for text in texts} if bold else texts


def says(page, *sentences):
    assert [sentence for sentence in sentences if sentence not in read(page)[1]] == []


def columns(sizes):
    return [f"n = {n}" for n in sizes]


def check_tables(page, makers):
    """Each table of a page is what its maker yields, row by row.

    Args:
      makers: of the tables in their order; None stands for a table of words, or one without a record. A cell that is None may
        hold anything, and a set holds the texts that are right.
    """
    for table, make in zip(read(page)[0], makers, strict=True):
        rows = list(make()) if make else table
        assert len(table) == len(rows), f"rows of the page: {[row[0] for row in table]}"
        for row, known in zip(table, rows, strict=True):
            agree = [
                x is None or cell in (x if isinstance(x, set) else {x}) for cell, x in zip(row, known, strict=True)
            ]
            assert all(agree), f"the page has {row}, the record {known}"
