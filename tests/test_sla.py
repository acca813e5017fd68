"""SLA's gates and adapters against PyTorch and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax.losses import cross_entropy
from cxda_jax.methods.erm import erm
from cxda_jax.methods.sla import sla
from cxda_jax.nets.adapters import LatentAdapters, sparsemax
from cxda_jax.nets.cnn import CNNTrunk
from cxda_jax.nets.resnet import Bottleneck, ResNetTrunk
from tests.nets import (
    CIFAR,
    FEMNIST,
    KEY,
    TorchLayers,
    assert_close,
    assert_within_some_draw,
    close,
    fill,
    initialised,
    make_images,
    make_net,
    nchw,
    tensor,
    total,
)  # fmt: skip


def numpy_sparsemax(z):
    """The sorted closed form of Martins and Astudillo (2016), row by row."""
    rows = []
    for row in z.astype(np.float64):
        u = np.sort(row)[::-1]
        k = max(k for k in range(1, len(u) + 1) if 1 + k * u[k - 1] > u[:k].sum())
        rows.append(np.maximum(row - (u[:k].sum() - 1) / k, 0))
    return np.array(rows)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_sparsemax_equals_the_sorted_closed_form_and_projects(count, scale):
    rng = np.random.default_rng(count)
    z = rng.normal(0, scale, (50, count)).astype(np.float32)
    ours = np.asarray(sparsemax(jnp.asarray(z)))
    np.testing.assert_allclose(ours, numpy_sparsemax(z), atol=2e-6)
    np.testing.assert_allclose(ours.sum(-1), 1, atol=1e-5)
    assert (ours >= 0).all()
    others = rng.dirichlet(np.ones(count), 2000)  # no other point of the simplex is nearer
    nearest = np.linalg.norm(others[None] - z[:, None], axis=-1).min(1)
    assert (np.linalg.norm(ours - z, axis=-1) <= nearest + 1e-5).all()


def test_two_gates_have_the_closed_form_and_its_gradient():
    differences = np.array([-3.0, -1.01, -0.99, -0.2, 0.0, 0.7, 0.99, 1.01, 5.0], np.float32)
    z = jnp.stack([jnp.asarray(differences), jnp.zeros(len(differences))], -1)
    np.testing.assert_allclose(sparsemax(z)[:, 0], np.clip((differences + 1) / 2, 0, 1), atol=1e-6)
    grads = jax.vmap(jax.grad(lambda row: sparsemax(row)[0]))(z)
    inside = np.abs(differences) < 1
    np.testing.assert_allclose(grads, np.stack([0.5 * inside, -0.5 * inside], -1), atol=1e-6)


@pytest.mark.parametrize(("count", "crop"), [(2, 0), (3, 2)])
def test_adapters_equal_torch(peer, count, crop):
    x = make_images((9, 8, 5), 6).pixels * 4
    module = LatentAdapters(7, count, crop)
    params = fill(jax.eval_shape(module.init, KEY, x))["params"]
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(count, 5, 7)), jnp.float32)
    params = {**params, "mix": {"weight": weight}}
    theirs = jax.tree.map(lambda leaf: tensor(leaf).requires_grad_(), params)
    image = nchw(x).requires_grad_()
    z = image.mean((2, 3)) @ theirs["gate"]["kernel"] + theirs["gate"]["bias"]
    # Sparsemax by its definition, from the support that the closed form gives.
    kept = tensor(numpy_sparsemax(z.detach().numpy()) > 0)
    tau = ((z * kept).sum(-1, keepdim=True) - 1) / kept.sum(-1, keepdim=True)
    inner = image[:, :, crop : 9 - crop, crop : 8 - crop]
    expected = peer.torch.einsum("nk,nihw,kio->nhwo", (z - tau) * kept, inner, theirs["mix"]["weight"])
    assert_close(module.apply({"params": params}, x), expected.detach(), 1e-5)
    expected.sin().sum().backward()
    grads, to_x = jax.jit(jax.grad(lambda p, x: jnp.sin(module.apply({"params": p}, x)).sum(), (0, 1)))(params, x)
    close(grads, jax.tree.map(lambda leaf: leaf.grad, theirs), 1e-4)
    assert all(leaf.grad.abs().max() > 0.01 for leaf in jax.tree.leaves(theirs))
    assert_close(to_x, image.grad.permute(0, 2, 3, 1), 1e-4)


def make(shape, classes, width=16, **options):
    net = make_net(shape, classes).clone(trunk=CNNTrunk(width, **options))
    return net, sla(net)


@pytest.mark.parametrize(("benchmark", "convs"), [(FEMNIST, 3), (CIFAR, 2)], ids=["femnist", "cifar"])
def test_the_network_equals_torch(peer, benchmark, convs):
    (shape, classes), (net, method) = benchmark, make(*benchmark, adapters=2, convs=convs)
    variables, images = initialised(method, shape), make_images(shape, 9, 3)
    layers = TorchLayers(peer, variables)

    def adapters(x, name, crop):
        gates, weight = layers.dense(x.mean((2, 3)), f"{name}.gate"), layers.params[f"{name}.mix.weight"]
        first = ((gates[:, 0] - gates[:, 1] + 1) / 2).clamp(0, 1)[:, None, None, None]
        inner = x[:, :, crop : x.shape[2] - crop, crop : x.shape[3] - crop]
        one, two = (peer.F.conv2d(inner, weight[:, :, k, None, None]) for k in range(2))
        return first * one + (1 - first) * two

    def theirs(images, batch):
        return layers.cnn(nchw(images.pixels), convs, batch, adapters)

    assert_close(method.predict(variables, images), theirs(images, False).detach(), 1e-5)
    labels = jnp.arange(9) % classes

    @jax.jit
    @jax.grad
    def gradient(params, pixels):
        logits = net.apply({**variables, "params": params}, pixels, True, mutable=["batch_stats"])[0]
        return cross_entropy(logits, labels)

    def error_of(seed):
        images = make_images(shape, 9, seed)
        return layers.error(theirs(images, True), labels, gradient(variables["params"], images.pixels))

    assert_within_some_draw(error_of)


@pytest.mark.parametrize(("benchmark", "extra"), [(FEMNIST, 66_312), (CIFAR, 66_828)], ids=["femnist", "cifar"])
def test_parameter_counts(benchmark, extra):
    shape, classes = benchmark
    plain, adapted, two = (
        total(jax.eval_shape(make(shape, classes, 128, **options)[1].init, KEY, make_images(shape, 2))["params"])
        for options in ({}, {"adapters": 2}, {"convs": 2})
    )
    assert adapted == plain + extra and two == plain - (25 * 128 * 128 + 3 * 128)


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_block_of_resnet_with_adapters_equals_torch(peer, everywhere):
    """Beside the 3x3 convolution alone, or beside all four; one of those with a kernel of one pixel has a stride too."""
    x, block = make_images((8, 8, 12), 5).pixels, Bottleneck(4, 2, adapters=2, all_convs=everywhere)
    variables = fill(jax.eval_shape(block.init, KEY, x))
    params = variables["params"]
    beside = ["adapters1", "adapters2", "adapters3", "downsample_adapters"] if everywhere else ["adapters2"]
    assert {name for name in params if "adapters" in name} == set(beside)

    def layer(image, conv, norm, stride=1):
        kernel = tensor(params[conv]["kernel"]).permute(3, 2, 0, 1)
        y = peer.F.conv2d(image, kernel, stride=stride, padding=kernel.shape[-1] // 2)
        if (name := conv.replace("conv", "adapters")) in beside:
            gate, weight = params[name]["gate"], tensor(params[name]["mix"]["weight"])
            z = image.mean((2, 3)) @ tensor(gate["kernel"]) + tensor(gate["bias"])
            first = ((z[:, 0] - z[:, 1] + 1) / 2).clamp(0, 1)[:, None, None, None]
            one, two = (peer.F.conv2d(image, w.T[:, :, None, None], stride=stride) for w in weight)
            y = y + first * one + (1 - first) * two
        scale, bias = (tensor(params[norm][kind]) for kind in ("scale", "bias"))
        mean, var = (tensor(variables["batch_stats"][norm][kind]) for kind in ("mean", "var"))
        return peer.F.batch_norm(y, mean, var, scale, bias)

    image = nchw(x)
    y = peer.F.relu(layer(image, "conv1", "bn1"))
    y = peer.F.relu(layer(y, "conv2", "bn2", 2))
    y = layer(y, "conv3", "bn3")
    expected = peer.F.relu(y + layer(image, "downsample_conv", "downsample_bn", 2))
    assert_close(block.apply(variables, x), expected.permute(0, 2, 3, 1), 1e-5)
    assert 0.1 < (expected > 0).float().mean() < 0.9


def test_adapters_of_all_convolutions_of_resnet50_have_their_count_of_parameters():
    """Two matrices of c_in x c_out and a gate of 2 x (c_in + 1) for each convolution."""
    per_kernel = {1: 0, 3: 0, 7: 0}
    shapes = [(3, 64, 7)]
    for i, blocks in enumerate((3, 4, 6, 3)):
        width, out, before = 64 * 2**i, 256 * 2**i, 64 if i == 0 else 128 * 2**i
        for j in range(blocks):
            inner = before if j == 0 else out
            shapes += [(inner, width, 1), (width, width, 3), (width, out, 1)] + [(inner, out, 1)] * (j == 0)
    for inputs, outputs, kernel in shapes:
        per_kernel[kernel] += 2 * inputs * outputs + 2 * (inputs + 1)
    x = jnp.zeros((1, 64, 64, 3))
    plain, some, every = (
        total(jax.eval_shape(ResNetTrunk(**options).init, KEY, x)["params"])
        for options in ({}, {"adapters": 2}, {"adapters": 2, "all_convs": True})
    )
    assert some - plain == per_kernel[3] + per_kernel[7] and every - plain == sum(per_kernel.values())


@pytest.mark.parametrize("batch", [True, False])
def test_zero_adapters_are_erm_exactly(batch):
    shape, classes = FEMNIST
    (plain_net, _), (net, method) = make(shape, classes), make(shape, classes, adapters=2, zero_adapters=True)
    images = make_images(shape, 5)
    variables = jax.jit(method.init)(KEY, images)
    trunk = {k: v for k, v in variables["params"]["trunk"].items() if not k.startswith("adapters")}
    plain = {**variables, "params": {**variables["params"], "trunk": trunk}}
    assert jax.tree.structure(plain) == jax.tree.structure(jax.eval_shape(erm(plain_net).init, KEY, images))
    ours, theirs = (
        jax.jit(lambda v, n=n: n.apply(v, images.pixels, batch, mutable=["batch_stats"]))(v)
        for n, v in ((net, variables), (plain_net, plain))
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_adapters_start_as_the_source_says():
    shape, classes = FEMNIST
    _, method = make(shape, classes, 64, adapters=2)
    trunk = jax.jit(method.init)(KEY, make_images(shape, 2))["params"]["trunk"]
    for i in (1, 2):
        weight = trunk[f"adapters{i}"]["mix"]["weight"]
        assert abs(float(weight.std()) - (2 / 64) ** 0.5) < 0.05 * (2 / 64) ** 0.5 and abs(float(weight.mean())) < 0.01
        gate = np.abs(trunk[f"adapters{i}"]["gate"]["kernel"])
        assert 0.9 * 64**-0.5 < gate.max() <= 64**-0.5  # a dense layer's uniform start
