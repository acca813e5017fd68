"""CML's context and SLA's gates and adapters, against PyTorch with the same weights and closed forms."""

import jax
import numpy as np

from cxda_jax.losses import cross_entropy
from cxda_jax.methods.cml import cml
from cxda_jax.methods.sla import sla
from cxda_jax.nets.adapters import sparsemax
from cxda_jax.nets.classifier import Classifier
from cxda_jax.nets.cnn import CNNHead, CNNTrunk
from cxda_jax.nets.context import ContextNet
from tests import nets
from tests.nets import CIFAR, FEMNIST, KEY, assert_close, initialised, make_images, nchw, tensor, torch_named


class TorchLayers:
    """Layers of PyTorch on [n, c, h, w] that read Flax variables by dotted names."""

    def __init__(self, peer, variables):
        self.torch, self.F = peer.torch, peer.F
        self.params = {name: value.requires_grad_() for name, value in torch_named(variables["params"]).items()}
        self.stats = torch_named(variables["batch_stats"])

    def of(self, name, *kinds):
        return (self.params[f"{name}.{kind}"] for kind in kinds)

    def conv(self, x, name, pad):
        return self.F.conv2d(x, *self.of(name, "weight", "bias"), padding=pad)

    def dense(self, x, name):
        return self.F.linear(x, *self.of(name, "weight", "bias"))

    def norm(self, x, name, batch):
        stored = [None if batch else self.stats[f"{name}.running_{kind}"] for kind in ("mean", "var")]
        return self.F.relu(self.F.batch_norm(x, *stored, *self.of(name, "weight", "bias"), batch))

    def cnn(self, x, convs, batch, beside=lambda x, name, crop: 0):
        """ARM's CNN; `beside` is added to each convolution."""
        for i, pad in enumerate((2, 0, 0)[-convs:]):
            y = self.conv(x, f"trunk.conv{i}", pad) + beside(x, f"trunk.adapters{i}", 2 - pad)
            x = self.norm(y, f"trunk.bn{i}", batch)
            x = x if i == convs - 3 else self.F.max_pool2d(x, 2)
        return self.dense(self.F.relu(self.dense(x.mean((2, 3)), "head.hidden")), "head.logits")

    def error(self, logits, labels, grads) -> float:
        """The largest difference of a parameter's gradient of the cross-entropy; each weight must have one."""
        loss, ours = self.F.cross_entropy(logits, tensor(labels).long()), torch_named(grads)
        theirs = self.torch.autograd.grad(loss, list(self.params.values()))
        pairs = list(zip(self.params, theirs, strict=True))
        assert all(grad.abs().max() > 1e-4 for name, grad in pairs if name.endswith(".weight"))
        return max(float((ours[name] - grad).abs().max()) for name, grad in pairs)


def test_cml_equals_torch(peer):
    convs, pixels = 2, ((0.1,) * 3, (0.7,) * 3)
    method = cml(Classifier(CNNTrunk(16, convs=convs), CNNHead(10), *pixels, context=ContextNet(3, 8)))
    variables = initialised(method, CIFAR[0])
    net = TorchLayers(peer, variables)

    def theirs(episode, batch):
        context, query = ((nchw(images.pixels) - 0.1) / 0.7 for images in (episode.support, episode.query))
        for i in range(2):
            context = net.norm(net.conv(context, f"context.conv{i}", 2), f"context.bn{i}", True)
        context = net.conv(context, "context.out", 2).mean(0, keepdim=True).expand(len(query), -1, -1, -1)
        return net.cnn(net.torch.cat([query, context], 1), convs, batch)

    @jax.jit
    def ours(params, episode):
        graded = jax.grad(lambda p: method.loss({**variables, "params": p}, episode, KEY), has_aux=True)
        return graded(params), method.predict(method.adapt(variables, episode.support, KEY), episode.query)

    def error_of(seed):
        episode = nets.make_episode(*CIFAR, seed=seed)
        (grads, aux), answer = ours(variables["params"], episode)
        assert_close(answer, theirs(episode, batch=False).detach(), 1e-5)
        after, before = (jax.tree.map(np.asarray, stats["batch_stats"]) for stats in (aux, variables))
        nets.close(after["context"], before["context"], 1e-6)  # it never uses the stored ones
        return net.error(theirs(episode, batch=True), episode.label, grads)

    nets.assert_within_some_draw(error_of)


def test_sparsemax_equals_the_sorted_closed_form():
    """That of Martins and Astudillo (2016), row by row."""
    rng, expected = np.random.default_rng(7), []
    z = np.concatenate([rng.normal(0, scale, (50, 7)) for scale in (0.1, 1.0, 10.0)]).astype(np.float32)
    for row in z.astype(np.float64):
        u = np.sort(row)[::-1]
        k = max(k for k in range(1, len(u) + 1) if 1 + k * u[k - 1] > u[:k].sum())
        expected.append(np.maximum(row - (u[:k].sum() - 1) / k, 0))
    np.testing.assert_allclose(jax.jit(sparsemax)(z), expected, atol=2e-6)


def test_sla_equals_torch(peer):
    shape, net = FEMNIST[0], nets.make_net(*FEMNIST).clone(trunk=CNNTrunk(16, adapters=2))
    method = sla(net)
    variables, labels = initialised(method, shape), np.arange(9)
    layers = TorchLayers(peer, variables)

    def adapters(x, name, crop):
        gates, weight = layers.dense(x.mean((2, 3)), f"{name}.gate"), layers.params[f"{name}.mix.weight"]
        inner = x[:, :, crop : x.shape[2] - crop, crop : x.shape[3] - crop]
        first, second = (peer.F.conv2d(inner, weight[:, :, k, None, None]) for k in (0, 1))
        share = ((gates[:, 0] - gates[:, 1] + 1) / 2).clamp(0, 1)[:, None, None, None]
        return share * first + (1 - share) * second

    @jax.jit
    def ours(params, images):
        def loss(params):
            logits = net.apply({**variables, "params": params}, images.pixels, True, mutable=["batch_stats"])[0]
            return cross_entropy(logits, labels)

        return jax.grad(loss)(params), method.predict(variables, images)

    def error_of(seed):
        images = make_images(shape, 9, seed)
        grads, answer = ours(variables["params"], images)
        expected, trained = (layers.cnn(nchw(images.pixels), 3, batch, adapters) for batch in (False, True))
        assert_close(answer, expected.detach(), 1e-5)
        return layers.error(trained, labels, grads)

    nets.assert_within_some_draw(error_of)
