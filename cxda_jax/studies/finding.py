"""Finds what --runs names on the disk: runs with their configs and weights, and
the evaluations that can be made of them."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from cxda_jax.config.fields import choose
from cxda_jax.config.reading import Changes, Config, changed, of_method
from cxda_jax.config.registry import METHODS, STARTS, groups
from cxda_jax.data.store import DomainStore
from cxda_jax.disk import checkpoints, manifest, models
from cxda_jax.disk.reading import read_lines, reason, system_fault
from cxda_jax.errors import UserError, brief
from cxda_jax.machine import mesh
from cxda_jax.studies.identity import Record, check_data, read_config, read_record
from cxda_jax.studies.result import Identity
from cxda_jax.studies.settings import USUAL, Setting, reshaped
from cxda_jax.training.experiment import Experiment, build_method, open_data
from cxda_jax.types import Variables


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


class Request(NamedTuple):
    """The tests that are asked for.

    Attributes:
      methods: names, or "all"; each run's own where it is empty.
      changes: of fields of the runs' configs.
      settings: the forms of tasks; the usual one where it is empty.
      num_tasks: in place of the config's.
      against: the label that paired differences are taken to.
      start: the method, one of STARTS, on whose runs those without a training of their own are tested; if it is not the
        usual one, labels say so: t3a,from=erm_iid.
      split: whose domains; the results of "val" have folders of their own.
      other_data: whether a run may be tested on other data than it was trained on; its results are marked.
    """

    methods: Sequence[str] = ()
    changes: Changes = ()
    settings: Sequence[Setting] = (USUAL,)
    num_tasks: int | None = None
    against: str | None = None
    start: str = STARTS[0]
    split: str = "test"
    other_data: bool = False


def find_evaluations(
    runs: Sequence[Path], request: Request, data_dir: str | Path
) -> tuple[list[Evaluation], list[str]]:
    """One evaluation for each run, method that can be tested on it and setting, and a line for each fault.

    Evaluations of equal programs are neighbours. A run that cannot be tested is a fault; a single one is an error.
    """
    choose("--from", request.start, STARTS)
    for name in request.methods:
        if name not in METHODS and name != "all":
            known = brief(", ".join(METHODS), 100)
            raise UserError("no such method", "--methods", name, f"choose from all, {known}")
    stores: dict[str, DomainStore] = {}
    evaluations: list[Evaluation] = []
    faults: list[str] = []
    for run in runs:
        try:
            evaluations += _of_run(run, request, data_dir, stores)
        except Exception as e:  # a folder that somebody sent may hold anything
            if len(runs) == 1:
                raise
            faults.append(f"{run}: {in_one_line(e)}")
    methods_order, labels = list(METHODS), [e.label for e in evaluations]
    return sorted(evaluations, key=lambda e: (methods_order.index(e.config.method), labels.index(e.label))), faults


def _of_run(run: Path, asked: Request, data_dir: str | Path, stores: dict[str, DomainStore]) -> Iterator[Evaluation]:
    """The evaluations of one run. `stores` are those opened before, by their configs."""
    stored = read_config(run)
    own, data = stored.method, json.dumps([stored.benchmark, stored.data])
    if data not in stores:
        stores[data] = open_data(stored, data_dir)
    record = read_record(run)
    marks = check_data(run, record, stores[data], asked.other_data)
    for name in METHODS if "all" in asked.methods else asked.methods or [own]:
        others = groups().keys() - METHODS[name].groups.keys()
        if "all" in asked.methods and any(field.partition(".")[0] in others for field, _ in asked.changes):
            continue  # it does not read what is changed
        method = build_method(changed(of_method(stored, name), asked.changes), stores[data])
        if (asked.start if method.trains_as else name) != own:
            continue
        # What uses no support answers alike in every context, so an empty one is its only test.
        alike = dict.fromkeys(
            s._replace(number=0) if s.context and not method.uses_support else s for s in asked.settings
        )
        for setting in alike:
            if setting.changes and method.feed_forward:
                continue  # nothing to fine-tune
            config = reshaped(changed(of_method(stored, name), [*asked.changes, *setting.changes]), setting)
            start = asked.start if method.trains_as and asked.start != STARTS[0] else ""
            label = str(Identity(name, start, ",".join(map("=".join, asked.changes)), setting))
            place = label + ",validation" * (asked.split == "val")
            folder = run if place == own else run / place
            yield Evaluation(run, folder, label, config, record, marks, setting, asked.split)


def in_one_line(error: Exception) -> str:
    """An error that does not stop the others, as a line."""
    if isinstance(error, UserError):
        return str(error)
    return system_fault(error) if isinstance(error, OSError) else f"{type(error).__name__}: {reason(error)}"


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
