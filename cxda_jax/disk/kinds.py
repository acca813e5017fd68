"""What a file that a user may have received may hold. What is wrong becomes a UserError of one line.

A kind of file has a table of its fields, each with its Kind, and require() compares. What no table names is not read.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from cxda_jax.config.fields import Range
from cxda_jax.disk.reading import MOST
from cxda_jax.errors import UserError, brief

NUMBER = (int, float)
FINITE = Range(-MOST, MOST)
_KINDS = {str: "a text", bool: "true or false", int: "a whole number", list: "a list", dict: "an object",
          NUMBER: "a number"}  # fmt: skip
_HIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # terminals obey such characters, and files refuse them


class Kind(NamedTuple):
    """What a value of a file may be.

    Attributes:
      of: its type: str, bool, int, NUMBER, list or dict; of an array NumPy's letters of types, such as "iu".
      within: its numbers; of an array any unless it is given.
      choices: its values; () for any.
      each: of a list, the kind of an item; of an object, its fields with their kinds, or the kind of all of them.
      shape: of a list or an array, the length of each axis: a number, or a name that stands for one length in all of
        the file. None: any.
      order: of a list or an array: "rises" or "falls", where neighbours may be equal.
      shown: it is printed as it is.
      null: None may stand in its place.
      absent: it may be missing.
    """

    of: Any
    within: Range = FINITE
    choices: tuple[Any, ...] = ()
    each: Any = None
    shape: tuple[int | str, ...] | None = None
    order: str = ""
    shown: bool = False
    null: bool = False
    absent: bool = False

    def expected(self, lengths: Mapping[str, int]) -> str:
        """In words. `lengths` are of axes that are known."""
        said = f"an array of type {' or '.join(self.of)}" if isinstance(self.of, str) else _KINDS[self.of]
        axes = [f"{n}={lengths[n]}" if isinstance(n, str) and n in lengths else str(n) for n in self.shape or ()]
        said += f" [{', '.join(axes)}]" * (self.shape is not None)
        said += f" in {self.within}" * (self.within is not FINITE)
        said += f" that {self.order}" * bool(self.order) + " that can be shown" * self.shown
        return f"{said}: {', '.join(map(str, self.choices))}" if self.choices else said + " or null" * self.null


def require(
    content: Any, fields: Mapping[str, Any], where: str, fix: str, lengths: Mapping[str, int] | None = None
) -> None:
    """Raises a UserError unless `content` is an object that has each of the fields, of its Kind or type.

    A table in the place of a Kind stands for an object that has these fields. `lengths` are of axes that are known.
    """
    for fault in _faults("", content, fields, {**(lengths or {})}):
        raise UserError(f"{where}: {fault}; {fix}")


def _faults(name: str, found: Any, kind: Any, lengths: dict[str, int]) -> Iterator[str]:
    """What is wrong with a value and with those in it."""
    value: Any = found
    if not isinstance(kind, Kind):
        kind = Kind(dict, each=kind) if isinstance(kind, Mapping) else Kind(kind)
    if found is None and kind.null:
        return
    inside: list[tuple[Any, Any, Any]] = []
    if fine := _is_of(value, kind):
        if isinstance(kind.each, Mapping):
            lacking = (n for n, own in kind.each.items() if n not in value and not getattr(own, "absent", False))
            yield from (f"no {_joined(name, n)!r}" for n in lacking)
            inside = [(n, value[n], own) for n, own in kind.each.items() if n in value]
        elif kind.each:
            inside = [(n, x, kind.each) for n, x in (value.items() if isinstance(value, dict) else enumerate(value))]
        for n, x, own in inside:
            yield from _faults(_joined(name, n), x, own, lengths)
        fine = _is_formed(value, kind, lengths)
    if not fine:
        said = f"{value.dtype} {[*value.shape]}" if isinstance(value, np.ndarray) else " ".join(repr(value).split())
        yield f"{name}{'=' * bool(name)}{brief(said, 40)}, expected {kind.expected(lengths)}"


def _joined(name: str, inner: Any) -> str:
    return f"{name}.{inner}" if name else str(inner)


def _is_of(value: Any, kind: Kind) -> bool:
    """Whether a value, for itself, is of the type and the range."""
    if isinstance(kind.of, str):
        fits = isinstance(value, np.ndarray) and value.dtype.kind in kind.of
        return fits and (kind.within is FINITE or is_within(value, kind.within))
    if isinstance(value, bool) is not (kind.of is bool) or not isinstance(value, kind.of):
        return False
    if kind.choices and value not in kind.choices or kind.shown and _HIDDEN.search(value):
        return False
    return not isinstance(value, NUMBER) or kind.within.holds(value)


def _is_formed(value: Any, kind: Kind, lengths: dict[str, int]) -> bool:
    """Whether a list or an array has the shape and the order."""
    if kind.shape is not None:
        shape = (len(value),) if isinstance(value, list) else value.shape
        if len(kind.shape) != len(shape):
            return False
        pairs = zip(kind.shape, shape, strict=True)
        if any(x != (lengths.setdefault(n, x) if isinstance(n, str) else n) for n, x in pairs):
            return False
    steps = np.diff(value) if kind.order else np.zeros(0)
    return bool((steps > 0).all() if kind.order == "rises" else (steps <= 0).all())


def is_within(array: np.ndarray, within: Range) -> bool:
    """Whether all numbers of an array are; what holds no numbers is."""
    if not array.size or array.dtype.kind in "bUS":
        return True
    return within.holds(float(array.min())) and within.holds(float(array.max()))  # NaN is the least, and the largest
