"""The images that a device has seen last, and answers that are adapted to them.

One program serves every fill of the buffer.
"""

import io
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cxda_jax.config.fields import choose
from cxda_jax.device.model import Answers, Model
from cxda_jax.disk import files
from cxda_jax.disk.reading import insist_on_file, reason
from cxda_jax.errors import UserError
from cxda_jax.types import Images

KEEP = ("newest", "reservoir")
STATISTICS = ("exact", "lagged", "frozen")
MOST = 100_000  # images


class SupportBuffer:
    """A fixed number of places for a device's own images, and a model that is adapted to them. Threads may share it.

    Methods that normalise by the support's statistics would have to encode all images anew for each new one.
    `statistics` says what is done instead:

    exact   each answer is that of Model.adapt() on the images of the buffer. The first answer after a change adapts
            anew.
    lagged  a new image is encoded by the statistics at hand. After every `refresh` new images all are encoded anew.
    frozen  the image number `refresh` fixes the statistics, which are then those of the images that are held, for ever.
            Before it every answer is exact.

    For cxda_any with running=True all three give the same answers, and lagged takes an image in at the price of one.
    """

    def __init__(
        self,
        model: Model,
        capacity: int = 100,
        keep: str = "newest",
        statistics: str = "exact",
        refresh: int = 20,
        seed: int = 0,
    ):
        """An empty buffer.

        Args:
          model: from load().
          capacity: places.
          keep: what a full buffer does with a new image. "newest": the oldest one goes. "reservoir": of all
            images so far, each is as likely to be held; see forget().
          statistics: see above.
          refresh: see above.
          seed: of the reservoir.
        """
        method = model.method
        for name, value, least in (("capacity", capacity, 1), ("refresh", refresh, 1), ("seed", seed, 0)):
            insist_on_whole(name, value, least)
        choose("keep", keep, KEEP)
        choose("statistics", statistics, STATISTICS)
        if method.uses_support and not method.takes_places:
            fix = "has no program for every number of images; use Model.adapt()"
            raise UserError(f"SupportBuffer: {method.name} {fix}")
        if method.uses_domains:
            raise UserError(f"SupportBuffer: {method.name} must know the domain of each image; use Model.adapt()")
        if statistics != "exact" and not method.remember:
            raise UserError(f"statistics={statistics!r}: {method.name} keeps nothing of one image alone; choose exact")
        self.model, self.capacity, self.keep = model, capacity, keep
        self.statistics, self.refresh_every = statistics, refresh
        self.pixels = np.zeros((capacity, *model.card.shape), model.dtype)
        self.arrived = np.zeros(capacity, np.int64)  # the newer an image the larger; 0 marks a free place
        self.seen = 0  # images so far
        self._drawn_from = 0  # images that the reservoir is a sample of: those held at the last forget(), and all since
        self._seed = seed
        self._lock, self._refreshing = threading.RLock(), threading.Lock()
        self._adapted: Any = None  # None: the buffer has changed since
        self._stale = 0  # new images since all were encoded
        self._base: tuple[np.ndarray, np.ndarray] | None = None  # pixels and arrivals that gave the statistics

    def __len__(self) -> int:
        return int((self.arrived > 0).sum())

    def images(self) -> np.ndarray:
        """The images in the buffer [n, h, w, c] as the model takes them, the oldest first."""
        with self._lock:
            return self.pixels[self._order()]

    def observe(self, image: Any) -> int | None:
        """Takes an image in. Returns the number of its place, or None where the reservoir did not take it."""
        pixels = self.model.fit(image)
        with self._lock:
            # Work that is broken off from here on leaves nothing adapted, so the
            # next answer adapts to what is held then.
            adapted, self._adapted = self._adapted, None
            self.seen, self._drawn_from = self.seen + 1, self._drawn_from + 1
            place = self._choose_place()
            if place is not None:
                self.pixels[place], self.arrived[place] = pixels, self.seen
            if self.statistics == "frozen" and self.seen == self.refresh_every:
                self._encode()
            elif place is None:
                self._adapted = adapted
            elif self._base and adapted is not None:
                self._adapted, self._stale = self._put(adapted, place), self._stale + 1
            due = self._stale >= self.refresh_every
        if due and self.statistics == "lagged":
            self.refresh()
        return place

    def predict(self, images: Iterable[Any]) -> Answers:
        """Answers to images, each on its own, adapted to what the buffer holds now."""
        return self.adapted().predict(images)

    def attention(self, images: Iterable[Any]) -> np.ndarray:
        """Weights [images, heads, n] on images(), in its order."""
        with self._lock:
            adapted, order = self.adapted(), self._order()
        if self.model.method.stochastic:
            order = np.arange(len(order))  # as _adapt() gave them
        return adapted.attention(images)[..., order]

    def adapted(self) -> Model:
        """The model, adapted to what the buffer holds now."""
        with self._lock:
            if self._adapted is None and self._base:
                self._adapted = self._changed(self._adapt(*self._base), self._base[1])
            elif self._adapted is None:
                self._encode()
            return self.model.adapted_to(self._adapted)

    def forget(self, n: int = 1) -> None:
        """Lets the n oldest images go, or all if it has fewer.

        A reservoir begins anew with the rest: each of these and of the images to come is as likely to be held.
        """
        insist_on_whole("n", n, 0)
        with self._lock:
            adapted, self._adapted = self._adapted, None
            places = self._order()[:n]
            self.pixels[places], self.arrived[places] = 0, 0
            if len(places):
                self._drawn_from = len(self)
            if self._base and adapted is not None:
                self._adapted = _without(adapted, places)

    def refresh(self) -> None:
        """Encodes all images anew. Another thread may call it; answers go on meanwhile with what they had."""
        with self._refreshing:
            with self._lock:
                pixels, arrived = self.pixels.copy(), self.arrived.copy()
            adapted = self._adapt(pixels, arrived)
            with self._lock:
                self._stale = 0
                if self._fixes_statistics():
                    self._base, self._adapted = (pixels, arrived), self._changed(adapted, arrived)
                else:
                    self._adapted = adapted if (self.arrived == arrived).all() else None

    def save(self, path: str | Path) -> None:
        """Writes the images, their order and all that later answers depend on to a file of numpy's kind .npz."""
        with self._lock:
            held = self._order()
            arrays = {
                "pixels": self.pixels[held], "arrived": self.arrived[held], "places": held, "capacity": self.capacity,
                "keep": self.keep, "statistics": self.statistics, "refresh": self.refresh_every, "seen": self.seen,
                "drawn_from": self._drawn_from, "seed": self._seed, "stale": self._stale,
            }  # fmt: skip
            if self._base:
                arrays |= {"base_pixels": self._base[0], "base_arrived": self._base[1]}
        archive = io.BytesIO()
        np.savez_compressed(archive, **arrays)
        files.write_bytes(Path(path), archive.getvalue())

    @classmethod
    def load(cls, path: str | Path, model: Model) -> "SupportBuffer":
        """The buffer that save() wrote, for a model that takes images of the same form.

        It goes on as the saved one would.
        """
        insist_on_file(Path(path), "give a file that save() wrote")
        try:
            with open(path, "rb") as file:  # numpy leaves a broken file open
                earlier = dict.fromkeys(("seed", "stale"), np.array(0))  # an earlier version did not save them
                arrays = earlier | dict(np.load(file, allow_pickle=False))
            options = {name: arrays[name].item() for name in ("capacity", "keep", "statistics", "refresh", "seed")}
            pixels, arrived, places = (arrays[name] for name in ("pixels", "arrived", "places"))
            buffer = cls(model, **options)
            if pixels.shape[1:] != model.card.shape or pixels.dtype != model.dtype:
                takes = f"{np.dtype(model.dtype)} {model.card.shape}"
                raise UserError(f"{path}: holds images {pixels.dtype} {pixels.shape[1:]}, the model takes {takes}")
            buffer.pixels[places], buffer.arrived[places] = pixels, arrived
            buffer.seen, buffer._stale = int(arrays["seen"]), int(arrays["stale"])
            drawn_from = arrays["seen"] if len(places) == buffer.capacity else len(places)  # of an earlier version
            buffer._drawn_from = int(arrays.get("drawn_from", drawn_from))
            if "base_pixels" in arrays:
                buffer._base = arrays["base_pixels"], arrays["base_arrived"]
        except UserError:
            raise
        except Exception as e:  # whatever numpy and its archives make of a broken file
            raise UserError(f"{path}: not a buffer that save() wrote ({reason(e)}); begin with a new one") from None
        return buffer

    def _order(self) -> np.ndarray:
        """Numbers of the places that hold an image, the oldest first."""
        order = np.argsort(self.arrived, kind="stable")
        return order[self.arrived[order] > 0]

    def _choose_place(self) -> int | None:
        """For the image number `seen`."""
        if self.keep == "newest" or len(self) < self.capacity:
            return int(self.arrived.argmin())  # a free one, or the oldest
        chosen = int(np.random.default_rng([self._seed, self.seen]).integers(self._drawn_from))
        return chosen if chosen < self.capacity else None

    def _fixes_statistics(self) -> bool:
        """Whether images to come are encoded by the statistics of those that are held now."""
        return self.statistics == "lagged" or self.statistics == "frozen" and self.seen >= self.refresh_every

    def _encode(self) -> None:
        """Encodes all images."""
        base = self.pixels.copy(), self.arrived.copy()
        self._adapted, self._stale = self._adapt(*base), 0
        self._base = base if self._fixes_statistics() else None

    def _adapt(self, pixels: np.ndarray, arrived: np.ndarray) -> Any:
        if self.model.method.stochastic:  # the order of the images counts
            order = np.argsort(np.where(arrived > 0, arrived, arrived.max() + 1), kind="stable")
            pixels, arrived = pixels[order], arrived[order]
        support = Images(jnp.asarray(pixels), jnp.zeros(self.capacity, jnp.int32), jnp.asarray(arrived > 0))
        return self.model.programs.adapt(self.model.variables, support, jax.random.key(0))

    def _changed(self, adapted: Any, arrived: np.ndarray) -> Any:
        """The result of adapting to images that arrived so, with those that have come and gone since."""
        for place in np.flatnonzero(self.arrived != arrived):
            adapted = self._put(adapted, int(place)) if self.arrived[place] else _without(adapted, place)
        return adapted

    def _put(self, adapted: Any, place: int) -> Any:
        """The result of adapting, with the image that a place holds now."""
        put: Any = self.model.programs.remember
        image = Images(jnp.asarray(self.pixels[place][None]), jnp.zeros(1, jnp.int32))
        return put(adapted, jnp.asarray(place), image)


def insist_on_whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= MOST:
        raise UserError(f"{name}={value!r}: give a whole number from {least} to {MOST}")


def _without(adapted: Any, places: Any) -> Any:
    """The result of adapting, with places free."""
    return adapted._replace(present=adapted.present.at[places].set(False))
