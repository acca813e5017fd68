"""Which answers change when a method adapts to the support images, and a picture of what one query attends to."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cxda_jax.pictures.names import plain
from cxda_jax.pictures.sheet import show

GREEN, RED = "#00674b", "#b3261e"


class Answers(NamedTuple):
    """Labels and answers, as class numbers [tasks, queries]."""

    labels: np.ndarray
    before: np.ndarray  # the method's answers without support images
    after: np.ndarray  # its answers with them

    def counts(self) -> dict[str, int]:
        """How many queries there are, how many of them adapting makes right, and how many it makes wrong."""
        corrected, spoiled = (int(mask.sum()) for mask in self._changed())
        return {"compared": self.labels.size, "corrected": corrected, "spoiled": spoiled}

    def telling(self) -> tuple[int, int]:
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
    path: Path,
    example: Example,
    counts: Mapping[str, int],
    domain_names: Sequence[str],
    class_names: Sequence[str],
    title: str = "",
    count: int = 5,
) -> None:
    """Writes a picture of a query, its two answers and the support images that it attends to most and least.

    Weights are shown as multiples of uniform attention. A star marks images of the query's own domain.

    Args:
      path: of the picture.
      example: the query.
      counts: of all queries of the test, from Answers.counts.
      domain_names: by number.
      class_names: by number.
      title: what was tested.
      count: how many of the most attended images are shown, and of the least attended.
    """
    size = len(example.support)
    times = example.weights * size
    order = np.argsort(-times, kind="stable")
    count = min(count, size)
    figure = Figure(figsize=(max(8, 1.6 * (count + 1) + 1), 5.8), layout="constrained")
    grid = figure.subplots(2, count + 1, squeeze=False, width_ratios=[1.4, *[1] * count])
    for row, chosen in enumerate((order[:count], order[::-1][:count])):
        for axes, i in zip(grid[row][1:], chosen, strict=True):
            _show_titled(axes, example.support[i], f"{times[i]:.2f} x uniform")
            axes.set_xlabel(_starred(domain_names, int(example.domains[i]), example.domain), fontsize=9)
        grid[row][1].set_ylabel(f"attended to {('most', 'least')[row]}", fontsize=11)
    _show_titled(grid[0][0], example.query, f"query, shows {_quoted(class_names[example.label])}")
    grid[0][0].set_xlabel(_starred(domain_names, example.domain, example.domain), fontsize=9)
    grid[1][0].axis("off")
    lines = {"answer without support images": example.before, f"answer with {size} of them": example.after}
    for (words, answer), top in zip(lines.items(), (0.92, 0.42), strict=True):
        _write_answer(grid[1][0], top, words, class_names[answer], answer == example.label)
    figure.suptitle(f"{_verdict(example)}{title and ': '}{plain(title, 50)}", fontsize=12)
    figure.supxlabel(
        f"Of {counts['compared']} queries, adapting to the support images corrected {counts['corrected']} and spoiled "
        f"{counts['spoiled']}.\n* the query's own domain    2 x uniform: twice an equal share of the attention",
        fontsize=11,
    )
    figure.savefig(path, dpi=120)


def _verdict(example: Example) -> str:
    was, now = example.before == example.label, example.after == example.label
    return {
        (False, True): "Corrected by adapting",
        (True, True): "Right with and without adapting",
        (True, False): "Spoiled by adapting",
        (False, False): "Wrong with and without adapting",
    }[was, now]


def _write_answer(axes: Axes, top: float, words: str, answer: str, right: bool) -> None:
    """An answer and whether it is right, by a mark, a word and a colour."""
    color, look = GREEN if right else RED, {"ha": "center", "va": "top", "transform": axes.transAxes}
    axes.text(0.5, top, words, fontsize=10, **look)
    axes.text(0.5, top - 0.11, _quoted(answer), fontsize=14, color=color, **look)
    mark = "\u2713 right" if right else "\u2717 wrong"
    axes.text(0.5, top - 0.25, mark, fontsize=12, color=color, family="DejaVu Sans", **look)  # this font has both marks


def _starred(names: Sequence[str], domain: int, own: int) -> str:
    return f"{'* ' if domain == own else ''}{plain(names[domain], 18, 3)}"


def _quoted(name: str) -> str:
    return f"'{plain(name, 16)}'"


def _show_titled(axes: Axes, image: np.ndarray, title: str) -> None:
    show(axes, image)
    axes.set_title(title, fontsize=10)
    axes.set_xticks([])
    axes.set_yticks([])
