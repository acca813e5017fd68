"""Figures of the results of one store.

A function that draws returns None where there is nothing to draw. All figures of a report share the styles of
method_styles, so that a method looks the same in each of them. Methods differ in marker and line style, not in colour
alone. Open markers stand for methods that use back-propagation.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from cxda_jax.config.registry import METHODS
from cxda_jax.methods.entry import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, Style
from cxda_jax.pages.figures import above_legend, finish_axes, round_ticks
from cxda_jax.studies.result import Result
from cxda_jax.studies.settings import STEPS, Setting, usual_number
from cxda_jax.studies.tables import ByCell
from cxda_jax.training.metrics import mean_sem

AXES = {"num_domains": "number of support domains", "support_size": "number of support images"}


class Drawing(NamedTuple):
    """A figure of a report, and what it is called. `name` becomes a part of its file's name."""

    name: str
    title: str
    caption: str
    figure: Any  # None where there is nothing to draw


def method_styles(results: Sequence[Result]) -> dict[str, Style]:
    """The styles of all methods that have one, and one for each other label of the results.

    The marker of the others is a number.
    """
    methods = {r.variant: r.identity.method for r in results}
    methods |= {name: name for name in (r.config.get("method", "erm") for r in results)}
    own = {name: entry.style for name, entry in METHODS.items() if entry.style}
    styles, colors = dict(own), (BLACK, RED, BLUE, GREEN, ORANGE, PURPLE, SKY, GREY)
    for i, label in enumerate(sorted(methods.keys() - styles.keys())):
        is_open = methods[label] in own and own[methods[label]].open
        styles[label] = Style(colors[i % 8], f"${i + 1}$", (2 + i, 1.5, 2, 1.5, 1, 1.5), is_open)
    return styles


def drawings(results: Sequence[Result], styles: Mapping[str, Style]) -> Iterator[Drawing]:
    """The figures of the results of one store."""
    means = "Means over training seeds, with standard errors."
    lines = "Filled markers need no back-propagation on the device; lines join numbers of fine-tuning steps."
    time = f"{means} {lines} A task's time is that of one task alone."
    yield Drawing("accuracy_time", "accuracy and time", time, accuracy_time(results, styles))
    varied = f"{means} Compare within a number: queries per task differ."
    yield from (Drawing(kind, title, varied, variable(results, kind, styles)) for kind, title in AXES.items())
    curves = "Validation score during training: thin lines are seeds, bold ones their mean."
    yield Drawing("learning_curves", "learning curves", curves, learning_curves(results, styles))


def accuracy_time(results: Sequence[Result], styles: Mapping[str, Style]) -> Figure | None:
    """Avg against the time of one task: means over seeds, and standard errors of Avg. A line joins numbers of steps."""
    by_steps: dict[str, dict[int, list[Result]]] = {}
    for (label, setting), seeds in _by_cell(results).items():
        if setting.kind in ("", STEPS):
            steps = setting.number or seeds[0].config.get("finetune", {}).get("steps", 10)
            by_steps.setdefault(label, {}).setdefault(steps, seeds)
    if not by_steps:
        return None
    used = {label: style for label, style in styles.items() if label in by_steps}
    figure = above_legend(used)
    axes = figure.subplots()
    for label, style in used.items():
        of_steps = sorted(by_steps[label].items())
        points = [(_mean(seeds, "answer_ms")[0], *_mean(seeds, "avg")) for _, seeds in of_steps]
        axes.errorbar(*np.transpose(points), **style.arguments(lw=1, capsize=3, elinewidth=1, label=label))
        if len(points) > 1:
            for (steps, _), point in zip(of_steps, points, strict=True):
                words = f"{steps} step{'s' * (steps > 1)}"
                axes.annotate(words, point[:2], (5, 5), textcoords="offset points", size=7)
    axes.set_xscale("log")
    finish_axes(axes, results[0].store, "time of one task, adapting and predicting (ms)", f"Avg {_metric(results)} (%)")
    round_ticks(axes)
    return figure


def variable(results: Sequence[Result], kind: str, styles: Mapping[str, Style]) -> Figure | None:
    """Avg and W10% against the number of support domains or images: kind is num_domains or support_size.

    Where a method has no result of its usual number, the usual tasks stand there.
    """
    by_number: dict[str, dict[int, list[Result]]] = {}
    cells = sorted(_by_cell(results).items(), key=lambda cell: cell[0][1].kind)  # the usual tasks come first
    varied = {label for (label, setting), _ in cells if setting.kind == kind}
    for (label, setting), seeds in cells:
        if label in varied and setting.kind in ("", kind):
            by_number.setdefault(label, {})[setting.number or usual_number(kind, seeds[0].config)] = seeds
    if not by_number:
        return None
    used = {label: style for label, style in styles.items() if label in by_number}
    figure = above_legend(used)
    for axes, field, title in zip(figure.subplots(1, 2), ("avg", "w10"), ("Avg", "W10%"), strict=True):
        for label, style in used.items():
            points = [(number, *_mean(seeds, field)) for number, seeds in sorted(by_number[label].items())]
            axes.errorbar(*np.transpose(points), **style.arguments(lw=1.3, capsize=2.5, elinewidth=0.8, label=label))
        finish_axes(axes, results[0].store, AXES[kind], f"{title} {_metric(results)} (%)")
        axes.set_xscale("log" if kind == "support_size" else "linear")
        axes.set_xticks(sorted(set().union(*by_number.values())))
        axes.xaxis.set(minor_locator=NullLocator(), major_formatter="{x:g}")
    return figure


def learning_curves(results: Sequence[Result], styles: Mapping[str, Style]) -> Figure | None:
    """Validation score against training step: a thin line for each seed, a bold one for their mean at shared steps."""
    runs = {(r.config["method"], r.seed): r for r in reversed(results)}
    curves: dict[str, list[dict[int, float]]] = {}
    for (method, _), run in sorted(runs.items()):
        if curve := {int(line["step"]): 100 * line["val_score"] for line in run.curve() if "val_score" in line}:
            curves.setdefault(method, []).append(curve)
    if not curves:
        return None
    used = {method: style for method, style in styles.items() if method in curves}
    figure = above_legend(used)
    axes = figure.subplots()
    for method, style in used.items():
        for curve in curves[method] if len(curves[method]) > 1 else []:
            axes.plot(list(curve), list(curve.values()), **style.arguments(lw=0.6, alpha=0.6, marker=""))
        steps = sorted(set.intersection(*map(set, curves[method])))
        means = [np.mean([curve[step] for curve in curves[method]]) for step in steps]
        axes.plot(steps, means, **style.arguments(lw=1.9, markevery=max(1, len(steps) // 8), label=method))
    finish_axes(axes, results[0].store, "training step", "validation score (%)")
    return figure


def _metric(results: Sequence[Result]) -> str:
    return results[0].metric.replace("_", " ")


def _by_cell(results: Iterable[Result]) -> ByCell:
    """Results by label and setting, the first of each seed. Unlike in tables, a number of steps is a setting."""
    cells: dict[tuple[str, Setting], dict[int, Result]] = {}
    for result in results:
        cells.setdefault((result.variant, result.setting), {}).setdefault(result.seed, result)
    return {key: list(seeds.values()) for key, seeds in cells.items()}


def _mean(seeds: Iterable[Result], field: str) -> tuple[float, float]:
    """Mean and standard error of a field over seeds."""
    return mean_sem(np.array([getattr(r, field) for r in seeds]))
