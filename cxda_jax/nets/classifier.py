"""The network that every method shares: pixels -> trunk -> map -> (attention) -> pool -> head -> logits."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from cxda_jax.nets.attention import Memory

FEATURES = ("pool", "flat", "patch")


class Classifier(nn.Module):
    """`features` says what a token is: the pooled vector, the flattened map, or each position of the map."""

    trunk: nn.Module
    head: nn.Module
    mean: tuple[float, ...]
    std: tuple[float, ...]
    attention: Any = None  # CrossAttention, for the methods that attend
    features: str = "pool"

    def __call__(self, pixels: jax.Array, batch: bool = False) -> jax.Array:
        """Images [n, h, w, c] to logits [n, classes], without attention."""
        return self.classify(self.map(pixels, batch))

    def map(self, pixels: jax.Array, batch: bool = False) -> jax.Array:
        """Images, uint8 or floats in 0..1, to feature maps; `batch` normalises by the batch's own statistics."""
        x = pixels.astype(jnp.float32) / 255 if pixels.dtype == jnp.uint8 else pixels
        return self.trunk((x - jnp.asarray(self.mean)) / jnp.asarray(self.std), batch)

    def classify(self, maps: jax.Array) -> jax.Array:
        """Maps [n, h, w, c], or pooled vectors [n, c], to float32 logits."""
        pooled = maps.astype(jnp.float32).mean((1, 2)) if maps.ndim == 4 else maps
        return self.head(pooled).astype(jnp.float32)

    def tokens(self, maps: jax.Array) -> jax.Array:
        """Maps [n, h, w, c] to tokens [n or n * h * w, C], row-major: height, width, channel."""
        maps = maps.astype(jnp.float32)
        if self.features == "pool":
            return maps.mean((1, 2))
        n, h, w, c = maps.shape
        return maps.reshape(n, h * w * c) if self.features == "flat" else maps.reshape(n * h * w, c)

    def remember(self, pixels: jax.Array, batch: bool = False) -> Memory:
        """Support images to the attention's keys and values."""
        return self.attention.remember(self.tokens(self.map(pixels, batch)))

    def remember_values(self, pixels: jax.Array, batch: bool = False) -> jax.Array:
        return self.attention.remember_values(self.tokens(self.map(pixels, batch)))

    def recall(self, pixels: jax.Array, memory: Memory, batch: bool = False) -> jax.Array:
        """Query images to logits that draw on the memory."""
        maps = self.map(pixels, batch)
        return self._classify_tokens(self.attention.recall(self.tokens(maps), memory), maps)

    def mix(self, pixels: jax.Array, weights: jax.Array, values: jax.Array, batch: bool = False) -> jax.Array:
        """Query images to logits that draw on values under given weights [n, heads or 1, support]."""
        maps = self.map(pixels, batch)
        return self._classify_tokens(self.attention.mix(self.tokens(maps), weights, values), maps)

    def weights(self, pixels: jax.Array, memory: Memory) -> jax.Array:
        """Attention of query images on support images [n, heads, support]; patches are summed over the support
        image and averaged over the query image."""
        maps = self.map(pixels)
        weights = self.attention.weights(self.tokens(maps), memory)
        if self.features != "patch":
            return weights
        positions = maps.shape[1] * maps.shape[2]
        return weights.reshape(len(maps), positions, weights.shape[1], -1, positions).sum(-1).mean(1)

    def _classify_tokens(self, tokens: jax.Array, maps: jax.Array) -> jax.Array:
        return self.classify(tokens if self.features == "pool" else tokens.reshape(maps.shape))


def initialise(key: jax.Array, variables: Any, zero_out: bool = False) -> Any:
    """PyTorch's default initialisation: kernels and biases of every layer U(-1, 1) / sqrt(fan_in)."""

    def reset(tree: Any, key: jax.Array) -> Any:
        if "kernel" in tree:
            bound = tree["kernel"].size // tree["kernel"].shape[-1]
            bound = bound**-0.5
            keys = dict(zip(sorted(tree), jax.random.split(key, len(tree)), strict=True))
            return {k: jax.random.uniform(keys[k], v.shape, v.dtype, -bound, bound) for k, v in tree.items()}
        if not any(isinstance(v, dict) for v in tree.values()):
            return tree  # a normalisation layer: ones and zeros
        keys = jax.random.split(key, len(tree))
        return {k: reset(tree[k], key) for k, key in zip(sorted(tree), keys, strict=True)}

    params = reset(variables["params"], key)
    if zero_out:
        params["attention"]["out"] = jax.tree.map(jnp.zeros_like, params["attention"]["out"])
    return {"params": params, "batch_stats": variables["batch_stats"]}
