"""The study's tables of what moves a result without a reason, as Markdown: seeds, and the same seed again."""

import numpy as np
from scipy import stats

from cxda_jax.metrics import bootstrap_interval
from docs.study.evidence import Evidence, points
from docs.study.tables import BASE, SPREAD, STORES, Studies, called, many, needed, signed, table

FRESH = "a fresh install on another day"  # what unipen_cells is called on the page
# Pairs of methods whose difference has an interval over the seeds too.
COMPARED = (
    *(("cxda", other) for other in ("bn", "erm", "cml", BASE)),
    *((m, BASE) for m in ("cxda_any", "icrm", "cxda_loo")),
)


def spread(studies: Studies) -> str:
    """The standard deviation over seeds, and the smallest difference of two methods that k seeds can show."""
    rows = []
    for store in (store for store in STORES if store in studies):
        evidence = studies[store]
        for label in SPREAD:
            if evidence.has((label, "")) and len(evidence.scores[label, ""]) > 1:
                values = [evidence.level((label, ""), score) for score in ("avg", "w10")]
                cells = [f"{x.std(ddof=1):.2f}" for x in values] + [
                    f"{needed(x.std(ddof=1), len(x)):.1f}" for x in values
                ]
                rows.append([f"`{store}`, {called(label)}", many(len(values[0])), *cells])
    return table(["", "", "Avg, deviation", "W10%, deviation", "Avg, needed", "W10%, needed"], rows)


def over_seeds(studies: Studies) -> str:
    """Differences at each seed, and the interval for other seeds, where there are three seeds or more."""
    rows = []
    for store in (store for store in STORES if store in studies):
        for (a, b), (gap, each) in seed_gaps(studies[store]).items():
            told = ", ".join(f"{x:+.1f}" for x in each)
            rows.append([f"`{store}`, {called(a)} minus {called(b)}", told, signed(gap)])
    return table(["Avg", "at each seed", "mean, 95 % t interval over the seeds"], rows)


def seed_gaps(evidence: Evidence) -> dict[tuple[str, str], tuple[tuple[float, float, float], tuple[float, ...]]]:
    """By pair of methods: the mean difference with Student's 95 % interval over the seeds,
    and the difference at each seed."""
    found = {}
    for (a, b), gap in evidence.gaps([((a, ""), (b, "")) for a, b in COMPARED]).items():
        if len(gap.of_seeds) > 2:
            mean, half = np.mean(gap.of_seeds), stats.sem(gap.of_seeds) * stats.t.ppf(0.975, len(gap.of_seeds) - 1)
            found[a[0], b[0]] = (tuple(round(float(x), 6) for x in (mean, mean - half, mean + half)), gap.of_seeds)
    return found


def reruns(studies: Studies) -> str:
    """Trainings again, of seed 0 unless another is named, each with one thing changed that should not matter,
    minus the first."""
    rows = [
        [f"{method}, {what}", signed(gap), ", ".join(alike) or "of none", device]
        for method, what, gap, alike, device in rerun(studies)
    ]
    return table(["again, seed 0 unless named", "Avg, points", "bit for bit the weights", ""], rows)


def rerun(studies: Studies) -> list[tuple[str, str, tuple[float, float, float], list[str], str]]:
    """Of each training again: its method, what was other, its gap to the first, the others
    that have the same weights, and its machine."""
    if "unipen" not in studies:
        return []
    first = studies["unipen"]
    # By method, seed and what was other: the row and the scores.
    again = {
        (*(label.partition(",")[::2] if "," in label else (label, FRESH)), seed): (
            row,
            studies[part].scores[label, setting][seed],
        )
        for part in ("unipen_spread", "unipen_cells")
        if part in studies
        for (label, setting), of in studies[part].rows.items()
        for seed, row in of.items()
    }
    found = []
    for (method, what, seed), (row, scores) in again.items():
        more = scores - first.scores[method, ""][seed]
        others = {
            other: that for (of, other, s), (that, _) in again.items() if (of, s) == (method, seed) and other != what
        }
        others["the first"] = first.rows[method, ""][seed]
        alike = [f"of {other}" for other, that in others.items() if that["weights_hash"] == row["weights_hash"]]
        named = what + f", seed {seed}" * bool(seed)
        found.append(
            (f"`{method}`", named, points([more.mean(), *bootstrap_interval(more)]), sorted(alike), row["device"])
        )
    return found
