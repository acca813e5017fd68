"""Results as text: one line each, one table, paired differences, and context curves."""

from collections.abc import Iterator, Sequence

import numpy as np

from cxda_jax.machine.progress import aligned
from cxda_jax.studies.curve_figures import RIVAL, context_tables, measure_curves
from cxda_jax.studies.formats import to_text
from cxda_jax.studies.result import Result, by_store, named
from cxda_jax.studies.statistics import paired_differences
from cxda_jax.training import metrics


def summary(result: Result) -> str:
    unfinished = f"  UNFINISHED: step {result.reached_step} of {result.steps}" * result.unfinished
    also = "".join(f"  ({name}: {scores['avg']:.1f}, {scores['w10']:.1f})" for name, scores in result.also.items())
    changed = f"  {corrections(result)}" * bool(result.compared)
    return (
        f"{result.label} seed {result.seed}  Avg {result.avg:.1f}  W10% {result.w10:.1f}{also}  "
        f"{result.task_ms:.1f} ms/task  weights {result.weights_hash[:12]}{changed}{unfinished}"
    )


def corrections(result: Result) -> str:
    """A line that says what adapting changed; "" where it was not compared."""
    changed = f"adapting corrected {result.corrected} and spoiled {result.spoiled}"
    return f"of {result.compared} queries, {changed}" if result.compared else ""


def unfinished(result: Result) -> str:
    reached = f"unfinished, at step {result.reached_step} of {result.steps}"
    return f"{result.store}, {result.label} seed {result.seed}: {reached}"


def table(results: Sequence[Result]) -> str:
    """Mean and standard error over seeds, a line per store, method and number of tasks.

    Unfinished seeds have lines of their own.
    """
    groups: dict[tuple, list[Result]] = {}
    footnotes = []
    for result in named(results):
        store = result.store + "*" * bool(result.data_marks)
        groups.setdefault((store, result.label + "†" * result.unfinished, result.num_tasks), []).append(result)
        if result.data_marks:
            marks = ", ".join(result.data_marks)
            footnotes.append(f"* {result.store}: {marks}; not comparable with results that lack this mark")
        if result.unfinished:
            footnotes.append(f"† {unfinished(result)}; in no mean with finished seeds")
    lines = []
    for (store, label, num_tasks), group in groups.items():
        scores = (metrics.mean_sem(np.array(scores)) for scores in ([r.avg for r in group], [r.w10 for r in group]))
        cells = ["{:.1f} +- {:.1f}".format(*score).replace(" +- nan", "") for score in scores]
        seeds = ",".join(str(r.seed) for r in group)
        times = [f"{np.median(ms):.1f}" for ms in ([r.adapt_ms for r in group], [r.predict_ms for r in group])]
        lines.append([store, label, seeds, str(num_tasks), *cells, *times])
    heads = ["benchmark", "method", "seeds", "tasks", "Avg", "W10%", "adapt ms", "predict ms"]
    return "\n".join([*aligned([heads, *lines], left=3), *dict.fromkeys(footnotes)])


def comparison(results: Sequence[Result], against: str) -> str:
    """Each label's paired difference to `against` on the same store. Unfinished seeds are left out."""
    lines, left_out, stores = [], [], by_store(results)
    for store, of_store in stores.items():
        left_out += [unfinished(r) for r in of_store if r.unfinished]
        found, _, faults = paired_differences([r for r in of_store if not r.unfinished], against)
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
        late = [r for r in of_store if r.unfinished]
        found, faults = measure_curves([r for r in of_store if not r.unfinished], against or RIVAL)
        for measured in found:
            yield from map(to_text, context_tables(measured, late))
        yield from (f"left out: {fault}" for fault in faults)
