"""The images that a device has seen last, and answers that are adapted to them. One program serves every fill of the buffer."""

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cxda_jax.device.model import Answers, Model
from cxda_jax.disk import files
from cxda_jax.disk.reading import reason
from cxda_jax.errors import UserError
from cxda_jax.types import Images

KEEP = ("newest", "reservoir")
STATISTICS = ("exact", "lagged", "frozen")
MOST = 100_000  # images


class SupportBuffer:
    """A fixed number of places for a device's own images, and a model that is adapted to them. Threads may share it.

    Methods that normalise by the support's statistics would have to encode all images anew for each new one. `statistics` says
    what is done instead:

    exact   each answer is that of Model.adapt() on the images of the buffer. The first answer after a change adapts anew.
    lagged  a new image is encoded by the statistics at hand. After every `refresh` new images all are encoded anew.
    frozen  as lagged, but once `refresh` images have come, the statistics stay as they are for ever.

    For cxda_any with prior=0 all three give the same answers, and lagged takes an image in at the price of one.
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
          keep: what a full buffer does with a new image. "newest": the oldest one goes. "reservoir": of all images so far, each
            is as likely to be held.
          statistics: see above.
          refresh: see above.
          seed: of the reservoir.
        """
        method = model.method
        for name, value, least in (("capacity", capacity, 1), ("refresh", refresh, 1)):
            if not least <= value <= MOST:
                raise UserError(f"{name}={value}: give a whole number from {least} to {MOST}")
        for name, value, known in (("keep", keep, KEEP), ("statistics", statistics, STATISTICS)):
            if value not in known:
                raise UserError(f"{name}={value!r} is not one of {', '.join(known)}")
        if method.uses_support and not method.takes_places:
            raise UserError(
                f"SupportBuffer: {method.name} has no program for every number of images; use Model.adapt()"
            )
        if method.uses_domains:
            raise UserError(f"SupportBuffer: {method.name} must know the domain of each image; use Model.adapt()")
        if statistics != "exact" and not method.remember:
            raise UserError(f"statistics={statistics!r}: {method.name} keeps nothing of one image alone; choose exact")
        self.model, self.capacity, self.keep = model, capacity, keep
        self.statistics, self.refresh_every = statistics, refresh
        self.pixels = np.zeros((capacity, *model.card.shape), np.uint8)
        self.arrived = np.zeros(capacity, np.int64)  # the newer an image the larger; 0 marks a free place
        self.seen = 0  # images so far
        self._random = np.random.default_rng(seed)
        self._lock, self._refreshing = threading.RLock(), threading.Lock()
        self._adapted: Any = None  # None: the buffer has changed since
        self._stale = 0  # new images since all were encoded

    def __len__(self) -> int:
        return int((self.arrived > 0).sum())

    def images(self) -> np.ndarray:
        """What the buffer holds, uint8 [n, h, w, c], the oldest first."""
        with self._lock:
            return self.pixels[self._order()]

    def places(self) -> list[int]:
        """Numbers of the places of images(), in its order."""
        with self._lock:
            return self._order().tolist()

    def observe(self, image: Any) -> int | None:
        """Takes an image in. Returns the number of its place, or None where the reservoir did not take it."""
        pixels = self.model.fit(image)
        with self._lock:
            self.seen += 1
            place = self._choose_place()
            if place is None:
                return None
            self.pixels[place], self.arrived[place] = pixels, self.seen
            if self.statistics == "exact" or self._adapted is None:
                self._adapted = None
                return place
            self._stale += 1
            self._put(place, pixels)
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
            if self._adapted is None:
                self._adapted, self._stale = self._adapt(self.pixels, self.arrived), 0
            adapted = self._adapted
            if self.statistics == "frozen" and self.seen < self.refresh_every:
                self._adapted = None  # the statistics are those of more images yet
            return self.model.adapted_to(adapted)

    def forget(self, n: int = 1) -> None:
        """Lets the n oldest images go."""
        with self._lock:
            for place in self._order()[: max(0, n)]:
                self.pixels[place], self.arrived[place] = 0, 0
                if self._adapted is not None and self.statistics != "exact":
                    self._adapted = _without(self._adapted, int(place))
            if self.statistics == "exact":
                self._adapted = None

    def refresh(self) -> None:
        """Encodes all images anew. Another thread may call it; answers go on meanwhile with what they had."""
        with self._refreshing:
            with self._lock:
                pixels, arrived = self.pixels.copy(), self.arrived.copy()
            adapted = self._adapt(pixels, arrived)
            with self._lock:
                self._adapted, self._stale = adapted, 0
                for place in np.flatnonzero(self.arrived != arrived):  # what has come and gone meanwhile
                    if self.statistics == "exact":
                        self._adapted = None
                    elif self.arrived[place]:
                        self._put(int(place), self.pixels[place])
                    else:
                        self._adapted = _without(self._adapted, int(place))

    def save(self, path: str | Path) -> None:
        """Writes the images and their order to a file that ends in .npz."""
        with self._lock:
            held = self._order()
            arrays = {
                "pixels": self.pixels[held], "arrived": self.arrived[held], "places": held, "capacity": self.capacity,
                "keep": self.keep, "statistics": self.statistics, "refresh": self.refresh_every, "seen": self.seen,
            }  # fmt: skip
        path = Path(path)
        if path.suffix != ".npz":
            raise UserError(f"{path}: give a name that ends in .npz")

        def write(partial: Path) -> None:
            with open(partial, "wb") as file:
                np.savez_compressed(file, **arrays)

        files.write_whole(path, write)

    @classmethod
    def load(cls, path: str | Path, model: Model, seed: int = 0) -> "SupportBuffer":
        """The buffer that save() wrote, for a model that takes images of the same form. All images are encoded anew."""
        try:
            with open(path, "rb") as file:  # numpy leaves a broken file open
                arrays = dict(np.load(file, allow_pickle=False))
            options = {name: arrays[name].item() for name in ("capacity", "keep", "statistics", "refresh")}
            pixels, arrived, places = (arrays[name] for name in ("pixels", "arrived", "places"))
            buffer = cls(model, **options, seed=seed)
            if pixels.shape[1:] != model.card.shape or pixels.dtype != np.uint8:
                raise UserError(
                    f"{path}: holds images {pixels.dtype} {pixels.shape[1:]}, the model takes {model.card.shape}"
                )
            buffer.pixels[places], buffer.arrived[places] = pixels, arrived
            buffer.seen = int(arrays["seen"])
        except (UserError, FileNotFoundError):
            raise
        except Exception as e:  # whatever numpy and its archives make of a broken file
            raise UserError(f"{path}: not a buffer that save() wrote ({reason(e)}); begin with a new one") from None
        return buffer

    def _order(self) -> np.ndarray:
        """Numbers of the places that hold an image, the oldest first."""
        order = np.argsort(self.arrived, kind="stable")
        return order[self.arrived[order] > 0]

    def _choose_place(self) -> int | None:
        if self.keep == "newest" or len(self) < self.capacity:
            return int(self.arrived.argmin())  # a free one, or the oldest
        chosen = int(self._random.integers(self.seen))
        return chosen if chosen < self.capacity else None

    def _adapt(self, pixels: np.ndarray, arrived: np.ndarray) -> Any:
        if self.model.method.stochastic:  # the order of the images counts
            order = np.argsort(np.where(arrived > 0, arrived, arrived.max() + 1), kind="stable")
            pixels, arrived = pixels[order], arrived[order]
        support = Images(jnp.asarray(pixels), jnp.zeros(self.capacity, jnp.int32), jnp.asarray(arrived > 0))
        return self.model.programs.adapt(self.model.variables, support, jax.random.key(0))

    def _put(self, place: int, pixels: np.ndarray) -> None:
        put: Any = self.model.programs.remember
        image = Images(jnp.asarray(pixels[None]), jnp.zeros(1, jnp.int32))
        self._adapted = put(self._adapted, jnp.asarray(place), image)


def _without(adapted: Any, place: int) -> Any:
    """What a method adapted to, with a place free."""
    return adapted._replace(present=adapted.present.at[place].set(False))
