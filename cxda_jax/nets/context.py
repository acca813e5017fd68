"""The context network of ARM-CML (Zhang et al., 2021). It describes each image by a few further channels."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from cxda_jax.nets.initial import initialisers
from cxda_jax.nets.normalisation import BatchNorm


class ContextNet(nn.Module):
    """Normalised images [n, h, w, c] to contexts [n, h, w, features], always by the batch's own statistics;
    see BatchNorm."""

    features: int
    width: int = 64  # channels of the layers
    dtype: Any = jnp.float32
    initial: str = "torch"  # how layers start; see initialisers()

    @nn.compact
    def __call__(self, x: jax.Array, batch: bool | jax.Array = True) -> jax.Array:
        def conv(x: jax.Array, features: int, name: str) -> jax.Array:
            start = initialisers(self.initial, 25 * x.shape[-1])
            return nn.Conv(features, (5, 5), padding=((2, 2), (2, 2)), dtype=self.dtype, name=name, **start)(x)

        for i in range(2):
            x = nn.relu(BatchNorm(name=f"bn{i}")(conv(x, self.width, f"conv{i}"), batch))
        return conv(x, self.features, "out")
