"""The one kind of error that a user can cause, and texts for its message.

It imports nothing: commands load it first.
"""


class UserError(ValueError):
    """A mistake outside the code (a config field, a file, a command line): one line that names the field, the value
    and the fix. Launchers print it without a traceback and exit with `code`."""

    code = 2


class TooEarly(UserError):
    """Nothing is wrong, but what the command needs is not done, or in use: a queue may start it again later."""

    code = 69  # EX_UNAVAILABLE of sysexits.h; 75 is that of a lost process, see machine/hosts.py


def brief(text: str, most: int = 60) -> str:
    """The text for a message of one line: of a long one the middle is left out."""
    head = 2 * most // 3
    return text if len(text) <= most else f"{text[:head]}...{text[head + 3 - most :]}"


def printable(text: str) -> str:
    """The text with escapes, such as \\x1b and \\udce9, for what is no character to see:
    a file's name may hold any bytes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
