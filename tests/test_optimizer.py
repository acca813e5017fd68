"""The optimisers against PyTorch's, fed the same gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cxda_jax.errors import UserError
from cxda_jax.experiment import make_optimizer


@pytest.mark.parametrize(
    ("name", "momentum", "weight_decay"),
    [("sgd", 0.9, 1e-4), ("sgd", 0.9, 0.1), ("sgd", 0.0, 0.1), ("adam", 0.9, 0.0), ("adam", 0.9, 0.1)],
)
def test_twenty_steps_equal_torch(name, momentum, weight_decay):
    torch = pytest.importorskip("torch")
    rate, rng = 1e-2, np.random.default_rng(0)
    # Gradients that are independent of the parameters, so that differences cannot grow.
    start, *gradients = [[rng.normal(size=n).astype(np.float32) for n in ((4, 3), 5)] for _ in range(21)]
    tx = make_optimizer(name=name, learning_rate=rate, momentum=momentum, weight_decay=weight_decay)
    params = tuple(jnp.asarray(p) for p in start)
    state = tx.init(params)
    theirs = [torch.from_numpy(p.copy()).requires_grad_() for p in start]
    options = {"lr": rate, "weight_decay": weight_decay}
    peer = (
        torch.optim.SGD(theirs, momentum=momentum, **options) if name == "sgd" else torch.optim.Adam(theirs, **options)
    )
    update = jax.jit(tx.update)
    for gradient in gradients:
        updates, state = update(tuple(jnp.asarray(g) for g in gradient), state, params)
        params = optax.apply_updates(params, updates)
        for p, g in zip(theirs, gradient, strict=True):
            p.grad = torch.from_numpy(g)
        peer.step()
        for ours, their in zip(params, theirs, strict=True):
            np.testing.assert_allclose(ours, their.detach(), rtol=0, atol=1e-6)
    assert all(np.abs(ours - p).max() > 2 * rate for ours, p in zip(params, start, strict=True))


def test_an_unknown_optimizer_is_a_user_error():
    with pytest.raises(UserError, match="optimizer.name='rmsprop'"):
        make_optimizer(name="rmsprop", learning_rate=0.1, momentum=0.9, weight_decay=0.0)
