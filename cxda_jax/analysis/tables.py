"""The paper's tables from results, beside the paper's own figures.

A cell holds the mean over training seeds and its standard error. Where the paper has a figure for it, the cell says the
difference, whether that lies within the combined standard error, and all that sets the two apart: data, starting weights,
protocol, number of seeds, hardware. What the paper has no figure for stands alone.
"""

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cxda_jax import metrics
from cxda_jax.analysis.results import Result, by_store, is_unfinished, unfinished_said

PAPER = Path(__file__).with_name("paper.csv")
PAPER_SEEDS = 3
BENCHMARKS = ("cifar_c", "femnist", "iwildcam", "tiny_imagenet_c")  # the paper's
STAND_INS = {"glyphs": "femnist", "glyphs_c": "cifar_c"}  # embedded benchmarks, and those of the paper in their place
ORDER = ("erm", "erm_iid", "cml", "bn", "cxda", "cxda_loo", "cxda_p2p", "cxda_supervised", "ft_em", "ft_im", "sf_ocda",
         "cotta", "sla")  # fmt: skip
VARIED = {"num_domains": "support domains", "support_size": "support images"}
# What may differ from the paper's config and is no difference of protocol, or has a mark of its own.
NO_PROTOCOL = ("benchmark", "data.", "evaluation.per_call", "evaluation.seed", "evaluation.test_tasks", "method",
               "net.weights", "seed", "train.log_every", "train.save_every", "train.source",
               "train.tensorboard")  # fmt: skip
NAN = float("nan")

Group = dict[tuple[str, str], list[Result]]  # (label without its setting, setting) -> the results of its seeds


class Column(NamedTuple):
    """What the cells below hold. `metric` and `setting` are as in the paper's file."""

    title: str
    metric: str
    unit: str = "%"
    setting: str = ""
    above: str = ""  # a title over several columns
    higher: bool | None = True  # is better; None: no order


class Cell(NamedTuple):
    """Mean and standard error (not a number for one seed), or a mean and its interval."""

    mean: float
    sem: float
    seeds: tuple[int, ...]
    runs: tuple[str, ...]
    paper: tuple[float, float] | None = None
    marks: tuple[str, ...] = ()  # what sets it apart from the paper's figure, or seeds from each other
    interval: tuple[float, float] | None = None


class Table(NamedTuple):
    """Rows of a label and a cell for each column; None where there is nothing."""

    name: str
    benchmark: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]
    notes: tuple[str, ...] = ()


def paper_figures() -> dict[tuple[str, str, str, str, str], tuple[float, float]]:
    """(table, benchmark, method, setting, metric) -> mean and standard error, as published."""
    with open(PAPER, newline="") as file:
        keys = ("table", "benchmark", "method", "setting", "metric")
        return {tuple(r[k] for k in keys): (float(r["mean"]), float(r["sem"])) for r in csv.DictReader(file)}  # type: ignore[misc]


def build_tables(
    results: Sequence[Result], protocol: Mapping[str, Mapping[str, Any]] | None = None, stand_ins: bool = False,
    left_out: Sequence[Result] = (),
) -> list[Table]:  # fmt: skip
    """All tables of which the results hold a row, by store.

    With `protocol`, the configs of the paper's benchmarks by name, each cell is compared with the paper's where its data are
    the paper's, or with `stand_ins` stand in for them. `left_out` are seeds that no mean holds, and that its cell names.
    """
    tables, others = [], by_store(left_out)
    for store, found in by_store(results).items():
        groups = by_cell(found), by_cell(others.get(store, []))
        tables += [t for t in _tables(store, *groups, protocol or {}, stand_ins) if t.rows]
    return tables


def paper_name(found: Sequence[Result], stand_ins: bool = False) -> str:
    """The paper's benchmark whose figures may stand beside these results: that of their data, or with `stand_ins` the one
    that other data stand in for; '' where there is none."""
    benchmark = found[0].row["benchmark"]
    name = STAND_INS.get(benchmark, benchmark)
    own = name == benchmark and not any(r.row.get("data_marks") or r.row.get("smoke") for r in found)
    return name if name in BENCHMARKS and (own or stand_ins) else ""


def by_cell(results: Iterable[Result]) -> Group:
    """Results of one benchmark by label and setting, seeds ascending. One step of fine-tuning is a label of its own."""
    group: Group = {}
    for result in sorted(results, key=lambda r: r.row["seed"]):
        label, setting = result.row.get("label") or result.row["method"], result.row.get("setting", "")
        if setting.partition("=")[0] in VARIED:
            key = ",".join(part for part in label.split(",") if part != setting), setting
        else:
            key = label, ""
        group.setdefault(key, []).append(result)
    return dict(sorted(group.items(), key=lambda item: _rank(item[0][0])))


def _rank(label: str) -> tuple[int, str]:
    method = label.partition(",")[0]
    return ORDER.index(method) if method in ORDER else len(ORDER), label


def _tables(
    store: str, group: Group, left_out: Group, protocol: Mapping[str, Mapping[str, Any]], stand_ins: bool
) -> Iterator[Table]:
    figures = paper_figures() if protocol else {}
    metric = next(iter(group.values()))[0].row["metric"]
    usual = [label for label, setting in group if not setting]
    w10, avg = f"worst10_{metric}", f"mean_{metric}"
    titles = {w10: "W10%", avg: "Avg"}
    name = metric.replace("macro_f1", "macro F1")

    def table(key: str, title: str, columns: Sequence[Column], labels: Iterable[str], *notes: str) -> Table:
        def cell(label: str, column: Column) -> Cell | None:
            found = group.get((label, column.setting)) or _usual(group, label, column.setting)
            numbers = [_number(column.metric, r) for r in found]
            if None in numbers or not found:
                return None
            others = left_out.get((label, column.setting)) or _usual(left_out, label, column.setting)
            benchmark = paper_name(found, stand_ins)
            paper = figures.get((key, benchmark, label, column.setting, column.metric))
            marks = _unfinished(found, others) + _unlike_each_other(found) + _data_marks(found)
            if paper:
                marks += _unlike_paper(found, column, store, benchmark, protocol[benchmark])
            seeds, runs = zip(*((r.row["seed"], str(r.folder)) for r in found), strict=True)
            return Cell(*metrics.mean_sem(np.array(numbers)), seeds, runs, paper, marks)

        rows = [(label, tuple(cell(label, column) for column in columns)) for label in labels]
        kept = tuple(row for row in rows if any(row[1]))
        return Table(key, store, f"{store}: {title}", tuple(columns), kept, notes)

    averaged = "W10% is the mean over the worst tenth of the tasks."
    score = [Column(title, metric) for metric, title in titles.items()]
    yield table("main", f"{name} of all methods on unseen domains", score, usual, averaged)
    if "cxda_supervised" in usual:
        wanted = [label for label in ("cxda", "cxda_supervised") if label in usual]
        yield table("domain_supervision", f"{name} with and without domain labels in the buffer", score[1:], wanted)
    times = [
        Column("adapt and predict", "adapt_and_infer", "ms/task", higher=False),
        Column("adapt", "adapt", "ms/task", higher=False),
        Column("pre-train and test all", "pretrain_and_adapt", "minutes", higher=False),
    ]
    yield table("runtime", "time of one task alone, and of the whole", times, usual)
    for kind, what in VARIED.items():
        numbers = sorted({int(s.partition("=")[2]) for _, s in group if s.startswith(f"{kind}=")})
        if numbers:
            numbers = sorted({*numbers, *(_usual_number(kind, found[0]) for (_, s), found in group.items() if not s)})
        columns = [
            Column(str(n), metric, setting=f"{kind}={n}", above=title)
            for metric, title in titles.items()
            for n in numbers
        ]
        labels = dict.fromkeys(label for label, setting in group if setting.startswith(f"{kind}="))
        note = "A task has as many queries as support images of one domain: compare within a column."
        yield table(kind, f"{name} against the number of {what}", columns, labels, note, averaged)
    if "cxda_p2p" in usual:
        wanted = [label for label in ("erm", "cxda", "cxda_p2p") if label in usual]
        yield table("patch_to_patch", f"{name} with attention between images and between patches", score, wanted)


def _usual(group: Group, label: str, setting: str) -> list[Result]:
    """The usual tasks, where they are what the setting asks for."""
    kind, _, number = setting.partition("=")
    return [r for r in group.get((label, ""), []) if kind in VARIED and _usual_number(kind, r) == int(number)]


def _usual_number(kind: str, result: Result) -> int:
    episode = result.config["episode"]
    return episode["num_domains"] * (episode["per_domain"] if kind == "support_size" else 1)


def _number(metric: str, result: Result) -> float | None:
    row = result.row
    if metric.startswith("worst10_"):
        return row["w10"]
    if metric.startswith("mean_"):
        return row["avg"]
    if metric == "pretrain_and_adapt":
        return None if row["train_minutes"] is None else row["train_minutes"] + row["num_tasks"] * row["task_ms"] / 6e4
    return row["adapt_ms"] + (row["predict_ms"] if metric == "adapt_and_infer" else 0.0)


def _unlike_each_other(found: list[Result]) -> tuple[str, ...]:
    """Seeds whose mean means little."""
    marks = []
    for what, field in {"number of tasks": "num_tasks", "method's version": "version"}.items():
        if len({r.row.get(field) for r in found}) > 1:
            marks.append(f"mixed: the seeds differ in their {what}")
    configs = [{k: v for k, v in _flat(r.config) if not k.startswith(NO_PROTOCOL)} for r in found]
    fields = sorted({k for c in configs for k in c if c[k] != configs[0].get(k)})
    return (*marks, f"mixed: the seeds differ in {', '.join(fields)}") if fields else tuple(marks)


def _unfinished(found: Sequence[Result], left_out: Sequence[Result]) -> tuple[str, ...]:
    said = unfinished_said([r.row for r in (*found, *left_out)], bool(left_out))
    return (said,) if said else ()


def _data_marks(found: list[Result]) -> tuple[str, ...]:
    marked = [r for r in found if r.row.get("data_marks")]
    some = f" ({len(marked)} of {len(found)} seeds)" if len(marked) < len(found) else ""
    said = dict.fromkeys(mark for r in marked for mark in r.row["data_marks"])
    return (f"data: {', '.join(said)}{some}",) if said else ()


def _unlike_paper(
    found: list[Result], column: Column, store: str, benchmark: str, protocol: Mapping[str, Any]
) -> tuple[str, ...]:
    """Each thing that sets a cell apart from the paper's figure, as a sentence."""
    row, config, marks = found[0].row, found[0].config, []
    if row["benchmark"] != benchmark:
        marks.append(f"data: {store}, this package's stand-in for {benchmark}")
    if protocol["net"]["name"] == "resnet50" and row.get("started_from", "random") == "random":
        marks.append("weights: from a random start; the paper's from ImageNet")
    ours, kind = dict(_flat(config)), column.setting.partition("=")[0]
    skipped = NO_PROTOCOL + (("episode.",) if kind in VARIED else ())
    skipped += ("net.stages",) if protocol["net"]["name"] == "cnn" else ()  # of the other network
    unlike = [
        f"{field} {ours[field]} for {value}"
        for field, value in _flat(protocol)
        if not field.startswith(skipped) and field in ours and ours[field] != _plain(value)
    ]
    if row["num_tasks"] != protocol["evaluation"]["test_tasks"]:
        unlike.append(f"test tasks {row['num_tasks']} for {protocol['evaluation']['test_tasks']}")
    if unlike:
        marks.append(f"protocol: {', '.join(unlike)}")
    if len(found) != PAPER_SEEDS:
        marks.append(f"seeds: {len(found)} for {PAPER_SEEDS}")
    if column.unit != "%":
        marks.append(f"hardware: {row['device']}; the paper does not name its own")
    return tuple(marks)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def agreement(cell: Cell) -> str:
    """Whether ours and the paper's lie within their combined standard error; '' where that cannot be said."""
    if cell.paper is None:
        return ""
    if math.isnan(cell.sem):
        return "one seed"
    within = abs(cell.mean - cell.paper[0]) <= math.hypot(cell.sem, cell.paper[1]) + 1e-9  # rounding
    return "within s.e." if within else "outside s.e."


def paired_table(results: Sequence[Result], store: str) -> tuple[Table | None, list[str]]:
    """Differences of Avg between each two methods that were tested on the same usual tasks of a store, with 95 % bootstrap
    intervals over those tasks; and what had to be left out."""
    group = by_cell(r for r in by_store(results).get(store, []) if not r.row.get("setting"))
    scores: dict[str, dict[int, np.ndarray]] = {}
    marks: dict[str, dict[int, str]] = {}
    tasks, faults = None, []
    for (label, _), found in group.items():
        for r in found:
            stored = r.stored()
            theirs = stored["labels"].shape, stored["support"].tobytes(), stored["query"].tobytes()
            tasks = tasks or theirs
            if theirs != tasks:
                faults.append(f"{r.folder}: not in the paired differences, since its tasks are not those of the others")
                continue
            scores.setdefault(label, {})[r.row["seed"]] = metrics.scores(
                r.row["metric"], stored["predictions"], stored["labels"]
            )
            if is_unfinished(r.row):
                at = f"step {r.row['reached_step']} of {r.row['steps']}"
                marks.setdefault(label, {})[r.row["seed"]] = f"{label}, seed {r.row['seed']} is unfinished: {at}"
    pairs = {(a, b): sorted(scores[a].keys() & scores[b].keys()) for a in scores for b in scores if a != b}
    pairs = {pair: seeds for pair, seeds in pairs.items() if seeds}
    if not pairs:
        return None, faults
    differences = np.stack(
        [np.mean([scores[a][s] - scores[b][s] for s in seeds], axis=0) for (a, b), seeds in pairs.items()]
    )
    means, (lows, highs) = 100 * differences.mean(1), 100 * metrics.bootstrap_interval(differences)
    cells = {
        pair: Cell(mean, NAN, tuple(seeds), (), None, _of_pair(marks, pair, seeds), (low, high))
        for (pair, seeds), mean, low, high in zip(pairs.items(), means, lows, highs, strict=True)
    }
    columns = tuple(Column(f"- {b}", f"mean_minus_{b}", "points", higher=None) for b in scores)
    rows = tuple((a, tuple(cells.get((a, b)) for b in scores)) for a in scores)
    count = differences.shape[1]
    notes = (
        f"The row's Avg minus the column's, in points, over {count} shared tasks and the seeds both have; bold where the "
        "95 % bootstrap interval over the tasks leaves out 0. It speaks of other tasks, not of other training seeds.",
    )
    return Table("paired", store, f"{store}: paired differences", columns, rows, notes), faults


def _of_pair(marks: Mapping[str, Mapping[int, str]], pair: Iterable[str], seeds: Iterable[int]) -> tuple[str, ...]:
    return tuple(marks[label][seed] for label in pair for seed in seeds if seed in marks.get(label, {}))
