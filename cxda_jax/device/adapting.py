"""Adapts a model to a folder of a user's own images, and answers for another. launch/adapt.py says what is written."""

import csv
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cxda_jax.data.readers.raw import EXTENSIONS
from cxda_jax.device.attached import Attached
from cxda_jax.device.loading import load
from cxda_jax.device.model import AT_ONCE, Model
from cxda_jax.device.page import NEAREST, AdaptedPage, Answered, ClassShares, first, write_adapted
from cxda_jax.disk import files
from cxda_jax.disk.reading import read_table, system_fault
from cxda_jax.errors import UserError, brief, printable
from cxda_jax.machine.progress import Counter, aligned, replacing, say
from cxda_jax.types import ADAPTER

SHOWN = 200  # answers on the page
LISTED = 30  # classes of a table
PHONES = (".avif", ".heic", ".heif")  # read where a decoder is installed, else named
UNUSED = ("style", "none")  # what an adapter takes from a buffer, if it makes no use of the class shares there
FAULTS = 20  # lines about files that were left out
FORMULA = re.compile(r"(?!-?[\d.]+$)[=+@\t\r-].")  # what a spreadsheet may take for a formula; a number is none
COLUMNS = [
    "file", "answer", "before", "before_confidence", "after", "after_confidence", "moved",
    *(f"nearest_{i}" for i in range(1, NEAREST + 1)), "label",
]  # fmt: skip


class ReadImages(NamedTuple):
    """Images that could be read, uint8 [n, h, w, c], and their files."""

    pixels: np.ndarray
    paths: list[Path]


class Tally:
    """Counts answers: how many changed, and where labels are known how many were right before, after and in the end.

    It keeps those that the page shows.
    """

    def __init__(self) -> None:
        self.count = self.changed = 0
        self.right: list[tuple[bool, bool, bool]] = []
        self.right_of: dict[str, list[tuple[bool, bool]]] = {}  # before and after, by label
        self.shown: list[Answered] = []

    def add(self, answer: Answered, use_adapted: bool) -> None:
        self.count += 1
        self.changed += answer.before != answer.after
        if answer.label:
            right = answer.before == answer.label, answer.after == answer.label
            self.right.append((*right, right[use_adapted]))
            self.right_of.setdefault(answer.label, []).append(right)
        self.shown = first([*self.shown, answer], SHOWN)

    def scores(self) -> list[tuple[str, str]]:
        """Lines of the summary, none where no label is known."""
        if not self.right:
            return []
        right = np.array(self.right, float)
        gap = right[:, 1] - right[:, 0]
        half = 196 * gap.std() / np.sqrt(len(right))
        before, after, counted = 100 * right.mean(0)
        scores = (
            f"before {before:.1f} %, after {after:.1f} %; "
            f"difference {100 * gap.mean():+.1f} +- {half:.1f} points (95 %), "
            f"{(gap > 0).sum()} corrected and {(gap < 0).sum()} spoiled; with the answer that counts {counted:.1f} %"
        )
        return [(f"Right of {len(right)} with labels", scores)]

    def by_class(self) -> list[str]:
        """Lines of a table, the classes with the fewest images first; none of more than LISTED classes."""
        if not 0 < len(self.right_of) <= LISTED:
            return []
        rows = sorted(self.right_of.items(), key=lambda each: (len(each[1]), each[0]))
        cells = [[name, *map(str, (len(right), *np.sum(right, axis=0)))] for name, right in rows]
        return aligned([["class", "images", "right before", "after"], *cells])


class Adaptation(NamedTuple):
    """The model and the folders of an adaptation.

    Attributes:
      model: what load() takes.
      buffer: a folder of images to adapt to, whose newest `capacity` count.
      images: a folder of images to answer for.
      out: the folder to write.
      labels: a CSV file with the columns file and label; "" for none.
      method: what load() takes.
      capacity: see above.
      always: answer adapted even where that is not expected to help.
      encoder: what load() takes.
    """

    model: str
    buffer: str
    images: str
    out: Path
    labels: str = ""
    method: str = ""
    capacity: int = 500
    always: bool = False
    encoder: str = ""


def adapt_folder(asked: Adaptation) -> None:
    """Writes predictions.csv and adapted.html, and says what adapting is expected to bring."""
    began, faults, out, folder = time.perf_counter(), [], asked.out, Path(asked.images)
    model = load(asked.model, asked.method, asked.encoder)
    if model.dtype != np.uint8:
        raise UserError(f"model={asked.model}: an adapter sees images through its classifier alone; give --encoder")
    if isinstance(model, Attached):
        model = model.trusted()  # which_counts() says whether its answers count
    newest = newest_images(Path(asked.buffer), asked.capacity, faults.append)
    queries = listed(folder, faults.append)
    if not queries:
        raise UserError(f"{folder}: no images in it; answered are files that end in {', '.join(EXTENSIONS)}")
    known = read_labels(asked.labels, model, queries, folder) if asked.labels else {}
    held = read_images(model, newest, faults, "  buffer")
    name = "the adapter" if isinstance(model, Attached) else model.method.name
    say(f"adapting {name} ({model.card.data}) to {len(held.paths)} images of {asked.buffer}")
    adapted = model.adapt(held.pixels)
    use_adapted, advice = which_counts(model, len(held.paths), asked.always)
    say(advice)
    if difference := model.unlike(held.pixels):
        say(f"warning: {asked.buffer}: {difference}")
    out.mkdir(parents=True, exist_ok=True)
    replacing(",".join(COLUMNS[:3]), out / "predictions.csv")
    replacing("What adapting changed", out / "adapted.html")
    with files.locked(out):
        before = model.plain() if isinstance(model, Attached) else model
        answers = answered(before, adapted, queries, folder, known, faults)
        tally = write_answers(out / "predictions.csv", answers, held.paths, use_adapted)
        if not tally.count:
            raise UserError(f"{folder}: none of {len(queries)} could be read; the first: {faults[0]}")
        trained = "fitted to" if isinstance(model, Attached) else "trained on"
        results = [("Answers that changed", f"{tally.changed} of {tally.count}"), *tally.scores()]
        summary = [
            ("Model", f"{model.method.name} {trained} {model.card.data}, step {model.card.step}"),
            ("Buffer", f"{len(held.paths)} images of {asked.buffer}"),
            ("Images", f"{tally.count} of {folder}"),
            results[0],
            ("Which answer counts", f"{'after' if use_adapted else 'before'} adapting. {advice}"),
            *results[1:],
        ]
        gain = model.card.gain if model.method.name == model.card.method else None
        title, names = f"What adapting changed: {printable(model.card.data)}", [path.name for path in held.paths]
        page = AdaptedPage(title, summary, tally.shown, tally.count, held.pixels, names, gain, faults)
        write_adapted(out / "adapted.html", page._replace(shares=shares_of(adapted)))
    say_faults(faults, ", all on the page")
    for line in [*(f"{what}: {found}" for what, found in results), *tally.by_class()]:
        say(line)
    seconds = time.perf_counter() - began
    say(f"{out}/predictions.csv and {out}/adapted.html: {tally.count} images in {seconds:.1f} s")


def shares_of(adapted: Model) -> ClassShares | None:
    """The class shares that a trusted adapter of fit() estimates, if it adapted to images.

    One that is not trusted can be further from the true shares than those in training are.
    """
    if not isinstance(adapted, Attached) or not adapted.adapter._replace(always=False).helps:
        return None
    if (found := adapted.shares()) is None:
        return None
    trained = np.asarray(adapted.variables["batch_stats"][ADAPTER]["shares"])
    used = adapted.adapter.report.get("takes") not in UNUSED
    return ClassShares(adapted.card.class_names, trained, found, used)


def say_faults(faults: Sequence[str], rest: str = "") -> None:
    """Says what was left out, the first FAULTS of it. `rest` tells where the others stand."""
    for fault in faults[:FAULTS]:
        say(f"left out: {fault}")
    if len(faults) > FAULTS:
        say(f"left out: {len(faults) - FAULTS} more{rest}")


def write_answers(path: Path, answers: Iterable[Answered], buffer: Sequence[Path], use_adapted: bool) -> Tally:
    """Writes a line for each answer."""
    tally = Tally()

    def write(partial: Path) -> None:
        with open(partial, "w", newline="", encoding="utf-8", errors="backslashreplace") as file:
            table = csv.writer(file)
            table.writerow(COLUMNS)
            for answer in answers:
                table.writerow(line_of(answer, buffer, use_adapted))
                tally.add(answer, use_adapted)

    files.write_whole(path, write)
    return tally


def which_counts(model: Model, count: int, always: bool) -> tuple[bool, str]:
    """Whether the answer after adapting to so many images counts, and why."""
    helps, why = expected(model, count)
    counts = "so the adapted answer counts" if helps else "so the answer without it counts"
    if always and not helps:
        counts = "but --always makes the adapted answer count"
    return helps or always, f"{why}, {counts}."


def expected(model: Model, count: int) -> tuple[bool, str]:
    """Whether adapting to so many images is expected to help, by the model's own validation, and what that said."""
    gain, name = model.card.gain, model.method.name
    if not model.method.uses_support:
        return False, f"{name} does not adapt, so both answers are the same"
    if name != model.card.method or gain is None:
        return True, f"What {name} brings was not measured when the model was trained"
    since = gain.helps_from()
    if takes_nothing(model):
        own = f"{gain.mean[0]:+.1f} points ({gain.low[0]:+.1f} to {gain.high[0]:+.1f})"
        return since is not None, f"By the image's own style, which needs no buffer, answers gained {own} in validation"
    nearest = max(i for i, size in enumerate(gain.sizes) if size <= count)
    measured = f"{gain.mean[nearest]:+.1f} points ({gain.low[nearest]:+.1f} to {gain.high[nearest]:+.1f})"
    in_validation = f"With {gain.sizes[nearest]} images, adapting brought {measured} in validation"
    if since is None:
        return False, f"{in_validation}, no sure gain at the largest size"
    if count < since:
        few = f"It surely helps from {since} images on, here are {count}"
        return False, f"{in_validation}. {few}"
    return True, in_validation


def takes_nothing(model: Model) -> bool:
    """Whether it is an adapter of fit() that a buffer tells nothing."""
    return isinstance(model, Attached) and model.adapter.report.get("takes") == UNUSED[-1]


def listed(folder: Path, fault: Callable[[str], Any]) -> list[Path]:
    """The images in a folder and in its folders, by name.

    Hidden ones are left out; fault() gets a line for what has no right.
    """
    if not folder.is_dir():
        raise UserError(f"{brief(str(folder), 80)}: no such folder; give one that holds images")
    found = []

    def refused(e: OSError) -> None:
        if not isinstance(e, FileNotFoundError):  # it has gone meanwhile
            fault(system_fault(e))

    for where, folders, names in os.walk(folder, onerror=refused):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(where, name) for name in names if not name.startswith(".")):
            if path.suffix.lower() in (*EXTENSIONS, *PHONES):
                try:
                    found += [path] * stat.S_ISREG(path.stat().st_mode)
                except OSError as e:
                    refused(e)
    return sorted(found)


def newest_images(folder: Path, capacity: int, fault: Callable[[str], Any]) -> list[Path]:
    """The newest images of a folder, by name."""
    found = listed(folder, fault)
    if len(found) > capacity:
        say(f"{folder}: the newest {capacity} of {len(found)} images count; --capacity takes more")
        found = sorted(sorted(found, key=lambda path: (path.stat().st_mtime, path))[-capacity:])
    return found


def read_images(model: Model, paths: Sequence[Path], faults: list[str], what: str) -> ReadImages:
    """The images of the paths; `faults` gets a line for each that cannot be read."""
    counter, pixels, good = Counter(what, len(paths)), [], []
    for i, path in enumerate(paths, 1):
        try:
            pixels.append(model.as_pixels(path))
            good.append(path)
        except UserError as e:
            faults.append(str(e))
        counter(i)
    return ReadImages(np.array(pixels, np.uint8).reshape(-1, *model.card.shape), good)


def answered(
    model: Model, adapted: Model, paths: Sequence[Path], folder: Path, labels: dict[str, str], faults: list[str]
) -> Iterator[Answered]:
    """Answers to the images that can be read, of which some at a time are in memory; `faults` gets a line for each
    other one."""
    counter = Counter("  images", len(paths))
    for start in range(0, len(paths), AT_ONCE):
        pixels, good = read_images(model, paths[start : start + AT_ONCE], faults, "")
        before, after = model.predict(pixels), adapted.predict(pixels)
        attends = model.method.attention and not takes_nothing(model)
        weights = adapted.attention(pixels) if attends else [None] * len(pixels)
        moved = 0.5 * np.abs(after.probabilities - before.probabilities).sum(1)
        for i, path in enumerate(good):
            name = str(path.relative_to(folder))
            yield Answered(
                name, pixels[i], before.names[i], float(before.confidences[i]), after.names[i],
                float(after.confidences[i]), float(moved[i]), weights[i], labels.get(name, ""),
            )  # fmt: skip
        counter(min(start + AT_ONCE, len(paths)))


def line_of(answer: Answered, buffer: Sequence[Path], use_adapted: bool) -> list[str]:
    """The line of an answer in predictions.csv."""
    a = answer
    nearest = [buffer[i].name for i in a.nearest]
    nearest += [""] * (NEAREST - len(nearest))
    before, after, moved = (f"{x:.4f}" for x in (a.before_confidence, a.after_confidence, a.moved))
    counts = a.after if use_adapted else a.before
    cells = map(printable, [a.file, counts, a.before, before, a.after, after, moved, *nearest, a.label])
    return ["'" + cell if FORMULA.match(cell) else cell for cell in cells]


def read_labels(path: str, model: Model, images: Sequence[Path], folder: Path) -> dict[str, str]:
    """By image, as a path below the folder, its label in a CSV file with the columns file and label."""
    known, names = {}, [str(image.relative_to(folder)) for image in images]
    for number, row in read_table(Path(path), ("file", "label"), "give a CSV file with the columns file and label"):
        name, label = row["file"] or "", row["label"] or ""
        if label not in model.card.class_names:
            classes = brief(", ".join(model.card.class_names), 80)
            raise UserError(
                f"{path}, line {number}: label={brief(repr(label), 30)} is no class of the model; classes: {classes}"
            )
        if known.setdefault(name, label) != label:
            both = f"{brief(repr(known[name]), 20)} before and {brief(repr(label), 20)} here"
            raise UserError(f"{path}, line {number}: {brief(repr(name), 40)} is {both}; leave the wrong line out")
    found = len(known.keys() & {*names})
    counted = f"{path}: {found} of {len(names)} images have a label, by {len(known)} lines"
    if not found:
        raise UserError(f"{counted}; name the files as below {folder}, such as {brief(names[0], 40)}")
    say(counted)
    return known
