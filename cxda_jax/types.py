"""The types that all parts share: images, episodes and methods."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from flax import struct

Array = jax.Array
Variables = Mapping[str, Any]  # {"params": ..., "batch_stats": ...}
TRUNK, ADAPTER = "trunk", "adapter"  # names of parts in params and batch_stats
Adapted = Any  # the pytree that a method's adapt() returns and its predict() takes; each method has its own


class Images(struct.PyTreeNode):
    """Images without labels, as a device has them. Functions take one set; vmap makes further axes.

    Attributes:
      pixels: [n, h, w, c], uint8 in 0..255 or floats in 0..1; networks normalise them.
      domain: integers [n], which only methods with `uses_domains` read.
      present: bool [n]: which places of a support hold an image, for methods with `takes_places`. What lies in the
        other places changes nothing. None: all do.
    """

    pixels: Array
    domain: Array
    present: Array | None = None


class Episode(struct.PyTreeNode):
    """A task with its labels, which only loss() and metrics get.

    Attributes:
      support: unlabelled images to adapt to.
      query: images to classify.
      label: class numbers of the queries, int32 [n_query].
      support_label: class numbers of the support, int32 [n_support], for losses that learn from them in meta-training.
    """

    support: Images
    query: Images
    label: Array
    support_label: Array


class Known(NamedTuple):
    """Labelled images that a method may be calibrated with, before it meets a device.

    Attributes:
      images: that training learnt from, [n, h, w, c]. So a network may know their labels by heart.
      labels: of these, [n].
      unseen: images of validation domains, [n', h, w, c].
      unseen_labels: of these, [n'].
      unseen_domains: of these, numbers [n'].
    """

    images: Array
    labels: Array
    unseen: Array
    unseen_labels: Array
    unseen_domains: Array


class Inputs(NamedTuple):
    """The images of a data set, as far as a network must know them. It sees (pixels / 255 - mean) / std.

    Attributes:
      name: of the data set, for messages.
      shape: height, width and channels of an image.
      num_classes: of its labels.
      mean: of each channel.
      std: of each channel.
    """

    name: str
    shape: tuple[int, int, int]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


class Described(NamedTuple):
    """Images as an adapter learns from them.

    Attributes:
      images: all that it reads of them, [n, d].
      labels: class numbers [n].
      domains: domain numbers [n].
    """

    images: Any
    labels: Any
    domains: Any


class OnDescribed(NamedTuple):
    """The training of an adapter on images that passed the network once.

    Attributes:
      describe: (variables, pixels) -> all that the adapter reads of the images, [n, d].
      adapter: the method for images that are described already, whose pixels are [n, 1, 1, d].
      measure: (new variables, the images to learn from, class numbers of the network's training images) -> variables
        to begin with. It runs once, and not inside a program.
    """

    describe: Callable[[Variables, Array], Array]
    adapter: "Method"
    measure: Callable[[Variables, Described, Any], Variables]


class Frozen(NamedTuple):
    """The network that a method takes from another training, and leaves as it is.

    Attributes:
      trains_as: the method whose training gives the network.
      described: None: the method trains on pixels as others do, only that the weights of its trunk stay.
    """

    trains_as: str
    described: OnDescribed | None = None


class Method(NamedTuple):
    """An adaptation method as a record of pure functions. A variant is written base._replace(...).

    adapt() gets the support alone, and predict() treats each query independently of the others. A device would
    run these two functions; evaluation and timing do the same. They change none of their arguments, so the
    next task starts again from the checkpoint.

    Attributes:
      name: as in the registry METHODS.
      version: changes whenever results may change.
      init: (key, example images) -> new variables.
      loss: (variables, episode, key) -> (loss, {"logits": [n_query, classes], "batch_stats":
        the new running statistics}).
      adapt: (variables, support, key) -> a pytree for predict().
      predict: (adapted, query) -> logits [n_query, classes].
      attention: (adapted, query) -> weights [n_query, heads, n_support]; None: it does not attend. A row sums to one,
        or to less where learned tokens or the query itself have the rest.
      feed_forward: it adapts without back-propagation, so all tasks share their weights and can be one batch.
      stochastic: adapt() draws from its key. With `takes_places` it draws an order, but takes that of the places where
        `present` is given.
      uses_support: adapt() looks at the support.
      uses_domains: it reads Images.domain.
      trains_as: the method whose checkpoint it starts from, if it has no training of its own.
      frozen: the network that it takes from another training; None: it trains a network of its own.
      trains_mixed: it trains on shuffled images of all domains, as many a step as an episode holds.
      calibrate: (variables, known images) -> variables for adapt(), with what it needs to know of them; None: adapt()
        takes the checkpoint.
      takes_places: adapt() reads Images.present, so that one program adapts to every number of images.
      also: further predictions (adapted, query) -> logits that get scores too, by name.
    """

    name: str
    version: str
    init: Callable[[Array, Images], Variables]
    loss: Callable[[Variables, Episode, Array], tuple[Array, Any]]
    adapt: Callable[[Variables, Images, Array], Adapted]
    predict: Callable[[Adapted, Images], Array]
    attention: Callable[[Adapted, Images], Array] | None = None
    feed_forward: bool = True
    stochastic: bool = False
    uses_support: bool = True
    uses_domains: bool = False
    trains_as: str = ""
    frozen: "Frozen | None" = None
    trains_mixed: bool = False
    calibrate: Callable[[Variables, Known], Variables] | None = None
    takes_places: bool = False
    also: Mapping[str, Callable[[Adapted, Images], Array]] = MappingProxyType({})
