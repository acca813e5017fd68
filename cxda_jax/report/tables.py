"""The paper's tables from results, beside the paper's own figures.

A cell holds the mean over training seeds and its standard error. Where the paper has a figure for the cell, the cell says
the difference and whether it lies within the combined standard error. Marks name what sets the two apart: data, starting
weights, protocol, number of seeds, hardware.
"""

import csv
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cxda_jax import metrics
from cxda_jax.study.comparing import paired_differences
from cxda_jax.study.results import Result, by_store, is_unfinished, unfinished_said
from cxda_jax.study.settings import SHAPES, USUAL, Setting, usual_number

PAPER = Path(__file__).with_name("paper.csv")
PAPER_SEEDS = 3
BENCHMARKS = ("cifar_c", "femnist", "iwildcam", "tiny_imagenet_c")  # the paper's
STAND_INS = {"glyphs": "femnist", "glyphs_c": "cifar_c"}  # built-in data, and the paper's benchmark that they replace
ORDER = ("erm", "erm_iid", "cml", "bn", "cxda", "cxda_loo", "cxda_p2p", "cxda_supervised", "ft_em", "ft_im", "sf_ocda",
         "cotta", "sla")  # fmt: skip
# Fields of a config that are not part of the protocol, or that have a mark of their own.
NO_PROTOCOL = ("benchmark", "data.", "evaluation.per_call", "evaluation.seed", "evaluation.test_tasks", "method",
               "net.weights", "seed", "train.log_every", "train.save_every", "train.source",
               "train.tensorboard")  # fmt: skip
NAN = float("nan")
Configs = Mapping[str, Mapping[str, Any]]  # by benchmark
ByCell = Mapping[
    tuple[str, Setting], list[Result]
]  # a label without its setting, and the setting: the results of its seeds


class Column(NamedTuple):
    """What the cells of a column hold. `metric` and `setting` are as in paper.csv."""

    title: str
    metric: str
    unit: str = "%"
    setting: Setting = USUAL
    above: str = ""  # a title over several columns
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
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...] = ()
    notes: tuple[str, ...] = ()


@functools.cache
def paper_figures() -> dict[tuple[str, ...], tuple[float, float]]:
    """(table, benchmark, method, setting, metric) -> mean and standard error, as published."""
    with open(PAPER, newline="") as file:
        keys = ("table", "benchmark", "method", "setting", "metric")
        return {tuple(r[k] for k in keys): (float(r["mean"]), float(r["sem"])) for r in csv.DictReader(file)}


def build_tables(
    results: Sequence[Result],
    protocols: Configs | None = None,
    stand_ins: bool = False,
    left_out: Sequence[Result] = (),
) -> list[Table]:
    """All tables that have a row, store by store.

    Args:
      results: what the means are over.
      protocols: the configs of the paper's benchmarks. With them the paper's figures stand beside results on the paper's data.
      stand_ins: whether the paper's figures stand beside results on data that replace the paper's too.
      left_out: results of unfinished trainings, which no mean holds. Marks name them.
    """
    tables, late = [], by_store(left_out)
    for store, of_store in by_store(results).items():
        cells, late_cells = by_cell(of_store), by_cell(late.get(store, []))
        for table, labels in _empty_tables(store, cells):
            filled = _fill(table, labels, cells, late_cells, protocols or {}, stand_ins)
            tables += [filled] if filled.rows else []
    return tables


def paper_name(results: Sequence[Result], stand_ins: bool = False) -> str:
    """The paper's benchmark whose figures may stand beside these results of one store; "" where there is none.

    That is the benchmark of their data. With `stand_ins` it is also the one that other data replace.
    """
    benchmark = results[0].row["benchmark"]
    name = STAND_INS.get(benchmark, benchmark)
    is_papers = name == benchmark and not any(r.row.get("data_marks") or r.row.get("smoke") for r in results)
    return name if name in BENCHMARKS and (is_papers or stand_ins) else ""


def by_cell(results: Iterable[Result]) -> ByCell:
    """Results of one store by label and setting, seeds ascending. A number of fine-tuning steps stays in the label."""
    cells: dict[tuple[str, Setting], list[Result]] = {}
    for result in sorted(results, key=lambda r: r.row["seed"]):
        reshaped = result.setting.kind in SHAPES
        key = (result.label, result.setting) if reshaped else (result.row["label"], USUAL)
        cells.setdefault(key, []).append(result)
    return dict(sorted(cells.items(), key=lambda item: _rank(item[0][0])))


def _rank(label: str) -> tuple[int, str]:
    method = label.partition(",")[0]
    return ORDER.index(method) if method in ORDER else len(ORDER), label


def _empty_tables(store: str, cells: ByCell) -> Iterator[tuple[Table, Iterable[str]]]:
    """The tables of a store without their rows, and the labels of these."""
    metric = next(iter(cells.values()))[0].row["metric"]
    name = metric.replace("macro_f1", "macro F1")
    usual = [label for label, setting in cells if setting == USUAL]
    scores = [Column("W10%", f"worst10_{metric}"), Column("Avg", f"mean_{metric}")]
    averaged = "W10% is the mean over the worst tenth of the tasks."

    def table(key: str, title: str, columns: Iterable[Column], *notes: str) -> Table:
        return Table(key, store, f"{store}: {title}", tuple(columns), notes=notes)

    yield table("main", f"{name} of all methods on unseen domains", scores, averaged), usual
    if "cxda_supervised" in usual:
        title = f"{name} with and without domain labels in the buffer"
        yield table("domain_supervision", title, scores[1:]), [m for m in ("cxda", "cxda_supervised") if m in usual]
    times = [
        Column("adapt and predict", "adapt_and_infer", "ms/task", higher=False),
        Column("adapt", "adapt", "ms/task", higher=False),
        Column("pre-train and test all", "pretrain_and_adapt", "minutes", higher=False),
    ]
    yield table("runtime", "time of one task alone, and of the whole", times), usual
    for kind, what in SHAPES.items():
        numbers = {setting.number for _, setting in cells if setting.kind == kind}
        if numbers:
            numbers |= {usual_number(kind, seeds[0].config) for (_, s), seeds in cells.items() if s == USUAL}
        columns = [
            Column(str(number), score.metric, setting=Setting(kind, number), above=score.title)
            for score in scores
            for number in sorted(numbers)
        ]
        note = "A task has as many queries as support images of one domain: compare within a column."
        labels = dict.fromkeys(label for label, setting in cells if setting.kind == kind)
        yield table(kind, f"{name} against the number of {what}", columns, note, averaged), labels
    if "cxda_p2p" in usual:
        title = f"{name} with attention between images and between patches"
        yield table("patch_to_patch", title, scores), [m for m in ("erm", "cxda", "cxda_p2p") if m in usual]


def _fill(
    table: Table, labels: Iterable[str], cells: ByCell, late: ByCell, protocols: Configs, stand_ins: bool
) -> Table:
    """The table with the rows of these labels that hold anything; `late` are unfinished seeds that no mean holds."""

    def cell(label: str, column: Column) -> Cell | None:
        seeds = _seeds(cells, label, column.setting)
        numbers = [_number(column.metric, r) for r in seeds]
        if None in numbers or not seeds:
            return None
        benchmark = paper_name(seeds, stand_ins) if protocols else ""
        paper = paper_figures().get((table.name, benchmark, label, str(column.setting), column.metric))
        marks = _unfinished(seeds, _seeds(late, label, column.setting)) + _unlike_each_other(seeds) + _data_marks(seeds)
        if paper:
            marks += _unlike_paper(seeds, column, table.benchmark, benchmark, protocols[benchmark])
        runs = tuple(str(r.folder) for r in seeds)
        return Cell(*metrics.mean_sem(np.array(numbers)), tuple(r.row["seed"] for r in seeds), runs, paper, marks)

    rows = [(label, tuple(cell(label, column) for column in table.columns)) for label in labels]
    return table._replace(rows=tuple(row for row in rows if any(row[1])))


def _seeds(cells: ByCell, label: str, setting: Setting) -> list[Result]:
    """The results of a label and setting; those of the usual tasks where these have the setting's number."""
    usual = cells.get((label, USUAL), []) if setting.kind in SHAPES else []
    return cells.get((label, setting)) or [r for r in usual if usual_number(setting.kind, r.config) == setting.number]


def _number(metric: str, result: Result) -> float | None:
    row = result.row
    if metric.startswith("worst10_"):
        return row["w10"]
    if metric.startswith("mean_"):
        return row["avg"]
    if metric == "pretrain_and_adapt":
        return None if row["train_minutes"] is None else row["train_minutes"] + row["num_tasks"] * row["task_ms"] / 6e4
    return row["adapt_ms"] + (row["predict_ms"] if metric == "adapt_and_infer" else 0.0)


def _unlike_each_other(seeds: Sequence[Result]) -> tuple[str, ...]:
    """Marks of what makes a mean over these seeds mean little."""
    marks = []
    for what, field in {"number of tasks": "num_tasks", "method's version": "version"}.items():
        if len({r.row[field] for r in seeds}) > 1:
            marks.append(f"mixed: the seeds differ in their {what}")
    configs = [{k: v for k, v in _flat(r.config) if not k.startswith(NO_PROTOCOL)} for r in seeds]
    fields = sorted({k for c in configs for k in c if c[k] != configs[0].get(k)})
    return (*marks, f"mixed: the seeds differ in {', '.join(fields)}") if fields else tuple(marks)


def _unfinished(seeds: Sequence[Result], left_out: Sequence[Result]) -> tuple[str, ...]:
    said = unfinished_said([r.row for r in (*seeds, *left_out)], bool(left_out))
    return (said,) if said else ()


def _data_marks(seeds: Sequence[Result]) -> tuple[str, ...]:
    marked = [r for r in seeds if r.row.get("data_marks")]
    some = f" ({len(marked)} of {len(seeds)} seeds)" if len(marked) < len(seeds) else ""
    said = dict.fromkeys(mark for r in marked for mark in r.row["data_marks"])
    return (f"data: {', '.join(said)}{some}",) if said else ()


def _unlike_paper(
    seeds: Sequence[Result], column: Column, store: str, benchmark: str, protocol: Mapping[str, Any]
) -> tuple[str, ...]:
    """A mark for each thing that sets a cell apart from the paper's figure."""
    row, config, marks = seeds[0].row, seeds[0].config, []
    if row["benchmark"] != benchmark:
        marks.append(f"data: {store}, this package's stand-in for {benchmark}")
    if protocol["net"]["name"] == "resnet50" and row.get("started_from", "random") == "random":
        marks.append("weights: from a random start; the paper's from ImageNet")
    ours, kind = dict(_flat(config)), column.setting.kind
    skipped = NO_PROTOCOL + (("episode.",) if kind in SHAPES else ())
    skipped += ("net.stages",) if protocol["net"]["name"] == "cnn" else ()  # of the other network
    unlike = [
        f"{field} {ours[field]} for {value}"
        for field, value in _flat(protocol)
        if not field.startswith(skipped) and field in ours and ours[field] != value
    ]
    if row["num_tasks"] != protocol["evaluation"]["test_tasks"]:
        unlike.append(f"test tasks {row['num_tasks']} for {protocol['evaluation']['test_tasks']}")
    if unlike:
        marks.append(f"protocol: {', '.join(unlike)}")
    if len(seeds) != PAPER_SEEDS:
        marks.append(f"seeds: {len(seeds)} for {PAPER_SEEDS}")
    if column.unit != "%":
        marks.append(f"hardware: {row['device']}; the paper does not name its own")
    return tuple(marks)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names of fields, and their values as JSON gives them back."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, list(value) if isinstance(value, tuple) else value


def agreement(cell: Cell) -> str:
    """Whether ours and the paper's lie within their combined standard error; '' where that cannot be said."""
    if cell.paper is None:
        return ""
    if math.isnan(cell.sem):
        return "one seed"
    within = abs(cell.mean - cell.paper[0]) <= math.hypot(cell.sem, cell.paper[1]) + 1e-9  # rounding
    return "within s.e." if within else "outside s.e."


def paired_table(results: Sequence[Result]) -> tuple[Table | None, list[str]]:
    """Differences of Avg between each two methods of one store, and what had to be left out.

    The methods were tested on the same usual tasks. The 95 % bootstrap intervals are over these tasks.
    """
    usual = [result for seeds in by_cell(r for r in results if r.setting == USUAL).values() for result in seeds]
    differences, tasks, faults = paired_differences(usual)
    if not differences:
        return None, faults
    late = {
        (r.row["label"], r.row["seed"]): f"{r.row['label']}, seed {r.row['seed']} is unfinished: "
        f"step {r.row['reached_step']} of {r.row['steps']}"
        for r in usual if is_unfinished(r.row)
    }  # fmt: skip
    cells = {}
    for pair, (mean, low, high, seeds) in differences.items():
        marks = tuple(late[label, seed] for label in pair for seed in seeds if (label, seed) in late)
        cells[pair] = Cell(mean, NAN, seeds, (), marks=marks, interval=(low, high))
    compared = {label for pair in cells for label in pair}
    labels = [label for label in dict.fromkeys(r.row["label"] for r in usual) if label in compared]
    columns = tuple(Column(f"- {b}", f"mean_minus_{b}", "points", higher=None) for b in labels)
    rows = tuple((a, tuple(cells.get((a, b)) for b in labels)) for a in labels)
    notes = (
        f"The row's Avg minus the column's, in points, over {tasks} shared tasks and the seeds both have; bold where the "
        "95 % bootstrap interval over the tasks leaves out 0. It speaks of other tasks, not of other training seeds.",
    )
    store = usual[0].store
    return Table("paired", store, f"{store}: paired differences", columns, rows, notes), faults
