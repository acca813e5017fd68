"""The entry of a method: all that configs, tables and figures must know of it, written in the method's own file."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from cxda_jax.config.fields import Config, Group
from cxda_jax.types import Inputs, Method

# Okabe and Ito's colours. Grey replaces their yellow, which is hard to see on white paper; the last one is our own.
BLACK, GREY, ORANGE, SKY, GREEN = "#000000", "#777777", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PURPLE, WINE = "#0072B2", "#D55E00", "#CC79A7", "#882255"


class Style(NamedTuple):
    """The look of a method in figures.

    Attributes:
      color: of its lines and markers.
      marker: as matplotlib names it.
      dashes: the lengths on, off, ... of its dashes; none: a solid line.
      open: whether its markers are open, which stands for back-propagation on the device.
    """

    color: str
    marker: Any
    dashes: tuple[float, ...] = ()
    open: bool = False

    def arguments(self, **others: Any) -> dict[str, Any]:
        """The style as arguments of matplotlib's Axes.plot, together with other arguments."""
        line = {"linestyle": (0, self.dashes) if self.dashes else "-", "marker": self.marker}
        size = 6 if len(self.marker) == 1 and self.marker != "*" else 9
        return line | {"color": self.color, "ms": size, "mfc": "white" if self.open else self.color} | others


class Entry(NamedTuple):
    """A method in METHODS of registry.py.

    Attributes:
      build: makes it from a config and what is known of the images.
      groups: the fields that it reads beside those of every config, by the names of their groups.
      style: in figures; None: a figure chooses one.
      varied: whether a study tests it on other numbers of domains and of support images too.
      support_loss: the values of train.support_loss that it knows.
      page: what its queries attend to in the page that runs in a browser: "own", support images normalised by the
        statistics of all of them; "blended", by those and the running ones; "sequence", images in an order;
        "shares", images that tell the shares of the classes; "", nothing. None: the page cannot run it.
      holds_out: whether train.held_out gives it the trunk of a training of erm_iid, whose weights then stay.
    """

    build: Callable[[Config, Inputs], Method]
    groups: Mapping[str, Group] = MappingProxyType({})
    style: Style | None = None
    varied: bool = False
    support_loss: tuple[str, ...] = ("none",)
    page: str | None = None
    holds_out: bool = False
