"""A table as text: Markdown, LaTeX, CSV, HTML.

The best of a column is bold. What sets a cell apart from the paper's figure is told by letters, explained below the table.
"""

import csv
import html
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping

from cxda_jax.analysis.results import Result, is_unfinished, named
from cxda_jax.analysis.tables import NAN, Cell, Column, Table, agreement

CSV_COLUMNS = ("table", "benchmark", "method", "setting", "metric", "unit", "mean", "sem", "low", "high", "paper_mean",
               "paper_sem", "difference", "agreement", "seeds", "marks", "runs")  # fmt: skip


def to_markdown(table: Table) -> str:
    """As GitHub shows it: a table, its notes and the letters of its marks."""
    letters = _letters(table)

    def cell(found: Cell | None, column: int) -> str:
        if found is None:
            return "-"
        text = f"**{_text(found)}**" if _is_bold(table, found, column) else _text(found)
        marks = f" <sup>{_marks(found, letters)}</sup>" if found.marks else ""
        return f"{text}{marks}" + (f"<br>{_beside(found)}" if found.paper else "")

    def escape(text: str) -> str:
        text = re.sub(r"([\\|_*`$~\[\]])", r"\\\1", _one_line(text))
        return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

    heads = [escape(f"{c.above} {_heading(c)}".strip()) for c in table.columns]
    lines = [f"| method | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for label, cells in table.rows:
        lines.append(f"| {escape(label)} | {' | '.join(cell(c, i) for i, c in enumerate(cells))} |")
    notes = [*table.notes, *(f"{letter}: {mark}" for mark, letter in letters.items())]
    below = ["", *(f"{escape(note)}  " for note in notes)] if notes else []
    return "\n".join([f"**{escape(table.title)}**", "", *lines, *below]) + "\n"


def to_latex(table: Table) -> str:
    """A table environment; needs the packages booktabs and, for wide ones, graphicx."""
    letters = _letters(table)

    def escape(text: str) -> str:
        names = {"\\": "backslash", "~": "asciitilde", "^": "asciicircum", "<": "less", ">": "greater", "|": "bar"}
        signs = {sign: f"\\text{name}{{}}" for sign, name in names.items()} | {"±": r"$\pm$"}
        text = re.sub(r"[\\±~^<>|&%$#_{}]", lambda m: signs.get(m[0], f"\\{m[0]}"), _one_line(text))
        return re.sub(r"(?<![\w.])-(?=\d)", "$-$", text)  # a minus sign

    def cell(found: Cell | None, column: int) -> str:
        if found is None:
            return "--"
        text = escape(_text(found))
        text = f"\\textbf{{{text}}}" if _is_bold(table, found, column) else text
        marks = f"$^{{{_marks(found, letters)}}}$" if found.marks else ""
        if not found.paper:
            return text + marks
        return f"\\shortstack[r]{{{text}{marks}\\\\{{\\scriptsize {escape(_beside(found))}}}}}"

    above = _spans(table)
    lines = [r"\begin{table}", r"\centering", f"\\caption{{{escape(table.title)}}}"]
    lines += [r"\resizebox{\textwidth}{!}{%"] if len(table.columns) > 6 else []
    lines += [f"\\begin{{tabular}}{{l{'r' * len(table.columns)}}}", r"\toprule"]
    if any(title for title, _ in above):
        lines.append(" & ".join(["", *(f"\\multicolumn{{{n}}}{{c}}{{{escape(t)}}}" for t, n in above)]) + r" \\")
    lines.append(" & ".join(["method", *(escape(_heading(c)) for c in table.columns)]) + r" \\")
    lines.append(r"\midrule")
    for label, cells in table.rows:
        start = "{}" * label.startswith(("[", "*"))  # which would be read as the argument of the line break above
        lines.append(" & ".join([start + escape(label), *(cell(c, i) for i, c in enumerate(cells))]) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}" + ("}" if len(table.columns) > 6 else "")]
    notes = [*table.notes, *(f"{letter}: {mark}" for mark, letter in letters.items())]
    lines += [f"\\par\\footnotesize {escape(note)}" for note in notes]
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def _one_line(text: str) -> str:
    """Without what would end a line, a row or a file early."""
    return "".join(c if c.isprintable() or not c.isascii() else " " for c in " ".join(text.split()))


def _spans(table: Table) -> list[tuple[str, int]]:
    """Titles over columns, and how many columns each spans."""
    spans: list[tuple[str, int]] = []
    for column in table.columns:
        if spans and spans[-1][0] == column.above:
            spans[-1] = column.above, spans[-1][1] + 1
        else:
            spans.append((column.above, 1))
    return spans


def to_csv(tables: Iterable[Table]) -> str:
    """One line for each cell of all tables; the first eight columns are those of the paper's file."""
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
                mean, sem, *others = (_plain_number(number) for number in numbers)
                writer.writerow(
                    [table.name, table.benchmark, label, column.setting, column.metric, column.unit, mean, sem]
                    + [*others, agreement(cell), " ".join(map(str, cell.seeds)), "; ".join(cell.marks)]
                    + [" ".join(cell.runs)]
                )
    return file.getvalue()


def _plain_number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4f}".rstrip("0").rstrip(".")


def to_html(table: Table, link: Callable[[str], str] = lambda run: "") -> str:
    """A table whose columns a script can sort, and its notes; `link` gives the address of a run, or nothing."""
    letters = _letters(table)

    def cell(found: Cell | None, column: int) -> str:
        if found is None:
            return "<td>–</td>"
        text = f"<b>{_text(found)}</b>" if _is_bold(table, found, column) else _text(found)
        runs = html.escape(" ".join(found.runs), quote=True)
        address = html.escape(link(found.runs[0]), quote=True) if found.runs else ""
        text = f'<a href="{address}" title="{runs}">{text}</a>' if address else text
        marks = f"<sup>{_marks(found, letters)}</sup>" if found.marks else ""
        small = f"<br><small>{html.escape(_beside(found))}</small>" if found.paper else ""
        return f'<td data-value="{found.mean:.6g}">{text}{marks}{small}</td>'

    above = _spans(table)
    heads = ""
    if any(title for title, _ in above):
        heads = "<tr><td></td>" + "".join(f'<th colspan="{n}">{html.escape(t)}</th>' for t, n in above) + "</tr>\n"
    heads += "<tr><th>method</th>" + "".join(f"<th>{html.escape(_heading(c))}</th>" for c in table.columns) + "</tr>"
    rows = "\n".join(
        f"<tr><td>{html.escape(label)}</td>{''.join(cell(c, i) for i, c in enumerate(cells))}</tr>"
        for label, cells in table.rows
    )
    notes = [*table.notes, *(f"{letter}: {mark}" for mark, letter in letters.items())]
    return (
        f'<table class="sortable"><caption>{html.escape(table.title)}</caption>\n<thead>{heads}</thead>\n'
        f"<tbody>\n{rows}\n</tbody></table>\n" + "".join(f'<p class="notes">{html.escape(n)}</p>\n' for n in notes)
    )


def runs_html(results: Iterable[Result]) -> str:
    """All results, folded away, each with the id run-N: where it lies and all that it followed from."""
    heads = (
        "folder",
        "data set",
        "method",
        "seed",
        "tasks",
        "training",
        "config",
        "weights",
        "data",
        "version",
        "device",
    )
    rows = ""
    for i, result in enumerate(named(results)):
        row = result.row
        minutes = "" if row["train_minutes"] is None else f", {row['train_minutes']:.1f} min"
        steps = f"unfinished: {row['reached_step']} of {row['steps']}" if is_unfinished(row) else row["steps"]
        hashes = [row[f"{name}_hash"][:12] for name in ("config", "weights", "data")]
        cells = [result.folder, result.store, row.get("label") or row["method"], row["seed"], row["num_tasks"]]
        cells += [f"{steps} steps{minutes}"]
        cells += [*hashes, f"{row['package']}, method {row['version']}", row["device"]]
        rows += f'<tr id="run-{i}">' + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>\n"
    head = "".join(f"<th>{name}</th>" for name in heads)
    return (
        '<details><summary>All results, and what they followed from</summary>\n<table class="sortable"><caption>Runs'
        f"</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody></table>\n</details>"
    )


def _is_bold(table: Table, cell: Cell, column: int) -> bool:
    """The best of its column, or an interval without 0."""
    if cell.interval:
        return not cell.interval[0] <= 0 <= cell.interval[1]
    higher = table.columns[column].higher
    others = [cells[column] for _, cells in table.rows]
    means = [round(other.mean, 1) for other in others if other]
    return higher is not None and len(means) > 1 and round(cell.mean, 1) == (max(means) if higher else min(means))


def _text(cell: Cell) -> str:
    if cell.interval:
        return f"{cell.mean:+.1f} [{cell.interval[0]:+.1f}, {cell.interval[1]:+.1f}]"
    return f"{cell.mean:.1f}" if math.isnan(cell.sem) else f"{cell.mean:.1f} ± {cell.sem:.1f}"


def _beside(cell: Cell) -> str:
    """The paper's figure and the difference."""
    if cell.paper is None:
        return ""
    return f"paper {cell.paper[0]:.1f} ± {cell.paper[1]:.1f}; {cell.mean - cell.paper[0]:+.1f}, {agreement(cell)}"


def _letters(table: Table) -> dict[str, str]:
    """A letter for each mark, in order of appearance."""
    marks = dict.fromkeys(mark for _, cells in table.rows for cell in cells if cell for mark in cell.marks)
    return {mark: chr(97 + i) if i < 26 else f"a{i - 25}" for i, mark in enumerate(marks)}


def _marks(cell: Cell, letters: Mapping[str, str]) -> str:
    return ",".join(sorted(letters[mark] for mark in cell.marks))


def _heading(column: Column) -> str:
    unit = "" if column.unit in ("%", "points") else f" ({column.unit})"
    return f"{column.title}{unit}"
