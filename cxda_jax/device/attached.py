"""A classifier that you have with its adapter, as a model that takes images: what load() gives for a folder of fit().

Without an encoder the model takes what the encoder would give: rows of logits and style.
"""

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cxda_jax.adapter import adapter as adapters
from cxda_jax.adapter.adapter import SIZES, Adapter
from cxda_jax.adapter.correction import added, correction_in, nothing
from cxda_jax.adapter.device import shares_in
from cxda_jax.adapter.encoders import Encoder, Options, open_encoder
from cxda_jax.adapter.features import WHITE
from cxda_jax.data.store import fault_of_images
from cxda_jax.device.model import CompiledMethod, Model
from cxda_jax.disk import models
from cxda_jax.errors import UserError, brief
from cxda_jax.machine import backend
from cxda_jax.methods.cxda_shares import WithBuffer
from cxda_jax.types import Array, Images, Method, Variables
from cxda_jax.version import VERSION

KEPT = 5000  # images whose rows are kept
MAY_CHANGE = ("encoder", "batch", "onnxruntime", "cxda_jax")  # facts that do not change what images are described as


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class Attached(Model):
    """A classifier of any origin that adapts by what fit() learnt; see Model.

    Attributes:
      adapter: of fit().
      encoder: the classifier; None: images are rows of logits and style, float32 [1, 1, classes + d].
    """

    adapter: Adapter
    encoder: Encoder | None
    rows: Callable[[np.ndarray], np.ndarray]

    def trusted(self) -> "Attached":
        """The same model, adapted to nothing yet, but it adapts though validation did not surely gain."""
        adapter = self.adapter.trusted()
        programs = _programs(adapter, self.method, self.rows)
        return dataclasses.replace(self, adapter=adapter, programs=programs, _adapted=None)

    def plain(self) -> "Attached":
        """The same model with the classifier's own answers, whatever the adapter knows."""
        adapted = self.programs.adapt(_answering_plainly(self.adapter), self.as_images([]), jax.random.key(0))
        return dataclasses.replace(self, _adapted=adapted)

    def shares(self) -> np.ndarray | None:
        """The class shares [classes] on the device, as Device.shares() gives them."""
        return shares_in(self.adapted, self.adapter.classes)

    def as_pixels(self, image: Any) -> np.ndarray:
        if self.encoder:
            return super().as_pixels(image)
        row = adapters.as_numbers("row", np.atleast_2d(adapters.as_array("row", image).squeeze()))
        if row.shape != (1, columns := self.adapter.classes + self.adapter.style):
            raise UserError(f"row: {row.shape[1]} columns; give the {columns} of logits and style, or an encoder")
        return row[:, None]

    @property
    def dtype(self) -> Any:
        return np.uint8 if self.encoder else np.float32

    def unlike(self, pixels: np.ndarray) -> str:
        return self.adapter.drift(self.rows(pixels)) if len(pixels) else ""


class Rows:
    """Logits and style of images, [n, classes + d]. What was asked last is not computed again."""

    def __init__(self, encoder: Encoder, adapter: Adapter):
        self.encoder, self.adapter = encoder, adapter
        self.known: dict[bytes, np.ndarray] = {}
        self.lock = threading.Lock()

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        with self.lock:
            names = [hashlib.blake2b(image.tobytes(), digest_size=16).digest() for image in pixels]
            new = {name: image for name, image in zip(names, pixels, strict=True) if name not in self.known}
            computed = dict(zip(new, self._computed(np.array([*new.values()])), strict=True)) if new else {}
            found = {name: computed.get(name, self.known.get(name)) for name in names}
            self.known |= computed
            for name in [*self.known][: max(0, len(self.known) - KEPT)]:
                del self.known[name]
        width = self.adapter.classes + self.adapter.style
        return np.array([found[name] for name in names], np.float32).reshape(len(pixels), width)

    def _computed(self, pixels: np.ndarray) -> np.ndarray:
        found, batch = [], self.encoder.batch
        for start in range(0, len(pixels), batch):
            some = pixels[start : start + batch]
            padded = np.concatenate([some, np.repeat(some[-1:], batch - len(some), axis=0)])
            answer = self.encoder.encode(padded)
            style = () if self.adapter.keys == "logits" else (answer[self.adapter.keys],)
            found.append(self.adapter.rows(self.adapter.logits_of(answer), *style)[: len(some)])
        return np.concatenate(found)


def attach(folder: Path, encoder: str = "", tells_drift: bool = True) -> Attached:
    """The model of an adapter that save() wrote. It adapts if the adapter is trusted.

    Args:
      folder: of the adapter.
      encoder: as cxda features takes it; it must be the one that the adapter was fitted for. "": none.
      tells_drift: keep the classifier's own answers where a buffer is unlike all that fit() saw.
    """
    adapter = adapters.load_adapter(folder)
    if not tells_drift:
        adapter = adapter._replace(report={**adapter.report, "drift": {"limit": None}})
    opened = open_again(encoder, adapter.origin, folder) if encoder else None
    rows = Rows(opened, adapter) if opened else _as_they_are
    method, card = _calibrated(adapter), card_of(adapter, opened)
    if fault := fault_of_images({**card._asdict(), "mean": (0.0,) * card.shape[2], "std": (1.0,) * card.shape[2]}):
        raise UserError(f"{folder}/{models.CARD}: origin: {fault}; {models.AGAIN}")
    programs = _programs(adapter, method, rows)
    return Attached(card, method, adapter.variables, programs, adapter=adapter, encoder=opened, rows=rows)


def open_again(name: str, origin: Mapping[str, Any], folder: Path) -> Encoder:
    """The encoder, with the options that the features of fit() were made with."""
    if not origin:
        raise UserError(f"encoder={brief(name)}: {folder} was fitted to arrays, so its encoder is not known; "
                        "fit it to a file of cxda features, or leave the encoder out")  # fmt: skip

    def insist(about: Mapping[str, Any]) -> None:
        insist_on_same(about, origin, f"encoder={brief(name)}", folder)

    opened = open_encoder(name, Options(**{key: origin[key] for key in Options._fields if key in origin}), insist)
    insist(opened.about)
    return opened


def insist_on_same(about: Mapping[str, Any], origin: Mapping[str, Any], what: str, folder: Path) -> None:
    """Raises a UserError if images are described in another way than those of fit()."""
    for key in sorted(about.keys() - {*MAY_CHANGE}):
        if about[key] != origin.get(key):
            was, now = origin.get(key), about[key]
            if isinstance(was, list) and isinstance(now, list):  # long ones can begin and end alike
                was, now = [x for x in was if x not in now] or was, [x for x in now if x not in was] or now
            was, now = (brief(repr(each), 60) for each in (was, now))
            raise UserError(f"{what}: {key}={now}, but {folder} was fitted with {was}; "
                            "give that, or fit again")  # fmt: skip


def _as_they_are(pixels: np.ndarray) -> np.ndarray:
    return pixels[:, 0, 0]


def card_of(adapter: Adapter, encoder: Encoder | None) -> models.Card:
    origin, overall = adapter.origin, adapter.report["overall"]
    by_size = np.array([overall[str(n)] for n in SIZES])
    score, mean, low, high = (tuple(map(float, part)) for part in (overall["plain"] + by_size[:, 0], *by_size.T))
    gain = models.Gain(SIZES, score, mean, low, high, adapter.report["tasks"])
    return models.Card(
        method="cxda_shares", seed=adapter.seed, step=adapter.report["steps"], data=origin.get("encoder", "arrays"),
        data_hash=origin.get("encoder_sha256", ""), provenance="", licence="",
        class_names=tuple(origin.get("classes", map(str, range(adapter.classes)))),
        shape=encoder.shape if encoder else (1, 1, adapter.classes + adapter.style), fit=origin.get("fit", "squash"),
        background=WHITE, mean=(), std=(), metric="accuracy", test=None, gain=gain, package=VERSION, commit="",
    )  # fmt: skip


def _calibrated(adapter: Adapter) -> Method:
    """The method of an adapter, whose logits have the temperature of the images in the buffer."""
    method, places = adapters.method_of(adapter.classes), np.log1p(np.array(SIZES, np.float32))
    known = np.array([adapter.temperature(n) for n in SIZES], np.float32)
    slopes = np.diff(known) / np.diff(places)

    def predict(adapted: WithBuffer, query: Images) -> Array:
        count = len(adapted.buffer.keys) if adapted.present is None else adapted.present.astype(jnp.float32).sum()
        beyond = jnp.clip(jnp.log1p(jnp.float32(count)) - places[:-1], 0, np.diff(places))
        return method.predict(adapted, query) / (known[0] + (slopes * beyond).sum())

    return method._replace(predict=predict)


def _answering_plainly(adapter: Adapter) -> Variables:
    """The adapter's variables, with which an empty buffer leaves the classifier's own answers, at their temperature."""
    found = correction_in(adapter.variables)
    if not found:
        return adapter.variables
    scale = adapter.temperature(0) / adapter.temperature(None)  # the method divides by the former
    plain = nothing(adapter.classes, found.mean, found.std)._replace(scale=scale)
    return added(adapter.variables, plain)


def _programs(adapter: Adapter, method: Method, rows: Callable[[np.ndarray], np.ndarray]) -> CompiledMethod:
    adapting, answering, attending = map(backend.jit, (method.adapt, method.predict, method.attention))
    silent = _answering_plainly(adapter)

    def described(images: Images, held: np.ndarray) -> Images:
        """Images as rows; those that are not held are zeros."""
        pixels = np.asarray(images.pixels)
        found = np.zeros((len(pixels), adapter.classes + adapter.style), np.float32)
        found[held] = rows(pixels[held])
        return images.replace(pixels=jnp.asarray(found[:, None, None]))

    def adapt(variables: Variables, images: Images, key: Array) -> Any:
        held = np.ones(len(images.pixels), bool) if images.present is None else np.array(images.present)
        given = described(images, held)
        if not adapter.helps or adapter.drift(np.asarray(given.pixels)[held, 0, 0]):
            held[:], variables = False, silent
        return adapting(variables, given.replace(present=jnp.asarray(held)), key)

    def of_each(program: Any) -> Callable[[Any, Images], Array]:
        return lambda adapted, query: program(adapted, described(query, np.ones(len(query.pixels), bool)))

    return CompiledMethod(adapt, of_each(answering), of_each(attending))
