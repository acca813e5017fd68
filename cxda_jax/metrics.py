"""Scores in numpy: of a task, over tasks, over seeds.

A label of -1 marks a query that does not count; see exhaustive() in data/episodes.py.
"""

from collections.abc import Callable, Iterator

import numpy as np

from cxda_jax.errors import UserError, brief

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
    if metric not in METRICS:
        raise UserError(f"metric={brief(repr(metric))} is not one of {', '.join(METRICS)}")
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


def bootstrap_interval(values: np.ndarray, resamples: int = 10_000) -> np.ndarray:
    """The 95 % bootstrap interval of the mean of values [..., tasks] over the tasks: its ends [2, ...]."""
    tasks, by_task = values.shape[-1], np.moveaxis(values, -1, 0)
    means = [counts @ by_task / tasks for counts in _resamples(tasks, resamples)]
    return np.percentile(np.concatenate(means), [2.5, 97.5], axis=0)


def interval_over_groups(values: np.ndarray, groups: np.ndarray, resamples: int) -> np.ndarray:
    """The 95 % bootstrap interval of the means of values [rows, tasks], over groups and over the tasks of each."""
    rng, (_, group) = np.random.default_rng(0), np.unique(groups, return_inverse=True)
    sizes = np.bincount(group)
    drawn = rng.multinomial(len(sizes), np.full(len(sizes), 1 / len(sizes)), resamples)
    counts = np.zeros((resamples, len(group)))
    for g, size in enumerate(sizes):
        counts[:, group == g] = rng.multinomial(drawn[:, g] * size, np.full(size, 1 / size))
    means = counts @ values.T / counts.sum(1, keepdims=True)
    return np.percentile(means, [2.5, 97.5], axis=0)


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
