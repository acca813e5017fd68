"""One cell of a study again: what a method and a seed have now, beside what was recorded."""

from collections.abc import Sequence
from pathlib import Path

from cxda_jax.config.reading import differences
from cxda_jax.errors import UserError
from cxda_jax.studies import records
from cxda_jax.studies.folders import read_study
from cxda_jax.studies.jobs import Study
from cxda_jax.studies.result import Identity, Result
from cxda_jax.studies.statistics import paired_differences

THEN, NOW = "recorded", "again"


def parse_cell(text: str) -> tuple[str, str]:
    """'cxda/1' to a method and a seed."""
    method, _, seed = text.partition("/")
    if not (method and seed.isdecimal()):
        raise UserError(f"--cell={text}: give a method and a seed, such as cxda/1")
    return method, seed


def compare_cell(study: Study, path: Path) -> str:
    """Sets the result of a study that has run beside the recorded one, as lines of text.

    Args:
      study: of one method and one seed.
      path: a file of records that holds the same cell.

    Returns:
      both scores; their difference, with its 95 % interval over tasks; whether the weights are equal; and the fields
      of the configs that differ.
    """
    (method,), (seed,) = study.methods, study.seeds
    cell = f"{study.benchmark}, {method}, seed {seed}"
    now = find(read_study(study.folder, study.benchmark)[0], method, seed)
    if not now:
        raise UserError(f"{study.folder}: no result of {cell}; a log in its folder jobs says why")
    then = find([r for r in records.read(path) if r.row["data_hash"] == now.row["data_hash"]], method, seed)
    if not then:
        raise UserError(f"{path}: no result of {cell} on these data; give the file of records that holds it")
    labelled = [r._replace(row={**r.row, "label": name}) for name, r in ((THEN, then), (NOW, now))]
    measured, tasks, _ = paired_differences(labelled, THEN)
    if not measured:
        raise UserError(f"{path}: {cell} was tested on other tasks; test it with the same config.evaluation")
    scores = [
        f"{r.row['label']:<9} Avg {r.row['avg']:.2f}  W10% {r.row['w10']:.2f}  {r.row['device']}" for r in labelled
    ]
    mean, low, high = measured[NOW, THEN].avg
    interval = f"{NOW} - {THEN}: {mean:+.2f} [{low:+.2f}, {high:+.2f}] on {tasks} tasks"
    weights = (
        f"the weights are {'' if now.row['weights_hash'] == then.row['weights_hash'] else 'not '}equal, bit for bit"
    )
    changed = [f"{name}: {a!r}, now {b!r}" for name, (a, b) in differences(then.config, now.config).items()]
    return "\n".join([cell, *scores, interval, weights, *changed])


def find(results: Sequence[Result], method: str, seed: int) -> Result | None:
    """The result of a method on the usual tasks at a seed, if there is one."""
    found = [r for r in results if r.identity == Identity(method) and r.row["seed"] == seed]
    return found[0] if found else None
