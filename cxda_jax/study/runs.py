"""What --runs names on the disk: runs with their configs and weights, and the evaluations that can be made of them."""

import glob
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from cxda_jax.config import Changes, Config, changed
from cxda_jax.data.store import DomainStore
from cxda_jax.disk import checkpoints, manifest, models
from cxda_jax.disk.reading import read_lines, reason, system_fault
from cxda_jax.errors import UserError, brief
from cxda_jax.experiment import METHODS, Experiment, build_method, open_data
from cxda_jax.study.identity import Record, check_data, read_config, read_record
from cxda_jax.study.settings import USUAL, Setting, reshaped
from cxda_jax.types import Variables

COMMAS = 20  # in the path of a run, at most


class Evaluation(NamedTuple):
    """A method to test on the checkpoint of a run, and where its results go."""

    run: Path
    folder: Path
    label: str  # the method, what was changed and the setting
    config: Config
    record: Record
    marks: tuple[str, ...] = ()  # what sets its results apart from those of its config on its data
    setting: Setting = USUAL


def find_evaluations(
    runs: Sequence[Path],
    methods: Sequence[str],
    changes: Changes,
    data_dir: str | Path,
    settings: Sequence[Setting] = (USUAL,),
    other_data: bool = False,
) -> tuple[list[Evaluation], list[str]]:
    """One evaluation for each run, method that can be tested on it and setting, and a line for each fault.

    Evaluations of equal programs are neighbours. A run that cannot be tested is a fault; a single one is an error.

    Args:
      runs: folders of runs.
      methods: names, or "all"; each run's own where it is empty.
      changes: fields to change in the configs.
      data_dir: where data sets are kept.
      settings: forms of tasks to test.
      other_data: test on other data than a run was trained on too.
    """
    for name in methods:
        if name not in METHODS and name != "all":
            raise UserError(f"--methods={brief(name, 30)}: no such method; choose from all, {', '.join(METHODS)}")
    evaluations: list[Evaluation] = []
    faults: list[str] = []
    stores: dict[str, DomainStore] = {}
    for run in runs:
        try:
            evaluations += _of_run(run, methods, changes, data_dir, settings, stores, other_data)
        except Exception as e:  # a folder that somebody sent may hold anything
            if len(runs) == 1:
                raise
            faults.append(f"{run}: {in_one_line(e)}")
    order = {label: i for i, label in reversed(list(enumerate(e.label for e in evaluations)))}  # as first met
    methods_order = list(METHODS)
    return sorted(evaluations, key=lambda e: (methods_order.index(e.config["method"]), order[e.label])), faults


def _of_run(
    run: Path,
    methods: Sequence[str],
    changes: Changes,
    data_dir: str | Path,
    settings: Sequence[Setting],
    stores: dict[str, DomainStore],
    other_data: bool,
) -> Iterator[Evaluation]:
    stored = read_config(run)
    own, data = stored["method"], json.dumps([stored["benchmark"], stored["data"]])
    if data not in stores:
        stores[data] = open_data(stored, data_dir)
    record = read_record(run)
    marks = check_data(run, record, stores[data], other_data)
    for name in METHODS if "all" in methods else methods or [own]:
        method = build_method(changed({**stored, "method": name}, changes), stores[data])
        if (method.trains_as or name) != own:
            continue
        for setting in settings:
            if setting.changes and method.feed_forward:
                continue  # nothing to fine-tune
            config = reshaped(changed({**stored, "method": name}, [*changes, *setting.changes]), setting)
            label = ",".join([name, *("=".join(change) for change in changes), *filter(None, [str(setting)])])
            folder = run if label == own else run / label
            yield Evaluation(run, folder, label, config, record, marks, setting)


def in_one_line(error: Exception) -> str:
    """An error that does not stop the others, as a line."""
    if isinstance(error, UserError):
        return str(error)
    return system_fault(error) if isinstance(error, OSError) else f"{type(error).__name__}: {reason(error)}"


def find_runs(patterns: Sequence[str]) -> list[Path]:
    """Directories that match and hold a config.json."""
    folders: list[Path] = []
    matches: list[Path] = []
    rest = list(patterns)
    while rest:
        for count in range(min(len(rest), COMMAS + 1), 0, -1):  # the list was split at commas, which names may have too
            matches = _matching(",".join(rest[:count]))
            runs = [path for path in matches if (path / "config.json").exists()]
            if runs:
                break
        else:
            what = "nothing that matches holds a config.json" if matches else "nothing matches"
            raise UserError(f"--runs={rest[0]}: {what}; name run directories that launch.train made")
        folders += [run for run in runs if run not in folders]
        del rest[:count]
    return folders


def _matching(pattern: str) -> list[Path]:
    """What a pattern matches. As far as it names what exists it is taken as it stands: names may have brackets too."""
    literal, parts = "", list(Path(pattern).parts or [pattern])
    while parts and os.path.exists(os.path.join(literal, parts[0])):
        literal = os.path.join(literal, parts.pop(0))
    return [Path(p) for p in sorted(glob.glob(os.path.join(glob.escape(literal), *parts)))]


def restore_best(evaluation: Evaluation, experiment: Experiment) -> tuple[Variables, dict[str, Any]]:
    """The variables that validated best, and what is known of them: from a run's best/, or from a model's files."""
    like = jax.eval_shape(experiment.method.init, jax.random.key(0), experiment.example)
    restored = checkpoints.restore(evaluation.run / "best", like)
    if restored is None and models.is_model(evaluation.run):
        restored = models.read_model(evaluation.run, like)
    if restored is None:
        raise UserError(
            f"{evaluation.run}: no checkpoint in best/; train it: python -m launch.train ... --workdir={evaluation.run}"
        )
    return restored


def reached_step(evaluation: Evaluation) -> int:
    """The newest step of the run's training that can be seen from here."""
    reached = [step for name in ("last", "best") for step in checkpoints.steps(evaluation.run / name)]
    model = evaluation.run / "model"
    if models.is_model(model) and not manifest.find_fault(model, [models.CONFIG]):
        reached.append(read_record(model).reached_step)
    return max([evaluation.record.reached_step, *reached])


def training_minutes(workdir: Path) -> float | None:
    """From the start of the training to its last validation, over all resumptions; None where no metrics came along."""
    path = workdir / "metrics.jsonl"
    if not path.exists():
        return None
    return max((line.get("seconds", 0.0) for line in read_lines(path)), default=0.0) / 60
