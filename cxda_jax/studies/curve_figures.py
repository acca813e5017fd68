"""Tables and a figure of context curves: scores against the number of support images that have arrived."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from cxda_jax.methods.entry import Style
from cxda_jax.pages.figures import above_legend, axis_of_sizes, finish_axes
from cxda_jax.studies.curves import (
    AREA,
    LAST,
    ORDERS,
    SCORES,
    Curve,
    differences,
    find_curves,
    sizes_of,
)
from cxda_jax.studies.plots import Drawing
from cxda_jax.studies.result import Result
from cxda_jax.studies.settings import Setting
from cxda_jax.studies.statistics import Difference, shared_scores
from cxda_jax.studies.tables import NAN, ByCell, Cell, Column, Table, by_cell, own_marks
from cxda_jax.training.metrics import mean_sem

RIVAL = "erm_iid"  # a method that adapts has to beat it
Differences = Mapping[tuple[str, int], Difference]  # by label and size


class Measured(NamedTuple):
    """The curves of one store and order of arrival, and their differences."""

    kind: str  # of the settings
    store: str
    metric: str
    curves: Sequence[Curve]
    rival: str  # the label that the others are compared with
    gains: Differences  # to the same method in an empty context
    leads: Differences  # to the rival in the same context; empty where it was not tested


def measure_curves(results: Sequence[Result], rival: str = RIVAL) -> tuple[list[Measured], list[str]]:
    """The curves of all results of one store, and a fault for each result that could not be paired with the others."""
    ordered = [result for seeds in by_cell(results).values() for result in seeds]
    found, faults = [], []
    for kind in ORDERS:
        if not (curves := find_curves(ordered, kind)):
            continue
        scores, unlike = shared_scores([result for curve in curves for result in curve.results()])
        faults += unlike
        leads = differences(curves, scores, rival) if rival in {curve.label for curve in curves} else {}
        gains, first = differences(curves, scores), curves[0].results()[0]
        found.append(Measured(kind, first.store, first.metric, curves, rival, gains, leads))
    return found, faults


def context_tables(measured: Measured, left_out: Sequence[Result] = ()) -> list[Table]:
    """Tables of Avg and of W10%: each curve, its gains, and its leads.

    No mean holds the results `left_out`; marks name them.
    """
    late, name = by_cell(left_out), measured.metric.replace("macro_f1", "macro F1")
    constant = [curve.label for curve in measured.curves if curve.constant]
    alike = [f"One test stands for all columns of {', '.join(constant)}: no support is used."] if constant else []
    area = f"Area: the mean of the score over log(1 + n), from n = 0 to n = {LAST}."
    paired = "In points; bold where the 95 % bootstrap interval over the tasks leaves out 0."
    tables = []
    for score, title in SCORES.items():
        metric = f"{'mean' if score == 'avg' else 'worst10'}_{measured.metric}"
        what = f"{measured.store}: {title} {name} against the number n of support images, {ORDERS[measured.kind]}"
        levels = {
            (curve.label, size): _level(measured.kind, curve, size, score, late)
            for curve in measured.curves
            for size in (*sizes_of(measured.curves), AREA)
        }
        same = "A test sees the first n images of the support to arrive. All tests have the same queries."
        tables.append(_table(measured, measured.kind, what, metric, levels, same, area, *alike))
        for kind, than, found in (
            ("none", "n = 0", measured.gains),
            (measured.rival, f"{measured.rival} at the same n", measured.leads),
        ):
            cells = {}
            for key, difference in found.items():
                mean, low, high = getattr(difference, score)
                marks = level.marks if (level := levels[key]) else ()
                cells[key] = Cell(mean, NAN, difference.seeds, (), marks=marks, interval=(low, high))
            title_of = f"{what}: differences to {than}"
            key, of = f"{measured.kind}_minus_{kind}", f"{metric}_minus_{kind}"
            tables.append(_table(measured, key, title_of, of, cells, paired, area))
    return [table for table in tables if table.rows]


def _table(
    measured: Measured, key: str, title: str, metric: str, cells: Mapping[tuple[str, int], Cell | None], *notes: str
) -> Table:
    """A row for each curve that has a cell, and a column for each size that has one."""
    sizes = [
        n for n in (*sizes_of(measured.curves), AREA) if any(cell for (_, size), cell in cells.items() if size == n)
    ]
    # The sign of a difference says which is better.
    unit, higher = ("%", True) if key == measured.kind else ("points", None)
    columns = [
        Column("area", f"area_{metric}", unit, higher=higher)
        if n == AREA
        else Column(str(n), metric, unit, Setting(measured.kind, n), higher=higher)
        for n in sizes
    ]
    rows = ((curve.label, tuple(cells.get((curve.label, n)) for n in sizes)) for curve in measured.curves)
    return Table(key, measured.store, title, tuple(columns), tuple(row for row in rows if any(row[1])), notes)


def _level(kind: str, curve: Curve, size: int, score: str, late: ByCell) -> Cell | None:
    values = curve.level(size, score)
    if not values:
        return None
    seeds = curve.results(size)  # none of the area
    left_out = late.get((curve.label, Setting(kind, 0 if curve.constant else size)), [])
    marks = tuple(own_marks(seeds, left_out)) if seeds else ()
    folders = tuple(str(result.folder) for result in seeds)
    return Cell(*mean_sem(np.array(list(values.values()))), tuple(values), folders, marks=marks)


def drawings(measured: Sequence[Measured], styles: Mapping[str, Style]) -> Iterator[Drawing]:
    """A figure for each order of arrival."""
    for curves in measured:
        caption = (
            f"Avg and W10% against the number of support images, {ORDERS[curves.kind]}; the queries are the same. "
            "Means over training seeds, with standard errors in the first row, and paired 95 % bootstrap intervals "
            "over the tasks below."
        )
        yield Drawing(curves.kind, f"context curves, {ORDERS[curves.kind]}", caption, context_curves(curves, styles))


def context_curves(measured: Measured, styles: Mapping[str, Style]) -> Figure:
    """Avg and W10% side by side against n: each curve, below it its gains over n = 0,
    and below these its leads over the rival."""
    labels = {curve.label for curve in measured.curves}
    used = {label: style for label, style in styles.items() if label in labels}
    compared = ("n = 0", measured.gains), (measured.rival, measured.leads)
    differences = {than: found for than, found in compared if found}
    figure, sizes = above_legend(used, 3.2 + 2.2 * len(differences)), sizes_of(measured.curves)
    panels = figure.subplots(1 + len(differences), 2, squeeze=False)
    for column, (score, title) in enumerate(SCORES.items()):
        rows = {f"{title} {measured.metric.replace('_', ' ')} (%)": _levels(measured.curves, sizes, score)}
        for than, found in differences.items():
            spans = {key: getattr(difference, score) for key, difference in found.items()}
            bars = {key: (s.mean, s.mean - s.low, s.high - s.mean) for key, s in spans.items()}
            rows[f"{title} minus {than} (points)"] = bars
        for axes, (y, points) in zip(panels[:, column], rows.items(), strict=True):
            for label, style in used.items():
                if of_sizes := [(n, *points[label, n]) for n in sizes if (label, n) in points]:
                    numbers, means, *errors = np.transpose(of_sizes)
                    axes.errorbar(
                        numbers, means, errors, **style.arguments(lw=1.2, capsize=2, elinewidth=0.7, label=label)
                    )
            finish_axes(axes, measured.store, "number of support images", y)
            axis_of_sizes(axes, sizes, sizes[-1])  # even in log(1 + n), over which the area is taken
        for axes in panels[1:, column]:
            axes.axhline(0, color="0.4", lw=0.8)
            axes.set_title("")
    return figure


def _levels(curves: Sequence[Curve], sizes: Sequence[int], score: str) -> dict[tuple[str, int], tuple[float, ...]]:
    """By label and size, the mean over the seeds, and its standard error below and above."""
    seeds = {(curve.label, n): [*curve.level(n, score).values()] for curve in curves for n in sizes}
    means = {key: mean_sem(np.array(of_seeds)) for key, of_seeds in seeds.items() if of_seeds}
    return {key: (mean, sem, sem) for key, (mean, sem) in means.items()}
