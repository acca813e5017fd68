"""Makes tables, figures and a page to look around in from what evaluations left on disk; no device is needed.

python -m launch.report --runs='runs/glyphs/*/*' --report=runs/glyphs/report
python -m launch.report --runs='runs/study/glyphs/*/*' --report=docs/study --against=paper

Writes into the folder of --report:

    report.html     one file: all of the below, each run, and an explorer of what queries attend to; opens in any browser
    tables.md .tex .csv
    figures/        .png and .svg

--against=paper sets the paper's figure beside each of ours, with the difference, whether it lies within the combined
standard error, and what sets the two apart. Runs that cannot be read are named, and the rest is reported.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from cxda_jax.analysis import formats, plots
from cxda_jax.analysis.report import Attended, Figure, Query, Report, Support, write_report
from cxda_jax.analysis.results import Result, distinct, read_results
from cxda_jax.analysis.tables import STAND_INS, Table, build_tables, by_cell, paired_table
from cxda_jax.data.store import DomainStore
from cxda_jax.experiment import READERS, open_data
from cxda_jax.types import UserError, printable
from launch import cli
from launch.evaluate import AGAINST, RUNS
from launch.runs import find_runs

flags.adopt_module_key_flags(cli)
flags.declare_key_flag(RUNS.name)
flags.declare_key_flag(AGAINST.name)
_REPORT = flags.DEFINE_string("report", None, "The folder to write.")

EXPLORED = (6, 2)  # tasks in the explorer: of the first method that attends, and of each other


class Sight(NamedTuple):
    """What a result of a method that attends has kept: weights [tasks, queries, heads, support] and domains."""

    result: Result
    store: DomainStore
    weights: np.ndarray
    support_domain: np.ndarray
    query_domain: np.ndarray

    def __str__(self) -> str:
        return f"{self.result.row['label']}, seed {self.result.row['seed']}"


def main() -> None:
    cli.overrides(())
    if not RUNS.value:
        raise UserError("--runs is missing; give a run directory or a quoted pattern such as 'runs/glyphs/*/*'")
    if not _REPORT.value:
        raise UserError("--report is missing; name the folder to write, such as --report=runs/report")
    if AGAINST.value not in (None, "paper"):
        raise UserError(f"--against={AGAINST.value}: a report compares with the paper alone; give paper, or nothing")
    results, faults = read_results(find_runs(RUNS.value))
    if not results:
        raise UserError(f"--runs={','.join(RUNS.value)}: nothing to report; the first fault: {faults[0]}")
    make_report(Path(_REPORT.value), results, faults, AGAINST.value == "paper", cli.DATA_DIR.value)


def make_report(folder: Path, results: Sequence[Result], faults: Sequence[str], paper: bool, data_dir: str) -> None:
    """Writes all of it, and says where it lies and what was left out."""
    results, more = distinct(results)
    faults = [*faults, *more]
    tables = build_tables(results, {name: protocol(name) for name in _paper_benchmarks()} if paper else None)
    figures, attended = [], []
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for benchmark in sorted({r.row["benchmark"] for r in results}):
        pairs, more = paired_table(results, benchmark)
        tables += [pairs] if pairs else []
        seen, others = sights(results, benchmark, data_dir)
        faults += more + others
        for name, title, caption, drawn in draw(results, seen, benchmark):
            svg = plots.save(drawn, folder / "figures" / f"{benchmark}_{name}")
            figures.append(Figure(f"{benchmark}: {title}", caption, svg))
        for sight, count in zip(seen, itertools.chain(EXPLORED[:1], itertools.repeat(EXPLORED[1])), strict=False):
            attended += explored(sight, results, count)
    (folder / "tables.md").write_text("\n".join(formats.to_markdown(table) for table in tables))
    (folder / "tables.tex").write_text("\n".join(formats.to_latex(table) for table in tables))
    (folder / "tables.csv").write_text(formats.to_csv(tables))
    page = Report(heading(results), summary(results, faults), as_html(tables, results), figures, attended, faults)
    size = write_report(folder / "report.html", page)
    for fault in faults:
        print(f"left out: {fault}", flush=True)
    print(
        f"{folder}/report.html: {len(results)} results, {len(tables)} tables, {len(figures)} figures, {size / 2**20:.1f} MB"
    )


def _paper_benchmarks() -> list[str]:
    return [name for name in READERS if Path(f"configs/{name}.py").exists() and name != "folder"]


def protocol(benchmark: str) -> dict[str, Any]:
    """The paper's protocol, which is what our config of the benchmark says."""
    return cli.resolve(cli.load_config(f"configs/{benchmark}.py:cxda"))


def heading(results: Sequence[Result]) -> str:
    return f"Feed-forward latent domain adaptation on {', '.join(sorted({r.row['benchmark'] for r in results}))}"


def summary(results: Sequence[Result], faults: Sequence[str]) -> list[tuple[str, str]]:
    def all_of(field: str) -> str:
        return ", ".join(dict.fromkeys(str(r.row[field]) for r in results))

    minutes = {r.run: r.row["train_minutes"] or 0.0 for r in results}
    marks = dict.fromkeys(f"{r.row['benchmark']}: {mark}" for r in results for mark in r.row.get("data_marks", []))
    stand_ins = [f"{b} stands in for {STAND_INS[b]}" for b in STAND_INS if b in {r.row["benchmark"] for r in results}]
    return [
        ("Benchmarks", "; ".join([all_of("benchmark"), *stand_ins, *marks])),
        ("Methods", all_of("method")),
        ("Training seeds", ", ".join(map(str, sorted({r.row["seed"] for r in results})))),
        ("Tasks of a test", all_of("num_tasks")),
        ("Trainings", f"{len(minutes)}, {sum(minutes.values()):.0f} minutes in all"),
        ("Tests", f"{len(results)}; {len(faults)} faults and omissions"),
        ("Device", all_of("device")),
        ("Version", all_of("package")),
        ("Data", ", ".join(dict.fromkeys(f"{r.row['benchmark']} {r.row['data_hash'][:12]}" for r in results))),
    ]


def as_html(tables: Sequence[Table], results: Sequence[Result]) -> list[str]:
    """The tables, each cell with a link to its run in the last one."""
    places = {str(r.folder): f"#run-{i}" for i, r in enumerate(results)}
    return [*(formats.to_html(table, lambda run: places.get(run, "")) for table in tables), formats.runs_html(results)]


def sights(results: Sequence[Result], benchmark: str, data_dir: str) -> tuple[list[Sight], list[str]]:
    """The first seed of each method that attends, of which the weights and the images are there."""
    found, faults = [], []
    group = by_cell(r for r in results if r.row["benchmark"] == benchmark and not r.row.get("setting"))
    firsts = [seeds[0] for seeds in group.values() if (seeds[0].folder / "attention.npz").exists()]
    for result in firsts:
        try:
            kept, store = result.stored("attention"), open_data(result.config, data_dir)
            if store.sha256 != result.row["data_hash"]:
                raise UserError(f"the data in --data_dir={data_dir} is not what it was tested on")
            found.append(checked(Sight(result, store, **kept)))
        except (UserError, OSError, ValueError, KeyError, TypeError, EOFError) as e:
            faults.append(f"{result.folder}: no attention shown ({e})")
    return found, faults


def checked(sight: Sight) -> Sight:
    """The same, of which the arrays fit each other and the data."""
    shape, domains = sight.weights.shape, len(sight.store.domain_names)
    fits = len(shape) == 4 and sight.query_domain.shape == shape[:2] and sight.support_domain.shape == shape[::3]
    if not fits or not all((d >= 0).all() and (d < domains).all() for d in (sight.support_domain, sight.query_domain)):
        raise UserError(f"attention.npz: weights {shape} and its domains do not fit; evaluate again")
    return sight


def explored(sight: Sight, results: Iterable[Result], count: int) -> list[Attended]:
    """The first tasks for the explorer, with the answers of all methods of the same seed that were tested on them."""
    names, classes = (tuple(map(printable, n)) for n in (sight.store.domain_names, sight.store.info.class_names))
    own, stored, answers = sight.result.row, sight.result.stored(), {}
    for (label, _), seeds in by_cell(r for r in results if r.row["benchmark"] == own["benchmark"]).items():
        for other in (r for r in seeds if r.row["seed"] == own["seed"] and r.row["data_hash"] == own["data_hash"]):
            if label == other.row["method"] and not other.row.get("setting"):
                theirs = other.stored()
                if np.array_equal(theirs["query"][:count], stored["query"][:count]):
                    answers[label] = theirs["predictions"]

    def words(numbers: np.ndarray) -> tuple[str, ...]:
        return tuple(classes[i] for i in numbers)

    tasks = []
    for task in range(min(count, len(sight.weights))):
        support, query = stored["support"][task], stored["query"][task]
        from_domains = tuple(names[d] for d in sight.support_domain[task])
        tasks.append(Attended(
            f"task {task + 1} ({sight})",
            Support(sight.store.images[support], from_domains, words(sight.store.labels[support])),
            Query(sight.store.images[query], names[sight.query_domain[task, 0]], words(stored["labels"][task]),
                  {label: words(found[task]) for label, found in answers.items()}),
            sight.weights[task].astype(np.float64),
        ))  # fmt: skip
    return tasks


def draw(results: Sequence[Result], seen: Sequence[Sight], benchmark: str) -> Iterator[tuple[str, str, str, Any]]:
    """File name, title, caption and figure of all there is to draw."""
    one = "Means over training seeds, with standard errors."
    candidates: list[tuple[str, str, str, Any]] = [
        ("accuracy_time", "accuracy and time", f"{one} Filled markers need no back-propagation on the device; lines join "
         "numbers of fine-tuning steps. A task's time is that of one task alone.", plots.accuracy_time(results, benchmark)),
        ("num_domains", "number of support domains", f"{one} Compare within a number: queries per task differ.",
         plots.variable(results, benchmark, "num_domains")),
        ("support_size", "number of support images", f"{one} Compare within a number: queries per task differ.",
         plots.variable(results, benchmark, "support_size")),
        ("learning_curves", "learning curves", "Validation score during training: thin lines are seeds, bold ones their mean.",
         plots.learning_curves(results, benchmark)),
    ]  # fmt: skip
    for i, sight in enumerate(seen):
        times = sight.weights.astype(np.float32) * sight.weights.shape[-1]  # multiples of uniform
        own = np.broadcast_to(
            (sight.query_domain[:, :, None] == sight.support_domain[:, None, :])[:, :, None], times.shape
        )
        label = sight.result.row["label"]
        mean, mask = times.mean(2), own[:, :, 0]
        if not mean[~mask].any():
            continue  # it is shown its own domain alone: nothing to compare
        said = (
            f"{sight}; {len(times)} tasks. Densities of attention weights on support images of the query's own domain"
        )
        candidates.append((
            f"attention_{label}", f"attention of {label}", f"{said} and of others, averaged over heads.",
            plots.attention_histogram(mean[mask], mean[~mask]),
        ))  # fmt: skip
        if i == 0:
            heads = range(times.shape[2])
            same, other = ([times[:, :, h][own[:, :, h] == flag] for h in heads] for flag in (True, False))
            candidates.append((
                f"attention_heads_{label}", f"attention of each head of {label}", f"{said} and of others, per head.",
                plots.attention_histogram(np.stack(same), np.stack(other), list(heads)),
            ))  # fmt: skip
            candidates.append((
                f"attention_grid_{label}", f"what a query of {label} attends to",
                f"{sight}: the first query of the first task, and of each support domain the five images it attends to "
                "most and least.", grid(sight),
            ))  # fmt: skip
    yield from (found for found in candidates if found[3] is not None)


def grid(sight: Sight) -> Any:
    """The first query of the first task and its support images."""
    stored, store = sight.result.stored(), sight.store
    classes = store.info.class_names
    text = f"label {classes[stored['labels'][0, 0]]}, answer {classes[stored['predictions'][0, 0]]}"
    return plots.attention_grid(
        store.images[stored["support"][0]], sight.support_domain[0], sight.weights[0, 0].astype(float).mean(0),
        int(sight.query_domain[0, 0]), store.images[stored["query"][0, 0]], store.domain_names, text=text,
    )  # fmt: skip


if __name__ == "__main__":
    cli.run(main)
