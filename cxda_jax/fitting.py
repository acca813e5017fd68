"""Adapts the classifier that you already have: fit() learns from what it says of labelled images.

    adapter = cxda_jax.fit(logits, labels, domains, style=style)    # images that the classifier was not trained on
    device = adapter.adapt(buffer_logits, style=buffer_style)       # unlabelled images of a device, any number
    proba = device.predict_proba(new_logits, style=new_style)

Logits are what the classifier gives before softmax. The style of an image is any vector that tells domains apart: means
and deviations of the channels of early maps do, and the last features hardly do.
"""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cxda_jax import augment, train
from cxda_jax.data.episodes import Draw, EpisodeSpec, Plan, check_spec, domains_for, sample_plans
from cxda_jax.data.sources import device_source
from cxda_jax.data.store import DomainStore, StoreInfo
from cxda_jax.disk import checkpoints
from cxda_jax.errors import UserError
from cxda_jax.evaluation import Tasks, compile_task, evaluate
from cxda_jax.experiment import adapter_optimizer
from cxda_jax.machine import backend
from cxda_jax.methods.cxda_shares import measure, on_described
from cxda_jax.types import Adapted, Array, Described, Images, Variables

VALIDATION, VAL_TASKS = 0.25, 200  # the part of the domains that chooses the best weights; tasks of a validation
TASKS, RATE = 16, 1e-2  # tasks of a step; Adam's rate


class Device(NamedTuple):
    """A device that has adapted to its buffer."""

    adapter: "Adapter"
    adapted: Adapted

    def predict_logits(self, logits: Any, style: Any = None) -> np.ndarray:
        """The adapted logits [n, classes] of new images, each answered alone."""
        query = self.adapter.images(logits, style)
        return np.asarray(self.adapter.predict(self.adapted, query))[: len(logits)]

    def predict_proba(self, logits: Any, style: Any = None) -> np.ndarray:
        """The probabilities [n, classes] of new images."""
        return np.asarray(jax.nn.softmax(self.predict_logits(logits, style)))


class Adapter(NamedTuple):
    """An adapter for one classifier.

    Attributes:
      classes: of the classifier.
      style: numbers of a style.
      variables: what was learnt.
      encode: the compiled part that adapts.
      predict: the compiled part that answers.
      accuracy: on tasks of validation domains, of the classifier alone and with a buffer of 100 images.
    """

    classes: int
    style: int
    variables: Variables
    encode: Callable[[Variables, Images, Array], Adapted]
    predict: Callable[[Adapted, Images], Array]
    accuracy: tuple[float, float]

    def __str__(self) -> str:
        plain, adapted = self.accuracy
        said = (
            f"on tasks of validation domains {plain:.1%} are right without a buffer and {adapted:.1%} with 100 images"
        )
        return said if self.helps else f"{said}: it does not help, so it gives the classifier's own answers"

    @property
    def helps(self) -> bool:
        """Whether validation domains gained. If not, the classifier's own answers stay."""
        return self.accuracy[1] > self.accuracy[0]

    def adapt(self, logits: Any, style: Any = None) -> Device:
        """Adapts to a buffer of unlabelled images: their logits [n, classes] and styles [n, d]."""
        images = self.images(logits, style)
        if not self.helps:
            images = images.replace(present=jnp.zeros(len(images.pixels), bool))
        return Device(self, self.encode(self.variables, images, jax.random.key(0)))

    def images(self, logits: Any, style: Any = None) -> Images:
        """Images as the adapter reads them, in a power of two of places, so that few numbers are compiled for.

        A UserError names what has another form than in fit().
        """
        logits, style = _arrays(logits, style)
        for name, array, width in (("logits", logits, self.classes), ("style", style, self.style)):
            if array.shape[1] != width:
                raise UserError(
                    f"{name}: {array.shape[1]} columns, fit() had {width}; give those of the same classifier"
                )
        places = 2 ** max(4, math.ceil(math.log2(max(1, len(logits)))))
        pixels = np.zeros((places, 1, 1, self.classes + self.style), np.float32)
        pixels[: len(logits), 0, 0] = np.concatenate([logits, style], axis=1)
        return Images(jnp.asarray(pixels), jnp.zeros(places, jnp.int32), jnp.arange(places) < len(logits))


def fit(
    logits: Any,
    labels: Any,
    domains: Any,
    style: Any = None,
    steps: int = 1500,
    seed: int = 0,
    log: Callable[[str], None] = print,
) -> Adapter:
    """Learns to adapt a classifier, from images that it was not trained on.

    Args:
      logits: of the classifier, [n, classes].
      labels: class numbers [n].
      domains: numbers or names [n] of where each image comes from.
      style: a vector of each image [n, d]; None: the logits take its place, and domains are hardly told apart.
      steps: of the training.
      seed: of all that is random.
      log: takes lines of progress.
    """
    data = _store(*_checked(logits, labels, domains, style), seed)
    classes, specs = data.num_classes, {split: _spec(len(data.domains(split))) for split in ("train", "val")}
    for split, spec in specs.items():
        check_spec(spec, data, split)
    draws = {
        split: Draw(spec, data.offsets, domains_for(spec, data, split)[0], seed, stream, data.labels)
        for stream, (split, spec) in enumerate(specs.items())
    }
    method, source = on_described(classes), device_source(data)
    optimizer, evaluator = adapter_optimizer(RATE, steps), compile_task(method, source)
    state = train.init_state(method, optimizer, seed, Images(jnp.asarray(data.images[:2]), jnp.zeros(2, jnp.int32)))
    own = np.flatnonzero(np.isin(data.row_domains(), data.domains("train")))
    held = Described(data.images.reshape(len(data.images), -1)[own], data.labels[own], data.row_domains()[own])
    # The classifier's own training images are not given. The classes are taken to have the same shares there.
    state = state.replace(variables=measure(state.variables, held, held.labels))

    def train_plans(step: int) -> Plan:
        return sample_plans(draws["train"], range(step * TASKS, (step + 1) * TASKS))

    def accuracy(variables: Variables) -> float:
        asked = Tasks(lambda tasks: sample_plans(draws["val"], tasks), VAL_TASKS, "accuracy", per_call=10)
        return evaluate(evaluator, variables, source, asked).mean

    schedule = train.Schedule(steps, max(1, steps // 5), max(1, steps // 10), steps, TASKS)
    learner = train.Learner(method, optimizer, augment.Weak(crop=False, flip=False, rotate=0.0))
    with tempfile.TemporaryDirectory() as folder:
        run = train.Run(Path(folder), seed, log, lambda: False)
        train.train(learner, source, train_plans, state, schedule, accuracy, run)
        best, notes = checkpoints.restore(Path(folder) / "best", state.variables) or (state.variables, {"score": 0.0})
    asked = sample_plans(draws["val"], range(VAL_TASKS)).query
    right = data.images[..., :classes].reshape(-1, classes).argmax(1) == data.labels
    found = (float(right[asked].mean()), notes["score"])
    width = data.images.shape[-1] - classes
    adapter = Adapter(classes, width, best, backend.jit(method.adapt), backend.jit(method.predict), found)
    log(str(adapter))
    return adapter


def _spec(domains: int) -> EpisodeSpec:
    """Tasks of any shares and mixture, of five domains or of as many as there are."""
    number = max(1, min(5, domains))
    return EpisodeSpec(number, 100 // number, 20, shares="any", mixture="any", skip_small=True)


def _arrays(logits: Any, style: Any) -> tuple[np.ndarray, np.ndarray]:
    """Logits and style as finite float32 [n, ...]; without a style the logits take its place."""
    found = []
    for name, given in (("logits", logits), ("style", logits if style is None else style)):
        array = np.asarray(given)
        if array.ndim != 2 or not np.issubdtype(array.dtype, np.number):
            raise UserError(f"{name}: shape {array.shape} of {array.dtype}; give numbers [images, columns]")
        if not np.isfinite(array).all():
            raise UserError(
                f"{name}: row {int(np.argwhere(~np.isfinite(array))[0][0])} is not finite; leave such images out"
            )
        found.append(array.astype(np.float32))
    if len(found[0]) != len(found[1]):
        raise UserError(f"style: {len(found[1])} rows, but logits has {len(found[0])}; give one for each image")
    return found[0], found[1]


def _checked(logits: Any, labels: Any, domains: Any, style: Any) -> tuple[Described, int]:
    """The arguments of fit() as arrays, and the number of classes; a UserError names the first that is wrong."""
    z, s = _arrays(logits, style)
    y, d = np.asarray(labels), np.asarray(domains)
    for name, array in (("labels", y), ("domains", d)):
        if array.shape != (len(z),):
            raise UserError(f"{name}: shape {array.shape}, but logits has {len(z)} rows; give one for each image")
    if not np.issubdtype(y.dtype, np.integer):
        raise UserError(f"labels: {y.dtype}; give class numbers as integers, the columns of logits")
    if len(y) and not 0 <= y.min() <= y.max() < z.shape[1]:
        wrong = y.min() if y.min() < 0 else y.max()
        raise UserError(f"labels: {wrong} is none of the {z.shape[1]} columns of logits; count classes from 0")
    if len(z) and (z >= 0).all() and np.allclose(z.sum(1), 1, atol=1e-3):
        raise UserError("logits: each row sums to 1, so they are probabilities; give np.log(probabilities)")
    names = np.unique(d)
    if len(names) < 2:
        raise UserError(f"domains: {len(names)} of them; give images of two at least, of which one validates")
    return Described(np.concatenate([z, s], axis=1), y.astype(np.int32), np.searchsorted(names, d)), z.shape[1]


def _store(given: Described, number: int, seed: int) -> DomainStore:
    """The images as a data set of so many classes, sorted by domain. A part of the domains validates."""
    images, labels, domains = given
    order, count = np.argsort(domains, kind="stable"), int(domains.max()) + 1
    shuffled = np.random.Generator(np.random.Philox(key=[seed, 0])).permutation(count)
    validating = shuffled[: max(1, round(VALIDATION * count))]
    classes = tuple(map(str, range(number)))
    offsets = np.concatenate([[0], np.cumsum(np.bincount(domains, minlength=count))])
    split = tuple("val" if d in validating else "train" for d in range(count))
    info = StoreInfo("what fit() was given", classes, (0.0,), (1.0,))
    return DomainStore(
        info, images[order][:, None, None], labels[order], offsets, split, tuple(map(str, range(count))), ""
    )
