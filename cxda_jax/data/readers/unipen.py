"""UNIPEN's isolated characters, train_r01_v07: pen strokes, which are drawn here. A domain is a writer.

    <raw_dir>/train_r01_v07/data/{1a,1b,1c}/<site>/**/*.dat     which strokes are a digit, a capital or a small letter
    <raw_dir>/train_r01_v07/include/**                          the strokes and their documents

A file is a list of statements: `.KEYWORD arguments`. `.INCLUDE` names a file under include/. A component is the points
after .PEN_DOWN or .PEN_UP. Components are numbered from 0 over all included files, without the empty ones. The
statement `.SEGMENT CHARACTER 12:3-13,15 ? "a"` means: the points of component 12 from number 3 on, component 13 and
component 15 are an "a". Points after .PEN_UP are not drawn.

Images look like FEMNIST's: dark ink on white, 28x28. `scale` is the size of a character:

    box       it fills a box of 20 pixels on its longer side
    writer    the characters of a writer keep their relative sizes; the median of their longer sides becomes 14
              pixels. Then an o and an O of one shape differ only for somebody who knows the writer

`split` says what is held out for val and test: writers, or whole sites with their tablets.
"""

import functools
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from cxda_jax.config.fields import choose
from cxda_jax.data.readers.folder import FRACTIONS, random_splits
from cxda_jax.data.readers.raw import Piece, RawData, Rows, find_folder
from cxda_jax.data.store import SPLITS, StoreInfo
from cxda_jax.disk.reading import reason
from cxda_jax.errors import UserError, brief

SETS = ("1a", "1b", "1c")
LABELS = {c: i for i, c in enumerate(string.digits + string.ascii_uppercase + string.ascii_lowercase)}
SIDE, BOX, PEN = 28, 20.0, 2.0  # pixels: the image, the box around the ink, the width of the pen
FINER = 2  # a pixel is the mean of so many by so many
MEDIAN, LARGEST = 14.0, 26.0  # pixels with scale=writer: the median character, and the most that any may have
LEAST_POINTS = 3  # a character of fewer points is a slip of the pen
INFO = StoreInfo(
    name="unipen",
    class_names=tuple(LABELS),
    mean=(1.0,),  # the network sees 1 - x: bright ink on black, as for femnist
    std=(-1.0,),
    provenance="UNIPEN train_r01_v07, International Unipen Foundation, doi 10.5281/zenodo.1195803, CC BY 4.0",
    licence="CC BY 4.0, International Unipen Foundation",
    fit="pad",
)

_STATEMENT = re.compile(r"^\.([A-Z][A-Z_0-9]*)", re.MULTILINE)
_SEGMENT = re.compile(r'\s+(\S+)\s+(\S+)\s+\S+\s+"(.*)"\s*')
_RANGE = re.compile(r"(\d+)(?::(\d+))?(?:-(\d+)(?::(\d+))?)?")
_PER_MM = {"MM": 1.0, "INCH": 25.4}

Stroke = np.ndarray  # float32 [points, 2] in millimetres: x to the right, y up
Component = tuple[Stroke, bool]  # and whether the pen was down
Character = tuple[list[Stroke], int]  # and its label


def find(
    raw_dir: Path,
    name: str = "unipen",
    scale: str = "box",
    split: str = "writer",
    min_images: int = 60,
    seed: int = 0,
) -> RawData:
    choose("scale", scale, ("box", "writer"))
    choose("split", split, ("writer", "site"))
    root = find_folder(raw_dir, "train_r01_v07", packed=["unipen-train_r01_v07-characters"])
    writers, warnings = _writers(root)
    few = [f"{writer} ({len(writers.pop(writer))})" for writer in sorted(writers) if len(writers[writer]) < min_images]
    if few:
        warnings.append(f"{len(few)} writers left out, with fewer than {min_images} characters: {', '.join(few)}")
    splits = random_splits(sorted(writers), seed) if split == "writer" else site_splits(writers, seed)
    pieces = [
        Piece(writer, part, len(writers[writer]), functools.partial(_draw_all, writers[writer], scale))
        for part in SPLITS
        for writer in sorted(writers)
        if splits[writer] == part
    ]
    drawn = {"box": "each in a box of 20 pixels", "writer": "a writer's sizes kept"}[scale]
    provenance = f"{INFO.provenance}; {drawn}, {split}s held out"
    return RawData(INFO._replace(name=name, provenance=provenance), pieces, warnings=warnings)


def site_splits(writers: Iterable[str], seed: int) -> dict[str, str]:
    """The split of each writer, such that no site is in two. Sites in random order fill test, then val, then train."""
    site_of = {writer: writer.split()[0] for writer in writers}
    counts = {site: list(site_of.values()).count(site) for site in sorted(set(site_of.values()))}
    part_of, placed = {}, 0
    for site in np.random.default_rng(seed).permutation(list(counts)).tolist():
        share = placed / len(site_of)
        part_of[site] = "test" if share < FRACTIONS[2] else "val" if share < FRACTIONS[1] + FRACTIONS[2] else "train"
        placed += counts[site]
    return {writer: part_of[site] for writer, site in site_of.items()}


def _writers(root: Path) -> tuple[dict[str, list[Character]], list[str]]:
    """The characters of each writer, and warnings of what is left out."""
    folders = [root / "data" / part for part in SETS]
    files = [(file.relative_to(folder), file) for folder in folders for file in folder.rglob("*.dat")]
    if not files:
        raise UserError(f"{root / 'data'}: no .dat files in 1a, 1b and 1c; extract the download again")
    writers: dict[str, list[Character]] = {}
    dots = others = 0
    for relative, file in sorted(files):
        writer, labelled = read_file(file, root / "include")
        found = [(strokes, LABELS[label]) for strokes, label in labelled if label in LABELS]
        drawn = [(strokes, label) for strokes, label in found if sum(map(len, strokes)) >= LEAST_POINTS]
        others, dots = others + len(labelled) - len(found), dots + len(found) - len(drawn)
        writers.setdefault(f"{relative.parts[0]} {writer}", []).extend(drawn)
    left_out = {f"of fewer than {LEAST_POINTS} points": dots, "other than digits and letters": others}
    return writers, [f"{count} characters {what} left out" for what, count in left_out.items() if count]


def read_file(file: Path, include: Path) -> tuple[str, list[tuple[list[Stroke], str]]]:
    """The writer of a file under data/, and its segments: the strokes and the label of each."""
    statements = list(_statements(file))
    names = [text.strip() for keyword, text in statements if keyword == "INCLUDE"]
    writer, components = _read_recording(file, names, include)
    labelled = []
    for text in (text for keyword, text in statements if keyword == "SEGMENT"):
        try:
            if not (match := _SEGMENT.fullmatch(text)):
                raise ValueError('expected CHARACTER COMPONENTS QUALITY "LABEL"')
            if match[1] == "CHARACTER":
                labelled.append((_strokes(match[2], components), match[3]))
        except ValueError as e:
            raise _fault(file, "SEGMENT", text, str(e)) from None
    return writer, labelled


def _read_recording(file: Path, names: Sequence[str], include: Path) -> tuple[str, list[Component]]:
    """The writer of a file, and all components of what it includes."""
    writer, components, columns, per_mm = "", [], ["X", "Y"], {"X": 1.0, "Y": 1.0}
    for source, keyword, text in _included(file, names, include):
        try:
            if keyword in ("PEN_DOWN", "PEN_UP"):
                values = np.array(text.split(), np.float32).reshape(-1, len(columns))
                if len(values):
                    points = np.stack([values[:, columns.index(axis)] / per_mm[axis] for axis in "XY"], axis=1)
                    components.append((points.astype(np.float32), keyword == "PEN_DOWN"))
            elif keyword == "WRITER_ID":
                writer = text.strip()
            elif keyword == "COORD":
                columns = text.split()
                if not {"X", "Y"} <= set(columns):
                    raise ValueError("no X or no Y")
            elif unit := re.fullmatch("([XY])_POINTS_PER_(MM|INCH)", keyword):
                per_mm[unit[1]] = float(text.split()[0]) / _PER_MM[unit[2]]
                if not per_mm[unit[1]] > 0:
                    raise ValueError("not above 0")
        except (ValueError, IndexError) as e:
            raise _fault(source, keyword, text, reason(e)) from None
    if not writer:
        raise UserError(f"{file}: no .WRITER_ID in it or in what it includes; extract the download again")
    return writer, components


def _included(
    file: Path, names: Sequence[str], include: Path, above: tuple[Path, ...] = ()
) -> Iterator[tuple[Path, str, str]]:
    """All statements of the files that `file` includes, and of those that they include."""
    for name in names:
        source = include / name
        if source in above or not source.is_file():
            what = "includes itself" if source in above else f"{source} is missing"
            raise UserError(f"{file}: .INCLUDE {brief(name)}: {what}; extract the download again")
        for keyword, text in _statements(source):
            if keyword == "INCLUDE":
                yield from _included(source, [text.strip()], include, (*above, source))
            else:
                yield source, keyword, text


def _statements(file: Path) -> Iterator[tuple[str, str]]:
    """The statements of a file: keyword and arguments."""
    text = file.read_text("latin-1")  # names of persons and places; no other letters matter
    places = list(_STATEMENT.finditer(text))
    for place, following in zip(places, [*places[1:], None], strict=True):
        yield place[1], text[place.end() : following.start() if following else None]


def _strokes(text: str, components: list[Component]) -> list[Stroke]:
    """The strokes of a list of components, such as 12:3-13,15. Ends belong to it."""
    strokes = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if not match:
            raise ValueError(f"{brief(part, 20)!r} is no range of components")
        first, first_point, last, last_point = match.groups(default="")
        if not last:
            last, last_point = first, first_point
        if not int(first) <= int(last) < len(components):
            raise ValueError(f"component {last} of {len(components)}")
        for number in range(int(first), int(last) + 1):
            points, down = components[number]
            start = int(first_point) if first_point and number == int(first) else 0
            stop = int(last_point) + 1 if last_point and number == int(last) else len(points)
            if stop > len(points):
                raise ValueError(f"point {stop - 1} of component {number}, which has {len(points)}")
            if down and start < stop:
                strokes.append(points[start:stop])
    return strokes


def _fault(file: Path, keyword: str, text: str, what: str) -> UserError:
    statement = brief(" ".join(text.split()), 40)
    return UserError(f"{file}: .{keyword} {statement}: {what}; extract the download again")


def _draw_all(characters: list[Character], scale: str) -> Rows:
    sides = [longer_side(strokes) for strokes, _ in characters]
    if scale == "box":
        sizes = [BOX - PEN] * len(sides)
    else:
        per_mm = (MEDIAN - PEN) / max(float(np.median(sides)), 1e-6)
        sizes = [min(side * per_mm, LARGEST - PEN) for side in sides]
    images = np.stack([draw(strokes, size) for (strokes, _), size in zip(characters, sizes, strict=True)])
    return Rows(images[..., None], np.array([label for _, label in characters], np.int32))


def longer_side(strokes: Sequence[Stroke]) -> float:
    return float(np.ptp(np.concatenate(strokes), axis=0).max())


def draw(strokes: Sequence[Stroke], size: float, side: int = SIDE, pen: float = PEN) -> np.ndarray:
    """Draws a character in the middle of an image, dark on white, anti-aliased, with round ends: uint8 [side, side].

    Args:
        strokes: points [n, 2] of each, x to the right and y up, in any unit.
        size: pixels from the first to the last point along the longer side; the ink is wider by the pen.
        side: pixels of the image's sides.
        pen: pixels of the pen's width.
    """
    points = np.concatenate(strokes)
    middle = (points.min(axis=0) + points.max(axis=0)) / 2
    factor = np.float32(size / max(longer_side(strokes), 1e-6))
    placed = [(stroke - middle) * (factor, -factor) + np.float32(side / 2) for stroke in strokes]
    lines = np.concatenate([np.stack([p[:-1], p[1:]]) if len(p) > 1 else np.stack([p, p]) for p in placed], axis=1)
    (x, y), (along_x, along_y) = lines[0].T[..., None, None], (lines[1] - lines[0]).T[..., None, None]
    centres = (np.arange(side * FINER, dtype=np.float32) + np.float32(0.5)) / np.float32(FINER)
    # From a line's start to a pixel: [lines, 1, side] and [lines, side, 1].
    to_x, to_y = centres - x, centres[:, None] - y
    length = np.maximum(along_x**2 + along_y**2, np.float32(1e-12))
    nearest = np.clip((to_x * along_x + to_y * along_y) / length, 0, 1)  # how far along the line the nearest point is
    squares = (to_x - nearest * along_x) ** 2 + (to_y - nearest * along_y) ** 2
    distance = np.sqrt(squares.min(axis=0))
    ink = np.clip(0.5 + FINER * (np.float32(pen / 2) - distance), 0, 1)  # the share of a pixel that a wide line covers
    ink = ink.reshape(side, FINER, side, FINER).mean(axis=(1, 3))
    return np.rint(255 * (1 - ink)).astype(np.uint8)
