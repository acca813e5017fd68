"""DomainStore: a data set as flat arrays on disk, sorted by domain, with hashes.

    <path>/images.u8     raw uint8, [rows, height, width, channels]
    <path>/labels.i32    raw little-endian int32, [rows]
    <path>/store.json    names, splits, sizes, normalisation, SHA-256 of the two files above

Images stay on disk behind a memory map. A store appears under its final name only when it is whole: it is written to a
sibling folder and renamed, so a killed or concurrent writer leaves nothing that could be mistaken for a finished one.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cxda_jax.types import UserError

FORMAT = 1
SPLITS = ("train", "val", "test")
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
    sha256: str  # over both files' hashes: the data's identity

    @property
    def num_classes(self) -> int:
        return len(self.info.class_names)

    def domains(self, split: str) -> np.ndarray:
        """Ids of the domains of a split, ascending."""
        return np.flatnonzero([s == split for s in self.split])

    def row_domains(self) -> np.ndarray:
        """The domain of each row, int32 [rows]."""
        return np.repeat(np.arange(len(self.split), dtype=np.int32), np.diff(self.offsets))


def write_store(path: str | os.PathLike, info: StoreInfo, domains: Iterable[Domain]) -> None:
    """Streams domains into a new store at `path`; neighbours of equal name and split become one domain.

    If another process finished the same store first, its copy stays.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _drop_abandoned(path)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.partial-", dir=path.parent))
    try:
        entries, labels, shape, digest = [], [], None, hashlib.sha256()
        with open(partial / "images.u8", "wb") as file:
            for domain in domains:
                shape = domain.images.shape[1:] if shape is None else shape
                _check(domain, shape, len(info.class_names))
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
        card = {"format": FORMAT, **info._asdict(), "shape": list(shape), "domains": entries, "sha256": hashes}
        (partial / "store.json").write_text(json.dumps(card, indent=1))
        try:
            partial.rename(path)
        except OSError:
            if not (path / "store.json").exists():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _drop_abandoned(path: Path) -> None:
    """Deletes what killed writers left; a living one writes more often than this."""
    for partial in path.parent.glob(f".{path.name}.partial-*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - max(f.stat().st_mtime for f in (partial, *partial.iterdir())) > ABANDONED:
                shutil.rmtree(partial, ignore_errors=True)


def _check(domain: Domain, shape: tuple[int, ...], num_classes: int) -> None:
    if domain.split not in SPLITS:
        raise UserError(f"domain {domain.name}: split {domain.split!r} is not one of {', '.join(SPLITS)}")
    if domain.images.dtype != np.uint8 or domain.images.shape[1:] != shape or len(shape) != 3:
        raise UserError(
            f"domain {domain.name}: images are {domain.images.dtype} {domain.images.shape}, expected uint8 (n, *{shape})"
        )
    if len(domain.images) != len(domain.labels):
        raise UserError(f"domain {domain.name}: {len(domain.images)} images but {len(domain.labels)} labels")
    if len(domain.labels) and not 0 <= np.min(domain.labels) <= np.max(domain.labels) < num_classes:
        raise UserError(f"domain {domain.name}: a label lies outside 0..{num_classes - 1}")


def open_store(path: str | os.PathLike, verify: bool = True) -> DomainStore:
    """Opens a store; with `verify`, its bytes are compared with the recorded SHA-256 (about a second per gigabyte)."""
    path = Path(path)
    try:
        card = json.loads((path / "store.json").read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: not a data store (no store.json); prepare the data set first") from None
    except ValueError as e:
        raise UserError(
            f"{path}/store.json: not readable as JSON ({e}); delete the folder and prepare it again"
        ) from None
    if card.get("format") != FORMAT:
        raise UserError(f"{path}: store format {card.get('format')}, this version reads {FORMAT}; prepare it again")
    rows = sum(d["rows"] for d in card["domains"])
    for name, size in {"images.u8": rows * int(np.prod(card["shape"])), "labels.i32": 4 * rows}.items():
        actual = (path / name).stat().st_size if (path / name).exists() else 0
        if actual != size:
            raise UserError(f"{path}/{name}: {actual} bytes, expected {size}; delete the folder and prepare it again")
    images = np.memmap(path / "images.u8", np.uint8, "r", shape=(rows, *card["shape"]))
    labels = np.fromfile(path / "labels.i32", "<i4")
    for name, file in {"images": "images.u8", "labels": "labels.i32"}.items() if verify else ():
        with open(path / file, "rb") as opened:  # read, not mapped: it may be larger than the memory
            if hashlib.file_digest(opened, "sha256").hexdigest() != card["sha256"][name]:
                raise UserError(
                    f"{path}: {name} differ from their recorded hash; delete the folder and prepare it again"
                )
    told = {k: card[k] for k in StoreInfo._fields if k in card}
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in told.items()}
    return DomainStore(
        info=StoreInfo(**fields),
        images=images,
        labels=labels,
        offsets=np.cumsum([0] + [d["rows"] for d in card["domains"]]),
        split=tuple(d["split"] for d in card["domains"]),
        domain_names=tuple(d["name"] for d in card["domains"]),
        sha256=hashlib.sha256((card["sha256"]["images"] + card["sha256"]["labels"]).encode()).hexdigest(),
    )


def cached_store(path: str | os.PathLike, make: Callable[[], tuple[StoreInfo, Iterable[Domain]]]) -> DomainStore:
    """Opens the store at `path`, making it first where there is none. Safe against concurrent first runs."""
    if not (Path(path) / "store.json").exists():
        info, domains = make()
        write_store(path, info, domains)
    return open_store(path)
