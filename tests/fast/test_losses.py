"""Losses and their gradients against PyTorch's, and at their ends."""

import jax
import numpy as np
import pytest

from cxda_jax.losses import consistency, cross_entropy, entropy, infomax

CLASSES, IMAGES = 7, 21


def make_logits(scale, seed=0):
    return np.random.default_rng(seed).normal(0, scale, (IMAGES, CLASSES)).astype(np.float32)


TEACHER, LABELS, COUNTED = make_logits(3.0, 1), np.arange(IMAGES) % CLASSES, np.arange(IMAGES) % 3 > 0
SURE = np.tile(np.eye(CLASSES, dtype=np.float32), (3, 1))  # and balanced
LOSSES = {
    "entropy": entropy,
    "infomax": infomax,
    "soft": lambda x: consistency(x, TEACHER),
    "hard": lambda x: cross_entropy(x, LABELS),
    "some": lambda x: cross_entropy(x, LABELS, COUNTED),
    "none": lambda x: cross_entropy(x, LABELS, np.zeros(IMAGES, bool)),
}
# One program for all tests.
OURS = jax.jit(lambda x: {name: jax.value_and_grad(loss)(x) for name, loss in LOSSES.items()})


@pytest.mark.parametrize("scale", [0.1, 2.0, 10.0])
def test_all_equal_autograd(scale):
    torch = pytest.importorskip("torch")
    nll, given = torch.nn.functional.cross_entropy, make_logits(scale)
    ours, labels = OURS(given), torch.from_numpy(LABELS)

    def entropy_of(x):
        return -(torch.softmax(x, -1) * torch.log_softmax(x, -1)).sum(-1).mean()

    def infomax_of(x):
        mean = torch.softmax(x, -1).mean(0)
        return entropy_of(x) + (mean * mean.log()).sum()

    theirs = {
        "entropy": entropy_of, "infomax": infomax_of, "hard": lambda x: nll(x, labels),
        "soft": lambda x: nll(x, torch.softmax(torch.from_numpy(TEACHER), -1)),
        "some": lambda x: nll(x[COUNTED], labels[COUNTED]),
    }  # fmt: skip
    for name, loss in theirs.items():
        x = torch.from_numpy(given).requires_grad_()
        loss(x).backward()
        np.testing.assert_allclose(ours[name][0], loss(x).detach(), rtol=1e-6, atol=2e-6, err_msg=name)
        np.testing.assert_allclose(ours[name][1], x.grad, rtol=0, atol=1e-6, err_msg=name)
    assert ours["none"][0] == 0 and not np.asarray(ours["none"][1]).any()


def test_certainty_is_finite():
    sure = OURS(1e4 * SURE)
    np.testing.assert_allclose(sure["infomax"][0], -np.log(CLASSES), atol=1e-6)
    assert all(np.isfinite(x).all() for name in ("entropy", "infomax") for x in sure[name])
