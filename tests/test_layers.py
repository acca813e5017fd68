"""Convolution, pooling and normalisation against PyTorch, automatic differentiation and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax import backend
from cxda_jax.nets import convolution
from cxda_jax.nets.convolution import convolve, max_pool
from cxda_jax.nets.normalisation import moments, scale_and_shift
from tests.nets import assert_close, nchw


@pytest.mark.parametrize(("size", "window"), [
    *((size, (2, 2, 0)) for size in [(8, 6), (7, 5), (2, 3)]), *((size, (3, 2, 1)) for size in [(9, 7), (8, 6), (4, 4)])
])  # fmt: skip
def test_max_pool_equals_torch(peer, size, window):
    """Windows of 2 pixels, and of 3 pixels with a padded border."""
    x, (side, stride, pad) = np.random.default_rng(0).normal(size=(3, *size, 4)).astype(np.float32), window
    theirs = nchw(x).requires_grad_()
    pooled = peer.F.max_pool2d(theirs, side, stride, padding=pad)
    pooled.sin().sum().backward()
    np.testing.assert_array_equal(max_pool(jnp.asarray(x), *window), pooled.detach().permute(0, 2, 3, 1))
    grad = jax.grad(lambda x: jnp.sin(max_pool(x, *window)).sum())(x)
    assert_close(grad, theirs.grad.permute(0, 2, 3, 1), 1e-6)


@pytest.mark.parametrize("size, kernel, stride, narrow", [
    ((2, 2), 3, 1, True), ((4, 4), 3, 2, True), ((4, 9), 3, 2, True), ((1, 1), 3, 1, True), ((6, 5), 1, 1, True),
    ((6, 5), 1, 2, True), ((3, 3), 3, 1, False), ((8, 6), 3, 2, False), ((4, 4), 7, 2, True),
])  # fmt: skip
def test_convolutions_equal_torch_in_each_form(peer, size, kernel, stride, narrow):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, *size, 4)).astype(np.float32)
    w = rng.normal(size=(kernel, kernel, 4, 5)).astype(np.float32)
    pad, numbers = kernel // 2, ("NHWC", "HWIO", "NHWC")

    def ours(x, w):
        return convolve(x, w, (stride, stride), ((pad, pad), (pad, pad)), dimension_numbers=numbers)

    images, weights = nchw(x).requires_grad_(), peer.torch.tensor(w.transpose(3, 2, 0, 1)).requires_grad_()
    theirs = peer.F.conv2d(images, weights, stride=stride, padding=pad)
    theirs.sin().sum().backward()
    assert_close(ours(x, w), theirs.detach().permute(0, 2, 3, 1), 1e-5)
    grads = jax.grad(lambda x, w: jnp.sin(ours(x, w)).sum(), argnums=(0, 1))(x, w)
    assert_close(grads[0], images.grad.permute(0, 2, 3, 1), 1e-5)
    assert_close(grads[1], weights.grad.permute(2, 3, 1, 0), 1e-5)
    if backend.rewrites_layers():
        assert ("conv_general_dilated" in str(jax.make_jaxpr(ours)(x, w))) != narrow
    each = jax.vmap(ours, in_axes=(None, 0))(x, jnp.stack([w, 2 * w]))  # kernels of each task
    assert_close(each[1], 2 * ours(x, w), 1e-5)


@pytest.mark.parametrize(
    "size, kernel, pad", [((9, 12), 5, 0), ((9, 12), 5, 2), ((7, 6), 5, 1), ((10, 9), 7, 3), ((5, 8), 5, 2)]
)
@pytest.mark.parametrize("tasks", [(None, None), (0, None), (0, 0)], ids=["one", "shared kernel", "own kernels"])
def test_the_backward_pass_in_pieces_equals_torch(peer, monkeypatch, size, kernel, pad, tasks):
    """Of large convolutions on CPUs; so also under vmap, over images alone and over kernels of each task."""
    monkeypatch.setattr(convolution, "LARGE", 0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, *size, 4)).astype(np.float32)
    w = rng.normal(size=(2, kernel, kernel, 4, 5)).astype(np.float32)

    def ours(x, w):
        return jnp.sin(convolve(x, w, (1, 1), ((pad, pad), (pad, pad)))).sum()

    one = tasks == (None, None)
    loss = ours if one else lambda x, w: jax.vmap(ours, tasks)(x, w).sum()
    arguments = (x[0], w[0]) if one else (x, w if tasks[1] == 0 else w[0])
    ours_grads = jax.grad(loss, argnums=(0, 1))(*arguments)
    if backend.rewrites_layers():
        assert "custom_vjp" in str(jax.make_jaxpr(loss)(*arguments))
    theirs = [np.zeros_like(a) for a in (x, w)]
    for i in range(1 if one else 2):
        j = i if tasks[1] == 0 else 0
        images, weights = nchw(x[i]).requires_grad_(), peer.torch.tensor(w[j].transpose(3, 2, 0, 1)).requires_grad_()
        peer.F.conv2d(images, weights, padding=pad).sin().sum().backward()
        theirs[0][i] += images.grad.permute(0, 2, 3, 1).numpy()
        theirs[1][j] += weights.grad.permute(2, 3, 1, 0).numpy()
    assert_close(ours_grads[0], theirs[0][0] if one else theirs[0], 1e-5)
    assert_close(ours_grads[1], theirs[1] if tasks[1] == 0 else theirs[1][0], 1e-5)


def objective_of(moments, scale_and_shift):
    """A scalar that depends on everything moments and scale_and_shift give, and not only through normalised values."""

    def objective(x, scale, bias):
        mean, var = moments(x)
        factor = scale * jax.lax.rsqrt(var + 1e-5)
        y = scale_and_shift(x, factor, bias - mean * factor)
        return (jnp.sin(y) * jnp.arange(y.size).reshape(y.shape) / y.size).sum() + (mean * var).sum()

    return jax.value_and_grad(objective, (0, 1, 2))


@pytest.mark.parametrize("shape", [(6, 5, 5, 3), (40, 3)])
def test_batch_norm_gradients_equal_autodiff(shape):
    def naive_moments(x):
        axes = tuple(range(x.ndim - 1))
        return x.mean(axes), x.var(axes)

    ours = objective_of(moments, scale_and_shift)
    naive = objective_of(naive_moments, lambda x, factor, shift: x * factor + shift)
    rng = np.random.default_rng(0)
    episodes = [
        tuple(jnp.asarray(rng.normal(1, 2, s), jnp.float32) for s in (shape, shape[-1:], shape[-1:])) for _ in range(3)
    ]
    for episode in episodes:
        jax.tree.map(lambda a, b: assert_close(a, b, 1e-5), ours(*episode), naive(*episode))
    stacked = jax.vmap(ours)(*(jnp.stack(parts) for parts in zip(*episodes, strict=True)))
    looped = jax.tree.map(lambda *parts: jnp.stack(parts), *(ours(*episode) for episode in episodes))
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5), stacked, looped)


@pytest.mark.usefixtures("full_compilation")
@pytest.mark.parametrize("shape", [(100_000, 4), (100, 25, 40, 4), (99_991, 2)], ids=["rows", "images", "a prime"])
def test_statistics_of_many_rows_are_those_of_float64(shape):
    """And so are the gradients that are sums over as many."""
    rng = np.random.default_rng(0)
    x, grad = (rng.normal(1, 1, shape).astype(np.float32) for _ in range(2))
    rows, grads = (np.asarray(a, np.float64).reshape(-1, shape[-1]) for a in (x, grad))
    tasks = jnp.asarray(np.stack([x, x[::-1]]))
    for mean, var in (moments(jnp.asarray(x)), [m[0] for m in jax.vmap(moments)(tasks)]):
        np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-6)
        np.testing.assert_allclose(var, rows.var(0), rtol=1e-6)
    ones = jnp.ones(shape[-1:])
    _, factor, shift = jax.vjp(scale_and_shift, jnp.asarray(x), ones, ones)[1](jnp.asarray(grad))
    np.testing.assert_allclose(factor, (grads * rows).sum(0), rtol=1e-6)
    np.testing.assert_allclose(shift, grads.sum(0), rtol=1e-6)
