"""Results as text: one line each, one table, paired differences, and context curves."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cxda_jax import metrics
from cxda_jax.results.curves import AREA, ORDERS, SCORES, Curve, differences, find_curves, sizes_of
from cxda_jax.results.formats import aligned
from cxda_jax.results.result import Result, by_store, is_unfinished, named
from cxda_jax.results.settings import Setting
from cxda_jax.results.statistics import Difference, Span, paired_differences, shared_scores


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
        lines += [f"{on}{label} - {against}  {said(d.avg)}  {seeds_of(d)}" for (label, _), d in found.items()]
        left_out += faults
    title = "paired differences, 95 % bootstrap interval over the shared tasks:"
    return "\n".join([title, *lines, *(f"left out: {fault}" for fault in left_out)])


def said(span: Span) -> str:
    return "{:+.2f}  [{:+.2f}, {:+.2f}]".format(*span)


def seeds_of(difference: Difference) -> str:
    return f"seeds {','.join(map(str, difference.seeds))}"


def context_curves(results: Sequence[Result], against: str | None = None) -> Iterator[str]:
    """The curves of each store: a table, and the paired differences to the curve `against`, if there is one.

    Unfinished seeds are left out.
    """
    for store, of_store in by_store(results).items():
        finished = [r for r in of_store if not is_unfinished(r.row)]
        for kind, order in ORDERS.items():
            curves = find_curves(finished, kind)
            if not curves:
                continue
            late = [unfinished(r) for r in of_store if is_unfinished(r.row) and r.setting.kind == kind]
            yield "\n".join([f"{store}: Avg/W10% against the number of support images, {order}", *_curve_table(curves)])
            if against in (by_label := {curve.label: curve for curve in curves}):
                scores, faults = shared_scores([result for curve in curves for result in curve.results()])
                title = (
                    f"{store}: paired differences to {against} in the same context, "
                    "95 % bootstrap intervals over the tasks:"
                )
                alike = {c.label for c in curves if c.constant} if by_label[against].constant else ()
                lines = [
                    f"{label},{Setting(kind, n) if n != AREA else 'area'} - {against}  {_both(d)}  {seeds_of(d)}"
                    for (label, n), d in differences(curves, scores, against).items()
                    if label not in alike or n == 0  # the others would say the same
                ]
                yield "\n".join([title, *lines, *(f"left out: {fault}" for fault in (*late, *faults))])


def _curve_table(curves: Sequence[Curve]) -> list[str]:
    """A line for each curve, and a column for each size."""
    sizes = (*sizes_of(curves), AREA)
    rows = [["method", *(str(size) if size != AREA else "area" for size in sizes)]]
    for curve in curves:
        levels = [[curve.level(size, score).values() for score in SCORES] for size in sizes]
        cells = ["/".join(f"{np.mean(list(seeds)):.1f}" for seeds in scores if seeds) for scores in levels]
        rows.append([curve.label, *(cell or "-" for cell in cells)])
    return aligned(rows)


def _both(difference: Difference) -> str:
    return "  ".join(f"{title} {said(getattr(difference, score))}" for score, title in SCORES.items())
