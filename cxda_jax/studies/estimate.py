"""Estimates the time of a study on this machine, from steps and tasks timed here."""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from cxda_jax.config.reading import Config
from cxda_jax.data.published import sample_store
from cxda_jax.data.store import DomainStore
from cxda_jax.errors import UserError
from cxda_jax.machine import backend
from cxda_jax.machine.progress import duration
from cxda_jax.studies.jobs import Job, Study, is_done, planned
from cxda_jax.studies.settings import USUAL, Setting, count_tasks, reshaped
from cxda_jax.studies.testing import score
from cxda_jax.training import loop
from cxda_jax.training.evaluation import compile_task
from cxda_jax.training.experiment import build_on, make_schedule

TIMED = 3  # steps, or tasks
START_S = 5.0  # of a process: imports and data


class Speed(NamedTuple):
    """Seconds to compile a method, of a training step and of a task, and how many of them there are."""

    compile_s: float
    step_s: float
    task_s: float
    steps: int
    tasks: int  # of a training: those of its validations and of its test
    test_tasks: int


def dry_run(study: Study, data_dir: str) -> None:
    """Lists the jobs and their times, before the data are there too."""
    store, jobs = planned(study, data_dir)
    print(f"{len(jobs)} jobs; timing comes first, --list names them at once", flush=True)
    sample = store if store.sha256 else sample_store(study.benchmark)
    if not store.sha256:
        print("steps are timed on made-up images", flush=True)
    methods = sorted({name for job in jobs if not is_done(study, job) for name in job.methods})
    speeds, began, eta = {}, time.monotonic(), ""
    for done, name in enumerate(methods, 1):
        print(f"[{done}/{len(methods)}] timing {name}: {TIMED} training steps and test tasks{eta}", flush=True)
        speeds[name] = time_method(study.config(name), store, sample)
        eta = f"  eta {duration((time.monotonic() - began) / done * (len(methods) - done))}"
    lines, left = [], 0.0
    for job in jobs:
        seconds = 0.0 if is_done(study, job) else seconds_of(study, job, speeds)
        left += seconds
        lines.append(f"{job.id}  {duration(seconds) if seconds else 'done':>8}  {job.name}")
    print("\n".join([*lines, f"{len(jobs)} jobs; {duration(left)} to go, one after another, on this machine"]))


def seconds_of(study: Study, job: Job, speeds: Mapping[str, Speed]) -> float:
    """The seconds of a job, from the speeds of its methods."""
    total = START_S
    for name in job.methods:
        speed, config = speeds[name], study.config(name)
        if job.trains:
            total += speed.compile_s + speed.steps * speed.step_s + speed.tasks * speed.task_s
        for setting in () if job.trains else job.settings:
            share = _images(config, setting) / _images(config)
            total += speed.compile_s / 2 + job.runs * speed.test_tasks * speed.task_s * share
    return total


def _images(config: Config, setting: Setting = USUAL) -> int:
    """Counts the images of one task."""
    episode = reshaped(config, setting)["episode"]
    support = setting.context.size if setting.context else episode["num_domains"] * episode["per_domain"]
    return support + episode["num_query"]


def time_method(config: Config, store: DomainStore, sample: DomainStore) -> Speed:
    """Times steps and tasks on `sample`; their numbers follow from `store`."""
    experiment, key = build_on(config, sample), jax.random.key(0)
    method, tx, source = experiment.method, experiment.optimizer, experiment.source
    state = loop.init_state(method, tx, config["seed"], experiment.example)
    times = [0.0, 0.0]  # of the first step, which compiles it, and of others
    if not method.trains_as:

        def step(state: Any, resident: Any, batch: Any) -> Any:
            return loop.train_step(experiment.learner, state, source.assemble(resident, batch), key)

        run, times = backend.jit(step), []
        for batch in source.batches(experiment.train_plans, 0, TIMED + 1):
            began = time.perf_counter()
            state, _ = jax.block_until_ready(run(state, source.resident, batch))
            times.append(time.perf_counter() - began)
    variables = state.variables
    if method.calibrate:
        variables = backend.jit(method.calibrate)(variables, experiment.known_images())
    count = min(TIMED * experiment.per_call, count_tasks(config, sample, "test"))
    began = time.perf_counter()
    task_s = score(experiment, compile_task(method, source), variables, "test", count).task_ms / 1e3
    compile_s = times[0] + max(0.0, time.perf_counter() - began - count * task_s)
    if not task_s > 0:
        raise UserError(f"method {method.name!r}: a test task took no time; nothing can be estimated")
    schedule, test_tasks = make_schedule(config, store), count_tasks(config, store, "test")
    validations = -(-schedule.steps // schedule.validate_every)
    tasks = validations * count_tasks(config, store, "val") + test_tasks
    return Speed(compile_s, min(times[1:]), task_s, schedule.steps, tasks, test_tasks)
