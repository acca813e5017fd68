"""The paper's tables from results, beside the paper's own figures.

A cell holds the mean over training seeds and its standard error. Where the paper has a figure for the cell, the cell
says the difference and whether it lies within the combined standard error. Marks name what sets the two apart: data,
starting weights, protocol, number of seeds, hardware.
"""

import csv
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cxda_jax.config.reading import read
from cxda_jax.config.registry import METHODS
from cxda_jax.studies.identity import differences
from cxda_jax.studies.result import Result, by_store, unfinished_said
from cxda_jax.studies.settings import SHAPES, STEPS, USUAL, Setting, usual_number
from cxda_jax.studies.statistics import paired_differences
from cxda_jax.training import metrics

PAPER = Path(__file__).with_name("paper.csv")
PAPER_SEEDS = 3
BENCHMARKS = ("cifar_c", "femnist", "iwildcam", "tiny_imagenet_c")  # the paper's
AGAINST = ("paper", "paper_stand_ins")
# Other data, and the paper's benchmark that they replace.
STAND_INS = {"glyphs": "femnist", "unipen": "femnist", "glyphs_c": "cifar_c", "cifar10_c": "cifar_c"}
# Fields of a config that are not part of the protocol, or that have a mark of their own.
NO_PROTOCOL = ("benchmark", "data.", "evaluation.per_call", "evaluation.seed", "evaluation.test_tasks", "method",
               "net.weights", "seed", "train.log_every", "train.save_every", "train.source",
               "train.tensorboard")  # fmt: skip
NAN = float("nan")
_read = functools.cache(read)  # for the paper's protocols
# By a label without its setting, and the setting: the results of its seeds.
ByCell = Mapping[tuple[str, Setting], list[Result]]


class Column(NamedTuple):
    """The kind of the cells of a column. `metric` and `setting` are as in paper.csv."""

    title: str
    metric: str
    unit: str = "%"
    setting: Setting = USUAL
    higher: bool | None = True  # whether a higher mean is better; None: neither is


class Cell(NamedTuple):
    """A mean and its standard error, which is not a number for one seed; or a mean and its interval."""

    mean: float
    sem: float
    seeds: tuple[int, ...]
    runs: tuple[str, ...]
    paper: tuple[float, float] | None = None  # mean and standard error
    marks: tuple[str, ...] = ()  # what sets it apart from the paper's figure, or its seeds from each other
    interval: tuple[float, float] | None = None


class Table(NamedTuple):
    """Rows of a label and one cell for each column; None stands for an empty cell."""

    name: str
    benchmark: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]
    notes: tuple[str, ...] = ()


@functools.cache
def paper_figures() -> dict[tuple[str, ...], tuple[float, float]]:
    """The published means and standard errors, by table, benchmark, method, setting and metric."""
    with open(PAPER, newline="") as file:
        keys = ("table", "benchmark", "method", "setting", "metric")
        return {tuple(r[k] for k in keys): (float(r["mean"]), float(r["sem"])) for r in csv.DictReader(file)}


def build_tables(results: Sequence[Result], against: str = "", left_out: Sequence[Result] = ()) -> list[Table]:
    """All tables that have a row, store by store.

    One of AGAINST sets the paper's figures beside ours, as paper_name says. No mean holds the results `left_out`, whose
    trainings are unfinished; marks name them.
    """
    tables, late = [], by_store(left_out)
    for store, of_store in by_store(results).items():
        tables += _tables_of(store, by_cell(of_store), by_cell(late.get(store, [])), against)
    return [table for table in tables if table.rows]


def paper_name(results: Sequence[Result], against: str) -> str:
    """The paper's benchmark whose figures may stand beside these results of one store; "" where there is none.

    That is the benchmark of their data. Against paper_stand_ins it is also the one that other data replace.
    """
    benchmark = results[0].benchmark
    name = STAND_INS.get(benchmark, benchmark)
    is_papers = name == benchmark and not any(r.data_marks or r.smoke for r in results)
    return name if name in BENCHMARKS and against in (AGAINST if is_papers else AGAINST[1:]) else ""


def by_cell(results: Iterable[Result]) -> ByCell:
    """Results of one store by label and setting, seeds ascending. A number of fine-tuning steps stays in the label."""
    cells: dict[tuple[str, Setting], list[Result]] = {}
    for result in sorted(results, key=lambda r: r.seed):
        usual = result.setting.kind in ("", STEPS)
        key = (result.label, USUAL) if usual else (result.variant, result.setting)
        cells.setdefault(key, []).append(result)
    return dict(sorted(cells.items(), key=lambda item: _rank(item[0][0], item[1][0].identity.method)))


def _rank(label: str, method: str) -> tuple[int, str]:
    known = list(METHODS)
    return known.index(method) if method in known else len(known), label


def _tables_of(store: str, cells: ByCell, late: ByCell, against: str) -> Iterator[Table]:
    """Makes the tables of a store; `late` are unfinished seeds that no mean holds."""
    metric = next(iter(cells.values()))[0].metric
    name = metric.replace("macro_f1", "macro F1").replace("_", " ")
    usual = [label for label, setting in cells if setting == USUAL]
    scores = [Column("W10%", f"worst10_{metric}"), Column("Avg", f"mean_{metric}")]
    averaged = "W10% is the mean over the worst tenth of the tasks."

    def table(key: str, title: str, labels: Iterable[str], columns: Sequence[Column], *notes: str) -> Table:
        rows = ((label, tuple(_cell(key, label, c, cells, late, against) for c in columns)) for label in labels)
        return Table(key, store, f"{store}: {title}", tuple(columns), tuple(row for row in rows if any(row[1])), notes)

    yield table("main", f"{name} of all methods on unseen domains", usual, scores, averaged)
    if "cxda_supervised" in usual:
        labels = [m for m in ("cxda", "cxda_supervised") if m in usual]
        yield table("domain_supervision", f"{name} with and without domain labels in the buffer", labels, scores[1:])
    times = [
        Column("adapt and predict", "adapt_and_infer", "ms/task", higher=False),
        Column("adapt", "adapt", "ms/task", higher=False),
        Column("pre-train and test all", "pretrain_and_adapt", "minutes", higher=False),
    ]
    yield table("runtime", "time of one task alone, and of the whole", usual, times)
    for kind, what in SHAPES.items():
        varied = {label: None for label, setting in cells if setting.kind == kind}  # in order
        numbers = {setting.number for _, setting in cells if setting.kind == kind}
        numbers |= {usual_number(kind, seeds[0].config) for (_, setting), seeds in cells.items() if setting == USUAL}
        columns = [
            Column(f"{score.title} {number}", score.metric, setting=Setting(kind, number))
            for score in scores
            for number in sorted(numbers)
        ]
        note = "A task has as many queries as support images of one domain: compare within a column."
        fixed = ", ".join(dict.fromkeys(label for (label, s), rs in cells.items() if s.kind == kind and _fixed(rs[0])))
        notes = (note, f"Tasks of {fixed} have the usual number of queries.") if fixed else (note,)
        yield table(kind, f"{name} against the number of {what}", varied, columns, *notes, averaged)
    if "cxda_p2p" in usual:
        labels = [m for m in ("erm", "cxda", "cxda_p2p") if m in usual]
        yield table("patch_to_patch", f"{name} with attention between images and between patches", labels, scores)


def _fixed(result: Result) -> bool:
    """Whether its tasks have the usual number of queries, whatever their form."""
    its_runs = result.config.get("evaluation", {}).get("reshaped_queries")
    return "evaluation.reshaped_queries=fixed" in result.identity.changes or its_runs == "fixed"


def _cell(table: str, label: str, column: Column, cells: ByCell, late: ByCell, against: str) -> Cell | None:
    seeds, left_out = (_seeds(of, label, column.setting) for of in (cells, late))
    numbers = [_number(column.metric, r) for r in seeds]
    if None in numbers or not seeds:
        return None
    benchmark = paper_name(seeds, against)
    paper = paper_figures().get((table, benchmark, label, str(column.setting), column.metric))
    marks = (*own_marks(seeds, left_out), *(_unlike_paper(seeds, column, benchmark) if paper else ()))
    runs = tuple(str(r.folder) for r in seeds)
    return Cell(*metrics.mean_sem(np.array(numbers)), tuple(r.seed for r in seeds), runs, paper, marks)


def _seeds(cells: ByCell, label: str, setting: Setting) -> list[Result]:
    """The results of a label and setting; those of the usual tasks where these have the setting's number."""
    usual = cells.get((label, USUAL), []) if setting.kind in SHAPES else []
    return cells.get((label, setting)) or [r for r in usual if usual_number(setting.kind, r.config) == setting.number]


def _number(metric: str, result: Result) -> float | None:
    """What a column shows of one seed; None where it is not known."""
    if metric.startswith("worst10_"):
        return result.w10
    if metric.startswith("mean_"):
        return result.avg
    if metric == "adapt":
        return result.adapt_ms
    if metric == "adapt_and_infer":
        return result.answer_ms
    assert metric == "pretrain_and_adapt"
    minutes = result.num_tasks * result.task_ms / 6e4
    return None if result.train_minutes is None else result.train_minutes + minutes


def own_marks(seeds: Sequence[Result], left_out: Sequence[Result]) -> Iterator[str]:
    """Names what makes a mean over these seeds mean little, and what sets their data apart."""
    if said := unfinished_said([*seeds, *left_out], bool(left_out)):
        yield said
    if len({r.num_tasks for r in seeds}) > 1:
        yield "mixed: the seeds differ in their number of tasks"
    if len({r.version for r in seeds}) > 1:
        yield "mixed: the seeds differ in their method's version"
    unlike = [item for r in seeds for item in differences(seeds[0].config, r.config, "").items()]
    fields = {name for name, values in unlike if None not in values and not name.startswith(NO_PROTOCOL)}
    if fields:
        yield f"mixed: the seeds differ in {', '.join(sorted(fields))}"
    marked = [r.data_marks for r in seeds if r.data_marks]
    if marked:
        some = f" ({len(marked)} of {len(seeds)} seeds)" if len(marked) < len(seeds) else ""
        yield f"data: {', '.join(dict.fromkeys(itertools.chain(*marked)))}{some}"


def _unlike_paper(seeds: Sequence[Result], column: Column, benchmark: str) -> Iterator[str]:
    """Names each thing that sets a cell apart from the paper's figure."""
    first, protocol = seeds[0], _read(f"{benchmark}:cxda")
    if first.benchmark != benchmark:
        yield f"data: {first.store}, this package's stand-in for {benchmark}"
    if protocol["net"]["name"] == "resnet50" and (first.started_from or "random") == "random":
        yield "weights: from a random start; the paper's from ImageNet"
    skipped = NO_PROTOCOL + (("episode.",) if column.setting.kind in SHAPES else ())
    skipped += ("net.stages",) if protocol["net"]["name"] == "cnn" else ()  # of the other network
    unlike = [
        f"{field} {ours} for {theirs}"
        for field, (ours, theirs) in differences(first.config, protocol, "").items()
        if not field.startswith(skipped) and ours is not None and theirs is not None
    ]
    if first.num_tasks != protocol["evaluation"]["test_tasks"]:
        unlike.append(f"test tasks {first.num_tasks} for {protocol['evaluation']['test_tasks']}")
    if unlike:
        yield f"protocol: {', '.join(unlike)}"
    if len(seeds) != PAPER_SEEDS:
        yield f"seeds: {len(seeds)} for {PAPER_SEEDS}"
    if column.unit != "%":
        yield f"hardware: {first.device}; the paper does not name its own"


def agreement(cell: Cell) -> str:
    """Whether ours and the paper's lie within their combined standard error, if they are of the same data."""
    if cell.paper is None:
        return ""
    if any(mark.startswith("data: ") for mark in cell.marks):
        return "other data"
    if math.isnan(cell.sem):
        return "one seed"
    within = abs(cell.mean - cell.paper[0]) <= math.hypot(cell.sem, cell.paper[1]) + 1e-9  # rounding
    return "within s.e." if within else "outside s.e."


def paired_table(results: Sequence[Result]) -> tuple[Table | None, list[str]]:
    """Differences of Avg between each two methods of one store, and what had to be left out.

    The methods were tested on the same usual tasks. The 95 % bootstrap intervals are over these tasks.
    """
    usual = [result for seeds in by_cell(r for r in results if r.setting == USUAL).values() for result in seeds]
    found, tasks, faults = paired_differences(usual)
    if not found:
        return None, faults
    cells = {}
    for pair, d in found.items():
        pooled = {label: [r for r in usual if r.label == label and r.seed in d.seeds] for label in pair}
        marks = tuple(f"{label}: {said}" for label, of in pooled.items() if (said := unfinished_said(of)))
        cells[pair] = Cell(d.avg.mean, NAN, d.seeds, (), marks=marks, interval=(d.avg.low, d.avg.high))
    compared = {label for pair in cells for label in pair}
    labels = [label for label in dict.fromkeys(r.label for r in usual) if label in compared]
    columns = tuple(Column(f"- {b}", f"mean_minus_{b}", "points", higher=None) for b in labels)
    rows = tuple((a, tuple(cells.get((a, b)) for b in labels)) for a in labels)
    note = (
        f"The row's Avg minus the column's, in points, over {tasks} shared tasks and the seeds both have; bold where "
        "the 95 % bootstrap interval over the tasks leaves out 0. It speaks of other tasks, not of other training "
        "seeds."
    )
    store = usual[0].store
    return Table("paired", store, f"{store}: paired differences", columns, rows, (note,)), faults
