"""What adapting to the support images changes, as counts, and a query with what it attends to, as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cxda_jax.analysis.names import plain

GREEN, RED = "#00674b", "#b3261e"


class Answers(NamedTuple):
    """Class numbers [tasks, queries]: the right ones, and those that a method gives without support images and with them."""

    labels: np.ndarray
    before: np.ndarray
    after: np.ndarray

    def counts(self) -> dict[str, int]:
        """The queries compared; of them, those that adapting makes right, and those that it makes wrong."""
        corrected, spoiled = (int(mask.sum()) for mask in self._changed())
        return {"compared": self.labels.size, "corrected": corrected, "spoiled": spoiled}

    def telling(self) -> tuple[int, int]:
        """A task and its first query that adapting corrects, in the task with most such; without one, that is right."""
        corrected, _ = self._changed()
        good = corrected if corrected.any() else self.after == self.labels
        task = int(good.sum(1).argmax())
        return task, int(good[task].argmax())

    def _changed(self) -> tuple[np.ndarray, np.ndarray]:
        was, now = self.before == self.labels, self.after == self.labels
        return now & ~was, was & ~now


class Example(NamedTuple):
    """One query and its task's support images, pixels in 0..255; numbers of classes and of domains are places in names."""

    query: np.ndarray  # [h, w, c]
    domain: int
    label: int
    before: int  # the answers, as above
    after: int
    support: np.ndarray  # [n, h, w, c]
    domains: np.ndarray  # [n]
    weights: np.ndarray  # [n], which sum to 1


def draw_attention(
    path: Path,
    example: Example,
    counts: Mapping[str, int],
    domain_names: Sequence[str],
    class_names: Sequence[str],
    title: str = "",
    count: int = 5,
) -> None:
    """The query's two answers, marked right or wrong, beside the `count` support images that it attends to most and least.

    Weights are shown as multiples of uniform attention; a star marks images of the query's own domain.
    """
    size = len(example.support)
    times = example.weights * size
    order = np.argsort(-times, kind="stable")
    count = min(count, size)
    figure = Figure(figsize=(max(8, 1.6 * (count + 1) + 1), 5.8), layout="constrained")
    axes = figure.subplots(2, count + 1, squeeze=False, width_ratios=[1.4, *[1] * count])
    for row, chosen in enumerate((order[:count], order[::-1][:count])):
        for axis, i in zip(axes[row][1:], chosen, strict=True):
            _show(axis, example.support[i], f"{times[i]:.2f} x uniform")
            axis.set_xlabel(_domain(domain_names, int(example.domains[i]), example.domain), fontsize=9)
        axes[row][1].set_ylabel(f"attended to {('most', 'least')[row]}", fontsize=11)
    _show(axes[0][0], example.query, f"query, shows {_quoted(class_names[example.label])}")
    axes[0][0].set_xlabel(_domain(domain_names, example.domain, example.domain), fontsize=9)
    axes[1][0].axis("off")
    lines = {"answer without support images": example.before, f"answer with {size} of them": example.after}
    for (words, answer), top in zip(lines.items(), (0.92, 0.42), strict=True):
        _write_answer(axes[1][0], top, words, class_names[answer], answer == example.label)
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


def _write_answer(axis: Axes, top: float, words: str, answer: str, right: bool) -> None:
    """An answer and whether it is right, by a mark, a word and a colour."""
    color, look = GREEN if right else RED, {"ha": "center", "va": "top", "transform": axis.transAxes}
    axis.text(0.5, top, words, fontsize=10, **look)
    axis.text(0.5, top - 0.11, _quoted(answer), fontsize=14, color=color, **look)
    mark = "\u2713 right" if right else "\u2717 wrong"
    axis.text(0.5, top - 0.25, mark, fontsize=12, color=color, family="DejaVu Sans", **look)  # which has the marks


def _domain(names: Sequence[str], domain: int, own: int) -> str:
    return f"{'* ' if domain == own else ''}{plain(names[domain], 18, 3)}"


def _quoted(name: str) -> str:
    return f"'{plain(name, 16)}'"


def _show(axis: Axes, image: np.ndarray, title: str) -> None:
    axis.imshow(image.squeeze(-1) if image.shape[-1] == 1 else image, cmap="gray", vmin=0, vmax=255)
    axis.set_title(title, fontsize=10)
    axis.set_xticks([])
    axis.set_yticks([])
