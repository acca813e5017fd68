"""The optimisers against PyTorch's, fed the same gradients; and the chains that a text names."""

import jax
import numpy as np
import optax

from cxda_jax.methods.optimizers import read_chain
from tests.lines import refused

STEPS = 30
# Gradients are independent of the parameters, so that differences cannot grow.
RNG = np.random.default_rng(0)
START = tuple(RNG.normal(size=shape).astype(np.float32) for shape in ((4, 3), 5))
GRADIENTS = tuple(RNG.normal(size=(STEPS, *p.shape)).astype(np.float32) for p in START)


def descend(*optimizers):
    """The parameters after each update [steps, ...], by each of these."""

    def path(tx, start, gradients):
        def step(state, gradient):
            updates, inner = tx.update(gradient, state[1], state[0])
            params = optax.apply_updates(state[0], updates)
            return (params, inner), params

        return jax.lax.scan(step, (start, tx.init(start)), gradients)[1]

    return jax.jit(lambda *given: [path(tx, *given) for tx in optimizers])(START, GRADIENTS)


RATES = {  # of the first steps of six
    "sgd(learning_rate=5e-1,)": [0.5] * 6,
    "sgd(piecewise_constant_schedule(0.5, {2: 0.1, 4: 0.5}))": [0.5, 0.5, 0.05, 0.05, 0.025, 0.025],
    "sgd(linear_schedule(0.6, 0.0, steps))": [0.6, 0.5, 0.4, 0.3, 0.2, 0.1],
    "sgd(join_schedules([constant_schedule(0.1), linear_schedule(0.3, 0.1, 2)], [3]))": [0.1] * 3 + [0.3, 0.2, 0.1],
}


def test_a_chains_rates_are_those_that_its_text_says():
    found = descend(*(read_chain("chain", text, 6) for text in RATES))
    for (text, rates), params in zip(RATES.items(), found, strict=True):
        for p, start, gradient in zip(params, START, GRADIENTS, strict=True):
            moved = np.diff(np.concatenate([start[None], p]), axis=0)[:6]
            expected = -np.reshape(rates, (6, *[1] * start.ndim)) * gradient[:6]
            np.testing.assert_allclose(moved, expected, rtol=0, atol=2e-6, err_msg=text)


WRONG = {
    "adamq(0.1)": "optax has no adamq, did you mean adam",
    "__import__('os').system('touch pwned')": "is no call",
    "sgd(open('x'))": "optax has no open",
    "sgd(-1e999)": "is no call of optax, finite number",
    "sgd()": "missing 1 required positional argument: 'learning_rate'",
    "clip(1.0) adam(0.1)": "invalid syntax",
    "add_noise(0.1, 0.5, 3)": "random keys, which no checkpoint keeps",
    "sgd(" + "1" * 2000 + ")": "2005 characters, 1000 at most",
}


def test_a_text_that_is_no_chain_is_refused_in_one_line_and_never_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text, says in WRONG.items():
        with refused(rf"^field=.*{says}.*; write it as 'clip\(1\.0\), adam\(1e-3\)'$"):
            read_chain("field", text, 5)
    assert not list(tmp_path.iterdir())
