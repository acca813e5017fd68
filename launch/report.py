"""Makes tables, figures and a page to look around in from what evaluations left on disk; no device is needed.

python -m launch.report --runs='runs/glyphs/*/*' --report=runs/glyphs/report
python -m launch.report --runs='runs/study/femnist/*/*' --report=docs/study --against=paper
python -m launch.report --runs='runs/study/glyphs/*/*' --report=docs/study --against=paper_stand_ins

Writes into the folder of --report:

    report.html     one file: all of the below, each run, and an explorer of what queries attend to; opens in any browser
    tables.md .tex .csv
    figures/        .png and .svg

--against=paper sets the paper's figure beside each of ours that was measured on the paper's data, with the difference,
whether it lies within the combined standard error, and what sets the two apart. --against=paper_stand_ins does so for data
in their place too: glyphs for FEMNIST, glyphs_c for CIFAR-C, smoke configs, and data that are marked, such as regenerated
domains.

Runs that cannot be read are named, and the rest is reported. Seeds whose training is unfinished are marked and left out of
all means; --unfinished takes them in, still marked. Data sets of one name that differ are shown as two, by their hash.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from cxda_jax import files
from cxda_jax.analysis import formats, plots
from cxda_jax.analysis.report import Attended, Figure, Query, Report, Support, write_report
from cxda_jax.analysis.results import (
    Result,
    by_store,
    distinct,
    is_unfinished,
    named,
    read_results,
    unfinished_said,
)
from cxda_jax.analysis.tables import BENCHMARKS, STAND_INS, Table, build_tables, by_cell, paired_table, paper_name
from cxda_jax.data.store import DomainStore
from cxda_jax.experiment import open_data
from cxda_jax.progress import Counter
from cxda_jax.reading import reason
from cxda_jax.types import UserError, printable
from launch import cli
from launch.evaluate import AGAINST, RUNS
from launch.runs import find_runs

flags.adopt_module_key_flags(cli)
flags.declare_key_flag(RUNS.name)
flags.declare_key_flag(AGAINST.name)
_REPORT = flags.DEFINE_string("report", None, "The folder to write.")
_UNFINISHED = flags.DEFINE_bool(
    "unfinished", False, "Take seeds whose training is unfinished into means and figures too, marked."
)

AGAINST_PAPER = ("paper", "paper_stand_ins")
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
    if AGAINST.value not in (None, *AGAINST_PAPER):
        known = ", ".join(AGAINST_PAPER)
        raise UserError(f"--against={AGAINST.value}: a report compares with the paper alone; give {known}, or nothing")
    runs = find_runs(RUNS.value)
    print(f"reading {len(runs)} runs", flush=True)
    results, faults = read_results(runs, Counter("  runs", len(runs)))
    if not results:
        raise UserError(f"--runs={','.join(RUNS.value)}: nothing to report; the first fault: {faults[0]}")
    make_report(
        Path(_REPORT.value), results, faults, AGAINST.value in AGAINST_PAPER, cli.DATA_DIR.value,
        stand_ins=AGAINST.value == "paper_stand_ins", unfinished=_UNFINISHED.value,
    )  # fmt: skip


def make_report(
    folder: Path, results: Sequence[Result], faults: Sequence[str], paper: bool, data_dir: str,
    stand_ins: bool = False, unfinished: bool = False,
) -> None:  # fmt: skip
    """Writes all of it, and says what it does, where it lies and what was left out."""
    everything, more = distinct(named(results))
    faults, results = [*faults, *more], [r for r in everything if unfinished or not is_unfinished(r.row)]
    left_out = [] if unfinished else [r for r in everything if is_unfinished(r.row)]
    advice = "left out of all means; train on and evaluate again, or take them in with --unfinished"
    faults += [f"{line}; {advice}" for line in said_of_unfinished(everything)] if left_out else []
    print(f"comparing {len(results)} results", flush=True)
    protocols = {name: protocol(name) for name in BENCHMARKS} if paper else None
    tables = build_tables(results, protocols, stand_ins, left_out)
    figures, attended, taken = [], [], set()
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    files.refuse_links(folder)
    for store in by_store(results):
        pairs, more = paired_table(results, store)
        tables += [pairs] if pairs else []
        seen, others = sights(results, store, data_dir)
        faults += more + others
        drawing, included = list(draw(results, seen, store)), said_of_unfinished(by_store(results)[store])
        for number, (name, title, caption, drawn) in enumerate(drawing, 1):
            print(f"{store}: figure {number}/{len(drawing)}, {title}", flush=True)
            svg = plots.save(drawn, folder / "figures" / file_name(f"{store}_{name}", taken))
            figures.append(Figure(f"{store}: {title}", " ".join([caption, *(f"{line}." for line in included)]), svg))
        for sight, count in zip(seen, itertools.chain(EXPLORED[:1], itertools.repeat(EXPLORED[1])), strict=False):
            attended += explored(sight, results, count)
    print(f"writing {folder}", flush=True)
    facts = summary(everything, faults) + (beside_paper(results, stand_ins) if paper else [])
    page = Report(heading(everything), facts, as_html(tables, everything), figures, attended, faults)
    for kind, text in {
        "md": "\n".join(formats.to_markdown(table) for table in tables),
        "tex": "\n".join(formats.to_latex(table) for table in tables),
        "csv": formats.to_csv(tables),
    }.items():
        files.write_bytes(folder / f"tables.{kind}", text.encode(errors="replace"))
    size = write_report(folder / "report.html", page)
    for fault in faults:
        print(f"left out: {fault}".encode(errors="replace").decode(), flush=True)  # a path may be no text
    print(
        f"{folder}/report.html: {len(results)} results, {len(tables)} tables, {len(figures)} figures, {size / 2**20:.1f} MB"
    )


def file_name(text: str, taken: set[str]) -> str:
    """A name for a file, made of what results say: it stays in its folder and is not taken."""
    stem = re.sub(r"([^\w.,=+-]|_)+", "_", text, flags=re.ASCII).strip("._")[:100] or "figure"
    names = (f"{stem}{f'_{i}' * (i > 1)}" for i in itertools.count(1))
    found = next(name for name in names if name.lower() not in taken)  # some disks do not tell A from a
    taken.add(found.lower())
    return found


def said_of_unfinished(results: Sequence[Result]) -> list[str]:
    """A line for each method, setting and store of which seeds are unfinished."""
    return [
        f"{store}, {', '.join(filter(None, cell))}: {said}"
        for store, found in by_store(results).items()
        for cell, seeds in by_cell(found).items()
        if (said := unfinished_said([r.row for r in seeds]))
    ]


def beside_paper(results: Sequence[Result], stand_ins: bool) -> list[tuple[str, str]]:
    """Beside which results the paper's figures stand, and why not beside the others."""
    shown = {store: paper_name(found, stand_ins) for store, found in by_store(results).items()}
    lines = [f"{name}'s beside {store}" for store, name in shown.items() if name]
    lines += [
        f"none beside {store}, whose data are not the paper's" + "; --against=paper_stand_ins shows them"
        * bool(paper_name(found, True))
        for store, found in by_store(results).items() if not shown[store]
    ]  # fmt: skip
    return [("The paper's figures", "; ".join(lines))]


def protocol(benchmark: str) -> dict[str, Any]:
    """The paper's protocol, which is what our config of the benchmark says."""
    return cli.resolve(cli.load_config(f"configs/{benchmark}.py:cxda"))


def heading(results: Sequence[Result]) -> str:
    return f"Feed-forward latent domain adaptation on {', '.join(by_store(results))}"


def summary(results: Sequence[Result], faults: Sequence[str]) -> list[tuple[str, str]]:
    def all_of(field: str) -> str:
        return ", ".join(dict.fromkeys(str(r.row[field]) for r in results))

    minutes = {r.run: r.row["train_minutes"] or 0.0 for r in results}
    stores = {store: found[0].row for store, found in by_store(results).items()}
    marks = dict.fromkeys(f"{r.store}: {mark}" for r in named(results) for mark in r.row.get("data_marks", []))
    names = {store: row["benchmark"] for store, row in stores.items()}
    stand_ins = [f"{store} stands in for {STAND_INS[name]}" for store, name in names.items() if name in STAND_INS]
    return [
        ("Benchmarks", "; ".join([", ".join(stores), *stand_ins, *marks])),
        ("Methods", all_of("method")),
        ("Training seeds", ", ".join(map(str, sorted({r.row["seed"] for r in results})))),
        ("Tasks of a test", all_of("num_tasks")),
        ("Trainings", f"{len(minutes)}, {sum(minutes.values()):.0f} minutes in all"),
        ("Tests", f"{len(results)}; {len(faults)} faults and omissions"),
        ("Device", all_of("device")),
        ("Version", all_of("package")),
        ("Data", ", ".join(f"{store} {row['data_hash'][:12]}" for store, row in stores.items())),
    ]


def as_html(tables: Sequence[Table], results: Sequence[Result]) -> list[str]:
    """The tables, each cell with a link to its run in the last one."""
    places = {str(r.folder): f"#run-{i}" for i, r in enumerate(results)}
    return [*(formats.to_html(table, lambda run: places.get(run, "")) for table in tables), formats.runs_html(results)]


def sights(results: Sequence[Result], store: str, data_dir: str) -> tuple[list[Sight], list[str]]:
    """The first seed of each method that attends, of which the weights and the images are there."""
    found, faults = [], []
    group = by_cell(r for r in by_store(results)[store] if not r.row.get("setting"))
    firsts = [seeds[0] for seeds in group.values() if (seeds[0].folder / "attention.npz").exists()]
    for result in firsts:
        try:
            kept, images = result.stored("attention"), open_data(result.config, data_dir)
            if images.sha256 != result.row["data_hash"]:
                raise UserError(f"the data in --data_dir={data_dir} is not what it was tested on")
            found.append(checked(Sight(result, images, **kept)))
        except Exception as e:  # whatever a library makes of a file or a config that is not as it was
            faults.append(f"{result.folder}: no attention shown ({e if isinstance(e, UserError) else reason(e)})")
    return found, faults


def checked(sight: Sight) -> Sight:
    """The same, of which the arrays fit each other and the data."""
    shape, domains, stored = sight.weights.shape, len(sight.store.domain_names), sight.result.stored()
    fits = len(shape) == 4 and sight.query_domain.shape == shape[:2] and sight.support_domain.shape == shape[::3]
    if not fits or not all((d >= 0).all() and (d < domains).all() for d in (sight.support_domain, sight.query_domain)):
        raise UserError(f"attention.npz: weights {shape} and its domains do not fit; evaluate again")
    if not np.isfinite(sight.weights).all() or not 0 < shape[0] <= len(stored["query"]):
        raise UserError(f"attention.npz: weights {shape} that are no numbers, or of no task; evaluate again")
    for name, most in {"support": len(sight.store.labels), "query": len(sight.store.labels),
                       "labels": sight.store.num_classes, "predictions": sight.store.num_classes}.items():  # fmt: skip
        found = stored[name]
        if found.dtype.kind not in "iu" or not ((found >= 0) & (found < most)).all():
            raise UserError(f"predictions.npz: {name} outside 0..{most - 1}, which the data hold; evaluate again")
    if stored["support"].shape[1:] != shape[3:] or stored["query"].shape[1:] != shape[1:2]:
        raise UserError(f"predictions.npz: tasks of another form than weights {shape}; evaluate again")
    return sight


def explored(sight: Sight, results: Iterable[Result], count: int) -> list[Attended]:
    """The first tasks for the explorer, with the answers of all methods of the same seed that were tested on them."""
    names, classes = (tuple(map(printable, n)) for n in (sight.store.domain_names, sight.store.info.class_names))
    own, stored, answers = sight.result.row, sight.result.stored(), {}
    for (label, _), seeds in by_cell(by_store(results)[sight.result.store]).items():
        for other in (r for r in seeds if r.row["seed"] == own["seed"]):
            if label == other.row["method"] and not other.row.get("setting"):
                theirs = other.stored()
                if np.array_equal(theirs["query"][:count], stored["query"][:count]):
                    answers[label] = theirs["predictions"]

    def words(numbers: np.ndarray) -> tuple[str, ...]:
        return tuple(classes[i] if 0 <= i < len(classes) else f"{i}, no class" for i in numbers.astype(int))

    tasks = []
    for task in range(min(count, len(sight.weights))):
        support, query = stored["support"][task], stored["query"][task]
        from_domains = tuple(names[d] for d in sight.support_domain[task])
        tasks.append(Attended(
            f"{sight.result.store}: task {task + 1} ({sight})",
            Support(sight.store.images[support], from_domains, words(sight.store.labels[support])),
            Query(sight.store.images[query], names[sight.query_domain[task, 0]], words(stored["labels"][task]),
                  {label: words(found[task]) for label, found in answers.items()}),
            sight.weights[task].astype(np.float64),
        ))  # fmt: skip
    return tasks


def draw(results: Sequence[Result], seen: Sequence[Sight], store: str) -> Iterator[tuple[str, str, str, Any]]:
    """File name, title, caption and figure of all there is to draw."""
    one = "Means over training seeds, with standard errors."
    candidates: list[tuple[str, str, str, Any]] = [
        ("accuracy_time", "accuracy and time", f"{one} Filled markers need no back-propagation on the device; lines join "
         "numbers of fine-tuning steps. A task's time is that of one task alone.", plots.accuracy_time(results, store)),
        ("num_domains", "number of support domains", f"{one} Compare within a number: queries per task differ.",
         plots.variable(results, store, "num_domains")),
        ("support_size", "number of support images", f"{one} Compare within a number: queries per task differ.",
         plots.variable(results, store, "support_size")),
        ("learning_curves", "learning curves", "Validation score during training: thin lines are seeds, bold ones their mean.",
         plots.learning_curves(results, store)),
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
