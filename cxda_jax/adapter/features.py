"""From images and an encoder to the arrays that fit() takes, batch by batch.

Until the result is whole, OUT.part/ lies beside it: the rows of all images so far, and what they were made of. The
same command goes on from there.
"""

import collections
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cxda_jax.adapter.adapter import Head
from cxda_jax.adapter.encoders import Encoder
from cxda_jax.adapter.own_style import room
from cxda_jax.data.readers.folder import images_and_others, some_of
from cxda_jax.data.readers.images import as_image, as_pixels
from cxda_jax.data.readers.raw import EXTENSIONS
from cxda_jax.disk import files
from cxda_jax.disk.folders import insist_on_writable
from cxda_jax.disk.kinds import Kind, require
from cxda_jax.disk.reading import insist_on_file, read_object, read_table, reason
from cxda_jax.errors import UserError, brief
from cxda_jax.machine import backend, stops
from cxda_jax.machine.progress import Counter, say
from cxda_jax.version import VERSION

ROWS, STATE = "rows.f32", "state.json"
WHITE = (255, 255, 255)
ALONE = " alone, as the graph has no maps of channels, so domains are told apart worse; name maps with --maps"
FAULTS = 20  # lines about images that are left out
_NUMBERS = "iuf"
_ARRAYS = {  # of a file of features; fit() checks the numbers
    "logits": Kind(_NUMBERS, shape=("images", "columns"), absent=True),
    "labels": Kind("iu", shape=("images",)),
    "domains": Kind("biufUS", shape=("images",)),
    "style": Kind(_NUMBERS, shape=("images", "d"), absent=True),
    "features": Kind(_NUMBERS, shape=("images", "width"), absent=True),
    "about": Kind("U", shape=(), absent=True),
    "classes": Kind("U", shape=("columns",), absent=True),
}


class Listing(NamedTuple):
    """Of each image its path below `root`, its domain and its label, which is "" where it is unknown."""

    root: Path
    paths: list[str]
    domains: list[str]
    labels: list[str]
    are_numbers: bool = False  # labels are numbers of columns

    def fingerprint(self) -> str:
        """Another one after any change of names, domains, labels, or of the size or the time of a file."""
        stats = (p.stat() if p.exists() else None for p in (self.root / path for path in self.paths))
        content = [[s and (s.st_size, s.st_mtime_ns) for s in stats], *self[1:]]
        return f"{len(self.paths)} images, {hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]}"


def listed(where: Path) -> Listing:
    """The images of a CSV file, of a folder DOMAIN/CLASS/IMAGE or, where there are none, of DOMAIN/IMAGE."""
    if where.is_file():
        fix = "give a CSV file with the columns path, domain and, where known, label"
        lines = list(read_table(where, ("path", "domain"), fix))
        if lacking := [line for line, row in lines if not (row["path"] and row["domain"])]:
            raise UserError(f"{where}: line {lacking[0]} lacks its path or domain; {fix}")
        labels = [row.get("label") or "" for _, row in lines]
        if are_numbers := all(label.isdecimal() for label in labels if label):
            labels = [str(int(label)) if label else "" for label in labels]
        paths, domains = ([row[column] for _, row in lines] for column in ("path", "domain"))
        found = Listing(where.parent, paths, domains, labels, are_numbers)
    else:
        images, others = images_and_others(where) if where.is_dir() else ([], [])
        if images:
            labels, domains = [p.parent.name for p in images], [p.parent.parent.name for p in images]
        else:
            images = [p for p in others if p.suffix.lower() in EXTENSIONS and p.parent.parent == where]
            others = sorted({*others} - {*images})
            labels, domains = [""] * len(images), [p.parent.name for p in images]
        if images and others:
            say(f"warning: {where}: not read: {some_of(others, where)}")
        found = Listing(where, [str(p.relative_to(where)) for p in images], domains, labels)
    if not found.paths:
        raise UserError("no images; give a folder DOMAIN/CLASS/IMAGE or DOMAIN/IMAGE, or a CSV file", "images", where)
    return found


def read_classes(path: Path) -> list[str]:
    """The lines of a text file, each the name of a column of logits."""
    fix = "give a text file in UTF-8 with a name for each column, one a line"
    insist_on_file(path, fix)
    try:
        names = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"not readable ({reason(e)}); {fix}", "classes", path) from None
    if not names or "" in names or len({*names}) < len(names):
        raise UserError(f"it is empty, or a line is, or two are equal; {fix}", "classes", path)
    return names


def class_numbers(listing: Listing, classes: list[str], columns: int | None) -> tuple[list[str], np.ndarray]:
    """The names of the columns of logits, and the column of each image's label, or -1.

    Without logits, which is None, there is a column for each name, or for each number up to the largest label.
    """
    given = sorted({*listing.labels} - {""})
    if columns is None:
        columns = len(classes) or (max(map(int, given), default=-1) + 1 if listing.are_numbers else len(given))
    names = classes or (given if given and not listing.are_numbers else [str(i) for i in range(columns)])
    if len(names) != columns:
        what = f"{len(names)} are known ({brief(', '.join(names), 40)}), but the logits have {columns} columns"
        raise UserError(f"{what}; give a file that names each column, one a line", "classes")
    numbers = {"": -1} | {name: i for i, name in enumerate(names)}
    if unknown := [label for label in given if label not in numbers]:
        told = f"the label {brief(repr(unknown[0]), 40)} is none of the {columns}"
        raise UserError(told, "classes", fix="mend one of them")
    return names, np.array([numbers[label] for label in listing.labels])


def write_features(listing: Listing, encoder: Encoder, out: Path, fit: str, classes: list[str]) -> None:
    """Writes an .npz file: style, logits and features if there are such, labels, domains, classes, paths and `about`.

    Args:
      fit: how an image that is no square becomes one; see data/store.py.
      classes: names of the columns of logits; if empty, the sorted labels.
    """
    part = out.with_name(f"{out.name}.part")
    about = {"cxda_jax": VERSION, **encoder.about, "fit": fit, "classes": classes, "images": listing.fingerprint()}
    if not is_written(out, about):
        insist_on_writable(part, "out")
        part.mkdir(parents=True, exist_ok=True)
        if "maps" in encoder.about:
            maps = ", ".join(encoder.about["maps"])
            say(f"style: means and deviations of the input{f' and of {maps}' if maps else ALONE}")
        if "mean" in encoder.about:
            mean, std = (", ".join(f"{x:.4g}" for x in encoder.about[name]) for name in ("mean", "std"))
            say(f"pixels: from 0 to 1, then less {mean} and divided by {std} (--mean and --std)")
        with files.locked(part):
            state = _resumed(part, about)
            with stops.deferred() as stopping:
                _encode(listing, encoder, part, state, stopping)
            _finish(listing, out, part, state)
    for path in (part / ROWS, part / STATE, part / files.LOCK, *part.glob(f".cxda-*.{STATE}")):
        path.unlink(missing_ok=True)
    if part.exists() and not any(part.iterdir()):
        part.rmdir()


def is_written(out: Path, about: dict[str, Any]) -> bool:
    """Whether the file is there; a UserError if it was made in another way than `about` says."""
    if out.suffix != ".npz":
        raise UserError("give the name of a file that ends in .npz", "out", out)
    if out.exists():
        _refuse_other(out, _read_about(out), about)
        say(f"{out}: is there already, made of the same images in the same way; left as it is")
    return out.exists()


def _read_about(out: Path) -> dict[str, Any]:
    try:
        insist_on_file(out, "")
        with open(out, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return dict(json.loads(str(arrays["about"])))
    except Exception:  # of all kinds, for what is no .npz file
        what = "not written by this command, so not replaced"
        raise UserError(f"{out}: {what}; choose another name, or move it away") from None


class Labelled(NamedTuple):
    """The arguments of fit(), and how the file says that they were made. Without logits there are features."""

    logits: np.ndarray | None
    labels: np.ndarray
    domains: np.ndarray
    style: Any  # [n, d], or None
    features: np.ndarray | None
    origin: dict[str, Any]


def read_labelled(path: Path, head: Head | None = None, without: bool = False) -> Labelled:
    """A written file's labelled images, or all images of a file without `about`, which was made in another way.

    Args:
      path: of the file.
      head: of an adapter, gives the logits of features without any.
      without: logits may be missing.
    """
    fix = "give what cxda features writes, or arrays of a row for each image"
    insist_on_file(path, fix)
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:  # numpy leaves a broken one open
            arrays = {name: file[name] for name in _ARRAYS if name in file}
    except Exception as e:  # of all kinds, for what is no .npz file
        raise UserError(f"{path}: not readable ({reason(e)}); {fix}") from None
    require(arrays, _ARRAYS, str(path), fix)
    if "logits" not in arrays and "features" in arrays and head:
        arrays["logits"] = head(arrays["features"])
    if "logits" not in arrays and not (without and "features" in arrays):
        told = "add them, or give the file to cxda fit, which learns a head" if "features" in arrays else fix
        raise UserError(f"{path}: no 'logits'; {told}")
    if "style" not in arrays and "features" in arrays:
        raise UserError(f"{path}: no 'style'; {fix}")
    given: dict[str, Any] = {name: arrays.get(name) for name in Labelled._fields[:-1]}
    if "about" not in arrays:
        return Labelled(**given, origin={})
    try:
        origin: Any = json.loads(str(arrays["about"]))
    except (ValueError, RecursionError):
        origin = ""
    require({"about": origin}, {"about": dict}, str(path), fix)
    known = arrays["labels"] >= 0
    if not known.any():
        raise UserError(f"{path}: no image has a label; give cxda features images in DOMAIN/CLASS/")
    origin = {name: value for name, value in origin.items() if name not in ("images", "left_out")}
    if "classes" in arrays:
        origin["classes"] = arrays["classes"].tolist()
    given = {name: x if x is None else x[known] for name, x in given.items()}
    return Labelled(**given, origin=origin)


def _refuse_other(path: Path, found: dict[str, Any], about: dict[str, Any]) -> None:
    for name in [*about, *sorted(found.keys() - about.keys() - {"left_out"})]:
        if found.get(name) != about.get(name):
            was, now = (brief(json.dumps(each.get(name)), 50) for each in (found, about))
            raise UserError(f"{path}: made with {name}={was}, now {now}; choose another --out, or delete it")


def _resumed(part: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The state that an earlier call left, with rows cut to those that it counts, or a new one."""
    path, again = part / STATE, f"delete {part}, and all images are read again"
    new = {"about": about, "next": 0, "widths": {}, "crc32": 0, "left_out": []}
    if not path.exists():
        if others := [p for p in part.iterdir() if p.name != files.LOCK and not p.name.startswith(".cxda-")]:
            raise UserError(f"{others[0]}: not written by this command, so not replaced; move it away")
        files.write_text(path, json.dumps(files.sealed(new)))
    state, crc = read_object(path, again), 0
    if files.SEAL not in state or files.is_falsified(state):
        raise UserError(f"{path}: damaged; {again}")
    if not state["widths"]:  # no row is lost
        state = new
    _refuse_other(part, state["about"], about)
    with open(part / ROWS, "ab+") as file:
        file.truncate(4 * (state["next"] - len(state["left_out"])) * sum(state["widths"].values()))
        file.seek(0)
        for piece in iter(lambda: file.read(2**24), b""):
            crc = zlib.crc32(piece, crc)
    if crc != state["crc32"]:
        raise UserError(f"{part / ROWS}: damaged; {again}")
    if state["next"]:
        say(f"goes on after {state['next']} images")
    return state


def _encode(
    listing: Listing, encoder: Encoder, part: Path, state: dict[str, Any], stopping: Callable[[], bool]
) -> None:
    """Appends the rows of all images that are not in `state` yet, and keeps it up to date, until stopping()."""
    total, count = len(listing.paths), Counter("images", len(listing.paths))

    def read(i: int) -> Any:
        """The pixels of an image, or its fault."""
        try:
            return as_pixels(as_image(listing.root / listing.paths[i]), encoder.shape, state["about"]["fit"], WHITE)
        except UserError as e:
            return str(e)

    def read_ahead() -> Iterator[list[Any]]:
        waiting = collections.deque()
        for start in range(state["next"], total, encoder.batch):
            waiting.append(pool.map(read, range(start, min(start + encoder.batch, total))))
            if len(waiting) == 2:
                yield list(waiting.popleft())
        yield from map(list, waiting)

    with ThreadPoolExecutor(backend.cores()) as pool, open(part / ROWS, "ab") as file:
        for given in read_ahead():
            if stopping():
                return
            read_well = {state["next"] + i: pixels for i, pixels in enumerate(given) if not isinstance(pixels, str)}
            faults = [[state["next"] + i, fault] for i, fault in enumerate(given) if isinstance(fault, str)]
            for _, fault in faults[: max(0, FAULTS - len(state["left_out"]))]:
                say(f"left out: {fault}")
            if read_well:
                pixels = [*read_well.values()]
                padded = np.stack(pixels + pixels[-1:] * (encoder.batch - len(pixels)))  # one shape, one program
                answer = {name: array[: len(pixels)] for name, array in encoder.encode(padded).items()}
                data = _checked(answer, [listing.paths[i] for i in read_well], listing, state)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                state["crc32"] = zlib.crc32(data, state["crc32"])
            state["next"] += len(given)
            state["left_out"] += faults
            files.write_text(part / STATE, json.dumps(files.sealed(state)))
            count(state["next"])


def _checked(answer: dict[str, np.ndarray], paths: list[str], listing: Listing, state: dict[str, Any]) -> bytes:
    """The rows of images, if they are finite and have the columns of those before them."""
    for name, array in answer.items():
        if not (fine := np.isfinite(array).all(1)).all():
            what = f"{brief(paths[int(fine.argmin())])}: {name} of the encoder are not finite"
            raise UserError(f"{what}; mend the encoder's precision or its normalisation")
    widths = {name: array.shape[1] for name, array in answer.items()}
    if not state["widths"]:
        class_numbers(listing, state["about"]["classes"], widths.get("logits"))  # so that it is refused at once
        state["widths"] = widths
    if widths != state["widths"]:
        told = f"gives {widths} columns, before {state['widths']}; they must be the same for all images"
        raise UserError(told, "encoder")
    return np.concatenate([*answer.values()], axis=1).tobytes()


def _finish(listing: Listing, out: Path, part: Path, state: dict[str, Any]) -> None:
    """Writes the result."""
    left_out, about, widths = dict(state["left_out"]), state["about"], state["widths"]
    kept = [i for i in range(len(listing.paths)) if i not in left_out]
    if not kept:
        raise UserError(f"{listing.root}: none of {len(left_out)} images could be read; the first: {left_out[0]}")
    if listing.fingerprint() != about["images"]:
        raise UserError(f"{listing.root}: images changed while they were read; delete {part}, and do it again")
    classes, labels = class_numbers(listing, about["classes"], widths.get("logits"))
    rows = np.memmap(part / ROWS, np.float32, "r", shape=(len(kept), sum(widths.values())))
    parts = np.split(rows, np.cumsum([*widths.values()])[:-1], axis=1)
    arrays: dict[str, Any] = dict(zip(widths, parts, strict=True))
    arrays |= {"labels": labels[kept], "classes": np.array(classes, str)}
    arrays |= {name: np.array(each)[kept] for name, each in (("domains", listing.domains), ("paths", listing.paths))}
    arrays["about"] = np.array(json.dumps({**about, "left_out": [listing.paths[i] for i in left_out]}))
    files.write_whole(out, lambda partial: np.savez(partial, **arrays))
    known = arrays["labels"] >= 0
    scored = "; there are no logits: cxda fit learns a head" * ("logits" not in arrays)
    if known.any() and not scored:
        right = arrays["logits"].argmax(1)[known] == arrays["labels"][known]
        scored = f"; the encoder is right on {right.mean():.1%} of {len(right)} labels"
    say(f"{out}: {len(kept)} images of {len({*arrays['domains']})} domains, {len(left_out)} left out{scored}")
    for name, width in widths.items():
        say(f"  {name:<9}{width} columns")
    if widths["style"] > (most := room(max(1, len(classes)))):
        say(f"warning: cxda fit learns no own style of more than {most:,} columns; name fewer maps by --maps")
