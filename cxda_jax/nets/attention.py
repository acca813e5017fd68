"""Cross-attention from query tokens to support tokens (section 3.3 of the paper).

    q = LN(x_q) W_q,  k = LN(x_s) W_k,  v = LN(x_s) W_v,  z = x_q + softmax(q k^T / sqrt(C / heads)) v W

W_q, W_k, W_v are C x C/R and W is C/R x C, without biases. x_q is added without normalisation. Learned tokens, where
there are any, are further x_s. Without them a query that may attend to nothing stays as it is.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from cxda_jax.config.fields import Field, Group, Range
from cxda_jax.errors import UserError
from cxda_jax.nets.initial import initialisers

# The most scores in memory at once. More queries are processed in chunks, which the backward pass computes again.
CHUNK = 1 << 23
HIDDEN = -1e30  # a score; minus infinity would give no number where all is hidden

ATTENTION = Group("Cross-attention of the cxda methods.", {
    "features": Field("pool", "Tokens: pooled or flat features of an image, or its patches (always in cxda_p2p).",
                      choices=("pool", "flat", "patch")),
    "heads": Field(8, "Attention heads.", Range(1)),
    "ratio": Field(2, "Attention has so many times fewer features than the network.", Range(1)),
    "scale": Field("paper", "Scores are divided by: paper sqrt(C / heads); head_dim sqrt(C / ratio / heads).",
                   choices=("paper", "head_dim")),
    "shared_norm": Field(True, "Queries and support share one layer normalisation."),
    "zero_out": Field(False, "The output layer starts at zero, so the network starts as one without attention."),
})  # fmt: skip


def check_attention(dim: int, heads: int, ratio: int) -> None:
    """Raises a UserError if attention on `dim` features cannot have these options."""
    if dim % (ratio * heads):
        fault = f"times attention.ratio={ratio} it does not divide the {dim} features"
        raise UserError(fault, "attention.heads", heads, f"choose heads * ratio among the divisors of {dim}")


class Memory(NamedTuple):
    """The encoded support: keys and values [tokens, heads, C / R / heads]."""

    keys: jax.Array
    values: jax.Array


class CrossAttention(nn.Module):
    """remember() encodes the support once. recall() then adapts query tokens to it.

    Attributes:
      dim: C, the features of a token.
      heads: attention heads.
      ratio: R, by which the features are divided before they attend.
      scale: "paper" divides scores by sqrt(C / heads), as printed; "head_dim" by the usual sqrt(C / R / heads).
      shared_norm: queries and support share one layer normalisation.
      zero_out: the output layer starts at zero, so that the network starts as one without attention.
      learned: how many learned tokens each query sees beside the support, and alone if
        there is no support. (Not in the paper.)
      dtype: of products; scores are float32 always.
      initial: how layers start; see initialisers().
    """

    dim: int
    heads: int = 8
    ratio: int = 2
    scale: str = "paper"
    shared_norm: bool = True
    zero_out: bool = False
    learned: int = 0
    dtype: Any = jnp.float32
    initial: str = "torch"

    def setup(self):
        check_attention(self.dim, self.heads, self.ratio)
        self.norm = nn.LayerNorm(epsilon=1e-5)
        self.norm_query = self.norm if self.shared_norm else nn.LayerNorm(epsilon=1e-5)
        inner = self.dim // self.ratio
        options: Any = {"use_bias": False, "dtype": self.dtype}
        self.query, self.key, self.value = (
            nn.Dense(inner, **options, **initialisers(self.initial, self.dim)) for _ in range(3)
        )
        start: Any = {"kernel_init": nn.initializers.zeros} if self.zero_out else initialisers(self.initial, inner)
        self.out = nn.Dense(self.dim, **options, **start)
        if self.learned:
            self.tokens = self.param("tokens", nn.initializers.normal(1.0), (self.learned, self.dim))

    def remember(self, support: jax.Array) -> Memory:
        """Support tokens [n, C] to keys and values."""
        x = self.norm(support)
        return Memory(self._split(self.key(x)), self.remember_values(support))

    def remember_values(self, support: jax.Array) -> jax.Array:
        """Support tokens [n, C] to values alone [n, heads, C / R / heads], for mix() with given weights."""
        return self._split(self.value(self.norm(support)))

    def recall(self, query: jax.Array, memory: Memory, hidden: jax.Array | None = None) -> jax.Array:
        """Query tokens [m, C] plus the attention's output.

        Args:
          query: tokens to adapt.
          memory: what remember() returned.
          hidden: bool [query images, support images]: which support images a query image does not attend to.
        """
        if not len(memory.keys):
            hidden = None
        memory = self._with_learned(memory)
        if not len(memory.keys):
            return query
        rows = max(1, CHUNK // (self.heads * len(memory.keys)))
        images = len(query) if hidden is None else len(hidden)
        numbers = jnp.arange(len(query)) // (len(query) // images)  # of the image of each token
        if len(query) <= rows:
            return self._read(query, numbers, memory, hidden)
        chunks = -(-len(query) // rows)
        padding = (0, chunks * rows - len(query))
        padded = jnp.pad(query, (padding, (0, 0))).reshape(chunks, rows, self.dim)
        numbers = jnp.pad(numbers, padding).reshape(chunks, rows)
        # Parameters must be made by a plain call, outside the loop below.
        if self.is_initializing():
            self._read(padded[0], numbers[0], memory, hidden)
            return query
        module, variables = self.unbind()
        read = jax.checkpoint(lambda chunk: module.apply(variables, *chunk, memory, hidden, method="_read"))
        return jax.lax.map(read, (padded, numbers)).reshape(-1, self.dim)[: len(query)]

    def weights(self, query: jax.Array, memory: Memory, hidden: jax.Array | None = None) -> jax.Array:
        """Query tokens [m, C] to float32 weights on the support [m, heads, n], 0 where `hidden` [m, n] is True.

        A row sums to one, or to zero if all is hidden. With learned tokens it sums to less, since they have the rest.
        """
        if hidden is not None:
            hidden = jnp.pad(hidden, ((0, 0), (self.learned, 0)))
        return self._weights(query, self._with_learned(memory), hidden)[..., self.learned :]

    def mix(self, query: jax.Array, weights: jax.Array, values: jax.Array) -> jax.Array:
        """Query tokens [m, C] plus a projected sum of values [n, heads, C / R / heads],
        with weights [m, heads or 1, n]."""
        if not len(values):
            return query
        weights = jnp.broadcast_to(weights, (len(query), self.heads, len(values)))
        summed = jnp.einsum("mhn,nhd->mhd", weights.astype(values.dtype), values)
        return query + self.out(summed.reshape(len(query), -1))

    def _with_learned(self, memory: Memory) -> Memory:
        """The memory with the learned tokens before it."""
        if not self.learned:
            return memory
        return jax.tree.map(lambda *x: jnp.concatenate(x), self.remember(self.tokens), memory)

    def _weights(self, query: jax.Array, memory: Memory, hidden: jax.Array | None) -> jax.Array:
        q = self._split(self.query(self.norm_query(query)))
        width = self.dim / self.heads / (1 if self.scale == "paper" else self.ratio)
        scores = jnp.einsum("mhd,nhd->mhn", q, memory.keys, preferred_element_type=jnp.float32)
        scores /= math.sqrt(width)
        if hidden is None:
            return jax.nn.softmax(scores, axis=-1)
        weights = jax.nn.softmax(jnp.where(hidden[:, None], HIDDEN, scores), axis=-1)
        return jnp.where(hidden[:, None], 0, weights)  # also where a row hides all

    def _read(self, query: jax.Array, numbers: jax.Array, memory: Memory, hidden: jax.Array | None) -> jax.Array:
        """recall() for some query tokens, whose images have these numbers; the memory holds the learned tokens too."""
        if hidden is not None:  # the tokens of an image are neighbours
            tokens = len(memory.keys) - self.learned
            hidden = jnp.repeat(hidden[numbers], tokens // hidden.shape[1], axis=1)
            hidden = jnp.pad(hidden, ((0, 0), (self.learned, 0)))
        return self.mix(query, self._weights(query, memory, hidden), memory.values)

    def _split(self, x: jax.Array) -> jax.Array:
        return x.reshape(len(x), self.heads, self.dim // self.ratio // self.heads)
