"""Networks and their gradients against plain PyTorch, and against formulas written out the long way."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from cxda_jax.errors import UserError
from cxda_jax.losses import cross_entropy
from cxda_jax.methods.cml import cml
from cxda_jax.methods.cxda import WithMemory, cxda, domain_weights
from cxda_jax.methods.erm import bn, erm
from cxda_jax.nets import attention as attention_module
from cxda_jax.nets.attention import CrossAttention
from cxda_jax.nets.classifier import Classifier
from cxda_jax.nets.cnn import CNNHead, CNNTrunk
from cxda_jax.nets.context import ContextNet
from cxda_jax.nets.resnet import LinearHead, ResNetTrunk
from docs.examples.vit import ViTTrunk
from tests.nets import (
    CIFAR,
    FEMNIST,
    KEY,
    SHAPES,
    assert_close,
    assert_within_some_draw,
    build_method,
    close,
    fill,
    gradient_error,
    initialised,
    make_attending,
    make_episode,
    make_images,
    make_net,
    nchw,
    tensor,
    torch_named,
    total,
)  # fmt: skip


@pytest.mark.parametrize(("benchmark", "batch"), [(FEMNIST, True), (CIFAR, False)], ids=["train", "eval"])
def test_cnn_equals_torch(peer, benchmark, batch):
    (shape, classes), net = benchmark, make_net(*benchmark)
    variables = initialised(erm(net), shape)
    module = peer.copy_weights(variables, peer.TorchCNN(shape[2], classes, 16)).train(batch)

    @jax.jit
    def ours(params, episode):
        def objective(params):
            logits = net.apply({**variables, "params": params}, episode.query.pixels, batch)
            return cross_entropy(logits, episode.label), logits

        return jax.grad(objective, has_aux=True)(params)

    def error_of(seed):
        episode = make_episode(shape, classes, seed=seed)
        grads, logits = ours(variables["params"], episode)
        theirs = module(nchw(episode.query.pixels))
        module.zero_grad()
        peer.F.cross_entropy(theirs, tensor(episode.label).long()).backward()
        assert_close(logits, theirs.detach())
        return gradient_error(peer, grads, module)

    assert_within_some_draw(error_of)


@SHAPES
def test_full_width_equals_torch(peer, shape, classes):
    net, images = make_net(shape, classes, 128), make_images(shape, 2)
    variables = initialised(erm(net), shape)
    module = peer.copy_weights(variables, peer.TorchCNN(shape[2], classes)).eval()
    assert_close(jax.jit(net.apply)(variables, images.pixels), module(nchw(images.pixels)).detach())
    assert total(variables["params"]) == {62: 861_814, 10: 857_762}[classes]


def test_copy_weights_is_loud(peer):
    shape, classes = CIFAR
    plain = initialised(erm(make_net(shape, classes)), shape)
    attending = initialised(cxda(make_attending(shape, classes, "pool")), shape)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        peer.copy_weights(attending, peer.TorchCNN(3, classes, 16))
    with pytest.raises(RuntimeError, match="Missing key"):
        peer.copy_weights(plain, peer.TorchCXDA(peer.TorchCNN(3, classes, 16), peer.TorchAttention(16)))
    with pytest.raises(RuntimeError, match="size mismatch"):
        peer.copy_weights(plain, peer.TorchCNN(3, classes, 17))


@pytest.mark.parametrize(
    ("benchmark", "features", "statistics"),
    [(CIFAR, "", "flow"), (FEMNIST, "", "stop"), (FEMNIST, "pool", "flow"), (CIFAR, "flat", "stop")],
)
def test_method_loss_equals_torch(peer, benchmark, features, statistics):
    shape, classes = benchmark
    attention = None
    if features:
        net = make_attending(shape, classes, features)
        method, attention = cxda(net, statistics=statistics), peer.TorchAttention(net.attention.dim)
    else:
        method = bn(make_net(shape, classes), statistics)
    variables = initialised(method, shape)
    module = peer.TorchCXDA(peer.TorchCNN(shape[2], classes, 16), attention, features or "pool", statistics)
    peer.copy_weights(variables, module)
    ours = jax.jit(jax.value_and_grad(lambda p, e: method.loss({**variables, "params": p}, e, KEY), has_aux=True))
    answer = jax.jit(lambda e: method.predict(method.adapt(variables, e.support, KEY), e.query))

    def error_of(seed):
        episode = make_episode(shape, classes, seed=seed)
        (loss, aux), grads = ours(variables["params"], episode)
        logits = module(nchw(episode.support.pixels), nchw(episode.query.pixels))
        theirs = peer.F.cross_entropy(logits, tensor(episode.label).long())
        module.zero_grad()
        theirs.backward()
        assert_close(loss, theirs.detach())
        assert_close(aux["logits"], logits.detach())
        assert_close(answer(episode), logits.detach())
        return gradient_error(peer, grads, module)

    assert_within_some_draw(error_of)


def make_attention(dim=32, n=11, m=5, seed=3, **options):
    rng = np.random.default_rng(seed)
    support, query = (jnp.asarray(rng.normal(1, 2, (k, dim)), jnp.float32) for k in (n, m))
    module = CrossAttention(dim, **options)

    def both(module, query, support):
        return module.recall(query, module.remember(support))

    variables = fill(jax.eval_shape(lambda *x: module.init(KEY, *x, method=both), query, support))
    return module, both, variables, query, support


@pytest.mark.parametrize("shared", [True, False], ids=["one norm", "two norms"])
@pytest.mark.parametrize("scale", ["paper", "head_dim"])
@pytest.mark.parametrize(("heads", "ratio"), [(8, 2), (4, 1)])
def test_attention_equals_the_paper(peer, heads, ratio, scale, shared):
    module, both, variables, query, support = make_attention(heads=heads, ratio=ratio, scale=scale, shared_norm=shared)
    attention = peer.TorchAttention(32, heads, ratio, scale, shared)
    attention.load_state_dict(torch_named(variables["params"]))
    expected, expected_weights = attention(tensor(query), tensor(support))

    def everything(module, query, support):
        weights = module.weights(query, module.remember(support))
        return weights, module.mix(query, weights, module.remember_values(support)), both(module, query, support)

    apply = jax.jit(lambda *x: module.apply(*x, method=everything))
    weights, *answers = apply(variables, query, support)
    assert_close(weights, expected_weights.detach().transpose(0, 1), 1e-5)
    for answer in answers:
        assert_close(answer, expected.detach(), 1e-5)


@pytest.mark.parametrize("rows", [1, 4])
def test_chunked_attention_equals_unchunked(monkeypatch, rows):
    module, both, variables, query, support = make_attention(m=10)

    def objective(variables, query, support):
        return jnp.sin(module.apply(variables, query, support, method=both)).sum()

    whole = jax.jit(jax.value_and_grad(objective, (0, 1, 2)))(variables, query, support)
    monkeypatch.setattr(attention_module, "CHUNK", rows * 8 * len(support))
    assert "scan" in str(jax.make_jaxpr(objective)(variables, query, support))
    chunked = jax.jit(jax.value_and_grad(lambda *x: objective(*x), (0, 1, 2)))(variables, query, support)
    close(chunked, whole)
    fresh = jax.eval_shape(lambda: module.init(KEY, query, support, method=both))
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, variables)


class PixelTrunk(nn.Module):
    """Pixels are the map."""

    def __call__(self, x, batch=False):
        return x


@pytest.mark.parametrize("zero_out", [True, False])
def test_zero_out_starts_as_the_plain_network(zero_out):
    attention, images = CrossAttention(16, zero_out=zero_out), make_images((2, 2, 16), 3)
    net = Classifier(PixelTrunk(), CNNHead(5), (0.0,), (1.0,), attention)
    variables = jax.jit(cxda(net).init)(KEY, images)

    def both(net, maps):
        return net.recall(maps, net.remember(maps)), net(maps)

    adapted, plain = jax.jit(lambda *x: net.apply(*x, method=both))(variables, images.pixels)
    assert bool((adapted == plain).all()) == zero_out


def test_patch_attention_position_by_position():
    net = Classifier(PixelTrunk(), CNNHead(5), (0.0,), (1.0,), CrossAttention(8, heads=2), "patch")
    support, query = make_images((2, 3, 8), 3, 1).pixels, make_images((2, 3, 8), 2, 2).pixels

    def everything(net, support, query, z):
        memory = net.remember(support)
        return net.recall(query, memory), net.weights(query, memory), net.classify(z)

    variables = fill(jax.eval_shape(lambda: net.init(KEY, support, query, query, method=everything)))
    p = jax.tree.map(np.asarray, variables["params"]["attention"])

    def norm(x):
        return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * p["norm"]["scale"] + p["norm"]["bias"]

    tokens = {at: norm(support[at]) for at in np.ndindex(3, 2, 3)}
    z, by_image = np.array(query), np.zeros((2, 2, 3))
    for m, a, b in np.ndindex(2, 2, 3):
        q, drawn = norm(query[m, a, b]) @ p["query"]["kernel"], []
        for head in (slice(0, 2), slice(2, 4)):
            scores = {at: np.exp(q[head] @ (x @ p["key"]["kernel"])[head] / 2) for at, x in tokens.items()}
            share = {at: s / sum(scores.values()) for at, s in scores.items()}
            drawn.append(sum(share[at] * (x @ p["value"]["kernel"])[head] for at, x in tokens.items()))
            for at, s in share.items():
                by_image[m, head.start // 2, at[0]] += s / 6
        z[m, a, b] += np.concatenate(drawn) @ p["out"]["kernel"]
    apply = jax.jit(lambda *x: net.apply(*x, method=everything))
    logits, weights, expected = apply(variables, support, query, jnp.asarray(z))
    assert_close(logits, expected, 1e-5)
    assert_close(weights, by_image, 1e-5)


def test_domain_weights():
    query, support = np.array([2, 0, 7, 1]), np.array([0, 2, 2, 1, 2])
    expected = np.zeros((4, 1, 5), np.float32)  # no support image is of domain 7
    expected[0, 0, [1, 2, 4]], expected[1, 0, 0], expected[3, 0, 3] = 1 / 3, 1, 1
    adapted = WithMemory({}, None, jnp.asarray(support))
    np.testing.assert_array_equal(domain_weights(jnp.asarray(query), adapted), expected)
    expected[0, 0, [1, 2, 4]], expected[3, 0, 3] = [1 / 2, 0, 1 / 2], 0  # without the third and fourth image
    adapted = adapted._replace(present=jnp.array([True, True, False, False, True]))
    np.testing.assert_array_equal(domain_weights(jnp.asarray(query), adapted), expected)


def test_tokens_run_over_height_width_channel():
    maps = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    tokens = {f: make_net((28, 28, 1), 3, features=f).tokens(jnp.asarray(maps)) for f in ("pool", "flat", "patch")}
    np.testing.assert_array_equal(tokens["pool"], maps.mean((1, 2)))
    assert [t.shape for t in tokens.values()] == [(2, 5), (2, 60), (24, 5)]
    for i, a, b, c in np.ndindex(2, 3, 4, 5):
        assert tokens["flat"][i, (a * 4 + b) * 5 + c] == tokens["patch"][(i * 3 + a) * 4 + b, c] == maps[i, a, b, c]


def assert_uniform(value, fan_in, where):
    """As PyTorch's default: uniform within 1 / sqrt(fan_in)."""
    value, bound = np.asarray(value), fan_in**-0.5
    assert np.abs(value).max() <= bound * (1 + 1e-6), where
    assert value.size < 60 or np.abs(value).max() > 0.8 * bound, where
    if value.size >= 5000:
        assert abs(value.std() / (bound / math.sqrt(3)) - 1) < 0.05, where
        assert value.min() < -0.8 * bound and abs(value.mean()) < 0.05 * bound, where


def test_initialisation_is_torchs(peer):
    """Each layer as PyTorch starts it, normalisation included, and no two layers with the same random key."""
    net = make_attending((32, 32, 3), 10, "pool", width=64)
    init = jax.jit(cxda(net).init)
    variables, other = (init(jax.random.key(seed), make_images((32, 32, 3), 1)) for seed in range(2))
    module = peer.TorchCXDA(peer.TorchCNN(3, 10, 64), peer.TorchAttention(64))
    theirs, ours = dict(module.named_parameters()), peer.torch_tensors(variables["params"])
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        if "norm" in name:
            np.testing.assert_array_equal(value, np.full(value.shape, float(name.endswith("weight"))))
            continue
        weight = ours[name.removesuffix("bias") + "weight" if name.endswith("bias") else name]
        for x in (value, theirs[name].detach()):
            assert_uniform(x, weight.numel() / len(weight), name)
    statistics = variables["batch_stats"]["trunk"]
    assert all((s["mean"] == 0).all() and (s["var"] == 1).all() for s in statistics.values())
    kernels = [x for x in jax.tree.leaves(variables["params"]) if x.ndim > 1]
    firsts = [float(x.ravel()[0] * (x.size // x.shape[-1]) ** 0.5) for x in kernels]
    assert len(set(firsts)) == len(firsts)
    assert (other["params"]["trunk"]["conv0"]["kernel"] != variables["params"]["trunk"]["conv0"]["kernel"]).all()


@pytest.mark.parametrize("name", ["cml", "sla", "resnet50", "vit"])
def test_layers_of_all_networks_start_as_torchs(name):
    if name == "cml":
        method = cml(make_net(*CIFAR, 64, context=ContextNet(3)))
    else:
        trunks = {"sla": CNNTrunk(64, convs=2, adapters=2), "resnet50": ResNetTrunk(stages=(1,)), "vit": ViTTrunk(64)}
        method = erm(Classifier(trunks[name], LinearHead(10), (0.0,) * 3, (1.0,) * 3))

    def is_layer(tree):
        return isinstance(tree, dict) and "kernel" in tree

    params = jax.jit(method.init)(KEY, make_images((32, 32, 3), 1))["params"]
    layers = list(filter(is_layer, jax.tree.leaves(params, is_leaf=is_layer)))
    assert len(layers) > 4
    for layer in layers:
        kernel = layer["kernel"]
        fan_in = 64 if kernel.ndim == 3 else kernel.size // kernel.shape[-1]  # attention's kernels have a heads' axis
        for value in layer.values():
            assert_uniform(value, fan_in, name)


def assert_lecun(value, fan_in, where):
    """As flax's default kernel: a normal distribution that is cut at two of its deviations, and has variance 1 / fan_in."""
    truncnorm, value = pytest.importorskip("scipy.stats").truncnorm, np.asarray(value, np.float64)
    cut = 2 / truncnorm.std(-2, 2) / math.sqrt(fan_in)
    assert np.abs(value).max() <= cut * (1 + 1e-6), where
    if value.size >= 5000:
        assert abs(value.std() * math.sqrt(fan_in) - 1) < 0.05 and abs(value.mean()) < 0.05 / math.sqrt(fan_in), where
        expected = truncnorm.cdf(np.linspace(-1.5, 1.5, 7), -2, 2)
        found = (value.ravel()[:, None] < np.linspace(-1.5, 1.5, 7) * cut / 2).mean(0)
        assert np.abs(found - expected).max() < 0.03, where


@pytest.mark.parametrize("name", ["cxda", "cml", "sla", "resnet50", "vit"])
def test_layers_of_all_networks_may_start_as_flaxs(name):
    """LeCun-normal kernels, biases of 0; all else starts as it does beside PyTorch's layers."""
    method = "erm" if name in ("resnet50", "vit") else name
    sizes = {"net__width": 64, "cml__width": 32, "net__stages": (1, 1), "sla__adapters": 3, "attention__heads": 2}
    if method != name:
        sizes["net__name"] = name
    images = make_images((16, 16, 1), 2)
    ours, torchs = (
        jax.jit(build_method(method, **sizes, net__init=init).init)(KEY, images)["params"] for init in ("flax", "torch")
    )
    assert jax.tree.structure(ours) == jax.tree.structure(torchs)
    layers = 0
    for (path, value), other in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(torchs), strict=True):
        where, kind = jax.tree_util.keystr(path), path[-1].key
        if kind == "kernel":
            layers += 1
            # Kernels of the transformer's attention have an axis of heads: [in, heads, d] or [heads, d, out].
            fan_in = 64 if value.ndim == 3 else value.size // value.shape[-1]
            assert_lecun(value, fan_in, where)
            assert (np.asarray(value) != np.asarray(other)).any(), where
        elif kind == "bias":
            np.testing.assert_array_equal(value, 0, where)
        else:
            np.testing.assert_array_equal(value, other, where)
    assert layers > 4


def test_flaxs_start_is_that_of_flaxs_own_layers():
    """The same random numbers as those of layers that say nothing of their start, under the same names."""

    class Trunk(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(3):
                x = nn.Conv(8, (5, 5), name=f"conv{i}")(x)

    class Head(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(5, name="logits")(nn.Dense(4, name="hidden")(x))

    for ours, theirs, x in (
        (CNNTrunk(8, "same", initial="flax"), Trunk(), make_images((16, 16, 1), 2).pixels),
        (CNNHead(5, 4, initial="flax"), Head(), jnp.ones((2, 8))),
    ):
        found, expected = (jax.jit(module.init)(KEY, x)["params"] for module in (ours, theirs))
        for name in expected:
            jax.tree.map(np.testing.assert_array_equal, found[name], expected[name])


def test_uint8_pixels_are_divided_by_255_and_normalised():
    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 4, 2), np.uint8)
    net = Classifier(PixelTrunk(), CNNHead(5), (1.0, 0.2), (-1.0, 0.4))
    for given in (pixels, (pixels / 255).astype(np.float32)):
        maps = net.apply({}, jnp.asarray(given), method="map")
        assert_close(maps, (pixels / 255 - [1.0, 0.2]) / [-1.0, 0.4], 1e-6)
    assert_close(maps[..., 0], 1 - pixels[..., 0] / 255, 1e-6)


@pytest.mark.parametrize(("options", "says"), [
    ({"heads": 3}, "^heads=3.*divisors of 32"), ({"ratio": 64}, "ratio=64"), ({"scale": "none"}, "scale='none'.*paper"),
])  # fmt: skip
def test_wrong_attention_is_a_user_error(options, says):
    with pytest.raises(UserError, match=says):
        make_attention(**options)
