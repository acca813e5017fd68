"""What a run was made from: its config, its data and its machine, written when it begins and compared ever after.

config.json is the resolved config. manifest.json beside it holds its hash, the data's identity and the machine's threads. So
a config that rotted, and data that were prepared anew under the same name, are noticed before a number comes of them.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from configs import common
from cxda_jax import __version__, backend, checkpoints, files, manifest
from cxda_jax.data.store import DomainStore
from cxda_jax.experiment import BENCHMARKS, METHODS, Config, lookup
from cxda_jax.reading import read_object, require
from cxda_jax.types import UserError, brief

OTHER_DATA = flags.DEFINE_bool(
    "other_data", False, "The data differ from those that the run was trained on, and are meant to; results are marked."
)

CONFIG = "config.json"
TRAIN_AGAIN = "restore it or train again"
MARK = "other data than trained on"


class Record(NamedTuple):
    """What manifest.json says of a run, or of a model's plain files."""

    data_name: str
    data_hash: str
    machine: str
    threads: int
    package: str
    marks: tuple[str, ...] = ()  # what sets its training apart from that of its config on its data
    steps: int = 0  # of a model's files: those asked for, and the one that its training reached
    reached_step: int = 0


_FIELDS = {"data_name": str, "data_hash": str, "machine": str, "threads": int, "package": str, "marks": list, "steps": int,
           "reached_step": int}  # fmt: skip


def new_record(store: DomainStore) -> Record:
    return Record(store.info.name, store.sha256, backend.machine(), backend.threads(), __version__)


def claim(
    workdir: Path, config: Config, store: DomainStore, other_data: bool = False, log: Callable[[str], None] = print
) -> Record:
    """Writes a new run's config and record. Those of an old one must agree; with `other_data` the data may differ.

    A run that has saved nothing yet, since its first step failed, may be begun anew with another config.
    """
    saved = any((workdir / "last").glob("*")) or (workdir / "model").exists()
    if saved and not (workdir / CONFIG).exists():
        raise UserError(
            f"--workdir={workdir}: holds checkpoints without a {CONFIG}; restore it, or choose another folder"
        )
    if not saved:
        record = new_record(store)
        _write(workdir, config, record)
        return record
    check_config(workdir, config)
    record, now = read_record(workdir), new_record(store)
    if record.data_hash != now.data_hash:
        check_data(workdir, record, store, other_data)
        step = max(checkpoints.steps(workdir / "last"), default=0)
        record = now._replace(marks=(*record.marks, f"trained on other data before step {step}"))
        _write(workdir, config, record)
    for what, before, here in (
        ("threads", record.threads, now.threads),
        ("processor", record.machine, now.machine),
    ):
        if before != here:
            log(
                f"warning: the run began with {what} {before}, here: {here}; its last bits will not be those of one machine"
            )
    return record


def _write(workdir: Path, config: Config, record: Record) -> None:
    """The manifest first: a config.json is never there without what proves it."""
    text = json.dumps(config, indent=1) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    manifest.write(workdir, [CONFIG], known={CONFIG: digest}, about=record._asdict())
    files.write_text(workdir / CONFIG, text)


def check_config(workdir: Path, config: Config) -> None:
    for field, (old, new) in differences(read_config(workdir), config).items():
        raise UserError(
            f"--workdir={workdir} holds a run with {field}={old!r}, not {new!r}; choose another --workdir or delete it"
        )


def check_data(run: Path, record: Record, store: DomainStore, other_data: bool = False) -> tuple[str, ...]:
    """The marks of results of the run on this store. Raises a UserError for other data that are not meant."""
    if record.data_hash == store.sha256:
        return record.marks
    if not other_data:
        raise UserError(
            f"{run}: trained on the data {brief(record.data_name, 30)} {record.data_hash[:12]}, those here are "
            f"{brief(store.info.name, 30)} {store.sha256[:12]}; bring them back, or add --other_data if you mean these"
        )
    return (*record.marks, MARK)


def read_record(run: Path) -> Record:
    """What the manifest of a run, or of a model's files, says; with a config.json that it proves."""
    fault = manifest.find_fault(run, [CONFIG])
    if fault:
        raise UserError(f"{run}: {fault}; {TRAIN_AGAIN}")
    about = manifest.read_about(run)
    require(about, _FIELDS, f"{run}/{manifest.NAME}: about", "it is of another version; train again")
    return Record(**{**{name: about[name] for name in _FIELDS}, "marks": tuple(about["marks"])})


def read_config(run: Path) -> Config:
    """The run's config, proven by its manifest, with the very fields that this version has."""
    path = run / CONFIG
    stored = read_object(path, TRAIN_AGAIN)
    require(stored, {"method": str, "benchmark": str, "seed": int, "data": dict}, f"{path}", TRAIN_AGAIN)
    lookup(f"{path}: method", stored["method"], METHODS)
    lookup(f"{path}: benchmark", stored["benchmark"], BENCHMARKS)
    check_fields(stored, common.default().to_dict(), f"{path}: config")
    read_record(run)
    return stored


def check_fields(config: Config, defaults: Config, where: str) -> None:
    """Raises a UserError unless `config` has the fields of `defaults`, and no others, each of its default's kind.

    The fields of `data` are each benchmark's own.
    """
    for name in config:
        if name not in defaults and not where.endswith(": config.data"):
            raise UserError(f"{where}.{brief(name, 40)}: this version has no such field; {TRAIN_AGAIN}")
    for name, default in defaults.items():
        at = f"{where}.{name}"
        if name not in config:
            raise UserError(f"{at}: missing, though this version has that field; {TRAIN_AGAIN}")
        if not _fits(config[name], default):
            like = "a group of fields" if isinstance(default, dict) else f"{default!r} or the like"
            raise UserError(f"{at}={brief(repr(config[name]), 40)}: expected {like}; {TRAIN_AGAIN}")
        if isinstance(default, dict):
            check_fields(config[name], default, at)


def _fits(value: Any, default: Any) -> bool:
    """Whether a value that JSON has held is of the default's kind."""
    if isinstance(default, tuple):
        return isinstance(value, list | tuple) and all(type(v) is type(default[0]) for v in value)
    return type(value) in (int, float) if isinstance(default, float) else type(value) is type(default)


def differences(a: Config, b: Config, prefix: str = "config.") -> dict[str, tuple]:
    """Dotted fields in which two configs differ."""
    found = {}
    for k in sorted({*a, *b}):
        x, y = a.get(k), b.get(k)
        if isinstance(x, dict) and isinstance(y, dict):
            found |= differences(x, y, f"{prefix}{k}.")
        elif x != y:
            found[prefix + k] = (x, y)
    return found
