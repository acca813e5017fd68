"""ResNet-50 and the reading of its weights, against PyTorch under torchvision's names."""

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from cxda_jax.errors import UserError
from cxda_jax.losses import cross_entropy
from cxda_jax.machine import backend
from cxda_jax.methods.erm import erm
from cxda_jax.nets.classifier import Classifier
from cxda_jax.nets.pretrained import convert, read_weights, torch_name
from cxda_jax.nets.resnet import LinearHead, ResNetTrunk
from tests.nets import KEY, assert_close, initialised, make_images, nchw, tensor, torch_named, total

SMALL = {"stages": (1, 2), "width": 8}


def make_net(classes=5, channels=3, **options):
    return Classifier(ResNetTrunk(**options), LinearHead(classes), (0.0,) * channels, (1.0,) * channels)


def variables_of(net):
    return initialised(erm(net), (32, 32, len(net.mean)))


def named(variables):
    """Variables under torchvision's names."""
    trees = variables["params"], variables["batch_stats"]
    return {k: v.numpy() for tree in trees for k, v in torch_named(tree, lambda path: torch_name(path[1:])).items()}


def torch_resnet(peer, weights, **options):
    """PyTorch's network with these weights: all that it has, but for its counters of batches."""
    module = peer.TorchResNet(5, **options)
    found = module.load_state_dict({name: tensor(value) for name, value in weights.items()}, strict=False)
    assert not found.unexpected_keys and all(name.endswith("num_batches_tracked") for name in found.missing_keys)
    return module


@pytest.fixture(scope="module")
def small():
    return named(variables_of(make_net(**SMALL)))


def test_parameter_counts():
    """Without adapters, and with two beside the larger kernels."""
    for options, count in ({}, 25_557_032), ({"adapters": 2}, 25_557_032 + 2_522_920):
        params = jax.eval_shape(erm(make_net(1000, **options)).init, KEY, make_images((32, 32, 3), 2))["params"]
        assert total(params) == count


@pytest.mark.parametrize(("side", "batch", "options"), [
    (56, False, {"stages": (1, 1, 1, 2), "width": 8}), (48, True, SMALL),
])  # fmt: skip
def test_logits_and_gradients_equal_torch_and_weights_round_trip(peer, side, batch, options):
    """Each parameter's gradient by itself. The stages hold each kind of block, at 56 pixels on odd and narrow maps."""
    net, images, labels = make_net(**options), make_images((side, side, 3), 4), np.arange(4)
    given = variables_of(net)
    weights = named(given)
    module, variables = torch_resnet(peer, weights, **options), convert(weights, jax.tree.map(np.zeros_like, given), ())
    jax.tree.map(np.testing.assert_array_equal, variables, given)
    theirs = module.train(batch)(nchw(images.pixels))
    peer.F.cross_entropy(theirs, tensor(labels).long()).backward()

    def loss(params):
        logits = net.apply({**variables, "params": params}, images.pixels, batch, mutable=["batch_stats"])[0]
        return cross_entropy(logits, labels), logits

    grads, logits = backend.jit(jax.grad(loss, has_aux=True))(variables["params"])
    assert_close(logits, theirs.detach(), 1e-3)
    expected = {name: p.grad.numpy() for name, p in module.named_parameters()}
    expected |= {name: value for name, value in weights.items() if "running" in name}
    expected = convert(expected, variables, dont_load=())["params"]

    errors = jax.tree.map(lambda a, b: np.linalg.norm(np.subtract(a, b)) / np.linalg.norm(b), grads, expected)
    errors = jax.tree.leaves(errors)
    # One unit whose sign differs by rounding changes its block's gradients by 4e-3.
    assert np.median(errors) < 1e-3 and max(errors) < 1e-2


def test_a_head_stays_where_it_is_not_loaded_and_further_channels_repeat(small):
    weights = named(variables_of(make_net(1000, **SMALL)))
    variables = variables_of(make_net(5, **SMALL))
    loaded = convert(weights, variables)
    jax.tree.map(np.testing.assert_array_equal, loaded["params"]["head"], variables["params"]["head"])
    kernel = loaded["params"]["trunk"]["layer2_0"]["downsample_conv"]["kernel"]
    np.testing.assert_array_equal(kernel, weights["layer2.0.downsample.0.weight"].transpose(2, 3, 1, 0))
    with pytest.raises(UserError, match=r"fc.bias is \(1000,"):
        convert(weights, variables, dont_load=())
    kernel = convert(small, variables_of(make_net(channels=6, **SMALL)))["params"]["trunk"]["conv1"]["kernel"]
    np.testing.assert_array_equal(kernel, np.tile(small["conv1.weight"].transpose(2, 3, 1, 0), (1, 1, 2, 1)))


def test_files_are_read_as_they_were_written(peer, small, tmp_path):
    peer.torch.save({name: tensor(value) for name, value in small.items()}, tmp_path / "weights.pth")
    save_file(small, tmp_path / "weights.safetensors")
    for path in tmp_path.iterdir():
        read = read_weights(path)
        assert read.keys() == small.keys()
        for name, value in small.items():
            np.testing.assert_array_equal(read[name], value)
