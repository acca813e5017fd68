"""The optimisers against PyTorch's, fed the same gradients; and the chains that a text names."""

import jax
import numpy as np
import optax
import pytest

from cxda_jax.methods.optimizers import make_optimizer, read_chain
from tests.fast.test_optimizer import GRADIENTS, RNG, START, STEPS, descend  # noqa: F401


def close(a, b, tolerance=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=tolerance), tuple(a), tuple(b))


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


def test_a_chain_replaces_the_other_fields_and_a_share_scales_its_updates():
    options = {"name": "adam", "learning_rate": 3.0, "momentum": 0.9, "weight_decay": 0.5}
    chain = {"chain": "adamw(2e-2, weight_decay=0.1)"}
    plain = optax.adamw(2e-3, weight_decay=0.1), make_optimizer(**options | {"learning_rate": 0.3})
    found, slow, *expected = descend(*(make_optimizer(**options, **o, share=0.1) for o in (chain, {})), *plain)
    close(found, expected[0])
    close(slow, expected[1])
