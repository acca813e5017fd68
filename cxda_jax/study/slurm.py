"""The jobs of a study in a Slurm queue: submits them as arrays, keeps their numbers, and waits for them.

The numbers are kept in the study's jobs/slurm.json, so a later start waits for what is in the queue and submits only the rest.
"""

import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cxda_jax import stops
from cxda_jax.config import config_hash
from cxda_jax.disk import files
from cxda_jax.disk.reading import read_object
from cxda_jax.errors import UserError
from cxda_jax.progress import duration
from cxda_jax.study.estimate import known_seconds
from cxda_jax.study.jobs import Job, Study, is_done
from cxda_jax.study.local import QUICK, last_line

NOTICE = 120  # seconds in which a training saves before its time ends; a fifth of a short time
SLACK, LEAST = 3, 10  # a time limit is so many times the estimate, and so many minutes more
OURS = ("array", "dependency", "error", "job_name", "kill_on_invalid_dep", "open_mode", "output", "parsable", "requeue",
        "signal", "wrap")  # fmt: skip
ENDS = {  # states in which a job has ended, and what to say of them
    "COMPLETED": "",
    "FAILED": "failed",
    "TIMEOUT": "was ended at its time limit before it could save; give more minutes by time=",
    "CANCELLED": "somebody cancelled it",
    "OUT_OF_MEMORY": "needs more memory than it asked for; give more, such as mem=64G",
    "NODE_FAIL": "its node failed",
    "BOOT_FAIL": "its node did not start",
    "DEADLINE": "its deadline passed",
    "PREEMPTED": "had to give way, and this queue does not start it again",
}


class Entry(NamedTuple):
    """A job in the queue."""

    name: str  # of its array
    state: str
    reason: str  # why it waits


def run_jobs(
    study: Study,
    jobs: list[Job],
    parameters: Sequence[str],
    workers: int | None = None,
    cancel_if_stopped: bool = False,
) -> list[str]:
    """Submits what is neither done nor in the queue, and waits; returns a line for each that failed or was left out.

    `parameters` are options of sbatch, written name=value. At most `workers` tasks of an array run at once.
    """
    options = read_options(parameters)
    todo = [job for job in jobs if not is_done(study, job)]
    with files.locked(study.folder / "jobs"), stops.deferred():
        numbers = waiting_numbers(study)
        old = sum(job.id in numbers for job in todo)
        print(f"{study.folder}: {len(jobs)} jobs, {len(jobs) - len(todo)} done before, {old} in the queue", flush=True)
        arrays: dict[tuple[str, ...], list[Job]] = {}  # each after those it needs, as the jobs are
        for job in todo:
            if job.id not in numbers:
                arrays.setdefault(job.needs, []).append(job)
        for needs, array in arrays.items():
            after = [numbers[need] for need in needs if need in numbers]
            number, name = submit(study, array, after, options, workers)
            kept = read_kept(study)
            for task, job in enumerate(array):
                numbers[job.id] = f"{number}_{task}"
                kept[job.id] = {"number": numbers[job.id], "array": name}
            files.write_text(kept_numbers(study), json.dumps(kept, indent=1) + "\n")
            print(f"submitted {brief_names(array)} as {number}", flush=True)
    try:
        return wait(study, todo, numbers)
    except stops.Stopped:
        if cancel_if_stopped:
            cancel(study)
        else:
            print("what is in the queue stays there; the same command waits for it again", flush=True)
        raise


def read_options(parameters: Sequence[str]) -> list[str]:
    """Of sbatch."""
    options = []
    for name, equals, value in (text.partition("=") for text in parameters):
        name = {"timeout_min": "time"}.get(name.strip(), name.strip()).lstrip("-").replace("-", "_")
        if name in OURS:
            raise UserError(f"{name}={value}: the study sets this option of sbatch itself; leave it out")
        options.append(f"--{name.replace('_', '-')}{equals}{value}")
    return options


def submit(
    study: Study, array: list[Job], after: list[str], options: list[str], workers: int | None
) -> tuple[str, str]:
    """Submits jobs that need the same; returns the array's number and its name."""
    name = f"cxda-{study.folder.name}-{config_hash({'jobs': [job.id for job in array]})[:8]}"
    given = next((option.partition("=")[2] for option in options if option.startswith("--time=")), "")
    minutes = None if given else time_limit(study, array)
    limited = [f"--time={minutes}"] if minutes else []
    at_once = f"%{workers}" if workers else ""
    (study.folder / "jobs" / "slurm").mkdir(exist_ok=True)
    said = str(study.folder / "jobs" / "slurm" / f"{name}.%a.out")
    number = ask_queue(
        "sbatch", "--parsable", f"--job-name={name}", f"--array=0-{len(array) - 1}{at_once}", "--requeue", "--open-mode=append",
        f"--output={said}", f"--signal=B:USR2@{notice(minutes or minutes_of(given))}",
        *([f"--dependency=afterok:{':'.join(after)}", "--kill-on-invalid-dep=yes"] if after else []), *limited, *options,
        text=batch_script(study, array),
    )  # fmt: skip
    return number.split(";")[0], name  # "number;cluster" where there are several clusters


def time_limit(study: Study, array: list[Job]) -> int | None:
    """Minutes for each task of an array, from what the estimate has measured; None where it has not."""
    times = [seconds for job in array if (seconds := known_seconds(study, job)) is not None]
    return LEAST + math.ceil(SLACK * max(times) / 60) if len(times) == len(array) else None


def notice(minutes: float | None) -> int:
    """Seconds between Slurm's first signal and the end of a job's time. Slurm may send it up to a minute early."""
    return NOTICE if not minutes else min(NOTICE, max(1, int(60 * minutes / 5)))


def minutes_of(text: str) -> float | None:
    """Of a time as Slurm writes it: 90, 90:00, 1:30:00, 1-12, 1-12:30 or 1-12:30:00; None of any other text."""
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in [*parts, days or "0"]) or len(parts) > 3:
        return None
    units = (60, 1, 1 / 60) if dash or len(parts) == 3 else (1, 1 / 60)
    return int(days or 0) * 1440 + sum(int(part) * unit for part, unit in zip(parts, units, strict=False))


def batch_script(study: Study, array: list[Job]) -> str:
    """Each task of the array runs one job; what it says goes into the job's log."""
    cases = []
    for task, job in enumerate(array):
        log = shlex.quote(str(study.folder / "jobs" / f"{job.id}.log"))
        words = shlex.join([str(study.folder), job.id, job.name, *job.arguments])
        cases.append(f"{task}) log={log}; set -- {words} ;;")
    settings = [f"export {name}={value}" for name, value in QUICK.items()] if study.smoke else []
    run = f'exec {shlex.quote(sys.executable)} -m cxda_jax.study.queued "$@" >>"$log" 2>&1'
    return "\n".join(["#!/bin/sh", *settings, 'case "$SLURM_ARRAY_TASK_ID" in', *cases, "esac", run, ""])


def brief_names(array: list[Job]) -> str:
    return array[0].name + (f" and {len(array) - 1} more" if len(array) > 1 else "")


def kept_numbers(study: Study) -> Path:
    return study.folder / "jobs" / "slurm.json"


def read_kept(study: Study) -> dict[str, dict[str, str]]:
    """By a job's id, its number in the queue and the name of its array."""
    path = kept_numbers(study)
    return read_object(path, "delete it; then what is in the queue is submitted again") if path.exists() else {}


def waiting_numbers(study: Study) -> dict[str, str]:
    """The numbers of those jobs of the study that are in the queue and have not ended, by the jobs' ids."""
    kept = read_kept(study)
    queue = look() if kept else {}
    live = {number for number, entry in queue.items() if entry.state not in ENDS}
    return {
        job: its["number"]
        for job, its in kept.items()
        if its["number"] in live
        and queue[its["number"]].name == its["array"]  # numbers begin anew where Slurm is set up anew
    }


def cancel(study: Study) -> None:
    """Takes the study's jobs out of the queue; those that run save first."""
    numbers = list(waiting_numbers(study).values())
    if numbers:
        ask_queue("scancel", *numbers)
    print(f"took {len(numbers)} jobs of {study.folder} out of the queue", flush=True)


def look() -> dict[str, Entry]:
    """This user's jobs, by their numbers. Slurm forgets a job some minutes after its end."""
    text = ask_queue("squeue", f"--user={os.getuid()}", "--states=all", "--array", "--noheader", "--format=%i|%j|%T|%r")
    rows = [line.split("|", 3) for line in text.splitlines() if line.count("|") >= 3]
    return {number: Entry(*rest) for number, *rest in rows}


def wait(study: Study, todo: list[Job], numbers: dict[str, str]) -> list[str]:
    """Until all jobs have ended; says what ends, and what the queue does with the rest."""
    failed: dict[str, str] = {}
    left, total, began, shown, unseen = list(todo), len(todo), time.monotonic(), "", set[str]()
    while left:
        try:
            queue = look()
        except UserError as e:  # the controller may be down for a while, and the jobs run on
            shown = tell(f"{e}; trying again", shown)
            time.sleep(10)
            continue
        for job in list(left):
            entry = queue.get(numbers[job.id])
            fault = verdict(study, job, entry, failed, unseen)
            if fault is None:
                continue
            left.remove(job)
            if fault:
                failed[job.id] = fault
                if entry and entry.state not in ENDS:
                    ask_queue("scancel", numbers[job.id])
            eta = (time.monotonic() - began) / (total - len(left)) * len(left)
            print(f"[{total - len(left)}/{total}] {fault or job.name}  eta {duration(eta)}", flush=True)
        if left:
            shown = tell(summary([queue[numbers[job.id]] for job in left if numbers[job.id] in queue]), shown)
            time.sleep(min(30.0, 1 + (time.monotonic() - began) / 30))
    return list(failed.values())


def verdict(
    study: Study, job: Job, entry: Entry | None, failed: dict[str, str], unseen: set[str]
) -> str | None:  # fmt: skip
    """None while a job has not ended, "" where it ended well, else a line that says why not."""
    if is_done(study, job):
        return ""
    if any(need in failed for need in job.needs):
        return f"{job.name}: left out, since what it needs failed"
    if entry is None:
        if job.id not in unseen:  # a network's disk may show the mark late
            unseen.add(job.id)
            return None
        return explained(study, job, "Slurm knows it no more, and it has not ended well")
    if entry.state not in ENDS:
        return None
    return explained(study, job, ENDS[entry.state]) if ENDS[entry.state] else ""


def explained(study: Study, job: Job, what: str) -> str:
    log = study.folder / "jobs" / f"{job.id}.log"
    if what == "failed":
        what = last_line(log).partition(" queue: ")[2] or last_line(log) or "failed before it began"
    return f"{job.name}: {what} (log: {log})"


def summary(entries: list[Entry]) -> str:
    """How many run, and why the others wait."""
    counts: dict[str, int] = {}
    for entry in entries:
        if entry.state in ENDS:
            continue
        state = f"waiting ({entry.reason})" if entry.state == "PENDING" else entry.state.lower()
        counts[state] = counts.get(state, 0) + 1
    return "in the queue: " + ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))


def tell(text: str, shown: str) -> str:
    """Prints a line unless it is the one that was shown last."""
    if text != shown:
        print(text, flush=True)
    return text


def ask_queue(*command: str, text: str | None = None) -> str:
    """What a command of Slurm answers."""
    try:  # in a session of its own, or Ctrl-C would end it too
        done = subprocess.run(command, input=text, capture_output=True, text=True, start_new_session=True)
    except FileNotFoundError:
        raise UserError(
            f"{command[0]} is not on this machine; give the command where Slurm's queue can be reached"
        ) from None
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("Try ")]
        raise UserError((lines or [f"{command[0]}: exit code {done.returncode}"])[-1])
    return done.stdout.strip()
