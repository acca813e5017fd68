"""A small vision transformer (Dosovitskiy et al., 2021), as an example of a network without batch normalisation.

dense on patches of 4x4 pixels + position; `depth` times: x + attention(LN(x)), x + MLP(LN(x)); LN
                                                                                      -> map [n, h / 4, w / 4, width]
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from cxda_jax.nets.initial import initialisers
from cxda_jax.nets.resnet import LinearHead


class ViTTrunk(nn.Module):
    """Normalised images [n, h, w, c] to feature maps [n, h / 4, w / 4, width].

    Attributes:
      width: features of a patch, a multiple of `heads`.
      depth: blocks.
      heads: attention heads.
      dtype: of products.
      initial: how layers start; see initialisers().
    """

    width: int = 128
    depth: int = 2
    heads: int = 4
    dtype: Any = jnp.float32
    initial: str = "torch"

    @nn.compact
    def __call__(self, x: jax.Array, batch: bool = False) -> jax.Array:
        del batch  # layer normalisation has no statistics of the batch
        start = functools.partial(initialisers, self.initial)
        patches: Any = {"kernel_size": (4, 4), "strides": (4, 4), "padding": "VALID", "dtype": self.dtype}
        x = nn.Conv(self.width, name="patches", **patches, **start(16 * x.shape[-1]))(x)
        n, h, w, _ = x.shape
        x = x.reshape(n, h * w, self.width)
        x = x + self.param("position", nn.initializers.normal(0.02), x.shape[1:])
        for i in range(self.depth):
            y = nn.LayerNorm(name=f"norm{i}a")(x)
            attention = nn.MultiHeadDotProductAttention(
                self.heads, self.dtype, name=f"attention{i}", **start(self.width)
            )
            x = x + attention(y)
            y = nn.LayerNorm(name=f"norm{i}b")(x)
            y = nn.gelu(nn.Dense(2 * self.width, dtype=self.dtype, name=f"hidden{i}", **start(self.width))(y))
            x = x + nn.Dense(self.width, dtype=self.dtype, name=f"out{i}", **start(2 * self.width))(y)
        return nn.LayerNorm(name="norm")(x).reshape(n, h, w, self.width)


def vit(net: Mapping[str, Any], num_classes: int) -> tuple[nn.Module, nn.Module]:
    """Trunk and head, from the config's group net."""
    dtype, initial = jnp.dtype(net["dtype"]), net["init"]
    return ViTTrunk(net["width"], dtype=dtype, initial=initial), LinearHead(num_classes, dtype, initial=initial)
