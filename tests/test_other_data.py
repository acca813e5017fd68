"""Data sets of other kinds than the paper's: one domain a split, one or hundreds of classes, odd names, odd shapes."""

import jax
import numpy as np
import pytest

from cxda_jax import train
from cxda_jax.config import read
from cxda_jax.data.store import SPLITS, Domain, StoreInfo, open_store, write_store
from cxda_jax.experiment import build
from cxda_jax.study.testing import compiled, score
from tests.lines import refused
from tests.nets import fill

ODD = ("$x_{", "", " ", "a/b", "\u754c", "\U0001f600", "name", "0")
MANY = (*ODD, *map(str, range(1, 293)))
FEW = {"num_domains": 1, "per_domain": 6, "num_query": 4, "replacement": False}
KINDS = {  # images of each domain of each split; classes; shape; metric; tasks
    "hundreds of classes, odd names": ((20, 25), MANY, (16, 21, 3), "macro_f1", FEW | {"num_domains": 2}),
    "one class, few images of four channels": ((3,), ("all",), (17, 16, 4), "macro_f1", FEW | {"replacement": True}),
}


def experiment_of(folder, kind, method, **info):
    sizes, classes, shape, metric, episode = KINDS[kind]
    rng, channels = np.random.default_rng(0), shape[-1]
    about = StoreInfo("mine", classes, (0.5,) * channels, (0.25,) * channels, **{"metric": metric} | info)
    write_store(folder / "mine", about, [
        Domain(f"{ODD[i]}{split}", split, rng.integers(0, 256, (n, *shape), np.uint8), rng.integers(0, len(classes), n))
        for split in SPLITS for i, n in enumerate(sizes)
    ])  # fmt: skip
    assert open_store(folder / "mine").num_classes == len(classes)
    config = read(f"folder:{method},smoke")
    return build(config | {"data": {"name": "mine"}, "episode": episode}, folder)


@pytest.mark.gate
@pytest.mark.parametrize("kind", KINDS)
def test_a_method_trains_and_is_tested_on_data_of_any_kind(tmp_path, kind):
    e = experiment_of(tmp_path, kind, "bn")
    variables = fill(jax.eval_shape(e.method.init, jax.random.key(0), e.example))
    state = train.TrainState(np.int32(0), variables, jax.jit(e.optimizer.init)(variables["params"]))
    batch = next(e.source.batches(e.train_plans, 0, 1))

    @jax.jit
    def step(state, resident, batch):
        episodes = e.source.assemble(resident, batch)
        return train.train_step(e.method, e.optimizer, e.weak, state, episodes, jax.random.key(0))

    variables = step(state, e.source.resident, batch)[0].variables
    tasks = score(e, compiled(e), variables, "test", 2)
    assert tasks.predictions.shape == tasks.labels.shape == (2, 4)
    assert tasks.predictions.min() >= 0 and tasks.predictions.max() < e.store.num_classes
    assert 0 <= tasks.worst_decile <= tasks.mean <= 1 and np.isfinite(jax.tree.leaves(variables)[0]).all()
    assert e.store.num_classes > 1 or tasks.mean == 1


def test_a_metric_that_nobody_knows_is_refused_before_a_run(tmp_path):
    with refused("data set 'mine': metric='f1' is unknown.* choose from accuracy, macro_f1"):
        experiment_of(tmp_path, "one class, few images of four channels", "erm", metric="f1")
