"""The one kind of error that a user can cause, and texts for its message.

It imports nothing heavy: commands load it first.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """A mistake outside the code (a config field, a file, a command line): one line that names the field, the value
    and the fix. Launchers print it without a traceback and exit with `code`."""

    code = 2


class TooEarly(UserError):
    """Nothing is wrong, but what the command needs is not done, or in use: a queue may start it again later."""

    code = 69  # EX_UNAVAILABLE of sysexits.h; 75 is that of a lost process, see machine/hosts.py


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
