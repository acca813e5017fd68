"""A trained model as plain files that need no data set: what a device gets.

weights.safetensors      the variables
calibration.safetensors  of a network that methods without a training start from: what they need to know of training
                         images
config.json              the config of the training
card.json                names of the classes, form of the images, scores, and what adapting brought; see Card
README.md                the card in words
manifest.json            hashes of all
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from cxda_jax.config.fields import NOT_NEGATIVE, POSITIVE, SEED, Range
from cxda_jax.disk import files, folders, manifest, safetensors
from cxda_jax.disk.kinds import NUMBER, Kind, is_within, require
from cxda_jax.disk.reading import read_object, reason
from cxda_jax.errors import UserError
from cxda_jax.types import Variables

WEIGHTS, CALIBRATION, CONFIG, CARD, README = (
    "weights.safetensors", "calibration.safetensors", "config.json", "card.json", "README.md",
)  # fmt: skip
FILES = (WEIGHTS, CALIBRATION, CONFIG, CARD, README, manifest.NAME)
AGAIN = "copy it again from where it is whole"
FAR, LEAST_SPREAD = 4.0, 0.02  # standard deviations; and the least of them, of looks
WHOLE = Range(0, 2**31 - 1)
WEIGHTS_WITHIN = Range(-1e18, 1e18)  # the squares of larger ones do not fit


class Gain(NamedTuple):
    """The points that adapting brought in validation, by the number of support images; all but `sizes` in points."""

    sizes: tuple[int, ...]  # numbers of support images, ascending from 0
    score: tuple[float, ...]  # mean score of the tasks with so many
    mean: tuple[float, ...]  # its difference to the score without any, paired over the tasks
    low: tuple[float, ...]  # where the 95 % bootstrap interval of the difference begins
    high: tuple[float, ...]  # where it ends
    tasks: int

    def helps_from(self) -> int | None:
        """The least size from which on adapting surely gained at every measured size; None if there is none.

        A gain is sure where its 95 % interval lies above 0. At one size that is wrong
        for one model in forty that gains nothing.
        """
        unsure = [number for number, low in enumerate(self.low) if low <= 0 or not number]
        return next(iter(self.sizes[max(unsure) + 1 :]), None)


class Looks(NamedTuple):
    """The brightness of the training images, and the contrast in each: means and standard deviations, in 0..1."""

    brightness: float
    brightness_spread: float
    contrast: float
    contrast_spread: float

    @classmethod
    def of(cls, images: np.ndarray) -> "Looks":
        """Of images uint8 [n, h, w, c]."""
        values = _looks(images)
        (brightness, contrast), spreads = values.mean(0), np.maximum(values.std(0), LEAST_SPREAD)
        return cls(*(round(float(x), 4) for x in (brightness, spreads[0], contrast, spreads[1])))

    def unlike(self, images: np.ndarray) -> float:
        """The share of images that lie farther from the training images than nearly all of those do."""
        middle, spread = np.array(self[::2]), np.array(self[1::2])
        return float((np.abs(_looks(images) - middle) > FAR * spread).any(1).mean()) if len(images) else 0.0


def _looks(images: np.ndarray) -> np.ndarray:
    return np.stack([images.mean((1, 2, 3)), images.std((1, 2, 3))], 1) / 255


class Card(NamedTuple):
    """The facts that one must know to use a model, and those that one should."""

    method: str
    seed: int
    step: int  # of the training, after which the weights were taken
    data: str  # the name of the data set
    data_hash: str  # its identity
    provenance: str
    licence: str  # of the data
    class_names: tuple[str, ...]  # in the order of the logits
    shape: tuple[int, int, int]  # of an image: height, width, channels
    fit: str  # how an image is brought to this shape, a key of FITS
    background: tuple[int, int, int]  # under transparent images and beside padded ones
    mean: tuple[float, ...]  # of each channel in 0..1, which is subtracted
    std: tuple[float, ...]  # by which it is then divided
    metric: str
    # {"avg", "w10"} in %, each with "_low" and "_high" of its 95 % interval, and "num_tasks"; None before the test
    test: Mapping[str, float] | None
    gain: Gain | None  # None where it was not measured
    package: str  # its version
    commit: str  # of its repository, with "+" if files had changed since; "" where it was installed without one
    looks: Looks | None = None  # of the training images; None in a card of an older version


_TEST = tuple(f"{score}{end}" for score in ("avg", "w10") for end in ("", "_low", "_high"))
_POINTS, _OF_SIZES = Range(-1000, 1000), ("sizes",)
_PIXEL, _OF_CHANNELS = Range(-1e6, 1e6), ("channels",)
_FIELDS = {
    **dict.fromkeys(
        ("method", "data", "data_hash", "provenance", "licence", "fit", "metric", "package", "commit"), str
    ),
    "class_names": Kind(list, each=str),
    "shape": Kind(list, each=int, shape=(3,)),
    "background": Kind(list, each=int, shape=(3,)),
    **dict.fromkeys(("mean", "std"), Kind(list, each=Kind(NUMBER, _PIXEL), shape=_OF_CHANNELS)),
    "seed": Kind(int, SEED),
    "step": Kind(int, WHOLE),
    "test": Kind(dict, null=True, absent=True, each={
        **dict.fromkeys(_TEST, Kind(NUMBER, _POINTS)), "num_tasks": Kind(NUMBER, POSITIVE),
    }),
    "gain": Kind(dict, null=True, absent=True, each={
        "sizes": Kind(list, each=Kind(int, WHOLE), shape=_OF_SIZES, order="rises"),
        **dict.fromkeys(Gain._fields[1:-1], Kind(list, each=Kind(NUMBER, _POINTS), shape=_OF_SIZES)),
        "tasks": Kind(int, WHOLE),
    }),
    "looks": Kind(dict, null=True, absent=True, each=dict.fromkeys(Looks._fields, Kind(NUMBER, NOT_NEGATIVE))),
}  # fmt: skip
_PARTS = {"gain": Gain, "looks": Looks}


def write_model(
    folder: Path,
    variables: Variables,
    config: Mapping[str, Any],
    notes: Mapping[str, Any],
    about: Mapping[str, Any] = {},
    card: Card | None = None,
    calibration: Mapping[str, Mapping[str, Any]] = {},
) -> None:
    """Writes a model. The weights' header takes the notes, such as the step; the manifest takes facts `about` all.

    `calibration` is by method. Without a card it can be tested on its data set, but not be used without it.
    """
    told = {name: json.dumps(value) for name, value in notes.items()}
    trees = {WEIGHTS: variables, **({CALIBRATION: calibration} if calibration else {})}
    texts = {CONFIG: json.dumps(config, indent=1)}
    if card:
        texts |= {CARD: json.dumps(to_json(card), indent=1), README: in_words(card)}
    with folders.replaced(folder, lambda _: FILES) as new:
        hashes = {
            name: files.write_hashed(new / name, safetensors.pieces(jax.device_get(safetensors.named(tree)), told))
            for name, tree in trees.items()
        }
        for name, text in texts.items():
            files.write_text(new / name, text + "\n")
        manifest.write(new, [*hashes, *texts], hashes, about)


def is_model(folder: Path) -> bool:
    return (folders.current(folder) / WEIGHTS).exists()


def read_model(folder: Path, like: Variables) -> tuple[Variables, dict[str, Any]]:
    """The variables, with the names, shapes and types of `like`, and the notes."""
    arrays, notes = read_arrays(folder, WEIGHTS)
    try:
        return safetensors.as_tree(arrays, like), {name: json.loads(text) for name, text in notes.items()}
    except (ValueError, RecursionError) as e:
        raise UserError(f"{folder}/{WEIGHTS}: {reason(e)}; was {CONFIG} copied from another model?") from None


def read_arrays(folder: Path, name: str, beside: str = CONFIG) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays of a file, and its notes, where the file and that `beside` it are whole and all numbers are finite."""
    _insist_on(folder, [beside, name])
    arrays, notes = safetensors.read(folder / name, f"{folder}/{name}", AGAIN)
    for which, array in arrays.items():
        if not is_within(array, WEIGHTS_WITHIN):
            what = f"{which} has values that are not finite, or too large to answer with"
            raise UserError(f"{folder}/{name}: {what}; train again")
    return arrays, notes


def _insist_on(folder: Path, names: Sequence[str]) -> None:
    """Raises a UserError unless the files are those that were written."""
    if fault := manifest.find_fault(folder, names):
        raise UserError(f"{folder}: {fault}; {AGAIN}")


def read_calibration(folder: Path, method: str) -> dict[str, np.ndarray]:
    """The facts about the training images that a method needs, of a model whose files are whole;
    {} if nothing was kept for it."""
    if not (folder / CALIBRATION).exists():
        return {}
    arrays, _ = read_arrays(folder, CALIBRATION)
    split = {name: name.partition("/") for name in arrays}
    return {rest: arrays[name] for name, (whose, _, rest) in split.items() if whose == method}


def read_card(folder: Path) -> Card:
    """The card of a model, once it and the config are whole."""
    where = f"{folder}/{CARD}"
    if not (folder / CARD).exists():
        raise UserError(f"{where}: missing; models of older versions have none: give the training's command once more")
    _insist_on(folder, [CARD, CONFIG])
    content = read_object(folder / CARD, AGAIN)
    require(content, _FIELDS, where, AGAIN)
    for name, kind in _PARTS.items():
        if part := content.get(name):
            content[name] = kind(**{field: _as_tuple(part[field]) for field in kind._fields})
    if (gain := content.get("gain")) and gain.sizes[:1] != (0,):
        raise UserError(f"{where}: gain.sizes={gain.sizes[:3]}, expected sizes from 0 on; {AGAIN}")
    return Card(**{name: _as_tuple(content.get(name)) for name in Card._fields})


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def to_json(card: Card) -> dict[str, Any]:
    return {**card._asdict(), "gain": card.gain and card.gain._asdict(), "looks": card.looks and card.looks._asdict()}


def in_words(card: Card) -> str:
    """The card as a Markdown page."""
    height, width, channels = card.shape
    some = ", ".join(card.class_names[:10]) + ", ..." * (len(card.class_names) > 10)
    lines = [
        f"# {card.data}: {card.method}",
        "",
        f"A classifier of {len(card.class_names)} classes ({some}) for images of {height}x{width} pixels and "
        f"{channels} channel{'s' * (channels > 1)}, which cxda_jax {card.package} "
        f"trained{f' (commit {card.commit})' * bool(card.commit)}.",
        "",
        f"- method: `{card.method}`, seed {card.seed}, weights of step {card.step}",
        f"- data: {card.data}, {card.provenance or 'of unknown origin'} (identity {card.data_hash[:12]})",
        f"- licence of the data: {card.licence or 'not recorded'}",
        f"- images: brought to size by `{card.fit}`, background {tuple(card.background)}",
    ]
    if t := card.test:
        said = [f"{t[name]:.1f} % ({t[f'{name}_low']:.1f} to {t[f'{name}_high']:.1f})" for name in ("avg", "w10")]
        scores = f"{card.metric} {said[0]}, in the worst tenth {said[1]}, 95 % intervals"
        lines.append(f"- test: {scores}, over {t['num_tasks']:.0f} tasks of domains that training did not see")
    if card.gain:
        lines += ["", *gain_in_words(card.gain)]
    lines += [
        "",
        "It knows the classes above and no others: it names one of them for every image. "
        "It was tested on domains of the data",
        "above. On images of another kind its answers, and what adapting brings, may be worse.",
        "",
        "```python",
        "import cxda_jax",
        "",
        'model = cxda_jax.load("THIS FOLDER")',
        "adapted = model.adapt(images)  # unlabelled images of your own: paths, PIL images or arrays",
        "adapted.predict(images).names",
        "```",
    ]
    return "\n".join(lines)


def gain_in_words(gain: Gain) -> list[str]:
    """A table of the gain by the number of support images, and from where adapting helps, as lines of Markdown."""
    since = gain.helps_from()
    said = (
        f"Adapting surely helped from {since} image{'s' * (since > 1)} on."
        if since
        else "Adapting brought no sure gain at the largest size measured."
    )
    rows = zip(gain.sizes, gain.score, gain.mean, gain.low, gain.high, strict=True)
    return [
        f"What adapting brought on {gain.tasks} validation tasks, in points, with 95 % intervals. {said}",
        "",
        "| own images | score | gain |",
        "|---|---|---|",
        *(f"| {n} | {score:.1f} | {mean:+.1f} ({low:+.1f} to {high:+.1f}) |" for n, score, mean, low, high in rows),
    ]
