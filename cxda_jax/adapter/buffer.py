"""The images that a device holds, and the rules by which they come and go.

An image is an array of any shape: pixels, or what a classifier says of them.
"""

import copy
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cxda_jax.config.fields import choose
from cxda_jax.disk import files
from cxda_jax.errors import UserError, brief

KEEP = ("newest", "reservoir")
MOST = 100_000  # places


class Buffer:
    """Places for images.

    Attributes:
      pixels: the images by place, [places, ...].
      arrived: int [places], the newer an image the larger; 0 marks a free place.
      capacity: places; None: as many as there are images.
      keep: what a full buffer does with a new image. "newest": the oldest one goes. "reservoir": of all images so far,
        each is as likely to be held.
      seed: of the reservoir.
      seen: images so far.
    """

    def __init__(
        self, shape: Sequence[int], dtype: Any, capacity: int | None = None, keep: str = "newest", seed: int = 0
    ):
        """An empty buffer for images of this shape."""
        if capacity is not None:
            check_number("capacity", capacity, int, 1, MOST)
        check_number("seed", seed, int, 0, MOST)
        self.capacity, self.keep, self.seed = capacity, choose("keep", keep, KEEP), seed
        self.pixels = np.zeros((capacity or 0, *shape), dtype)
        self.arrived = np.zeros(capacity or 0, np.int64)
        self.seen = 0
        self._drawn_from = 0  # images that the reservoir is a sample of: those held at the last forget(), and all since

    def __len__(self) -> int:
        return int((self.arrived > 0).sum())

    def order(self) -> np.ndarray:
        """Numbers of the places that hold an image, the oldest first."""
        order = np.argsort(self.arrived, kind="stable")
        return order[self.arrived[order] > 0]

    def images(self) -> np.ndarray:
        """The images in the buffer, the oldest first."""
        return self.pixels[self.order()]

    def copy(self) -> "Buffer":
        """A buffer that holds the same images and goes on by itself."""
        copied = copy.copy(self)
        copied.pixels, copied.arrived = self.pixels.copy(), self.arrived.copy()
        return copied

    def take(self, images: np.ndarray) -> list[int | None]:
        """Takes images in, one after the other. Returns the numbers of their places, None where it did not take one."""
        if self.capacity is None:
            self._grow(len(images))
        order = np.argsort(self.arrived, kind="stable")  # free places, then the oldest
        free = len(order) - len(self)
        places = [self._place(number, order, free) for number in range(len(images))]
        for number, place in enumerate(places):
            if place is not None:
                self.pixels[place], self.arrived[place] = images[number], self.seen + number + 1
        self.seen += len(images)
        self._drawn_from += len(images)
        return places

    def forget(self, n: int = 1) -> None:
        """Lets the n oldest images go, or all if it has fewer.

        A reservoir begins anew with the rest: each of these and of the images to come is as likely to be held.
        """
        check_number("n", n, int, 0, math.inf)
        places = self.order()[:n]
        self.pixels[places], self.arrived[places] = 0, 0
        if len(places):
            self._drawn_from = len(self)

    def save(self, path: str | Path) -> None:
        """Writes the images, their order and all that later answers depend on to a file of numpy's kind .npz."""
        held, archive = self.order(), io.BytesIO()
        np.savez_compressed(
            archive, pixels=self.pixels[held], arrived=self.arrived[held], places=held, capacity=len(self.pixels),
            keep=self.keep, seen=self.seen, drawn_from=self._drawn_from, seed=self.seed,
        )  # fmt: skip
        files.write_bytes(Path(path), archive.getvalue())

    def restore(self, saved: dict[str, np.ndarray]) -> None:
        """Has an empty buffer of the same capacity go on as the one whose arrays save() wrote."""
        places = saved["places"]
        self.pixels[places], self.arrived[places] = saved["pixels"], saved["arrived"]
        self.seen = int(saved["seen"])
        # A file of an earlier version has no drawn_from.
        drawn_from = saved["seen"] if len(places) == self.capacity else len(places)
        self._drawn_from = int(saved.get("drawn_from", drawn_from))

    def _grow(self, n: int) -> None:
        """Leaves the places of n more images free, after those that it holds."""
        held = self.order()
        more = np.zeros((n, *self.pixels.shape[1:]), self.pixels.dtype)
        self.pixels = np.concatenate([self.pixels[held], more])
        self.arrived = np.concatenate([self.arrived[held], np.zeros(n, np.int64)])

    def _place(self, number: int, order: np.ndarray, free: int) -> int | None:
        """For a new image, `number` of which came with it and before it."""
        if self.keep == "newest" or number < free:
            return int(order[number % len(order)])
        drawn = np.random.default_rng([self.seed, self.seen + number + 1])
        chosen = int(drawn.integers(self._drawn_from + number + 1))
        return chosen if chosen < len(order) else None


def check_number(name: str, value: Any, kind: Any, low: float, high: float) -> None:
    """Raises a UserError unless the value is a number of this kind in the range."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        what = "a whole number" if kind is int else "a number"
        raise UserError(f"{name}={brief(repr(value), 40)}; give {what} from {low} to {high:g}")
