"""Networks and their gradients against plain PyTorch, and how layers start."""

import jax
import numpy as np
import pytest
from flax import linen as nn

from cxda_jax.methods.cxda import WithMemory, cxda, domain_weights
from cxda_jax.methods.erm import bn, erm
from cxda_jax.nets.attention import CrossAttention
from cxda_jax.nets.classifier import Classifier
from cxda_jax.nets.cnn import CNNHead
from tests import nets
from tests.nets import CIFAR, FEMNIST, KEY, assert_close, initialised, make_episode, make_net, nchw, tensor


@pytest.mark.parametrize(("benchmark", "count"), [(FEMNIST, 861_814), (CIFAR, 857_762)])
def test_the_full_width_has_as_many_parameters_as_published(benchmark, count):
    method, images = erm(make_net(*benchmark, 128)), nets.make_images(benchmark[0], 2)
    assert nets.total(jax.eval_shape(method.init, KEY, images)["params"]) == count


class PixelTrunk(nn.Module):
    """Pixels are the map."""

    def __call__(self, x, batch=False):
        return x


def pixel_net(*attention, mean=(0.0,), std=(1.0,)):
    return Classifier(PixelTrunk(), CNNHead(5), mean, std, *attention)


def test_domain_weights():
    query, support = np.array([2, 0, 7]), np.array([0, 2, 2, 1, 2])  # no support image is of domain 7
    weigh = jax.jit(lambda present: domain_weights(query, WithMemory({}, None, support, present))[:, 0])
    all_of, some = np.ones(5, bool), np.array([True, True, False, False, True])
    for present, of_domain in (all_of, [0, 1 / 3, 1 / 3, 0, 1 / 3]), (some, [0, 0.5, 0, 0, 0.5]):
        np.testing.assert_allclose(weigh(present), [of_domain, [1, 0, 0, 0, 0], [0] * 5], rtol=1e-6)


def test_bytes_are_divided_by_255():
    pixels, net = np.arange(256).reshape(2, 8, 8, 2), pixel_net(mean=(1.0, 0.2), std=(-1.0, 0.4))
    found = jax.jit(lambda *images: [net.apply({}, x, method="map") for x in images])
    for x in found(pixels.astype(np.uint8), np.float32(pixels / 255)):
        assert_close(x, (pixels / 255 - [1.0, 0.2]) / [-1.0, 0.4], 1e-6)


def gradient_error(peer, grads, module) -> float:
    """The largest difference of a parameter's gradient from PyTorch's."""
    theirs = {name.removeprefix("net."): p.grad for name, p in module.named_parameters()}
    ours = {name.removeprefix("net."): grad for name, grad in peer.torch_tensors(grads).items()}
    assert set(ours) == set(theirs)
    assert max(float(g.abs().max()) for g in theirs.values()) > 0.1  # else a tolerance would say nothing
    errors = peer.torch.cat([(ours[name] - grad).abs().flatten() for name, grad in theirs.items()])
    assert np.quantile(errors, 0.9) < 1e-6
    return float(errors.max())


@pytest.mark.parametrize(("benchmark", "features", "statistics"), [
    (FEMNIST, "", "erm"), pytest.param(CIFAR, "", "flow", marks=pytest.mark.weekly), (FEMNIST, "pool", "flow"),
    (CIFAR, "flat", "stop"),
])  # fmt: skip
def test_losses_gradients_and_answers_equal_torch(peer, benchmark, features, statistics):
    """Of erm, bn and cxda."""
    shape, classes = benchmark
    module, attention = peer.TorchCNN(shape[2], classes, 16), None
    if features:
        net = nets.make_attending(shape, classes, features)
        method, attention = cxda(net, statistics=statistics), peer.TorchAttention(net.attention.dim)
    else:
        method = erm(make_net(*benchmark)) if statistics == "erm" else bn(make_net(*benchmark), statistics)
    if statistics != "erm":
        module = peer.TorchCXDA(module, attention, features or "pool", statistics)
    variables = initialised(method, shape)

    @jax.jit
    def ours(params, e):
        graded = jax.value_and_grad(lambda p: method.loss({**variables, "params": p}, e, KEY), has_aux=True)
        return graded(params), method.predict(method.adapt(variables, e.support, KEY), e.query)

    def error_of(seed):
        episode = make_episode(shape, classes, seed=seed)
        images = [nchw(part.pixels) for part in (episode.support, episode.query)][statistics == "erm" :]
        peer.copy_weights(variables, module)  # training moves PyTorch's running statistics
        ((loss, aux), grads), answer = ours(variables["params"], episode)
        expected = module.eval()(*images).detach()
        logits = module.train()(*images)
        theirs = peer.F.cross_entropy(logits, tensor(episode.label).long())
        module.zero_grad()
        theirs.backward()
        assert_close(loss, theirs.detach())
        assert_close(aux["logits"], logits.detach())
        assert_close(answer, expected)
        return gradient_error(peer, grads, module)

    nets.assert_within_some_draw(error_of)


def torch_attention(peer, params, query, support, *options):
    """Adapted query tokens, and weights [heads, queries, support]."""
    attention = peer.TorchAttention(query.shape[1], *options)
    attention.load_state_dict(nets.torch_named(params))
    return [x.detach().numpy() for x in attention(tensor(query), tensor(support))]


@pytest.mark.parametrize(
    ("heads", "ratio", "scale", "shared"), [(8, 2, "paper", True), (8, 2, "head_dim", False), (4, 1, "paper", False)]
)
def test_attention_equals_the_paper(peer, heads, ratio, scale, shared):
    rng = np.random.default_rng(3)
    support, query = (rng.normal(1, 2, (n, 32)).astype(np.float32) for n in (11, 5))
    module = CrossAttention(32, heads=heads, ratio=ratio, scale=scale, shared_norm=shared)

    def everything(module, query, support):
        memory = module.remember(support)
        weights = module.weights(query, memory)
        return weights, module.mix(query, weights, module.remember_values(support)), module.recall(query, memory)

    variables = nets.fill(jax.eval_shape(lambda *x: module.init(KEY, *x, method=everything), query, support))
    expected = torch_attention(peer, variables["params"], query, support, heads, ratio, scale, shared)
    weights, *answers = jax.jit(lambda *x: module.apply(*x, method=everything))(variables, query, support)
    assert_close(weights, expected[1].swapaxes(0, 1), 1e-5)
    for answer in answers:
        assert_close(answer, expected[0], 1e-5)


def test_patch_attention_is_that_of_all_positions(peer):
    """An image's weight is summed over its positions as support, and averaged over those of the query."""
    net = pixel_net(CrossAttention(8, heads=2), "patch")
    support, query = (np.asarray(nets.make_images((2, 3, 8), n, seed).pixels) for n, seed in ((3, 1), (2, 2)))

    def everything(net, support, query, z):
        memory = net.remember(support)
        return net.recall(query, memory), net.weights(query, memory), net.classify(z)

    variables = nets.fill(jax.eval_shape(lambda: net.init(KEY, support, query, query, method=everything)))
    tokens = query.reshape(-1, 8), support.reshape(-1, 8)
    z, by_position = torch_attention(peer, variables["params"]["attention"], *tokens, 2)
    given = support, query, z.reshape(query.shape)
    logits, weights, expected = jax.jit(lambda *x: net.apply(*x, method=everything))(variables, *given)
    assert_close(logits, expected, 1e-5)
    assert_close(weights, by_position.reshape(2, 2, 6, 3, 6).sum(-1).mean(2).swapaxes(0, 1), 1e-5)


@pytest.mark.parametrize("name", ["cxda", "cml", "sla", pytest.param("resnet50", marks=pytest.mark.weekly)])
def test_layers_of_all_networks_start_as_torchs_or_as_flaxs(name):
    """PyTorch's are uniform within 1 / sqrt(fan_in). Flax's have LeCun-normal kernels, and biases of 0."""
    stats = pytest.importorskip("scipy.stats")
    sizes = {"net__width": 64, "cml__width": 32, "net__stages": (1, 1), "sla__adapters": 3, "attention__heads": 2}
    method, net = ("erm", {"net__name": name}) if name == "resnet50" else (name, {})
    inits = [nets.build_method(method, **sizes, **net, net__init=start).init for start in ("torch", "flax")]
    starts = jax.device_get(jax.jit(lambda: [init(KEY, nets.make_images((16, 16, 1), 2)) for init in inits])())
    layers = [
        jax.tree.leaves(tree["params"], is_leaf=lambda x: isinstance(x, dict) and "kernel" in x) for tree in starts
    ]
    for of_torch, of_flax in zip(*layers, strict=True):
        if not isinstance(of_torch, dict):
            np.testing.assert_array_equal(of_torch, of_flax)
            continue
        root = np.prod(of_torch["kernel"].shape[:-1]) ** 0.5
        uniform = stats.uniform(-1 / root, 2 / root)
        normal = stats.truncnorm(-2, 2, scale=1 / root / stats.truncnorm.std(-2, 2))
        for value, of in (*((value, uniform) for value in of_torch.values()), (of_flax["kernel"], normal)):
            assert stats.kstest(value.ravel(), of.cdf).pvalue > 1e-6
        assert not np.asarray(of_flax.get("bias", 0)).any()
