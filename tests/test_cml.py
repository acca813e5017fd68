"""CML against PyTorch with the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax.methods.cml import cml
from cxda_jax.nets.classifier import Classifier
from cxda_jax.nets.cnn import CNNHead, CNNTrunk
from cxda_jax.nets.context import ContextNet
from tests.nets import CIFAR, FEMNIST, SHAPES, assert_close, assert_within_some_draw, fill, make_episode, nchw

KEY = jax.random.key(0)


def make_net(shape, classes, width=16, context_width=8, convs=3):
    channels = shape[2]
    trunk = CNNTrunk(width, convs=convs)
    context = ContextNet(channels, context_width)
    return Classifier(trunk, CNNHead(classes), (0.1,) * channels, (0.7,) * channels, context=context)


def make_torch(channels, classes, width, context_width, convs):
    torch = pytest.importorskip("torch")
    from torch import nn

    class TorchCML(nn.Module):
        def __init__(self):
            super().__init__()

            def block(inputs, outputs, padding):
                return [nn.Conv2d(inputs, outputs, 5, padding=padding), nn.BatchNorm2d(outputs), nn.ReLU()]

            main = [*block(2 * channels, width, 2)] if convs == 3 else []
            for i in range(2):
                inputs = 2 * channels if convs == 2 and i == 0 else width
                main += [*block(inputs, width, 0), nn.MaxPool2d(2)]
            self.context = nn.Sequential(
                *block(channels, context_width, 2),
                *block(context_width, context_width, 2),
                nn.Conv2d(context_width, channels, 5, padding=2),
            )
            self.main = nn.Sequential(*main)
            self.head = nn.Sequential(nn.Linear(width, 200), nn.ReLU(), nn.Linear(200, classes))

        def forward(self, support, query, training):
            support, query = ((x - 0.1) / 0.7 for x in (support, query))
            self.context.train()
            context = self.context(support).mean(0, keepdim=True).expand(len(query), -1, -1, -1)
            self.main.train(training)
            return self.head(self.main(torch.cat([query, context], 1)).mean((2, 3)))

        def layers(self, kind):
            return [m for part in (self.context, self.main, self.head) for m in part if isinstance(m, kind)]

        def ordered(self):
            return self.layers((nn.Conv2d, nn.Linear)), self.layers(nn.BatchNorm2d)

    return TorchCML()


def leaves(tree, convs):
    """Layers of a Flax collection in the order of TorchCML.ordered()."""
    names = [("context", "conv0"), ("context", "conv1"), ("context", "out")]
    names += [("trunk", f"conv{i}") for i in range(convs)] + [("head", "hidden"), ("head", "logits")]
    norms = [("context", "bn0"), ("context", "bn1")] + [("trunk", f"bn{i}") for i in range(convs)]
    return [tree[a][b] for a, b in names if b in tree.get(a, {})], [tree[a][b] for a, b in norms]


def to_torch(kernel):
    import torch

    value = np.array(kernel)
    return torch.from_numpy(np.ascontiguousarray(value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T))


def copy(variables, module, convs):
    import torch

    layers, norms = module.ordered()
    ours, our_norms = leaves(variables["params"], convs)
    with torch.no_grad():
        for layer, leaf in zip(layers, ours, strict=True):
            layer.weight.copy_(to_torch(leaf["kernel"]))
            layer.bias.copy_(torch.from_numpy(np.array(leaf["bias"])))
        for norm, leaf, stats in zip(norms, our_norms, leaves(variables["batch_stats"], convs)[1], strict=True):
            norm.weight.copy_(torch.from_numpy(np.array(leaf["scale"])))
            norm.bias.copy_(torch.from_numpy(np.array(leaf["bias"])))
            norm.running_mean.copy_(torch.from_numpy(np.array(stats["mean"])))
            norm.running_var.copy_(torch.from_numpy(np.array(stats["var"])))


@pytest.mark.parametrize("convs", [2, 3])
@SHAPES
def test_predictions_and_gradients_equal_torch(shape, classes, convs):
    module = make_torch(shape[2], classes, 16, 8, convs)
    import torch

    method = cml(make_net(shape, classes, convs=convs))
    variables = fill(jax.eval_shape(method.init, KEY, make_episode(shape, classes).support))
    copy(variables, module, convs)
    episode = make_episode(shape, classes)
    pixels = [nchw(images.pixels) for images in (episode.support, episode.query)]
    ours = method.predict(method.adapt(variables, episode.support, KEY), episode.query)
    assert_close(ours, module(*pixels, training=False).detach(), 1e-5)

    def error_of(seed):
        episode = make_episode(shape, classes, seed=seed)
        module.zero_grad()
        copy(variables, module, convs)
        logits = module(nchw(episode.support.pixels), nchw(episode.query.pixels), training=True)
        torch.nn.functional.cross_entropy(logits, torch.from_numpy(np.array(episode.label)).long()).backward()
        loss = jax.jit(jax.grad(lambda p: method.loss({**variables, "params": p}, episode, KEY)[0]))
        found, _ = leaves(loss(variables["params"]), convs)
        layers, _ = module.ordered()
        errors = [
            float((to_torch(leaf["kernel"]) - layer.weight.grad).abs().max())
            for leaf, layer in zip(found, layers, strict=True)
        ]
        assert all(float(layer.weight.grad.abs().max()) > 1e-4 for layer in layers)
        return max(errors)

    assert_within_some_draw(error_of)


@pytest.mark.parametrize("convs", [2, 3])
@pytest.mark.parametrize(("shape", "classes"), [FEMNIST, CIFAR])
def test_parameter_counts(shape, classes, convs):
    module = make_torch(shape[2], classes, 128, 64, convs)
    method = cml(make_net(shape, classes, 128, 64, convs))
    shapes = jax.eval_shape(method.init, KEY, make_episode(shape, classes).support)["params"]
    ours = sum(np.prod(leaf.shape, dtype=int) for leaf in jax.tree.leaves(shapes))
    assert ours == sum(p.numel() for p in module.parameters())
    if convs == 3:  # the context net, and the first convolution's further channels
        channels = shape[2]
        context = 25 * (channels * 64 + 64 * 64 + 64 * channels) + 2 * (64 + 2 * 64) + channels
        assert ours == {1: 861_814, 3: 857_762}[channels] + context + 25 * channels * 128


def test_the_context_sees_the_whole_support_and_training_moves_only_the_main_statistics():
    shape, classes = FEMNIST
    episode, method = make_episode(shape, classes), cml(make_net(shape, classes))
    variables = jax.jit(method.init)(KEY, episode.support)
    context = method.adapt(variables, episode.support, KEY).context
    assert context.shape == shape
    pixels = episode.support.pixels
    for i in range(len(pixels)):
        other = episode.support.replace(pixels=pixels.at[i].set(1 - pixels[i]))
        assert jnp.abs(method.adapt(variables, other, KEY).context - context).max() > 1e-4
    stats = method.loss(variables, episode, KEY)[1]["batch_stats"]
    jax.tree.map(np.testing.assert_array_equal, stats["context"], variables["batch_stats"]["context"])
    assert all(
        (a != b).any()
        for a, b in zip(
            jax.tree.leaves(stats["trunk"]), jax.tree.leaves(variables["batch_stats"]["trunk"]), strict=True
        )
    )
