"""Losses and their gradients against float64 numpy and PyTorch's autograd, and their closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax.losses import consistency, cross_entropy, entropy, infomax

CLASSES, IMAGES = 7, 23


def make_logits(scale, seed=0):
    return np.random.default_rng(seed).normal(0, scale, (IMAGES, CLASSES)).astype(np.float32)


def softmax(x):
    x = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def numpy_entropy(logits):
    p = softmax(logits)
    return -np.where(p > 0, p * np.log(np.maximum(p, 1e-300)), 0).sum(-1).mean()


def numpy_infomax(logits):
    mean = softmax(logits).mean(0)
    return numpy_entropy(logits) + (mean * np.log(mean)).sum()


def numpy_consistency(logits, teacher):
    return -(softmax(teacher) * np.log(softmax(logits))).sum(-1).mean()


def differentiated(f, x, step=1e-5):
    """Central differences in float64."""
    x, grad = x.astype(np.float64), np.zeros(x.shape)
    for at in np.ndindex(x.shape):
        moved = x.copy()
        moved[at] += step
        up = f(moved)
        moved[at] -= 2 * step
        grad[at] = (up - f(moved)) / (2 * step)
    return grad


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
@pytest.mark.parametrize(("ours", "theirs"), [(entropy, numpy_entropy), (infomax, numpy_infomax)])
def test_entropies_equal_numpy(ours, theirs, scale):
    logits = make_logits(scale)
    value, grad = jax.value_and_grad(ours)(jnp.asarray(logits))
    np.testing.assert_allclose(value, theirs(logits), rtol=0, atol=2e-6)
    np.testing.assert_allclose(grad, differentiated(theirs, logits), rtol=0, atol=1e-6)


def test_all_equal_autograd():
    torch = pytest.importorskip("torch")
    logits, teacher, labels = make_logits(2.0), make_logits(3.0, 1), np.arange(IMAGES) % CLASSES
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
        entropy,
        infomax,
        lambda x: consistency(x, jnp.asarray(teacher)),
        lambda x: cross_entropy(x, jnp.asarray(labels)),
        lambda x: cross_entropy(x, jnp.asarray(labels), jnp.asarray(counted)),
    )
    for i, loss in enumerate(ours):
        x = torch.from_numpy(logits).requires_grad_()
        value = theirs(x)[i]
        value.backward()
        got, grad = jax.value_and_grad(loss)(jnp.asarray(logits))
        np.testing.assert_allclose(got, value.detach(), rtol=0, atol=2e-6)
        np.testing.assert_allclose(grad, x.grad, rtol=0, atol=1e-6)


def test_consistency_equals_numpy_and_leaves_the_teacher_alone():
    logits, teacher = make_logits(1.0), make_logits(2.0, 1)
    np.testing.assert_allclose(consistency(logits, teacher), numpy_consistency(logits, teacher), rtol=0, atol=2e-6)
    assert not np.asarray(jax.grad(consistency, 1)(jnp.asarray(logits), jnp.asarray(teacher))).any()


@pytest.mark.parametrize("scale", [0.0, 0.5, 5.0, 500.0])
def test_infomax_lies_between_minus_log_classes_and_zero(scale):
    for seed in range(20):
        assert -np.log(CLASSES) - 1e-5 <= infomax(make_logits(scale, seed)) <= 1e-5


def test_infomax_at_its_ends():
    same = jnp.tile(jnp.asarray(make_logits(1.0)[:1]), (IMAGES, 1))
    np.testing.assert_allclose(infomax(same), 0, atol=1e-6)
    sure_and_balanced = 1e3 * jnp.tile(jnp.eye(CLASSES), (3, 1))
    np.testing.assert_allclose(infomax(sure_and_balanced), -np.log(CLASSES), atol=1e-6)


@pytest.mark.parametrize("loss", [entropy, infomax])
def test_certainty_has_a_finite_gradient(loss):
    value, grad = jax.value_and_grad(loss)(1e4 * jnp.eye(CLASSES))
    assert np.isfinite(value) and np.isfinite(grad).all()


def test_cross_entropy_of_no_image_is_zero():
    value, grad = jax.value_and_grad(cross_entropy)(
        jnp.asarray(make_logits(1.0)), jnp.zeros(IMAGES, int), jnp.zeros(IMAGES, bool)
    )
    assert value == 0 and not np.asarray(grad).any()
