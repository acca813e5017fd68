"""Lines that a user reads: how tests take, compare and measure them."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LONGEST = 200


def one_line(error, tmp) -> str:
    """The message as a launcher prints it, with {tmp} for the folder, whose length is the machine's."""
    line = " ".join(str(error).split()).replace(str(tmp), "{tmp}")
    assert len(line) <= LONGEST, f"{len(line)} characters: {line}"
    return line


def is_as(line, expected) -> bool:
    """Equal, but that (...) stands for the words of a library, which another version of it may choose otherwise."""
    before, words, after = expected.partition("(...)")
    if not words:
        return line == expected
    return line.startswith(f"{before}(") and line.endswith(f"){after}") and len(line) > len(expected)


def parametrised(cases):
    return pytest.mark.parametrize("number", range(len(cases)), ids=lambda i: cases[i][0].replace(" ", "_"))


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def assert_short(error, *folders):
    """One line, once its whitespace is folded as the launchers do, that a terminal shows whole."""
    message = " ".join(str(error).split())
    for folder in folders:
        message = message.replace(str(folder), "")
    assert 10 < len(message) <= 200, f"{len(message)}: {message[:300]}"
