"""ResNet-50 and the reading of its weights, against PyTorch under torchvision's names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax import backend
from cxda_jax.errors import UserError
from cxda_jax.losses import cross_entropy
from cxda_jax.methods.erm import erm
from cxda_jax.nets.classifier import Classifier
from cxda_jax.nets.pretrained import convert, read_weights, torch_name
from cxda_jax.nets.resnet import LinearHead, ResNetTrunk
from tests.nets import KEY, assert_close, fill, make_images, nchw, tensor, torch_named, total

SMALL = {"stages": (1, 2), "width": 8}


def make_net(classes=5, channels=3, **options):
    return Classifier(ResNetTrunk(**options), LinearHead(classes), (0.0,) * channels, (1.0,) * channels)


def shapes_of(net):
    return jax.eval_shape(erm(net).init, KEY, make_images((32, 32, len(net.mean)), 2))


@pytest.fixture(scope="module")
def torch_resnet():
    pytest.importorskip("torch")
    from cxda_jax.bench import torch_peer

    return torch_peer


def randomised(torch_resnet, *args, **options):
    """A TorchResNet whose statistics and scales are not the fresh ones, and its weights as arrays."""
    torch = torch_resnet.torch
    torch.manual_seed(0)
    module = torch_resnet.TorchResNet(*args, **options)
    with torch.no_grad():
        for name, value in module.state_dict().items():
            if name.endswith("running_mean"):
                value.normal_(0, 0.1)
            elif name.endswith("running_var"):
                value.uniform_(0.5, 1.5)
            elif "bn" in name or "downsample.1" in name:
                value.copy_(value + 0.1 * torch.rand(value.shape)) if value.ndim else None
    return module, {name: value.numpy().copy() for name, value in module.state_dict().items()}


@pytest.fixture(scope="module")
def small(torch_resnet):
    return randomised(torch_resnet, 5, **SMALL)


def test_parameter_counts():
    shapes, adapted = (shapes_of(make_net(1000, **options))["params"] for options in ({}, {"adapters": 2}))
    assert total(shapes["trunk"]) == 23_508_032 and total(shapes) == 25_557_032
    assert total(adapted) - total(shapes) == 2_522_920


def test_the_whole_network_equals_torch_and_its_weights_round_trip(torch_resnet):
    """Every array of the file is in the network once, and comes back as it was."""
    module, weights = randomised(torch_resnet, 5)
    net, images = make_net(), make_images((112, 112, 3), 2)
    variables = convert(weights, fill(shapes_of(net)), dont_load=())
    maps = jax.jit(lambda v, x: net.apply(v, x, method="map"))(variables, images.pixels)
    assert maps.shape == (2, 4, 4, 2048)
    with torch_resnet.torch.no_grad():
        expected = module.eval()(nchw(images.pixels))
    assert expected.abs().max() > 0.1
    assert_close(net.apply(variables, maps, method="classify"), expected, 1e-3)
    back = {}
    for tree in (variables["params"], variables["batch_stats"]):
        back |= torch_named(tree, lambda layers: torch_name(layers[1:]))
    assert back.keys() == {name for name in weights if not name.endswith("num_batches_tracked")}
    for name, value in back.items():
        np.testing.assert_array_equal(value, weights[name])


@pytest.mark.parametrize(("side", "batch", "options"), [
    (56, False, {"stages": (1, 1, 1, 2), "width": 8}), (48, True, SMALL),
])  # fmt: skip
def test_gradients_equal_torch(torch_resnet, side, batch, options):
    """Each parameter's gradient by itself: the largest one would hide the rest.

    The stages hold each kind of block, at 56 pixels on maps with odd and narrow sides. Through fifty random layers that use
    the batch's own statistics, gradients grow so that rounding alone makes 3 %.
    """
    module, weights = randomised(torch_resnet, 5, **options)
    net, images, labels = make_net(**options), make_images((side, side, 3), 4), jnp.arange(4)
    variables = convert(weights, fill(shapes_of(net)), dont_load=())
    theirs = module.train(batch)(nchw(images.pixels))
    torch_resnet.torch.nn.functional.cross_entropy(theirs, tensor(labels).long()).backward()

    def loss(params):
        logits = net.apply({**variables, "params": params}, images.pixels, batch, mutable=["batch_stats"])[0]
        return cross_entropy(logits, labels), logits

    grads, logits = backend.jit(jax.grad(loss, has_aux=True))(variables["params"])
    assert_close(logits, theirs.detach(), 1e-3)
    expected = {name: p.grad.numpy() for name, p in module.named_parameters()}
    expected |= {name: value for name, value in weights.items() if "running" in name}
    expected = convert(expected, variables, dont_load=())["params"]

    def differ(ours, theirs):
        assert np.linalg.norm(theirs) > 0
        return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))

    errors = jax.tree.leaves(jax.tree.map(differ, grads, expected))
    # One unit whose sign differs by rounding changes its block's gradients by 4e-3. With one jaxlib there is such a unit.
    assert np.median(errors) < 1e-3 and max(errors) < 1e-2


def test_the_head_stays_where_it_is_not_loaded(torch_resnet):
    _, weights = randomised(torch_resnet, 1000, **SMALL)
    variables = fill(shapes_of(make_net(5, **SMALL)))
    loaded = convert(weights, variables)
    jax.tree.map(np.testing.assert_array_equal, loaded["params"]["head"], variables["params"]["head"])
    kernel = loaded["params"]["trunk"]["layer2_0"]["downsample_conv"]["kernel"]
    np.testing.assert_array_equal(kernel, weights["layer2.0.downsample.0.weight"].transpose(2, 3, 1, 0))
    with pytest.raises(UserError, match=r"fc.bias is \(1000,\) in our layout, the network's is \(5,\)"):
        convert(weights, variables, dont_load=())


def test_further_channels_repeat_the_first_ones(small):
    kernel = convert(small[1], fill(shapes_of(make_net(channels=6, **SMALL))))["params"]["trunk"]["conv1"]["kernel"]
    np.testing.assert_array_equal(kernel, np.tile(small[1]["conv1.weight"].transpose(2, 3, 1, 0), (1, 1, 2, 1)))


def test_adapters_are_left_alone_and_take_the_stride(small):
    """With matrices of zeros they change nothing, whatever their shapes; with others they do."""
    plain, net = make_net(**SMALL), make_net(**SMALL, adapters=2)
    pixels = make_images((32, 32, 3), 3).pixels
    adapted, variables = (convert(small[1], fill(shapes_of(n))) for n in (net, plain))
    trunk = adapted["params"]["trunk"]
    assert {"adapters1"} == {name for name in trunk if name.startswith("adapters")}
    assert {"adapters2"} == {name for name in trunk["layer2_0"] if name.startswith("adapters")}
    zeroed = jax.tree_util.tree_map_with_path(
        lambda path, leaf: 0 * leaf if "'mix'" in jax.tree_util.keystr(path) else leaf, adapted
    )
    expected, apply = jax.jit(plain.apply)(variables, pixels), jax.jit(net.apply)
    assert_close(apply(zeroed, pixels), expected, 1e-6)
    assert np.abs(apply(adapted, pixels) - expected).max() > 1e-3


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_files_are_read_as_they_were_written(torch_resnet, small, tmp_path, suffix):
    path, (module, weights) = tmp_path / f"weights{suffix}", small
    if suffix == ".pth":
        torch_resnet.torch.save(module.state_dict(), path)
    else:
        pytest.importorskip("safetensors.numpy").save_file(weights, path)
    read = read_weights(path)
    assert read.keys() == weights.keys()
    for name, value in weights.items():
        np.testing.assert_array_equal(read[name], value)


def test_unexplained_names_are_named(small):
    weights, variables = dict(small[1]), fill(shapes_of(make_net(**SMALL)))
    with pytest.raises(UserError, match="the network has no layer9.0.conv1.weight"):
        convert({**weights, "layer9.0.conv1.weight": np.zeros(3)}, variables)
    del weights["layer2.1.bn2.running_var"]
    with pytest.raises(UserError, match="layer2.1.bn2.running_var is missing"):
        convert(weights, variables)
