"""DomainStore: a data set as flat arrays on disk, sorted by domain, with hashes.

    <path>/images.u8     raw uint8, [rows, height, width, channels]
    <path>/labels.i32    raw little-endian int32, [rows]
    <path>/store.json    names, splits, sizes, normalisation, SHA-256 of the two files above and of itself

Images stay on disk behind a memory map. A store is written into a folder beside its final place, which is
renamed when it is whole. So a writer that is killed, or that runs at the same time as another, leaves
nothing that looks like a finished store.
"""

import contextlib
import errno
import glob
import hashlib
import itertools
import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cxda_jax.disk import files
from cxda_jax.disk.kinds import NUMBER
from cxda_jax.disk.reading import read_object, reason
from cxda_jax.errors import UserError, brief
from cxda_jax.types import Inputs

FORMAT = 1
SPLITS = ("train", "val", "test")
AGAIN = "delete the folder and prepare it again"
# How an image of another form is brought to that of the data, and the word for it.
FITS = {"squash": "squashed", "crop": "cropped in the middle", "pad": "padded"}
# The fields of store.json of which, with the metric, the data's identity is made: results depend on them.
IDENTITY = ("class_names", "mean", "std", "shape", "domains")
METRICS = ("accuracy", "macro_f1")  # what may score the tasks of a data set
LARGEST = 2**16  # pixels of an image's side


class Domain(NamedTuple):
    """One domain, or its next piece, that goes into a store: images uint8 [n, h, w, c], labels integers [n]."""

    name: str
    split: str
    images: np.ndarray
    labels: np.ndarray


class StoreInfo(NamedTuple):
    """Facts about a data set. The network sees (pixels / 255 - mean) / std, channel by channel.

    `fit` and `background` say how an image from elsewhere, of any size, becomes one like those of the data.
    """

    name: str
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    metric: str = "accuracy"
    provenance: str = ""
    marks: tuple[str, ...] = ()  # differences from the published data, such as "regenerated"; results repeat them
    licence: str = ""
    fit: str = "squash"  # a key of FITS
    background: tuple[int, int, int] = (255, 255, 255)  # what lies under transparency, and what padding is; RGB


class DomainStore(NamedTuple):
    """An opened store. Domain d owns the rows offsets[d]:offsets[d + 1]."""

    info: StoreInfo
    images: np.ndarray  # uint8 memory map [rows, h, w, c]
    labels: np.ndarray  # int32 [rows]
    offsets: np.ndarray  # int64 [domains + 1]
    split: tuple[str, ...]  # per domain
    domain_names: tuple[str, ...]
    sha256: str  # the data's identity: of images, labels, classes, normalisation, metric, domains and splits

    @property
    def num_classes(self) -> int:
        return len(self.info.class_names)

    @property
    def inputs(self) -> Inputs:
        """Its images, as a network must know them."""
        height, width, channels = self.images.shape[1:]
        return Inputs(self.info.name, (height, width, channels), self.num_classes, self.info.mean, self.info.std)

    def domains(self, split: str) -> np.ndarray:
        """Ids of the domains of a split, ascending."""
        return np.flatnonzero([s == split for s in self.split])

    def row_domains(self) -> np.ndarray:
        """The domain of each row, int32 [rows]."""
        return np.repeat(np.arange(len(self.split), dtype=np.int32), np.diff(self.offsets))


def write_store(path: str | os.PathLike, info: StoreInfo | Callable[[], StoreInfo], domains: Iterable[Domain]) -> None:
    """Streams domains into a new store at `path`. If another process finished the same store first, its copy stays.

    Args:
        info: Or a function that returns it. Its classes are used before the domains are read, all else afterwards.
        domains: Neighbours of equal name and split become one domain.
    """
    path, get_info = Path(path), info if callable(info) else lambda: info
    classes = len(get_info().class_names)
    with written_whole(path, proof="store.json") as folder:
        entries, labels, shape, digest = [], [], None, hashlib.sha256()
        with open(folder / "images.u8", "wb") as file:
            for domain in domains:
                shape = domain.images.shape[1:] if shape is None else shape
                _refuse_bad(domain, shape, classes)
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
        all_labels.tofile(folder / "labels.i32")
        hashes = {"images": digest.hexdigest(), "labels": hashlib.sha256(all_labels.tobytes()).hexdigest()}
        card = {"format": FORMAT, **get_info()._asdict(), "shape": list(shape), "domains": entries, "sha256": hashes}
        if fault := _fault_in(card):  # open_store would refuse it
            raise UserError(f"{path}: {fault}; nothing was written")
        (folder / "store.json").write_text(json.dumps(files.sealed(card), indent=1))


@contextlib.contextmanager
def written_whole(target: Path, proof: str = "", choose: Callable[[Path], Path] = lambda made: made) -> Iterator[Path]:
    """Yields a new folder beside `target`. At the end, the folder or the one
    that choose() takes in it becomes `target`.

    Nothing stays after an error. If another process made `target`, with the file `proof` in it, first, its copy stays.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    files.delete_abandoned(target.parent.glob(f".{glob.escape(target.name)}.partial-*"))
    partial = target.with_name(f".{target.name}.partial-{uuid.uuid4().hex[:8]}")
    partial.mkdir()
    try:
        yield partial
        try:
            choose(partial).rename(target)
        except OSError:
            if not (target / proof).exists():
                raise
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            e.filename = str(target)  # which such an error does not name
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _refuse_bad(domain: Domain, shape: tuple[int, ...], num_classes: int) -> None:
    name, images, labels = brief(domain.name), domain.images, np.asarray(domain.labels)
    whole = labels.ndim == 1 and (not labels.size or labels.dtype.kind in "iu")
    fits = images.dtype == np.uint8 and images.shape == (*labels.shape, *shape) and len(shape) == 3 and 0 not in shape
    if not whole or not fits:
        what = f"images {images.dtype} {images.shape} and labels {labels.dtype} {labels.shape}"
        raise UserError(f"domain {name}: {what}, expected uint8 (n, *{shape}) and integers (n,)")
    if len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
        raise UserError(f"domain {name}: a label lies outside 0..{num_classes - 1}")


def open_store(path: str | os.PathLike) -> DomainStore:
    """Opens a store. Its bytes are compared with their recorded SHA-256, which takes about a second per gigabyte."""
    path = Path(path)
    if not os.path.exists(file := path / "store.json"):
        raise UserError(f"{path}: not a data store (no store.json); prepare the data set first")
    card = read_object(file, AGAIN)
    if card.get("format") != FORMAT:
        raise UserError(f"{path}: store format {card.get('format')}, this version reads {FORMAT}; prepare it again")
    try:
        return _opened(path, card)
    except UserError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as e:  # with a seal, it was made so on purpose
        raise UserError(f"{file}: not understood ({reason(e)}); {AGAIN}") from None


def _opened(path: Path, card: dict[str, Any]) -> DomainStore:
    if "card" in card["sha256"]:  # where older versions kept the same seal; the oldest wrote none
        card[files.SEAL] = card["sha256"].pop("card")
    if files.is_falsified(card):
        raise UserError(f"{path}/store.json differs from its recorded hash; {AGAIN}")
    if fault := _fault_in(card):
        raise UserError(f"{path}/store.json: {fault}; {AGAIN}")
    rows = sum(d["rows"] for d in card["domains"])
    for file, size in {"images.u8": rows * math.prod(card["shape"]), "labels.i32": 4 * rows}.items():
        actual = (path / file).stat().st_size if (path / file).exists() else 0
        if actual != size:
            raise UserError(f"{path}/{file}: {actual} bytes, expected {size}; {AGAIN}")
        if files.hash_file(path / file) != card["sha256"][file.partition(".")[0]]:
            raise UserError(f"{path}/{file} differs from its recorded hash; {AGAIN}")
    about: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in card.items()}
    info = StoreInfo(**{name: about[name] for name in StoreInfo._fields if name in about})
    facts = {name: card[name] for name in IDENTITY} | {"metric": info.metric}
    identity = json.dumps([[card["sha256"]["images"], card["sha256"]["labels"]], facts], sort_keys=True)
    return DomainStore(
        info,
        images=np.memmap(path / "images.u8", np.uint8, "r", shape=(rows, *card["shape"])),
        labels=np.fromfile(path / "labels.i32", "<i4"),
        offsets=np.cumsum([0] + [d["rows"] for d in card["domains"]]),
        split=tuple(d["split"] for d in card["domains"]),
        domain_names=tuple(d["name"] for d in card["domains"]),
        sha256=hashlib.sha256(identity.encode()).hexdigest(),
    )


def fault_of_images(card: Mapping[str, Any]) -> str:
    """The fault in the facts about images in the card of a store or of a model; "" where there is none."""
    shape, names = card["shape"], card["class_names"]
    if len(shape) != 3 or not all(type(n) is int and 0 < n <= LARGEST for n in shape):
        return f"shape={brief(repr(shape))} is not a height, a width and channels"
    if not names or not all(isinstance(name, str) for name in names):
        return f"class_names={brief(repr(names))} is not a list of names"
    for field in ("mean", "std"):
        values = card[field]
        if len(values) != shape[2] or not all(type(v) in NUMBER and math.isfinite(v) for v in values):
            return f"{field}={brief(repr(values))} is not one number a channel, of which there are {shape[2]}"
    if 0 in card["std"]:  # one below 0 turns dark into bright
        return f"std={brief(repr(card['std']))} has a zero"
    if "fit" in card and card["fit"] not in FITS:
        return f"fit={brief(repr(card['fit']))} is not one of {', '.join(FITS)}"
    colour = card.get("background", (0, 0, 0))  # a store of an older version has none
    if len(colour) != 3 or not all(type(n) is int and 0 <= n <= 255 for n in colour):
        return f"background={brief(repr(colour))} is not three whole numbers in 0..255"
    return ""


def _fault_in(card: Mapping[str, Any]) -> str:
    if fault := fault_of_images(card):
        return fault
    if card.get("metric", StoreInfo._field_defaults["metric"]) not in METRICS:
        return f"metric={brief(repr(card['metric']))} is not one of {', '.join(METRICS)}"
    for domain in card["domains"]:
        if domain["split"] not in SPLITS:
            return f"split {brief(repr(domain['split']))} is not one of {', '.join(SPLITS)}"
        if domain["rows"] < 0:
            return f"domain {brief(repr(domain['name']))} has {domain['rows']} rows"
    if not any(domain["rows"] for domain in card["domains"]):
        return "its domains have no rows"
    return repeated((domain["name"], domain["split"]) for domain in card["domains"])


def repeated(domains: Iterable[tuple[str, str]]) -> str:
    """Names a domain that is in two places, by (name, split) of all pieces, of which equal neighbours are in one:
    results of training and testing on it would mean nothing."""
    places: dict[str, str] = {}
    for (name, split), _ in itertools.groupby(domains):
        if name in places:
            where = "twice in " + split if places[name] == split else f"in {places[name]} and in {split}"
            return f"domain {brief(repr(name), 60)} is {where}"
        places[name] = split
    return ""


def cached_store(path: str | os.PathLike, make: Callable[[], tuple[StoreInfo, Iterable[Domain]]]) -> DomainStore:
    """Opens the store at `path`. Makes it first if there is none; several processes may do so at once."""
    if not (Path(path) / "store.json").exists():
        write_store(path, *make())
    return open_store(path)
