"""What a config may ask for: a value out of range or that does not fit is named in one line, all others are built."""

import contextlib

import numpy as np

from cxda_jax.config.reading import override, resolve
from cxda_jax.config.registry import METHODS
from cxda_jax.errors import UserError
from tests.fast.test_build import built, shapes, small_config
from tests.fast.test_overrides import NAMES, NUMBERS, TEXTS, TUPLES, VALUES, one_of


def test_what_is_taken_is_built_or_refused_in_one_line(fixed_store):
    rng, found = np.random.default_rng(1), 0
    pools = {int: NUMBERS, float: NUMBERS, list: TUPLES}
    methods, fields = list(METHODS), [name for name in NAMES if not name.startswith(("data.", "benchmark"))]
    for i in range(400):
        config, changes = small_config(methods[i % len(methods)]), 0
        config.net.name = one_of(rng, ["cnn", "cnn", "resnet50"])
        for name in (fields[i % len(fields)], *(one_of(rng, fields) for _ in range(rng.integers(3)))):
            for _ in range(3):
                with contextlib.suppress(UserError):
                    override(config, name, one_of(rng, pools.get(type(VALUES[name]), TEXTS)))
                    changes += 1
        experiment = built(resolve(config), fixed_store) if changes else None
        if experiment is None:
            continue
        found += 1
        if not experiment.method.trains_as:
            assert len(next(experiment.source.batches(experiment.train_plans, 0, 1)).query)
        assert len(experiment.task_plans("test")(range(1)).query) == 1
        if i % 10 == 0:
            assert "params" in shapes(experiment.method, fixed_store)
    assert 40 < found < 360
