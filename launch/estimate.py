"""How long a study will take on this machine, from steps and tasks timed here."""

import csv
import json
import time
from collections.abc import Callable
from typing import Any

import jax

from cxda_jax import backend, files, train
from cxda_jax.data.store import DomainStore
from cxda_jax.evaluate import compile_task
from cxda_jax.experiment import Config, build_on, make_schedule
from cxda_jax.progress import duration
from cxda_jax.reading import read_object
from cxda_jax.types import UserError
from launch.evaluate import device, score
from launch.runs import reshaped
from launch.study import Job, Study, is_done

TIMED = 3  # steps, or tasks
START_S = 5.0  # of a process: imports and data


def estimate(study: Study, jobs: list[Job], store: DomainStore, sample: DomainStore) -> Callable[[Job], float | None]:
    """Seconds of a job, from steps and tasks timed on `sample` and their numbers, which follow from `store`.

    What has been timed is kept in the study's speed.json.
    """
    kept = study.folder / "speed.json"
    known: dict[str, Any] = read_object(kept, "delete it to time anew") if kept.exists() else {}
    speeds = known.setdefault(device(), {})
    kind = " smoke" * study.smoke + " made up" * (sample is not store)
    methods = sorted({name for job in jobs if not is_done(study, job) for name in names_of(job)})
    todo, began = [name for name in methods if name + kind not in speeds], time.monotonic()
    for i, name in enumerate(todo):
        eta = f"  eta {duration((time.monotonic() - began) / i * (len(todo) - i))}" if i else ""

        def say(what: str, head: str = f"[{i + 1}/{len(todo)}] timing {name}", eta: str = eta) -> None:
            print(f"{head}: {what}{eta}", flush=True)

        speeds[name + kind] = measure(study.config(name), store, sample, say)
        study.folder.mkdir(parents=True, exist_ok=True)
        files.write_text(kept, json.dumps(known, indent=1) + "\n")

    def seconds(job: Job) -> float:
        total, flags = START_S, flags_of(job)
        for name in names_of(job):
            speed = speeds[name + kind]
            if job.command[2] == "launch.train":
                total += speed["compile_s"] + speed["steps"] * speed["step_s"] + speed["tasks"] * speed["task_s"]
                continue
            for images in images_of(flags, study.config(name)):
                total += speed["compile_s"] / 2 + runs_of(job) * speed["test_tasks"] * speed["task_s"] * images
        return total

    return seconds


def flags_of(job: Job) -> dict[str, str]:
    parts = (part.removeprefix("--").partition("=") for part in job.command if part.startswith("--"))
    return {name: text for name, _, text in parts}


def runs_of(job: Job) -> int:
    return len(next(csv.reader([flags_of(job)["runs"]])))


def names_of(job: Job) -> list[str]:
    flags = flags_of(job)
    return flags["methods"].split(",") if "methods" in flags else [job.name.split()[1]]


def images_of(flags: dict[str, str], config: Config) -> list[float]:
    """How many images a task of each asked form has, as a share of the usual."""

    def images(c: Config) -> int:
        episode = c["episode"]
        return episode["num_domains"] * episode["per_domain"] + episode["num_query"]

    asked = [f"{kind}={n}" for kind in ("num_domains", "support_size") for n in flags.get(kind, "").split(",") if n]
    return [images(reshaped(config, name)) / images(config) for name in asked] or [1.0]


def measure(config: Config, store: DomainStore, sample: DomainStore, say: Callable[[str], None]) -> dict[str, float]:
    """Seconds to compile, of a training step and of a test task, and how many of them a training takes."""
    experiment = build_on(config, sample)
    method, tx = experiment.method, experiment.optimizer
    state = train.init_state(method, tx, config["seed"], experiment.example)
    key, source = jax.random.key(0), experiment.source
    compile_s = step_s = 0.0
    count, took = TIMED * experiment.per_call, ""
    if not method.trains_as:
        say(f"compiling a training step, then {TIMED} of them")

        def step(state: Any, resident: Any, batch: Any) -> Any:
            return train.train_step(method, tx, experiment.weak, state, source.assemble(resident, batch), key)

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
    task_s = tasks.task_ms / 1e3
    schedule, evaluation = make_schedule(config, store), config["evaluation"]
    validations = -(-schedule.steps // schedule.validate_every)
    if not task_s > 0:
        raise UserError(f"method {method.name!r}: a test task took no time; nothing can be estimated")
    return {
        "compile_s": compile_s + max(0.0, total - count * task_s),
        "steps": schedule.steps,
        "step_s": step_s,
        "tasks": validations * evaluation["val_tasks"] + evaluation["test_tasks"],
        "task_s": task_s,
        "test_tasks": evaluation["test_tasks"],
    }
