"""docs/examples/cxda_in_100_lines.py is the paper's method, in a hundred lines."""

import jax
import numpy as np

from cxda_jax.data.glyphs import open_glyphs
from cxda_jax.methods.cxda import cxda
from docs.examples import cxda_in_100_lines as script
from tests.nets import FEMNIST, KEY, initialised, make_attending, make_episode


def test_it_answers_as_the_package_does_on_equal_weights():
    method = cxda(make_attending(*FEMNIST, "flat", width=4, heads=2))
    variables, episode = initialised(method, FEMNIST[0]), make_episode(*FEMNIST)
    params = {**variables["params"]}
    params |= params.pop("head")

    @jax.jit
    def both(variables, params, episode):
        support, query = episode.support, episode.query
        own = script.answer(script.CXDA(width=4, heads=2), params, support.pixels, query.pixels)
        return own, method.predict(method.adapt(variables, support, KEY), query)

    own, expected = both(variables, params, episode)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-5)


def test_it_learns(data_dir, capsys):
    """It fits two tasks, and main() trains, validates and tests."""
    store, net = open_glyphs(data_dir, 0, (5, 5, 5), 41), script.CXDA(width=4, heads=2)
    tasks = [script.sample(np.random.default_rng(seed), store, "train") for seed in range(2)]
    params, state = script.start(net, 0, tasks[0])
    for _ in range(120):
        params, state = script.train_step(net, params, state, jax.tree.map(lambda *x: np.stack(x), *tasks))
    answers = [np.asarray(script.answer(net, params, task.support, task.query)).argmax(-1) for task in tasks]
    right = [(own == task.label).mean() for own, task in zip(answers, tasks, strict=True)]
    assert min(right) > 0.2  # it is 0.5 to 1.0, by the processor, and 1/62 by chance
    scores = script.main(net, store, steps=6, tasks_per_step=2, val_tasks=2, test_tasks=10)[1]
    assert len(scores) == 10 and capsys.readouterr().out.count("on validation domains") == 6
