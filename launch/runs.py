"""What --runs names on the disk: runs with their configs, weights and scores, and the jobs that test them."""

import glob
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from configs import common
from cxda_jax import artefact, checkpoints, metrics
from cxda_jax.experiment import BENCHMARKS, METHODS, Config, Experiment, build_method, lookup, open_data
from cxda_jax.reading import read_lines, read_object, require
from cxda_jax.types import UserError, Variables, brief
from launch import cli

# Groups whose fields all go to the code that takes them.
WHOLE = tuple(f".{name}" for name in (
    "attention", "augment", "batch_norm", "cotta", "episode", "finetune", "optimizer", "sf_ocda", "sla", "strong",
))  # fmt: skip

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
    runs: list[Path], methods: list[str], changes: Changes, settings: Sequence[Setting] = (OWN,)
) -> list[Job]:
    """One job for each run, method that can be tested on it and setting; those of equal programs are neighbours."""
    for name in methods:
        if name not in METHODS and name != "all":
            raise UserError(f"--methods={brief(name, 30)}: no such method; choose from all, {', '.join(METHODS)}")
    jobs, stores = [], {}
    for run in runs:
        stored = read_config(run)
        own = stored["method"]
        data = json.dumps([stored["benchmark"], stored["data"]])
        if data not in stores:
            stores[data] = open_data(stored, cli.DATA_DIR.value)
        for name in METHODS if "all" in methods else methods or [own]:
            method = build_method(changed({**stored, "method": name}, changes), stores[data])
            if (method.trains_as or name) != own:
                continue
            for wanted in settings:
                if wanted.changes and method.feed_forward:
                    continue  # nothing to fine-tune
                config = reshaped(changed({**stored, "method": name}, [*changes, *wanted.changes]), wanted.name)
                label = ",".join([name, *("=".join(change) for change in changes), *filter(None, [wanted.name])])
                jobs.append(Job(run, run if label == own else run / label, label, config, wanted.name))
    order = {label: i for i, label in reversed(list(enumerate(job.label for job in jobs)))}  # as first met
    return sorted(jobs, key=lambda job: (list(METHODS).index(job.config["method"]), order[job.label]))


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


def read_config(workdir: Path) -> Config:
    """The run's config; fields younger than the run have their defaults."""
    path, fix = workdir / "config.json", "restore it or train again"
    stored = read_object(path, fix)
    require(stored, {"method": str, "benchmark": str, "seed": int, "data": dict}, f"{path}", fix)
    lookup(f"{path}: method", stored["method"], METHODS)
    lookup(f"{path}: benchmark", stored["benchmark"], BENCHMARKS)
    defaults = common.default().to_dict()
    check_kinds(stored, defaults, f"{path}: config", fix)
    return with_defaults(stored, defaults)


def check_kinds(config: Config, defaults: Config, where: str, fix: str) -> None:
    """Raises a UserError unless each field of `config` that has a default is of the default's kind."""
    unknown = [name for name in config if name not in defaults] if where.endswith(WHOLE) else []
    if unknown:
        raise UserError(f"{where}.{brief(unknown[0], 40)}: this version has no such field; {fix}")
    for name, default in defaults.items():
        value, at = config.get(name, default), f"{where}.{name}"
        if not _fits(value, default):
            like = "a group of fields" if isinstance(default, dict) else f"{default!r} or the like"
            raise UserError(f"{at}={brief(repr(value), 40)}: expected {like}; {fix}")
        if isinstance(default, dict):
            check_kinds(value, default, at, fix)


def _fits(value: Any, default: Any) -> bool:
    """Whether a value that JSON has held is of the default's kind."""
    if isinstance(default, tuple):
        return isinstance(value, list | tuple) and all(type(v) is type(default[0]) for v in value)
    return type(value) in (int, float) if isinstance(default, float) else type(value) is type(default)


def with_defaults(config: Config, defaults: Config) -> dict[str, Any]:
    return {**defaults, **config} | {
        k: with_defaults(config.get(k, {}), v) for k, v in defaults.items() if isinstance(v, dict)
    }


def restore_best(job: Job, experiment: Experiment) -> tuple[Variables, dict[str, Any]]:
    """The variables that validated best, and what is known of them: from a run's best/, or from a model's files."""
    like = jax.eval_shape(experiment.method.init, jax.random.key(0), experiment.example)
    found = checkpoints.restore(job.run / "best", like)
    if found is None and artefact.is_model(job.run):
        found = artefact.read_model(job.run, like)
    if found is None:
        raise UserError(f"{job.run}: no checkpoint in best/; train it: python -m launch.train ... --workdir={job.run}")
    return found


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
