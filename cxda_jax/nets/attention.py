"""Cross-attention from query tokens to support tokens (section 3.3 of the paper).

    q = LN(x_q) W_q,  k = LN(x_s) W_k,  v = LN(x_s) W_v,  z = x_q + softmax(q k^T / sqrt(C / heads)) v W

W_q, W_k, W_v are C x C/R and W is C/R x C, without biases; the residual takes the un-normalised query.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from cxda_jax.nets.initial import uniform
from cxda_jax.types import UserError, brief

SCALES = ("paper", "head_dim")
# Scores held at once, in elements: longer token lists are attended to in chunks of queries, recomputed going back.
CHUNK = 1 << 23


def check(dim: int, heads: int, ratio: int, scale: str) -> None:
    for field, value in {"heads": heads, "ratio": ratio}.items():
        if value < 1:
            raise UserError(f"{field}={value} must be at least 1")
    if dim % (ratio * heads):
        raise UserError(
            f"heads={heads} with ratio={ratio} does not divide the {dim} features; "
            f"choose heads * ratio among the divisors of {dim}"
        )
    if scale not in SCALES:
        raise UserError(f"scale={brief(repr(scale))} is not one of {', '.join(SCALES)}")


class Memory(NamedTuple):
    """A support set as the attention keeps it: keys and values [tokens, heads, C / R / heads]."""

    keys: jax.Array
    values: jax.Array


class CrossAttention(nn.Module):
    """remember() encodes the support once; recall() adapts any query tokens to it."""

    dim: int  # C
    heads: int = 8
    ratio: int = 2  # R
    scale: str = "paper"  # "paper": C / heads as printed; "head_dim": C / R / heads, the usual one
    shared_norm: bool = True
    zero_out: bool = False  # start as the plain network
    dtype: Any = jnp.float32

    def setup(self):
        check(self.dim, self.heads, self.ratio, self.scale)
        self.norm = nn.LayerNorm(epsilon=1e-5)
        self.norm_query = self.norm if self.shared_norm else nn.LayerNorm(epsilon=1e-5)
        inner = self.dim // self.ratio
        options: Any = {"use_bias": False, "dtype": self.dtype}
        self.query, self.key, self.value = (nn.Dense(inner, **options, **uniform(self.dim)) for _ in range(3))
        start: Any = {"kernel_init": nn.initializers.zeros} if self.zero_out else uniform(inner)
        self.out = nn.Dense(self.dim, **options, **start)

    def remember(self, support: jax.Array) -> Memory:
        """Support tokens [n, C] to their keys and values."""
        x = self.norm(support)
        return Memory(self._split(self.key(x)), self.remember_values(support))

    def remember_values(self, support: jax.Array) -> jax.Array:
        """Values alone [n, heads, d], for weights that come from elsewhere."""
        return self._split(self.value(self.norm(support)))

    def recall(self, query: jax.Array, memory: Memory, own: int = 0) -> jax.Array:
        """Query tokens [m, C] with what they draw from the memory added.

        With `own` the query tokens are the memory's, `own` of them to an image, and none sees its own image.
        """
        if len(memory.keys) <= own:
            return query
        rows = max(1, CHUNK // (self.heads * len(memory.keys)))
        numbers = jnp.arange(len(query))
        if len(query) <= rows:
            return self._read(query, numbers, memory, own)
        chunks = -(-len(query) // rows)
        padding = (0, chunks * rows - len(query))
        padded = jnp.pad(query, (padding, (0, 0))).reshape(chunks, rows, self.dim)
        numbers = jnp.pad(numbers, padding).reshape(chunks, rows)
        # A first plain call makes the parameters when initialising; lifted transforms could not.
        if self.is_initializing():
            self._read(padded[0], numbers[0], memory, own)
            return query
        module, variables = self.unbind()
        read = jax.checkpoint(lambda chunk: module.apply(variables, *chunk, memory, own, method="_read"))
        return jax.lax.map(read, (padded, numbers)).reshape(-1, self.dim)[: len(query)]

    def weights(self, query: jax.Array, memory: Memory, hidden: jax.Array | None = None) -> jax.Array:
        """Attention weights [m, heads, n]; each row sums to one, and is 0 where `hidden` [m, n]. Always float32."""
        q = self._split(self.query(self.norm_query(query)))
        width = self.dim / self.heads / (1 if self.scale == "paper" else self.ratio)
        scores = jnp.einsum("mhd,nhd->mhn", q, memory.keys, preferred_element_type=jnp.float32)
        if hidden is not None:
            scores = jnp.where(hidden[:, None], -jnp.inf, scores)
        return jax.nn.softmax(scores / math.sqrt(width), axis=-1)

    def mix(self, query: jax.Array, weights: jax.Array, values: jax.Array) -> jax.Array:
        """Query tokens [m, C] plus the projected mean of values under weights [m, heads or 1, n]."""
        if not len(values):
            return query
        weights = jnp.broadcast_to(weights, (len(query), self.heads, len(values)))
        drawn = jnp.einsum("mhn,nhd->mhd", weights.astype(values.dtype), values)
        return query + self.out(drawn.reshape(len(query), -1))

    def _read(self, query: jax.Array, numbers: jax.Array, memory: Memory, own: int) -> jax.Array:
        hidden = numbers[:, None] // own == jnp.arange(len(memory.keys)) // own if own else None
        return self.mix(query, self.weights(query, memory, hidden), memory.values)

    def _split(self, x: jax.Array) -> jax.Array:
        return x.reshape(len(x), self.heads, self.dim // self.ratio // self.heads)
