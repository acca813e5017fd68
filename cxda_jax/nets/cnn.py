"""The small CNN of ARM (Zhang et al., 2021), which the paper uses on FEMNIST and CIFAR-C.

    conv 5x5 pad 2, BN, ReLU; twice: conv 5x5 pad 0, BN, ReLU, max-pool 2      -> map [n, h, w, width]
    global average pool; dense 200, ReLU, dense num_classes                    -> logits

861,814 parameters on FEMNIST (28x28x1, 62 classes) and 857,762 on CIFAR-C (32x32x3, 10 classes) at width 128.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from cxda_jax.nets.adapters import LatentAdapters
from cxda_jax.nets.convolution import convolve, max_pool
from cxda_jax.nets.initial import initialisers
from cxda_jax.nets.normalisation import BatchNorm

PADDINGS = {"arm": (2, 0, 0), "same": (2, 2, 2)}


class CNNTrunk(nn.Module):
    """Normalised images [n, h, w, c] to feature maps [n, h', w', width].

    Attributes:
      width: channels of each layer.
      padding: a key of PADDINGS, which says how many pixels each convolution pads.
      dtype: of convolutions.
      convs: 3, or 2 to leave out the first convolution, which has no pooling.
      adapters: latent adapters beside each convolution; `zero_adapters` start at zero.
      all_convs: changes nothing, since no convolution here has a kernel of one pixel.
      initial: how layers start; see initialisers().
    """

    width: int = 128
    padding: str = "arm"
    dtype: Any = jnp.float32
    convs: int = 3
    adapters: int = 0
    zero_adapters: bool = False
    all_convs: bool = False
    initial: str = "torch"

    @nn.compact
    def __call__(self, x: jax.Array, batch: bool | jax.Array = False) -> jax.Array:
        for i, pad in enumerate(PADDINGS[self.padding][-self.convs :]):
            y = nn.Conv(
                self.width, (5, 5), padding=((pad, pad), (pad, pad)), dtype=self.dtype, name=f"conv{i}",
                conv_general_dilated=convolve, **initialisers(self.initial, 25 * x.shape[-1]),
            )(x)  # fmt: skip
            if self.adapters:
                options = (self.width, self.adapters, 2 - pad, self.zero_adapters, self.dtype)
                y = y + LatentAdapters(*options, initial=self.initial, name=f"adapters{i}")(x)
            pools = i != self.convs - 3
            x = BatchNorm(not pools, name=f"bn{i}")(y, batch)
            x = nn.relu(max_pool(x)) if pools else x  # in this order ReLU has a quarter of the pixels
        return x


class CNNHead(nn.Module):
    """Pooled features [n, width] to logits [n, num_classes], or with
    `classify=False` to the last layer's input [n, hidden]."""

    num_classes: int
    hidden: int = 200
    dtype: Any = jnp.float32
    last: str = "logits"  # the name of the last layer
    initial: str = "torch"  # see initialisers()

    @nn.compact
    def __call__(self, x: jax.Array, classify: bool = True) -> jax.Array:
        start, last_start = (initialisers(self.initial, fan_in) for fan_in in (x.shape[-1], self.hidden))
        x = nn.relu(nn.Dense(self.hidden, dtype=self.dtype, name="hidden", **start)(x))
        last = nn.Dense(self.num_classes, dtype=self.dtype, name=self.last, **last_start)
        return last(x) if classify else x
