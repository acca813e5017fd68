"""The figures of the study, one function each."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from cxda_jax.disk.files import write_whole
from docs.study import tables
from docs.study.detail_tables import domain_gaps, kind_gaps
from docs.study.evidence import Evidence

COLOURS = {"cxda_any": "#0b6e4f", "icrm": "#c1440e", "cxda_loo": "#3066be", "cxda": "#7b2d8b", "bn": "#666666", "bn_alpha,from=erm_iid": "#c99700",
           "cml": "#8c564b"}  # fmt: skip
MARKERS = {
    "cxda_any": "o",
    "icrm": "s",
    "cxda_loo": "^",
    "cxda": "v",
    "bn": "x",
    "bn_alpha,from=erm_iid": "D",
    "cml": "P",
}
INTERVAL = dict(capsize=2, elinewidth=0.8)
Bar = tuple[str, tuple[float, float, float], str]  # a name, a mean with its interval, a colour


def draw(folder: Path, studies: tables.Studies) -> None:
    """Writes all figures for which there are records."""
    for name, figure in (("buffers", buffers(studies)), ("rivals", rivals(studies)), ("changes", changes(studies)),
                         ("kinds", kinds(studies)), ("attention", attention(studies)), ("spread", spread(studies))):  # fmt: skip
        if figure:
            path = folder / f"{name}.png"
            write_whole(path, lambda partial, figure=figure: figure.savefig(partial, dpi=130, format="png"))


def buffers(studies: tables.Studies) -> Figure | None:
    """Question 2: the lead over erm_iid against the number of images, for each data set."""
    names = [store for store in tables.STORES if store in studies and tables.leads(studies[store])]
    if not names:
        return None
    wide = min(3, len(names))
    high = -(-len(names) // wide)
    figure = Figure(figsize=(9.2, 2.9 * high), layout="constrained")
    panels = np.ravel(figure.subplots(high, wide, squeeze=False))
    for panel, store in zip(panels, names, strict=False):
        found = tables.leads(studies[store])
        for label, colour in COLOURS.items():
            gaps = {n: found[label, n].avg for n in tables.SIZES if (label, n) in found}
            if gaps:
                mean, low, high = np.transpose(list(gaps.values()))
                x = [tables.SIZES.index(n) for n in gaps]
                panel.errorbar(x, mean, (mean - low, high - mean), color=colour, marker=MARKERS[label], ms=3.5, lw=1.2,
                               label=label.split(",")[0], **INTERVAL)  # fmt: skip
        panel.axhline(0, color="black", lw=0.8)
        panel.set_title(store, fontsize=10)
        panel.set_xticks(range(len(tables.SIZES)), list(map(str, tables.SIZES)))
        panel.set_ylim(-12, 12)
    for panel in panels[len(names) :]:
        panel.axis("off")
    for panel in panels[: len(names)]:
        panel.set_xlabel("images of the device", fontsize=8)
    figure.supylabel("accuracy minus erm_iid (points)", fontsize=9)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=7, fontsize=8, frameon=False
    )
    return figure


def forest(columns: Mapping[str, Sequence[Bar]], x: str) -> Figure | None:
    """Means with intervals beside each other, a panel for each column."""
    columns = {title: bars for title, bars in columns.items() if bars}
    if not columns:
        return None
    rows = max(map(len, columns.values()))
    figure = Figure(figsize=(9.2, 1.1 + 0.26 * rows), layout="constrained")
    # Where all panels have the same rows, the first one names them.
    alike = len({tuple(name for name, _, _ in bars) for bars in columns.values()}) == 1
    panels = figure.subplots(1, len(columns), squeeze=False, sharey=alike)[0]
    for panel, (title, bars) in zip(panels, columns.items(), strict=True):
        for i, (_, (mean, low, high), colour) in enumerate(bars):
            panel.errorbar(mean, -i, xerr=[[mean - low], [high - mean]], color=colour, marker="o", ms=4, **INTERVAL)
        panel.axvline(0, color="black", lw=0.8)
        panel.set_yticks([-i for i in range(len(bars))], [name for name, _, _ in bars], fontsize=8)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel(x, fontsize=8)
    return figure


def rivals(studies: tables.Studies) -> Figure | None:
    """Question 1: the paper's method minus each rival."""
    columns = {}
    for store in (store for store in tables.MAIN if store in studies):
        gaps = tables.rival_gaps(studies[store])
        columns[f"{store}: cxda minus"] = [(name, gap.avg, COLOURS["cxda"]) for name, gap in gaps.items()]
    return forest(columns, "points, 95 % interval over tasks")


def changes(studies: tables.Studies) -> Figure | None:
    """Question 3: one thing changed in the paper's method."""
    found = tables.changed(studies)
    names = {name: title.split(" (`")[0] for name, title in tables.CHANGES.items()}
    columns = {
        title: [
            (names[name], gap, COLOURS["cxda"])
            for name, gap in ((n, getattr(g, score)) for n, g in found.items() if getattr(g, score))
        ]
        for score, title in (("avg", "mean"), ("w10", "worst tenth"))
    }
    return forest(columns, "points minus cxda on unipen")


def kinds(studies: tables.Studies) -> Figure | None:
    """Question 4: the lead over erm_iid in each domain, and in kinds of questions."""
    shown = [s for s in (*tables.MAIN, "unipen_sizes") if s in studies and studies[s].details]
    if not shown:
        return None
    figure = Figure(figsize=(9.2, 5.6), layout="constrained")
    columns = figure.subplots(2, len(shown), squeeze=False, sharey="row").T
    for column, store in zip(columns, shown, strict=True):
        gaps, of_kinds = domain_gaps(studies[store]), kind_gaps(studies[store])
        for j, label in enumerate(label for label in ("cxda_any", "icrm", "cxda") if label in gaps):
            style = dict(color=COLOURS[label], marker=MARKERS[label], ms=3, lw=1, label=label)
            column[0].plot(sorted(gaps[label].values()), **style)
            mean, low, high = np.transpose([of[label] for of in of_kinds.values()])
            places = np.arange(len(of_kinds)) + 0.15 * (j - 1)
            column[1].errorbar(places, mean, (mean - low, high - mean), **style | dict(ls=""), **INTERVAL)
        column[0].set_title(store, fontsize=10)
        column[0].set_xlabel(f"the {len(gaps[tables.BASE])} test domains, sorted for each method", fontsize=8)
        column[1].set_xlim(-0.5, len(of_kinds) - 0.5)
        column[1].set_xticks(range(len(of_kinds)), [name.replace(" ", "\n", 1) for name in of_kinds], fontsize=8)
        for panel in column:
            panel.axhline(0, color="black", lw=0.8)
    figure.supylabel("accuracy minus erm_iid (points), seed 0", fontsize=9)
    figure.legend(
        *columns[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=7, fontsize=8, frameon=False
    )
    return figure


def attention(studies: tables.Studies) -> Figure | None:
    """Question 5: the share of attention on the query's own domain and class, with what chance would give as a dot."""
    told = [(f"{store}, {label}", entry["attention"]) for store, e in studies.items()
            for label, entry in e.details.get("methods", {}).items() if "attention" in entry]  # fmt: skip
    if not told:
        return None
    figure = Figure(figsize=(9.2, 1.1 + 0.26 * len(told)), layout="constrained")
    for panel, what in zip(figure.subplots(1, 2, sharey=True), ("own_domain", "same_class"), strict=True):
        for i, (_, a) in enumerate(told):
            mean, low, high = (100 * x for x in a[what])
            panel.barh(
                -i,
                mean,
                xerr=[[mean - low], [high - mean]],
                color="#9db4c0",
                height=0.6,
                error_kw=dict(lw=0.8, capsize=2),
            )
            panel.plot(100 * a[f"{what}_chance"], -i, "k|", ms=12)
        panel.set_yticks([-i for i in range(len(told))], [name for name, _ in told], fontsize=8)
        panel.set_xlabel(f"% of attention on images of the same {what.split('_')[1]}; | is chance", fontsize=8)
    return figure


def spread(studies: tables.Studies) -> Figure | None:
    """Question 6: each seed's score, as the distance from the mean of the seeds."""
    names = [s for s in tables.STORES if s in studies and len(studies[s].scores.get((tables.BASE, ""), {})) > 1]
    if not names:
        return None
    figure = Figure(figsize=(9.2, 3), layout="constrained")
    for panel, (score, title) in zip(
        figure.subplots(1, 2, sharey=True), (("avg", "mean"), ("w10", "worst tenth")), strict=True
    ):
        for i, store in enumerate(names):
            seeds(panel, -i, studies[store], score)
        panel.axvline(0, color="black", lw=0.8)
        panel.set_yticks([-i for i in range(len(names))], names, fontsize=8)
        panel.set_xlabel(f"{title}: points from the mean over seeds", fontsize=8)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    known = dict(zip(labels, handles, strict=True))
    figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=7, fontsize=8, frameon=False)
    return figure


def seeds(panel, row: float, evidence: Evidence, score: str) -> None:
    for j, label in enumerate(("cxda_any", "icrm", "cxda", "bn")):
        if evidence.has((label, "")):
            values = evidence.level((label, ""), score)
            panel.plot(values - values.mean(), [row + 0.12 * (1.5 - j)] * len(values), MARKERS[label], color=COLOURS[label],
                       ms=4, ls="", label=label)  # fmt: skip
