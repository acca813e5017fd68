"""Small networks, their inputs and weights, and how near to PyTorch's they must be."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from cxda_jax.nets.attention import CrossAttention
from cxda_jax.nets.classifier import Classifier
from cxda_jax.nets.cnn import CNNHead, CNNTrunk
from cxda_jax.nets.initial import uniform
from cxda_jax.types import Episode, Images

FEMNIST, CIFAR = ((28, 28, 1), 62), ((32, 32, 3), 10)
SHAPES = pytest.mark.parametrize(("shape", "classes"), [FEMNIST, CIFAR], ids=["femnist", "cifar"])
KEY = jax.random.key(0)


class PatchTrunk(nn.Module):
    """Of what the package's own networks do not have: parameters that are in no layer, layers over several axes, and no
    normalisation."""

    @nn.compact
    def __call__(self, x, batch=False):
        x = nn.Conv(32, (4, 4), (4, 4), name="patches", **uniform(16 * x.shape[-1]))(x)
        x = x + self.param("position", nn.initializers.normal(0.5), x.shape[1:])
        x = nn.relu(nn.DenseGeneral((2, 4), **uniform(32))(x))
        return nn.DenseGeneral(16, (-2, -1), **uniform(2 * 4))(x)


def make_net(shape, classes, width=16, **options) -> Classifier:
    """Pixels pass as they are: mean 0 and deviation 1."""
    return Classifier(CNNTrunk(width), CNNHead(classes), (0.0,) * shape[2], (1.0,) * shape[2], **options)


def make_attending(shape, classes, features, width=16, **options) -> Classifier:
    side = ((shape[0] - 4) // 2 - 4) // 2
    dim = width * side**2 if features == "flat" else width
    return make_net(shape, classes, width, attention=CrossAttention(dim, **options), features=features)


def make_images(shape, n, seed=0):
    pixels = np.random.default_rng(seed).random((n, *shape), np.float32)
    return Images(jnp.asarray(pixels), jnp.zeros(n, jnp.int32))


def make_episode(shape, classes, support=12, query=8, seed=1) -> Episode:
    labels = np.random.default_rng(7).integers(0, classes, support + query)
    return Episode(
        make_images(shape, support, seed), make_images(shape, query, -seed + 1000), jnp.asarray(labels[:query]),
        jnp.asarray(labels[query:]),
    )  # fmt: skip


def fill(shapes, seed=9):
    """Values for a tree of shapes: sizes as at the start, but no zeros and ones, so that leaving one out shows."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name, fan_in = path[-1].key, max(1, math.prod(leaf.shape[:-1]))
        low, high = (0.8, 1.2) if name in ("scale", "var") else (-(fan_in**-0.5), fan_in**-0.5)
        return jnp.asarray(rng.uniform(low, high, leaf.shape) * (0.2 if leaf.ndim == 1 and low < 0 else 1), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def initialised(method, shape):
    return fill(jax.eval_shape(method.init, KEY, make_images(shape, 2)))


def assert_close(ours, theirs, tolerance=1e-4):
    """Within `tolerance` of the larger of 1 and the largest entry."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * max(1.0, np.abs(theirs).max()))


def gradient_error(peer, grads, module) -> float:
    """The largest difference of any parameter's gradient, which are all compared."""
    theirs = {
        n if n.startswith("att") else "net." + n.removeprefix("net."): p.grad for n, p in module.named_parameters()
    }
    ours = peer.torch_tensors(grads)
    assert set(ours) == set(theirs)
    assert max(float(g.abs().max()) for g in theirs.values()) > 0.1  # else a tolerance would say nothing
    errors = peer.torch.cat([(ours[name] - grad).abs().flatten() for name, grad in theirs.items()])
    assert np.quantile(errors, 0.9) < 1e-6
    return float(errors.max())


def assert_within_some_draw(error_of, tolerance=1e-4):
    """Rounding may put an activation on the other side of a ReLU's kink, or let another position win a max-pool window,
    which sends that gradient elsewhere. It spoils the odd draw of images, where a wrong gradient spoils them all."""
    errors = []
    for seed in (2, 3, 4):
        errors.append(error_of(seed))
        if errors[-1] < tolerance:
            return
    pytest.fail(f"gradients differ by {errors}, tolerance {tolerance}")


def nchw(pixels):
    import torch

    return torch.from_numpy(np.array(pixels).transpose(0, 3, 1, 2).copy())


def tensor(x):
    import torch

    return torch.from_numpy(np.array(x))
