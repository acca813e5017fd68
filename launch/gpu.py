"""The suite of launch.benchmark for GPUs: all that is promised of one, whole trainings included."""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cxda_jax import cost, train
from cxda_jax.evaluate import compile_task, evaluate
from cxda_jax.experiment import build_on
from launch import cli
from launch.growth import several_seeds
from launch.measure import Timing, interleave, spread
from launch.suites import (
    SHAPES,
    Case,
    Options,
    forms,
    gemm_peaks,
    line,
    measure,
    profile,
    program,
    random_store,
    settings,
)


def gpu_suite(o: Options) -> None:
    """Everything that is promised of a GPU, the most telling first; what the budget leaves no time for is named."""
    began, left_out = time.perf_counter(), []
    dtypes = ("float32", "bfloat16")
    o.keep({"settings": settings(o), "gemm_gflop_per_s": (peaks := gemm_peaks(o, dtypes)), "left_out": left_out})
    found: dict[str, list[dict[str, Any]]] = {"rows": [], "trainings": [], "growth": []}
    per_call, in_one = (2, 2) if o.small else (64, 20)

    def rows(peers: tuple[str, ...], *cases: Case) -> None:
        for case in cases:
            found["rows"].append(measure(case, o, peers, peaks))
            print(line(found["rows"][-1]), flush=True)

    def growth(what: str, x: str, at: int, timing: Timing, units: int) -> None:
        seconds = interleave({"ours": timing}, o.repeats)["ours"]
        found["growth"].append({"what": what, "x": x, "at": at, **spread(seconds, units)})
        print(f"{what}: {at} {x}  {found['growth'][-1]['median_ms']:9.3f} ms", flush=True)

    cifar = Case("cifar_c", "cxda", "train", width=o.width, steps=in_one)
    task = Case("cifar_c", "cxda", "infer", width=o.width, tasks=per_call)
    compiled = ("exact_compiled_bf16",) if not o.small else ("exact_channels_last_bf16",)
    half = [case._replace(dtype="bfloat16") for case in (cifar, task)]
    counts = (10, 50) if o.small else (10, 100, 500, 2000)
    parts: list[tuple[str, Callable[[], None]]] = [
        ("step bfloat16", lambda: rows(tuple(dict.fromkeys((*compiled, "exact_channels_last_bf16"))), half[0])),
        ("step float32", lambda: rows(("exact", "exact_channels_last"), cifar)),
        ("tasks", lambda: rows((), half[1], task)),
        *((f"training {name}", lambda name=name: found["trainings"].append(training(name, o))) for name in
          ("cifar_c", "tiny_imagenet_c", "femnist", "iwildcam")),
        ("profile", lambda: o.keep({"profile": profile(half[0]._replace(steps=1), o.small)})),
        *((f"steps in a program {k}", lambda k=k: growth("cxda training, a step", "steps in a program", k,
            program(half[0]._replace(steps=k), o.small).timing, k)) for k in (1, 5)),
        *((f"tasks a step {e}", lambda e=e: growth("cxda training, an episode", "tasks a step", e,
            program(half[0]._replace(steps=1, tasks=e), o.small).timing, e)) for e in (1, 2, 4, 8)),
        *((f"support images {n}", lambda n=n: growth("cxda task", "support images", n,
            program(half[1]._replace(tasks=4, support=n), o.small).timing, 4)) for n in counts),
        *((f"seeds {n}", lambda n=n: growth("bn training, a seed's step", "seeds in one program", n,
            several_seeds("cifar_c", n, o, "bfloat16"), n)) for n in (1, 3)),
        ("fine-tuning", lambda: found["growth"].extend(
            {"what": f"ft_em, {form}", "x": "tasks at once", "at": 4, **spread(seconds, 4)} for form, seconds in interleave(
                forms(Case("cifar_c", "ft_em", "infer", width=o.width, tasks=4), o), o.repeats).items())),
        ("training cifar_c, whole", lambda: found["trainings"].append(training("cifar_c", o, whole=True))),
    ]  # fmt: skip
    for name, part in parts:
        if o.only and not name.startswith(o.only):
            continue
        if time.perf_counter() - began > o.budget_s:
            left_out.append(name)
            continue
        try:
            part()
        except Exception as e:  # one part must not cost the others: the machine is lent for minutes
            left_out.append(f"{name}: {type(e).__name__}: {str(e)[:300]}")
            print(f"failed: {left_out[-1]}", flush=True)
        o.keep({**found, "left_out": left_out})
    o.keep({**found, "left_out": left_out, "seconds": time.perf_counter() - began})
    if left_out:
        print("left out: " + "; ".join(left_out))


def training(name: str, o: Options, dtype: str = "bfloat16", whole: bool = False) -> dict[str, Any]:
    """A training of CXDA by the package's own loop, on random images: whole, or a part of it to reckon the whole from."""
    shape = SHAPES[name]
    steps, tasks = (4, 4) if o.small else (shape.steps if whole else 1000 if shape.net == "cnn" else 300, None)
    config = cli.resolve(cli.load_config(f"configs/{name}.py:cxda"))
    config["net"] |= {"dtype": dtype, "width": o.width} | ({"stages": (1, 1, 1)} if o.small else {})
    config["train"] |= {"steps": steps}
    if o.small:
        config["attention"]["heads"] = 1
        config["episode"] |= {"num_domains": 2, "per_domain": 2, "num_query": 2}
    config["evaluation"]["every_steps"] = steps // shape.validations if whole and not o.small else steps
    val_tasks = tasks or config["evaluation"]["val_tasks"]
    experiment = build_on(config, random_store(name, domains=24, images=8 if o.small else 500), ("train", "val"))
    evaluator = compile_task(experiment.method, experiment.source)
    validated: list[float] = []

    def validate(variables: Any) -> float:
        began = time.perf_counter()
        scored = evaluate(
            evaluator, variables, experiment.source, experiment.task_plans("val"), val_tasks, "accuracy",
            per_call=experiment.per_call,
        )  # fmt: skip
        validated.append(time.perf_counter() - began)
        return scored.mean

    state = train.init_state(experiment.method, experiment.optimizer, 0, experiment.example)
    validate(state.variables)  # compiles
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        spent = train.train(
            experiment.method, experiment.optimizer, experiment.weak, experiment.source, experiment.train_plans, state, 0,
            experiment.schedule, validate, Path(folder), log=lambda line: None,
        )  # fmt: skip
    seconds = time.perf_counter() - began
    reckoned = shape.steps / spent.steps_per_s + shape.validations * validated[-1]
    memory, where = cost.peak_memory()
    row = {
        "benchmark": name, "dtype": dtype, "whole": whole, "seconds": seconds, **spent._asdict(),
        "validation_s": validated[-1], "reckoned_minutes": reckoned / 60, "paper_minutes": shape.paper_minutes,
        "paper_steps": shape.steps, "peak_memory_bytes": memory, "memory_of": where,
    }  # fmt: skip
    print(f"training {name} {dtype}: {spent.steps_per_s:.1f} steps/s, validation {validated[-1]:.1f} s: {shape.steps} steps "
          f"and {shape.validations} validations take {reckoned / 60:.1f} min (paper {shape.paper_minutes:.0f})"
          + (f"; measured whole: {seconds / 60:.1f} min" if whole else ""), flush=True)  # fmt: skip
    return json.loads(json.dumps(row))
