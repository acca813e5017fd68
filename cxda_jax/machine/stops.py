"""SIGTERM, SIGINT and SIGUSR2. The first one ends a command where nothing is lost; the second one ends it at once.

A queue announces the end of a job's time by SIGUSR2. It may send SIGTERM several times, and SIGKILL when its patience
ends. So inside a job of Slurm only a second SIGINT, which a person sends, ends the command at once.

Python runs handlers of signals between its own instructions only, so not while XLA compiles or computes. So a thread
reads the signals from a pipe too: it answers the first one at once, and ends the process at the second. No library
does this.
"""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
GRACE = 0.3  # seconds; a command that ends within them does not first say that it will stop
SOON = "stopping as soon as nothing is lost by it; again to stop at once"
LINE = "stopped by {}; nothing that was saved is lost, the same command goes on from there"
ANEW = "stopped by {}; nothing that was saved is lost, the same command begins anew"
EARLY = "stopped by {} before anything was begun"

stderr = 2  # the file that say() writes to
_before_end: list[Callable[[], None]] = []  # called before the second signal ends this process
_received, _since = 0, 0.0  # the first signal that came, and when
_pipe = -1  # the end of the pipe into which the system writes signals for the thread
_deferring = False  # whether we are inside deferred()
_handlers: dict[int, Any] = {}  # the handlers of signals that watch() replaced


class Stopped(BaseException):  # not an Exception, so that `except Exception` does not catch it
    """Somebody asked this process to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.name, self.code = signal.Signals(number).name, 128 + number


def watch_imports() -> None:
    """Until watch(), a signal ends this process at once. An exception inside an import might be caught there."""
    for number in SIGNALS:
        signal.signal(number, _end)


def watch() -> None:
    """From now on the first signal raises Stopped in the main thread; inside deferred(), at its end."""
    global _received, _pipe
    unwatch()
    _received = 0
    reading, _pipe = os.pipe()
    os.set_blocking(_pipe, False)
    for number in SIGNALS:
        _handlers[number] = signal.signal(number, _handle)
    signal.set_wakeup_fd(_pipe, warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(reading,), daemon=True).start()


def unwatch() -> None:
    """Puts back the handlers that were there before watch()."""
    global _pipe
    for number in list(_handlers):
        signal.signal(number, _handlers.pop(number) or signal.SIG_DFL)
    if _pipe >= 0:
        signal.set_wakeup_fd(-1)
        os.close(_pipe)  # which ends the thread
        _pipe = -1


def say(text: str) -> None:
    """Writes a line to stderr from any thread. It is lost where nobody reads it any more."""
    with contextlib.suppress(OSError):
        os.write(stderr, f"{text}\n".encode())


@contextlib.contextmanager
def deferred() -> Iterator[Callable[[], bool]]:
    """Inside, a signal raises nothing. Gives a function that says whether one has come. Then the end raises Stopped; of
    several, one inside another, the outermost does.
    """
    global _deferring
    before, _deferring = _deferring, True
    try:
        yield lambda: bool(_received)
    finally:
        _deferring = before
    _raise_if_received()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Around work inside deferred() that a signal may break off."""
    global _deferring
    before, _deferring = _deferring, False
    try:
        _raise_if_received()
        yield
    finally:
        _deferring = before


@contextlib.contextmanager
def before_second_signal(end: Callable[[], None]) -> Iterator[None]:
    """Inside, a second signal calls `end` before it ends this process."""
    _before_end.append(end)
    try:
        yield
    finally:
        _before_end.remove(end)


def raise_if_late(seconds: float) -> None:
    """Inside deferred(), raises Stopped where a signal has waited for longer than that. Long work calls it."""
    if _received and time.monotonic() - _since > seconds:
        raise Stopped(_received)


def _raise_if_received() -> None:
    if _received and not _deferring:
        raise Stopped(_received)


def _handle(number: int, _: object) -> None:
    global _received, _since
    if not _received:
        _received, _since = number, time.monotonic()
        _raise_if_received()


def _end(number: int, _: object) -> None:
    say(EARLY.format(signal.Signals(number).name))
    os._exit(128 + number)


def _listen(reading: int) -> None:
    """Answers the first signal, and ends the process at the second."""
    came: list[int] = []
    while number := os.read(reading, 1):
        if came and number[0] != signal.SIGINT and "SLURM_JOB_ID" in os.environ:
            continue
        came.append(number[0])
        if len(came) == 2:
            for end in _before_end:
                end()
            os._exit(128 + came[1])
        if _deferring or not select.select([reading], [], [], GRACE)[0]:
            say(SOON)
    os.close(reading)
