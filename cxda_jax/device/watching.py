"""Follows a folder that fills: answers for each image that comes, and then takes it into the buffer."""

import contextlib
import csv
import time
from pathlib import Path
from typing import NamedTuple

from cxda_jax.device.adapting import (
    COLUMNS,
    Asked,
    Fitted,
    Tally,
    answers_to,
    line_of,
    listed,
    make_out,
    model_of,
    which_counts,
    write_page,
)
from cxda_jax.device.buffer import SupportBuffer
from cxda_jax.disk import files
from cxda_jax.errors import UserError
from cxda_jax.machine import stops
from cxda_jax.machine.progress import say

QUIET = 1.0  # seconds without a change, after which a file that came counts as whole


class Stamp(NamedTuple):
    """The facts that tell one content of a file from another, under any name."""

    inode: int
    written: int  # nanoseconds
    size: int


class Follower:
    """Answers for the images of a folder as they come, each of which then goes into the buffer."""

    def __init__(self, asked: Asked):
        self.loaded = model_of(asked)
        self.folder, self.always = Path(asked.buffer), asked.always
        if not self.folder.is_dir():
            raise UserError(f"{asked.buffer}: no such folder; make it, and put images into it")
        self.buffer, self.tally = SupportBuffer(self.loaded, asked.capacity), Tally()
        self.files: list[Path] = []  # of the images in the buffer
        self.faults: dict[str, str] = {}  # by what was left out
        self.done: set[Stamp] = set()  # of files that were answered for, or could not be read as they were
        self.since: dict[Stamp, float] = {}  # when others were first seen

    def leave_out(self, what: str, why: str) -> None:
        if self.faults.get(what) != why:
            self.faults[what] = why
            say(f"left out: {why}")

    def ready(self, now: float) -> list[tuple[Stamp, Path]]:
        """The files that count as whole, the oldest first."""
        found = listed(self.folder, lambda line: self.leave_out(line, line))
        there = {stamp: path for path in found if (stamp := _stamp(path))}
        self.done &= there.keys()
        self.since = {stamp: self.since.get(stamp, now) for stamp in there.keys() - self.done}
        whole = [stamp for stamp, first in self.since.items() if now - first >= QUIET]
        return [(stamp, there[stamp]) for stamp in sorted(whole, key=lambda stamp: (stamp.written, there[stamp]))]

    def answer(self, stamp: Stamp, path: Path) -> list[str] | None:
        """The line of predictions.csv for an image; None for one that cannot be read."""
        self.done.add(stamp)
        try:
            image = Fitted(self.loaded.fit(path)[None], [path])
        except UserError as e:  # it is tried again once it has changed
            return self.leave_out(str(path), str(e))
        self.faults.pop(str(path), None)
        helps = which_counts(self.loaded, len(self.buffer), self.always)[0]
        answer = next(answers_to(self.loaded, self.buffer, image, self.folder, {}))
        line = line_of(answer, self.files, helps)
        # The buffer moves on, so the page shows no weights.
        self.tally.add(answer._replace(weights=None), helps)
        self.buffer.observe(image.pixels[0])
        self.files = [*self.files, path][-self.buffer.capacity :]
        counts = answer.after if helps else answer.before
        both = f"before {answer.before}, after {answer.after}"
        say(f"{answer.file}: {counts}  ({both}; {len(self.buffer)} images in the buffer)")
        return line

    def write_page(self, path: Path) -> None:
        changed = f"{self.tally.changed} of {self.tally.count}"
        summary = [("Images", f"{self.tally.count} of {self.folder}"), ("Answers that changed", changed)]
        held = Fitted(self.buffer.images(), self.files)
        write_page(path, self.loaded, self.tally, held, summary, [*self.faults.values()])


def follow_folder(asked: Asked, idle: float = 0.0) -> None:
    """Answers for each image that comes into the folder of the buffer, and then takes it in; until a signal,
    or `idle` seconds.

    Each line of predictions.csv is written at once. The page is written at the end.
    """
    follower, out = Follower(asked), asked.out
    make_out(out)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(stops.Stopped))  # a signal is how it ends
        stack.enter_context(files.locked(out))
        stopping = stack.enter_context(stops.deferred())
        file = stack.enter_context(
            open(out / "predictions.csv", "w", newline="", encoding="utf-8", errors="backslashreplace")
        )
        table, last = csv.writer(file), time.monotonic()
        table.writerow(COLUMNS)
        say(f"following {asked.buffer}; Ctrl-C ends it")
        try:
            while not stopping() and not (idle and time.monotonic() - last > idle):
                listing = time.monotonic()
                ready = follower.ready(listing)
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
        finally:  # where the folder has gone, too
            follower.write_page(out / "adapted.html")
            say(f"{out}/predictions.csv and {out}/adapted.html: {follower.tally.count} images")


def _stamp(path: Path) -> Stamp | None:
    """None for a file that has gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return Stamp(found.st_ino, found.st_mtime_ns, found.st_size)
