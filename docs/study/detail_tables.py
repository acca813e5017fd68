"""The study's tables of what details.py found at seed 0, as Markdown: kinds of shift, domains, attention."""

import functools

import numpy as np

from cxda_jax.metrics import bootstrap_interval
from docs.study.evidence import ALONE, Evidence, points
from docs.study.tables import BASE, VARIED, Studies, called, signed, table

# What a test domain of a store is; False where the first word of its name alone counts.
DOMAINS = {
    "unipen": {"writers": True, "sites": False}, "cifar10_c": {"corruptions with a severity": True, "corruptions": False},
    "unipen_sizes": {"writers": True, "sites": False}, "qmnist": {"students": True}, "glyphs": {"faces": True},
    "glyphs_c": {"corruptions with a severity": True, "corruptions": False},
}  # fmt: skip


def kinds(studies: Studies) -> str:
    """The lead over BASE in groups of queries: severities, letters that differ by size.

    Another width is another question.
    """
    rows = []
    for store, evidence in studies.items():
        if store in ALONE:
            continue
        for name, gaps in kind_gaps(evidence).items():
            count = f"{sum(evidence.details['sizes'][name]):,} questions"
            rows.append([f"`{store}`, {name}", count, *(signed(gaps.get(label)) for label in VARIED)])
    return table([f"minus `{BASE}`, Avg, seed 0", "", *map(called, VARIED)], rows)


@functools.cache
def kind_gaps(evidence: Evidence) -> dict[str, dict[str, tuple[float, float, float]]]:
    """By group and label: the difference to BASE of the share of right answers, with its interval over tasks."""
    methods, shares = evidence.details.get("methods", {}), {}
    for name, size in evidence.details.get("sizes", {}).items() if BASE in methods else ():
        for label in (label for label in VARIED if label in methods):
            more = np.array(methods[label]["right"][name]) - methods[BASE]["right"][name]
            shares[name, label] = more / np.mean(size)
    found: dict[str, dict[str, tuple[float, float, float]]] = {}
    if shares:
        by_task = np.stack([*shares.values()])
        ends = [by_task.mean(1), *bootstrap_interval(by_task)]
        for i, (name, label) in enumerate(shares):
            found.setdefault(name, {})[label] = points([each[i] for each in ends])
    return found


def domains(studies: Studies) -> str:
    """In how many test domains each method is better than BASE, and by how much."""
    rows = []
    for store, evidence in studies.items():
        for kind, whole in DOMAINS.get(store, {}).items():
            gaps = domain_gaps(evidence, whole)
            if gaps:
                each = {label: np.array([*of.values()]) for label, of in gaps.items()}
                cells = [
                    f"{(each[m] > 0).sum()} ({each[m].min():+.0f} to {each[m].max():+.0f}); {signed(over_domains(evidence, m, whole))}"
                    if m in each
                    else ""
                    for m in VARIED
                ]
                rows.append([f"`{store}`, {len(each[BASE])} {kind}", *cells])
    head = f"above `{BASE}` in (least to most points); mean (95 % interval over these domains), seed 0"
    return table([head, *map(called, VARIED)], rows)


def domain_gaps(evidence: Evidence, whole: bool = True) -> dict[str, dict[str, float]]:
    """By label and test domain: the difference to BASE in points.

    Args:
      whole: False puts domains together whose names begin with the same word.
    """
    return {
        label: {key: 100 * more / asked for key, (more, asked) in of.items()}
        for label, of in domain_counts(evidence, whole).items()
    }


def over_domains(evidence: Evidence, label: str, whole: bool = True) -> tuple[float, float, float]:
    """The difference to BASE of all questions, with a 95 % bootstrap interval over the test domains, in points."""
    counts = np.array([*domain_counts(evidence, whole)[label].values()])
    drawn = np.random.default_rng(0).multinomial(len(counts), np.full(len(counts), 1 / len(counts)), 10_000) @ counts
    mean, samples = counts[:, 0].sum() / counts[:, 1].sum(), drawn[:, 0] / np.maximum(drawn[:, 1], 1)
    return points([mean, *np.percentile(samples, [2.5, 97.5])])


def domain_counts(evidence: Evidence, whole: bool) -> dict[str, dict[str, np.ndarray]]:
    """By label and test domain: how many more answers are right than of BASE, and the number of questions."""
    methods = {label: m["domains"] for label, m in evidence.details.get("methods", {}).items() if "domains" in m}
    found: dict[str, dict[str, np.ndarray]] = {}
    for label in (label for label in (BASE, *VARIED) if label in methods and BASE in methods):
        sums = found.setdefault(label, {})
        for name, (right, asked) in methods[label].items():
            key = name if whole else name.split()[0]
            sums[key] = sums.get(key, np.zeros(2)) + [right - methods[BASE][name][0], asked]
    return found


def attention(studies: Studies) -> str:
    """Where attention goes."""
    rows = []
    for store, evidence in studies.items():
        for label, told in evidence.details.get("methods", {}).items():
            if a := told.get("attention"):
                shares = [
                    f"{100 * a[name][0]:.1f} % (best head {100 * a[f'{name}_best_head']:.1f}) against {100 * a[f'{name}_chance']:.1f} %"
                    for name in ("own_domain", "same_class")
                ]
                gain = a.get("gain_correlation", {})
                links = [
                    "{:+.2f} ({:+.2f} to {:+.2f})".format(*gain[name]) if name in gain else ""
                    for name in ("own_domain", "same_class")
                ]
                rows.append(
                    [
                        f"`{store}`, {called(label)}",
                        f"{100 * a['on_images'][0]:.0f} %",
                        *shares,
                        f"{a['effective_images'][0]:.0f}",
                        *links,
                    ]
                )
    head = [
        "",
        "on images",
        "own domain, against chance",
        "same class, against chance",
        "effective images",
        "gain and own domain",
        "gain and same class",
    ]
    return table(head, rows)
