"""Data sets of other kinds than the paper's: one domain a split, one or hundreds of classes, odd names, odd shapes."""

import jax
import numpy as np
import pytest

from cxda_jax import train
from cxda_jax.config import read
from cxda_jax.data.store import SPLITS, Domain, StoreInfo, write_store
from cxda_jax.experiment import build
from cxda_jax.study.testing import compiled, score
from tests.lines import refused
from tests.nets import fill

ODD = ("$x_{", "", " ", "a/b", "\u754c", "\U0001f600", "name", "0")
FEW = {"num_domains": 1, "per_domain": 6, "num_query": 4, "replacement": True}
KINDS = {  # classes, shape
    "hundreds of classes, odd names, four channels": ((*ODD, *map(str, range(1, 293))), (17, 21, 4)),
    "one class": (("all",), (16, 16, 1)),
}


def experiment_of(folder, kind, method, metric="macro_f1"):
    """Of a single domain of few images in each split."""
    (classes, shape), rng = KINDS[kind], np.random.default_rng(0)
    about = StoreInfo("mine", classes, (0.5,) * shape[-1], (0.25,) * shape[-1], metric)
    write_store(folder / "mine", about, [
        Domain(f"{ODD[0]}{split}", split, rng.integers(0, 256, (3, *shape), np.uint8), rng.integers(0, len(classes), 3))
        for split in SPLITS
    ])  # fmt: skip
    config = read(f"folder:{method},smoke")
    return build(config | {"data": {"name": "mine"}, "episode": FEW}, folder)


@pytest.mark.gate
@pytest.mark.parametrize("kind", [[*KINDS][0], pytest.param([*KINDS][1], marks=pytest.mark.exhaustive)])
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
        experiment_of(tmp_path, "one class", "erm", metric="f1")
