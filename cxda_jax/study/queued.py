"""One job of a study on a node of a Slurm queue. The batch script of cxda_jax/study/slurm.py calls it.

A signal lets the job save and end. Slurm sends one shortly before the time limit, or when the job must give way. Then the job
goes back into the queue, and its next start goes on from there. The exit code says what happened: 0 means done and marked, 1
means failed, and 128 + N means that signal N stopped it.
"""

import os
import signal
import subprocess
import sys
import time
from concurrent import futures
from pathlib import Path

from cxda_jax import stops
from cxda_jax.study import local
from cxda_jax.study.jobs import Job, Study, is_done


def main(folder: str, number: str, name: str, *arguments: str) -> int:
    study, job = Study("", Path(folder), (), (), smoke=False), Job(number, name, arguments, ())
    stops.watch()
    saved = newest_step(arguments)
    say(f"{name}: start {1 + int(os.environ.get('SLURM_RESTART_COUNT', 0))} as job {own_number()} of Slurm")
    try:
        if is_done(study, job):
            return 0
        with futures.ThreadPoolExecutor(1) as pool, local.stopping_jobs():
            fault = pool.submit(local.perform, study, job, apart=True).result()
        if fault:
            say(fault.removeprefix(f"{name}: ").partition(" (log: ")[0])
        return 1 if fault else 0
    except stops.Stopped as e:
        if is_done(study, job):  # it ended while the signal was on its way
            return 0
        return stopped(e, newest_step(arguments) > saved)


def stopped(e: stops.Stopped, saved_more: bool) -> int:
    """Puts the job back into the queue, unless Slurm is ending it or the next start would get no further."""
    stops.unwatch()  # Slurm's next signal may end this process
    number = own_number()
    said = ask("squeue", f"--jobs={number}", "--noheader", "--Format=State:30,PreemptTime:30").stdout.split()
    state, preempted = said if len(said) == 2 else ("RUNNING", "N/A")  # squeue gave no answer
    if state != "RUNNING":
        say(f"{e.name}: Slurm ends this job; it starts again if it was preempted, and not if somebody cancelled it")
        return e.code
    if e.code == 128 + signal.SIGUSR2 and preempted == "N/A" and not saved_more:
        say("its time limit is too short: it saved no new step within it; give more minutes by time=")
        return 1
    asked = ask("scontrol", "requeue", number)
    if asked.returncode:
        reason = (asked.stderr.strip().splitlines() or ["scontrol gave no reason"])[-1]
        say(f"stopped by {e.name}, and cannot go back into the queue: {reason}")
        return 1
    say(f"stopped by {e.name}; it is in the queue again, and goes on from what it saved")
    time.sleep(120)  # Slurm ends this process; if the process ended first, Slurm might take the job for failed
    return e.code


def newest_step(arguments: tuple[str, ...]) -> int:
    """The newest saved step of the job's training; -1 where it trains nothing or has saved nothing."""
    folders = [Path(text.removeprefix("--workdir=")) for text in arguments if text.startswith("--workdir=")]
    names = [path.name for folder in folders for path in folder.glob("last/*")]
    return max((int(name) for name in names if name.isdecimal()), default=-1)


def own_number() -> str:
    """How Slurm calls this job: as a task of an array, if it is one."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}" if task else os.environ["SLURM_JOB_ID"]


def ask(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


def say(text: str) -> None:
    """Into the job's log: the batch script leads our output there."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} queue: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
