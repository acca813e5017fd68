"""Results as text: one line each, one table, paired differences, and context curves."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cxda_jax.machine.progress import aligned
from cxda_jax.studies.curve_figures import RIVAL, context_tables, measure_curves
from cxda_jax.studies.formats import to_text
from cxda_jax.studies.result import Result, by_store, is_unfinished, named
from cxda_jax.studies.statistics import paired_differences
from cxda_jax.training import metrics


def summary(row: Mapping[str, Any]) -> str:
    unfinished = f"  UNFINISHED: step {row['reached_step']} of {row['steps']}" * is_unfinished(row)
    also = "".join(f"  ({name}: {scores['avg']:.1f}, {scores['w10']:.1f})" for name, scores in row["also"].items())
    return (
        f"{row['label']} seed {row['seed']}  Avg {row['avg']:.1f}  W10% {row['w10']:.1f}{also}  "
        f"{row['task_ms']:.1f} ms/task  weights {row['weights_hash'][:12]}{corrections(row, '  ')}{unfinished}"
    )


def corrections(row: Mapping[str, Any], before: str = "") -> str:
    """A line that says what adapting changed, for a method that adapts."""
    if "compared" not in row:
        return ""
    return f"{before}of {row['compared']} queries, adapting corrected {row['corrected']} and spoiled {row['spoiled']}"


def unfinished(result: Result) -> str:
    row = result.row
    reached = f"unfinished, at step {row['reached_step']} of {row['steps']}"
    return f"{result.store}, {row['label']} seed {row['seed']}: {reached}"


def table(results: Sequence[Result]) -> str:
    """Mean and standard error over seeds, a line per store, method and number of tasks.

    Unfinished seeds have lines of their own.
    """
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    footnotes = []
    for result in named(results):
        store, row = result.store, result.row
        marks, late = row.get("data_marks", []), is_unfinished(row)
        groups.setdefault((store + "*" * bool(marks), row["label"] + "†" * late, row["num_tasks"]), []).append(row)
        if marks:
            footnotes.append(f"* {store}: {', '.join(marks)}; not comparable with results that lack this mark")
        if late:
            footnotes.append(f"† {unfinished(result)}; in no mean with finished seeds")
    lines = []
    for (store, label, num_tasks), group in groups.items():
        scores = (metrics.mean_sem(np.array([r[field] for r in group])) for field in ("avg", "w10"))
        cells = ["{:.1f} +- {:.1f}".format(*score).replace(" +- nan", "") for score in scores]
        seeds = ",".join(str(r["seed"]) for r in group)
        times = [f"{np.median([r[field] for r in group]):.1f}" for field in ("adapt_ms", "predict_ms")]
        lines.append([store, label, seeds, str(num_tasks), *cells, *times])
    heads = ["benchmark", "method", "seeds", "tasks", "Avg", "W10%", "adapt ms", "predict ms"]
    return "\n".join([*aligned([heads, *lines], left=3), *dict.fromkeys(footnotes)])


def comparison(results: Sequence[Result], against: str) -> str:
    """Each label's paired difference to `against` on the same store. Unfinished seeds are left out."""
    lines, left_out, stores = [], [], by_store(results)
    for store, of_store in stores.items():
        left_out += [unfinished(r) for r in of_store if is_unfinished(r.row)]
        found, _, faults = paired_differences([r for r in of_store if not is_unfinished(r.row)], against)
        on = f"{store}: " * (len(stores) > 1)
        for (label, _), d in found.items():
            interval, seeds = "{:+.2f}  [{:+.2f}, {:+.2f}]".format(*d.avg), ",".join(map(str, d.seeds))
            lines.append(f"{on}{label} - {against}  {interval}  seeds {seeds}")
        left_out += faults
    title = "paired differences, 95 % bootstrap interval over the shared tasks:"
    return "\n".join([title, *lines, *(f"left out: {fault}" for fault in left_out)])


def context_curves(results: Sequence[Result], against: str | None = None) -> Iterator[str]:
    """Tables of the curves of each store: the scores, and differences to n = 0 and to the curve `against`.

    Unfinished seeds are left out and marked.
    """
    for of_store in by_store(results).values():
        late = [r for r in of_store if is_unfinished(r.row)]
        found, faults = measure_curves([r for r in of_store if not is_unfinished(r.row)], against or RIVAL)
        for measured in found:
            yield from map(to_text, context_tables(measured, late))
        yield from (f"left out: {fault}" for fault in faults)
