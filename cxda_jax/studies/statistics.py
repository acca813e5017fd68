"""Paired differences of results: of the mean over tasks and of the worst tenth of them, with 95 % bootstrap intervals.

The intervals are over the tasks. They speak of other tasks, not of other seeds.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cxda_jax.studies.result import Result
from cxda_jax.studies.settings import USUAL
from cxda_jax.training import metrics

Name = TypeVar("Name", bound=Hashable)
# By seed, the weights of results by their keys. The difference of a and b is {seed: {(a, seed): 1, (b, seed): -1}}.
Sums = Mapping[int, Mapping[Any, float]]


class Span(NamedTuple):
    """A number in points, and its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """1 where the whole interval is above zero, -1 where it is below, 0 where it holds zero."""
        return (self.low > 0) - (self.high < 0)


class Difference(NamedTuple):
    """A sum of scores, such as a difference, averaged over seeds.

    Attributes:
      avg: of the mean over the tasks.
      w10: of the worst tenth of the tasks; None where it was not asked for.
      of_seeds: the mean over the tasks at each seed, in points.
    """

    avg: Span
    w10: Span | None
    of_seeds: Mapping[int, float]

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(self.of_seeds)

    @property
    def sign(self) -> int:
        """1 where the interval of the mean and all seeds are above zero, -1 where they are below, else 0."""
        signs = {self.avg.sign, *(int(np.sign(x)) for x in self.of_seeds.values())}
        return signs.pop() if len(signs) == 1 else 0


def measure(
    scores: Mapping[Any, np.ndarray], wanted: Mapping[Name, Sums], worst: bool = False
) -> dict[Name, Difference]:
    """Sums of scores, each averaged over its seeds task by task, with intervals over the tasks.

    Args:
      scores: [tasks] of the same tasks, by any key.
      wanted: by a name, the weights of the keys at each seed. What has no seed is left out.
      worst: of the worst tenth of the tasks too, which takes longer.
    """
    wanted = {name: dict(sorted(sums.items())) for name, sums in wanted.items() if sums}
    if not wanted:
        return {}
    by_task = np.stack([_mean(scores, sums) for sums in wanted.values()])
    avg = [by_task.mean(1), *metrics.bootstrap_interval(by_task)]
    w10: list[Any] = []
    if worst:
        used = {key: scores[key] for sums in wanted.values() for terms in sums.values() for key in terms}
        drawn = metrics.bootstrap_worst_decile(np.stack(list(used.values())))
        deciles = {key: np.append(metrics.worst_decile(used[key]), row) for key, row in zip(used, drawn, strict=True)}
        by_sample = np.stack([_mean(deciles, sums) for sums in wanted.values()])
        w10 = [by_sample[:, 0], *np.percentile(by_sample[:, 1:], [2.5, 97.5], axis=1)]
    return {
        name: Difference(
            _span(avg, i),
            _span(w10, i) if worst else None,
            {seed: round(100 * float(_sum(scores, terms).mean()), 6) for seed, terms in sums.items()},
        )
        for i, (name, sums) in enumerate(wanted.items())
    }


def _sum(values: Mapping[Any, np.ndarray], terms: Mapping[Any, float]) -> np.ndarray:
    return np.sum([weight * values[key] for key, weight in terms.items()], axis=0)


def _mean(values: Mapping[Any, np.ndarray], sums: Sums) -> np.ndarray:
    return np.mean([_sum(values, terms) for terms in sums.values()], axis=0)


def _span(numbers: Sequence[np.ndarray], i: int) -> Span:
    """In points; rounded, so that 0 is 0, whatever the order of sums."""
    mean, low, high = (round(100 * float(of_all[i]), 9) + 0.0 for of_all in numbers)
    return Span(mean, low, high)


def shared_scores(results: Iterable[Result]) -> tuple[dict[tuple[str, int], np.ndarray], list[str]]:
    """The scores [tasks] of each label and seed of one store, and a fault of one line for each result of other tasks.

    The first result says which tasks they are: those of its queries and, but for contexts of other sizes, of its
    support.
    """
    scores, first, supports, faults = {}, None, {}, []
    for result in results:
        tasks, form = result.tasks, result.setting if result.setting.context else USUAL
        theirs = len(tasks.scores), tasks.queries, tasks.query
        first = first or theirs
        if theirs != first or tasks.support != supports.setdefault(form, tasks.support):
            said = "not in the paired differences, since its tasks are not those of the others"
            faults.append(f"{result.folder}: {said}")
            continue
        scores[result.label, result.seed] = tasks.weighted
    return scores, faults


def pairs(scores: Iterable[tuple[Any, int]], wanted: Iterable[tuple[Any, Any]]) -> dict[tuple[Any, Any], Sums]:
    """By pair, the differences at the seeds that both have.

    Args:
      scores: the keys of scores: a label and a seed.
      wanted: pairs of labels, of which the second is subtracted.
    """
    seeds: dict[Any, set[int]] = {}
    for label, seed in scores:
        seeds.setdefault(label, set()).add(seed)
    return {
        (a, b): {seed: {(a, seed): 1.0, (b, seed): -1.0} for seed in sorted(seeds.get(a, set()) & seeds.get(b, set()))}
        for a, b in wanted
    }


def paired_differences(
    results: Sequence[Result], against: str = ""
) -> tuple[dict[tuple[str, str], Difference], int, list[str]]:
    """Differences between each two labels of one store, or of each to `against`; the number of tasks; and faults.

    A result whose tasks are not those of the others is left out and becomes a fault of one line.
    """
    scores, faults = shared_scores(sorted(results, key=lambda r: r.label != against))
    labels = dict.fromkeys(label for label, _ in scores)
    wanted = [(a, b) for a in labels for b in labels if a != b and against in ("", b)]
    found = measure(scores, pairs(scores, wanted))
    return found, len(next(iter(scores.values()), ())) if found else 0, faults
