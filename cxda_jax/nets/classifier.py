"""The network of all methods: pixels -> trunk -> maps -> (attention) -> pool -> head -> logits."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from cxda_jax.nets.attention import Memory
from cxda_jax.types import Variables


class Classifier(nn.Module):
    """A trunk and a head, with the parts that some methods need.

    Attributes:
      trunk: a module (normalised images [n, h, w, c], batch) -> maps [n, h', w', channels].
      head: a module (pooled maps [n, channels], classify) -> logits [n, classes]; with classify=False it returns the
        last layer's input. `head.last` is that layer's name.
      mean: of each channel of the images, in 0..1; std likewise.
      attention: a CrossAttention, for the cxda methods.
      features: what a token of the attention is: "pool" the pooled vector, "flat" the flattened map, "patch" each
        position of the map.
      context: a ContextNet, for cml.
      transformer: a CausalTransformer, for icrm; the head reads out its features.
    """

    trunk: nn.Module
    head: Any
    mean: tuple[float, ...]
    std: tuple[float, ...]
    attention: Any = None
    features: str = "pool"
    context: Any = None
    transformer: Any = None

    def __call__(
        self, pixels: jax.Array, batch: bool | jax.Array = False, context: jax.Array | None = None
    ) -> jax.Array:
        """Images [n, h, w, c] to logits [n, classes], without attention; see map()."""
        return self.classify(self.map(pixels, batch, context))

    def map(self, pixels: jax.Array, batch: bool | jax.Array = False, context: jax.Array | None = None) -> jax.Array:
        """Images to feature maps [n, h', w', channels].

        Args:
          pixels: [n, h, w, c], uint8 or floats in 0..1.
          batch: normalise by the batch's own statistics, or by the stored ones. bool [n]:
            by those of the images where it is True.
          context: [h, w, channels], which the trunk gets as further channels of each image.
        """
        x = self.normalise(pixels)
        if context is not None:
            x = jnp.concatenate([x, jnp.broadcast_to(context, (*x.shape[:3], context.shape[-1]))], axis=-1)
        return self.trunk(x, batch)

    def summarise(self, pixels: jax.Array, present: jax.Array | None = None) -> jax.Array:
        """Support images [n, h, w, c] to one context [h, w, channels], the mean over those that are `present` [n]."""
        if present is None:
            return self.context(self.normalise(pixels)).mean(0)
        contexts = self.context(self.normalise(pixels), present)
        return jnp.where(present[:, None, None, None], contexts, 0).sum(0) / jnp.maximum(1, present.sum())

    def classify(self, maps: jax.Array) -> jax.Array:
        """Maps [n, h, w, c], or pooled vectors [n, c], to float32 logits [n, classes]."""
        return self.head(self._pool(maps)).astype(jnp.float32)

    def before_last(self, maps: jax.Array) -> jax.Array:
        """Maps [n, h, w, c], or pooled vectors [n, c], to the last layer's float32 input [n, d]."""
        return self.head(self._pool(maps), classify=False).astype(jnp.float32)

    def last_layer(self, variables: Variables) -> Mapping[str, jax.Array]:
        """The kernel [d, classes] and bias [classes] of the last layer: logits are before_last() @ kernel + bias."""
        return variables["params"]["head"][self.head.last]

    def with_last_layer(self, variables: Variables, layer: Mapping[str, jax.Array]) -> Variables:
        """The variables with another kernel and bias in the last layer."""
        head = {**variables["params"]["head"], self.head.last: layer}
        return {**variables, "params": {**variables["params"], "head": head}}

    def tokens(self, maps: jax.Array) -> jax.Array:
        """Maps [n, h, w, c] to tokens [n or n * h * w, C], in the order height, width, channel."""
        maps = maps.astype(jnp.float32)
        if self.features == "pool":
            return maps.mean((1, 2))
        n, h, w, c = maps.shape
        return maps.reshape(n, h * w * c) if self.features == "flat" else maps.reshape(n * h * w, c)

    def remember(self, maps: jax.Array) -> Memory:
        """Maps of the support [n, h, w, c] to the attention's keys and values."""
        return self.attention.remember(self.tokens(maps))

    def remember_values(self, maps: jax.Array) -> jax.Array:
        """Maps of the support to values alone, for mix()."""
        return self.attention.remember_values(self.tokens(maps))

    def recall(self, maps: jax.Array, memory: Memory, hidden: jax.Array | None = None) -> jax.Array:
        """Maps of queries [n, h, w, c] to logits [n, classes], with attention to the memory.

        Args:
          maps: of the queries.
          memory: what remember() returned.
          hidden: bool [n, support]: which support images a query does not attend to.
        """
        return self._classify_tokens(self.attention.recall(self.tokens(maps), memory, hidden), maps)

    def mix(self, maps: jax.Array, weights: jax.Array, values: jax.Array) -> jax.Array:
        """Maps of queries to logits, as recall() but with given weights [n, heads or 1, support]."""
        return self._classify_tokens(self.attention.mix(self.tokens(maps), weights, values), maps)

    def weights(self, maps: jax.Array, memory: Memory, hidden: jax.Array | None = None) -> jax.Array:
        """Weights of query images on support images [n, heads, support]: summed over the latter's tokens,
        else averaged.

        `hidden` is as in recall().
        """
        tokens = self._per_image(maps)
        if hidden is not None:
            hidden = hidden.repeat(tokens, axis=0).repeat(tokens, axis=1)
        weights = self.attention.weights(self.tokens(maps), memory, hidden)
        return weights.reshape(len(maps), tokens, weights.shape[1], -1, tokens).sum(-1).mean(1)

    def normalise(self, pixels: jax.Array) -> jax.Array:
        """Images [n, h, w, c], uint8 or floats in 0..1, as the trunk gets them."""
        x = pixels.astype(jnp.float32) / 255 if pixels.dtype == jnp.uint8 else pixels
        return (x - jnp.asarray(self.mean)) / jnp.asarray(self.std)

    def _pool(self, maps: jax.Array) -> jax.Array:
        return maps.astype(jnp.float32).mean((1, 2)) if maps.ndim == 4 else maps

    def _per_image(self, maps: jax.Array) -> int:
        return maps.shape[1] * maps.shape[2] if self.features == "patch" else 1

    def _classify_tokens(self, tokens: jax.Array, maps: jax.Array) -> jax.Array:
        return self.classify(tokens if self.features == "pool" else tokens.reshape(maps.shape))


def fresh(net: Classifier, key: jax.Array, pixels: jax.Array, method: Any = None) -> Variables:
    """New variables, for images like `pixels`; `method` is a function (net, pixels) that uses all layers, or None."""
    variables = net.init(key, pixels, method=method)
    return {"params": variables["params"], "batch_stats": variables.get("batch_stats", {})}
