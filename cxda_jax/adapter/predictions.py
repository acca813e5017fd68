"""The JSON files in which SpeciesNet and MegaDetector list classes with their scores, as logits and written back.

    SpeciesNet before 5.0.6   predictions[i].classifications                     {classes, scores}
    SpeciesNet                predictions[i].detections[j].raw_classifications   {classes, scores}
    MegaDetector              images[i].detections[j].classifications            [[number of a class, score], ...]

An image is known by its most confident detection that has classes; boxes are not read. The second form may have
target_classes and target_logits, which are read too. In the first, 5.0.0 to 5.0.2 wrote those of another image.
"""

import difflib
import hashlib
import json
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cxda_jax.adapter.features import Listing, class_numbers, is_written
from cxda_jax.config.fields import SHARE
from cxda_jax.disk import files
from cxda_jax.disk.kinds import NUMBER, Kind, require
from cxda_jax.disk.reading import read_object, read_table
from cxda_jax.errors import UserError, brief
from cxda_jax.machine.progress import say
from cxda_jax.version import VERSION

FIX = "give the JSON file that SpeciesNet or MegaDetector wrote"
MARK = "adapted_by"  # in `info` of what was written back
LEAST = 1e-4  # of a score: SpeciesNet rounds to four decimals
_DETECTIONS = Kind(list, each=Kind(dict, each={"conf": Kind(NUMBER, SHARE)}), null=True, absent=True)
_IMAGE = {"detections": _DETECTIONS, "model_version": Kind(str, absent=True)}
_FILE = {"info": Kind(dict, absent=True), "classification_categories": Kind(dict, each=str, absent=True)}
_PAIRS = {"classifications": Kind(list, each=Kind(list, shape=(2,)))}
_CLASSES = {
    "classes": Kind(list, each=str, shape=("listed",)),
    "scores": Kind(list, each=Kind(NUMBER, SHARE), shape=("listed",)),
    "target_classes": Kind(list, each=str, shape=("targets",), absent=True),
    "target_logits": Kind(list, each=NUMBER, shape=("targets",), absent=True),
}


class Place(NamedTuple):
    """The classes of one detection, or of one image, and where the file holds them.

    Attributes:
      image: number of the image.
      leads: the image is known by it.
      held: the object of the file that put() changes.
      listed: class and score of each, as in the file.
      targets: target_logits by class.
    """

    image: int
    leads: bool
    held: dict[str, Any]
    listed: list[tuple[str, float]]
    targets: dict[str, float]

    def put(self, listed: Sequence[tuple[str, float]], targets: Mapping[str, float]) -> None:
        """Writes other scores and target_logits, the largest score first, as both formats want it."""
        ordered = sorted(listed, key=lambda each: -each[1])
        if "classes" in self.held:
            self.held["classes"], self.held["scores"] = ([each[i] for each in ordered] for i in (0, 1))
        else:
            self.held["classifications"] = [list(each) for each in ordered]
        if self.targets:
            self.held["target_logits"] = [targets[key] for key in self.held["target_classes"]]


class Predictions(NamedTuple):
    """A file of predictions.

    Attributes:
      path: of the file.
      content: of the file, which its places change.
      files: of the images, with forward slashes.
      places: in the order of the images.
      names: of MegaDetector's numbers of classes.
      about: what made the file.
    """

    path: Path
    content: dict[str, Any]
    files: list[str]
    places: list[Place]
    names: dict[str, str]
    about: dict[str, Any]

    def column(self, key: str, columns: Mapping[str, int]) -> int:
        """The column of a class of the file, or -1. One of SpeciesNet goes by its whole text or by its last part."""
        name = self.names.get(key, key)
        return columns.get(name, columns.get(name.rpartition(";")[2], -1))

    def last_parts(self) -> set[str]:
        """The names of all classes that the file lists, by the last part of those of SpeciesNet."""
        keys = {*self.names, *(key for place in self.places for key, _ in place.listed)}
        return {self.names.get(key, key).rpartition(";")[2] for key in keys}

    def known(self, columns: Mapping[str, int]) -> dict[int, str]:
        """By column the first class of the file that belongs there."""
        keys = [*self.names, *(key for place in self.places for key, _ in place.listed)]
        return {self.column(key, columns): key for key in reversed(keys)}

    def logits(self, columns: Mapping[str, int]) -> tuple[np.ndarray, str]:
        """The logits of each place [places, columns], and the field they are from: target_logits, where all places have
        those of all columns.

        Otherwise a column whose class is not listed has an equal part of what the listed scores leave of 1, and no more
        than the smallest of them.
        """
        found = np.full((len(self.places), len(columns)), -np.inf)
        for row, place in zip(found, self.places, strict=True):
            for key, logit in place.targets.items():
                if (column := self.column(key, columns)) >= 0:
                    row[column] = logit
        if found.size and np.isfinite(found).all():
            return found.astype(np.float32), "target_logits"
        found[:] = 0
        for row, place in zip(found, self.places, strict=True):
            for key, score in place.listed:
                if (column := self.column(key, columns)) >= 0:
                    row[column] += score
            scores, lacking = [score for _, score in place.listed], row == 0
            row[lacking] = min(min(scores), max(0.0, 1 - sum(scores)) / max(1, lacking.sum()))
        return np.log(np.maximum(found, LEAST)).astype(np.float32), "scores"

    def cameras(self, locations: Path | None) -> list[str]:
        """The camera of each image: its folder, or what a CSV file with the columns file and location says."""
        if locations is None:
            return [posixpath.dirname(file) or "." for file in self.files]
        found = self.told(locations, "location")
        if "" in found:
            lacking = brief(self.files[found.index("")])
            raise UserError(f"{locations}: no line has the location of file={lacking!r}; add one")
        return found

    def told(self, table: Path, column: str) -> list[str]:
        """What a CSV file with the columns file and `column` says of each image, or "".

        A file may be named by the end of its path. Lines of other files are left out, and it says how many.
        """
        found, numbers, others = [""] * len(self.files), _by_ends(self.files), []
        fix = f"give a CSV file with the columns file and {column}, and commas between them"
        for line, row in read_table(table, ("file", column), fix, {"filepath": "file"}):
            name, value = (row["file"] or "").replace("\\", "/"), row[column] or ""
            if (number := numbers.get(name)) is None:
                others.append(name)
                continue
            where = f"{table}, line {line}: file={brief(name, 40)!r}"
            if number < 0:
                raise UserError(f"{where} is the end of several paths; give more of the path")
            if found[number] not in ("", value):
                both = f"{brief(found[number], 20)!r} before and {brief(value, 20)!r} here"
                raise UserError(f"{where} has the {column} {both}; leave the wrong line out")
            found[number] = value
        if not any(found):
            example = brief(next(iter(self.files), "none"))
            raise UserError(f"{table}: names no file of {self.path}; name them as there, such as {example}")
        if others:
            say(f"{table}: left out {len(others)} lines, whose files {self.path} lacks, such as {brief(others[0], 60)}")
        return found


def _by_ends(paths: Sequence[str]) -> dict[str, int]:
    """The number of the path that ends in a name, or -1 where several do."""
    found: dict[str, int] = {}
    for number, path in enumerate(paths):
        parts = path.split("/")
        for end in ("/".join(parts[i:]) for i in range(1, len(parts))):
            found[end] = -1 if end in found else number
    return found | {path: number for number, path in enumerate(paths)}


def read_predictions(path: Path) -> Predictions:
    content = read_object(path, FIX)
    in_pairs = "images" in content
    part, file = ("images", "file") if in_pairs else ("predictions", "filepath")
    require(content, {**_FILE, part: Kind(list, each=Kind(dict, each={file: str, **_IMAGE}))}, str(path), FIX)
    info, images, names = content.get("info", {}), content[part], content.get("classification_categories", {})
    if MARK in info:
        raise UserError(f"{path}: info.{MARK}={brief(str(info[MARK]), 40)!r}, so it is adapted already; {FIX}")
    places = []
    for number, image in enumerate(images):
        found = list(_held(image, "classifications" if in_pairs else "raw_classifications"))
        lead, where = max(found, key=lambda each: each[0], default=None), f"{path}: {brief(image[file], 40)}"
        new = [_place(number, each is lead, *each[1:], names if in_pairs else None, where) for each in found]
        places += [place._replace(targets={}) if place.held is image.get("classifications") else place for place in new]
    about: dict[str, Any] = {"predictions": "MegaDetector" if in_pairs else "SpeciesNet"}
    versions = sorted({image["model_version"] for image in images if "model_version" in image})
    if made := info.get("classifier", ", ".join(versions)):
        about["classifier"] = str(made)
    if not in_pairs:
        about["listed"] = max((len(place.listed) for place in places), default=0)
    return Predictions(path, content, [image[file].replace("\\", "/") for image in images], places, names, about)


def _held(image: dict[str, Any], field: str) -> Iterator[tuple[float, Any, Any]]:
    """Of each detection of an image that has classes the confidence, the object that holds them, and what it says."""
    if field == "raw_classifications" and image.get("classifications"):
        yield 1.0, image["classifications"], image["classifications"]
    for detection in image.get("detections") or ():
        if told := detection.get(field):
            yield detection["conf"], detection if field == "classifications" else told, told


def _place(image: int, leads: bool, held: Any, told: Any, names: Mapping[str, str] | None, where: str) -> Place:
    """A place, whose classes have `names` if they are pairs of MegaDetector."""
    if names is not None:
        require({"classifications": told}, _PAIRS, where, FIX)
        told = {part: [pair[i] for pair in told] for i, part in enumerate(("classes", "scores"))}
    require(told, _CLASSES, where, FIX)
    if not told["classes"]:
        raise UserError(f"{where}: has a list without classes; let the program write more of them")
    if lacking := [key for key in told["classes"] if names is not None and key not in names]:
        raise UserError(f"{where}: classification_categories lacks the class {brief(lacking[0], 20)!r}; {FIX}")
    targets = zip(told.get("target_classes", ()), told.get("target_logits", ()), strict=True)
    return Place(image, leads, held, list(zip(told["classes"], told["scores"], strict=True)), dict(targets))


def unlisted(found: Predictions, name: str) -> str:
    """What to tell of a class that the file never lists, with the nearest one that it does."""
    near = difflib.get_close_matches(name.lower(), found.last_parts(), 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{brief(name, 30)!r} is no class of {found.path}; {hint}"


def write_labelled(found: Predictions, labels: Path, locations: Path | None, classes: list[str], out: Path) -> None:
    """Writes what cxda features writes of images: logits, labels, domains, classes, paths and `about`; no style.

    Args:
      found: the file of predictions.
      labels: a CSV file with the columns file and label.
      locations: as in cameras().
      classes: names of the columns of logits; if empty, the sorted labels.
      out: the file to write.
    """
    listing = Listing(found.path, found.files, found.cameras(locations), found.told(labels, "label"))
    names, numbers = class_numbers(listing, classes, None)
    columns = {name: i for i, name in enumerate(names)}
    for name in (names[i] for i in sorted({*columns.values()} - {*found.known(columns)})):
        told = unlisted(found, name)
        if not classes:
            raise UserError(f"{labels}: label={told}mend it, or name all columns in --classes")
        say(f"classes: {told}no image can be corrected to it")
    if unseen := sorted({*names} - {names[i] for i in numbers[numbers >= 0]}):
        listed = brief(", ".join(unseen), 100)
        say(f"classes that nobody labelled: {listed}; cxda fit takes them for errors, unless --classes lacks them")
    logits, field = found.logits(columns)
    content = json.dumps([files.hash_file(found.path), *listing[1:]])
    made = f"{len(found.files)} images, {hashlib.sha256(content.encode()).hexdigest()[:16]}"
    about = {"cxda_jax": VERSION, **found.about, "read": field, "classes": classes, "images": made}
    if is_written(out, about):
        return
    leads = [i for i, place in enumerate(found.places) if place.leads]
    own = [found.places[i].image for i in leads]
    arrays: dict[str, Any] = {"logits": logits[leads], "labels": numbers[own], "classes": np.array(names, str)}
    arrays |= {name: np.array(each, str)[own] for name, each in (("domains", listing.domains), ("paths", found.files))}
    arrays["about"] = np.array(json.dumps(about))
    files.write_whole(out, lambda partial: np.savez(partial, **arrays))
    cameras, known = {*arrays["domains"].tolist()}, arrays["labels"] >= 0
    told = f"{len(own)} images of {len(cameras)} cameras, {len(found.files) - len(own)} without classes"
    if len(cameras) == 1:
        say(f"{found.path}: all images are in one folder, so of one camera; --locations names others")
    elif len(labelled := {*arrays["domains"][known].tolist()}) < len(cameras):
        told += f"; cameras with labels: {len(labelled)}"
    if others := sorted(found.last_parts() - {name.rpartition(";")[2] for name in columns}):
        say(f"classes that nobody labelled: {brief(', '.join(others), 200)}; images of them keep their scores")
    first = [found.column(max(found.places[i].listed, key=lambda each: each[1])[0], columns) for i in leads]
    if known.any():
        right = (np.array(first) == arrays["labels"])[known].mean()
        told += f"; the classifier is right on {right:.1%} of {known.sum()} labels of {len(names)} classes"
    say(f"{out}: {told}")
