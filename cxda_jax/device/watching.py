"""Follows a folder that fills: answers for each image that comes, and then takes it into the buffer."""

import contextlib
import csv
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from cxda_jax import stops
from cxda_jax.device.adapting import (
    COLUMNS,
    SHOWN,
    Asked,
    Fitted,
    Row,
    Tally,
    expected,
    line_of,
    listed,
    make_out,
    rows_of,
    write_page,
)
from cxda_jax.device.buffer import SupportBuffer
from cxda_jax.device.model import load
from cxda_jax.disk import files
from cxda_jax.errors import UserError
from cxda_jax.progress import say

QUIET = 1.0  # seconds without a change, after which a file that came counts as whole


class Stamp(NamedTuple):
    """The facts that tell one content of a file from another, under any name."""

    inode: int
    written: int  # nanoseconds
    size: int


class Follower:
    """Answers for the images of a folder as they come, each of which then goes into the buffer."""

    def __init__(self, asked: Asked):
        self.loaded, self.folder, self.always = load(asked.model, asked.method), Path(asked.buffer), asked.always
        if not self.folder.is_dir():
            raise UserError(f"{asked.buffer}: no such folder; make it, and put images into it")
        self.held, self.tally = SupportBuffer(self.loaded, asked.capacity), Tally()
        self.names: dict[Any, Path] = {}  # by place in the buffer
        self.rows: list[Row] = []  # those that moved most
        self.faults: dict[Path, str] = {}
        self.done: set[Stamp] = set()  # of files that were answered for, or could not be read as they were
        self.since: dict[Stamp, float] = {}  # when others were first seen

    def refused(self, line: str) -> None:
        if line not in self.faults.values():
            self.faults[Path(line)] = line
            say(f"left out: {line}")

    def ready(self, now: float) -> list[tuple[Stamp, Path]]:
        """The files that count as whole, the oldest first."""
        there = {stamp: path for path in listed(self.folder, self.refused) if (stamp := _stamp(path))}
        self.done &= there.keys()
        self.since = {stamp: self.since.get(stamp, now) for stamp in there.keys() - self.done}
        whole = [stamp for stamp, first in self.since.items() if now - first >= QUIET]
        return [(stamp, there[stamp]) for stamp in sorted(whole, key=lambda stamp: (stamp.written, there[stamp]))]

    def answer(self, stamp: Stamp, path: Path) -> list[Any] | None:
        """The line of predictions.csv for an image; None for one that cannot be read."""
        self.done.add(stamp)
        try:
            pixels = self.loaded.fit(path)
        except UserError as e:  # it is tried again once it has changed
            self.faults[path] = str(e)
            say(f"left out: {e}")
            return None
        self.faults.pop(path, None)
        order = self.held.places()
        adapted, helps = self.held.adapted(), expected(self.loaded, len(self.held))[0] or self.always
        row = next(rows_of(self.loaded, adapted, [(path, pixels)], self.folder, {}, order))
        line = line_of(row, [self.names[i] for i in order], helps)
        self.tally.add(row, helps)
        self.rows = sorted([*self.rows, row], key=lambda row: -row.answer.moved)[:SHOWN]
        self.names[self.held.observe(pixels)] = path
        a = row.answer
        counts = a.after if helps else a.before
        say(f"{a.file}: {counts}  (before {a.before}, after {a.after}; {len(self.held)} images in the buffer)")
        return line

    def write_page(self, path: Path) -> None:
        kept = Fitted(self.held.images(), [self.names[i] for i in self.held.places()])
        changed = f"{self.tally.changed} of {self.tally.count}"
        summary = [("Images", f"{self.tally.count} of {self.folder}"), ("Answers that changed", changed)]
        # The buffer has moved on since an answer, so no weights are shown.
        plain = [Row(row.answer._replace(nearest=()), None) for row in self.rows]
        write_page(path, self.loaded, plain, self.tally.count, kept, summary, list(self.faults.values()))


def follow_folder(asked: Asked, idle: float = 0.0) -> None:
    """Answers for each image that comes into the folder of the buffer, and then takes it in; until a signal,
    or `idle` seconds.

    Each line of predictions.csv is written at once. The page is written at the end.
    """
    follower, out_file, vanished = Follower(asked), asked.out / "predictions.csv", ""
    make_out(asked.out)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(stops.Stopped))  # a signal is how it ends
        stack.enter_context(files.locked(asked.out))
        stopping = stack.enter_context(stops.deferred())
        file = stack.enter_context(open(out_file, "w", newline="", encoding="utf-8", errors="backslashreplace"))
        table, last = csv.writer(file), time.monotonic()
        table.writerow(COLUMNS)
        say(f"following {asked.buffer}; Ctrl-C ends it")
        while not stopping() and not (idle and time.monotonic() - last > idle):
            listing = time.monotonic()
            try:
                ready = follower.ready(listing)
            except UserError as e:
                vanished = str(e)
                break
            pause = max(0.5, 10 * (time.monotonic() - listing))
            last = max([last, *follower.since.values()])
            for stamp, path in ready:
                if stopping():
                    break
                if line := follower.answer(stamp, path):
                    table.writerow(line)
                    file.flush()
                    last = time.monotonic()  # only now: the first answer takes seconds, which are not idle
            if not stopping():
                time.sleep(pause)
        count = follower.tally.count
        if not os.fstat(file.fileno()).st_nlink:
            raise UserError(
                f"{out_file}: deleted while its {count} answers were written; start again, and leave it there"
            )
        follower.write_page(asked.out / "adapted.html")
        say(f"{out_file} and {asked.out}/adapted.html: {count} images")
        if vanished:
            raise UserError(vanished)


def _stamp(path: Path) -> Stamp | None:
    """None for a file that has gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return Stamp(found.st_ino, found.st_mtime_ns, found.st_size)
