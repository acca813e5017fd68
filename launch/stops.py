"""SIGTERM and SIGINT: the first is answered at once and ends a command where nothing is lost, the second ends it at once."""

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

GRACE = 0.3  # seconds: what ends within them, with nothing to save, says that it ended and no more
SOON = "stopping as soon as nothing is lost by it; again to stop at once"
LINE = "stopped by {}; nothing that was saved is lost, the same command goes on from there"

_along: list[Callable[[], None]] = []  # what the second signal ends besides this process
_wanted = 0  # the signal that came
_told = -1  # where the system writes signals for the thread that ends this process at the second
_holding = False
_before: dict[int, Any] = {}  # handlers of signals, as watch() found them


class Stopped(BaseException):  # not an Exception: whoever catches all errors must not swallow it
    """Somebody asked this process to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.name, self.code = signal.Signals(number).name, 128 + number


def watch_imports() -> None:
    """Until watch(), a signal ends this process at once: an exception inside an import may be swallowed, or worse."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)


def watch() -> None:
    """From now on the first signal raises Stopped in the main thread, or is kept until hold() lets go."""
    global _wanted, _told
    unwatch()
    _wanted = 0
    reading, _told = os.pipe()
    os.set_blocking(_told, False)
    for number, handler in {signal.SIGTERM: _handle, signal.SIGINT: _handle, signal.SIGALRM: _again}.items():
        _before[number] = signal.signal(number, handler)
    sys.unraisablehook = _swallowed
    # Python runs handlers between its own instructions, so not while a program compiles. This thread sees signals then too.
    signal.set_wakeup_fd(_told, warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(reading,), daemon=True).start()


def unwatch() -> None:
    """Gives signals back to whoever had them before watch()."""
    global _told
    for number in list(_before):
        signal.signal(number, _before.pop(number) or signal.SIG_DFL)
    sys.unraisablehook = sys.__unraisablehook__
    if _told >= 0:
        signal.set_wakeup_fd(-1)
        os.close(_told)  # which ends the thread
        _told = -1


def say(text: str) -> None:
    """A line on stderr, from any thread, whoever holds Python's own stream, and also where nobody reads it any more."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


@contextlib.contextmanager
def hold() -> Iterator[Callable[[], bool]]:
    """Inside, a signal raises nothing; the function given says whether one has come. Raises Stopped at the end if so."""
    global _holding
    _holding = True
    try:
        yield lambda: bool(_wanted)
    finally:
        _holding = False
    _raise_if_wanted()


@contextlib.contextmanager
def let_go() -> Iterator[None]:
    """Inside hold(), a piece of work that may be broken off."""
    global _holding
    _holding = False
    try:
        _raise_if_wanted()
        yield
    finally:
        _holding = True


@contextlib.contextmanager
def taking_along(end: Callable[[], None]) -> Iterator[None]:
    """Inside, a second signal calls `end` before this process ends."""
    _along.append(end)
    try:
        yield
    finally:
        _along.remove(end)


def _raise_if_wanted() -> None:
    if _wanted:
        raise Stopped(_wanted)


def _handle(number: int, _: object) -> None:
    global _wanted
    first, _wanted = not _wanted, _wanted or number
    if first and not _holding:
        raise Stopped(number)


def _swallowed(unraisable: Any) -> None:
    """Raised inside a callback of the garbage collector or the like, Stopped reaches nobody: it is raised anew, outside."""
    if issubclass(unraisable.exc_type, Stopped):
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    else:
        sys.__unraisablehook__(unraisable)


def _again(*_: object) -> None:
    if not _holding:
        _raise_if_wanted()


def _end(number: int, _: object) -> None:
    say(LINE.format(signal.Signals(number).name))
    os._exit(128 + number)


def _listen(reading: int) -> None:
    """Answers the first signal, and ends the process at the second."""
    came: list[int] = []
    while told := os.read(reading, 1):
        if told[0] == signal.SIGALRM:
            continue
        came.append(told[0])
        if len(came) == 2:
            for end in _along:
                end()
            os._exit(128 + came[1])
        if _holding or not select.select([reading], [], [], GRACE)[0]:
            say(SOON)
    os.close(reading)
