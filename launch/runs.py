"""What --runs names on the disk: runs with their configs, weights and scores, and the jobs that test them."""

import glob
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from cxda_jax import artefact, checkpoints, manifest, metrics
from cxda_jax.data.store import DomainStore
from cxda_jax.experiment import METHODS, Config, Experiment, build_method, open_data
from cxda_jax.reading import read_lines, reason, system_fault
from cxda_jax.types import UserError, Variables, brief
from launch import cli
from launch.identity import Record, check_data, read_config, read_record

COMMAS = 20  # in the path of a run, at most

Changes = list[tuple[str, str]]  # --config.field=value


class Setting(NamedTuple):
    """Tasks of another form than a config's own: its name, such as num_domains=10, and the fields that differ."""

    name: str
    changes: Changes


OWN = Setting("", [])


class Job(NamedTuple):
    """A method to test on the checkpoint of a run, and where its results go."""

    run: Path
    folder: Path
    label: str
    config: Config
    record: Record
    marks: tuple[str, ...] = ()  # what sets its results apart from those of its config on its data
    setting: str = ""


def setting(kind: str, text: str) -> Setting:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(
            f"--{kind.removeprefix('finetune.')}={text[:40]}: give whole numbers of at least 1, such as 1,10"
        )
    return Setting(f"{kind}={int(text)}", [(kind, text)] if kind == "finetune.steps" else [])


def reshaped(config: Config, name: str) -> Config:
    """The config with the tasks that a setting's name asks for."""
    kind, _, number = name.partition("=")
    if kind not in ("num_domains", "support_size"):
        return config
    episode = config["episode"]
    support = int(number) if kind == "support_size" else episode["num_domains"] * episode["per_domain"]
    domains = int(number) if kind == "num_domains" else episode["num_domains"]
    if support < domains:
        raise UserError(f"--{name}: {support} support images cannot come from {domains} domains; ask for more images")
    each = support // domains
    return {**config, "episode": {**episode, "num_domains": domains, "per_domain": each, "num_query": each}}


def find_jobs(
    runs: list[Path],
    methods: list[str],
    changes: Changes,
    settings: Sequence[Setting] = (OWN,),
    other_data: bool = False,
) -> tuple[list[Job], list[str]]:
    """One job for each run, method that can be tested on it and setting; those of equal programs are neighbours.

    Runs that cannot be tested become faults of one line; a single one is an error. With `other_data`, runs are tested on
    other data than they were trained on too.
    """
    for name in methods:
        if name not in METHODS and name != "all":
            raise UserError(f"--methods={brief(name, 30)}: no such method; choose from all, {', '.join(METHODS)}")
    jobs: list[Job] = []
    faults, stores = [], {}
    for run in runs:
        try:
            jobs += _jobs_of(run, methods, changes, settings, stores, other_data)
        except Exception as e:  # whatever a folder that somebody sent may hold
            if len(runs) == 1:
                raise
            faults.append(f"{run}: {in_one_line(e)}")
    order = {label: i for i, label in reversed(list(enumerate(job.label for job in jobs)))}  # as first met
    return sorted(jobs, key=lambda job: (list(METHODS).index(job.config["method"]), order[job.label])), faults


def _jobs_of(
    run: Path,
    methods: list[str],
    changes: Changes,
    settings: Sequence[Setting],
    stores: dict[str, DomainStore],
    other_data: bool,
) -> Iterator[Job]:
    stored = read_config(run)
    own, data = stored["method"], json.dumps([stored["benchmark"], stored["data"]])
    if data not in stores:
        stores[data] = open_data(stored, cli.DATA_DIR.value)
    record = read_record(run)
    marks = check_data(run, record, stores[data], other_data)
    for name in METHODS if "all" in methods else methods or [own]:
        method = build_method(changed({**stored, "method": name}, changes), stores[data])
        if (method.trains_as or name) != own:
            continue
        for wanted in settings:
            if wanted.changes and method.feed_forward:
                continue  # nothing to fine-tune
            config = reshaped(changed({**stored, "method": name}, [*changes, *wanted.changes]), wanted.name)
            label = ",".join([name, *("=".join(change) for change in changes), *filter(None, [wanted.name])])
            folder = run if label == own else run / label
            yield Job(run, folder, label, config, record, marks, wanted.name)


def in_one_line(error: Exception) -> str:
    """A fault that does not stop the others, in a line."""
    if isinstance(error, UserError):
        return str(error)
    return system_fault(error) if isinstance(error, OSError) else f"{type(error).__name__}: {reason(error)}"


def changed(config: Config, changes: Changes) -> Config:
    """The config with --config.field=value pairs applied."""
    fields = ConfigDict(config, convert_dict=True)
    for name, text in changes:
        cli.override(fields, name, text)
    return fields.to_dict()


def find_runs(patterns: Sequence[str]) -> list[Path]:
    """Directories that match and hold a config.json."""
    found: list[Path] = []
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
        found += [run for run in runs if run not in found]
        del rest[:count]
    return found


def _matching(pattern: str) -> list[Path]:
    """What a pattern matches. As far as it names what exists it is taken as it stands: names may have brackets too."""
    literal, parts = "", list(Path(pattern).parts or [pattern])
    while parts and os.path.exists(os.path.join(literal, parts[0])):
        literal = os.path.join(literal, parts.pop(0))
    return [Path(p) for p in sorted(glob.glob(os.path.join(glob.escape(literal), *parts)))]


def restore_best(job: Job, experiment: Experiment) -> tuple[Variables, dict[str, Any]]:
    """The variables that validated best, and what is known of them: from a run's best/, or from a model's files."""
    like = jax.eval_shape(experiment.method.init, jax.random.key(0), experiment.example)
    found = checkpoints.restore(job.run / "best", like)
    if found is None and artefact.is_model(job.run):
        found = artefact.read_model(job.run, like)
    if found is None:
        raise UserError(f"{job.run}: no checkpoint in best/; train it: python -m launch.train ... --workdir={job.run}")
    return found


def reached_step(job: Job) -> int:
    """The newest step of the run's training that can be seen from here."""
    found = [step for name in ("last", "best") for step in checkpoints.steps(job.run / name)]
    model = job.run / "model"
    if artefact.is_model(model) and not manifest.find_fault(model, [artefact.CONFIG]):
        found.append(read_record(model).reached_step)
    return max([job.record.reached_step, *found])


def stored_scores(workdir: Path, row: dict[str, Any]) -> np.ndarray:
    """Scores [tasks] from the stored predictions."""
    with np.load(workdir / "predictions.npz", allow_pickle=False) as stored:
        return metrics.scores(row["metric"], stored["predictions"], stored["labels"])


def training_minutes(workdir: Path) -> float | None:
    """From the start of the training to its last validation, over all resumptions; None where no metrics came along."""
    path = workdir / "metrics.jsonl"
    if not path.exists():
        return None
    return max((line.get("seconds", 0.0) for line in read_lines(path)), default=0.0) / 60
