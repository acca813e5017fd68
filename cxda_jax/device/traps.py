"""Adapts the predictions of camera traps: each camera's images are its own buffer. launch/adapt.py tells more."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.special import log_softmax

from cxda_jax.adapter.adapter import Adapter, load_adapter
from cxda_jax.adapter.predictions import MARK, Place, Predictions, read_predictions, unlisted
from cxda_jax.device.adapting import COLUMNS, write_answers
from cxda_jax.device.attached import card_of, insist_on_same
from cxda_jax.device.page import Answered
from cxda_jax.disk import files
from cxda_jax.errors import UserError, brief
from cxda_jax.machine.progress import replacing, say
from cxda_jax.version import VERSION

NO_IMAGE, DECIMALS = np.zeros((0, 0, 1), np.uint8), 5  # decimals of scores


class Traps(NamedTuple):
    """What is asked.

    Attributes:
      model: the folder of an adapter.
      predictions: the file to adapt.
      out: the folder to write.
      locations: a CSV file with the columns file and location; None: the folders say the cameras.
      labels: a CSV file with the columns file and label, for scores; None for none.
      capacity: images of a buffer at most, evenly spread over those of the camera.
      always: adapt even where that is not expected to help.
    """

    model: Path
    predictions: Path
    out: Path
    locations: Path | None = None
    labels: Path | None = None
    capacity: int = 500
    always: bool = False


def adapt_predictions(asked: Traps) -> None:
    """Writes predictions.json in the format that it was read in, and predictions.csv."""
    adapter, found = load_adapter(asked.model), read_predictions(asked.predictions)
    columns, logits = _as_fitted(adapter, found, asked.model)
    cameras = found.cameras(asked.locations)
    labels = found.told(asked.labels, "label") if asked.labels else [""] * len(found.files)
    if wrong := next((label for label in labels if label and label not in {*columns} | found.last_parts()), ""):
        raise UserError(f"{asked.labels}: label={unlisted(found, wrong)}mend it")
    factors = _factors(adapter, found, logits, cameras, asked)
    asked.out.mkdir(parents=True, exist_ok=True)
    replacing(",".join(COLUMNS[:3]), asked.out / "predictions.csv")
    replacing(f'"{MARK}"', asked.out / "predictions.json")
    with files.locked(asked.out):
        answers = _rewritten(found, columns, logits, factors, labels)
        tally = write_answers(asked.out / "predictions.csv", answers, [], use_adapted=True)
        info = {MARK: f"cxda_jax {VERSION}", **found.content.pop("info", {})}
        files.write_text(asked.out / "predictions.json", json.dumps({"info": info, **found.content}, indent=1) + "\n")
    without = len(found.files) - tally.count
    say(f"Answers that changed: {tally.changed} of {tally.count}; without a classification, so unchanged: {without}")
    for line in [*(f"{what}: {scores}" for what, scores in tally.scores()), *tally.by_class()]:
        say(line)
    say(f"{asked.out}/predictions.json and {asked.out}/predictions.csv: {len(found.files)} images")


def _as_fitted(adapter: Adapter, found: Predictions, folder: Path) -> tuple[dict[str, int], np.ndarray]:
    """The columns of the adapter and the logits of all places; a UserError if fit() had other predictions."""
    origin, what = adapter.origin, f"--predictions={found.path}"
    if "predictions" not in origin:
        raise UserError(f"{what}: {folder} was not fitted to predictions; fit an adapter to some, or give images")
    columns = {name: i for i, name in enumerate(origin["classes"])}
    logits, field = found.logits(columns)
    about = {**found.about, "read": field}
    insist_on_same({key: x for key, x in about.items() if key != "classifier" or key in origin}, origin, what, folder)
    if found.places and not {*columns.values()} & found.known(columns).keys():
        theirs = brief(", ".join(columns), 40)
        raise UserError(f"{what}: names none of the classes that {folder} was fitted with ({theirs}); fit again")
    return columns, logits


def _factors(adapter: Adapter, found: Predictions, logits: np.ndarray, cameras: list[str], asked: Traps) -> np.ndarray:
    """The logarithms of the factors by which the scores of each place change [places, classes]; 0 where a camera keeps
    its answers."""
    gain = card_of(adapter, None).gain
    since = 0 if asked.always or not gain else gain.helps_from()
    factors, kept, trusted = np.zeros(logits.shape), Counter(), adapter.trusted()
    of_places = np.array([cameras[place.image] for place in found.places], str)
    leads = np.array([place.leads for place in found.places], bool)
    for camera in np.unique(of_places):
        own = np.flatnonzero(of_places == camera)
        held = own[leads[own]]
        held = held[np.unique(np.linspace(0, len(held) - 1, min(len(held), asked.capacity)).astype(int))]
        if since is None or len(held) < since:
            kept["no sure gain in the adapter's own validation" if since is None else f"fewer than {since} images"] += 1
            continue
        device = trusted.adapt(logits[held])
        if device.drift:
            if not kept["unlike all cameras of fit()"]:
                say(f"{camera}: {device.drift}")
            kept["unlike all cameras of fit()"] += 1
            continue
        before = log_softmax(logits[own], axis=1)
        after = log_softmax(device.predict_logits(logits[own]) / adapter.temperature(len(held)), axis=1)
        factors[own] = after - before
    total = len({*of_places.tolist()})
    reasons = "".join(f"; {count} keep their answers: {why}" for why, count in kept.items())
    say(f"Cameras that adapt: {total - kept.total()} of {total}{reasons}")
    return factors


def _rewritten(
    found: Predictions, columns: dict[str, int], logits: np.ndarray, factors: np.ndarray, labels: list[str]
) -> Iterator[Answered]:
    """Changes the content of the file. Gives the answer to each image that has one."""
    known, likely = found.known(columns), np.exp(log_softmax(logits, axis=1))
    for place, own, p in zip(found.places, factors, likely, strict=True):
        before = _first(found, place.listed, columns)
        own = own * (before[0] in columns)  # nobody labelled such answers, so nothing was learnt of them
        listed = _scaled(found, place, columns, known, own, p) if own.any() else place.listed
        if own.any():
            targets = {key: x + (own[c] if (c := found.column(key, columns)) >= 0 else 0)
                       for key, x in place.targets.items()}  # fmt: skip
            place.put(listed, targets)
        if place.leads:
            after, moved = _first(found, listed, columns), float(np.abs(p * np.expm1(own)).sum() / 2)
            label = labels[place.image]
            yield Answered(found.files[place.image], NO_IMAGE, *before, *after, moved, None, label)


def _scaled(
    found: Predictions, place: Place, columns: dict[str, int], known: dict[int, str], own: np.ndarray, p: np.ndarray
) -> list[tuple[str, float]]:
    """The classes of a place with their new scores, and the likeliest class before them where it was not listed.

    Classes that the adapter does not know keep their scores.
    """
    at = [found.column(key, columns) for key, _ in place.listed]
    listed = [(key, s * np.exp(own[c]) if c >= 0 else s) for (key, s), c in zip(place.listed, at, strict=True)]
    theirs, part = sum(s for (_, s), c in zip(place.listed, at, strict=True) if c < 0), p[sorted({*at} - {-1})].sum()
    after = p * np.exp(own) * ((sum(s for _, s in place.listed) - theirs) / part if part else 1 - theirs)
    best = int(after.argmax())
    if best not in at and best in known and after[best] > max(s for _, s in listed):
        listed.append((known[best], after[best]))
    return [(key, round(min(1.0, float(s)), DECIMALS)) for key, s in listed]


def _first(found: Predictions, listed: list[tuple[str, float]], columns: dict[str, int]) -> tuple[str, float]:
    """The name of the class with the largest score, and the score."""
    key, score = max(listed, key=lambda each: each[1])
    column = found.column(key, columns)
    return ([*columns][column] if column >= 0 else found.names.get(key, key).rpartition(";")[2]), score
