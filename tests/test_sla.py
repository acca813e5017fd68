"""SLA's gates and adapters against PyTorch and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax.methods.erm import erm
from cxda_jax.methods.sla import sla
from cxda_jax.nets.adapters import LatentAdapters, sparsemax
from cxda_jax.nets.classifier import Classifier
from cxda_jax.nets.cnn import CNNHead, CNNTrunk
from tests.nets import CIFAR, FEMNIST, SHAPES, assert_close, assert_within_some_draw, fill, make_images, nchw

KEY = jax.random.key(0)


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


@pytest.mark.parametrize("crop", [0, 2])
@pytest.mark.parametrize("count", [2, 3])
def test_adapters_equal_torch(crop, count):
    torch = pytest.importorskip("torch")
    x = make_images((9, 8, 5), 6).pixels * 4
    module = LatentAdapters(7, count, crop)
    params = fill(jax.eval_shape(module.init, KEY, x))["params"]
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(count, 5, 7)), jnp.float32)
    params = {**params, "mix": {"weight": weight}}
    theirs = {
        "gate.kernel": torch.tensor(np.array(params["gate"]["kernel"])).requires_grad_(),
        "gate.bias": torch.tensor(np.array(params["gate"]["bias"])).requires_grad_(),
        "mix.weight": torch.tensor(np.array(weight)).requires_grad_(),
    }
    image = nchw(x).requires_grad_()
    z = torch.nn.functional.adaptive_avg_pool2d(image, 1).flatten(1) @ theirs["gate.kernel"] + theirs["gate.bias"]
    # Sparsemax by its definition, from the support that the closed form gives.
    kept = torch.from_numpy(numpy_sparsemax(z.detach().numpy()) > 0)
    tau = ((z * kept).sum(-1, keepdim=True) - 1) / kept.sum(-1, keepdim=True)
    gates = (z - tau) * kept
    inner = image[:, :, crop : 9 - crop, crop : 8 - crop]
    expected = sum(
        gates[:, k, None, None, None] * torch.nn.functional.conv2d(inner, theirs["mix.weight"][k].T[:, :, None, None])
        for k in range(count)
    )
    assert_close(module.apply({"params": params}, x), expected.detach().permute(0, 2, 3, 1), 1e-5)
    expected.sin().sum().backward()
    grads, to_x = jax.grad(lambda p, x: jnp.sin(module.apply({"params": p}, x)).sum(), (0, 1))(params, x)
    for name, their in theirs.items():
        a, b = name.split(".")
        assert_close(grads[a][b], their.grad, 1e-4)
        assert their.grad.abs().max() > 0.01
    assert_close(to_x, image.grad.permute(0, 2, 3, 1), 1e-4)


def make(shape, classes, width=16, **options):
    channels = shape[2]
    net = Classifier(CNNTrunk(width, **options), CNNHead(classes), (0.0,) * channels, (1.0,) * channels)
    return net, sla(net)


def torch_sla(peer, shape, classes, convs):
    torch = peer.torch

    class TorchSLA(torch.nn.Module):
        def __init__(self):
            super().__init__()
            inputs = [shape[2], *[16] * (convs - 1)]
            self.pads = [2, 0, 0][-convs:]
            self.convs = torch.nn.ModuleList(
                torch.nn.Conv2d(c, 16, 5, padding=pad) for c, pad in zip(inputs, self.pads, strict=True)
            )
            self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(16) for _ in inputs)
            self.gates = torch.nn.ModuleList(torch.nn.Linear(c, 2) for c in inputs)
            self.mixes = torch.nn.ModuleList(
                torch.nn.ModuleList(torch.nn.Conv2d(c, 16, 1, bias=False) for _ in range(2)) for c in inputs
            )
            self.hidden, self.logits = torch.nn.Linear(16, 200), torch.nn.Linear(200, classes)

        def forward(self, x):
            for i, conv in enumerate(self.convs):
                z = self.gates[i](x.mean((2, 3)))
                first = ((z[:, 0] - z[:, 1] + 1) / 2).clamp(0, 1)[:, None, None, None]
                crop = 2 - self.pads[i]
                inner = x[:, :, crop : x.shape[2] - crop, crop : x.shape[3] - crop]
                x = conv(x) + first * self.mixes[i][0](inner) + (1 - first) * self.mixes[i][1](inner)
                x = torch.relu(self.norms[i](x))
                x = x if i == convs - 3 else torch.nn.functional.max_pool2d(x, 2)
            return self.logits(torch.relu(self.hidden(x.mean((2, 3)))))

    return TorchSLA()


def torch_names(params):
    """Flax parameters by TorchSLA's names, in PyTorch's layouts."""
    tensors = {}
    for i in range(sum(name.startswith("conv") for name in params["trunk"])):
        trunk = params["trunk"]
        tensors[f"convs.{i}.weight"] = np.array(trunk[f"conv{i}"]["kernel"]).transpose(3, 2, 0, 1)
        tensors[f"convs.{i}.bias"] = np.array(trunk[f"conv{i}"]["bias"])
        tensors[f"norms.{i}.weight"] = np.array(trunk[f"bn{i}"]["scale"])
        tensors[f"norms.{i}.bias"] = np.array(trunk[f"bn{i}"]["bias"])
        tensors[f"gates.{i}.weight"] = np.array(trunk[f"adapters{i}"]["gate"]["kernel"]).T
        tensors[f"gates.{i}.bias"] = np.array(trunk[f"adapters{i}"]["gate"]["bias"])
        for k in range(2):
            weight = np.array(trunk[f"adapters{i}"]["mix"]["weight"][k])
            tensors[f"mixes.{i}.{k}.weight"] = weight.T[:, :, None, None]
    for name in ("hidden", "logits"):
        tensors[f"{name}.weight"] = np.array(params["head"][name]["kernel"]).T
        tensors[f"{name}.bias"] = np.array(params["head"][name]["bias"])
    return tensors


@pytest.mark.parametrize("convs", [2, 3])
@SHAPES
def test_the_network_equals_torch(peer, shape, classes, convs):
    torch = peer.torch
    net, method = make(shape, classes, adapters=2, convs=convs)
    variables = fill(jax.eval_shape(method.init, KEY, make_images(shape, 2)))
    module = torch_sla(peer, shape, classes, convs)
    state = {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in torch_names(variables["params"]).items()}
    for i in range(convs):
        stats = variables["batch_stats"]["trunk"][f"bn{i}"]
        state[f"norms.{i}.running_mean"] = torch.from_numpy(np.array(stats["mean"]))
        state[f"norms.{i}.running_var"] = torch.from_numpy(np.array(stats["var"]))
        state[f"norms.{i}.num_batches_tracked"] = torch.tensor(0)
    module.load_state_dict(state, strict=True)
    images = make_images(shape, 9, 3)
    assert_close(method.predict(variables, images), module.eval()(nchw(images.pixels)).detach(), 1e-5)

    def error_of(seed):
        images, labels = make_images(shape, 9, seed), np.arange(9) % classes
        module.train().zero_grad()
        torch.nn.functional.cross_entropy(module(nchw(images.pixels)), torch.from_numpy(labels)).backward()

        @jax.jit
        @jax.grad
        def gradient(params):
            logits = net.apply({**variables, "params": params}, images.pixels, True, mutable=["batch_stats"])[0]
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(labels)[:, None], 1).mean()

        ours = torch_names(gradient(variables["params"]))
        theirs = {name: p.grad.numpy() for name, p in module.named_parameters()}
        assert ours.keys() == theirs.keys()
        return max(np.abs(ours[name] - grad).max() for name, grad in theirs.items())

    assert_within_some_draw(error_of)


def parameters(method, shape):
    shapes = jax.eval_shape(method.init, KEY, make_images(shape, 2))["params"]
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize(("benchmark", "extra"), [(FEMNIST, 66_312), (CIFAR, 66_828)], ids=["femnist", "cifar"])
def test_parameter_counts(benchmark, extra):
    shape, classes = benchmark
    plain, adapted = (make(shape, classes, 128, **options)[1] for options in ({}, {"adapters": 2}))
    assert parameters(adapted, shape) == parameters(plain, shape) + extra
    two = make(shape, classes, 128, convs=2)[1]
    assert parameters(two, shape) == parameters(plain, shape) - (25 * 128 * 128 + 3 * 128)


@pytest.mark.parametrize("batch", [True, False])
def test_zero_adapters_are_erm_exactly(batch):
    shape, classes = FEMNIST
    (plain_net, _), (net, method) = make(shape, classes), make(shape, classes, adapters=2, zero_adapters=True)
    images = make_images(shape, 5)
    variables = method.init(KEY, images)
    trunk = {k: v for k, v in variables["params"]["trunk"].items() if not k.startswith("adapters")}
    plain = {**variables, "params": {**variables["params"], "trunk": trunk}}
    assert jax.tree.structure(plain) == jax.tree.structure(erm(plain_net).init(KEY, images))
    ours, theirs = (
        n.apply(v, images.pixels, batch, mutable=["batch_stats"]) for n, v in ((net, variables), (plain_net, plain))
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_adapters_start_as_the_source_says():
    shape, classes = FEMNIST
    _, method = make(shape, classes, 64, adapters=2)
    trunk = method.init(KEY, make_images(shape, 2))["params"]["trunk"]
    for i in (1, 2):
        weight = trunk[f"adapters{i}"]["mix"]["weight"]
        assert abs(float(weight.std()) - (2 / 64) ** 0.5) < 0.05 * (2 / 64) ** 0.5 and abs(float(weight.mean())) < 0.01
        gate = np.abs(trunk[f"adapters{i}"]["gate"]["kernel"])
        assert 0.9 * 64**-0.5 < gate.max() <= 64**-0.5  # a dense layer's uniform start
