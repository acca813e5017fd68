"""Context curves: scores against the number of support images that have arrived, paired over the tasks."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cxda_jax.studies.result import Result
from cxda_jax.studies.settings import ARRIVALS
from cxda_jax.studies.statistics import Difference, measure

SCORES = {"avg": "Avg", "w10": "W10%"}
AREA = -1  # stands in place of a size for the area under a curve
LAST = 100  # images; the area ends there
ORDERS = {
    ARRIVALS["mixed"]: "arriving mixed",
    ARRIVALS["by_domain"]: "arriving domain after domain",
    ARRIVALS["by_class"]: "arriving class after class",
}
Key = tuple[str, int]  # a label with its setting, and a seed


class Curve(NamedTuple):
    """The results of one method, and of what was changed, in contexts of several sizes.

    Attributes:
      label: the method and what was changed.
      points: by size, ascending, and by seed.
      constant: the method does not use the support. Its result in an empty context holds for all sizes.
    """

    label: str
    points: Mapping[int, Mapping[int, Result]]
    constant: bool

    def terms(self, size: int) -> dict[int, dict[Key, float]]:
        """By seed, the weights of the results whose sum holds for a size; for AREA, the area under the curve.

        Seeds that lack one of them are left out.
        """
        weights = {size: 1.0}
        if self.constant:
            weights = {0: 1.0}
        elif size == AREA:
            weights = area_weights(list(self.points))
        found = {}
        for seed in {seed: None for of_seeds in self.points.values() for seed in of_seeds}:
            used = [(weight, self.points.get(n, {}).get(seed)) for n, weight in weights.items()]
            terms = {(r.label, seed): weight for weight, r in used if r}
            if terms and len(terms) == len(weights):
                found[seed] = terms
        return found

    def level(self, size: int, score: str) -> dict[int, float]:
        """By seed, avg or w10 in a context of this size; for AREA, the area under it."""
        values = {(r.label, r.seed): getattr(r, score) for r in self.results()}
        of_seeds = self.terms(size).items()
        return {seed: sum(weight * values[key] for key, weight in terms.items()) for seed, terms in of_seeds}

    def results(self, size: int | None = None) -> list[Result]:
        """The results of all sizes, or those that hold for one."""
        sizes = self.points if size is None else [0 if self.constant else size]
        return [result for n in sizes for result in self.points.get(n, {}).values()]


def area_weights(sizes: Sequence[int]) -> dict[int, float]:
    """By size, the weight of its score in the area: the mean of the score over log(1 + n) from n = 0 to LAST.

    Between two sizes the score is a straight line over log(1 + n). There are no weights where 0 or
    LAST is not among the sizes, which ascend.
    """
    inside = [n for n in sizes if n <= LAST]
    if not {0, LAST} <= set(inside):
        return {}
    steps = np.diff(np.log1p(inside))
    halves = (np.append(steps, 0) + np.append(0, steps)) / 2
    return dict(zip(inside, (halves / halves.sum()).tolist(), strict=True))


def find_curves(results: Sequence[Result], kind: str) -> list[Curve]:
    """The curves of one store and order of arrival (a kind of settings), in the order of the results;
    [] if all are constant."""
    found: dict[str, dict[int, dict[int, Result]]] = {}
    for result in results:
        if result.setting.kind == kind:
            of_size = found.setdefault(result.variant, {}).setdefault(result.setting.number, {})
            of_size.setdefault(result.seed, result)
    curves = []
    for label, points in found.items():
        constant = not any(r.uses_support for seeds in points.values() for r in seeds.values())
        curves.append(Curve(label, dict(sorted(points.items())), constant))
    return curves if not all(curve.constant for curve in curves) else []


def sizes_of(curves: Sequence[Curve]) -> list[int]:
    """All sizes of the context that a curve has, ascending."""
    return sorted({size for curve in curves for size in curve.points})


def differences(
    curves: Sequence[Curve], scores: Mapping[Key, np.ndarray], against: str = ""
) -> dict[tuple[str, int], Difference]:
    """By label and size (or AREA), the paired differences to the curve `against` at the same size.

    Without `against`, each curve is compared with itself in an empty context.

    Args:
      scores: of the tasks that the curves share, by label and seed.
    """
    wanted = {}
    for curve in curves:
        other = next(c for c in curves if c.label == against) if against else curve
        if curve.label == against or (curve.constant and not against):
            continue
        for size in (*sizes_of(curves), AREA):
            if size or against:
                ours, theirs = curve.terms(size), other.terms(size if against else 0)
                sums = {seed: _minus(ours[seed], theirs[seed]) for seed in ours.keys() & theirs.keys()}
                wanted[curve.label, size] = {s: terms for s, terms in sums.items() if terms.keys() <= scores.keys()}
    return measure(scores, wanted, worst=True)


def _minus(terms: Mapping[Key, float], others: Mapping[Key, float]) -> dict[Key, float]:
    return {key: terms.get(key, 0.0) - others.get(key, 0.0) for key in {**terms, **others}}
