"""CML against PyTorch with the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax.methods.cml import cml
from cxda_jax.nets.classifier import Classifier
from cxda_jax.nets.cnn import CNNHead, CNNTrunk
from cxda_jax.nets.context import ContextNet
from tests.nets import (
    CIFAR,
    FEMNIST,
    KEY,
    SHAPES,
    TorchLayers,
    assert_close,
    assert_within_some_draw,
    initialised,
    make_episode,
    nchw,
    total,
)  # fmt: skip


def make(shape, classes, convs=3, width=16, context_width=8):
    channels = shape[2]
    context = ContextNet(channels, context_width)
    return cml(
        Classifier(
            CNNTrunk(width, convs=convs), CNNHead(classes), (0.1,) * channels, (0.7,) * channels, context=context
        )
    )


def torch_cml(net, episode, convs, batch):
    context, query = ((nchw(images.pixels) - 0.1) / 0.7 for images in (episode.support, episode.query))
    for i in range(2):
        context = net.norm(net.conv(context, f"context.conv{i}", 2), f"context.bn{i}", True)
    context = net.conv(context, "context.out", 2).mean(0, keepdim=True).expand(len(query), -1, -1, -1)
    return net.cnn(net.torch.cat([query, context], 1), convs, batch)


@pytest.mark.parametrize(("benchmark", "convs"), [(FEMNIST, 3), (CIFAR, 2)], ids=["femnist", "cifar"])
def test_predictions_and_gradients_equal_torch(peer, benchmark, convs):
    method, episode = make(*benchmark, convs), make_episode(*benchmark)
    variables = initialised(method, benchmark[0])
    net = TorchLayers(peer, variables)
    answer = jax.jit(lambda e: method.predict(method.adapt(variables, e.support, KEY), e.query))
    assert_close(answer(episode), torch_cml(net, episode, convs, batch=False).detach(), 1e-5)
    gradient = jax.jit(jax.grad(lambda p, episode: method.loss({**variables, "params": p}, episode, KEY)[0]))

    def error_of(seed):
        episode = make_episode(*benchmark, seed=seed)
        grads = gradient(variables["params"], episode)
        return net.error(torch_cml(net, episode, convs, batch=True), episode.label, grads)

    assert_within_some_draw(error_of)


@pytest.mark.parametrize("convs", [2, 3])
@SHAPES
def test_parameter_counts(shape, classes, convs):
    method = make(shape, classes, convs, 128, 64)
    # Beside those of the plain network: the context net, and the first convolution's further channels.
    channels = shape[2]
    context = 25 * (channels * 64 + 64 * 64 + 64 * channels) + 2 * (64 + 2 * 64) + channels
    expected = {1: 861_814, 3: 857_762}[channels] + context + 25 * channels * 128
    expected -= 25 * 128 * 128 + 3 * 128 if convs == 2 else 0
    assert total(jax.eval_shape(method.init, KEY, make_episode(shape, classes).support)["params"]) == expected


def test_the_context_sees_the_whole_support_and_training_moves_only_the_main_statistics():
    shape, classes = FEMNIST
    episode, method = make_episode(shape, classes, support=5), make(shape, classes)
    variables = jax.jit(method.init)(KEY, episode.support)
    context_of = jax.jit(lambda support: method.adapt(variables, support, KEY).context)
    context = context_of(episode.support)
    assert context.shape == shape
    pixels = episode.support.pixels
    for i in range(len(pixels)):
        other = episode.support.replace(pixels=pixels.at[i].set(1 - pixels[i]))
        assert jnp.abs(context_of(other) - context).max() > 1e-4
    stats, before = jax.jit(method.loss)(variables, episode, KEY)[1]["batch_stats"], variables["batch_stats"]
    jax.tree.map(np.testing.assert_array_equal, stats["context"], before["context"])
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a != b).any(), stats["trunk"], before["trunk"])))
