"""Shows a run while it goes on: lines with the time left, and a file of metrics."""

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cxda_jax.disk import files
from cxda_jax.disk.reading import metrics_line, read_lines
from cxda_jax.errors import UserError, needing, printable
from cxda_jax.machine import stops

LONG = 3600.0  # seconds of training; where more are left, the first guess says what is quicker
_who = ""  # what say() begins each line with


class MetricsFile(contextlib.AbstractContextManager["MetricsFile"]):
    """Appends one JSON object a line, with the seconds since 1970.

    A resumed run first drops the lines of the steps, and the score, that it repeats. Damaged lines are dropped
    then too, with a warning. With `tensorboard`, the same numbers also go to event files.
    """

    def __init__(self, path: Path, start: int, tensorboard: bool = False, log: Callable[[str], None] = print):
        def warn(numbers: list[int]) -> None:
            more = f", as are {len(numbers) - 1} more" if len(numbers) > 1 else ""
            log(f"warning: {path}: line {numbers[0]} is damaged and left out{more}")

        lines = read_lines(path, warn) if path.exists() else []
        kept = [line for line in lines if line["step"] < start or line["step"] == start and "val_score" not in line]
        files.write_text(path, "".join(map(metrics_line, kept)))
        self._events = _event_writer(path.parent) if tensorboard else None
        self._file = path.open("a")

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(metrics_line(record | {"time": round(time.time())}))
        self._file.flush()
        if self._events:
            self._events(record)

    def __exit__(self, *_: Any) -> None:
        self._file.close()


def _event_writer(folder: Path) -> Any:
    """write(record) into TensorBoard event files."""
    with needing("tensorboard=True", "data", ", or give False"):
        import tensorflow as tf
    # tf.summary.scalar would ask for the tensorboard package; this is all it adds.
    plugin = tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
    metadata = tf.compat.v1.SummaryMetadata(plugin_data=plugin)
    writer = tf.summary.create_file_writer(str(folder / "tensorboard"))

    def write(record: dict[str, Any]) -> None:
        with writer.as_default(record["step"]):
            for name, value in record.items():
                tf.summary.write(name, tf.constant(value, tf.float32), metadata=metadata)
        writer.flush()

    return write


class Meter:
    """Means and speed of the steps since the last reading, and the time left at the speed of all steps so far."""

    def __init__(self, start: int, total: int):
        self.step, self.total, self.waited = start, total, 0.0
        self._began = time.perf_counter()
        self._seconds, self._steps = 0.0, 0  # of all readings
        self._guessed = False
        self._measured: list[dict[str, jax.Array]] = []

    def add(self, measured: dict[str, jax.Array]) -> None:
        """Keeps the numbers of a step, or of several, on the device: fetching them each step would stall it.

        A CPU would take steps without end, and a signal would wait for them all. So two are under way there at most.
        """
        if self._measured and jax.default_backend() == "cpu":
            jax.block_until_ready(self._measured[-1])
        self._measured.append(measured)

    def exclude(self, seconds: float, steps: int = 0) -> None:
        """Leaves time that was not spent on steps out of the speed, and steps that were compiled in that time."""
        self._began += seconds
        self.step += steps

    def read(self, step: int, tasks_per_step: int) -> dict[str, float]:
        """Means since the last reading; waits for the device. No speed where all that was done since is left out."""
        measured = jax.device_get(self._measured)
        now, steps = time.perf_counter(), step - self.step
        self._last = {name: float(np.mean(np.hstack([m[name] for m in measured]))) for name in measured[0]}
        if steps > 0:
            seconds = max(1e-9, now - self._began)
            self._seconds, self._steps, self._guessed = self._seconds + seconds, self._steps + steps, True
            self._last |= {
                "episodes_per_s": steps * tasks_per_step / seconds,
                "data_wait_ms": 1e3 * self.waited / steps,
                "eta_s": self._seconds / self._steps * (self.total - step),
            }
        self.step, self._began, self.waited, self._measured = step, now, 0.0, []
        return self._last

    def first_guess(self, step: int) -> str:
        """Once, after the first two steps in which nothing was compiled: a line
        with the time left. "" at all other times."""
        if self._guessed or step - self.step < 2:
            return ""
        self._guessed = True
        jax.block_until_ready(self._measured)
        each = (time.perf_counter() - self._began) / (step - self.step)
        left = each * (self.total - step)
        quicker = "; smaller images, net.width or train.steps are quicker, as in variants such as folder:cxda,small"
        return f"step {step}/{self.total}  eta {duration(left)}" + quicker * (left > LONG)

    def line(self) -> str:
        m, speed = self._last, "compiled"
        if "eta_s" in m:
            speed = f"eta {duration(m['eta_s'])}  {m['episodes_per_s']:.1f} episodes/s"
            speed += f"  data_wait {m['data_wait_ms']:.2f} ms"
        return f"step {self.step}/{self.total}  {speed}  loss {m['loss']:.3f}  accuracy {m['accuracy']:.3f}"


@contextlib.contextmanager
def compiling(what: str, log: Callable[[str], None]) -> Iterator[None]:
    """Around the first call of a program: says that it is compiled, which may take long unless an earlier process kept
    it, and then how long it took.

    A signal stops it at the end. An exception inside JAX's compiler can end the process by a fault of memory.
    """
    began = time.perf_counter()
    log(f"compiling {what}, or reading it from the cache ...")
    with stops.deferred():
        yield
    log(f"ready in {duration(time.perf_counter() - began)}")


def announced(work: Callable[..., Any], what: str, check: Callable[..., None]) -> Callable[..., Any]:
    """The same function; its first call, in which it is compiled, says so, after check(work, *arguments)."""
    called = False

    def call(*arguments: Any) -> Any:
        nonlocal called
        if called:
            return work(*arguments)
        with compiling(what, say):
            check(work, *arguments)
            answer = jax.block_until_ready(work(*arguments))
        called = True
        return answer

    return call


def say_as(who: str) -> None:
    """From now on say() begins each line with who says it."""
    global _who
    _who = f"{who}: "


def say(line: str) -> None:
    """Prints a line at once. Once nobody reads (`| head -1`, a terminal that is gone), it is lost and work goes on."""
    shown = "\n".join(map(printable, line.split("\n")))
    try:
        print(_who + shown, flush=True)
    except OSError as e:
        if e.errno not in (errno.EPIPE, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would fail again when it ends


def replacing(mark: str, *paths: Path) -> None:
    """Says which of the files a command is about to replace. A UserError for one without the `mark` of its own."""
    for path in paths:
        if path.exists() and path.stat().st_size:
            with open(path, "rb") as file:
                if mark.encode() not in file.read(8192):
                    what = "not written by this command, so not replaced"
                    raise UserError(f"{path}: {what}; choose another name, or move it away")
            replaces(path)


def replaces(path: Path) -> None:
    say(f"{path}: replaces that of an earlier call")


def duration(seconds: float) -> str:
    """1h02m, 3m05s or 12s."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Rows of cells as lines of text. The first `left` columns begin at the left, the others end at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = "  ".join(f"{{:{'<' if i < left else '>'}{width}}}" for i, width in enumerate(widths))
    return [line.format(*row).rstrip() for row in rows]


class Counter:
    """Prints a line each `every` seconds while `total` things are done, and the time left by the speed since the first,
    which compiles."""

    def __init__(self, what: str, total: int, every: float = 10.0):
        self.what, self.total, self.every = what, total, every
        self._said = time.perf_counter()
        self._first: tuple[int, float] | None = None

    def __call__(self, done: int) -> None:
        now = time.perf_counter()
        if self._first is None:
            self._first = done, now
        elif now - self._said >= self.every and self._first[0] < done < self.total:
            self._said = now
            left = (now - self._first[1]) / (done - self._first[0]) * (self.total - done)
            say(f"{self.what} {done}/{self.total}  eta {duration(left)}")
