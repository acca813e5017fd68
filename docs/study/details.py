"""Finds what the records of results leave out and the study needs: answers by domain and by class,
and where attention goes.

docs/study/run.py calls it while the runs are there, for seed 0 of each part.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cxda_jax.data.store import DomainStore
from cxda_jax.metrics import bootstrap_interval
from cxda_jax.study.results import Result
from cxda_jax.study.settings import USUAL, Setting

AMBIGUOUS = "cCoOsS"
EMPTY = Setting("context", 0)


def details(results: Sequence[Result], store: DomainStore) -> dict[str, Any]:
    """Right answers to the usual tasks in groups of queries, and attention, if any.

    Args:
      results: of one store and one seed; those of an empty context serve to say what the images change.

    Returns:
      the names of the groups; by group the number of its queries in each task; and by label the right ones among them in each
      task, those of each test domain [right, all], and what attention() says.
    """
    domains, found, sizes = store.row_domains(), {}, {}
    empty = {r.label: r.stored()["predictions"] for r in results if r.setting == EMPTY}
    for result in (r for r in results if r.setting == USUAL):
        stored = result.stored()
        right, of = stored["predictions"] == stored["labels"], domains[stored["query"]]
        members = groups(store, of, stored["labels"])
        sizes = sizes or {name: among.sum(1).tolist() for name, among in members.items()}
        entry: dict[str, Any] = {
            "right": {name: (right & among).sum(1).tolist() for name, among in members.items()},
            "domains": {
                store.domain_names[d]: [int(right[of == d].sum()), int((of == d).sum())] for d in np.unique(of)
            },
        }
        if (result.folder / "attention.npz").exists():
            kept, before = result.stored("attention"), empty.get(result.label)
            entry["attention"] = attention(kept, stored, store.labels, before)
        found[result.label] = entry
    return {"data": store.info.name, "data_hash": store.sha256, "sizes": sizes, "methods": found}


def groups(store: DomainStore, of: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Which queries [tasks, queries] belong to each kind of shift: a corruption's severity, and letters whose upper
    and lower case differ by their size alone.

    Args:
      of, labels: the domain and the class of each query.
    """
    found = {}
    if store.info.name.endswith("_c"):
        severity = np.array([name.split()[-1] for name in store.domain_names])[of]
        found |= {f"severity {number}": severity == number for number in sorted(set(severity.ravel()))}
    if set(AMBIGUOUS) <= set(store.info.class_names):
        alike = np.isin(np.array(store.info.class_names)[labels], list(AMBIGUOUS))
        found |= {"case by size": alike, "all others": ~alike}
    return found


def attention(
    kept: dict[str, np.ndarray], stored: dict[str, np.ndarray], labels: np.ndarray, before: np.ndarray | None
) -> dict[str, Any]:
    """Means over queries, with 95 % bootstrap intervals over tasks, of where the
    weights [tasks, queries, heads, support] go.

    Args:
      before: predictions of the same queries in an empty context, if they are known.
    """
    weights = kept["weights"].astype(np.float64)
    tasks = len(weights)
    total = weights.sum(-1)  # less than 1 where a method has learned tokens too
    shares = weights / np.maximum(total, 1e-9)[..., None]
    same_domain = kept["query_domain"][:, :, None] == kept["support_domain"][:, None]  # [tasks, queries, support]
    same_class = stored["labels"][:tasks, :, None] == labels[stored["support"][:tasks]][:, None]
    entropy = -(shares * np.log(np.maximum(shares, 1e-12))).sum(-1)
    own, alike = ((shares * chosen[:, :, None]).sum(-1) for chosen in (same_domain, same_class))
    said = {
        "on_images": interval(total.mean(2)),
        "own_domain": interval(own.mean(2)),
        "own_domain_best_head": float(own.mean((0, 1)).max()),
        "own_domain_chance": float(same_domain.mean()),
        "same_class": interval(alike.mean(2)),
        "same_class_best_head": float(alike.mean((0, 1)).max()),
        "same_class_chance": float(same_class.mean()),
        "effective_images": interval(np.exp(entropy).mean(2)),
        "queries": int(np.prod(own.shape[:2])),
    }
    if before is not None:
        right = stored["predictions"][:tasks] == stored["labels"][:tasks]
        gain = right.astype(float) - (before[:tasks] == stored["labels"][:tasks])
        said["gain_correlation"] = {
            name: correlation(mass.mean(2), gain)
            for name, mass in (("own_domain", own), ("same_class", alike), ("effective_images", np.exp(entropy)))
        }
    return said


def interval(values: np.ndarray) -> list[float]:
    """The mean of values [tasks, queries], and its 95 % bootstrap interval over the tasks."""
    of_tasks = values.mean(1)
    return [float(of_tasks.mean()), *map(float, bootstrap_interval(of_tasks))]


def correlation(x: np.ndarray, y: np.ndarray, resamples: int = 2000) -> list[float]:
    """Pearson's correlation of x and y [tasks, queries], and its 95 % bootstrap interval over the tasks."""
    rng, n = np.random.default_rng(0), len(x)
    if not x.std() or not y.std():
        return [0.0, 0.0, 0.0]  # a constant correlates with nothing
    chosen = [np.arange(n), *rng.integers(0, n, (resamples, n))]
    with np.errstate(invalid="ignore"):
        found = np.nan_to_num([np.corrcoef(x[rows].ravel(), y[rows].ravel())[0, 1] for rows in chosen])
    return [float(found[0]), *map(float, np.percentile(found[1:], [2.5, 97.5]))]
