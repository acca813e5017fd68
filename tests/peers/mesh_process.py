"""A tiny training over all devices of one or several processes, by the real loop:

python -m tests.peers.mesh_process STORE FOLDER METHODS STEPS WHICH HOW_MANY PORT [source]

The first process writes FOLDER/METHOD.npz: losses, parameters, test predictions, and what devices exchange in a step.
source is device, rows or tfdata. A method whose name begins with small is bn on one convolution.

The networks are smooth: softplus stands for ReLU, and means for maxima. Sums in another order move last bits, and a
last bit would sometimes decide which side of an edge a gradient takes. Then two runs drift apart.
"""

import contextlib
import functools
import sys
from pathlib import Path

import numpy as np
from flax import linen

from cxda_jax.data import augment
from cxda_jax.data.episodes import Draw, EpisodeSpec, mixed_spec, sample_plans
from cxda_jax.data.sources import device_source, tfdata_source
from cxda_jax.data.store import open_store
from cxda_jax.disk.reading import read_lines
from cxda_jax.disk.safetensors import named
from cxda_jax.machine import backend, cost, hosts, mesh
from cxda_jax.nets import cnn
from cxda_jax.training import loop
from cxda_jax.training.evaluation import Tasks, compile_task, evaluate
from cxda_jax.training.experiment import make_optimizer
from cxda_jax.types import Images
from tools.ahead import passport as ahead

TASKS, TESTS = 8, 11
SPEC = EpisodeSpec(num_domains=2, per_domain=4, num_query=4)
SOURCES = {"device": device_source, "rows": functools.partial(device_source, by_rows=True), "tfdata": tfdata_source}


def run(store, folder, name, steps, source="device"):
    """Trains and tests on all devices there are."""
    from tests import nets
    from tests.fast import test_train  # they ask for a device, so not before the processes have met

    method = test_train.METHOD if name.startswith("small") else nets.build_method(name)
    tx, exchanges = make_optimizer("sgd", 0.01, 0.9, 1e-4), []
    spec = mixed_spec(SPEC) if method.trains_mixed else SPEC
    its = SOURCES[source](store, mesh.mesh_for(TASKS))

    def plan_of(step):
        return sample_plans(
            Draw(spec, store.offsets, store.domains("train"), 0), range(step * TASKS, (step + 1) * TASKS)
        )

    def tests(numbers):
        return sample_plans(Draw(SPEC, store.offsets, store.domains("test"), 0, 2), numbers)

    def flops(lowered):
        text = lowered.compile(backend.compiler_options()).as_text()
        exchanges.extend(f"{exchange['operation']} {exchange['types']}" for exchange in ahead.exchanges(text))
        return 0.0

    evaluator = compile_task(method, its)

    def score(variables):
        return evaluate(evaluator, variables, its, Tasks(tests, TESTS, "accuracy"))

    workdir = folder / name
    workdir.mkdir(exist_ok=True)
    state = loop.init_state(method, tx, 0, Images(store.images[:2], np.zeros(2, np.int32)))
    schedule = loop.Schedule(steps, steps, 1, 5, TASKS)
    programs = loop.Programs(loop.Learner(method, tx, augment.Weak()), its)
    spent = loop.train(
        programs, plan_of, state, schedule,
        loop.Validation(lambda v: score(v).mean), loop.Run(workdir, functools.partial(print, flush=True)),
    )  # fmt: skip
    cost.flops = flops
    if spent.steps:
        programs.cost_of_step(state)
    state, _ = mesh.from_first(lambda: loop.resume(workdir, state, print), like=state)
    answers = score(state.variables).predictions
    if mesh.is_first():
        losses = [line["loss"] for line in read_lines(workdir / "metrics.jsonl") if "loss" in line]
        leaves = {name: np.asarray(leaf) for name, leaf in named(state).items()}
        np.savez(folder / f"{name}.npz", losses=losses, answers=answers, exchanges=sorted(set(exchanges)), **leaves)


def main(path, folder, names, steps, which, count, port, source="device"):
    linen.relu = linen.softplus
    cnn.max_pool = lambda x: linen.avg_pool(x, (2, 2), (2, 2))
    with hosts.joined(f"localhost:{port}", count, which) if count > 1 else contextlib.nullcontext():
        for name in names.split(","):
            run(open_store(path), Path(folder), name, steps, source)


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:8]), *sys.argv[8:])
