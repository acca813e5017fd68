"""Context curves: scores against the number of support images that have arrived, paired over the tasks, and as text."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cxda_jax import metrics
from cxda_jax.study.comparing import Difference, task_scores, unfinished
from cxda_jax.study.results import Result, by_store, is_unfinished
from cxda_jax.study.settings import ARRIVALS, Setting

SCORES = {"avg": "Avg", "w10": "W10%"}
AREA = -1  # stands in place of a size for the area under a curve
LAST = 100  # images; the area ends there
ORDERS = {ARRIVALS["mixed"]: "arriving mixed", ARRIVALS["by_domain"]: "arriving domain after domain"}
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

    def at(self, size: int, values: Mapping[Key, Any]) -> dict[int, Any]:
        """By seed, the value that `values` hold for a size; for AREA, the area under them.

        Seeds that lack it are left out.
        """
        weights = {size: 1.0}
        if self.constant:
            weights = {0: 1.0}
        elif size == AREA:
            weights = area_weights(list(self.points))
        found = {}
        for seed in {seed: None for of_seeds in self.points.values() for seed in of_seeds}:
            used = [(weight, self.points.get(n, {}).get(seed)) for n, weight in weights.items()]
            terms = [weight * values[key] for weight, r in used if r and (key := (r.row["label"], seed)) in values]
            if terms and len(terms) == len(weights):
                found[seed] = sum(terms)
        return found

    def level(self, size: int, score: str) -> dict[int, float]:
        """By seed, avg or w10 in a context of this size; for AREA, the area under it."""
        return self.at(size, {(r.row["label"], r.row["seed"]): r.row[score] for r in self.results()})

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
            of_size = found.setdefault(result.label, {}).setdefault(result.setting.number, {})
            of_size.setdefault(result.row["seed"], result)
    curves = []
    for label, points in found.items():
        constant = not any(r.row.get("uses_support", True) for seeds in points.values() for r in seeds.values())
        curves.append(Curve(label, dict(sorted(points.items())), constant))
    return curves if not all(curve.constant for curve in curves) else []


def sizes_of(curves: Sequence[Curve]) -> list[int]:
    """All sizes of the context that a curve has, ascending."""
    return sorted({size for curve in curves for size in curve.points})


class Samples(NamedTuple):
    """The scores that paired differences follow from. Results of other tasks are left out, and are faults of one line.

    Attributes:
      scores: [tasks].
      deciles: the mean over the worst tenth of the tasks, then that of each bootstrap sample of them: [1 + samples].
      faults: a line for each result that is left out.
    """

    scores: Mapping[Key, np.ndarray]
    deciles: Mapping[Key, np.ndarray]
    faults: list[str]


def draw_samples(curves: Sequence[Curve]) -> Samples:
    """The scores of the tasks that the curves share, and bootstrap samples of these tasks."""
    scores, faults = task_scores([result for curve in curves for result in curve.results()])
    drawn = metrics.bootstrap_worst_decile(np.stack(list(scores.values())))
    deciles = {key: np.append(metrics.worst_decile(scores[key]), row) for key, row in zip(scores, drawn, strict=True)}
    return Samples(scores, deciles, faults)


def differences(
    curves: Sequence[Curve], samples: Samples, against: str = ""
) -> dict[tuple[str, int], dict[str, Difference]]:
    """By label and size (or AREA), the paired differences of avg and w10 to the curve `against` at the same size.

    Without `against`, each curve is compared with itself in an empty context. Each task's difference is first averaged
    over the seeds that both have; the 95 % bootstrap intervals are over the tasks.
    """
    found, by_task, by_sample = {}, [], []
    for curve in curves:
        other = next(c for c in curves if c.label == against) if against else curve
        if curve.label == against or (curve.constant and not against):
            continue
        for size in (*sizes_of(curves), AREA):
            base = size if against else 0
            seeds = sorted(curve.at(size, samples.scores).keys() & other.at(base, samples.scores).keys())
            if not seeds or (size == 0 and not against):
                continue
            for values, gaps in ((samples.scores, by_task), (samples.deciles, by_sample)):
                mine, theirs = curve.at(size, values), other.at(base, values)
                gaps.append(np.mean([mine[seed] - theirs[seed] for seed in seeds], axis=0))
            found[curve.label, size] = tuple(seeds)
    if not found:
        return {}
    scores, deciles = 100 * np.stack(by_task), 100 * np.stack(by_sample)
    avg = [scores.mean(1), *metrics.bootstrap_interval(scores)]
    w10 = [deciles[:, 0], *np.percentile(deciles[:, 1:], [2.5, 97.5], axis=1)]

    def measured(numbers: list[np.ndarray], i: int, seeds: tuple[int, ...]) -> Difference:
        mean, low, high = (round(float(each[i]), 9) + 0.0 for each in numbers)  # 0 is 0, whatever the order of sums
        return Difference(mean, low, high, seeds)

    return {
        key: {"avg": measured(avg, i, seeds), "w10": measured(w10, i, seeds)}
        for i, (key, seeds) in enumerate(found.items())
    }


def printed(results: Sequence[Result], against: str | None = None) -> Iterator[str]:
    """The curves of each store as text: a table, and the paired differences to the curve `against`, if there is one.

    Unfinished seeds are left out.
    """
    for store, of_store in by_store(results).items():
        finished = [r for r in of_store if not is_unfinished(r.row)]
        for kind, order in ORDERS.items():
            curves = find_curves(finished, kind)
            if not curves:
                continue
            late = [unfinished(store, r.row) for r in of_store if is_unfinished(r.row) and r.setting.kind == kind]
            yield "\n".join([f"{store}: Avg/W10% against the number of support images, {order}", *_table(curves)])
            if against in (by_label := {curve.label: curve for curve in curves}):
                samples = draw_samples(curves)
                title = f"{store}: paired differences to {against} in the same context, 95 % bootstrap intervals over the tasks:"
                found = differences(curves, samples, against)
                alike = {c.label for c in curves if c.constant} if by_label[against].constant else ()
                lines = [
                    f"{_name(label, kind, n)} - {against}  {_said(scores)}"
                    for (label, n), scores in found.items()
                    if label not in alike or n == 0  # the others would say the same
                ]
                left_out = [f"left out: {fault}" for fault in (*late, *samples.faults)]
                yield "\n".join([title, *lines, *left_out])


def _table(curves: Sequence[Curve]) -> list[str]:
    """A line for each curve, and a column for each size."""
    sizes = (*sizes_of(curves), AREA)
    rows = [["method", *(str(size) if size != AREA else "area" for size in sizes)]]
    for curve in curves:
        levels = [[curve.level(size, score).values() for score in SCORES] for size in sizes]
        cells = ["/".join(f"{np.mean(list(seeds)):.1f}" for seeds in scores if seeds) for scores in levels]
        rows.append([curve.label, *(cell or "-" for cell in cells)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    line = f"{{:<{widths[0]}}}" + "".join(f"{{:>{width + 2}}}" for width in widths[1:])
    return [line.format(*row) for row in rows]


def _name(label: str, kind: str, size: int) -> str:
    return f"{label},{Setting(kind, size)}" if size != AREA else f"{label},area"


def _said(scores: Mapping[str, Difference]) -> str:
    numbers = (f"{SCORES[score]} {d.mean:+.2f} [{d.low:+.2f}, {d.high:+.2f}]" for score, d in scores.items())
    return f"{'  '.join(numbers)}  seeds {','.join(map(str, scores['avg'].seeds))}"
