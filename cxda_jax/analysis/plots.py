"""Figures of a study, from its results; None stands for a figure with nothing to draw.

A method looks the same in all figures of the same results, and differs from all others in marker and line style, not in
colour alone; open markers stand for back-propagation. Of equal labels, settings and seeds, the first result counts. A
figure is of one store, named as by results.by_store.
"""

import hashlib
import io
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.path import Path as Line
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox
from PIL import Image

from cxda_jax import files
from cxda_jax.analysis.names import plain
from cxda_jax.analysis.results import Result, by_store
from cxda_jax.metrics import mean_sem

Cell = tuple[str, str, int]  # a label without its setting, the setting's kind and number; "" and 0 for the usual tasks
_STEPS = re.compile(r"finetune\.steps=[0-9]{1,9}")
AXES = {"num_domains": "number of support domains", "support_size": "number of support images"}
# Okabe and Ito's colours, with grey for their yellow, which white paper swallows, and a ninth as dark as none of them.
BLACK, GREY, ORANGE, SKY, GREEN = "#000000", "#777777", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PURPLE, WINE = "#0072B2", "#D55E00", "#CC79A7", "#882255"


class Style(NamedTuple):
    """How a method looks: the lengths on, off, ... of its dashes (none: a solid line), and open markers or filled ones."""

    color: str
    marker: Any
    dashes: Sequence[float] = ()
    open: bool = False

    def look(self, **other: Any) -> dict[str, Any]:
        """As arguments of Axes.plot, and others."""
        line = {"linestyle": (0, self.dashes) if self.dashes else "-", "marker": self.marker}
        size = 6 if len(self.marker) == 1 and self.marker != "*" else 9
        return line | {"color": self.color, "ms": size, "mfc": "white" if self.open else self.color} | other


STYLES = {
    "erm": Style(BLACK, "o", (1, 1)), "erm_iid": Style(GREY, "s", (1, 3)),
    "bn": Style(ORANGE, "^", (5, 1.5)), "cml": Style(GREEN, "D", (5, 1.5, 1, 1.5)),
    "cxda": Style(RED, "*"), "cxda_p2p": Style(PURPLE, "P", (9, 2, 1, 2)),
    "cxda_supervised": Style(BLUE, "X", (9, 2, 1, 2, 1, 2)), "cxda_loo": Style(SKY, "p", (10, 2)),
    "ft_em": Style(BLUE, "v", (3, 3), open=True), "ft_im": Style(PURPLE, "<", (3, 1.5, 1, 1.5, 1, 1.5), open=True),
    "sf_ocda": Style(RED, ">", (6, 5), open=True), "cotta": Style(ORANGE, "d", (6, 1.5, 3, 1.5), open=True),
    "sla": Style(WINE, (4, 1, 0), (4, 1, 1, 4)),
}  # fmt: skip


def styles(results: Iterable[Result]) -> dict[str, Style]:
    """The styles of the methods, and others for all other labels in the results, whose markers are numbers."""
    names = {name for name, _, _ in _cells(results)} | {r.config.get("method", "erm") for r in results}
    found, colors = dict(STYLES), (BLACK, RED, BLUE, GREEN, ORANGE, PURPLE, SKY, GREY)
    for i, name in enumerate(sorted(names - set(STYLES))):
        opened = found.get(name.split(",")[0], STYLES["erm"]).open
        found[name] = Style(colors[i % 8], f"${i + 1}$", (2 + i, 1.5, 2, 1.5, 1, 1.5), opened)
    return found


def accuracy_time(results: Sequence[Result], store: str) -> Figure | None:
    """Avg against the time of one task: means over seeds, and standard errors of Avg; a line joins numbers of steps."""
    found, times = {}, ("adapt_ms", "predict_ms")
    for (name, kind, number), cell in _cells(results, store, ("avg", *times)).items():
        if kind not in AXES:
            found.setdefault(name, {}).setdefault(number or cell[0].config.get("finetune", {}).get("steps", 10), cell)
    looks = {name: style for name, style in styles(results).items() if name in found}
    if not looks:
        return None
    kinds = {("feed-forward", "back-propagating")[s.open]: Style(BLACK, "o", open=s.open) for s in looks.values()}
    figure = _above_legend(kinds, linestyle="none")
    axes, words, paths = figure.subplots(), [], []
    for name, style in looks.items():
        cells = sorted(found[name].items())
        words += [plain(f"{name}, {n} step{'s' * (n > 1)}" if len(cells) > 1 else name) for n, _ in cells]
        paths.append(np.array([(_over_seeds(c, *times)[0], *_over_seeds(c, "avg")) for _, c in cells]))
        axes.errorbar(*paths[-1].T, **style.look(lw=1, capsize=3, elinewidth=1, label=name))
    axes.set_xscale("log")
    axes.margins(0.2, 0.15)
    _finish(axes, store, "time of one task, adapting and predicting (ms)", f"Avg {_metric(results, store)} (%)")
    axes.xaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_locator=NullLocator(), major_formatter="{x:g}")
    _write_beside(axes, words, paths)
    return figure


def variable(results: Sequence[Result], store: str, kind: str) -> Figure | None:
    """Avg and W10% against the number of support domains or images: kind is num_domains or support_size.

    The usual tasks stand in at their number where a method has no result of that setting.
    """
    cells, found = _cells(results, store), {}
    for name, of, number in sorted(cells, key=lambda cell: not cell[1]):  # the usual tasks come last
        if of == kind:
            found.setdefault(name, {})[number] = cells[name, of, number]
        elif not of and name in found:
            episode = {"num_domains": 5, "per_domain": 20} | cells[name, of, number][0].config.get("episode", {})
            each = episode["per_domain"] if kind == "support_size" else 1
            found[name].setdefault(episode["num_domains"] * each, cells[name, of, number])
    looks = {name: style for name, style in styles(results).items() if name in found}
    if not looks:
        return None
    figure = _above_legend(looks)
    metric = _metric(results, store)
    for axes, field, title in zip(figure.subplots(1, 2), ("avg", "w10"), ("Avg", "W10%"), strict=True):
        for name, style in looks.items():
            points = [(number, *_over_seeds(cell, field)) for number, cell in sorted(found[name].items())]
            axes.errorbar(*np.transpose(points), **style.look(lw=1.3, capsize=2.5, elinewidth=0.8, label=name))
        _finish(axes, store, AXES[kind], f"{title} {metric} (%)")
        axes.set_xscale("log" if kind == "support_size" else "linear")
        axes.set_xticks(sorted(set().union(*found.values())))
        axes.xaxis.set(minor_locator=NullLocator(), major_formatter="{x:g}")
    return figure


def learning_curves(results: Sequence[Result], store: str) -> Figure | None:
    """Validation score against training step: a thin line for each seed, a bold one for their mean at shared steps."""
    runs = {(r.config["method"], r.row["seed"]): r for r in reversed(by_store(results).get(store, []))}
    curves: dict[str, list[dict[int, float]]] = {}
    for (name, _), run in sorted(runs.items()):
        if found := {int(line["step"]): 100 * line["val_score"] for line in run.curve() if "val_score" in line}:
            curves.setdefault(name, []).append(found)
    looks = {name: style for name, style in styles(results).items() if name in curves}
    if not looks:
        return None
    figure = _above_legend(looks)
    axes = figure.subplots()
    for name, style in looks.items():
        for curve in curves[name] if len(curves[name]) > 1 else []:
            axes.plot(list(curve), list(curve.values()), **style.look(lw=0.6, alpha=0.6, marker=""))
        steps = sorted(set.intersection(*map(set, curves[name])))
        means = [np.mean([curve[step] for curve in curves[name]]) for step in steps]
        axes.plot(steps, means, **style.look(lw=1.9, markevery=max(1, len(steps) // 8), label=name))
    _finish(axes, store, "training step", "validation score (%)")
    return figure


def attention_histogram(same: np.ndarray, other: np.ndarray, heads: Sequence[int] | None = None) -> Figure | None:
    """Densities of attention weights on support images of the query's own domain and of other domains; medians marked.

    Weights are multiples of uniform attention, of any shape; less than a thousandth is drawn as that. With `heads`, their
    first axis is the head, and each of these has a panel, numbered from 1. Both axes are logarithmic: in their tails the two differ.
    """
    panels = (
        {"": (same, other)} if heads is None else {f"head {head + 1}\n": (same[head], other[head]) for head in heads}
    )
    drawn = [np.ravel(weights) for pair in panels.values() for weights in pair]
    if not sum(map(len, drawn)):
        return None
    low, high = (max(1e-3, bound(np.concatenate(drawn))) for bound in (np.min, np.max))
    edges = np.geomspace(low / 1.01, high * 1.01, 41)
    looks = {"own domain": Style(BLUE, "o"), "other domains": Style(RED, "^", (3, 1.5))}
    columns = max(c for c in (1, 2, 3, 4) if len(panels) % c == 0)
    figure = _above_legend(looks, max(4.5, 2.2 * len(panels) / columns))
    grid = figure.subplots(len(panels) // columns, columns, sharex=True, sharey=True, squeeze=False)
    for axes, (head, pair) in zip(grid.flat, panels.items(), strict=True):
        for weights, style in [(w, style) for w, style in zip(pair, looks.values(), strict=True) if np.size(w)]:
            weights = np.clip(weights, low, None)
            median = float(np.median(weights))
            density = np.histogram(np.log10(weights), np.log10(edges), density=True)[0]
            axes.stairs(density, edges, color=style.color, linestyle=style.look()["linestyle"], lw=1.3)
            axes.axvline(median, **style.look(lw=0.8, marker=""))
            axes.plot([median], density[[np.searchsorted(edges, median) - 1]], **style.look(mec="white"))
        medians = ", ".join(f"{np.median(weights):.2f}" for weights in pair if np.size(weights))
        _finish(axes, f"{head}medians {medians}", "weight / uniform", "density per decade")
        axes.set(xscale="log", yscale="log")
        if high / low < 10:  # powers of ten would be too few
            ticks = [tick for tick in MaxNLocator(5).tick_values(low, high) if low <= tick <= high]
            axes.xaxis.set(major_locator=FixedLocator(ticks), minor_locator=NullLocator(), major_formatter="{x:g}")
        axes.label_outer()
    return figure


def attention_grid(
    pixels: np.ndarray, domains: np.ndarray, weights: np.ndarray, own: int, query: np.ndarray, names: Sequence[str],
    per_domain: int = 5, text: str = "",
) -> Figure | None:  # fmt: skip
    """A query, and of each support domain the images it attends to most and least, in falling order, under their weights.

    pixels [support, h, w, c] of 0..255; domains [support], places in names; weights [support], which sum to 1 and are shown
    as multiples of uniform. The query's own domain is starred and comes first; `text` stands beside the query.
    """
    if not len(weights):
        return None
    times, domains = np.asarray(weights, float) * len(weights), np.asarray(domains)
    rows = sorted(set(domains.tolist()), key=lambda d: (d != own, -times[domains == d].max()))
    left, cell, high = 1.2, 0.54, 0.5 * pixels.shape[1] / pixels.shape[2]  # in inches, which are the units of the axes
    width, height = left + cell * (2 * per_domain + 1), (high + 0.2) * (len(rows) + 1) + 0.3
    figure = Figure(figsize=(width, height), layout="constrained")
    axes, look = figure.subplots(), {"fontsize": 7, "va": "center"}

    def show(image: np.ndarray, x: float, y: float) -> None:
        small = Image.fromarray(np.asarray(image, np.uint8).squeeze())
        small.thumbnail((128, 128))
        axes.imshow(small, cmap="gray", vmin=0, vmax=255, extent=(x, x + 0.5, y + high, y), interpolation="none")

    show(query, left, 0.1)
    said = [f"query of {plain(names[own])} *", *[plain(text)] * bool(text), "weights: multiples of uniform"]
    axes.text(left + 0.65, 0.1 + high / 2, "\n".join(said), **look)
    axes.text(left, high + 0.22, "most attended", **look)
    axes.text(left + cell * (per_domain + 1), high + 0.22, "least attended", **look)
    for i, domain in enumerate(rows):
        y = (high + 0.2) * (i + 1) + 0.28
        name = f"{plain(names[int(domain)], 16, 3)}{' *' * (domain == own)}"
        axes.text(left - 0.1, y + high / 2, name, ha="right", **look)
        found = sorted(np.flatnonzero(domains == domain), key=lambda j: -times[j])
        most = found[: min(per_domain, (len(found) + 1) // 2)]
        least = found[len(most) :][-per_domain:]
        for column, j in [*enumerate(most), *enumerate(least, per_domain + 1)]:
            show(pixels[j], left + cell * column, y)
            axes.text(left + cell * column + 0.25, y - 0.07, f"{times[j]:.2f}", ha="center", **look)
    axes.set(aspect="auto", xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return figure


def save(figure: Figure, path: str | Path) -> str:
    """Writes PATH.png and PATH.svg, and returns the latter's text; equal figures give equal bytes."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150, metadata={"Software": None})
    text = svg_text(figure)
    files.write_bytes(Path(f"{path}.png"), drawn.getvalue())
    files.write_bytes(Path(f"{path}.svg"), text.encode(errors="replace"))
    return text


def svg_text(figure: Figure) -> str:
    """As an <svg> element: text as paths, no date, nothing from elsewhere, and ids unlike those of another figure."""
    file, unknown = io.StringIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "cxda", "image.composite_image": False}):
        figure.savefig(file, format="svg", metadata=unknown)
    text = file.getvalue()[file.getvalue().index("<svg") :]
    text = re.sub(r'(<image\b[^>]*?) id="[^"]*"', r"\1", text)  # the same for equal images, and nothing refers to it
    mark = hashlib.sha256(text.encode()).hexdigest()[:8]
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\1f{mark}-", text)


def _write_beside(axes: Axes, words: Sequence[str], paths: Sequence[np.ndarray]) -> None:
    """Texts near the points x, y, sem of the paths, clear of all else; a thin line leads to one that had to move."""
    figure: Any = axes.figure
    points, to_pixels, pt = np.nan_to_num(np.concatenate(paths)), axes.transData.transform, figure.dpi / 72
    arrow = {"arrowstyle": "-", "lw": 0.5, "color": "0.4", "shrinkA": 0, "shrinkB": 4}
    look = {"textcoords": "offset points", "size": 8, "ha": "center", "va": "center", "in_layout": False}
    texts: Any = [axes.annotate(w, p[:2], (0, 9), arrowprops=arrow, **look) for w, p in zip(words, points, strict=True)]
    figure.draw_without_rendering()
    halves = np.array([Text.get_window_extent(text).size for text in texts]) / 2 + 1.5 * pt
    at, low, high = (to_pixels(points[:, :2] + sign * points[:, 2:] * [0, 1]) for sign in (0, -1, 1))
    marks = [Bbox([a - 5 * pt, b + 5 * pt]) for a, b in zip(low, high, strict=True)]
    joins = [Line(to_pixels(path[:, :2])) for path in paths]
    boxes, leaders = [Bbox.null() for _ in words], [Line(xy[None]) for xy in at]
    for i in [*range(len(words))] * 3:  # again when all stand
        others, lines, fewest = boxes[:i] + boxes[i + 1 :], joins + leaders[:i] + leaders[i + 1 :], (999, 0)
        for reach, angle in itertools.product(np.geomspace(7, 116, 12), np.arange(16) * np.pi / 8):
            middle = at[i] + np.round([np.cos(angle), np.sin(angle)], 6) * (reach * pt + halves[i])
            box, leader = Bbox([middle - halves[i], middle + halves[i]]), Line([at[i], middle])
            outside = not (axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max))
            crossed = sum(leader.intersects_bbox(b, False) for b in others + marks[:i] + marks[i + 1 :])
            crossed += sum(line.intersects_bbox(box, False) for line in lines) + box.count_overlaps(marks)
            if (found := (box.count_overlaps(others) + outside, crossed)) < fewest:
                fewest, boxes[i], leaders[i], texts[i].xyann = found, box, leader, (middle - at[i]) / pt
                texts[i].arrow_patch.set_visible(reach > 10)
            if fewest == (0, 0):
                break


def _above_legend(looks: Mapping[str, Style], height: float = 4.5, **other: Any) -> Figure:
    """An empty figure over a legend, which makes it higher."""
    columns = int(np.clip(85 // (min(60, max(map(len, looks))) + 10), 1, 5))
    figure = Figure(figsize=(7, height + 0.18 * ((len(looks) - 1) // columns)), layout="constrained")
    handles = [Line2D([], [], **style.look(lw=1.5, label=plain(name), **other)) for name, style in looks.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8, handlelength=4)
    return figure


def _finish(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title("\n".join(plain(line, 80) for line in title.split("\n")), fontsize=9)
    axes.set(xlabel=x, ylabel=y, axisbelow=True)
    axes.grid(color="0.9", lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def _metric(results: Iterable[Result], store: str) -> str:
    return by_store(results)[store][0].row["metric"].replace("_", " ")


def _cells(results: Iterable[Result], store: str = "", needed: Sequence[str] = ()) -> dict[Cell, list[Result]]:
    """Results that have the needed fields, the first of each seed."""
    found: dict[Cell, dict[int, Result]] = {}
    for result in by_store(results).get(store, []) if store else results:
        parts = (result.row.get("label") or result.row["method"]).split(",")
        setting = result.row.get("setting") or next((p for p in parts if _STEPS.fullmatch(p)), "")
        kind, _, number = setting.partition("=")
        if all(result.row.get(field) is not None for field in needed):
            key = ",".join(part for part in parts if part != setting), kind, int(number or 0)
            found.setdefault(key, {}).setdefault(result.row["seed"], result)
    return {key: list(seeds.values()) for key, seeds in found.items()}


def _over_seeds(results: Iterable[Result], *fields: str) -> tuple[float, float]:
    """Mean and standard error of a sum of fields; not numbers where there is none."""
    values = [sum(r.row[field] for field in fields) for r in results if None not in map(r.row.get, fields)]
    return mean_sem(np.array(values)) if values else (np.nan, np.nan)
