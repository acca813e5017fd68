"""Convolution, pooling and normalisation against PyTorch, automatic differentiation and float64.

Layers have forms of their own for some platforms, which any machine can run. Each form is one program for all sizes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax.machine import backend
from cxda_jax.nets import convolution
from cxda_jax.nets.convolution import NUMBERS, convolve, max_pool
from cxda_jax.nets.normalisation import BatchNorm, moments, scale_and_shift
from tests.nets import assert_close, nchw, tensor
from tools.bench.cases import Case, prepare

RNG = np.random.default_rng(0)
# Sizes of maps, and the windows' side, stride and padding.
WINDOWS = [((7, 5), (2, 2, 0)), ((2, 3), (2, 2, 0)), ((9, 7), (3, 2, 1)), ((8, 6), (3, 2, 1))]
CONVOLUTIONS = [  # the maps' size, the kernel's, the stride, and whether it is a product of matrices on CPUs
    ((2, 2), 3, 1, True), ((4, 9), 3, 2, True), ((1, 1), 3, 1, True), ((6, 5), 1, 2, True), ((3, 3), 3, 1, False),
    ((8, 6), 3, 2, False), ((4, 4), 7, 2, True),
]  # fmt: skip
PIECES = [((9, 12), 5, 2), ((5, 8), 7, 3)]  # the maps' size, the kernel's and the padding


def normal(*shape, mean=0.0, scale=1.0):
    return RNG.normal(mean, scale, shape).astype(np.float32)


def nhwc(tensor):
    return tensor.detach().permute(0, 2, 3, 1).numpy()


def differentiated(layer, *arguments):
    """The output of a layer, and the gradients of the sum of its sines by its arguments."""
    output, back = jax.vjp(layer, *arguments)
    return output, *back(jnp.cos(output))


def torch_differentiated(layer, x, *kernels):
    """The same by PyTorch, in our layouts."""
    images, weights = nchw(x).requires_grad_(), [tensor(w.transpose(3, 2, 0, 1)).requires_grad_() for w in kernels]
    output = layer(images, *weights)
    output.sin().sum().backward()
    return nhwc(output), nhwc(images.grad), *(w.grad.permute(2, 3, 1, 0).numpy() for w in weights)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_max_pool_equals_torch(peer, platform):
    """Values and gradients, under vmap too; of equal values accelerators choose the first, as PyTorch does."""
    maps, windows = [normal(3, *size, 4) for size, _ in WINDOWS], [window for _, window in WINDOWS]
    if platform != "cpu":
        maps.append(RNG.integers(0, 3, (3, 8, 6, 4)).astype(np.float32))
        windows.append((2, 2, 0))

    @jax.jit
    def ours(maps):
        forms = [functools.partial(differentiated, lambda x, w=w: max_pool(x, *w)) for w in windows]
        return [(*form(x), jax.vmap(form)(x)[1]) for form, x in zip(forms, maps, strict=True)]

    with backend.target(platform):
        found = ours(maps)
    for x, window, (pooled, grad, each) in zip(maps, windows, found, strict=True):
        theirs = torch_differentiated(lambda x, w=window: peer.F.max_pool2d(x, *w), x)
        np.testing.assert_array_equal(pooled, theirs[0])
        assert_close(grad, theirs[1], 1e-6)
        assert_close(each, grad, 1e-6)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_convolutions_equal_torch_in_each_form(peer, platform):
    given = [(normal(3, *size, 4), normal(kernel, kernel, 4, 5)) for size, kernel, *_ in CONVOLUTIONS]

    def form(x, w, stride):
        pad = len(w) // 2
        return convolve(x, w, (stride, stride), ((pad, pad), (pad, pad)), dimension_numbers=NUMBERS)

    forms = [functools.partial(form, stride=stride) for *_, stride, _ in CONVOLUTIONS]

    @jax.jit
    def ours(given):
        found = []
        for form, (x, w) in zip(forms, given, strict=True):
            each = jax.vmap(form, (None, 0))(x, jnp.stack([w, 2 * w]))  # kernels of each task
            found.append((*differentiated(form, x, w), each[1]))
        return found

    with backend.target(platform):
        all_found = ours(given)
    for one, form, (_, kernel, stride, products), found in zip(given, forms, CONVOLUTIONS, all_found, strict=True):
        theirs = torch_differentiated(functools.partial(peer.F.conv2d, stride=stride, padding=kernel // 2), *one)
        for mine, expected in zip(found, (*theirs, 2 * theirs[0]), strict=True):
            assert_close(mine, expected, 1e-5)
        if platform == "cpu" and backend.rewrites_layers():
            assert ("conv_general_dilated" in str(jax.make_jaxpr(form)(*one))) != products


def test_the_backward_pass_in_pieces_equals_torch(peer, monkeypatch):
    """Of large convolutions on CPUs; so also under vmap, over images alone and over kernels of each task."""
    monkeypatch.setattr(convolution, "LARGE", 0)
    given = [(normal(2, 3, *size, 4), normal(2, kernel, kernel, 4, 5)) for size, kernel, _ in PIECES]

    def gradient(i, x, w):
        form = functools.partial(convolve, strides=(1, 1), padding=((PIECES[i][2],) * 2,) * 2)
        together = jax.vmap(form, (0, None) if i else (0, 0))
        return differentiated(together, x, w[0] if i else w)[1:], differentiated(form, x[0], w[0])[1:]

    found = jax.jit(lambda: [gradient(i, *one) for i, one in enumerate(given)])()
    for i, ((x, w), (_, _, pad), (mine, alone)) in enumerate(zip(given, PIECES, found, strict=True)):
        conv = functools.partial(peer.F.conv2d, padding=pad)
        tasks = [torch_differentiated(conv, x[t], w[0 if i else t])[1:] for t in (0, 1)]
        kernels = np.stack([w for _, w in tasks])
        for ours, theirs in zip(alone, tasks[0], strict=True):
            assert_close(ours, theirs, 1e-5)
        assert_close(mine[0], np.stack([x for x, _ in tasks]), 1e-5)
        assert_close(mine[1], kernels.sum(0) if i else kernels, 1e-5)


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
def test_statistics_of_many_rows_are_those_of_float64():
    """And so are the gradients that are sums over as many. The number of rows is a prime."""
    rows, grads = normal(99_991, 2, mean=1), normal(99_991, 2, mean=1)

    @jax.jit
    def measured(x, grad):
        ones = jnp.ones(2)
        sums = jax.vjp(scale_and_shift, x, ones, ones)[1](grad)[1:]
        return moments(x), [m[0] for m in jax.vmap(moments)(jnp.stack([x, x[::-1]]))], sums

    *of_rows, sums = measured(rows, grads)
    rows, grads = np.float64(rows), np.float64(grads)
    expected = (rows.mean(0), rows.var(0)), ((grads * rows).sum(0), grads.sum(0))
    for found, exact in zip((*of_rows, sums), (expected[0], *expected), strict=True):
        np.testing.assert_allclose(found, exact, rtol=1e-6)


def test_a_step_in_the_form_of_gpus_equals_that_of_cpus():
    """There support and query pass the network together, and the first layer is a product: loss and gradients."""
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
