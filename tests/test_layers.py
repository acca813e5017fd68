"""Convolution, pooling and normalisation against PyTorch, automatic differentiation and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax import backend
from cxda_jax.nets import convolution
from cxda_jax.nets.convolution import NUMBERS, convolve, max_pool
from cxda_jax.nets.normalisation import BatchNorm, moments, scale_and_shift
from tests.nets import assert_close, close, nchw

PLATFORMS = "cpu", "gpu", "tpu"  # for which layers have forms of their own; any machine can run them


@pytest.mark.parametrize(("size", "window"), [
    *((size, (2, 2, 0)) for size in [(8, 6), (7, 5), (2, 3)]), *((size, (3, 2, 1)) for size in [(9, 7), (8, 6), (4, 4)])
])  # fmt: skip
def test_max_pool_equals_torch(peer, size, window):
    """Windows of 2 pixels, and of 3 pixels with a padded border, in the forms for each platform."""
    (x,), (side, stride, pad) = normal((3, *size, 4)), window
    theirs = nchw(x).requires_grad_()
    pooled = peer.F.max_pool2d(theirs, side, stride, padding=pad)
    pooled.sin().sum().backward()
    for platform in PLATFORMS:
        with backend.target(platform):
            np.testing.assert_array_equal(max_pool(jnp.asarray(x), *window), pooled.detach().permute(0, 2, 3, 1))
            grad = jax.grad(lambda x: jnp.sin(max_pool(x, *window)).sum())(x)
            each = jax.vmap(jax.grad(lambda x: jnp.sin(max_pool(x, *window)).sum()))(x)
        assert_close(grad, theirs.grad.permute(0, 2, 3, 1), 1e-6)
        assert_close(each, grad, 1e-6)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_of_equal_values_accelerators_choose_the_first_as_torch_does(peer, platform):
    x = np.random.default_rng(0).integers(0, 3, (2, 8, 6, 5)).astype(np.float32)
    theirs = nchw(x).requires_grad_()
    peer.F.max_pool2d(theirs, 2, 2).sin().sum().backward()
    with backend.target(platform):
        grad = jax.grad(lambda x: jnp.sin(max_pool(x)).sum())(x)
    assert_close(grad, theirs.grad.permute(0, 2, 3, 1), 1e-6)


def torch_convolution(peer, x, w, stride, pad):
    """PyTorch's output, and the gradients of the sum of its sines by images and kernel, in our layouts."""
    images, weights = nchw(x).requires_grad_(), peer.torch.tensor(w.transpose(3, 2, 0, 1)).requires_grad_()
    output = peer.F.conv2d(images, weights, stride=stride, padding=pad)
    output.sin().sum().backward()
    return output.detach().permute(0, 2, 3, 1), images.grad.permute(0, 2, 3, 1), weights.grad.permute(2, 3, 1, 0)


def normal(*shapes):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("size, kernel, stride, narrow", [
    ((2, 2), 3, 1, True), ((4, 4), 3, 2, True), ((4, 9), 3, 2, True), ((1, 1), 3, 1, True), ((6, 5), 1, 1, True),
    ((6, 5), 1, 2, True), ((3, 3), 3, 1, False), ((8, 6), 3, 2, False), ((4, 4), 7, 2, True),
])  # fmt: skip
def test_convolutions_equal_torch_in_each_form(peer, size, kernel, stride, narrow):
    x, w = normal((3, *size, 4), (kernel, kernel, 4, 5))
    pad = kernel // 2

    def ours(x, w):
        return convolve(x, w, (stride, stride), ((pad, pad), (pad, pad)), dimension_numbers=NUMBERS)

    grads = jax.grad(lambda x, w: jnp.sin(ours(x, w)).sum(), argnums=(0, 1))(x, w)
    for mine, theirs in zip((ours(x, w), *grads), torch_convolution(peer, x, w, stride, pad), strict=True):
        assert_close(mine, theirs, 1e-5)
    if backend.rewrites_layers():
        assert ("conv_general_dilated" in str(jax.make_jaxpr(ours)(x, w))) != narrow
    each = jax.vmap(ours, in_axes=(None, 0))(x, jnp.stack([w, 2 * w]))  # kernels of each task
    assert_close(each[1], 2 * ours(x, w), 1e-5)


@pytest.mark.parametrize(
    "size, kernel, pad", [((9, 12), 5, 0), ((9, 12), 5, 2), ((7, 6), 5, 1), ((10, 9), 7, 3), ((5, 8), 5, 2)]
)
@pytest.mark.parametrize("form", ["one", "shared kernel", "own kernels"])
def test_the_backward_pass_in_pieces_equals_torch(peer, monkeypatch, size, kernel, pad, form):
    """Of large convolutions on CPUs; so also under vmap, over images alone and over kernels of each task."""
    monkeypatch.setattr(convolution, "LARGE", 0)
    x, w = normal((2, 3, *size, 4), (2, kernel, kernel, 4, 5))

    def ours(x, w):
        return jnp.sin(convolve(x, w, (1, 1), ((pad, pad), (pad, pad)))).sum()

    kernels = w if form == "own kernels" else w[[0, 0]]
    (_, x0, w0), (_, x1, w1) = (torch_convolution(peer, *task, 1, pad) for task in zip(x, kernels, strict=True))
    loss, arguments, theirs = {
        "one": (ours, (x[0], w[0]), (x0, w0)),
        "shared kernel": (lambda x, w: jax.vmap(ours, (0, None))(x, w).sum(), (x, w[0]), (np.stack([x0, x1]), w0 + w1)),
        "own kernels": (lambda x, w: jax.vmap(ours)(x, w).sum(), (x, w), (np.stack([x0, x1]), np.stack([w0, w1]))),
    }[form]
    for mine, expected in zip(jax.grad(loss, argnums=(0, 1))(*arguments), theirs, strict=True):
        assert_close(mine, expected, 1e-5)
    if backend.rewrites_layers():
        assert "custom_vjp" in str(jax.make_jaxpr(loss)(*arguments))


def objective_of(moments, scale_and_shift):
    """A scalar that depends on everything moments and scale_and_shift give, and not only through normalised values."""

    def objective(x, scale, bias):
        mean, var = moments(x)
        factor = scale * jax.lax.rsqrt(var + 1e-5)
        y = scale_and_shift(x, factor, bias - mean * factor)
        return (jnp.sin(y) * jnp.arange(y.size).reshape(y.shape) / y.size).sum() + (mean * var).sum()

    return jax.value_and_grad(objective, (0, 1, 2))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("shape", [(6, 5, 5, 3), (40, 3)])
def test_batch_norm_gradients_equal_autodiff(shape, platform):
    axes = tuple(range(len(shape) - 1))
    naive = objective_of(lambda x: (x.mean(axes), x.var(axes)), lambda x, factor, shift: x * factor + shift)
    ours, rng = objective_of(moments, scale_and_shift), np.random.default_rng(0)
    stacked = [jnp.asarray(rng.normal(1, 2, (3, *s)), jnp.float32) for s in (shape, shape[-1:], shape[-1:])]
    episodes = list(zip(*stacked, strict=True))
    with backend.target(platform):
        for episode in episodes:
            close(ours(*episode), naive(*episode))
        close(jax.vmap(ours)(*stacked), jax.tree.map(lambda *parts: jnp.stack(parts), *(ours(*e) for e in episodes)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_normalising_with_relu_on_accelerators_equals_the_plain_path(dtype):
    """Values, statistics and gradients of the layer in training, against its form for CPUs in float32."""
    rng, layer = np.random.default_rng(0), BatchNorm(rectified=True)
    x = jnp.asarray(rng.normal(3, 2, (8, 6, 6, 5)), dtype)
    variables = layer.init(jax.random.key(0), x)
    variables = {**variables, "params": jax.tree.map(lambda p: p + rng.normal(0, 0.3, p.shape), variables["params"])}

    def objective(params, x):
        y, stats = layer.apply({**variables, "params": params}, x, True, mutable=["batch_stats"])
        return (jnp.sin(y.astype(jnp.float32)) * jnp.arange(y.size).reshape(y.shape) / y.size).sum(), (y, stats)

    (loss, (y, stats)), grads = jax.value_and_grad(objective, (0, 1), has_aux=True)(
        variables["params"], x.astype(jnp.float32)
    )
    with backend.target("gpu"):
        (own_loss, (own_y, own_stats)), own = jax.value_and_grad(objective, (0, 1), has_aux=True)(
            variables["params"], x
        )
    assert own_y.dtype == own[1].dtype == dtype and own[0]["scale"].dtype == jnp.float32
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    for mine, plain in zip(jax.tree.leaves((own_loss, own_y, own)), jax.tree.leaves((loss, y, grads)), strict=True):
        assert_close(mine.astype(jnp.float32), plain, tolerance)
    close(own_stats, stats)


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
