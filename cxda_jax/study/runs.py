"""Finds what --runs names on the disk: runs with their configs and weights, and
the evaluations that can be made of them."""

import glob
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from cxda_jax import mesh
from cxda_jax.config import Changes, Config, changed, choose
from cxda_jax.data.store import DomainStore
from cxda_jax.disk import checkpoints, manifest, models
from cxda_jax.disk.reading import read_lines, reason, system_fault
from cxda_jax.errors import UserError, brief
from cxda_jax.experiment import METHODS, Experiment, build_method, open_data
from cxda_jax.study.identity import Record, check_data, read_config, read_record
from cxda_jax.study.settings import USUAL, Setting, reshaped
from cxda_jax.types import Variables

COMMAS = 20  # in the path of a run, at most
STARTS = (
    "erm",
    "erm_iid",
)  # whose checkpoints a method without a training of its own may start from; the usual one first


class Evaluation(NamedTuple):
    """A method to test on the checkpoint of a run, and where its results go."""

    run: Path
    folder: Path
    label: str  # the method, what was changed and the setting
    config: Config
    record: Record
    marks: tuple[str, ...] = ()  # what sets its results apart from those of its config on its data
    setting: Setting = USUAL
    split: str = "test"  # whose domains it is tested on; or "val"

    def reached_step(self) -> int:
        """The newest step of the run's training that can be seen from here."""
        folder, last, best = (self.run / name for name in ("model", "last", "best"))
        reached = [self.record.reached_step, *checkpoints.steps(last), *checkpoints.steps(best)]
        if models.is_model(folder) and not manifest.find_fault(folder, [models.CONFIG]):
            reached.append(read_record(folder).reached_step)
        return max(reached)


def find_evaluations(
    runs: Sequence[Path],
    methods: Sequence[str],
    changes: Changes,
    data_dir: str | Path,
    settings: Sequence[Setting],
    other_data: bool,
    start: str = STARTS[0],
    split: str = "test",
) -> tuple[list[Evaluation], list[str]]:
    """One evaluation for each run, method that can be tested on it and setting, and a line for each fault.

    `methods` are names, or "all"; each run's own where it is empty. Those without a training of their own are tested
    on the runs of `start`, one of STARTS; if it is not the usual one, labels say so: t3a,from=erm_iid. Evaluations
    of equal programs are neighbours. A run that cannot be tested is a fault; a single one is an error. The results
    of split "val" have folders of their own.
    """
    choose("--from", start, STARTS)
    started = f"from={start}" * (start != STARTS[0])
    for name in methods:
        if name not in METHODS and name != "all":
            raise UserError(f"--methods={brief(name, 30)}: no such method; choose from all, {', '.join(METHODS)}")
    stores: dict[str, DomainStore] = {}

    def of_run(run: Path) -> Iterator[Evaluation]:
        stored = read_config(run)
        own, data = stored["method"], json.dumps([stored["benchmark"], stored["data"]])
        if data not in stores:
            stores[data] = open_data(stored, data_dir)
        record = read_record(run)
        marks = check_data(run, record, stores[data], other_data)
        for name in METHODS if "all" in methods else methods or [own]:
            method = build_method(changed({**stored, "method": name}, changes), stores[data])
            if (start if method.trains_as else name) != own:
                continue
            # What uses no support answers alike in every context, so an empty one is its only test.
            alike = dict.fromkeys(
                s._replace(number=0) if s.context and not method.uses_support else s for s in settings
            )
            for setting in alike:
                if setting.changes and method.feed_forward:
                    continue  # nothing to fine-tune
                config = reshaped(changed({**stored, "method": name}, [*changes, *setting.changes]), setting)
                parts = [name, started * bool(method.trains_as), *map("=".join, changes), str(setting)]
                label = ",".join(filter(None, parts))
                place = label + ",validation" * (split == "val")
                folder = run if place == own else run / place
                yield Evaluation(run, folder, label, config, record, marks, setting, split)

    evaluations: list[Evaluation] = []
    faults: list[str] = []
    for run in runs:
        try:
            evaluations += of_run(run)
        except Exception as e:  # a folder that somebody sent may hold anything
            if len(runs) == 1:
                raise
            faults.append(f"{run}: {in_one_line(e)}")
    methods_order, labels = list(METHODS), [e.label for e in evaluations]
    return sorted(evaluations, key=lambda e: (methods_order.index(e.config["method"]), labels.index(e.label))), faults


def in_one_line(error: Exception) -> str:
    """An error that does not stop the others, as a line."""
    if isinstance(error, UserError):
        return str(error)
    return system_fault(error) if isinstance(error, OSError) else f"{type(error).__name__}: {reason(error)}"


def find_runs(patterns: Sequence[str]) -> list[Path]:
    """Directories that match and hold a config.json."""
    folders: list[Path] = []
    matches, rest = [], list(patterns)
    while rest:
        for count in range(min(len(rest), COMMAS + 1), 0, -1):  # the list was split at commas, which names may have too
            matches = matching(",".join(rest[:count]))
            if runs := [path for path in matches if (path / "config.json").exists()]:
                break
        else:
            what = "nothing that matches holds a config.json" if matches else "nothing matches"
            raise UserError(f"--runs={rest[0]}: {what}; name run directories that cxda train made")
        folders += [run for run in runs if run not in folders]
        del rest[:count]
    return folders


def matching(pattern: str) -> list[Path]:
    """The paths that a pattern matches.

    As far as it names what exists it is taken as it stands: names may have brackets too.
    """
    literal, parts = "", list(Path(pattern).parts or [pattern])
    while parts and os.path.exists(os.path.join(literal, parts[0])):
        literal = os.path.join(literal, parts.pop(0))
    return [Path(p) for p in sorted(glob.glob(os.path.join(glob.escape(literal), *parts)))]


def restore_best(run: Path, experiment: Experiment) -> tuple[Variables, dict[str, Any]]:
    """The variables that validated best, and what is known of them: from a run's best/, or from a model's files."""
    like = jax.eval_shape(experiment.method.init, jax.random.key(0), experiment.example)

    def read() -> tuple[Variables, dict[str, Any]]:
        if restored := checkpoints.restore(run / "best", like):
            return restored
        if models.is_model(run):
            return models.read_model(run, like)
        raise UserError(f"{run}: no checkpoint in best/; train it: cxda train ... --workdir={run}")

    return mesh.from_first(read, like)


def training_minutes(workdir: Path) -> float | None:
    """From the start of the training to its last validation, over all resumptions; None where no metrics came along."""
    path = workdir / "metrics.jsonl"
    if not path.exists():
        return None
    return max((line.get("seconds", 0.0) for line in read_lines(path)), default=0.0) / 60
