"""The vocabulary of the package: images, episodes, methods, and the one kind of error a user can cause."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from flax import struct

Array = jax.Array
Variables = Mapping[str, Any]  # {"params": ..., "batch_stats": ...}
Adapted = Any  # whatever a method's adapt() hands to its predict(): a pytree


class UserError(ValueError):
    """A mistake outside the code (a config field, a file, a command line): one line that names the field, the value
    and the fix. Launchers print it without a traceback and exit with code 2."""


def brief(text: str, most: int = 60) -> str:
    """The text for a message of one line: of a long one the middle is left out."""
    head = 2 * most // 3
    return text if len(text) <= most else f"{text[:head]}...{text[head + 3 - most :]}"


def printable(text: str) -> str:
    """The text with escapes, such as \\x1b and \\udce9, for what is no character to see: a file's name may hold any bytes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class Images(struct.PyTreeNode):
    """What a device may see. Batch axes come from vmap, never from signatures.

    pixels: [n, height, width, channels], uint8 in 0..255 or float in 0..1; networks normalise them.
    domain: [n] integers, read only by methods that declare `uses_domains`.
    """

    pixels: Array
    domain: Array


class Episode(struct.PyTreeNode):
    """A task with its answers. Labels reach loss() and metrics only, never adapt() or predict()."""

    support: Images
    query: Images
    label: Array  # [n_query]
    support_label: Array  # [n_support], for losses that supervise the support in meta-training


class Method(NamedTuple):
    """An adaptation method as a record of pure functions; a variant is written `base._replace(...)`.

    adapt() sees the support alone and predict() treats each query independently of the others, so the pair is at once
    the evaluation, the device interface and the unit that is timed. Nothing is mutated: resetting after a task means
    dropping what adapt() returned.
    """

    name: str
    version: str  # moves whenever results may move
    init: Callable[[Array, Images], Variables]  # (key, example images)
    loss: Callable[[Variables, Episode, Array], tuple[Array, Any]]  # (.., .., key) -> loss, {"batch_stats", "logits"}
    adapt: Callable[[Variables, Images, Array], Adapted]  # (.., support, key)
    predict: Callable[[Adapted, Images], Array]  # logits [n_query, num_classes]
    attention: Callable[[Adapted, Images], Array] | None = None  # weights [n_query, heads, n_support], rows sum to 1
    feed_forward: bool = True  # adapts without back-propagation; tasks share their weights and can be batched
    stochastic: bool = False  # adapt() draws from its key: equal keys give equal answers, others may not
    uses_support: bool = True  # adapt() looks at the support
    uses_domains: bool = False  # reads Images.domain
    trains_as: str = ""  # the method whose checkpoint it starts from, when it has no training of its own
    trains_mixed: bool = False  # trains on shuffled images of all domains, as many a step as an episode holds
    # (checkpoint, training images) -> variables with what adapt() needs to know of the training data
    calibrate: Callable[[Variables, Array], Variables] | None = None
    also: Mapping[str, Callable[[Adapted, Images], Array]] = MappingProxyType({})  # other predictions worth a score
