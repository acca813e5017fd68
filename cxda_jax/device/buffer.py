"""The images that a device has seen last, and answers that are adapted to them.

One program serves every fill of the buffer.
"""

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cxda_jax.adapter.buffer import Buffer
from cxda_jax.device.model import Answers, Model, insist_on_places
from cxda_jax.disk.reading import insist_on_file, reason
from cxda_jax.errors import UserError
from cxda_jax.types import Images


class SupportBuffer(Buffer):
    """A fixed number of places for a device's own images, and a model that is adapted to them. Threads may share it.

    The first answer after a change adapts anew. Where images come faster than that, let adapted() answer for some of
    them: it is the model as adapted to what the buffer held then.
    """

    def __init__(self, model: Model, capacity: int = 100, keep: str = "newest", seed: int = 0):
        """An empty buffer.

        Args:
          model: from load().
          capacity: places.
          keep: "newest" or "reservoir"; see Buffer.
          seed: of the reservoir.
        """
        insist_on_places(model.method, "SupportBuffer", "use Model.adapt()")
        super().__init__(model.card.shape, model.dtype, capacity, keep, seed)
        self.model = model
        self._lock = threading.RLock()
        self._adapted: Any = None  # None: the buffer has changed since

    def images(self) -> np.ndarray:
        """The images in the buffer [n, h, w, c] as the model takes them, the oldest first."""
        with self._lock:
            return super().images()

    def observe(self, image: Any) -> int | None:
        """Takes an image in. Returns the number of its place, or None where the reservoir did not take it."""
        pixels = self.model.as_pixels(image)
        with self._lock:
            # Work that is broken off from here on leaves nothing adapted, so the
            # next answer adapts to what is held then.
            adapted, self._adapted = self._adapted, None
            (place,) = self.take(pixels[None])
            if place is None:
                self._adapted = adapted
            return place

    def predict(self, images: Iterable[Any]) -> Answers:
        """Answers to images, each on its own, adapted to what the buffer holds now."""
        return self.adapted().predict(images)

    def attention(self, images: Iterable[Any]) -> np.ndarray:
        """Weights [images, heads, n] on images(), in its order."""
        with self._lock:
            adapted, order = self.adapted(), self.order()
        if self.model.method.stochastic:
            order = np.arange(len(order))  # as adapted() gave them
        return adapted.attention(images)[..., order]

    def adapted(self) -> Model:
        """The model, adapted to what the buffer holds now. What the buffer sees later does not change it."""
        with self._lock:
            if self._adapted is None:
                pixels, arrived = self.pixels.copy(), self.arrived.copy()  # JAX may read them later
                if self.model.method.stochastic:  # the order of the images counts
                    order = np.argsort(np.where(arrived > 0, arrived, arrived.max() + 1), kind="stable")
                    pixels, arrived = pixels[order], arrived[order]
                support = Images(jnp.asarray(pixels), jnp.zeros(len(pixels), jnp.int32), jnp.asarray(arrived > 0))
                self._adapted = self.model.programs.adapt(self.model.variables, support, jax.random.key(0))
            return self.model.adapted_to(self._adapted)

    def forget(self, n: int = 1) -> None:
        with self._lock:
            self._adapted = None
            super().forget(n)

    def save(self, path: str | Path) -> None:
        with self._lock:
            held = self.copy()
        Buffer.save(held, path)

    @classmethod
    def load(cls, path: str | Path, model: Model) -> "SupportBuffer":
        """The buffer that save() wrote, for a model that takes images of the same form.

        It goes on as the saved one would.
        """
        insist_on_file(Path(path), "give a file that save() wrote")
        try:
            with open(path, "rb") as file:  # numpy leaves a broken file open
                saved = {"seed": np.array(0)} | dict(np.load(file, allow_pickle=False))  # earlier versions have no seed
            buffer = cls(model, **{name: saved[name].item() for name in ("capacity", "keep", "seed")})
            pixels = saved["pixels"]
            if pixels.shape[1:] != model.card.shape or pixels.dtype != model.dtype:
                takes = f"{np.dtype(model.dtype)} {model.card.shape}"
                raise UserError(f"{path}: holds images {pixels.dtype} {pixels.shape[1:]}, the model takes {takes}")
            buffer.restore(saved)
        except UserError:
            raise
        except Exception as e:  # whatever numpy and its archives make of a broken file
            raise UserError(f"{path}: not a buffer that save() wrote ({reason(e)}); begin with a new one") from None
        return buffer
