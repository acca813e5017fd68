"""A trained model by itself, which needs no data set. loading.py gives it."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from cxda_jax.data.readers.images import as_image, as_pixels
from cxda_jax.disk import models
from cxda_jax.errors import UserError, brief
from cxda_jax.types import Array, Images, Method, Variables

AT_ONCE = 64  # images that one program classifies


class Answers(NamedTuple):
    """The answers of a model to n images.

    Attributes:
      names: of the likeliest class of each image.
      confidences: [n], its probability.
      probabilities: [n, classes].
    """

    names: tuple[str, ...]
    confidences: np.ndarray
    probabilities: np.ndarray


class CompiledMethod(NamedTuple):
    """A method's functions, compiled once for each shape of their arguments."""

    adapt: Callable[[Variables, Images, Array], Any]
    predict: Callable[[Any, Images], Array]
    attention: Callable[[Any, Images], Array] | None


@dataclasses.dataclass(eq=False, repr=False)
class Model:
    """A classifier that adapts to unlabelled images without changing itself.

    Images are paths, PIL images or arrays, of any size; they are brought to size as the training images were.

    Attributes:
      card: what it was trained on, and its scores.
      method: how it adapts.
      config: of its training.
    """

    card: models.Card
    method: Method
    variables: Variables
    programs: CompiledMethod
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    _adapted: Any = None

    def __repr__(self) -> str:
        height, width, channels = self.card.shape
        takes = f"{len(self.card.class_names)} classes, images {height}x{width}x{channels}"
        return (
            f"<Model {self.method.name} of {self.card.data}: {takes}, "
            f"{'adapted' if self._adapted is not None else 'not adapted'}>"
        )

    @property
    def dtype(self) -> Any:
        """Of images as as_pixels() gives them."""
        return np.uint8

    @property
    def adapted(self) -> Any:
        """The argument of the method's predict(): adapted to images, or to none."""
        if self._adapted is None:
            self._adapted = self.programs.adapt(self.variables, self.as_images([]), jax.random.key(0))
        return self._adapted

    def adapt(self, images: Iterable[Any], domains: Sequence[int] | None = None, key: Array | None = None) -> "Model":
        """A model that is adapted to these images alone; this one stays as it is.

        A program is compiled for each number of images. SupportBuffer has one for all.

        Args:
          images: unlabelled images of the device.
          domains: their domains [n], for cxda_supervised alone.
          key: of a method that draws random numbers. None: icrm takes the images in the order given.
        """
        support = self.as_images(images, domains)
        if key is None and self.method.takes_places and self.method.stochastic:
            support = support.replace(present=jnp.ones(len(support.pixels), bool))
        key = jax.random.key(0) if key is None else key
        return self.adapted_to(self.programs.adapt(self.variables, support, key))

    def adapted_to(self, adapted: Any) -> "Model":
        """The model with what the method's adapt() returned."""
        return dataclasses.replace(self, _adapted=adapted)

    def predict(self, images: Iterable[Any], domains: Sequence[int] | None = None) -> Answers:
        """The classes of images, each on its own; before adapt() the answers of the model as it was trained.

        Args:
          images: of which some at a time are in memory.
          domains: as in adapt().
        """
        logits = [np.asarray(part) for part in self._of_each(self.programs.predict, images, domains)]
        classes = len(self.card.class_names)
        scores = np.concatenate(logits, dtype=np.float64) if logits else np.zeros((0, classes))
        if not np.isfinite(scores).all():
            what = "its answers are not finite"
            raise UserError(f"model {brief(self.card.data)}: {what}; copy its files again from where they are whole")
        odds = np.exp(scores - scores.max(1, keepdims=True, initial=-np.inf))
        shares = odds / odds.sum(1, keepdims=True)
        names = tuple(self.card.class_names[i] for i in scores.argmax(1)) if len(scores) else ()
        return Answers(names, shares.max(1, initial=0), shares)

    def attention(self, images: Iterable[Any], domains: Sequence[int] | None = None) -> np.ndarray:
        """Weights [images, heads, n] on the n images of adapt(). A row sums to one, or to less: learned
        tokens have the rest, or in icrm the image itself."""
        if self.programs.attention is None:
            attending = "cxda, cxda_loo, cxda_any, cxda_p2p, cxda_supervised and icrm do"
            raise UserError(f"attention: {self.method.name} does not attend to images; {attending}")
        weights = [np.asarray(part) for part in self._of_each(self.programs.attention, images, domains)]
        return np.concatenate(weights) if weights else np.zeros((0, 1, 0), np.float32)

    def as_images(self, images: Iterable[Any], domains: Sequence[int] | None = None) -> Images:
        """Images as the method's functions take them."""
        images = several(images)
        pixels = [self.as_pixels(image) for image in images]
        stacked = np.stack(pixels) if pixels else np.zeros((0, *self.card.shape), self.dtype)
        if domains is None and self.method.uses_domains and pixels:
            raise UserError(f"{self.method.name} needs the domain of each image: domains=[0, 0, 1, ...]")
        of = np.zeros(len(pixels)) if domains is None else np.asarray(domains)
        if of.shape != (len(pixels),):
            raise UserError(f"domains: {len(of)} for {len(pixels)} images; give one for each image")
        return Images(jnp.asarray(stacked), jnp.asarray(of, jnp.int32))

    def as_pixels(self, image: Any) -> np.ndarray:
        """An image as the network takes it, uint8 [h, w, c]."""
        return as_pixels(as_image(image), self.card.shape, self.card.fit, self.card.background)

    def unlike(self, pixels: np.ndarray) -> str:
        """In what images [n, h, w, c] are unlike those that the model knows; "" if they are not."""
        share = self.card.looks.unlike(pixels) if self.card.looks else 0.0
        if share <= 0.5:
            return ""
        return (
            f"{100 * share:.0f} % of the images are brighter, darker, flatter or harder than those "
            f"of {self.card.data}, so neither the answers nor the gain can be relied on; look at them on the page"
        )

    def _of_each(self, program: Callable[[Any, Images], Array], images: Iterable[Any], domains: Any) -> Iterator[Array]:
        """The results of a program for the images, AT_ONCE or fewer at a time.

        The last ones are padded, so that two shapes are compiled.
        """
        adapted, start, waiting = self.adapted, 0, iter(several(images))
        while some := list(itertools.islice(waiting, AT_ONCE)):
            batch = self.as_images(some, None if domains is None else domains[start : start + len(some)])
            start += len(some)
            size = 1 if len(some) == 1 else AT_ONCE
            filled = np.r_[: len(some), np.zeros(size - len(some), int)]
            padded = jax.tree.map(lambda x, rows=filled: x[rows], batch)
            yield program(adapted, padded)[: len(some)]


def several(images: Any) -> Iterable[Any]:
    """Gives images back; a UserError where it is a single one, whose letters or rows could be taken for images."""
    shape = getattr(images, "shape", None)  # of an array
    one = isinstance(images, str | Path | Image.Image) or shape is not None and len(shape) < 4
    if one or not isinstance(images, Iterable):
        what = f"an array {shape}" if shape is not None else brief(repr(images), 60)
        raise UserError(f"images={what}: give a list of images, or an array [n, h, w, c]; [image] for a single one")
    return images


def insist_on_places(method: Method, purpose: str, fix: str) -> None:
    """Raises a UserError unless one program of the method serves a buffer however many of its places hold an image."""
    if method.uses_domains:
        raise UserError(f"{purpose}: {method.name} must know the domain of each image, which a device does not; {fix}")
    if method.uses_support and not method.takes_places:
        why = "would need another program for each number of images in the buffer"
        raise UserError(f"{purpose}: {method.name} {why}; {fix}")
