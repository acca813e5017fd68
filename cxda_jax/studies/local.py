"""The jobs of a study on this machine: a few at a time, or one that a queue has asked for."""

import concurrent.futures as futures
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from cxda_jax.disk import files
from cxda_jax.errors import TooEarly, UserError
from cxda_jax.machine import backend, stops
from cxda_jax.machine.progress import duration
from cxda_jax.studies.jobs import Job, Study, is_done

# A job must not outlive a killed study: the next start would run it a second time. So this code asks Linux to kill
# the job with its parent, then becomes the job's command. A preexec_fn could do so too, but is not safe beside JAX's
# threads.
ENDS_WITH_PARENT = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the study has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""
# A smoke study compiles more than it computes.
QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_commands: set[subprocess.Popen] = set()  # those that run now
_ending = False
_lock = threading.Lock()  # each command must get one signal only: a second one ends it before it has saved


def run_job(study: Study, jobs: Sequence[Job], job: Job) -> str:
    """Runs one job of the study once, however often it is asked for; returns what was wrong, as perform() does.

    It raises TooEarly where what the job needs is not done, or another process runs it.
    """
    waits_for = [needed.name for needed in jobs if needed.id in job.needs and not is_done(study, needed)]
    if waits_for:
        what = f"{len(waits_for)} jobs that it needs are not done, such as '{waits_for[0]}'"
        raise TooEarly(f"{job.name}: {what}; start it again after them")
    with stops.before_second_signal(_kill), futures.ThreadPoolExecutor(1) as pool, stopping_jobs():
        return pool.submit(perform, study, job).result()


def perform(study: Study, job: Job, environment: Mapping[str, str] = MappingProxyType({})) -> str:
    """Runs a job to its end and marks it done, or returns a line that says what was wrong; "" where nothing was.

    A job that is marked already is not run; of one that another process runs it raises TooEarly. `environment` holds
    variables beside those of this process.
    """
    place = study.folder / "jobs" / job.id
    place.mkdir(exist_ok=True)
    try:
        with files.locked(place):
            return "" if is_done(study, job) else _perform(study, job, environment)
    except UserError as e:
        raise type(e)(f"{job.name}: {e}") from None


def attempt(study: Study, job: Job, environment: Mapping[str, str]) -> str:
    """perform() for a study that goes on: its errors are returned as faults."""
    try:
        return perform(study, job, environment)
    except UserError as e:
        return str(e)


def _perform(study: Study, job: Job, environment: Mapping[str, str]) -> str:
    """The log takes what the job says at the end, so that it keeps what an earlier start said.

    The job has a session of its own, so that a terminal's Ctrl-C does not reach it; the study passes one signal on.
    """
    log, began = study.folder / "jobs" / f"{job.id}.log", time.monotonic()
    command = [sys.executable, "-c", ENDS_WITH_PARENT, str(os.getpid()), *job.command]
    variables = {**os.environ, **(QUICK if study.smoke else {}), **environment}
    with open(log, "ab") as out, subprocess.Popen(
        command, stdout=out, stderr=subprocess.STDOUT, env=variables, start_new_session=True
    ) as child:  # fmt: skip
        begun = out.tell()
        with _lock:
            _commands.add(child)
            if _ending:
                child.terminate()
        code = child.wait()
        with _lock:
            _commands.discard(child)
    if code:
        fault = f"{last_line(log, begun) or f'exit code {code}'} (log: {log})"
        if code == TooEarly.code:
            raise TooEarly(fault)
        return f"{job.name}: {fault}"
    record = {"name": job.name, "command": job.arguments, "seconds": round(time.monotonic() - began, 1)}
    files.write_text(study.mark(job), json.dumps(record, indent=1) + "\n")
    return ""


def last_line(log: Path, start: int = 0) -> str:
    """The last line of a job, from the byte `start` of its log on; "" where it said nothing."""
    lines = log.read_bytes()[start:].decode(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1].removeprefix("error: ")[:160] if lines else ""


def run_jobs(study: Study, jobs: list[Job], workers: int | None = None) -> list[str]:
    """Runs what is not done, `workers` jobs at once; returns a line for each that failed or was left out."""
    gpus = visible_gpus()
    # A smoke job compiles, on one core, more than it computes.
    workers = workers or len(gpus) or (backend.cores() if study.smoke else max(1, backend.cores() // 2))
    free = environments(gpus, workers)
    todo = [job for job in jobs if not is_done(study, job)]
    print(f"{study.folder}: {len(jobs)} jobs, {len(jobs) - len(todo)} done before, {workers} at once", flush=True)
    ready = {job.id for job in jobs} - {job.id for job in todo}
    failed: dict[str, str] = {}
    running: dict[futures.Future[str], tuple[Job, dict[str, str], float]] = {}
    total, took = len(todo), []
    with (
        files.locked(study.folder / "jobs"),  # a second study here would start the same jobs
        stops.before_second_signal(_kill),
        futures.ThreadPoolExecutor(workers) as pool,
        stopping_jobs(),
    ):
        while todo or running:
            for job in list(todo):
                if any(need in failed for need in job.needs):
                    todo.remove(job)
                    failed[job.id] = f"{job.name}: left out, since what it needs failed"
                elif ready.issuperset(job.needs) and len(running) < workers:
                    todo.remove(job)
                    environment = free.pop()
                    running[pool.submit(attempt, study, job, environment)] = job, environment, time.monotonic()
            for future in futures.wait(running, return_when=futures.FIRST_COMPLETED).done:
                job, environment, began = running.pop(future)
                free.append(environment)
                took.append(time.monotonic() - began)
                if fault := future.result():
                    failed[job.id] = fault
                else:
                    ready.add(job.id)
                ended = total - len(todo) - len(running)
                ages = [time.monotonic() - began for _, _, began in running.values()]
                left = duration(seconds_left(took, ages, len(todo), workers))
                print(f"[{ended}/{total}] {fault or job.name}  eta {left}", flush=True)
    return list(failed.values())


def seconds_left(took: list[float], ages: list[float], waiting: int, workers: int) -> float:
    """The seconds that the jobs that run or wait will take, if each takes as long as those that have ended on average.

    `took` has the seconds of each job that has ended, `ages` those since each job that runs was started.
    """
    mean = sum(took) / len(took)
    rests = [max(0.0, mean - age) for age in ages]
    return max([(sum(rests) + waiting * mean) / workers, *rests])


def environments(gpus: list[str], workers: int) -> list[dict[str, str]]:
    """Variables for each of the jobs that run at once: its GPU, and its part of the memory where several share one."""
    if not gpus:
        return [{}] * workers
    each = -(-workers // len(gpus))
    # By default JAX takes three quarters of a GPU's memory at once, and the second process would find none.
    part = {} if each == 1 or MEMORY in os.environ else {MEMORY: f"{0.9 / each:.2f}"}
    return [{"CUDA_VISIBLE_DEVICES": gpu} | part for gpu in gpus] * each


@contextlib.contextmanager
def stopping_jobs() -> Iterator[None]:
    """Inside, a signal that stops the study stops its jobs too: each saves and ends."""
    global _ending
    _ending = False
    try:
        yield
    except stops.Stopped:
        with _lock:
            _ending = True
            for child in _commands:
                child.terminate()
        raise


def _kill() -> None:
    """Ends the jobs at once. Linux does so anyway when the study ends; other systems do not."""
    for child in list(_commands):
        child.kill()


def visible_gpus() -> list[str]:
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [str(i) for i in range(len(listed.strip().splitlines()))]
