"""A network in Flax NNX, as an example. Flax's own bridge makes a Linen module of the trunk.

twice: conv 3x3 / 2, BN, ReLU                                                          -> map [n, h / 4, w / 4, width]
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from cxda_jax.nets.initial import initialisers
from cxda_jax.nets.normalisation import moments, moments_of
from cxda_jax.nets.resnet import LinearHead


def normalise(layer: nnx.BatchNorm, x: jax.Array, batch: bool | int | jax.Array) -> jax.Array:
    """By the statistics of the images that `batch` names, which the layer then has; see BatchNorm of the package."""
    if batch is not False:
        found = moments(x[: None if batch is True else batch]) if isinstance(batch, int) else moments_of(x, batch)
        layer.mean, layer.var = map(nnx.BatchStat, found)
    return layer(x, use_running_average=True)


class Layers(nnx.Module):
    def __init__(self, channels: int, width: int, dtype: Any, initial: str, *, rngs: nnx.Rngs):
        shared: Any = {"kernel_size": (3, 3), "strides": 2, "dtype": dtype, "rngs": rngs}
        self.conv0 = nnx.Conv(channels, width, **shared, **initialisers(initial, 9 * channels))
        self.conv1 = nnx.Conv(width, width, **shared, **initialisers(initial, 9 * width))
        self.bn0, self.bn1 = (nnx.BatchNorm(width, rngs=rngs) for _ in range(2))

    def __call__(self, x: jax.Array, batch: bool | int | jax.Array = False) -> jax.Array:
        x = nnx.relu(normalise(self.bn0, self.conv0(x), batch))
        return nnx.relu(normalise(self.bn1, self.conv1(x), batch))


class NNXTrunk(nn.Module):
    """Normalised images [n, h, w, c] to feature maps; NNX must know c when it makes the layers."""

    options: tuple[Any, ...]  # of the layers, after c

    @nn.compact
    def __call__(self, x: jax.Array, batch: bool | int | jax.Array = False) -> jax.Array:
        return nnx.bridge.ToLinen(Layers, (x.shape[-1], *self.options), name="layers")(x, batch)


def nnx_net(net: Mapping[str, Any], num_classes: int) -> tuple[nn.Module, nn.Module]:
    """Trunk and head, from the config's group net."""
    dtype, initial = jnp.dtype(net["dtype"]), net["init"]
    return NNXTrunk((net["width"], dtype, initial)), LinearHead(num_classes, dtype, initial=initial)
