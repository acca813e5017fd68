"""The page of one adaptation: answers before and after, the gain to expect, and the images of the buffer."""

import html
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from cxda_jax.disk.models import Gain
from cxda_jax.errors import printable
from cxda_jax.methods.entry import BLUE, RED, Style
from cxda_jax.pages import figures
from cxda_jax.pages.page import ExplorerTask, Page, Section, encode, figure_part, sheet, table_part, write_page
from cxda_jax.pages.rows import Row, picture

SHOWN = 500  # images of the buffer
WEIGHTS = 750_000  # of the explorer, which take 2 MB of the file
NEAREST = 5  # images of the buffer that are named for each answer
ROW, NEAR, TILE = 48, 34, 64  # pixels of the longer side: in a row, near an answer, and in the sheet of the buffer
_USED = {
    True: "The adapted answers make use of them.",
    False: "The adapted answers do not use them, as unseen domains gained nothing by them in cxda fit.",
}
EXPLAINED = (
    "\n<p>For each of your images, the model weighs the images of your buffer. "
    "It adapts its features by those with much weight.\n"
    "Here a query is one of your images, and the support images are those of your buffer. "
    "Choose a query by a click, the arrow\nkeys, Home or End. "
    "The answers before and after stand below its image. The support images are ranked by weight. "
    "The weight\nis a multiple of the average image's weight: 2.00 x is twice the average.</p>\n"
)


class Answered(NamedTuple):
    """A user's image as the network saw it, and its class before and after adapting.

    Confidences lie in 0..1. So does `moved`: half the sum of the absolute differences of the two distributions over
    the classes. `label` is empty where nobody knows it.
    """

    file: str
    image: np.ndarray  # uint8 [h, w, c] with 1 or 3 channels
    before: str
    before_confidence: float
    after: str
    after_confidence: float
    moved: float
    weights: np.ndarray | None  # [heads, n]: attention on the buffer, if the method attends
    label: str = ""

    @property
    def corrected(self) -> bool:
        return self.before != self.after == self.label

    @property
    def spoiled(self) -> bool:
        return self.after != self.before == self.label

    @property
    def order(self) -> tuple[bool, bool, bool, float]:
        """By which answers are shown: changed ones first, the corrected before the spoiled; then how far they moved."""
        return self.before == self.after, not self.corrected, not self.spoiled, -self.moved

    @property
    def nearest(self) -> list[int]:
        """Places in the buffer of the images with most weight."""
        return [] if self.weights is None else np.argsort(-self.weights.mean(0), kind="stable")[:NEAREST].tolist()


class ClassShares(NamedTuple):
    """The class shares that an adapter estimates on a device, and those in training. They lie in 0..1.

    `used` says whether the answers read the estimated ones.
    """

    names: Sequence[str]
    trained: np.ndarray  # [classes]
    found: np.ndarray
    used: bool


def first(answers: Sequence[Answered], most: int) -> list[Answered]:
    """The first `most` answers in their order. Of these a quarter is for the spoiled ones, if there are so many."""
    ordered = sorted(answers, key=lambda answer: answer.order)
    corrected, others = ([a for a in ordered if a.corrected is is_one] for is_one in (True, False))
    kept = most - min(sum(a.spoiled for a in others), most // 4)
    return [*corrected[:kept], *others][:most]


class AdaptedPage(NamedTuple):
    """The content of the page: of all `total` answers the first in their order, and a buffer of any size."""

    title: str
    summary: Sequence[tuple[str, str]]
    answers: Sequence[Answered]
    total: int
    buffer: np.ndarray  # uint8 [n, h, w, c], of the answers' size; n may be 0
    buffer_files: Sequence[str]
    gain: Gain | None
    faults: Sequence[str]  # a line for each thing that was left out
    shares: ClassShares | None = None


def write_adapted(path: Path, page: AdaptedPage) -> int:
    """Writes the page and returns its size in bytes. Where it would pass 5 MB, it has no explorer."""
    answers = sorted(page.answers, key=lambda answer: answer.order)
    names, kept = [printable(file) for file in page.buffer_files], _kept(page, answers)
    # The explorer's task begins with the same images in the same order, so that one sheet serves all of the page.
    images = [*page.buffer[kept], *(answer.image for answer in answers)]
    pictures = sheet(np.stack(images)) if images else {"data": ""}
    tasks, explained = [], EXPLAINED
    attending = [answer.weights[:, kept] for answer in answers if answer.weights is not None]
    if attending and kept:
        count = max(1, WEIGHTS // attending[0].size)
        queries = answers[:count]
        # Multiples of uniform attention stay those of the whole buffer.
        weights = np.stack(attending[:count], dtype=np.float64) * (len(names) / len(kept))
        tasks = [encode(_task(page.buffer[kept], [names[i] for i in kept], queries, weights), pictures)]
        if len(queries) < len(answers) or len(kept) < len(names):
            shown = f"{len(queries):,} of the {len(answers):,} answers above and {len(kept):,} of the {len(names):,}"
            explained += f"<p>For want of room, the explorer shows {shown} images of the buffer.</p>\n"
    sections = [
        Section("answers", "Answers before and after", _answers(page, answers, names, kept, pictures)),
        Section("shares", "Class shares on your device", _shares(page.shares, len(names)) if page.shares else []),
        Section("gain", "Expected gain by buffer size", _gain(page.gain, len(names)) if page.gain else []),
        Section("buffer", "Your buffer", [("", _buffer(names, kept, pictures))]),
    ]
    summary = [(name, printable(fact)) for name, fact in page.summary]
    faults = [printable(fault) for fault in page.faults]
    whole = Page(
        printable(page.title), summary, faults, sections, tasks, explained=explained, sheet=pictures["data"]
    )  # fmt: skip
    return write_page(path, whole)


def _kept(page: AdaptedPage, answers: Sequence[Answered]) -> list[int]:
    """The places in the buffer of the images that the page shows, ascending: those nearest to an answer come first."""
    nearest = itertools.chain.from_iterable(answer.nearest for answer in answers)
    places = dict.fromkeys([*nearest, *range(len(page.buffer))])
    return sorted(itertools.islice(places, SHOWN))


def _task(support: np.ndarray, files: Sequence[str], answers: Sequence[Answered], weights: np.ndarray) -> ExplorerTask:
    """Answers as queries, and the images of the buffer that are shown as support."""

    def texts(field: str) -> tuple[str, ...]:
        return tuple(printable(getattr(answer, field)) for answer in answers)

    query = np.stack([answer.image for answer in answers])
    return ExplorerTask(
        name="", support=support, support_domains=(), support_labels=(), query=query, query_domain="", query_labels=(),
        answers={"Before": texts("before"), "After": texts("after")}, weights=weights, support_files=tuple(files),
        query_files=texts("file"),
    )  # fmt: skip


def _text(name: str) -> str:
    """The name of a file or class, which may hold anything, as HTML."""
    return html.escape(printable(name))


def _picture(pictures: Mapping[str, Any], i: int, wanted: int, name: str = "") -> str:
    """Image i of the page's sheet, as report.js draws it. Where no text beside it has its name, it is given one."""
    width, height, columns = (pictures[field] for field in ("width", "height", "columns"))
    exact = wanted / max(width, height)
    scale = max(1, round(exact)) if pictures["tiny"] else exact
    row, column = divmod(i, columns)
    x, y = -(column * (width + 2) + 1) * scale, -(row * (height + 2) + 1) * scale
    box = f"width:{width * scale:.2f}px;height:{height * scale:.2f}px"
    place = f"background-position:{x:.2f}px {y:.2f}px;background-size:{columns * (width + 2) * scale:.2f}px auto"
    said = f'role="img" aria-label="{name}" title="{name}"' if name else 'aria-hidden="true"'
    return f'<span class="picture{" tiny" * pictures["tiny"]}" {said} style="{box};{place}"></span>'


def _answers(
    page: AdaptedPage, answers: Sequence[Answered], names: Sequence[str], kept: Sequence[int],
    pictures: Mapping[str, Any],
) -> list[tuple[str, str]]:  # fmt: skip
    """The table of answers, or nothing where there are none."""
    if not answers:
        return []
    labelled, near = any(answer.label for answer in answers), any(answer.nearest for answer in answers)
    tiles = {place: i for i, place in enumerate(kept)}
    rows = ""
    for number, answer in enumerate(answers, 1):
        mark = _mark(answer)
        shown = f"{_picture(pictures, len(kept) + number - 1, ROW)}{number}{mark}"
        cells = [
            f'<td data-value="{number}">{shown}</td>',
            f'<td><div class="file" title="{_text(answer.file)}">{_text(answer.file)}</div></td>',
            f"<td>{_text(answer.before)}</td>{_number(answer.before_confidence)}",
            f'<td class="after">{_text(answer.after)}</td>{_number(answer.after_confidence)}',
            _number(answer.moved),
            f"<td>{_verdicts(answer)}</td>" * labelled,
            f"<td>{_nearest(answer, names, tiles, pictures)}</td>" * near,
        ]
        of_row = f' class="changed{" spoiled" * answer.spoiled}"' * bool(mark)
        rows += f"<tr{of_row}>{''.join(cells)}</tr>\n"
    heads = ["Image", "File", "Before", "Confidence before", "After", "Confidence after", "Moved"]
    heads += ["Label"] * labelled
    head = "".join(f"<th>{text}</th>" for text in heads) + "<th data-unsorted>Nearest in the buffer</th>" * near
    count, total = len(answers), page.total
    shown = f"The first {count:,} of {total:,} answers" if count < total else f"All {total:,} answers"
    kinds = " (the corrected before the spoiled)" * labelled
    caption = f"{shown}: those that changed{kinds}, then the others, each by how far they moved"
    changes = sum(answer.before != answer.after for answer in answers)
    notes = [
        f"{changes:,} of these {count:,} answers changed; their rows say so.",
        f"By the labels {sum(a.corrected for a in answers):,} of these were corrected and "
        f"{sum(a.spoiled for a in answers):,} spoiled." * labelled,
        "Moved: how much of the probability went from some classes to others.",
        "Nearest: the images of the buffer with most weight; your browser shows a name when you point at one." * near,
    ]
    table = (
        f'<table class="sortable"><caption>{caption}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{rows}</tbody></table>"
    )
    return [table_part(1, f'{table}<p class="notes">{" ".join(filter(None, notes))}</p>')]


def _mark(answer: Answered) -> str:
    """What adapting did to an answer, where it did something."""
    if answer.before == answer.after:
        return ""
    if answer.corrected:
        return '<b class="right">✓ corrected</b>'
    return '<b class="wrong">✗ spoiled</b>' if answer.spoiled else "<b>≠ changed</b>"


def _number(part: float) -> str:
    return f'<td data-value="{part:.6f}">{100 * part:.1f} %</td>'


def _verdicts(answer: Answered) -> str:
    """The label, where it is known, and whether each of the two answers is right."""
    if not answer.label:
        return "–"
    marks = {True: '<span class="right">✓ right</span>', False: '<span class="wrong">✗ wrong</span>'}
    before, after = marks[answer.before == answer.label], marks[answer.after == answer.label]
    return f"{_text(answer.label)}<div>before {before}</div><div>after {after}</div>"


def _nearest(answer: Answered, names: Sequence[str], tiles: Mapping[int, int], pictures: Mapping[str, Any]) -> str:
    """Small images. Of one that the page has no room for, there is the name alone."""
    shown = [
        _picture(pictures, tiles[place], NEAR, html.escape(names[place]))
        if place in tiles
        else f'<span class="file">{html.escape(names[place])}</span>'
        for place in answer.nearest
    ]
    return f'<div class="near">{"".join(shown)}</div>'


def _shares(shares: ClassShares, size: int) -> list[tuple[str, str]]:
    """A row for each class, the largest difference first."""
    rows = []
    for i in map(int, np.argsort(-np.abs(shares.found - shares.trained), kind="stable")):
        trained, found = 100 * float(shares.trained[i]), 100 * float(shares.found[i])
        rows.append(Row(shares.names[i], f"{trained:.1f} % → {found:.1f} %", {"ring": [trained], "dot": [found]}))
    said = (
        f"The adapter estimates these from the {_images(size)} of your buffer, without labels; few images leave them "
        f"near those in training. {_USED[shares.used]} No interval is given: one that follows from the images alone "
        "would know nothing of the classifier's errors, and be too narrow."
    )
    legend = {"ring": "in training", "dot": "estimated on your device"}
    return [("", f"<p>{said}</p>{picture(rows, legend, 'per cent')}")]


def _gain(gain: Gain, size: int) -> list[tuple[str, str]]:
    caption = (
        "The score with a buffer of this size minus the score with an empty buffer, in points. Both were measured on "
        "validation tasks. Bars are 95 % intervals. Your images are others, so your gain can differ. "
    )
    caption += f"The dashed line marks your buffer of {_images(size)}"
    if gain.sizes[0] <= size <= gain.sizes[-1]:
        at, known = np.log1p(size), np.log1p(gain.sizes)  # as the axis has it
        mean, low, high = (np.interp(at, known, values) for values in (gain.mean, gain.low, gain.high))
        caption += f", where the expected gain is {mean:+.1f} points ({low:+.1f} to {high:+.1f})."
    else:
        caption += ". No buffer of that size was measured."
    svg = figures.to_svg(gain_figure(gain, size))
    return [figure_part(1, "Gain against the number of images", caption, svg)]


def gain_figure(gain: Gain, size: int) -> Figure:
    """The gain against the buffer's size, with its interval. A line marks the present size."""
    styles = {
        "expected gain": Style(BLUE, "o"),
        f"your buffer of {_images(size)}": Style(RED, "", (5, 2)),
    }
    (expected, mean), (present, line) = styles.items()
    figure = figures.above_legend(styles, 3.6)
    axes, values = figure.subplots(), np.array([gain.mean, gain.low, gain.high])
    axes.axhline(0, color="0.4", lw=0.8)
    axes.axvline(size, **line.arguments(lw=1.5, label=present))
    errors = np.maximum([values[0] - values[1], values[2] - values[0]], 0)
    axes.errorbar(gain.sizes, values[0], errors, **mean.arguments(lw=1.2, capsize=2, elinewidth=0.7, label=expected))
    figures.finish_axes(axes, "gain", "number of images in the buffer", "gain (points)")
    axes.set_title("")  # the page has it
    figures.axis_of_sizes(axes, gain.sizes, max(gain.sizes[-1], size))
    return figure


def _images(count: int) -> str:
    return f"{count:,} image{'s' * (count != 1)}"


def _buffer(names: Sequence[str], kept: Sequence[int], pictures: Mapping[str, Any]) -> str:
    if not names:
        return "<p>Your buffer is empty: there was no image to adapt to.</p>"
    more = len(names) - len(kept)
    said = f"Your buffer holds {_images(len(names))}." + f" {more:,} more than these are not shown." * (more > 0)
    tiles = (
        f'<li title="{html.escape(names[place])}">{_picture(pictures, i, TILE)}'
        f'<span class="file">{html.escape(names[place])}</span></li>'
        for i, place in enumerate(kept)
    )
    sheet = f'<ul class="tiles" role="list">{"".join(tiles)}</ul>'
    return (
        f'<p>{said}</p><div class="scroll" role="region" tabindex="0" '
        f'aria-label="Images of your buffer">{sheet}</div>\n'
    )
