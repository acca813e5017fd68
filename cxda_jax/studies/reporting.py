"""Makes a report of results: tables, figures and the page. launch/report.py says what is written."""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from cxda_jax.disk import files
from cxda_jax.errors import UserError
from cxda_jax.machine.progress import Counter, replacing, say
from cxda_jax.pages.figures import save
from cxda_jax.pages.page import Page, Section, encode, figure_part, table_part, write_page
from cxda_jax.studies import attention, curve_figures, formats, plots, records
from cxda_jax.studies.folders import find_runs, matching, read_results
from cxda_jax.studies.result import Result, by_store, distinct, unfinished_said
from cxda_jax.studies.tables import AGAINST, STAND_INS, build_tables, by_cell, paired_table, paper_name

HEADING = "Feed-forward latent domain adaptation"
EXPLORED = (6, 2)  # tasks in the explorer: of the first method that attends, and of each other one


def report_runs(
    patterns: Sequence[str], folder: str, data_dir: str, against: str, unfinished: bool, record: str = ""
) -> None:
    """Reports all results of the runs that the patterns match, and of records among the patterns.

    Args:
      patterns: of runs; and of files of records, which end in .records.
      record: a file of records to write; "" writes none.
      others: as those of make_report.
    """
    if against not in ("", *AGAINST):
        known = ", ".join(AGAINST)
        raise UserError(f"--against={against}: a report compares with the paper alone; give {known}, or nothing")
    places = find_runs([pattern for pattern in patterns if not pattern.endswith(records.SUFFIX)])
    for pattern in (pattern for pattern in patterns if pattern.endswith(records.SUFFIX)):
        if not (found := matching(pattern)):
            raise UserError(f"--runs={pattern}: nothing matches; name files that --record wrote")
        places += found
    print(f"reading {len(places)} runs or files of records", flush=True)
    results, faults = read_results(places, Counter("  read", len(places)))
    if not results:
        raise UserError(f"--runs={','.join(patterns)}: nothing to report; the first fault: {faults[0]}")
    make_report(Path(folder), results, faults, data_dir, against, unfinished)
    if record:
        replacing(records.RESULTS, Path(record))
        records.write(Path(record), distinct(results)[0])
        print(f"{record}: {Path(record).stat().st_size / 2**20:.2f} MB")


def make_report(
    folder: Path, results: list[Result], faults: list[str], data_dir: str, against: str, unfinished: bool = False
) -> None:
    """Writes the report into a folder, and prints what it does, where it lies and what was left out.

    Args:
      faults: lines of what could not be read, which the page shows.
      data_dir: where data sets are kept; the explorer shows their images.
      against: "paper" or "paper_stand_ins" sets the paper's figures beside ours; "" does not.
      unfinished: take seeds whose training is unfinished into means too.
    """
    loaded, duplicates = distinct(results)
    faults = faults + duplicates
    results = [r for r in loaded if unfinished or not r.unfinished]
    left_out = [] if unfinished else [r for r in loaded if r.unfinished]
    advice = "left out of all means; train on and evaluate again, or take them in with --unfinished"
    faults += [f"{line}; {advice}" for line in unfinished_lines(loaded)] if left_out else []
    print(f"comparing {len(results)} results", flush=True)
    tables, styles = build_tables(results, against, left_out), plots.method_styles(results)
    figures, tasks, taken, late = [], [], set(), by_store(left_out)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    files.refuse_links(folder)
    replacing(HEADING, folder / "report.html")
    for store, of_store in by_store(results).items():
        pairs, unpaired = paired_table(of_store)
        curves, unpaired_curves = curve_figures.measure_curves(of_store)
        tables += [pairs] if pairs else []
        tables += [table for found in curves for table in curve_figures.context_tables(found, late.get(store, []))]
        kept, unshown = attention.kept_attention(of_store, data_dir)
        faults += unpaired + unpaired_curves + unshown
        figures_of = plots.drawings(of_store, styles), curve_figures.drawings(curves, styles), attention.drawings(kept)
        drawings = [d for d in itertools.chain(*figures_of) if d.figure]
        notes = [f"{line}." for line in unfinished_lines(of_store)]
        for number, (name, title, caption, figure) in enumerate(drawings, 1):
            print(f"{store}: figure {number}/{len(drawings)}, {title}", flush=True)
            svg = save(figure, folder / "figures" / file_name(f"{store}_{name}", taken))
            figures.append(figure_part(len(figures) + 1, f"{store}: {title}", " ".join([caption, *notes]), svg))
        for i, weights in enumerate(kept):
            tasks += map(encode, attention.explorer_tasks(weights, of_store, EXPLORED[min(i, 1)]))
    print(f"writing {folder}", flush=True)
    facts = [*summary(loaded, faults), *([beside_paper(results, against)] if against else [])]
    heading = f"{HEADING} on {', '.join(by_store(loaded))}"
    places = {str(r.folder): f"#run-{i}" for i, r in enumerate(loaded)}
    shown = [formats.to_html(table, lambda run: places.get(run, "")) for table in tables]
    parts = [table_part(i, table) for i, table in enumerate([*shown, formats.runs_html(loaded)], 1)]
    page = Page(heading, facts, faults, [Section("tables", "Tables", parts)], tasks, figures)
    for kind, text in {"md": "\n".join(map(formats.to_markdown, tables)), "csv": formats.to_csv(tables)}.items():
        files.write_bytes(folder / f"tables.{kind}", text.encode(errors="replace"))
    size = write_page(folder / "report.html", page)
    for fault in faults:
        say(f"left out: {fault}")
    counts = f"{len(results)} results, {len(tables)} tables, {len(figures)} figures"
    print(f"{folder}/report.html: {counts}, {size / 2**20:.1f} MB")


def file_name(text: str, taken: set[str]) -> str:
    """A name for a file that is not among those taken, and adds it to them. It can name no other folder."""
    stem = re.sub(r"([^\w.,=+-]|_)+", "_", text, flags=re.ASCII).strip("._")[:100] or "figure"
    names = (f"{stem}{f'_{i}' * (i > 1)}" for i in itertools.count(1))
    free = next(name for name in names if name.lower() not in taken)  # some disks take A and a for one name
    taken.add(free.lower())
    return free


def unfinished_lines(results: Sequence[Result]) -> list[str]:
    """A line for each store, method and setting with unfinished seeds."""
    return [
        f"{store}, {', '.join(filter(None, map(str, cell)))}: {said}"
        for store, of_store in by_store(results).items()
        for cell, seeds in by_cell(of_store).items()
        if (said := unfinished_said(seeds))
    ]


def beside_paper(results: Sequence[Result], against: str) -> tuple[str, str]:
    """A line of the summary: which results the paper's figures stand beside, and why not beside the others."""
    shown, others = [], []
    for store, of_store in by_store(results).items():
        if name := paper_name(of_store, against):
            shown.append(f"{name}'s beside {store}")
        else:
            advice = "; --against=paper_stand_ins shows them" * bool(paper_name(of_store, AGAINST[1]))
            others.append(f"none beside {store}, whose data are not the paper's{advice}")
    return "The paper's figures", "; ".join(shown + others)


def summary(results: Sequence[Result], faults: Sequence[str]) -> list[tuple[str, str]]:
    """Lines of the summary: what they tell, and the text."""

    def all_of(field: str) -> str:
        return ", ".join(dict.fromkeys(str(getattr(r, field)) for r in results))

    minutes = {r.run: r.train_minutes or 0.0 for r in results}
    stores = {store: of_store[0] for store, of_store in by_store(results).items()}
    replaced = {store: STAND_INS.get(of.benchmark) for store, of in stores.items()}
    stand_ins = [f"{store} stands in for {name}" for store, name in replaced.items() if name]
    marks = dict.fromkeys(f"{r.store}: {mark}" for r in results for mark in r.data_marks)
    return [
        ("Benchmarks", "; ".join([", ".join(stores), *stand_ins, *marks])),
        ("Methods", all_of("method")),
        ("Training seeds", ", ".join(map(str, sorted({r.seed for r in results})))),
        ("Tasks of a test", all_of("num_tasks")),
        ("Trainings", f"{len(minutes)}, {sum(minutes.values()):.0f} minutes in all"),
        ("Tests", f"{len(results)}; {len(faults)} faults and omissions"),
        ("Device", all_of("device")),
        ("Version", all_of("package")),
        ("Data", ", ".join(f"{store} {of.data_hash[:12]}" for store, of in stores.items())),
    ]
