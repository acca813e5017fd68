"""Programs compiled for accelerators that are not there."""

import functools
import re

import jax
import pytest

from cxda_jax.config import reading
from cxda_jax.data.published import sample_store
from cxda_jax.machine import backend
from cxda_jax.training import loop
from cxda_jax.training.experiment import build_on

SIZES = {"net.width": "16", "episode.per_domain": "2", "episode.num_query": "4", "evaluation.per_call": "1"}


@pytest.mark.parametrize(("method", "precision", "platform"), [("cml", "highest", "tpu"), ("icrm", "high", "gpu")])
def test_the_precision_is_that_of_every_product_of_a_step(method, precision, platform):
    """Those of gradients too, as JAX hands the program to the compiler."""
    changes = [*SIZES.items(), ("net.precision", precision), *[("icrm.layers", "2")] * (method == "icrm")]
    e = build_on(reading.read(f"femnist:{method},smoke", changes), sample_store("femnist"))
    with backend.target(platform):
        state = jax.eval_shape(lambda: loop.init_state(e.method, e.recipe.optimizer, 0, e.example))
        call = functools.partial(loop.train_call, e.learner, e.source, 1)
        batch = next(iter(e.source.batches(e.train_plans, 0, 1)))
        text = jax.jit(call).lower(state, e.source.resident, batch, jax.random.key(0)).as_text()
    products = [line for line in text.splitlines() if re.search(r"stablehlo\.(dot_general|convolution)", line)]
    found = [re.findall(r"\b(?:DEFAULT|HIGH|HIGHEST)\b", line) for line in products]
    assert len(products) > 10 and found == [2 * [precision.upper()]] * len(products)
