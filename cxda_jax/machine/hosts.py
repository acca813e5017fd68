"""Several processes that work together, on one host or many: how they meet, and how all of them end when one ends.

Each process gives a sign of life every few seconds, through the service that JAX runs in process 0. Process 0 reads all
of them and publishes a verdict once one is missing. A process that ends before the others says why, and they get some
seconds to end for the same reason: after a signal all end so. A process that is left after that says in one line what
happened, and ends. Nothing is lost: a checkpoint is either whole or not there, and the same command goes on from the
newest one.

What is private to JAX here, or concerns the whole process, has a comment that begins with "Private" or "Process-wide".
Unless it names another test, test_a_lost_process_ends_all_with_one_line_and_loses_nothing of tests/slow/test_mesh.py
shows the failure.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax._src import distributed

from cxda_jax.errors import UserError, brief
from cxda_jax.machine import mesh, progress, stops

MEET = 60  # seconds for all processes to come
BEAT = 2.0  # seconds between signs of life
SILENT = 20.0  # seconds without one, after which a process counts as gone
GRACE = 10.0  # seconds in which the others may end for the same reason as a process that has ended
TEMPORARY = 75  # exit code: nothing is wrong with the command, it can be given again
AGAIN = "nothing that was saved is lost; start all processes again with the same command"
_FIRST_GONE = "process 0, through which all others meet, is gone"
_BEATS, _ENDED, _VERDICT = "cxda/beat/", "cxda/ended/", "cxda/verdict"

# JAX's words where it cannot reach the service. The last one comes from calling _quiet_client()'s function.
_LOST = "DEADLINE_EXCEEDED", "UNAVAILABLE", "bad_cast"

_on_abort: Any = None  # kept, since ctypes would else free it


@contextlib.contextmanager
def joined(coordinator: str = "", num_processes: int = -1, process_id: int = -1, quiet: bool = True) -> Iterator[None]:
    """Inside, this process works together with the others. Call it before anything asks JAX for its devices.

    On Slurm and on Cloud TPUs JAX finds the others by itself. Elsewhere all three arguments are needed: HOST:PORT of
    process 0, the number of processes, and the number of this one. `quiet` leaves out the lines of JAX's C++ parts
    about peers that end.
    """
    if quiet:
        _silence_cpp()
    _meet(coordinator, num_processes, process_id)
    if quiet:
        _answer_abort()
    if jax.process_index():
        progress.say_as(f"process {jax.process_index()}")
    watch = _Watch()
    watch.start()
    try:
        yield
    except stops.Stopped as e:
        watch.end(f"stopped by {e.name}", e.code)
        raise
    except jax.errors.JaxRuntimeError as e:
        time.sleep(SILENT + 3 * BEAT)  # if a process is gone, the watch says so and ends this one
        said = f"the exchange with the other processes failed ({brief(str(e), 100)}); {AGAIN}"
        watch.end(said, 2)
        raise UserError(said) from e
    except Exception as e:
        watch.end(str(e), 2 if isinstance(e, UserError | OSError) else 1)
        raise
    watch.leave()


def _meet(coordinator: str, num_processes: int, process_id: int) -> None:
    # Process-wide: else JAX takes SIGTERM for itself, so that nothing is saved. See
    # test_a_signal_reaches_a_process_that_works_with_others in tests/slow/test_mesh.py.
    jax.config.update("jax_enable_preemption_service", False)
    count, which = (None if number < 0 else number for number in (num_processes, process_id))
    try:
        with _quiet_client():
            jax.distributed.initialize(
                coordinator or None, count, which, initialization_timeout=MEET,
                heartbeat_timeout_seconds=10 * MEET, shutdown_timeout_seconds=5,
            )  # fmt: skip
    except (ValueError, TypeError) as e:
        flags = "; outside Slurm and Cloud TPU give --coordinator=HOST:PORT --num_processes=N --process_id=K"
        said = f"--distributed: the processes cannot meet: {brief(str(e), 60)}"
        raise UserError(said + flags * (not coordinator)) from e
    except RuntimeError as e:  # jax.errors.JaxRuntimeError is one too
        _forget()
        if any(word in str(e) for word in _LOST):
            said = f"not all processes came within {MEET} s" + (f" at {coordinator}" if coordinator else "")
            fix = "check that each one was started and can reach process 0, and start all again"
            raise UserError(f"{said}; {fix}") from e
        raise UserError(f"the processes cannot meet: {brief(str(e), 150)}") from e


def _forget() -> None:
    """Makes JAX forget its client of the service."""
    # Private: else JAX shuts the client down once more when the process ends, and complains on many lines.
    distributed.global_state.client = None


@contextlib.contextmanager
def _quiet_client() -> Iterator[None]:
    """Inside, JAX makes a client that does not end the process when it cannot reach the service."""
    # Private: else the process is aborted with pages of C++ where another one never comes, and no except is reached.
    # See test_a_process_that_never_comes_ends_the_others_with_an_error in tests/slow/test_mesh.py.
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    make = getattr(_jax, "get_distributed_runtime_client", None)
    if make is None:  # another version of JAX: its lines come beside ours
        yield
        return
    _jax.get_distributed_runtime_client = functools.partial(make, missed_heartbeat_callback=lambda *_: None)
    try:
        yield
    finally:
        _jax.get_distributed_runtime_client = make


def _silence_cpp() -> None:
    """Lets only Python still write to stderr."""
    # Process-wide: the C++ parts of JAX tell the loss of a peer on many lines, and the watch on one.
    sys.stderr.flush()
    stops.stderr = os.dup(2)
    own: Any = {"buffering": 1, "errors": "backslashreplace", "closefd": False}
    sys.stderr = open(stops.stderr, "w", **own)  # noqa: SIM115  # it is the stream of the whole process
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _answer_abort() -> None:
    """Has one line say that JAX's client aborts the process, as it does as soon as it loses process 0."""
    # Process-wide: a Python handler would come too late, since the system ends the process when the C handler returns.
    # So the handler is a C function, which ctypes makes.
    global _on_abort
    faulthandler.disable()
    _on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(_say_aborted)
    ctypes.CDLL(None).signal(signal.SIGABRT, _on_abort)


def _say_aborted(_: int) -> None:
    address = distributed.global_state.coordinator_address or ":0"
    host, _colon, number = str(address).rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(number)), 2).close()
        said = "JAX has aborted this process"
    except OSError:
        said = f"{_FIRST_GONE} ({address} does not answer)"
    stops.say(f"error: {said}; {AGAIN}")
    os._exit(TEMPORARY)


class _Watch(threading.Thread):
    """A thread that gives this process's signs of life, and ends the process when another one is gone."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._own, self._count = jax.process_index(), jax.process_count()
        self._store: Any = distributed.global_state.client
        self._done = threading.Event()

    def run(self) -> None:
        seen: dict[int, tuple[str, float]] = {k: ("", time.monotonic()) for k in range(1, self._count)}
        known_since: dict[str, float] = {}  # by the key of a process that has ended
        beat, verdict, talking = 0, "", ThreadPoolExecutor(1)
        while not self._done.is_set():
            try:
                # A frozen process 0 neither answers nor refuses, so nobody waits longer than for a sign of life.
                known = talking.submit(self._exchange, beat).result(SILENT)
                verdict = known.get(_VERDICT, "") or self._has_ended(known, known_since)
                if self._own == 0:
                    verdict = verdict or self._silent(known, seen)
                    if verdict:
                        self._store.key_value_set(_VERDICT, verdict, allow_overwrite=True)
            except Exception:  # it took too long; or an error of the store, which have no type of their own
                verdict = _FIRST_GONE
            if verdict and not self._done.is_set():
                self._finish(verdict)
            beat += 1
            self._done.wait(BEAT)
        talking.shutdown(wait=False)

    def _exchange(self, beat: int) -> dict[str, str]:
        """Gives a sign of life, and what all have said."""
        self._store.key_value_set(f"{_BEATS}{self._own}", str(beat), allow_overwrite=True)
        return dict(self._store.key_value_dir_get("cxda/"))

    def _has_ended(self, known: dict[str, str], known_since: dict[str, float]) -> str:
        """The verdict if a process has ended, and this one had the time to end for the same reason."""
        now = time.monotonic()
        for key, reason in known.items():
            if key.startswith(_ENDED) and now - known_since.setdefault(key, now) >= GRACE:
                return f"process {key.rpartition('/')[2]} of {self._count} has ended ({brief(reason, 200)})"
        return ""

    def _silent(self, known: dict[str, str], seen: dict[int, tuple[str, float]]) -> str:
        """The verdict of process 0 if another one gives no sign of life."""
        now = time.monotonic()
        for number, (value, when) in seen.items():
            if (new := known.get(f"{_BEATS}{number}", "")) != value:
                seen[number] = new, now
            elif now - when > SILENT:
                return f"process {number} of {self._count} is gone (no sign of life for {SILENT:.0f} s)"
        return ""

    def _finish(self, verdict: str) -> None:
        if self._own == 0:
            time.sleep(2 * BEAT)  # so that the others can read the verdict
        stops.say(f"error: {verdict}; {AGAIN}")
        os._exit(TEMPORARY)

    def end(self, reason: str, code: int) -> None:
        """Tells the others why this process ends. When it ends, process 0 waits for them."""
        self._done.set()
        with contextlib.suppress(Exception):
            self._store.key_value_set(f"{_ENDED}{self._own}", reason, allow_overwrite=True)
        # Process-wide: it runs before the handlers that JAX registered, which would wait for the others.
        atexit.register(self._exit, code)

    def _exit(self, code: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        if self._own == 0:
            self._wait_for_the_others()
        os._exit(code)

    def _wait_for_the_others(self) -> None:
        """Waits until all others end, or GRACE has made them end, since the service ends with process 0."""
        until = time.monotonic() + GRACE + BEAT
        with contextlib.suppress(Exception):
            while time.monotonic() < until and len(self._store.key_value_dir_get(_ENDED)) < self._count:
                time.sleep(0.1)
        time.sleep(2 * BEAT)

    def leave(self) -> None:
        """Leaves the others, once the work of all is done."""
        mesh.together()
        self._done.set()
        self.join()
        if self._own == 0:
            time.sleep(BEAT)  # the service ends with this process, and the others take their leave of it
        with contextlib.suppress(RuntimeError):  # the service has ended already, and nothing is left to do
            jax.distributed.shutdown()
        _forget()
