"""Networks and their gradients against plain PyTorch, and how layers start."""

import jax
import numpy as np
import pytest
from flax import linen as nn

from cxda_jax.methods.cxda import WithMemory, domain_weights
from cxda_jax.methods.erm import erm
from cxda_jax.nets.classifier import Classifier
from cxda_jax.nets.cnn import CNNHead
from tests import nets
from tests.nets import CIFAR, FEMNIST, KEY, assert_close, make_net


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
