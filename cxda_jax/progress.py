"""What a user watches while a run goes on: a line with the time left, and a file of metrics."""

import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cxda_jax.types import UserError


class MetricsFile:
    """Appends one JSON object a line. A resumed run first drops the lines past the step it resumes from.

    With `tensorboard`, the same numbers also go to event files beside it.
    """

    def __init__(self, path: Path, start: int, tensorboard: bool = False):
        kept = []
        if path.exists():
            lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
            kept = [line for line in lines if json.loads(line)["step"] <= start]
        path.write_text("".join(line + "\n" for line in kept))
        self._file = path.open("a")
        self._events = _event_writer(path.parent) if tensorboard else None

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._events:
            self._events(record)

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()


def _event_writer(folder: Path) -> Any:
    """write(record) into TensorBoard event files."""
    try:
        import tensorflow as tf
    except ImportError:
        raise UserError("tensorboard=True needs TensorFlow: pip install 'cxda_jax[data]', or False") from None
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
    """Means over the steps since the last reading, speed and time left."""

    def __init__(self, start: int, total: int):
        self.step, self.total = start, total
        self._read_at = time.perf_counter()
        self._excluded_s, self._excluded_steps = 0.0, 0
        self._measured: list[dict[str, jax.Array]] = []
        self.waited = 0.0
        self._last: dict[str, float] = {}

    def add(self, measured: dict[str, jax.Array]) -> None:
        """Keeps the numbers of a step, or of several, on the device: fetching them each step would stall it."""
        self._measured.append(measured)

    def exclude(self, seconds: float, steps: int = 0) -> None:
        """Leaves time that was not spent on steps out of the speed, and steps that were compiled in that time."""
        self._excluded_s += seconds
        self._excluded_steps += steps

    def read(self, step: int, tasks_per_step: int) -> dict[str, float]:
        """Means since the last reading; waits for the device. No speed where all that was done since then is left out."""
        measured = jax.device_get(self._measured)
        now, steps = time.perf_counter(), step - self.step - self._excluded_steps
        seconds = max(1e-9, now - self._read_at - self._excluded_s)
        self._last = {name: float(np.mean(np.hstack([m[name] for m in measured]))) for name in measured[0]}
        if steps > 0:
            self._last |= {
                "episodes_per_s": steps * tasks_per_step / seconds,
                "data_wait_ms": 1e3 * self.waited / steps,
                "eta_s": seconds / steps * (self.total - step),
            }
        self.step, self._read_at, self.waited, self._measured = step, now, 0.0, []
        self._excluded_s, self._excluded_steps = 0.0, 0
        return self._last

    def line(self) -> str:
        m = self._last
        speed = "compiled" if "eta_s" not in m else (
            f"eta {duration(m['eta_s'])}  {m['episodes_per_s']:.1f} episodes/s  data_wait {m['data_wait_ms']:.2f} ms"
        )  # fmt: skip
        return f"step {self.step}/{self.total}  {speed}  loss {m['loss']:.3f}  accuracy {m['accuracy']:.3f}"


def duration(seconds: float) -> str:
    """1h02m, 3m05s or 12s."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


class Counter:
    """Prints a line about every `every` seconds while `total` things are done, with the time left.

    The first call's time is left out of it: what it counts has been compiled by then.
    """

    def __init__(self, what: str, total: int, every: float = 10.0):
        self.what, self.total, self.every = what, total, every
        self._said = time.perf_counter()
        self._first: tuple[int, float] | None = None

    def __call__(self, done: int) -> None:
        now = time.perf_counter()
        if self._first is None:
            self._first = done, now
        elif now - self._said >= self.every and done < self.total:
            self._said = now
            left = (now - self._first[1]) / (done - self._first[0]) * (self.total - done)
            print(f"{self.what} {done}/{self.total}  eta {duration(left)}", flush=True)
