"""Marks on a common scale, a row for each thing: SVG in the colours of the page, as wide as there is room."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cxda_jax.errors import printable

SHAPES = {  # around 0, 0 in pixels; the first two are strong, the others are lighter
    "bar": '<path d="M-7-4H7V4H-7z"/>',  # in a legend; in a row it begins at 0
    "dot": '<circle r="5"/>',
    "ring": '<circle r="4.5"/>',
    "diamond": '<path d="M0-5.5 5.5 0 0 5.5-5.5 0z"/>',
    "triangle": '<path d="M0-5 5.5 4.5-5.5 4.5z"/>',
    "square": '<path d="M-4-4H4V4H-4z"/>',
}
STRONG = ("bar", "dot")
EDGE = 3  # per cent of the width on both sides of the scale
FIRST, MOST = 20, 200  # rows before a fold, and in all


class Row(NamedTuple):
    """A row: its name, what it says in words, and by shape a value, or a value with the ends of its interval."""

    name: str
    said: str
    marks: Mapping[str, Sequence[float]]


class _Scale(NamedTuple):
    low: float
    high: float
    ticks: Sequence[float]

    def __call__(self, value: float) -> str:
        """Where a value is, in per cent of the width."""
        part = (value - self.low) / (self.high - self.low)
        return f"{EDGE + (100 - 2 * EDGE) * part:.2f}%"


def picture(rows: Sequence[Row], legend: Mapping[str, str], unit: str) -> str:
    """The rows as safe HTML below a legend, which names the shapes, and above an axis in this unit.

    The first rows are shown and the others stand behind a fold.
    """
    scale = _scale([value for row in rows for values in row.marks.values() for value in values])
    names = "".join(f"<span>{_small(shape)} {html.escape(name)}</span>" for shape, name in legend.items())
    shown = f'<p class="legend">{names}</p>{_list(rows[:FIRST], scale, legend, unit)}'
    if rest := rows[FIRST:MOST]:
        shown += fold(f"{len(rest)} more", _list(rest, scale, legend, unit))
    if left := len(rows[MOST:]):
        shown += f'<p class="notes">{left:,} more are not shown.</p>'
    return shown


def fold(title: str, content: str) -> str:
    """Safe HTML behind a title."""
    return f"<details><summary>{html.escape(title)}</summary>{content}</details>\n"


def _list(rows: Sequence[Row], scale: _Scale, legend: Mapping[str, str], unit: str) -> str:
    items = "".join(_item(row, scale, len(legend) > 2) for row in rows)
    labels = "".join(f'<text x="{scale(tick)}" y="14">{tick:g}</text>' for tick in scale.ticks)
    axis = f'<li class="axis" aria-hidden="true"><span></span><svg>{labels}</svg><span>{html.escape(unit)}</span></li>'
    return f'<ul class="rows" role="list">{items}{axis}</ul>\n'


def _item(row: Row, scale: _Scale, lanes: bool) -> str:
    """A row; with lanes the lighter marks stand below the strong ones."""
    drawn = "".join(
        f'<line class="{"zero" if tick == 0 else "tick"}" x1="{scale(tick)}" x2="{scale(tick)}" y2="100%"/>'
        for tick in scale.ticks
    )
    for shape, (value, *span) in sorted(row.marks.items(), key=lambda mark: mark[0] in STRONG):
        y = "50%" if not lanes else "32%" if shape in STRONG else "74%"
        if span:
            ends = f'x1="{scale(span[0])}" x2="{scale(span[1])}" y1="{y}" y2="{y}"'
            drawn += f'<line class="span" {ends}/>'
        if shape == "bar":
            left, right = sorted((0.0, value))
            width = float(scale(right)[:-1]) - float(scale(left)[:-1])
            drawn += f'<rect class="mark bars" x="{scale(left)}" y="20%" width="{width:.2f}%" height="60%"/>'
        else:
            drawn += f'<svg class="mark {shape}s" x="{scale(value)}" y="{y}">{SHAPES[shape]}</svg>'
    name, said = (html.escape(printable(text)) for text in (row.name, row.said))
    tall = ' class="lanes"' if lanes else ""
    return f'<li{tall}><span>{name}</span><svg aria-hidden="true">{drawn}</svg><span>{said}</span></li>'


def _small(shape: str) -> str:
    return f'<svg class="key" aria-hidden="true"><svg class="mark {shape}s" x="8" y="8">{SHAPES[shape]}</svg></svg>'


def _scale(values: Sequence[float]) -> _Scale:
    """A scale that holds 0 and the values, with a few round ticks."""
    low, high = min(0.0, *values), max(0.0, *values)
    if low == high:
        high = 1.0
    rough = (high - low) / 7
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(times * power for times in (1, 2, 5, 10) if times * power >= rough)
    return _Scale(low, high, [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)])
