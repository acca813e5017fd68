"""The origin of a run: its config, its data and its machine. It is written when the run begins and compared later.

config.json is the resolved config. manifest.json beside it holds the config's hash, the identity of the data, and the
processor and threads. So a damaged config, and other data of the same name, are noticed before they give a number.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cxda_jax import __version__
from cxda_jax.config.fields import Config, lookup
from cxda_jax.config.reading import check_stored
from cxda_jax.config.registry import METHODS
from cxda_jax.data.store import DomainStore
from cxda_jax.disk import checkpoints, files, manifest
from cxda_jax.disk.kinds import require
from cxda_jax.disk.reading import read_object
from cxda_jax.errors import UserError, brief
from cxda_jax.machine import backend, mesh
from cxda_jax.training.experiment import BENCHMARKS

CONFIG = "config.json"
TRAIN_AGAIN = "restore it or train again"
MARK = "other data than trained on"


class Record(NamedTuple):
    """The facts in the manifest of a run, or of a model."""

    data_name: str
    data_hash: str
    machine: str
    threads: int
    package: str
    marks: tuple[str, ...] = ()  # how its training differs from one of its config on its data
    steps: int = 0  # of a model: the steps asked for, and below the step that the training reached
    reached_step: int = 0


def insist_on_agreement(facts: Mapping[str, Any]) -> None:
    """Raises a UserError in all processes unless each of them was started with the facts of the first one."""
    if mesh.processes() == 1:
        return
    own = json.loads(json.dumps(facts))
    differing = differences(mesh.from_first(lambda: own), own, "")
    which = int(mesh.largest(np.array(mesh.process() if differing else 0)))
    fix = "start all processes with the same command, package and data"
    for name, (first, here) in differing.items():
        values = f"{brief(repr(here), 30)} in process {mesh.process()}, {brief(repr(first), 30)} in process 0"
        raise UserError(f"{name}: {values}; {fix}")
    if which:
        raise UserError(f"process {which} was started with other facts than process 0, and says with which; {fix}")


def differences(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "config.") -> dict[str, tuple[Any, Any]]:
    """Dotted fields in which two configs differ, with both values."""
    differing = {}
    for name in sorted({*a, *b}):
        x, y = a.get(name), b.get(name)
        if isinstance(x, dict) and isinstance(y, dict):
            differing |= differences(x, y, f"{prefix}{name}.")
        elif x != y:
            differing[prefix + name] = (x, y)
    return differing


def claim(
    workdir: Path, config: Config, store: DomainStore, other_data: bool = False, log: Callable[[str], None] = print
) -> Record:
    """Writes the config and the record of a new run, or compares those of a run that goes on, and returns the record.

    A run that has saved nothing yet may begin again with another config. With `other_data` a run may go on with other
    data than it began with; the record is marked. `log` is called with warnings.
    """
    now = Record(store.info.name, store.sha256, backend.machine(), backend.threads(), __version__)
    if not any((workdir / "last").glob("*")) and not (workdir / "model").exists():
        if (workdir / CONFIG).exists() and manifest.find_fault(workdir, [CONFIG]):
            raise UserError(f"--workdir={workdir}: holds a {CONFIG} that no training wrote; choose another folder")
        _write(workdir, config, now)
        return now
    if not (workdir / CONFIG).exists():
        raise UserError(
            f"--workdir={workdir}: holds checkpoints without a {CONFIG}; restore it, or choose another folder"
        )
    check_config(workdir, config)
    record = read_record(workdir)
    if record.data_hash != now.data_hash:
        check_data(workdir, record, store, other_data)
        step = max(checkpoints.steps(workdir / "last"), default=0)
        record = now._replace(marks=(*record.marks, f"trained on other data before step {step}"))
        _write(workdir, config, record)
    for what, before, here in (("threads", record.threads, now.threads), ("processor", record.machine, now.machine)):
        if before != here:
            differing = f"the run began with {what} {before}, here: {here}"
            log(f"warning: {differing}; its last bits will not be those of one machine")
    return record


def _write(workdir: Path, config: Config, record: Record) -> None:
    """Writes the manifest first, so that no config.json is ever without its hash."""
    text = json.dumps(config, indent=1) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    manifest.write(workdir, [CONFIG], known={CONFIG: digest}, about=record._asdict())
    files.write_text(workdir / CONFIG, text)


def check_config(workdir: Path, config: Config) -> None:
    found = differences(read_config(workdir), config)
    for field in sorted(found, key=lambda name: name != "config.method"):  # other fields follow from the method
        old, new = found[field]
        raise UserError(
            f"--workdir={workdir} holds a run with {field}={old!r}, not {new!r}; choose another --workdir or delete it"
        )


def check_data(run: Path, record: Record, store: DomainStore, other_data: bool = False) -> tuple[str, ...]:
    """The marks that results of the run on this store get.

    A UserError for other data, unless `other_data` allows them.
    """
    if record.data_hash == store.sha256:
        return record.marks
    if not other_data:
        raise UserError(
            f"{run}: trained on the data {brief(record.data_name, 30)} {record.data_hash[:12]}, those here are "
            f"{brief(store.info.name, 30)} {store.sha256[:12]}; bring them back, or add --other_data if you mean these"
        )
    return (*record.marks, MARK)


def read_record(run: Path) -> Record:
    """The record in the manifest of a run or a model, once the config beside it has the recorded hash."""
    if fault := manifest.find_fault(run, [CONFIG]):
        raise UserError(f"{run}: {fault}; {TRAIN_AGAIN}")
    about, fields = manifest.read_about(run), Record.__annotations__ | {"marks": list}  # JSON has no tuples
    require(about, fields, f"{run}/{manifest.NAME}: about", "it is of another version; train again")
    return Record(**{name: about[name] for name in fields})._replace(marks=tuple(about["marks"]))


def read_config(run: Path) -> Config:
    """The run's config, once it has the recorded hash and all fields of this version."""
    stored, path = read_object(run / CONFIG, TRAIN_AGAIN), f"{run / CONFIG}"
    require(stored, {"method": str, "benchmark": str, "seed": int, "data": dict}, path, TRAIN_AGAIN)
    lookup(f"{path}: method", stored["method"], METHODS)
    lookup(f"{path}: benchmark", stored["benchmark"], BENCHMARKS)
    config = check_stored(stored, f"{path}: config", TRAIN_AGAIN)
    read_record(run)
    return config
