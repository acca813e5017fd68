"""What fit() gives: the adapter of a classifier."""

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cxda_jax.adapter.buffer import check_number
from cxda_jax.adapter.device import Device, as_images, make_device, method_of
from cxda_jax.config.fields import SEED, SHARE, Range
from cxda_jax.disk import files, folders, manifest, models, safetensors
from cxda_jax.disk.kinds import NUMBER, Kind, require
from cxda_jax.disk.reading import read_object, reason
from cxda_jax.errors import UserError, brief, needing
from cxda_jax.methods.cxda_shares import ADAPTER_DEFAULTS
from cxda_jax.nets.shares import EVIDENCE, HIDDEN, LARGEST, LOG_FLOOR, OWN
from cxda_jax.training import metrics
from cxda_jax.types import ADAPTER, Variables
from cxda_jax.version import VERSION

SIZES = (0, 5, 20, 100)  # images of buffers on which the adapter was judged
PLAIN = "plain"  # in a report, the classifier's own answers
LIMIT = 1e9  # of numbers that are given; the squares of larger ones do not fit
CURVES = "thresholds", "accepted", "wrong"  # what thresholds follow from, without a buffer and with 100 images
MANY = 20  # rows that differ, all of which look like probabilities by no chance
HOLDS, PAGE = {"holds": "adapter"}, "report.html"  # in the manifest; beside it
_COUNT, _POINTS = Kind(int, Range(0, 2**31 - 1)), Kind(NUMBER, Range(-1e4, 1e4))  # of few domains, intervals are wide
_TEMPERATURE = Kind(dict, each={"temperature": Kind(NUMBER, Range(1e-3, 1e3))})
_REPORT = {  # what is read of it; save() writes all that fit() found
    "steps": _COUNT,
    "tasks": _COUNT,
    "overall": {"plain": Kind(NUMBER, Range(0, 100))} | {str(n): Kind(list, each=_POINTS, shape=(3,)) for n in SIZES},
    "calibration": {str(n): _TEMPERATURE for n in SIZES} | {PLAIN: _TEMPERATURE._replace(absent=True)},
    "drift": {"limit": Kind(NUMBER, Range(0, LIMIT), null=True)},
}
_ORIGIN = {
    "classes": Kind(list, each=str, shape=("classes",), absent=True),
    **dict.fromkeys(("encoder", "encoder_sha256", "fit", "logits", "features"), Kind(str, absent=True)),
    **dict.fromkeys(("size", "batch"), Kind(int, Range(1, 2**16), absent=True)),
    **dict.fromkeys(("mean", "std"), Kind(list, each=NUMBER, absent=True)),
    **dict.fromkeys(("maps", "head"), Kind(list, each=str, absent=True)),
}
_KINDS = {
    "classes": Kind(int, Range(2, 2**24)),
    "style": Kind(int, Range(1, 2**24)),
    "seed": Kind(int, SEED),
    "keys": Kind(str, choices=("style", "features", "logits")),
    "package": str,
    "said": str,
    "report": _REPORT,
    "origin": _ORIGIN,
}
# Within these nothing overflows for numbers within LIMIT: keys stay below 1e14 and scaled logits below 1e31, whose
# squares or sums fit, and nothing that divides, or whose logarithm is taken, comes near 0. What is left are numbers so
# large that their rounding errors do not fit into exp(); predict_logits() refuses these.
_WIDE, _EXPONENT, _PART = Range(-LIMIT, LIMIT), Range(-50, 50), Range(1e-12, 1)
_KNOWN = {
    "centre": Kind("f", _WIDE, shape=("style",)),
    **dict.fromkeys(("between", "within"), Kind("f", Range(0, LIMIT), shape=("style",))),
    "scale": Kind("f", _WIDE, shape=()),
    "bias": Kind("f", _WIDE, shape=("classes",)),
    "own_scale": Kind("f", _WIDE, shape=(), absent=True),
    "own_bias": Kind("f", _WIDE, shape=("classes",), absent=True),
    "shares": Kind("f", _PART, shape=("classes",)),
    "thresholds": Kind("f", SHARE, shape=(2, "levels"), order="falls"),
    **dict.fromkeys(("accepted", "wrong"), Kind("f", Range(0, LIMIT), shape=(2, "domains", "levels"))),
}
_VARIABLES = {
    f"params/{ADAPTER}/kernel": Kind("f", _WIDE, shape=("style", ADAPTER_DEFAULTS.rank)),
    f"params/{ADAPTER}/bias": Kind("f", _WIDE, shape=(ADAPTER_DEFAULTS.rank, "classes")),
    f"params/{ADAPTER}/offset": Kind("f", _WIDE, shape=("classes",)),
    **{f"params/{ADAPTER}/{name}": Kind("f", _WIDE, shape=()) for name in ("near", "strength")},
    **{f"params/{ADAPTER}/{name}": Kind("f", _EXPONENT, shape=()) for name in ("log_t", "log_n", "log_m")},
    f"params/{ADAPTER}/log_l": Kind("f", _EXPONENT, shape=(), absent=True),
    f"params/{ADAPTER}/evidence_kernel": Kind("f", _WIDE, shape=(EVIDENCE, HIDDEN), absent=True),
    **{f"params/{ADAPTER}/{n}": Kind("f", _WIDE, shape=(HIDDEN,), absent=True) for n in ("evidence_bias", "belief")},
    f"batch_stats/{ADAPTER}/mean": Kind("f", _WIDE, shape=("style",)),
    f"batch_stats/{ADAPTER}/std": Kind("f", Range(1e-7, 10 * LIMIT), shape=("style",)),
    f"batch_stats/{ADAPTER}/shares": Kind("f", _PART, shape=("classes",)),
    (_FLOOR := f"batch_stats/{ADAPTER}/{LOG_FLOOR}"): Kind("f", Range(-LIMIT, 0), shape=(), absent=True),
}
_OWN = {  # of an adapter that corrects by the own style
    f"batch_stats/{ADAPTER}/{OWN}/{name}": kind
    for name, kind in {
        "scale": Kind("f", Range(-1e3, 1e3), shape=()),
        "bias": Kind("f", _WIDE, shape=("classes",)),
        **dict.fromkeys(("weights", "common"), Kind("f", _WIDE, shape=("style", "classes"))),
        "content": Kind("f", _WIDE, shape=("classes", "classes")),
        "mean": Kind("f", _WIDE, shape=("style",)),
        "std": Kind("f", Range(1e-7, 10 * LIMIT), shape=("style",)),
    }.items()
}
_HEAD = {  # of an adapter whose encoder has no logits
    "weights": Kind("f", _WIDE, shape=("features", "classes")),
    "bias": Kind("f", _WIDE, shape=("classes",)),
}


class Head(NamedTuple):
    """A last layer, as a function of features [n, d]: logits [n, classes]."""

    weights: np.ndarray  # [d, classes]
    bias: np.ndarray

    def __call__(self, features: Any) -> np.ndarray:
        x, width = as_numbers("features", features), len(self.weights)
        if x.shape[1] != width:
            raise UserError(f"features: {x.shape[1]} columns, the head has {width}; give those of the same encoder")
        return x @ self.weights + self.bias


class Adapter(NamedTuple):
    """An adapter for one classifier. Nothing changes it.

    Attributes:
      classes: of the classifier.
      style: numbers of a style.
      keys: what fit() had for a style: style, features or logits.
      seed: of fit().
      variables: what was learnt.
      known: of all domains the `centre` of their mean styles, and the variances `between` and `within` them; how often
        answers are `accepted` and `wrong` by domain at each of some `thresholds`; what EM knows of the classifier's
        answers, and of those corrected by the own style.
      report: what fit() found, as numbers that JSON can hold. docs/fit.md explains them.
      said: the report as text.
      origin: how `cxda fit` got the arrays: the encoder, its options, the names of the classes; {} where it did not.
      always: devices adapt whatever validation said.
      head: gives the logits, where the encoder has none.
    """

    classes: int
    style: int
    keys: str
    seed: int
    variables: Variables
    known: Mapping[str, np.ndarray]
    report: Mapping[str, Any]
    said: str
    origin: Mapping[str, Any] = {}  # nothing changes it; a MappingProxyType cannot be pickled
    always: bool = False
    head: Head | None = None

    def __repr__(self) -> str:
        return f"Adapter({self.classes} classes, {self.keys} of {self.style}, {'not ' * (not self.helps)}trusted)"

    def __str__(self) -> str:
        return self.said

    @property
    def helps(self) -> bool:
        """Whether devices adapt: new domains surely gain on average with 100 images, or trusted() says so."""
        return self.always or self.report["overall"][str(SIZES[-1])][1] > 0

    def trusted(self) -> "Adapter":
        """The same adapter, but its devices adapt though no gain is sure. save() does not keep this."""
        return self._replace(always=True)

    def adapt(self, logits: Any, style: Any = None) -> Device:
        """Adapts to a buffer of unlabelled images: their logits [n, classes], and what fit() had for a style [n, d]."""
        return make_device(self, self.rows(logits, style))

    def logits_of(self, answer: Mapping[str, np.ndarray]) -> np.ndarray:
        """The logits in what an encoder says, or those of the head."""
        if "logits" in answer:
            return answer["logits"]
        if self.head is None or "features" not in answer:
            raise UserError("logits: missing, and the adapter has no head; give what fit() had for them")
        return self.head(answer["features"])

    def rows(self, logits: Any, style: Any = None) -> np.ndarray:
        """Images as the adapter reads them, [n, classes + style]. A UserError names what is not as in fit()."""
        if (style is None) != (self.keys == "logits"):
            told = "missing; give what fit() had for it" if style is None else "fit() had none; leave it out"
            raise UserError(f"style: {told}")
        z = as_logits(logits)
        s = z if style is None else as_numbers("style", style, len(z))
        for name, array, width in (("logits", z, self.classes), ("style", s, self.style)):
            if array.shape[1] != width:
                raise UserError(
                    f"{name}: {array.shape[1]} columns, fit() had {width}; give those of the same classifier"
                )
        return np.concatenate([z, s], axis=1)

    @property
    def corrects(self) -> bool:
        """Whether it corrects answers by the image's own style, which needs no buffer."""
        return OWN in self.variables["batch_stats"][ADAPTER]

    def temperature(self, count: int | None) -> float:
        """The temperature that divides the logits where the buffer has so many images; None: of the classifier alone.

        Between the sizes at which it was measured it is linear in log(1 + count).
        """
        if count is None:
            calibration = self.report["calibration"]
            return calibration.get(PLAIN, calibration[str(SIZES[0])])["temperature"]
        measured = [self.report["calibration"][str(n)]["temperature"] for n in SIZES]
        return float(np.interp(math.log1p(count), np.log1p(SIZES), measured))

    def threshold_for(self, risk: float = 0.05) -> float:
        """The least confidence from which on at most this part of the answers is wrong, with 100 images.

        A device that gives no answer below it takes this risk: with 95 % confidence, on average over new domains and
        the kinds of tasks of the report. A single domain may take more. It is inf where the images of fit() cannot show
        so small a risk.
        """
        check_number("risk", risk, (int, float), 0, 1)
        thresholds, accepted, wrong = (self.known[name][int(self.helps)] for name in CURVES)
        surest = metrics.surest_within(risk, accepted, wrong)
        return float(thresholds[surest - 1]) if surest else math.inf

    def distance(self, rows: np.ndarray) -> float:
        """How far the mean style of images [n, classes + style] lies from those of training domains, in deviations."""
        stats = self.variables["batch_stats"][ADAPTER]
        scaled = standardised(rows[:, self.classes :], np.asarray(stats["mean"]), np.asarray(stats["std"]))
        return apart(scaled, *(self.known[name] for name in ("centre", "between", "within")))

    def drift(self, rows: np.ndarray) -> str:
        """What to tell of images [n, classes + style] that lie beyond the domains of fit(); "" if they do not."""
        limit = self.report["drift"]["limit"]
        if limit is None or not len(rows) or (distance := self.distance(rows)) <= limit:
            return ""
        said = f"the buffer's mean style is {distance:.2f} deviations from the domains of fit()"
        return f"{said}, whose own buffers are {limit:.2f} apart at most; the classifier's own answers stay"

    @classmethod
    def from_pretrained(cls, repo: str, revision: str | None = None) -> "Adapter":
        """The adapter in a folder or in a repository OWNER/NAME of the Hugging Face Hub, checked by load_adapter()."""
        if Path(repo).is_dir():
            return load_adapter(repo)
        with needing(f"repo={brief(repr(repo))}", "hub", ", or give a folder"):
            from huggingface_hub import snapshot_download
        with faults("repo", repo, "give a folder, or OWNER/NAME of a repository that you may read"):
            wanted = [models.WEIGHTS, models.CARD, manifest.NAME]
            folder = snapshot_download(repo, revision=revision, allow_patterns=wanted)
        return load_adapter(folder)

    def push_to_hub(self, repo: str, private: bool = True) -> str:
        """Uploads what save() writes into a repository OWNER/NAME of the Hugging Face Hub. Gives the commit's URL."""
        with needing(f"repo={brief(repr(repo))}", "hub"):
            import huggingface_hub
        with tempfile.TemporaryDirectory() as folder, faults("repo", repo, "give OWNER/NAME that you may write to"):
            self.save(folder)
            huggingface_hub.create_repo(repo, private=private, exist_ok=True)
            return str(huggingface_hub.upload_folder(repo_id=repo, folder_path=folder))

    def save(self, folder: str | os.PathLike, page: str = "") -> None:
        """Writes weights.safetensors, card.json and manifest.json; an adapter in the folder is replaced.

        `page` is HTML that shows the report, for report.html.
        """
        folder = Path(folder)
        insist_on_place(folder)
        parts = {"variables": self.variables, "known": dict(self.known)}
        parts |= {"head": self.head._asdict()} if self.head else {}
        arrays = safetensors.named(jax.device_get(parts))
        card = {name: getattr(self, name) for name in _KINDS if name != "package"} | {"package": VERSION}
        card["origin"] = dict(self.origin)
        with folders.replaced(folder, lambda _: (models.WEIGHTS, models.CARD, PAGE, manifest.NAME)) as new:
            hashes = {models.WEIGHTS: files.write_hashed(new / models.WEIGHTS, safetensors.pieces(arrays))}
            files.write_text(new / models.CARD, json.dumps(card, indent=1) + "\n")
            if page:
                files.write_text(new / PAGE, page)
            manifest.write(new, [models.CARD, models.WEIGHTS], hashes, HOLDS)


@contextlib.contextmanager
def faults(field: str, value: str, fix: str) -> Iterator[None]:
    """Around code of others, which raises exceptions of all kinds. The line names the field that asked for it."""
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        raise UserError(f"{reason(e)} ({type(e).__name__}); {fix}", field, value) from e


def load_adapter(folder: str | os.PathLike) -> Adapter:
    """An adapter that save() wrote. It answers bit for bit as the one that was saved, on an equal machine."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give one that holds an adapter")
    (arrays, _), card = folders.read(
        folder,
        lambda where: (
            models.read_arrays(where, models.WEIGHTS, beside=models.CARD),
            read_object(where / models.CARD, models.AGAIN),
        ),
    )
    require(card, _KINDS, f"{folder}/{models.CARD}", models.AGAIN, card)
    card = {name: card[name] for name in _KINDS if name != "package"}
    if card["keys"] == "logits" and card["style"] != card["classes"]:
        raise UserError(f"{folder}/{models.CARD}: style={card['style']}, but keys=logits; {models.AGAIN}")
    named = [(name.partition("/"), array) for name, array in arrays.items()]
    variables, known, head = ({n: x for (part, _, n), x in named if part == p} for p in ("variables", "known", "head"))
    where = f"{folder}/{models.WEIGHTS}"
    corrects = bool(_OWN.keys() & variables.keys())
    of_variables = _VARIABLES | _OWN if corrects else _VARIABLES
    for part, kinds in ((variables, of_variables), (known, _KNOWN), (head, _HEAD if head else {})):
        require(part, kinds, where, models.AGAIN, card)
    if not known["accepted"].size or (known["wrong"] > known["accepted"]).any():
        raise UserError(f"{where}: known/wrong is more than known/accepted, or nothing; {models.AGAIN}")
    own = {name.rpartition("/")[2]: variables.pop(name) for name in _OWN if corrects}
    floor = variables.pop(_FLOOR, None)
    example = as_images(np.zeros((1, card["classes"] + card["style"]), np.float32))
    like = jax.eval_shape(method_of(card["classes"]).init, jax.random.key(0), example)
    for name, x in like["params"][ADAPTER].items():  # older adapters do not weigh evidence
        if getattr(_VARIABLES[f"params/{ADAPTER}/{name}"], "absent", False):
            variables.setdefault(f"params/{ADAPTER}/{name}", np.zeros(x.shape, np.float32))
    try:
        tree = safetensors.as_tree(variables, like)
        if own:
            tree["batch_stats"][ADAPTER][OWN] = own
        if floor is not None:
            tree["batch_stats"][ADAPTER][LOG_FLOOR] = floor
        return Adapter(**card, variables=tree, known=known, head=Head(**{n: head[n] for n in _HEAD}) if head else None)
    except ValueError as e:
        raise UserError(f"{where}: {e}; {models.AGAIN}") from None


def is_adapter(folder: Path) -> bool:
    try:
        return folders.read(folder, lambda where: read_object(where / manifest.NAME, "")).get("about") == HOLDS
    except UserError:
        return False


def insist_on_place(folder: Path) -> None:
    """Raises a UserError unless save() may write there: in no folder, an empty one, or one with an adapter."""
    others = folders.entries(folder)
    if not folder.exists() or folder.is_dir() and not others or is_adapter(folder):
        return
    found = folder / min(others) if others else folder
    raise UserError(f"{found}: {folder.name} holds something else than an adapter; choose a new folder")


def standardised(style: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Styles [n, d] as the keys are made of them."""
    return np.clip((style - mean) / std, -LARGEST, LARGEST)


def apart(style: np.ndarray, centre: np.ndarray, between: np.ndarray, within: np.ndarray) -> float:
    """How far the mean of standardised styles [n, d] lies from the centre of domains, in deviations of such means."""
    spread = between + within / len(style) + 1e-6
    return float(np.sqrt(np.mean(np.square(style.mean(0) - centre) / spread)))


def as_logits(given: Any) -> np.ndarray:
    """Logits as float32 [n, columns]; a UserError says what is wrong with them."""
    z = as_numbers("logits", given)
    if told := as_probabilities(z):
        raise UserError(f"logits: {told}; give np.log(probabilities)")
    return z


def as_probabilities(z: np.ndarray) -> str:
    """What shows that numbers [n, columns] are probabilities, also in per cent, and no logits; "" if nothing does."""
    if not len(z) or z.min() < 0 or z.max() > 101:
        return ""
    many = len(np.unique(z[: 10 * MANY], axis=0)) >= MANY
    # Logits come near by chance: one row of them more than several, and many rows not even where they were rounded.
    near = 0.05 if many else 1e-3 if len(z) > 1 else 1e-5
    for whole in (1, 100):
        if np.abs(z.sum(1, dtype=np.float64) / whole - 1).max() <= near:
            return f"each row sums to {whole}, so they are probabilities"
    return "all numbers lie in 0 to 1, as probabilities do" if many and z.max() <= 1 else ""


def as_numbers(name: str, given: Any, length: int | None = None) -> np.ndarray:
    """What is given as float32 [n, columns]; a UserError says what is wrong with it."""
    array = as_array(name, given)
    if array.dtype == object:
        array = as_array(name, array, np.float64)
    elif array.dtype.kind == "V" and jnp.issubdtype(array.dtype, jnp.floating):  # bfloat16 and the like
        array = array.astype(np.float32)
    if array.ndim != 2 or array.dtype.kind not in "iuf" or not array.shape[1]:
        raise UserError(f"{name}: shape {array.shape} of {array.dtype}; give numbers [images, columns]")
    if length is not None and len(array) != length:
        raise UserError(f"{name}: {len(array)} rows, but logits has {length}; give one for each image")
    with np.errstate(over="ignore"):
        floats = np.ascontiguousarray(array, np.float32)
    wrong = np.argwhere(~(np.abs(floats) <= LIMIT))
    if len(wrong):
        what = f"row {wrong[0][0]} has {array[tuple(wrong[0])]:g}"
        raise UserError(f"{name}: {what}; leave such images out, and give no numbers beyond {LIMIT:g}")
    return floats


def as_array(name: str, given: Any, kind: Any = None) -> np.ndarray:
    """What is given as an array, which loses nothing; a UserError says why it cannot be one."""
    if np.ma.is_masked(given):
        raise UserError(f"{name}: {np.ma.count_masked(given)} values are masked; leave such images out")
    try:
        if hasattr(given, "detach"):  # of PyTorch, on any device; nothing here gives it a gradient
            given = given.detach().cpu()
            given = given.float() if "bfloat16" in str(given.dtype) else given
        by_dlpack = hasattr(given, "__dlpack__") and not hasattr(given, "__array__")
        array = np.from_dlpack(given) if by_dlpack else np.asarray(given)
        if kind and array.dtype.kind == "c":
            raise TypeError(f"{array.dtype} has an imaginary part")
        return array.astype(kind, copy=False) if kind else array
    except Exception as e:  # of whatever package it is
        told = f"{brief(type(given).__name__)} is no array of numbers ({reason(e, 60)})"
        raise UserError(f"{name}: {told}; give what np.asarray takes") from None
