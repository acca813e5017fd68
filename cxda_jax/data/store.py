"""DomainStore: a data set as flat arrays on disk, sorted by domain, with hashes.

    <path>/images.u8     raw uint8, [rows, height, width, channels]
    <path>/labels.i32    raw little-endian int32, [rows]
    <path>/store.json    names, splits, sizes, normalisation, SHA-256 of the two files above and of itself

Images stay on disk behind a memory map. A store appears under its final name only when it is whole: it is written to a
sibling folder and renamed, so a killed or concurrent writer leaves nothing that could be mistaken for a finished one.
"""

import contextlib
import glob
import hashlib
import itertools
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cxda_jax.reading import NUMBER, read_object, require
from cxda_jax.types import UserError, brief

FORMAT = 1
SPLITS = ("train", "val", "test")
AGAIN = "delete the folder and prepare it again"
# Of store.json.
FIELDS = {"name": str, "class_names": list, "mean": list, "std": list, "shape": list, "domains": list, "sha256": dict}
IDENTITY = ("class_names", "mean", "std", "shape", "domains")
OPTIONAL = {"metric": str, "provenance": str, "marks": list}
ABANDONED = 3600.0  # seconds without a write after which an unfinished store belongs to nobody


class Domain(NamedTuple):
    """One domain, or the next piece of it, on its way into a store: images uint8 [n, h, w, c], labels integers [n]."""

    name: str
    split: str
    images: np.ndarray
    labels: np.ndarray


class StoreInfo(NamedTuple):
    """What a data set says of itself; pixels / 255 are normalised as (x - mean) / std, per channel."""

    name: str
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    metric: str = "accuracy"
    provenance: str = ""
    marks: tuple[str, ...] = ()  # what sets it apart from the published data, such as "regenerated"; results carry it


class DomainStore(NamedTuple):
    """An opened store. Domain d owns the rows offsets[d]:offsets[d + 1]."""

    info: StoreInfo
    images: np.ndarray  # uint8 memory map [rows, h, w, c]
    labels: np.ndarray  # int32 [rows]
    offsets: np.ndarray  # int64 [domains + 1]
    split: tuple[str, ...]  # per domain
    domain_names: tuple[str, ...]
    sha256: str  # of images, labels, classes, normalisation, metric and splits: the data's identity

    @property
    def num_classes(self) -> int:
        return len(self.info.class_names)

    def domains(self, split: str) -> np.ndarray:
        """Ids of the domains of a split, ascending."""
        return np.flatnonzero([s == split for s in self.split])

    def row_domains(self) -> np.ndarray:
        """The domain of each row, int32 [rows]."""
        return np.repeat(np.arange(len(self.split), dtype=np.int32), np.diff(self.offsets))


def write_store(path: str | os.PathLike, info: StoreInfo | Callable[[], StoreInfo], domains: Iterable[Domain]) -> None:
    """Streams domains into a new store at `path`; neighbours of equal name and split become one domain.

    `info` may be a function: of what it says, the classes count before the domains are read, and the rest afterwards.

    If another process finished the same store first, its copy stays.
    """
    path, tell = Path(path), info if callable(info) else lambda: info
    classes = len(tell().class_names)
    path.parent.mkdir(parents=True, exist_ok=True)
    drop_abandoned(path)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.partial-", dir=path.parent))
    try:
        entries, labels, shape, digest = [], [], None, hashlib.sha256()
        with open(partial / "images.u8", "wb") as file:
            for domain in domains:
                shape = domain.images.shape[1:] if shape is None else shape
                _check(domain, shape, classes)
                data = np.ascontiguousarray(domain.images).data
                file.write(data)
                digest.update(data)
                labels.append(np.asarray(domain.labels, "<i4"))
                if not entries or (domain.name, domain.split) != (entries[-1]["name"], entries[-1]["split"]):
                    entries.append({"name": domain.name, "split": domain.split, "rows": 0})
                entries[-1]["rows"] += len(domain.labels)
        if shape is None:
            raise UserError(f"{path}: no domains to store; check where the raw files lie")
        all_labels = np.concatenate(labels)
        all_labels.tofile(partial / "labels.i32")
        hashes = {"images": digest.hexdigest(), "labels": hashlib.sha256(all_labels.tobytes()).hexdigest()}
        card = {"format": FORMAT, **tell()._asdict(), "shape": list(shape), "domains": entries, "sha256": hashes}
        fault = _fault_in(card)  # which open_store would refuse
        if fault:
            raise UserError(f"{path}: {fault}; nothing was written")
        hashes["card"] = _card_hash(card)
        (partial / "store.json").write_text(json.dumps(card, indent=1))
        try:
            partial.rename(path)
        except OSError:
            if not (path / "store.json").exists():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def drop_abandoned(path: Path) -> None:
    """Deletes what killed writers left; a living one writes more often than this."""
    for partial in path.parent.glob(f".{glob.escape(path.name)}.partial-*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - max(f.stat().st_mtime for f in (partial, *partial.iterdir())) > ABANDONED:
                shutil.rmtree(partial, ignore_errors=True)


def _check(domain: Domain, shape: tuple[int, ...], num_classes: int) -> None:
    name, labels = brief(domain.name), np.asarray(domain.labels)
    if domain.split not in SPLITS:
        raise UserError(f"domain {name}: split {brief(repr(domain.split))} is not one of {', '.join(SPLITS)}")
    if domain.images.dtype != np.uint8 or domain.images.shape[1:] != shape or len(shape) != 3 or 0 in shape:
        raise UserError(
            f"domain {name}: images are {domain.images.dtype} {domain.images.shape}, expected uint8 (n, *{shape})"
        )
    if labels.ndim != 1 or (labels.size and labels.dtype.kind not in "iu"):
        raise UserError(f"domain {name}: labels are {labels.dtype} {labels.shape}, expected integers (n,)")
    if len(domain.images) != len(labels):
        raise UserError(f"domain {name}: {len(domain.images)} images but {len(labels)} labels")
    if len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
        raise UserError(f"domain {name}: a label lies outside 0..{num_classes - 1}")


def open_store(path: str | os.PathLike, verify: bool = True) -> DomainStore:
    """Opens a store; with `verify`, its bytes are compared with the recorded SHA-256 (about a second per gigabyte)."""
    path = Path(path)
    card = _read_card(path)
    rows = sum(d["rows"] for d in card["domains"])
    for name, size in {"images.u8": rows * math.prod(card["shape"]), "labels.i32": 4 * rows}.items():
        actual = (path / name).stat().st_size if (path / name).exists() else 0
        if actual != size:
            raise UserError(f"{path}/{name}: {actual} bytes, expected {size}; {AGAIN}")
    images = np.memmap(path / "images.u8", np.uint8, "r", shape=(rows, *card["shape"]))
    labels = np.fromfile(path / "labels.i32", "<i4")
    for name, file in {"images": "images.u8", "labels": "labels.i32"}.items() if verify else ():
        with open(path / file, "rb") as opened:  # read, not mapped: it may be larger than the memory
            if hashlib.file_digest(opened, "sha256").hexdigest() != card["sha256"][name]:
                raise UserError(f"{path}: {name} differ from their recorded hash; {AGAIN}")
    if not 0 <= labels.min() <= labels.max() < len(card["class_names"]):
        found = f"labels in {labels.min()}..{labels.max()}, but {len(card['class_names'])} classes in store.json"
        raise UserError(f"{path}/labels.i32: {found}; {AGAIN}")
    if verify and card["sha256"].get("card", "") not in ("", _card_hash(card)):  # older stores have none
        raise UserError(f"{path}/store.json differs from its recorded hash; {AGAIN}")
    told = {k: card[k] for k in StoreInfo._fields if k in card}
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in told.items()}
    return DomainStore(
        info=StoreInfo(**fields),
        images=images,
        labels=labels,
        offsets=np.cumsum([0] + [d["rows"] for d in card["domains"]]),
        split=tuple(d["split"] for d in card["domains"]),
        domain_names=tuple(d["name"] for d in card["domains"]),
        sha256=_identity(card),
    )


def _identity(card: dict[str, Any]) -> str:
    """Of all that a result follows from: what a store is called, and where it came from, may differ."""
    told = {
        **{name: card.get(name) for name in IDENTITY},
        "metric": card.get("metric", StoreInfo._field_defaults["metric"]),
    }
    hashes = [card["sha256"][name] for name in ("images", "labels")]
    return hashlib.sha256(json.dumps([hashes, told], sort_keys=True).encode()).hexdigest()


def _card_hash(card: dict[str, Any]) -> str:
    """Of what store.json says, but for this hash."""
    hashes = {name: digest for name, digest in card["sha256"].items() if name != "card"}
    return hashlib.sha256(json.dumps({**card, "sha256": hashes}, sort_keys=True).encode()).hexdigest()


def _read_card(path: Path) -> dict[str, Any]:
    """What store.json says, with all that the rest relies on."""
    file = path / "store.json"
    if not os.path.exists(file):
        raise UserError(f"{path}: not a data store (no store.json); prepare the data set first")
    card = read_object(file, AGAIN)
    if card.get("format") != FORMAT:
        raise UserError(f"{path}: store format {card.get('format')}, this version reads {FORMAT}; prepare it again")
    require(card, FIELDS, f"{file}", AGAIN)
    require(card, {k: kind for k, kind in OPTIONAL.items() if k in card}, f"{file}", AGAIN)
    require(card["sha256"], {"images": str, "labels": str}, f"{file}: sha256", AGAIN)
    for domain in card["domains"]:
        require(domain, {"name": str, "split": str, "rows": int}, f"{file}: domains", AGAIN)
    fault = _fault_in(card)
    if fault:
        raise UserError(f"{file}: {fault}; {AGAIN}")
    return card


def _fault_in(card: dict[str, Any]) -> str:
    shape, names = card["shape"], card["class_names"]
    if len(shape) != 3 or not all(type(n) is int and n > 0 for n in shape):
        return f"shape={brief(repr(shape))} is not a height, a width and channels"
    if not names or not all(isinstance(name, str) for name in names):
        return f"class_names={brief(repr(names))} is not a list of names"
    for field in ("mean", "std"):
        values = card[field]
        if len(values) != shape[2] or not all(isinstance(v, NUMBER) and math.isfinite(v) for v in values):
            return f"{field}={brief(repr(values))} is not one number a channel, of which there are {shape[2]}"
    if 0 in card["std"]:
        return f"std={brief(repr(card['std']))} has a zero"
    for domain in card["domains"]:
        if domain["split"] not in SPLITS:
            return f"split {brief(repr(domain['split']))} is not one of {', '.join(SPLITS)}"
        if domain["rows"] < 0:
            return f"domain {brief(repr(domain['name']))} has {domain['rows']} rows"
    if fault := repeated((domain["name"], domain["split"]) for domain in card["domains"]):
        return fault
    return "" if any(domain["rows"] for domain in card["domains"]) else "its domains have no rows"


def repeated(domains: Iterable[tuple[str, str]]) -> str:
    """What is wrong with domains (name, split), of which neighbours are pieces of one, if one is there twice: training
    on a domain and testing on it would give figures that mean nothing."""
    places: dict[str, str] = {}
    for (name, split), _ in itertools.groupby(domains):
        if name in places:
            where = "twice in " + split if places[name] == split else f"in {places[name]} and in {split}"
            return f"domain {brief(repr(name), 60)} is {where}"
        places[name] = split
    return ""


def cached_store(path: str | os.PathLike, make: Callable[[], tuple[StoreInfo, Iterable[Domain]]]) -> DomainStore:
    """Opens the store at `path`, making it first where there is none. Safe against concurrent first runs."""
    if not (Path(path) / "store.json").exists():
        info, domains = make()
        write_store(path, info, domains)
    return open_store(path)
