"""Networks by their names, and the three kinds of network that methods are built on."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cxda_jax.config.extensions import added
from cxda_jax.config.fields import Config, Values, lookup
from cxda_jax.errors import UserError, brief
from cxda_jax.nets.attention import CrossAttention, check_attention
from cxda_jax.nets.classifier import Classifier
from cxda_jax.nets.cnn import CNNHead, CNNTrunk
from cxda_jax.nets.context import ContextNet
from cxda_jax.nets.resnet import LinearHead, ResNetTrunk
from cxda_jax.types import Inputs

SMALLEST = {"arm": 16, "same": 4}  # pixels a side of an image for the cnn, by its padding
# (the config's group net, classes, options of the trunk if it takes any) -> trunk and head.
# Another package adds its own by an entry point of the group cxda_jax.nets, as registry.py shows for methods.
NETS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "cnn": lambda c, num_classes, **options: (
        CNNTrunk(c.width, c.padding, **_shared(c), **options),
        CNNHead(num_classes, **_shared(c)),
    ),
    "resnet50": lambda c, num_classes, **options: (
        ResNetTrunk(stages=_stages(c.stages), **_shared(c), **options),
        LinearHead(num_classes, **_shared(c)),
    ),
}
NETS |= added("cxda_jax.nets", tuple(NETS), callable)


def build_net(config: Config, inputs: Inputs, **options: Any) -> Classifier:
    """The network that the config names, for such images. Options are for the trunk."""
    net, (height, width, _) = config.net, inputs.shape
    name, padding = net.name, net.padding
    make = lookup("net.name", name, NETS)
    takes_options = [n for n, other in NETS.items() if inspect.getfullargspec(other).varkw]
    if options and name not in takes_options:
        fix = f"choose another, such as {', '.join(takes_options)}"
        raise UserError(f"it has no {next(iter(options))}", "net.name", name, fix)
    if name == "cnn" and min(height, width) < SMALLEST[padding]:
        least, sides = SMALLEST[padding], f"{height}x{width}"
        fault = f"takes images from {least} pixels a side, those of {brief(inputs.name)} are {sides}"
        fix = f"'same' takes them from {SMALLEST['same']}, resnet50 all"
        raise UserError(fault, "net.padding", padding, fix)
    trunk, head = make(net, inputs.num_classes, **options)
    return Classifier(trunk, head, inputs.mean, inputs.std)


def build_attending_net(config: Config, inputs: Inputs, features: str = "", learned: int = 0) -> Classifier:
    """build_net() with attention, which has so many learned tokens; `features` replaces attention.features."""
    net, features = build_net(config, inputs), features or config.attention.features
    image = jax.ShapeDtypeStruct((1, *inputs.shape), jnp.float32)
    maps = jax.eval_shape(lambda x: net.trunk.init_with_output(jax.random.key(0), x)[0], image)
    options = {k: v for k, v in config.attention.items() if k != "features"}
    dim = math.prod(maps.shape[1:]) if features == "flat" else maps.shape[-1]
    check_attention(dim, options["heads"], options["ratio"])
    attention = CrossAttention(dim, learned=learned, **_shared(config.net), **options)
    return net.clone(attention=attention, features=features)


def build_context_net(config: Config, inputs: Inputs, width: int, convs: int) -> Classifier:
    """build_net() with a context network of this width, which gives as many channels as the image has.

    A cnn then has `convs` convolutions.
    """
    options = {"convs": convs} if config.net.name == "cnn" else {}
    context = ContextNet(inputs.shape[-1], width, **_shared(config.net))
    return build_net(config, inputs, **options).clone(context=context)


def _shared(net: Values) -> dict[str, Any]:
    """The options that all parts of a network take from the config's group net."""
    return {"dtype": jnp.dtype(net.dtype), "initial": net.init}


def _stages(stages: Sequence[int]) -> tuple[int, ...]:
    if not 1 <= len(stages) <= 6 or not all(1 <= blocks <= 100 for blocks in stages):
        raise UserError("not a network", "net.stages", tuple(stages), "give one to six counts of 1 to 100 blocks")
    return tuple(stages)
