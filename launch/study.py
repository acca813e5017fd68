"""A study as jobs: what there is to do, what is done, and doing the rest on this machine or in a Slurm queue.

A job is one command. Its id is a hash of all that its outcome follows from: configs, versions of methods, the data and the
jobs it needs. It is marked done by a file of that name, so a changed config makes a new job and an equal one is never
repeated.
"""

import concurrent.futures as futures
import contextlib
import csv
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cxda_jax import files
from cxda_jax.data.episodes import check_spec
from cxda_jax.data.store import DomainStore
from cxda_jax.experiment import METHODS, Config, build_method, config_hash, episode_spec
from cxda_jax.progress import duration
from cxda_jax.types import UserError
from launch import cli, stops
from launch.runs import reshaped

TASKS = {"num_domains": (1, 2, 5, 10, 20), "support_size": (10, 20, 50, 100, 200, 500)}
SMOKE_TASKS = {"num_domains": (2, 5), "support_size": (10, 100)}
# The paper leaves latent and continual adaptation out of the tables of other tasks; so do we, and add our rows.
VARIED = ("erm", "erm_iid", "bn", "cml", "cxda", "cxda_loo", "ft_em", "ft_im")
ONE_STEP = ("ft_em", "ft_im")


# A job must not outlive a killed study, or the next start would run it twice: it asks Linux to be killed with its parent,
# then becomes its command. (Between fork and exec the study itself could do so too, but not safely beside JAX's threads.)
TIED = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the study has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""
# A smoke study compiles more than it computes.
QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


_commands: set[subprocess.Popen] = set()  # that run at this moment
_ending = False
_lock = threading.Lock()  # so that each command gets one signal: its second would end it unsaved


class Job(NamedTuple):
    """One command of the study; `needs` are the ids of jobs that must have ended well."""

    id: str
    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()


class Study(NamedTuple):
    """What is to be reproduced, and where it is kept."""

    benchmark: str
    folder: Path
    seeds: tuple[int, ...]
    methods: tuple[str, ...]
    smoke: bool

    def config_flag(self, method: str) -> str:
        return f"configs/{self.benchmark}.py:{method}{',smoke' if self.smoke else ''}"

    def config(self, method: str, seed: int = 0) -> Config:
        return {**cli.resolve(cli.load_config(self.config_flag(method))), "seed": seed}

    def run(self, method: str, seed: int) -> Path:
        return self.folder / method / str(seed)


def plan(study: Study, store: DomainStore, data_dir: str) -> list[Job]:
    """All jobs, each after those it needs. Ids follow from configs, data and versions of methods alone."""
    methods = {name: build_method(study.config(name), store) for name in METHODS}
    wanted = set(study.methods)
    trained = [n for n in METHODS if not methods[n].trains_as and (n in wanted or any(
        methods[m].trains_as == n for m in wanted))]  # fmt: skip
    data = f"--data_dir={data_dir}"

    def job(name: str, command: Sequence[Any], needs: Sequence[Job], *identity: Any) -> Job:
        parts = [identity, [need.id for need in needs], store.sha256]
        return Job(config_hash({"job": parts})[:12], name, (sys.executable, "-m", *map(str, command), data),
                   tuple(need.id for need in needs))  # fmt: skip

    train = {
        (name, seed): job(
            f"train {name} seed {seed}",
            ["launch.train", f"--config={study.config_flag(name)}", f"--config.seed={seed}",
             f"--workdir={study.run(name, seed)}"],
            [], study.config(name, seed), methods[name].version,
        )
        for seed in study.seeds for name in trained
    }  # fmt: skip

    def evaluate(what: str, start: str, names: Sequence[str], *flags: str) -> list[Job]:
        if not names:
            return []
        runs = listed([str(study.run(start, seed)) for seed in study.seeds])
        needs = [train[start, seed] for seed in study.seeds]
        command = ["launch.evaluate", f"--runs={runs}", f"--methods={','.join(names)}", *flags]
        return [job(f"test {what} of {','.join(names)}", command, needs, flags, [
            (study.config(name), methods[name].version) for name in names])]  # fmt: skip

    def starting_from(name: str, among: Sequence[str]) -> list[str]:
        return [n for n in among if n in wanted and (methods[n].trains_as or n) == name]

    other = [f"--{kind}={','.join(found)}" for kind, found in possible_tasks(study, store).items() if found]
    jobs = list(train.values())
    for name in trained:
        jobs += evaluate("the usual tasks", name, [n for n in starting_from(name, list(METHODS)) if n != name])
        one_step = starting_from(name, ONE_STEP)
        jobs += evaluate("one step", name, one_step, "--steps=1")
        varied = starting_from(name, VARIED)
        if other:
            jobs += evaluate("other tasks", name, varied, *other)
    return jobs


def listed(names: Sequence[str]) -> str:
    """As a flag that takes a list splits it again, whatever the names hold."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(names)
    return text.getvalue()


def possible_tasks(study: Study, store: DomainStore) -> dict[str, list[str]]:
    """The paper's other numbers of domains and of support images, as far as the test domains can give them."""
    config, found = study.config("erm"), {}
    for kind, numbers in (SMOKE_TASKS if study.smoke else TASKS).items():
        found[kind] = []
        for number in numbers:
            with contextlib.suppress(UserError):
                check_spec(episode_spec(reshaped(config, f"{kind}={number}")), store, "test")
                found[kind].append(str(number))
    return found


def is_done(study: Study, job: Job) -> bool:
    return _marker(study, job).exists()


def _marker(study: Study, job: Job) -> Path:
    return study.folder / "jobs" / f"{job.id}.done"


def perform(study: Study, job: Job, environment: dict[str, str] | None = None, apart: bool = False) -> str | None:
    """Runs a job to its end and marks it done; else the line that says what was wrong.

    `apart`: a terminal's Ctrl-C does not reach the job, whom the study then tells.
    """
    log = study.folder / "jobs" / f"{job.id}.log"
    began = time.monotonic()
    command = [sys.executable, "-c", TIED, str(os.getpid()), *job.command]
    variables = os.environ | (QUICK if study.smoke else {}) | (environment or {})
    with open(log, "w") as file, subprocess.Popen(
        command, stdout=file, stderr=subprocess.STDOUT, env=variables, start_new_session=apart
    ) as child:  # fmt: skip
        with _lock:
            _commands.add(child)
            if _ending:
                child.terminate()
        code = child.wait()
        with _lock:
            _commands.discard(child)
    if code:
        lines = log.read_text().strip().splitlines() or [f"exit code {code}"]
        return f"{job.name}: {lines[-1].removeprefix('error: ')[:160]} (log: {log})"
    record = {"name": job.name, "command": job.command, "seconds": round(time.monotonic() - began, 1)}
    files.write_text(_marker(study, job), json.dumps(record, indent=1) + "\n")
    return None


def run_here(study: Study, jobs: list[Job], workers: int, gpus: Sequence[str]) -> list[str]:
    """Runs what is not done on this machine, a few at a time; returns a line for each that failed or was left out."""
    free = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus] * (-(-workers // max(1, len(gpus)))) or [{}] * workers
    todo = [job for job in jobs if not is_done(study, job)]
    print(f"{study.folder}: {len(jobs)} jobs, {len(jobs) - len(todo)} done before, {workers} at once", flush=True)
    ready = {job.id for job in jobs} - {job.id for job in todo}
    failed: dict[str, str] = {}
    running: dict[futures.Future, tuple[Job, dict[str, str]]] = {}
    total, began = len(todo), time.monotonic()
    with stops.taking_along(_kill), futures.ThreadPoolExecutor(workers) as pool, passing_on():
        while todo or running:
            for job in list(todo):
                blocking = [need for need in job.needs if need in failed]
                if blocking:
                    todo.remove(job)
                    failed[job.id] = f"{job.name}: left out, since what it needs failed"
                elif ready.issuperset(job.needs) and len(running) < workers:
                    todo.remove(job)
                    environment = free.pop()
                    running[pool.submit(perform, study, job, environment, True)] = job, environment
            if not running:
                continue
            finished, _ = futures.wait(running, return_when=futures.FIRST_COMPLETED)
            for future in finished:
                job, environment = running.pop(future)
                free.append(environment)
                fault = future.result()
                if fault:
                    failed[job.id] = fault
                else:
                    ready.add(job.id)
                ended = total - len(todo) - len(running)
                left = (time.monotonic() - began) / ended * (total - ended)
                print(f"[{ended}/{total}] {fault or job.name}  eta {duration(left)}", flush=True)
    return list(failed.values())


@contextlib.contextmanager
def passing_on() -> Iterator[None]:
    """Where the study is stopped, its jobs are too: each saves and ends."""
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
    """Linux does so anyway when the study ends; other systems would let the jobs run on."""
    for child in list(_commands):
        child.kill()


def visible_gpus() -> list[str]:
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [str(i) for i in range(len(found.strip().splitlines()))]


class Requeued:
    """A job as submitit runs it; stopped at its time limit, it is queued again and resumes from its checkpoint."""

    def __call__(self, study: Study, job: Job) -> str | None:
        return None if is_done(study, job) else perform(study, job)

    def checkpoint(self, study: Study, job: Job) -> Any:
        import submitit

        return submitit.helpers.DelayedSubmission(self, study, job)


def run_on_slurm(study: Study, jobs: list[Job], parameters: dict[str, str]) -> list[str]:
    """Submits what is not done, each job after those it needs, and waits."""
    try:
        import submitit
    except ImportError:
        raise UserError("--executor=slurm needs submitit: pip install 'cxda_jax[slurm]'") from None
    numbers = {k: int(v) if v.isdecimal() else v for k, v in parameters.items()}
    submitted: dict[str, Any] = {}
    for job in jobs:
        if is_done(study, job):
            continue
        executor = submitit.AutoExecutor(folder=str(study.folder / "jobs" / "slurm"), cluster="slurm")
        executor.update_parameters(name=job.name.replace(" ", "_")[:40], **queue_parameters(numbers))
        after = [submitted[need].job_id for need in job.needs if need in submitted]
        if after:
            executor.update_parameters(slurm_dependency="afterok:" + ":".join(after))
        submitted[job.id] = executor.submit(Requeued(), study, job)
        print(f"submitted {job.name} as {submitted[job.id].job_id}", flush=True)
    failures = []
    for job in jobs:
        if job.id in submitted:
            try:
                fault = submitted[job.id].result()
            except Exception as e:  # whatever the queue says of a lost job
                fault = f"{job.name}: {str(e).strip().splitlines()[-1][:160]}"
            failures += [fault] if fault else []
    return failures


def queue_parameters(given: dict[str, Any]) -> dict[str, Any]:
    """submitit takes its own names as they are, and those of Slurm with a prefix."""
    own = ("timeout_min", "gpus_per_node", "cpus_per_task", "mem_gb", "nodes", "tasks_per_node")
    return {k if k in own or k.startswith("slurm_") else f"slurm_{k}": v for k, v in given.items()}
