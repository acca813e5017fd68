"""Scores in numpy: of a task, over tasks, over seeds.

A label of -1 marks a query that does not count; see exhaustive() in data/episodes.py.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import scipy.optimize
import scipy.special

MARGIN = 3  # times as many images as prove a risk without any error, where thresholds begin to be tried
COVERAGES = (1.0, 0.8, 0.5)  # parts of all answers, the surest ones, of which the risk is told


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """The share of correct predictions of one task; both arrays are class numbers [queries]."""
    return float(np.mean(predictions == labels))


def macro_f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Mean F1 over the classes that occur in the labels of one task, as in WILDS;
    both arrays are class numbers [queries]."""
    return _mean_f1(predictions, labels, np.unique(labels))


def macro_f1_union(predictions: np.ndarray, labels: np.ndarray) -> float:
    """macro_f1() over the classes that occur in the labels or in the predictions, as in scikit-learn."""
    return _mean_f1(predictions, labels, np.union1d(predictions, labels))


def _mean_f1(predictions: np.ndarray, labels: np.ndarray, classes: np.ndarray) -> float:
    scores = []
    for c in classes:
        hits = np.sum((predictions == c) & (labels == c))
        scores.append(2 * hits / (np.sum(predictions == c) + np.sum(labels == c)))
    return float(np.mean(scores))


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": accuracy,
    "macro_f1": macro_f1,
    "macro_f1_union": macro_f1_union,
}


def metric_of(metric: str, f1: str) -> str:
    """A data set's metric in the form that is asked for: `f1` is "labels" or "union", the classes of macro-F1."""
    return "macro_f1_union" if metric == "macro_f1" and f1 == "union" else metric


def scores(metric: str, predictions: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Scores [tasks] of a metric in METRICS, from predictions and labels [tasks, queries]."""
    counts = labels >= 0
    if metric == "accuracy":  # of all tasks at once: a report scores millions
        return ((predictions == labels) & counts).sum(1) / counts.sum(1)
    return np.array([METRICS[metric](p[c], y[c]) for p, y, c in zip(predictions, labels, counts, strict=True)])


def shares(labels: np.ndarray) -> np.ndarray:
    """The weight of each task in a mean over tasks: its queries that count, divided by their mean number.

    All are 1 if the tasks have equally many. So the mean of the accuracies, each times its share,
    is that of all queries.
    """
    counts = (labels >= 0).sum(1)
    return counts / counts.mean()


def worst_decile(scores: np.ndarray) -> float:
    """Mean of the lowest tenth of scores [tasks], of one task at least."""
    return float(np.sort(scores)[: max(1, len(scores) // 10)].mean())


def averages(scores: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The mean of the scores [tasks] of tasks with these labels [tasks, queries], and of their lowest tenth,
    in points."""
    return {"avg": 100 * float((scores * shares(labels)).mean()), "w10": 100 * worst_decile(scores)}


def mean_sem(values: np.ndarray) -> tuple[float, float]:
    """Mean and standard error (sample deviation / sqrt(n)) of values [n]; the standard error of one value is nan."""
    values = np.asarray(values, float)
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def expected_calibration_error(confidence: np.ndarray, right: np.ndarray, bins: int = 15) -> float:
    """How far confidences [n] are from the share of right answers, the mean over answers, in bins of equal width."""
    which = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = np.bincount(which, confidence, bins) - np.bincount(which, right, bins)
    return float(np.abs(gaps).sum() / len(right))


def risk_at(coverage: float, confidence: np.ndarray, right: np.ndarray) -> float:
    """The share of wrong answers among the most confident ones, which are this part of all [n]."""
    kept = np.argsort(-confidence, kind="stable")[: max(1, round(coverage * len(right)))]
    return float(1 - np.mean(right[kept]))


def trust(predictions: np.ndarray, labels: np.ndarray, confidence: np.ndarray) -> dict[str, Any]:
    """How well the probabilities of the answers to all queries say how many are right, without a temperature."""
    counted = labels >= 0
    sure, right = confidence[counted], (predictions == labels)[counted]
    risk = {str(coverage): risk_at(coverage, sure, right) for coverage in COVERAGES}
    return {"calibration_error": expected_calibration_error(sure, right), "risk": risk}


def bootstrap_interval(values: np.ndarray, resamples: int = 10_000) -> np.ndarray:
    """The 95 % bootstrap interval of the mean of values [..., tasks] over the tasks: its ends [2, ...]."""
    tasks, by_task = values.shape[-1], np.moveaxis(values, -1, 0)
    means = [counts @ by_task / tasks for counts in _resamples(tasks, resamples)]
    return np.percentile(np.concatenate(means), [2.5, 97.5], axis=0)


def student_limit(freedom: int) -> float:
    """The limit below which 97.5 % of Student's distribution lie. This module does without scipy.stats, as a process
    that loads an adapter would wait 0.7 s for its import."""
    return float(scipy.special.stdtrit(freedom, 0.975))


def interval_over_groups(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Of values [rows, tasks] in groups [tasks], such as domains: the mean, and the 95 % interval for the mean of new
    groups, [rows, 3].

    It is Student's interval over the means of the groups, since the tasks of one group tell nothing of other groups. Of
    one group alone it is that over its tasks.
    """
    _, group = np.unique(groups, return_inverse=True)
    sizes = np.bincount(group)
    means = np.stack([np.bincount(group, row) / sizes for row in values]) if len(sizes) > 1 else values
    mean, count = means.mean(1), means.shape[1]
    half = means.std(1, ddof=1) / np.sqrt(count) * student_limit(count - 1) if count > 1 else np.inf
    return np.stack([mean, mean - half, mean + half], axis=1)


def after_selection(span: Sequence[float], groups: int) -> float:
    """What a mean promises that is told because its interval lies above 0: the median-unbiased estimate among such.

    Of many that are selected so, the means themselves are too large. Student's interval has 95 % over so many groups.
    It is the mean where the interval does not lie above 0, and at least 0 where it does.
    """
    mean, low, high = span
    if not low > 0 or groups < 2:
        return mean
    freedom, limit = groups - 1, student_limit(groups - 1)
    error = max((high - low) / 2 / limit, 1e-12)
    found = mean / error

    def beyond(shift: Any) -> Any:
        """How likely the selected mean is above the found one, less 1/2, if the truth is so many errors above 0."""
        selected, above = 1 - scipy.special.nctdtr(freedom, shift, [limit, found])
        return above / selected - 0.5

    if found > 30:  # selection is certain
        return mean
    if beyond(0.0) > 0:
        return 0.0
    shift: Any = scipy.optimize.brentq(beyond, 0.0, found)  # at most the mean; of larger shifts SciPy may give NaN
    return error * shift


def surest_within(risk: float, accepted: np.ndarray, wrong: np.ndarray) -> int:
    """The number of levels [domains, levels] from the surest on at which no more than this part of the answers is wrong
    on new domains, with 95 % confidence.

    Two bounds must hold at a level: that of a ratio over domains, with Student's factor, and Clopper and Pearson's over
    images. Levels are tried in their order, from the first that has images enough to allow for a few errors until
    one fails, so trying many costs no confidence.
    """
    images, domains = accepted.sum(0), len(accepted)
    if domains < 2 or not 0 < risk < 1:
        return accepted.shape[1] if risk >= 1 and domains else 0
    errors = wrong.sum(0)
    found = errors / np.maximum(images, 1e-9)
    spread = (wrong - found * accepted).std(0, ddof=1) * np.sqrt(domains) / np.maximum(images, 1e-9)
    over_domains = found + spread * student_limit(domains - 1) <= risk
    over_images = scipy.special.betaincinv(errors + 1, np.maximum(images - errors, 1e-9), 0.95) <= risk
    need = np.log(0.05) / np.log1p(-risk)  # images that prove so small a risk if no answer is wrong
    first = int(np.searchsorted(images, max(need, min(MARGIN * need, images[-1] / 4))))
    held = (over_domains & over_images)[first:]
    passed = len(held) if held.all() else int(np.argmin(held))
    return first + passed if passed else 0


def bootstrap_worst_decile(scores: np.ndarray, resamples: int = 2_000) -> np.ndarray:
    """worst_decile() of each row of scores [rows, tasks] in bootstrap samples of the tasks: [rows, resamples].

    All rows see the same samples, so the difference of two rows is that of a paired bootstrap.
    """
    lowest, ascending = max(1, scores.shape[1] // 10), np.argsort(scores, axis=1)
    found = []
    for counts in _resamples(scores.shape[1], resamples):
        of_rows = []
        for row, order in zip(scores, ascending, strict=True):
            drawn = counts[:, order]  # how often a sample has each task, from the lowest score on
            before = np.cumsum(drawn, axis=1) - drawn
            of_rows.append(np.clip(lowest - before, 0, drawn) @ row[order] / lowest)
        found.append(of_rows)
    return np.concatenate(found, axis=1)


def _resamples(tasks: int, resamples: int) -> Iterator[np.ndarray]:
    """The times that each bootstrap sample has each task, [100, tasks] at a time, since all do not fit in memory."""
    rng = np.random.default_rng(0)
    for _ in range(resamples // 100):
        yield rng.multinomial(tasks, np.full(tasks, 1 / tasks), 100)
