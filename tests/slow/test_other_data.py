"""Data of another kind than the paper's: one domain a split, hundreds of classes, odd names, four channels."""

import jax
import numpy as np

from cxda_jax.config.reading import read, replaced
from cxda_jax.data.store import SPLITS, Domain, StoreInfo, write_store
from cxda_jax.studies.testing import compiled, score
from cxda_jax.training import loop
from cxda_jax.training.experiment import build
from tests.nets import fill

CLASSES = ("$x_{", "", " ", "a/b", "\u754c", "\U0001f600", *map(str, range(294)))
FEW = {"num_domains": 1, "per_domain": 6, "num_query": 4, "replacement": True}


def test_a_method_trains_and_is_tested(tmp_path):
    rng = np.random.default_rng(0)
    domains = [
        Domain(f"$x_{{{split}", split, rng.integers(0, 256, (3, 17, 21, 4), np.uint8), rng.integers(0, 300, 3))
        for split in SPLITS
    ]
    write_store(tmp_path / "mine", StoreInfo("mine", CLASSES, (0.5,) * 4, (0.25,) * 4, "macro_f1"), domains)
    config = read("folder:bn,smoke", [(f"episode.{name}", str(value)) for name, value in FEW.items()])
    e = build(replaced(config, data={"name": "mine"}), tmp_path)
    variables = fill(jax.eval_shape(e.method.init, jax.random.key(0), e.example))
    state = loop.TrainState(np.int32(0), variables, jax.jit(e.recipe.optimizer.init)(variables["params"]))
    batch = next(e.source.batches(e.train_plans, 0, 1))

    @jax.jit
    def step(state, resident, batch):
        episodes = e.source.assemble(resident, batch)
        return loop.train_step(e.learner, state, episodes, jax.random.key(0))

    variables = step(state, e.source.resident, batch)[0].variables
    tasks = score(e, compiled(e), variables, "test", 2)
    assert tasks.predictions.shape == tasks.labels.shape == (2, 4)
    assert tasks.predictions.min() >= 0 and tasks.predictions.max() < 300
    assert 0 <= tasks.worst_decile <= tasks.mean <= 1 and np.isfinite(jax.tree.leaves(variables)[0]).all()
