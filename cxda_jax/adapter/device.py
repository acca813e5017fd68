"""A device that adapts to its own images: rows of logits and style, which an adapter of fit() reads."""

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from cxda_jax.adapter.buffer import Buffer
from cxda_jax.errors import UserError
from cxda_jax.machine import backend
from cxda_jax.methods.cxda_shares import ADAPTER_DEFAULTS, WithBuffer, on_described
from cxda_jax.nets.shares import Keyed, ShareAdapter
from cxda_jax.types import ADAPTER, Adapted, Array, Images, Method, Variables

if TYPE_CHECKING:
    from cxda_jax.adapter.adapter import Adapter

CELLS = 2**22  # numbers of an array at a time
STEP = 4096  # buffers above it have a multiple of it of places, smaller ones a power of two


class Device(NamedTuple):
    """A device and its buffer.

    Nothing changes it, so threads may share it: observe() and forget() give another one.

    Attributes:
      adapter: that it was made by.
      buffer: rows of logits and style [classes + style], as many as it was given.
      adapted: what answers read; None: the classifier's own answers stay.
      drift: in what the buffer is unlike all that fit() saw; "" if it is not. If it is, the classifier's answers stay.
    """

    adapter: "Adapter"
    buffer: Buffer
    adapted: Adapted | None
    drift: str

    def __repr__(self) -> str:
        return f"Device({len(self.buffer)} images, {'not ' * (self.adapted is None)}adapted)"

    @property
    def images(self) -> np.ndarray:
        """What the buffer holds, logits and style [n, classes + style], the oldest first."""
        return self.buffer.images()

    def observe(self, logits: Any, style: Any = None) -> "Device":
        """The device with more images in its buffer."""
        buffer = self.buffer.copy()
        buffer.take(self.adapter.rows(logits, style))
        return _adapt(self.adapter, buffer)

    def forget(self, n: int = 1) -> "Device":
        """The device without its n oldest images, or without any if it has fewer."""
        buffer = self.buffer.copy()
        buffer.forget(n)
        return _adapt(self.adapter, buffer)

    def predict_logits(self, logits: Any, style: Any = None) -> np.ndarray:
        """The adapted logits [n, classes] of new images, each answered alone. No temperature changes them."""
        rows, classes = self.adapter.rows(logits, style), self.adapter.classes
        if self.adapted is None:
            return rows[:, :classes].copy()
        n = len(self.adapted.buffer.keys)
        room = CELLS // max(n, classes)  # arrays [queries, n] and [queries, classes]
        at_once = 2 ** int(math.log2(min(1024, max(1, room))))
        answers = [np.zeros((0, classes), np.float32)]
        for start in range(0, len(rows), at_once):
            some = rows[start : start + at_once]
            answers.append(np.asarray(programs(classes)[1](self.adapted, as_images(some, at_once)))[: len(some)])
        found = np.concatenate(answers)
        if not np.isfinite(found).all():
            raise UserError("logits: the adapted answers are not finite; give smaller numbers, or fit again")
        return found

    def predict_proba(self, logits: Any, style: Any = None) -> np.ndarray:
        """The probabilities [n, classes] of new images, at the temperature that validation chose for such a buffer.

        It moves no answer: the largest probability is that of the largest logit.
        """
        count = None if self.adapted is None else len(self.buffer)
        return probabilities(self.predict_logits(logits, style), self.adapter.temperature(count))

    def shares(self) -> np.ndarray | None:
        """The class shares [classes] of the device, as the adapter estimates them from its buffer.

        They are the mean over the buffer's images of the shares that EM finds around each. With few images they stay
        near those in training. Of a large buffer the newest 1,000 images count. None: the buffer is empty, or the
        device does not adapt.
        """
        return None if self.adapted is None else shares_in(self.adapted, self.adapter.classes)


def make_device(adapter: "Adapter", rows: np.ndarray) -> Device:
    """The device whose buffer has these images."""
    buffer = Buffer(rows.shape[1:], np.float32)
    buffer.take(rows)
    return _adapt(adapter, buffer)


def _adapt(adapter: "Adapter", buffer: Buffer) -> Device:
    rows = buffer.images()
    device = Device(adapter, buffer, None, adapter.drift(rows))
    if not adapter.helps or device.drift or not (len(rows) or adapter.corrects):
        return device
    adapted = programs(adapter.classes)[0](adapter.variables, as_images(rows), jax.random.key(0))
    return device._replace(adapted=adapted)


@functools.cache
def method_of(classes: int, corrected: bool = False) -> Method:
    return on_described(classes, weighs=True, corrected=corrected)


@functools.cache
def programs(classes: int) -> tuple[Callable[[Variables, Images, Array], Adapted], Callable[[Adapted, Images], Array]]:
    """The compiled parts that adapt and that answer. All adapters of so many classes share them."""
    return backend.jit(method_of(classes).adapt), backend.jit(method_of(classes).predict)


def shares_in(adapted: WithBuffer, classes: int) -> np.ndarray | None:
    """What Device.shares() gives, of what adapt() returned for an adapter of fit()."""
    places = len(adapted.buffer.keys)
    present = np.ones(places, bool) if adapted.present is None else np.asarray(adapted.present)
    count, most = int(present.sum()), ShareAdapter.most
    if not count:
        return None
    start = max(0, count - most)
    rows = np.argsort(~present, kind="stable")[start : start + most]  # empty places too, for programs of few shapes
    newest, held = jax.tree.map(lambda x: x[rows], adapted.buffer), present[rows]
    of_each = np.asarray(_estimating(classes)(adapted.variables, newest, jnp.asarray(held)))
    return of_each[held].mean(0, dtype=np.float64)


@functools.cache
def _estimating(classes: int) -> Callable[[Variables, Keyed, Array], Array]:
    """The compiled part that finds the shares [n, classes] around each image of a buffer."""
    adapter = ShareAdapter(classes, ADAPTER_DEFAULTS.rank, ADAPTER_DEFAULTS.em_steps, weighs=True)

    def found(variables: Variables, buffer: Keyed, present: Array) -> Array:
        parts = {kind: tree[ADAPTER] for kind, tree in variables.items()}
        applied: Any = adapter.apply(
            parts, buffer, buffer, present, method="answer", mutable=["intermediates"],
            capture_intermediates=lambda _, name: name == "_estimated",
        )  # fmt: skip
        shares, _ = applied[1]["intermediates"]["_estimated"][-1]  # the last EM, after the common style
        return shares

    return backend.jit(found)


def as_images(rows: np.ndarray, most: int = STEP) -> Images:
    """Rows as images, in one of few numbers of places, since a program is compiled for each.

    It is a power of two up to `most`, and a multiple of `most` above.
    """
    n = len(rows)
    places = -(-n // most) * most if n > most else min(most, 2 ** max(4, math.ceil(math.log2(max(1, n)))))
    pixels = np.zeros((places, 1, 1, rows.shape[1]), np.float32)
    pixels[:n, 0, 0] = rows
    return Images(jnp.asarray(pixels), jnp.zeros(places, jnp.int32), jnp.asarray(np.arange(places) < n))


def probabilities(logits: np.ndarray, temperature: float) -> np.ndarray:
    return scipy.special.softmax(logits / np.float32(temperature), axis=-1)
