"""A table in all its forms: for a terminal, Markdown, CSV, HTML.

The best mean of a column is bold. Letters at a cell point to its marks, which are explained below the table.
"""

import csv
import html
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from cxda_jax.machine.progress import aligned
from cxda_jax.studies.result import Result, named
from cxda_jax.studies.tables import NAN, Cell, Column, Table, agreement

CSV_COLUMNS = ("table", "benchmark", "method", "setting", "metric", "unit", "mean", "sem", "low", "high", "paper_mean",
               "paper_sem", "difference", "agreement", "seeds", "marks", "runs")  # fmt: skip


class CellText(NamedTuple):
    """The text of a cell, before a format escapes it."""

    cell: Cell
    number: str
    bold: bool
    letters: str  # of its marks
    paper: str  # the paper's figure and the difference, or nothing


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]], align: str = "---") -> str:
    """A table of cells that are Markdown already. `align` is the rule of all columns but the first."""
    lines = [heads, ["---", *[align] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def to_text(table: Table) -> str:
    """As a terminal shows it. A star stands where other formats are bold."""

    def write(text: CellText | None) -> str:
        return f"{text.number}{'*' * text.bold}{text.letters and f' ({text.letters})'}" if text else "-"

    rows, notes = _texts(table)
    heads = ["method", *map(_heading, table.columns)]
    cells = ([label, *map(write, texts)] for label, texts in rows)
    return "\n".join([table.title, *aligned([heads, *cells]), *notes])


def to_markdown(table: Table) -> str:
    """As GitHub shows it: a title, a table and its notes."""

    def escape(text: str) -> str:
        text = re.sub(r"([\\|_*`$~\[\]])", r"\\\1", _one_line(text))
        return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

    def write(text: CellText | None) -> str:
        if text is None:
            return "-"
        number = f"**{text.number}**" if text.bold else text.number
        return number + (text.letters and f" <sup>{text.letters}</sup>") + (text.paper and f"<br>{text.paper}")

    rows, notes = _texts(table)
    heads = ["method", *(escape(_heading(column)) for column in table.columns)]
    cells = ([escape(label), *map(write, texts)] for label, texts in rows)
    lines = [f"**{escape(table.title)}**", "", markdown(heads, cells, "---:")]
    lines += ["", *(f"{escape(note)}  " for note in notes)] if notes else []
    return "\n".join(lines) + "\n"


def to_csv(tables: Iterable[Table]) -> str:
    """One line for each cell of all tables. The columns that paper.csv has too bear the same names."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for table in tables:
        for label, cells in table.rows:
            for column, cell in zip(table.columns, cells, strict=True):
                if cell is None:
                    continue
                paper = cell.paper or (NAN, NAN)
                numbers = cell.mean, cell.sem, *(cell.interval or (NAN, NAN)), *paper, cell.mean - paper[0]
                texts = ("" if math.isnan(n) else f"{n:.4f}".rstrip("0").rstrip(".") for n in numbers)
                head = table.name, table.benchmark, label, column.setting, column.metric, column.unit
                tail = agreement(cell), " ".join(map(str, cell.seeds)), "; ".join(cell.marks), " ".join(cell.runs)
                writer.writerow([*head, *texts, *tail])
    return file.getvalue()


def to_html(table: Table, link: Callable[[str], str] = lambda run: "") -> str:
    """A table whose columns a script can sort, and its notes. `link` gives the address of a run, or nothing."""

    def write(text: CellText | None) -> str:
        if text is None:
            return "<td>–</td>"
        number, runs = f"<b>{text.number}</b>" if text.bold else text.number, text.cell.runs
        if address := link(runs[0]) if runs else "":
            number = f'<a href="{html.escape(address)}" title="{html.escape(" ".join(runs))}">{number}</a>'
        number += text.letters and f"<sup>{text.letters}</sup>"
        small = text.paper and f"<br><small>{html.escape(text.paper)}</small>"
        return f'<td data-value="{text.cell.mean:.6g}">{number}{small}</td>'

    rows, notes = _texts(table)
    heads = "<tr><th>method</th>" + "".join(f"<th>{html.escape(_heading(c))}</th>" for c in table.columns) + "</tr>"
    body = "\n".join(f"<tr><td>{html.escape(label)}</td>{''.join(map(write, texts))}</tr>" for label, texts in rows)
    return (
        f'<table class="sortable"><caption>{html.escape(table.title)}</caption>\n<thead>{heads}</thead>\n'
        f"<tbody>\n{body}\n</tbody></table>\n" + "".join(f'<p class="notes">{html.escape(n)}</p>\n' for n in notes)
    )


def runs_html(results: Iterable[Result]) -> str:
    """A table of all results, folded away: where each lies and what made it. Row N has the id run-N."""
    heads = rows = ""
    for i, result in enumerate(named(results)):
        minutes = "" if result.train_minutes is None else f", {result.train_minutes:.1f} min"
        steps = f"unfinished: {result.reached_step} of {result.steps}" if result.unfinished else result.steps
        entries = {
            "folder": result.folder, "data set": result.store, "method": result.label, "seed": result.seed,
            "tasks": result.num_tasks, "training": f"{steps} steps{minutes}", "config": result.config_hash[:12],
            "weights": result.weights_hash[:12], "data": result.data_hash[:12],
            "version": f"{result.package}, method {result.version}", "device": result.device,
        }  # fmt: skip
        heads = "".join(f"<th>{name}</th>" for name in entries)
        cells = "".join(f"<td>{html.escape(str(entry))}</td>" for entry in entries.values())
        rows += f'<tr id="run-{i}">{cells}</tr>\n'
    return (
        '<details><summary>All results, and what they followed from</summary>\n<table class="sortable"><caption>Runs'
        f"</caption>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}</tbody></table>\n</details>"
    )


def _texts(table: Table) -> tuple[list[tuple[str, list[CellText | None]]], list[str]]:
    """Each row's label and texts, and the notes below the table: its own, then each mark after its letter."""
    marks = dict.fromkeys(mark for _, cells in table.rows for cell in cells if cell for mark in cell.marks)
    letters = {mark: chr(97 + i) if i < 26 else f"a{i - 25}" for i, mark in enumerate(marks)}
    best = [_best(column, [cells[i] for _, cells in table.rows]) for i, column in enumerate(table.columns)]

    def text(cell: Cell | None, best: float | None) -> CellText | None:
        if cell is None:
            return None
        number, bold, paper = f"{cell.mean:.1f}", round(cell.mean, 1) == best, ""
        if cell.interval:
            low, high = cell.interval
            number, bold = f"{cell.mean:+.1f} [{low:+.1f}, {high:+.1f}]", not low <= 0 <= high
        elif not math.isnan(cell.sem):
            number += f" ± {cell.sem:.1f}"
        if cell.paper:
            mean, sem = cell.paper
            paper = f"paper {mean:.1f} ± {sem:.1f}; {cell.mean - mean:+.1f}, {agreement(cell)}"
        return CellText(cell, number, bold, ",".join(sorted(letters[mark] for mark in cell.marks)), paper)

    rows = [(label, list(map(text, cells, best))) for label, cells in table.rows]
    return rows, [*table.notes, *(f"{letter}: {mark}" for mark, letter in letters.items())]


def _best(column: Column, cells: Iterable[Cell | None]) -> float | None:
    """The best mean of a column, as it is shown; None where the column has no order or one cell alone."""
    means = [round(cell.mean, 1) for cell in cells if cell]
    ordered = column.higher is not None and len(means) > 1
    return (max if column.higher else min)(means) if ordered else None


def _heading(column: Column) -> str:
    unit = "" if column.unit in ("%", "points") else f" ({column.unit})"
    return f"{column.title}{unit}"


def _one_line(text: str) -> str:
    """The text without control characters, which would end a line, a row or a file early."""
    return "".join(c if c.isprintable() or not c.isascii() else " " for c in " ".join(text.split()))
