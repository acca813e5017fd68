"""Convolution, pooling and normalisation against PyTorch, automatic differentiation and float64.

Layers have forms of their own for some platforms, which any machine can run. Each form is one program for all sizes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax import backend
from cxda_jax.bench.cases import Case, prepare
from cxda_jax.nets import convolution
from cxda_jax.nets.convolution import NUMBERS, convolve, max_pool
from cxda_jax.nets.normalisation import BatchNorm, moments, scale_and_shift
from tests.nets import assert_close, nchw, tensor

pytestmark = pytest.mark.gate
RNG = np.random.default_rng(0)


def normal(*shape, mean=0.0, scale=1.0):
    return RNG.normal(mean, scale, shape).astype(np.float32)


def nhwc(tensor):
    return tensor.detach().permute(0, 2, 3, 1).numpy()


WINDOWS = [  # sizes of maps, and the windows' side, stride and padding
    ((8, 6), (2, 2, 0)), ((7, 5), (2, 2, 0)), ((2, 3), (2, 2, 0)), ((9, 7), (3, 2, 1)), ((8, 6), (3, 2, 1)),
]  # fmt: skip


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_max_pool_equals_torch(peer, platform):
    """Values and gradients, under vmap too; of equal values accelerators choose the first, as PyTorch does."""
    maps, windows = [normal(3, *size, 4) for size, _ in WINDOWS], [window for _, window in WINDOWS]
    if platform != "cpu":
        maps.append(RNG.integers(0, 3, (3, 8, 6, 4)).astype(np.float32))
        windows.append((2, 2, 0))

    @jax.jit
    def ours(maps):
        def objective(x, window):
            pooled = max_pool(x, *window)
            return jnp.sin(pooled).sum(), pooled

        found = []
        for x, window in zip(maps, windows, strict=True):
            gradient = jax.grad(functools.partial(objective, window=window), has_aux=True)
            grad, pooled = gradient(x)
            found.append((pooled, grad, jax.vmap(gradient)(x)[0]))
        return found

    with backend.target(platform):
        found = ours(maps)
    for x, (side, stride, pad), (pooled, grad, each) in zip(maps, windows, found, strict=True):
        image = nchw(x).requires_grad_()
        theirs = peer.F.max_pool2d(image, side, stride, padding=pad)
        theirs.sin().sum().backward()
        np.testing.assert_array_equal(pooled, nhwc(theirs))
        assert_close(grad, nhwc(image.grad), 1e-6)
        assert_close(each, grad, 1e-6)


def torch_convolution(peer, x, w, stride, pad):
    """PyTorch's output, and the gradients of the sum of its sines by images and kernel, in our layouts."""
    images, weights = nchw(x).requires_grad_(), peer.torch.tensor(w.transpose(3, 2, 0, 1)).requires_grad_()
    output = peer.F.conv2d(images, weights, stride=stride, padding=pad)
    output.sin().sum().backward()
    return nhwc(output), nhwc(images.grad), weights.grad.permute(2, 3, 1, 0).numpy()


CONVOLUTIONS = [  # the maps' size, the kernel's, the stride, and whether it is a product of matrices on CPUs
    ((2, 2), 3, 1, True), ((4, 9), 3, 2, True), ((1, 1), 3, 1, True), ((6, 5), 1, 2, True), ((3, 3), 3, 1, False),
    ((8, 6), 3, 2, False), ((4, 4), 7, 2, True),
]  # fmt: skip


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_convolutions_equal_torch_in_each_form(peer, platform):
    given = [(normal(3, *size, 4), normal(kernel, kernel, 4, 5)) for size, kernel, *_ in CONVOLUTIONS]

    def form(x, w, kernel, stride):
        pad = kernel // 2
        return convolve(x, w, (stride, stride), ((pad, pad), (pad, pad)), dimension_numbers=NUMBERS)

    @jax.jit
    def ours(given):
        found = []
        for (x, w), (_, kernel, stride, _) in zip(given, CONVOLUTIONS, strict=True):
            made = functools.partial(form, kernel=kernel, stride=stride)
            output, back = jax.vjp(made, x, w)
            each = jax.vmap(made, in_axes=(None, 0))(x, jnp.stack([w, 2 * w]))  # kernels of each task
            found.append((output, *back(jnp.cos(output)), each[1]))
        return found

    with backend.target(platform):
        all_found = ours(given)
    for (x, w), (_, kernel, stride, products), found in zip(given, CONVOLUTIONS, all_found, strict=True):
        theirs = torch_convolution(peer, x, w, stride, kernel // 2)
        for mine, expected in zip(found, (*theirs, 2 * theirs[0]), strict=True):
            assert_close(mine, expected, 1e-5)
        if platform == "cpu" and backend.rewrites_layers():
            traced = jax.make_jaxpr(functools.partial(form, kernel=kernel, stride=stride))(x, w)
            assert ("conv_general_dilated" in str(traced)) != products


PIECES = [((9, 12), 5, 0), ((9, 12), 5, 2), ((10, 9), 7, 3), ((5, 8), 5, 2)]


def test_the_backward_pass_in_pieces_equals_torch(peer, monkeypatch):
    """Of large convolutions on CPUs; so also under vmap, over images alone and over kernels of each task."""
    monkeypatch.setattr(convolution, "LARGE", 0)
    given = [(normal(2, 3, *size, 4), normal(2, kernel, kernel, 4, 5)) for size, kernel, _ in PIECES]

    def loss_of(pad):
        return lambda x, w: jnp.sin(convolve(x, w, (1, 1), ((pad, pad), (pad, pad)))).sum()

    def gradient(i, x, w):
        loss, axes = loss_of(PIECES[i][2]), (0, None) if i % 2 else (0, 0)
        return jax.grad(lambda x, w: jax.vmap(loss, axes)(x, w).sum(), (0, 1))(x, w[0] if i % 2 else w)

    (x, w), pad = given[1], PIECES[1][2]
    alone, found = jax.jit(
        lambda: (jax.grad(loss_of(pad), (0, 1))(x[0], w[0]), [gradient(i, *one) for i, one in enumerate(given)])
    )()
    assert_close(alone[0], found[1][0][0], 1e-6)
    if backend.rewrites_layers():
        assert "custom_vjp" in str(jax.make_jaxpr(loss_of(pad))(x[0], w[0]))
    for i, ((x, w), (_, _, pad), mine) in enumerate(zip(given, PIECES, found, strict=True)):
        tasks = [torch_convolution(peer, x[t], w[0 if i % 2 else t], 1, pad)[1:] for t in (0, 1)]
        kernels = np.stack([w for _, w in tasks])
        assert_close(mine[0], np.stack([x for x, _ in tasks]), 1e-5)
        assert_close(mine[1], kernels.sum(0) if i % 2 else kernels, 1e-5)


@pytest.mark.parametrize(("platform", "dtype"), [("cpu", "float32"), ("gpu", "float32"), ("gpu", "bfloat16")])
def test_batch_norm_with_relu_equals_torch(peer, platform, dtype):
    """Values, statistics and gradients in training, alone and of each task under vmap."""
    layer, tolerance = BatchNorm(rectified=True), {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    x, scale, bias = normal(2, 8, 6, 5, 3, mean=1, scale=2), normal(2, 3, mean=1, scale=0.3), normal(2, 3, scale=0.3)
    x = np.asarray(jnp.asarray(x, dtype), np.float32)  # as both see it
    factors = np.arange(x[0].size, dtype=np.float32).reshape(x[0].shape) / x[0].size

    def objective(scale, bias, x):
        variables = {"params": {"scale": scale, "bias": bias}, "batch_stats": {"mean": 0 * bias, "var": 1 + 0 * bias}}
        y, new = layer.apply(variables, x.astype(dtype), True, mutable=["batch_stats"])
        mean, var = new["batch_stats"]["mean"], new["batch_stats"]["var"]
        return (jnp.sin(y.astype(jnp.float32)) * factors).sum() + (mean * var).sum(), (y, mean, var)

    graded = jax.value_and_grad(objective, (0, 1, 2), has_aux=True)
    with backend.target(platform):
        found = jax.jit(lambda *x: (jax.vmap(graded)(*x), graded(*(part[0] for part in x))))(scale, bias, x)
    together, ((_, aux), _) = found
    assert aux[0].dtype == dtype and aux[1].dtype == "float32"
    first, second = (jax.tree.map(lambda leaf, i=i: leaf[i], together) for i in (0, 1))
    for task, ours in ((0, found[1]), (0, first), (1, second)):
        given = [tensor(part[task]).requires_grad_() for part in (scale, bias, x)]
        images = given[2].permute(0, 3, 1, 2)
        y = peer.F.relu(peer.F.batch_norm(images, None, None, *given[:2], True)).permute(0, 2, 3, 1)
        var, mean = peer.torch.var_mean(images, (0, 2, 3), correction=0)
        loss = (y.sin() * tensor(factors)).sum() + (mean * var).sum()
        loss.backward()
        theirs = (loss, (y, mean, var)), tuple(part.grad for part in given)
        for mine, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert_close(np.asarray(mine, np.float32), expected.detach(), tolerance)


@pytest.mark.usefixtures("full_compilation")
@pytest.mark.parametrize("shape", [(100, 25, 40, 4), (99_991, 2)], ids=["images", "a prime"])
def test_statistics_of_many_rows_are_those_of_float64(shape):
    """And so are the gradients that are sums over as many."""
    x, grad = (normal(*shape, mean=1) for _ in range(2))
    rows, grads = (np.asarray(a, np.float64).reshape(-1, shape[-1]) for a in (x, grad))

    @jax.jit
    def measured(x, grad):
        ones = jnp.ones(shape[-1:])
        sums = jax.vjp(scale_and_shift, x, ones, ones)[1](grad)[1:]
        return moments(x), [m[0] for m in jax.vmap(moments)(jnp.stack([x, x[::-1]]))], sums

    *of_rows, (factor, shift) = measured(x, grad)
    for mean, var in of_rows:
        np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-6)
        np.testing.assert_allclose(var, rows.var(0), rtol=1e-6)
    np.testing.assert_allclose(factor, (grads * rows).sum(0), rtol=1e-6)
    np.testing.assert_allclose(shift, grads.sum(0), rtol=1e-6)


def test_a_step_in_the_form_of_gpus_equals_that_of_cpus():
    """There support and query pass the network together, and the first layer is a product: the loss and all gradients."""
    case = Case("femnist", "cxda", "train", width=8)

    def step():
        made, episodes, state = prepare(case, small=True)
        episode = jax.tree.map(lambda x: x[0], episodes)

        def loss(params):
            return made.loss({**state.variables, "params": params}, episode, jax.random.key(0))

        return jax.tree.leaves(jax.jit(jax.value_and_grad(loss, has_aux=True))(state.variables["params"]))

    expected = step()
    with backend.target("gpu"):
        found = step()
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-5)
