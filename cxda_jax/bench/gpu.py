"""The suite gpu of cxda benchmark: everything that is promised of a GPU, whole trainings included."""

import tempfile
import time
from pathlib import Path
from typing import Any

from cxda_jax import cost, train
from cxda_jax.bench.cases import SHAPES, Case, random_store, tuning_forms
from cxda_jax.bench.measure import interleave, show, spread
from cxda_jax.bench.rows import Options, add_beside_peers, gemm_peaks, grow, grow_seeds, profile
from cxda_jax.config import read
from cxda_jax.evaluation import Tasks, compile_task, evaluate
from cxda_jax.experiment import build_on


def gpu_suite(o: Options) -> None:
    """Times what is promised, the most telling part first. The record names the parts that no time was left for."""
    began, left_out, peaks = time.perf_counter(), [], gemm_peaks(o, ("float32", "bfloat16"))
    tasks, steps, support_images = (2, 2, (10, 50)) if o.small else (64, 20, (10, 100, 500, 2000))
    step = Case("cifar_c", "cxda", "train", width=o.width, steps=steps)
    task = Case("cifar_c", "cxda", "infer", width=o.width, tasks=tasks)
    step16, task16 = (case._replace(dtype="bfloat16") for case in (step, task))
    one16 = step16._replace(steps=1)
    peers16 = ("exact_channels_last_bf16",) if o.small else ("exact_compiled_bf16", "exact_channels_last_bf16")

    def fine_tune() -> None:
        timings = tuning_forms(Case("cifar_c", "ft_em", "infer", width=o.width, tasks=4), o.small)
        for form, seconds in interleave(timings, o.repeats).items():
            row = {"what": f"ft_em, {form}", "x": "tasks at once", "at": 4, **spread(seconds, 4)}
            o.add("growth", show(f"ft_em, {form}, 4 tasks at once", row))

    a_step, an_episode = ("cxda training, a step", "steps in a program"), ("cxda training, an episode", "tasks a step")
    parts: list[tuple[Any, ...]] = [  # name, function, arguments
        ("step bfloat16", add_beside_peers, o, peaks, peers16, step16),
        ("step float32", add_beside_peers, o, peaks, ("exact", "exact_channels_last"), step),
        ("tasks", add_beside_peers, o, peaks, (), task16, task),
        ("training cifar_c", add_training, o, "cifar_c", True),
        ("training femnist", add_training, o, "femnist"),
        ("profile", lambda: o.keep({"profile": profile(one16, o.small)})),
        *((f"tasks a step {n}", grow, o, *an_episode, n, one16._replace(tasks=n), n) for n in (8, 4, 2, 1)),
        ("steps in a program 5", grow, o, *a_step, 5, one16._replace(steps=5), 5),
        *((f"support images {n}", grow, o, "cxda task", "support images", n, task16._replace(tasks=4, support=n), 4)
          for n in support_images),
        *((f"seeds {n}", grow_seeds, o, one16._replace(method="bn"), n) for n in (1, 3)),
        ("fine-tuning", fine_tune),
        # XLA tries kernels for each convolution of ResNet-50, which takes minutes.
        *((f"training {name}", add_training, o, name) for name in ("tiny_imagenet_c", "iwildcam")),
    ]  # fmt: skip
    o.keep({"gemm_gflop_per_s": peaks, "rows": [], "trainings": [], "growth": [], "left_out": left_out})
    for name, run, *arguments in parts:
        if o.only and not name.startswith(o.only):
            continue
        if time.perf_counter() - began > o.budget_s:
            left_out.append(name)
        else:
            try:
                run(*arguments)
            except Exception as e:  # the machine is lent for minutes, so a part that fails must not cost the others
                left_out.append(f"{name}: {type(e).__name__}: {str(e)[:300]}")
                print(f"failed: {left_out[-1]}", flush=True)
        o.keep({"seconds": time.perf_counter() - began})
    if left_out:
        print("left out: " + "; ".join(left_out))


def add_training(o: Options, name: str, whole: bool = False) -> None:
    """Adds the row of a training of CXDA by the package's own loop, on random images of a benchmark's shape.

    `whole` trains the paper's steps. Otherwise a part of them is trained, from which the minutes of all are reckoned.
    """
    shape, config, dtype = SHAPES[name], read(f"{name}:cxda"), "bfloat16"
    steps = shape.steps if whole else 1000 if shape.net == "cnn" else 300
    every = steps // shape.validations if whole else steps
    val_tasks = config["evaluation"]["val_tasks"]
    config["net"] |= {"dtype": dtype, "width": o.width}
    if o.small:
        steps = every = val_tasks = 4
        config["net"]["stages"], config["attention"]["heads"] = (1, 1, 1), 1
        config["episode"] |= {"num_domains": 2, "per_domain": 2, "num_query": 2}
    config["train"]["steps"], config["evaluation"]["every_steps"] = steps, every
    made = build_on(config, random_store(name, domains=24, images=8 if o.small else 500), ("train", "val"))
    evaluator, plans = compile_task(made.method, made.source), made.task_plans("val")
    tasks = Tasks(plans, val_tasks, "accuracy", per_call=made.per_call)

    def validate(variables: Any) -> float:
        return evaluate(evaluator, variables, made.source, tasks).mean

    state = train.init_state(made.method, made.optimizer, 0, made.example)
    validate(state.variables)  # compiles
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        spent = train.train(
            made.learner, made.source, made.train_plans, state, made.schedule, validate,
            train.Run(Path(folder), seed=0, log=lambda line: None),
        )  # fmt: skip
    seconds, validation = time.perf_counter() - began, spent.validating / (steps // every)
    reckoned = (shape.steps / spent.steps_per_s + shape.validations * validation) / 60
    memory, where = cost.peak_memory()
    print(f"training {name} {dtype}: {spent.steps_per_s:.1f} steps/s, validation {validation:.1f} s: {shape.steps} "
          f"steps and {shape.validations} validations take {reckoned:.1f} min (paper {shape.paper_minutes:.0f})"
          + (f"; measured whole: {seconds / 60:.1f} min" if whole else ""), flush=True)  # fmt: skip
    o.add("trainings", {
        "benchmark": name, "dtype": dtype, "whole": whole, "seconds": seconds, **spent._asdict(),
        "validation_s": validation, "reckoned_minutes": reckoned, "paper_minutes": shape.paper_minutes,
        "paper_steps": shape.steps, "peak_memory_bytes": memory, "memory_of": where,
    })  # fmt: skip
