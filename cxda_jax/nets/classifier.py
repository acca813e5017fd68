"""The network that every method shares: pixels -> trunk -> maps -> (attention) -> pool -> head -> logits."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from cxda_jax.nets.attention import Memory
from cxda_jax.types import Variables

FEATURES = ("pool", "flat", "patch")


class Classifier(nn.Module):
    """`features` says what a token is: the pooled vector, the flattened map, or each position of the map."""

    trunk: nn.Module  # (normalised images [n, h, w, c], batch) -> maps [n, h', w', channels]
    head: (
        Any  # (pooled maps [n, channels], classify) -> logits, or what its last layer sees; `last` is that layer's name
    )
    mean: tuple[float, ...]
    std: tuple[float, ...]
    attention: Any = None  # CrossAttention, for the methods that attend
    features: str = "pool"
    context: Any = None  # ContextNet, for the methods that show the trunk a summary of the support

    def __call__(self, pixels: jax.Array, batch: bool = False, context: jax.Array | None = None) -> jax.Array:
        """Images [n, h, w, c] to logits [n, classes], without attention."""
        return self.classify(self.map(pixels, batch, context))

    def map(self, pixels: jax.Array, batch: bool = False, context: jax.Array | None = None) -> jax.Array:
        """Images, uint8 or floats in 0..1, to feature maps; `batch` normalises by the batch's own statistics.

        The trunk sees `context` [h, w, c], if any, as further channels of every image.
        """
        x = self._normalise(pixels)
        if context is not None:
            x = jnp.concatenate([x, jnp.broadcast_to(context, (*x.shape[:3], context.shape[-1]))], axis=-1)
        return self.trunk(x, batch)

    def summarise(self, pixels: jax.Array) -> jax.Array:
        """Support images to one context [h, w, c], the mean of theirs."""
        return self.context(self._normalise(pixels)).mean(0)

    def classify(self, maps: jax.Array) -> jax.Array:
        """Maps [n, h, w, c], or pooled vectors [n, c], to float32 logits."""
        return self.head(self._pool(maps)).astype(jnp.float32)

    def before_last(self, maps: jax.Array) -> jax.Array:
        """Maps, or pooled vectors, to the float32 features [n, d] that the last layer sees."""
        return self.head(self._pool(maps), classify=False).astype(jnp.float32)

    def last_layer(self, variables: Variables) -> Mapping[str, jax.Array]:
        """The last layer: kernel [d, classes] and bias [classes]; logits are before_last() @ kernel + bias."""
        return variables["params"]["head"][self.head.last]

    def with_last_layer(self, variables: Variables, layer: Mapping[str, jax.Array]) -> Variables:
        """The variables with another last layer."""
        head = {**variables["params"]["head"], self.head.last: layer}
        return {**variables, "params": {**variables["params"], "head": head}}

    def tokens(self, maps: jax.Array) -> jax.Array:
        """Maps [n, h, w, c] to tokens [n or n * h * w, C], row-major: height, width, channel."""
        maps = maps.astype(jnp.float32)
        if self.features == "pool":
            return maps.mean((1, 2))
        n, h, w, c = maps.shape
        return maps.reshape(n, h * w * c) if self.features == "flat" else maps.reshape(n * h * w, c)

    def remember(self, maps: jax.Array) -> Memory:
        """Maps of the support to the attention's keys and values."""
        return self.attention.remember(self.tokens(maps))

    def remember_values(self, maps: jax.Array) -> jax.Array:
        return self.attention.remember_values(self.tokens(maps))

    def recall(self, maps: jax.Array, memory: Memory, leave_own_out: bool = False) -> jax.Array:
        """Maps of queries to logits that draw on the memory; with `leave_own_out` the queries are the support itself,
        and each draws on the others."""
        tokens = self.tokens(maps)
        return self._classify_tokens(self.attention.recall(tokens, memory, leave_own_out * self._per_image(maps)), maps)

    def mix(self, maps: jax.Array, weights: jax.Array, values: jax.Array) -> jax.Array:
        """Maps of queries to logits that draw on values under given weights [n, heads or 1, support]."""
        return self._classify_tokens(self.attention.mix(self.tokens(maps), weights, values), maps)

    def weights(self, maps: jax.Array, memory: Memory) -> jax.Array:
        """Attention of query images on support images [n, heads, support]; patches are summed over the support
        image and averaged over the query image."""
        weights, tokens = self.attention.weights(self.tokens(maps), memory), self._per_image(maps)
        return weights.reshape(len(maps), tokens, weights.shape[1], -1, tokens).sum(-1).mean(1)

    def _normalise(self, pixels: jax.Array) -> jax.Array:
        x = pixels.astype(jnp.float32) / 255 if pixels.dtype == jnp.uint8 else pixels
        return (x - jnp.asarray(self.mean)) / jnp.asarray(self.std)

    def _pool(self, maps: jax.Array) -> jax.Array:
        return maps.astype(jnp.float32).mean((1, 2)) if maps.ndim == 4 else maps

    def _per_image(self, maps: jax.Array) -> int:
        return maps.shape[1] * maps.shape[2] if self.features == "patch" else 1

    def _classify_tokens(self, tokens: jax.Array, maps: jax.Array) -> jax.Array:
        return self.classify(tokens if self.features == "pool" else tokens.reshape(maps.shape))


def fresh(net: Classifier, key: jax.Array, pixels: jax.Array, method: Any = None) -> Variables:
    """Variables to start from, of all layers that method(net, pixels) meets, or net(pixels)."""
    variables = net.init(key, pixels, method=method)
    return {"params": variables["params"], "batch_stats": variables.get("batch_stats", {})}
