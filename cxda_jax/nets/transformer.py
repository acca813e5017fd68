"""The causal transformer of ICRM: blocks of GPT-2 (Radford et al., 2019) over the
tokens of images. For a token t at place p:

    x = t W_in + position_p;   `layers` times: x = x + A(LN(x)), x = x + W_2 gelu(W_1 LN(x));   LN(x)

A is softmax attention with several heads. An image sees the images before it, and itself. All layers have biases.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from cxda_jax.errors import UserError
from cxda_jax.nets.initial import XAVIER


class Cache(NamedTuple):
    """The encoded images of a sequence, in a number of places."""

    keys: jax.Array  # [layers, places, heads, width / heads]
    values: jax.Array  # likewise
    held: jax.Array  # bool [places]: which ones hold an image, at most `context` of them


def check_transformer(width: int, heads: int) -> None:
    """Raises a UserError if a CausalTransformer cannot have these options."""
    if width % heads:
        raise UserError(f"it does not divide icrm.width={width}", "icrm.heads", heads, "choose a divisor")


class Block(nn.Module):
    """One block of GPT-2. Each new token attends to tokens of a context, as far as it may, and to itself."""

    width: int
    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, context: Any, seen: jax.Array) -> tuple[jax.Array, Any]:
        """New tokens [m, width] to themselves after the block; and to their keys and values
        [m, heads, width / heads], and weights on the context [m, heads, n].

        Args:
          x: the new tokens.
          context: keys and values [n, heads, width / heads]; None: those of the first n new tokens.
          seen: whether a token may see one of the context, booleans [m, n].
        """

        def dense(features: int, name: str) -> nn.Dense:
            return nn.Dense(features, dtype=self.dtype, name=name, **XAVIER)

        y = dense(3 * self.width, "attend")(nn.LayerNorm(epsilon=1e-5, name="norm1")(x))
        q, k, v = (part.reshape(len(x), self.heads, self.width // self.heads) for part in jnp.split(y, 3, axis=-1))
        keys, values = (k[: seen.shape[1]], v[: seen.shape[1]]) if context is None else context
        scores = jnp.einsum("mhd,nhd->mhn", q, keys, preferred_element_type=jnp.float32)
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        own = jnp.einsum("mhd,mhd->mh", q, k, preferred_element_type=jnp.float32)
        scores = jnp.concatenate([scores, own[..., None]], axis=-1) / math.sqrt(q.shape[-1])
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        summed = jnp.einsum("mhn,nhd->mhd", weights[..., :-1], values) + weights[..., -1:] * v
        x = x + dense(self.width, "out")(summed.reshape(x.shape))
        y = dense(4 * self.width, "hidden")(nn.LayerNorm(epsilon=1e-5, name="norm2")(x))
        return x + dense(self.width, "shrink")(nn.gelu(y, approximate=True)), (k, v, weights[..., :-1])


class CausalTransformer(nn.Module):
    """Tokens of images to features that know the images before them.

    encode() reads a sequence once, and next() then answers for any number of images, each as the next one. append()
    adds an image to what was read. A call of the module itself does all at once, for training.

    Attributes:
      width: features of an image inside.
      layers: blocks.
      heads: attention heads.
      context: the longest sequence. There is one more position, for the image after it.
      dtype: of products; scores and normalisation are float32 always.
    """

    width: int = 128
    layers: int = 12
    heads: int = 4
    context: int = 100
    dtype: Any = jnp.float32

    def setup(self):
        check_transformer(self.width, self.heads)
        self.read_in = nn.Dense(self.width, dtype=self.dtype, **XAVIER)
        self.position = self.param("position", XAVIER["kernel_init"], (self.context + 1, self.width))
        # A loop over stacked parameters: a program of twelve written-out blocks takes three times as long to compile.
        each: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "in_axes": (0, nn.broadcast)}
        self.blocks: Any = nn.scan(Block, length=self.layers, **each)(self.width, self.heads, self.dtype)
        self.norm = nn.LayerNorm(epsilon=1e-5)

    def __call__(self, tokens: jax.Array, length: int) -> jax.Array:
        """Tokens [m, d] to features [m, width].

        The first `length` tokens are a sequence. Each of the others stands alone behind it, so it sees
        the whole sequence and none of the others.
        """
        place = jnp.minimum(jnp.arange(len(tokens)), length)
        return self._run(tokens, place, None, jnp.arange(length) < place[:, None])[0]

    def encode(self, tokens: jax.Array, present: jax.Array | None = None) -> Cache:
        """Tokens [n, d] to what next() needs of them.

        Args:
          tokens: of a sequence.
          present: bool [n], which of them are the sequence; of more than `context` the last ones count. None: all, at
            most `context`. Then the cache has places for as many.
        """
        n = len(tokens)
        if present is None:
            room = (0, self.context - n)
            held = jnp.arange(self.context) < n
        else:
            room = (0, 0)
            held = present & (present.sum() - jnp.cumsum(present) < self.context)
        seen = held[:n] & (jnp.arange(n) < jnp.arange(n)[:, None])
        encoded = self._run(tokens, seen.sum(1), None, seen)[1]
        keys, values = (jnp.pad(part, ((0, 0), room, (0, 0), (0, 0))) for part in encoded[:2])
        return Cache(keys, values, held)

    def next(self, tokens: jax.Array, cache: Cache) -> jax.Array:
        """Tokens [m, d] to features [m, width], each as the one image after the sequence."""
        return self._behind(tokens, cache)[0]

    def weights(self, tokens: jax.Array, cache: Cache) -> jax.Array:
        """Weights [m, heads, places] of tokens [m, d] on the sequence, the means over the blocks.

        The rest is on oneself.
        """
        return self._behind(tokens, cache)[1][2].mean(0)

    def append(self, token: jax.Array, cache: Cache) -> Cache:
        """The cache with a further image, whose token is [d]. A cache that has `context` images stays as it is."""
        # encode() leaves no room where it knows which images are present.
        room = (0, max(0, self.context - len(cache.held)))
        keys, values = (jnp.pad(part, ((0, 0), room, (0, 0), (0, 0))) for part in cache[:2])
        cache = Cache(keys, values, jnp.pad(cache.held, room))
        encoded = self._behind(token[None], cache)[1]
        place = jnp.where(cache.held.sum() < self.context, cache.held.argmin(), len(cache.held))
        keys, values = (
            old.at[:, place].set(new[:, 0], mode="drop") for old, new in zip(cache[:2], encoded[:2], strict=True)
        )
        return Cache(keys, values, cache.held.at[place].set(True, mode="drop"))

    def _behind(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Any]:
        seen = jnp.broadcast_to(cache.held, (len(tokens), len(cache.held)))
        return self._run(tokens, seen.sum(1), cache[:2], seen)

    def _run(self, tokens: jax.Array, place: jax.Array, context: Any, seen: jax.Array) -> tuple[jax.Array, Any]:
        x = self.read_in(tokens).astype(jnp.float32) + self.position[place]
        x, encoded = self.blocks(x, context, seen)
        return self.norm(x), encoded
