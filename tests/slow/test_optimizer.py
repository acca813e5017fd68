"""The optimisers against PyTorch's, fed the same gradients."""

import jax
import numpy as np
import optax
import pytest

from cxda_jax.methods.optimizers import make_optimizer

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


def test_thirty_steps_equal_torch():
    """By sgd and adam with momentum and decay."""
    torch = pytest.importorskip("torch")
    sgd, adam = torch.optim.SGD, torch.optim.Adam
    peers = [
        (sgd, {"momentum": 0.9, "weight_decay": 0.1}), (sgd, {"momentum": 0.0, "weight_decay": 0.1}),
        (adam, {"weight_decay": 0.0}), (adam, {"weight_decay": 0.1}),
    ]  # fmt: skip
    plain = [make_optimizer(kind.__name__.lower(), 1e-2, **{"momentum": 0.9} | o) for kind, o in peers]
    for (kind, options), ours in zip(peers, descend(*plain), strict=True):
        theirs = [torch.from_numpy(p.copy()).requires_grad_() for p in START]
        peer = kind(theirs, lr=1e-2, **options)
        for i in range(STEPS):
            for p, g in zip(theirs, GRADIENTS, strict=True):
                p.grad = torch.from_numpy(g[i].copy())
            peer.step()
            for found, expected in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(found[i], expected.detach(), rtol=0, atol=2e-6)
        assert all(np.abs(p[-1] - s).max() > 0.02 for p, s in zip(ours, START, strict=True))
