"""Estimates the time of a study on this machine, from steps and tasks timed here."""

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from cxda_jax import backend, train
from cxda_jax.config import Config
from cxda_jax.data.published import PUBLISHED, empty_store, sample_store
from cxda_jax.data.store import DomainStore
from cxda_jax.disk import files
from cxda_jax.disk.reading import read_object
from cxda_jax.errors import UserError
from cxda_jax.evaluation import compile_task
from cxda_jax.experiment import build_on, make_schedule, open_data
from cxda_jax.progress import duration
from cxda_jax.results.settings import USUAL, Setting, count_tasks, reshaped
from cxda_jax.runs.jobs import Job, Study, is_done, plan
from cxda_jax.runs.testing import device, score

TIMED = 3  # steps, or tasks
START_S = 5.0  # of a process: imports and data


def estimate(study: Study, jobs: list[Job], store: DomainStore, sample: DomainStore) -> Callable[[Job], float]:
    """Seconds of a job, from steps and tasks timed on `sample` and their numbers, which follow from `store`.

    What has been timed is kept in the study's speed.json.
    """
    kept = study.folder / "speed.json"
    known: dict[str, Any] = read_object(kept, "delete it to time anew") if kept.exists() else {}
    speeds = known.setdefault(device(), {})
    kind = " smoke" * study.smoke + " made up" * (sample is not store)
    methods = sorted({name for job in jobs if not is_done(study, job) for name in job.methods})
    todo, began = [name for name in methods if name + kind not in speeds], time.monotonic()
    for i, name in enumerate(todo):
        eta = f"  eta {duration((time.monotonic() - began) / i * (len(todo) - i))}" if i else ""

        def say(what: str, head: str = f"[{i + 1}/{len(todo)}] timing {name}", eta: str = eta) -> None:
            print(f"{head}: {what}{eta}", flush=True)

        speeds[name + kind] = time_method(study.config(name), store, sample, say)
        study.folder.mkdir(parents=True, exist_ok=True)
        files.write_text(kept, json.dumps(known, indent=1) + "\n")

    return functools.partial(_seconds, study, speeds, kind)


def _seconds(study: Study, speeds: dict[str, Any], kind: str, job: Job) -> float:
    total = START_S
    for name in job.methods:
        speed, config = speeds[name + kind], study.config(name)
        if job.trains:
            total += speed["compile_s"] + speed["steps"] * speed["step_s"] + speed["tasks"] * speed["task_s"]
        for setting in () if job.trains else job.settings:
            share = _images(config, setting) / _images(config)
            total += speed["compile_s"] / 2 + job.runs * speed["test_tasks"] * speed["task_s"] * share
    return total


def _images(config: Config, setting: Setting = USUAL) -> int:
    """Of one task."""
    episode = reshaped(config, setting)["episode"]
    support = setting.context.size if setting.context else episode["num_domains"] * episode["per_domain"]
    return support + episode["num_query"]


def time_method(
    config: Config, store: DomainStore, sample: DomainStore, say: Callable[[str], None]
) -> dict[str, float]:
    """Seconds to compile, of a training step and of a test task, and how many of them a training takes."""
    experiment, key = build_on(config, sample), jax.random.key(0)
    method, tx, source = experiment.method, experiment.optimizer, experiment.source
    state = train.init_state(method, tx, config["seed"], experiment.example)
    compile_s, step_s, took = 0.0, 0.0, ""
    count = min(TIMED * experiment.per_call, count_tasks(config, sample, "test"))
    if not method.trains_as:
        say(f"compiling a training step, then {TIMED} of them")

        def step(state: Any, resident: Any, batch: Any) -> Any:
            return train.train_step(experiment.learner, state, source.assemble(resident, batch), key)

        run, times = backend.jit(step), []
        for batch in source.batches(experiment.train_plans, 0, TIMED + 1):
            began = time.perf_counter()
            state, _ = jax.block_until_ready(run(state, source.resident, batch))
            times.append(time.perf_counter() - began)
        compile_s, step_s = times[0], min(times[1:])
        took = f"{step_s:.3g}s a step, compiled in {compile_s:.1f}s; "
    variables = state.variables
    if method.calibrate:
        variables = backend.jit(method.calibrate)(variables, experiment.calibration_images())
    say(f"{took}compiling a test task, then {count} of them")
    began = time.perf_counter()
    tasks = score(experiment, compile_task(method, source), variables, "test", count)
    total = time.perf_counter() - began
    task_s, schedule = tasks.task_ms / 1e3, make_schedule(config, store)
    if not task_s > 0:
        raise UserError(f"method {method.name!r}: a test task took no time; nothing can be estimated")
    validations, test_tasks = -(-schedule.steps // schedule.validate_every), count_tasks(config, store, "test")
    return {
        "compile_s": compile_s + max(0.0, total - count * task_s),
        "steps": schedule.steps,
        "step_s": step_s,
        "tasks": validations * count_tasks(config, store, "val") + test_tasks,
        "task_s": task_s,
        "test_tasks": test_tasks,
    }


def dry_run(study: Study, data_dir: str) -> None:
    """Lists the jobs and their times, before the data are there too."""
    config = study.config("erm")
    if study.benchmark not in PUBLISHED or (Path(data_dir) / config["data"]["name"] / "store.json").exists():
        store = sample = open_data(config, data_dir)
        jobs = plan(study, store, data_dir)
    else:
        what = "numbers of domains and images are the published ones, and steps are timed on made-up images"
        print(f"{study.benchmark}: no prepared data in {data_dir}; {what}", flush=True)
        store, sample = empty_store(study.benchmark), sample_store(study.benchmark)
        jobs = [job._replace(id="-" * len(job.id)) for job in plan(study, store, data_dir)]  # ids follow from the data
    seconds, lines, left = estimate(study, jobs, store, sample), [], 0.0
    for job in jobs:
        state = "done"
        if not is_done(study, job):
            left += seconds(job)
            state = duration(seconds(job))
        lines.append(f"{job.id}  {state:>8}  {job.name}")
    print("\n".join([*lines, f"{len(jobs)} jobs; {duration(left)} to go, one after another, on this machine"]))
