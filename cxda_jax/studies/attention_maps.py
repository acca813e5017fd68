"""Which answers change when a method adapts to the support images, and a picture of what one query attends to."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cxda_jax.studies.names import plain
from cxda_jax.studies.sheet import show

GREEN, RED = "#00674b", "#b3261e"
VERDICTS = {  # by whether the answers without and with support images are right
    (False, True): "Corrected by adapting",
    (True, True): "Right with and without adapting",
    (True, False): "Spoiled by adapting",
    (False, False): "Wrong with and without adapting",
}


class Answers(NamedTuple):
    """Labels and answers, as class numbers [tasks, queries]. A label of -1 marks a query that does not count."""

    labels: np.ndarray
    before: np.ndarray  # the method's answers without support images
    after: np.ndarray  # its answers with them

    def counts(self) -> dict[str, int]:
        """The numbers of all queries, of those that adapting makes right, and of those that it makes wrong."""
        corrected, spoiled = (int(mask.sum()) for mask in self._changed())
        return {"compared": int((self.labels >= 0).sum()), "corrected": corrected, "spoiled": spoiled}

    def example_place(self) -> tuple[int, int]:
        """The task with most queries that adapting corrects, and the first of these.

        Where no query is corrected, those that are right count instead.
        """
        corrected, _ = self._changed()
        good = corrected if corrected.any() else self.after == self.labels
        task = int(good.sum(1).argmax())
        return task, int(good[task].argmax())

    def _changed(self) -> tuple[np.ndarray, np.ndarray]:
        """Whether adapting corrects each query, and whether it spoils it."""
        was, now = self.before == self.labels, self.after == self.labels
        return now & ~was, was & ~now


class Example(NamedTuple):
    """One query and its task's support images, with pixels of 0..255 and numbers of classes and domains."""

    query: np.ndarray  # [h, w, c]
    domain: int
    label: int
    before: int  # the answers, as in Answers
    after: int
    support: np.ndarray  # [n, h, w, c]
    domains: np.ndarray  # [n]
    weights: np.ndarray  # [n]; they sum to 1


def draw_attention(
    path: Path, example: Example, counts: Mapping[str, int], domain_names: Sequence[str], class_names: Sequence[str],
    title: str,
) -> None:  # fmt: skip
    """Writes a picture of a query, its two answers and the support images that it attends to most and least.

    Weights are shown as multiples of uniform attention. A star marks images of the query's own domain. The counts are
    of all queries of the test, from Answers.counts; the title says what was tested.
    """
    size = len(example.support)
    times, count = example.weights * size, min(5, size)
    order = np.argsort(-times, kind="stable")
    figure = Figure(figsize=(max(8, 1.6 * (count + 1) + 1), 5.8), layout="constrained")
    grid = figure.subplots(2, count + 1, squeeze=False, width_ratios=[1.4, *[1] * count])

    def show_image(axes: Axes, image: np.ndarray, domain: int, above: str) -> None:
        show(axes, image)
        axes.set_title(above, fontsize=10)
        axes.set_xlabel(f"{'* ' * (domain == example.domain)}{plain(domain_names[domain], 18, 3)}", fontsize=9)
        axes.set(xticks=[], yticks=[])

    for row, chosen in enumerate((order[:count], order[::-1][:count])):
        for axes, i in zip(grid[row][1:], chosen, strict=True):
            show_image(axes, example.support[i], int(example.domains[i]), f"{times[i]:.2f} x uniform")
        grid[row][1].set_ylabel(f"attended to {('most', 'least')[row]}", fontsize=11)
    label = plain(class_names[example.label], 16)
    show_image(grid[0][0], example.query, example.domain, f"query, shows '{label}'")
    axes = grid[1][0]
    axes.axis("off")
    look: dict[str, Any] = {"ha": "center", "va": "top", "transform": axes.transAxes}
    answers = {"answer without support images": example.before, f"answer with {size} of them": example.after}
    for top, (words, answer) in zip((0.92, 0.42), answers.items(), strict=True):
        mark, color = ("\u2713 right", GREEN) if answer == example.label else ("\u2717 wrong", RED)
        axes.text(0.5, top, words, fontsize=10, **look)
        axes.text(0.5, top - 0.11, f"'{plain(class_names[answer], 16)}'", fontsize=14, color=color, **look)
        # This font has both marks.
        axes.text(0.5, top - 0.25, mark, fontsize=12, color=color, family="DejaVu Sans", **look)
    verdict = VERDICTS[example.before == example.label, example.after == example.label]
    figure.suptitle(f"{verdict}: {plain(title, 50)}", fontsize=12)
    changed = f"corrected {counts['corrected']} and spoiled {counts['spoiled']}"
    legend = "* the query's own domain    2 x uniform: twice an equal share of the attention"
    told = f"Of {counts['compared']} queries, adapting to the support images {changed}.\n{legend}"
    figure.supxlabel(told, fontsize=11)
    figure.savefig(path, dpi=120)
