"""Follows a folder that fills: answers for each image that comes, and then takes it into the buffer."""

import contextlib
import csv
import os
import time
from pathlib import Path
from typing import NamedTuple

from cxda_jax import stops
from cxda_jax.device.adapting import (
    COLUMNS,
    SHOWN,
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


def follow_folder(
    model: str, method: str, buffer: str, out: Path, capacity: int = 500, always: bool = False, idle: float = 0.0
) -> None:  # fmt: skip
    """Answers for each image that comes into a folder, and then takes it into the buffer; until a signal,
    or `idle` seconds.

    Each line of predictions.csv is written at once. The page is written at the end.
    """
    loaded, folder, out_file = load(model, method), Path(buffer), out / "predictions.csv"
    if not folder.is_dir():
        raise UserError(f"{buffer}: no such folder; make it, and put images into it")
    held, names, rows, tally = SupportBuffer(loaded, capacity), {}, [], Tally()
    faults: dict[Path, str] = {}
    done: set[Stamp] = set()  # of files that were answered for, or could not be read as they were
    since: dict[Stamp, float] = {}  # when others were first seen
    vanished = ""

    def refused(line: str) -> None:
        if line not in faults.values():
            faults[Path(line)] = line
            say(f"left out: {line}")

    make_out(out)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(stops.Stopped))  # a signal is how it ends
        stack.enter_context(files.locked(out))
        stopping = stack.enter_context(stops.deferred())
        file = stack.enter_context(open(out_file, "w", newline="", encoding="utf-8", errors="backslashreplace"))
        table, last = csv.writer(file), time.monotonic()
        table.writerow(COLUMNS)
        say(f"following {folder}; Ctrl-C ends it")
        while not stopping() and not (idle and time.monotonic() - last > idle):
            listing = time.monotonic()
            try:
                there = {stamp: path for path in listed(folder, refused) if (stamp := _stamp(path))}
            except UserError as e:
                vanished = str(e)
                break
            pause = max(0.5, 10 * (time.monotonic() - listing))
            done &= there.keys()
            since = {stamp: since.get(stamp, listing) for stamp in there.keys() - done}
            last = max([last, *since.values()])
            ready = [stamp for stamp, first in since.items() if listing - first >= QUIET]
            for stamp in sorted(ready, key=lambda stamp: (stamp.written, there[stamp])):
                if stopping():
                    break
                path = there[stamp]
                done.add(stamp)
                try:
                    pixels = loaded.fit(path)
                except UserError as e:  # it is tried again once it has changed
                    faults[path] = str(e)
                    say(f"left out: {e}")
                    continue
                faults.pop(path, None)
                order = held.places()
                adapted, helps = held.adapted(), expected(loaded, len(held))[0] or always
                row = next(rows_of(loaded, adapted, [(path, pixels)], folder, {}, order))
                table.writerow(line_of(row, [names[i] for i in order], helps))
                file.flush()
                tally.add(row, helps)
                rows = sorted([*rows, row], key=lambda row: -row.answer.moved)[:SHOWN]
                names[held.observe(pixels)] = path
                a = row.answer
                counts = a.after if helps else a.before
                say(f"{a.file}: {counts}  (before {a.before}, after {a.after}; {len(held)} images in the buffer)")
                last = time.monotonic()  # only now: the first answer takes seconds, which are not idle
            if not stopping():
                time.sleep(pause)
        kept = Fitted(held.images(), [names[i] for i in held.places()])
        summary = [
            ("Images", f"{tally.count} of {folder}"),
            ("Answers that changed", f"{tally.changed} of {tally.count}"),
        ]
        # The buffer has moved on since an answer, so no weights are shown.
        plain = [Row(row.answer._replace(nearest=()), None) for row in rows]
        if not os.fstat(file.fileno()).st_nlink:
            raise UserError(
                f"{out_file}: deleted while its {tally.count} answers were written; start again, and leave it there"
            )
        write_page(out / "adapted.html", loaded, plain, tally.count, kept, summary, list(faults.values()))
        say(f"{out_file} and {out}/adapted.html: {tally.count} images")
        if vanished:
            raise UserError(vanished)


def _stamp(path: Path) -> Stamp | None:
    """None for a file that has gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return Stamp(found.st_ino, found.st_mtime_ns, found.st_size)
