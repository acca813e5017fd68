"""Losses and their gradients against PyTorch's, and their closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax.losses import consistency, cross_entropy, entropy, infomax

CLASSES, IMAGES = 7, 23


def make_logits(scale, seed=0):
    return np.random.default_rng(seed).normal(0, scale, (IMAGES, CLASSES)).astype(np.float32)


@pytest.mark.parametrize("scale", [0.1, 2.0, 10.0])
def test_all_equal_autograd(scale):
    torch = pytest.importorskip("torch")
    logits, teacher, labels = make_logits(scale), make_logits(3.0, 1), np.arange(IMAGES) % CLASSES
    counted = np.arange(IMAGES) % 3 > 0

    def theirs(x):
        log_p = torch.log_softmax(x, -1)
        mean = log_p.exp().mean(0)
        each = -(log_p.exp() * log_p).sum(-1).mean()
        each_kept = torch.nn.functional.cross_entropy(x[counted], torch.from_numpy(labels[counted]))
        soft = torch.nn.functional.cross_entropy(x, torch.softmax(torch.from_numpy(teacher), -1))
        hard = torch.nn.functional.cross_entropy(x, torch.from_numpy(labels))
        return each, each + (mean * mean.log()).sum(), soft, hard, each_kept

    ours = (
        entropy, infomax, lambda x: consistency(x, jnp.asarray(teacher)), lambda x: cross_entropy(x, jnp.asarray(labels)),
        lambda x: cross_entropy(x, jnp.asarray(labels), jnp.asarray(counted)),
    )  # fmt: skip
    for i, loss in enumerate(ours):
        x = torch.from_numpy(logits).requires_grad_()
        value = theirs(x)[i]
        value.backward()
        got, grad = jax.value_and_grad(loss)(jnp.asarray(logits))
        np.testing.assert_allclose(got, value.detach(), rtol=1e-6, atol=2e-6)
        np.testing.assert_allclose(grad, x.grad, rtol=0, atol=1e-6)
    assert not np.asarray(jax.grad(consistency, 1)(jnp.asarray(logits), jnp.asarray(teacher))).any()


@pytest.mark.parametrize("scale", [0.0, 0.5, 5.0, 500.0])
def test_infomax_lies_between_minus_log_classes_and_zero(scale):
    for seed in range(20):
        assert -np.log(CLASSES) - 1e-5 <= infomax(make_logits(scale, seed)) <= 1e-5


def test_infomax_at_its_ends():
    np.testing.assert_allclose(infomax(jnp.tile(make_logits(1.0)[:1], (IMAGES, 1))), 0, atol=1e-6)
    np.testing.assert_allclose(infomax(1e3 * jnp.tile(jnp.eye(CLASSES), (3, 1))), -np.log(CLASSES), atol=1e-6)


@pytest.mark.parametrize("loss", [entropy, infomax])
def test_certainty_has_a_finite_gradient(loss):
    value, grad = jax.value_and_grad(loss)(1e4 * jnp.eye(CLASSES))
    assert np.isfinite(value) and np.isfinite(grad).all()


def test_cross_entropy_of_no_image_is_zero():
    logits, none = jnp.asarray(make_logits(1.0)), jnp.zeros(IMAGES, int)
    value, grad = jax.value_and_grad(cross_entropy)(logits, none, none > 0)
    assert value == 0 and not np.asarray(grad).any()
