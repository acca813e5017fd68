"""The suite gpu of python -m tools.bench: everything that is promised of a GPU, whole trainings included."""

import functools
import tempfile
import time
from pathlib import Path
from typing import Any

from cxda_jax.config.reading import read, replaced
from cxda_jax.data.published import empty_store, sample_store
from cxda_jax.machine import cost
from cxda_jax.training import loop
from cxda_jax.training.evaluation import Tasks, compile_task, evaluate
from cxda_jax.training.experiment import build_on, make_schedule
from tools.bench.cases import Case, make_runner
from tools.bench.measure import top_operations
from tools.bench.rows import Options, add_beside_peers, gemm_peaks

# Minutes of CXDA's training on the paper's GPU.
PAPER_MINUTES = {"cifar_c": 63.2, "femnist": 110, "tiny_imagenet_c": 168, "iwildcam": 492}


def gpu_suite(o: Options) -> None:
    """Times what is promised, the most telling part first. The record names the parts that no time was left for."""
    began, left_out, peaks = time.perf_counter(), [], gemm_peaks(o, ("float32", "bfloat16"))
    tasks, steps = (2, 2) if o.small else (64, 20)
    step = Case("cifar_c", "cxda", "train", width=o.width, steps=steps)
    task = Case("cifar_c", "cxda", "infer", width=o.width, tasks=tasks)
    step16, task16 = (case._replace(dtype="bfloat16") for case in (step, task))
    peers16 = ("exact_channels_last_bf16",) if o.small else ("exact_compiled_bf16", "exact_channels_last_bf16")
    add, training = functools.partial(add_beside_peers, o, peaks), functools.partial(add_training, o)
    parts = {
        "step bfloat16": lambda: add(step16, peers16),
        "step float32": lambda: add(step, ("exact", "exact_channels_last")),
        "tasks bfloat16": lambda: add(task16),
        "tasks float32": lambda: add(task),
        "training cifar_c": lambda: training("cifar_c", whole=True),
        "training femnist": lambda: training("femnist"),
        "profile": lambda: o.keep({"profile": top_operations(make_runner(step16._replace(steps=1), o.small).timing)}),
        "step of 8 tasks": lambda: add(step16._replace(tasks=8)),
        # XLA tries kernels for each convolution of ResNet-50, which takes minutes.
        "training tiny_imagenet_c": lambda: training("tiny_imagenet_c"),
        "training iwildcam": lambda: training("iwildcam"),
    }
    o.keep({"gemm_gflop_per_s": peaks, "rows": [], "trainings": [], "left_out": left_out})
    for name, run in parts.items():
        if o.only and not name.startswith(o.only):
            continue
        if time.perf_counter() - began > o.budget_s:
            left_out.append(name)
        else:
            try:
                run()
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
    config = read(f"{name}:cxda", [("net.dtype", "bfloat16"), ("net.width", str(o.width))])
    paper, val_tasks = make_schedule(config, empty_store(name)), config.evaluation.val_tasks
    validations = paper.steps // paper.validate_every
    steps = paper.steps if whole else 1000 if config.net.name == "cnn" else 300
    if o.small:
        steps = val_tasks = 4
        few = {"num_domains": 2, "per_domain": 2, "num_query": 2}
        config = replaced(config, net={"stages": (1, 1, 1)}, attention={"heads": 1}, episode=few)
    every = paper.validate_every if whole and not o.small else steps
    config = replaced(config, train={"steps": steps}, evaluation={"every_steps": every})
    made = build_on(config, sample_store(name, images=8 if o.small else 500), ("train", "val"))
    evaluator = compile_task(made.method, made.source)
    tasks = Tasks(made.task_plans("val"), val_tasks, "accuracy", per_call=made.per_call)

    def validate(variables: Any) -> float:
        return evaluate(evaluator, variables, made.source, tasks).mean

    state = loop.init_state(made.method, made.recipe.optimizer, 0, made.example)
    validate(state.variables)  # compiles
    with tempfile.TemporaryDirectory() as folder:
        spent = loop.train(
            loop.Programs(made.learner, made.source, made.schedule.steps_per_call), made.train_plans, state,
            made.schedule, loop.Validation(validate), loop.Run(Path(folder), log=lambda line: None),
        )  # fmt: skip
    validation = spent.validating / (steps // every)
    reckoned = (paper.steps / spent.steps_per_s + validations * validation) / 60
    memory, where = cost.peak_memory()
    print(f"training {name}: {spent.steps_per_s:.1f} steps/s, validation {validation:.1f} s: {paper.steps} steps and "
          f"{validations} validations take {reckoned:.1f} min (paper {PAPER_MINUTES[name]:.0f})"
          + (f"; measured whole: {spent.seconds / 60:.1f} min" if whole else ""), flush=True)  # fmt: skip
    o.add("trainings", {
        "benchmark": name, "dtype": "bfloat16", "whole": whole, **spent._replace(best=None)._asdict(), "validation_s": validation,
        "reckoned_minutes": reckoned, "paper_minutes": PAPER_MINUTES[name], "paper_steps": paper.steps,
        "paper_validations": validations, "peak_memory_bytes": memory, "memory_of": where,
    })  # fmt: skip
