"""Results side by side, as text: one line each, one table, and paired differences."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cxda_jax import metrics
from cxda_jax.study.examples import corrections
from cxda_jax.study.results import Result, by_store, is_unfinished, named
from cxda_jax.study.settings import USUAL


class Difference(NamedTuple):
    """Mean score of one label minus that of another in points, and its 95 %
    bootstrap interval over the shared tasks."""

    mean: float
    low: float
    high: float
    seeds: tuple[int, ...]  # those that both have


def paired_differences(
    results: Sequence[Result], against: str = ""
) -> tuple[dict[tuple[str, str], Difference], int, list[str]]:
    """Differences between each two labels of one store, or of each to `against`; the number of tasks; and faults.

    Each task's difference is first averaged over the seeds, so an interval speaks of other tasks, not of other seeds. A
    result whose tasks are not those of the others is left out and becomes a fault of one line.
    """
    scores: dict[str, dict[int, np.ndarray]] = {}
    shared, faults = task_scores(sorted(results, key=lambda r: r.row["label"] != against))
    for (label, seed), of_tasks in shared.items():
        scores.setdefault(label, {})[seed] = of_tasks
    pairs = {(a, b): sorted(scores[a].keys() & scores[b].keys()) for a in scores for b in scores if a != b}
    pairs = {(a, b): seeds for (a, b), seeds in pairs.items() if seeds and against in ("", b)}
    if not pairs:
        return {}, 0, faults
    each = [np.mean([scores[a][s] - scores[b][s] for s in seeds], axis=0) for (a, b), seeds in pairs.items()]
    differences = np.stack(each)  # [pairs, tasks]
    points = 100 * np.stack([differences.mean(1), *metrics.bootstrap_interval(differences)], axis=1)
    measured = {
        pair: Difference(mean, low, high, tuple(seeds))
        for (pair, seeds), (mean, low, high) in zip(pairs.items(), points.tolist(), strict=True)
    }
    return measured, differences.shape[1], faults


def task_scores(results: Iterable[Result]) -> tuple[dict[tuple[str, int], np.ndarray], list[str]]:
    """The scores [tasks] of each label and seed of one store, and a fault of one line for each result of other tasks.

    The first result says which tasks they are: those of its queries and, but for contexts of other sizes, of its
    support.
    """
    scores, queries, supports, faults = {}, None, {}, []
    for result in results:
        stored, form = result.stored(), result.setting if result.setting.context else USUAL
        theirs = stored["labels"].shape, stored["query"].tobytes()
        queries = queries or theirs
        support = stored["support"].tobytes()
        if theirs != queries or support != supports.setdefault(form, support):
            said = "not in the paired differences, since its tasks are not those of the others"
            faults.append(f"{result.folder}: {said}")
            continue
        labels = stored["labels"]
        of_tasks = metrics.scores(result.row["metric"], stored["predictions"], labels) * metrics.shares(labels)
        scores[result.row["label"], result.row["seed"]] = of_tasks
    return scores, faults


def comparison(results: Sequence[Result], against: str) -> str:
    """Each label's paired difference to `against` on the same store. Unfinished seeds are left out."""
    lines, left_out, stores = [], [], by_store(results)
    for store, of_store in stores.items():
        left_out += [unfinished(store, r.row) for r in of_store if is_unfinished(r.row)]
        measured, _, faults = paired_differences([r for r in of_store if not is_unfinished(r.row)], against)
        on = f"{store}: " * (len(stores) > 1)
        lines += [
            f"{on}{label} - {against}  {d.mean:+.2f}  [{d.low:+.2f}, {d.high:+.2f}]  seeds {','.join(map(str, d.seeds))}"
            for (label, _), d in measured.items()
        ]
        left_out += faults
    title = "paired differences, 95 % bootstrap interval over the shared tasks:"
    return "\n".join([title, *lines, *(f"left out: {fault}" for fault in left_out)])


def summary(row: Mapping[str, Any]) -> str:
    unfinished = f"  UNFINISHED: step {row['reached_step']} of {row['steps']}" * is_unfinished(row)
    also = "".join(f"  ({name}: {scores['avg']:.1f}, {scores['w10']:.1f})" for name, scores in row["also"].items())
    return (
        f"{row['label']} seed {row['seed']}  Avg {row['avg']:.1f}  W10% {row['w10']:.1f}{also}  "
        f"{row['task_ms']:.1f} ms/task  weights {row['weights_hash'][:12]}{corrections(row, '  ')}{unfinished}"
    )


def table(results: Sequence[Result]) -> str:
    """Mean and standard error over seeds, a line per store, method and number of tasks;
    unfinished seeds have their own."""
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    footnotes = []
    for result in named(results):
        store, row = result.store, result.row
        marks, late = row.get("data_marks", []), is_unfinished(row)
        groups.setdefault((store + "*" * bool(marks), row["label"] + "†" * late, row["num_tasks"]), []).append(row)
        if marks:
            footnotes.append(f"* {store}: {', '.join(marks)}; not comparable with results that lack this mark")
        if late:
            footnotes.append(f"† {unfinished(store, row)}; in no mean with finished seeds")
    wide = max(18, *(len(label) + 2 for _, label, _ in groups))
    first = max(17, *(len(store) + 2 for store, _, _ in groups))
    line = f"{{:<{first}}}{{:<{wide}}}{{:<8}}{{:>6}}  {{:>13}}  {{:>13}}  {{:>9}}  {{:>10}}"
    lines = [line.format("benchmark", "method", "seeds", "tasks", "Avg", "W10%", "adapt ms", "predict ms")]
    for (store, label, num_tasks), group in groups.items():
        scores = (metrics.mean_sem(np.array([r[field] for r in group])) for field in ("avg", "w10"))
        cells = ["{:.1f} +- {:.1f}".format(*score).replace(" +- nan", "") for score in scores]
        seeds = ",".join(str(r["seed"]) for r in group)
        times = [f"{np.median([r[field] for r in group]):.1f}" for field in ("adapt_ms", "predict_ms")]
        lines.append(line.format(store, label, seeds, num_tasks, *cells, *times))
    return "\n".join([*lines, *dict.fromkeys(footnotes)])


def unfinished(store: str, row: Mapping[str, Any]) -> str:
    return f"{store}, {row['label']} seed {row['seed']}: unfinished, at step {row['reached_step']} of {row['steps']}"
