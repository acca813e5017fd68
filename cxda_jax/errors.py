"""The one kind of error that a user can cause, and texts for its message.

It imports nothing heavy: commands load it first.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any


class UserError(ValueError):
    """A mistake outside the code (a config field, a file, a command line): one line that names the field, the value
    and the fix. Launchers print it without a traceback and exit with `code`.

    Attributes:
      fault: what is wrong; or the whole line, where there is no field.
      field: what was given: a field of a config, such as train.steps, a flag or a parameter.
      value: of the field; None: it has none, or it is not shown.
      fix: what to do.
    """

    code = 2

    def __init__(self, fault: str, field: str = "", value: Any = None, fix: str = ""):
        super().__init__(fault)
        self.fault, self.field, self.value, self.fix = fault, field, value, fix

    def __str__(self) -> str:
        as_typed = isinstance(self.value, PurePath) or self.field.startswith("--")
        shown = brief(str(self.value) if as_typed else repr(self.value), 120 if as_typed else 60)
        given = self.field if self.value is None else f"{self.field}={shown}"
        return ": ".join(filter(None, [given, "; ".join(filter(None, [self.fault, self.fix]))]))


class TooEarly(UserError):
    """Nothing is wrong, but what the command needs is not done, or in use: a queue may start it again later."""

    code = 69  # EX_UNAVAILABLE of sysexits.h; 75 is that of a lost process, see machine/hosts.py


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """A context in which a UserError about a parameter is one about what the user gave, such as a flag."""
    try:
        yield
    except UserError as e:
        e.field = names.get(e.field, e.field)
        raise


@contextmanager
def needing(about: str, extra: str, instead: str = "") -> Iterator[None]:
    """What is imported here may not be installed. Then the error says so.

    Args:
      about: the field with its value.
      extra: of this package, which brings it. pip looks it up in the package that is installed, from wherever that is.
      instead: ", or ...", what works without.
    """
    try:
        yield
    except ImportError as e:
        what = "is not installed" if isinstance(e, ModuleNotFoundError) else "cannot be imported here"
        raise UserError(f"{about}: {e.name} {what}; pip install 'cxda_jax[{extra}]'{instead}") from None


def brief(text: str, most: int = 60) -> str:
    """The text for a message of one line: of a long one the middle is left out."""
    head = 2 * most // 3
    return text if len(text) <= most else f"{text[:head]}...{text[head + 3 - most :]}"


def printable(text: str) -> str:
    """The text with escapes, such as \\x1b and \\udce9, for what is no character to see:
    a file's name may hold any bytes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
