"""The optimisers against PyTorch's, fed the same gradients; and the chains that a text names."""

import jax
import numpy as np
import optax
import pytest

from cxda_jax.methods.optimizers import make_optimizer, read_chain
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


def close(a, b, tolerance=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=tolerance), tuple(a), tuple(b))


@pytest.mark.gate
def test_thirty_steps_equal_torch():
    """By sgd and adam with momentum and decay, and by a chain that clips, decays apart and lowers its rate."""
    torch = pytest.importorskip("torch")
    chain = "clip_by_global_norm(1.0), adamw(cosine_decay_schedule(1e-2, steps), b2=0.99, weight_decay=0.1)"
    sgd, adam = torch.optim.SGD, torch.optim.Adam
    peers = [
        (sgd, {"momentum": 0.9, "weight_decay": 0.1}), (sgd, {"momentum": 0.0, "weight_decay": 0.1}),
        (adam, {"weight_decay": 0.0}), (adam, {"weight_decay": 0.1}),
        (torch.optim.AdamW, {"weight_decay": 0.1, "betas": (0.9, 0.99)}),
    ]  # fmt: skip
    plain = [make_optimizer(kind.__name__.lower(), 1e-2, **{"momentum": 0.9} | o) for kind, o in peers[:-1]]
    for (kind, options), ours in zip(peers, descend(*plain, read_chain("chain", chain, STEPS)), strict=True):
        theirs, clips = [torch.from_numpy(p.copy()).requires_grad_() for p in START], kind is torch.optim.AdamW
        peer = kind(theirs, lr=1e-2, **options)
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(peer, T_max=STEPS) if clips else None
        for i in range(STEPS):
            for p, g in zip(theirs, GRADIENTS, strict=True):
                p.grad = torch.from_numpy(g[i].copy())
            assert not clips or torch.nn.utils.clip_grad_norm_(theirs, 1.0) > 1.5  # it does clip
            peer.step()
            if rates:
                rates.step()
            close((p[i] for p in ours), (p.detach() for p in theirs), 2e-6)
        assert all(np.abs(p[-1] - s).max() > 0.02 for p, s in zip(ours, START, strict=True))


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


@pytest.mark.gate
def test_a_chain_replaces_the_other_fields_and_a_share_scales_its_updates():
    options = {"name": "adam", "learning_rate": 3.0, "momentum": 0.9, "weight_decay": 0.5}
    chain = {"chain": "adamw(2e-2, weight_decay=0.1)"}
    plain = optax.adamw(2e-3, weight_decay=0.1), make_optimizer(**options | {"learning_rate": 0.3})
    found, slow, *expected = descend(*(make_optimizer(**options, **o, share=0.1) for o in (chain, {})), *plain)
    close(found, expected[0])
    close(slow, expected[1])


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
