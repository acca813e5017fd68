"""SIGTERM and SIGINT: the first ends a command where nothing is lost, the second at once."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

_wanted = 0  # the signal that came
_told = -1  # where the system writes signals for the thread that ends this process at the second
_holding = False


class Stopped(BaseException):  # not an Exception: whoever catches all errors must not swallow it
    """Somebody asked this process to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.name, self.code = signal.Signals(number).name, 128 + number


def watch() -> None:
    """From now on the first signal raises Stopped in the main thread, or is kept until hold() lets go."""
    global _wanted, _told
    _wanted, before = 0, _told
    reading, _told = os.pipe()
    os.set_blocking(_told, False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _handle)
    signal.signal(signal.SIGALRM, _again)
    sys.unraisablehook = _swallowed
    # Python runs handlers between its own instructions, so not while a program compiles. This thread sees signals then too.
    signal.set_wakeup_fd(_told, warn_on_full_buffer=False)
    threading.Thread(target=_end_at_the_second, args=(reading,), daemon=True).start()
    if before >= 0:
        os.close(before)  # which ends the thread of an earlier call


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


def _end_at_the_second(reading: int) -> None:
    came: list[int] = []
    while told := os.read(reading, 1):
        came += [number for number in told if number != signal.SIGALRM]
        if len(came) == 2:
            os._exit(128 + came[1])
    os.close(reading)
