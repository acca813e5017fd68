"""The suite gpu of launch.benchmark: everything that is promised of a GPU, whole trainings included."""

import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cxda_jax import cost, train
from cxda_jax.bench.cases import SHAPES, Case, fine_tuning_timings, random_store, seeds_timing
from cxda_jax.bench.growth import Growth
from cxda_jax.bench.measure import interleave, seconds_of
from cxda_jax.bench.suites import Options, gemm_peaks, profile, time_beside_peers, time_case
from cxda_jax.config import read
from cxda_jax.evaluation import compile_task, evaluate
from cxda_jax.experiment import build_on


def gpu_suite(o: Options) -> None:
    """Times what is promised, the most telling part first. The record names the parts that no time was left for."""
    began, left_out, rows, trainings, growth = time.perf_counter(), [], [], [], Growth(o)
    peaks = gemm_peaks(o, ("float32", "bfloat16"))
    tasks, steps, support_images = (2, 2, (10, 50)) if o.small else (64, 20, (10, 100, 500, 2000))
    step = Case("cifar_c", "cxda", "train", width=o.width, steps=steps)
    task = Case("cifar_c", "cxda", "infer", width=o.width, tasks=tasks)
    step16, task16 = (case._replace(dtype="bfloat16") for case in (step, task))
    peers16 = ("exact_channels_last_bf16",) if o.small else ("exact_compiled_bf16", "exact_channels_last_bf16")

    def keep() -> None:
        o.keep({"rows": rows, "trainings": trainings, "growth": growth.rows, "left_out": left_out})

    def beside(peers: tuple[str, ...], *cases: Case) -> None:
        for case in cases:
            rows.append(time_beside_peers(case, o, peers, peaks))

    def train_part(name: str, whole: bool = False) -> None:
        trainings.append(time_training(name, o, whole=whole))

    def grow(what: str, x: str, at: int, case: Case, units: int) -> None:
        growth.add(what, x, at, time_case(case, o), units)

    def seeds(n: int) -> None:
        timing = seeds_timing(Case("cifar_c", "bn", "train", width=o.width, dtype="bfloat16"), n, o.small)
        growth.add("bn training, a seed's step", "seeds in one program", n, seconds_of(timing, o.repeats), n)

    def fine_tune() -> None:
        timings = fine_tuning_timings(Case("cifar_c", "ft_em", "infer", width=o.width, tasks=4), o.small)
        for form, seconds in interleave(timings, o.repeats).items():
            growth.add(f"ft_em, {form}", "tasks at once", 4, seconds, 4)

    part = functools.partial
    parts: dict[str, Callable[[], None]] = {
        "step bfloat16": part(beside, peers16, step16),
        "step float32": part(beside, ("exact", "exact_channels_last"), step),
        "tasks": part(beside, (), task16, task),
        **{f"training {name}": part(train_part, name)
           for name in ("cifar_c", "tiny_imagenet_c", "femnist", "iwildcam")},
        "profile": lambda: o.keep({"profile": profile(step16._replace(steps=1), o.small)}),
        **{f"steps in a program {n}": part(
            grow, "cxda training, a step", "steps in a program", n, step16._replace(steps=n), n) for n in (1, 5)},
        **{f"tasks a step {n}": part(
            grow, "cxda training, an episode", "tasks a step", n, step16._replace(steps=1, tasks=n), n)
           for n in (1, 2, 4, 8)},
        **{f"support images {n}": part(
            grow, "cxda task", "support images", n, task16._replace(tasks=4, support=n), 4) for n in support_images},
        **{f"seeds {n}": part(seeds, n) for n in (1, 3)},
        "fine-tuning": fine_tune,
        "training cifar_c, whole": part(train_part, "cifar_c", whole=True),
    }  # fmt: skip
    o.keep({"gemm_gflop_per_s": peaks, "left_out": left_out})
    for name, run in parts.items():
        if o.only and not name.startswith(o.only):
            continue
        if time.perf_counter() - began > o.budget_s:
            left_out.append(name)
            continue
        try:
            run()
        except Exception as e:  # the machine is lent for minutes, so a part that fails must not cost the others
            left_out.append(f"{name}: {type(e).__name__}: {str(e)[:300]}")
            print(f"failed: {left_out[-1]}", flush=True)
        keep()
    keep()
    o.keep({"seconds": time.perf_counter() - began})
    if left_out:
        print("left out: " + "; ".join(left_out))


def time_training(name: str, o: Options, dtype: str = "bfloat16", whole: bool = False) -> dict[str, Any]:
    """The record's row of a training of CXDA by the package's own loop, on random images of a benchmark's shape.

    `whole` trains the paper's steps. Otherwise a part of them is trained, from which the minutes of all are reckoned.
    """
    shape, config = SHAPES[name], read(f"{name}:cxda")
    steps = shape.steps if whole else 1000 if shape.net == "cnn" else 300
    every = steps // shape.validations if whole else steps
    val_tasks = config["evaluation"]["val_tasks"]
    config["net"] |= {"dtype": dtype, "width": o.width}
    if o.small:
        steps = every = val_tasks = 4
        config["net"]["stages"], config["attention"]["heads"] = (1, 1, 1), 1
        config["episode"] |= {"num_domains": 2, "per_domain": 2, "num_query": 2}
    config["train"]["steps"], config["evaluation"]["every_steps"] = steps, every
    experiment = build_on(config, random_store(name, domains=24, images=8 if o.small else 500), ("train", "val"))
    evaluator = compile_task(experiment.method, experiment.source)
    seconds_of_validations: list[float] = []

    def validate(variables: Any) -> float:
        began = time.perf_counter()
        scored = evaluate(
            evaluator, variables, experiment.source, experiment.task_plans("val"), val_tasks, "accuracy",
            per_call=experiment.per_call,
        )  # fmt: skip
        seconds_of_validations.append(time.perf_counter() - began)
        return scored.mean

    state = train.init_state(experiment.method, experiment.optimizer, 0, experiment.example)
    validate(state.variables)  # compiles
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        spent = train.train(
            experiment.method, experiment.optimizer, experiment.weak, experiment.source, experiment.train_plans, state, 0,
            experiment.schedule, validate, Path(folder), log=lambda line: None,
        )  # fmt: skip
    seconds, validation = time.perf_counter() - began, seconds_of_validations[-1]
    reckoned = (shape.steps / spent.steps_per_s + shape.validations * validation) / 60
    memory, where = cost.peak_memory()
    row = {
        "benchmark": name, "dtype": dtype, "whole": whole, "seconds": seconds, **spent._asdict(),
        "validation_s": validation, "reckoned_minutes": reckoned, "paper_minutes": shape.paper_minutes,
        "paper_steps": shape.steps, "peak_memory_bytes": memory, "memory_of": where,
    }  # fmt: skip
    print(f"training {name} {dtype}: {spent.steps_per_s:.1f} steps/s, validation {validation:.1f} s: {shape.steps} steps "
          f"and {shape.validations} validations take {reckoned:.1f} min (paper {shape.paper_minutes:.0f})"
          + (f"; measured whole: {seconds / 60:.1f} min" if whole else ""), flush=True)  # fmt: skip
    return row
