"""Initial values of layers: PyTorch's, whose kernels and biases are U(-1, 1) / sqrt(fan_in), or flax's own."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

XAVIER: Any = {"kernel_init": nn.initializers.xavier_uniform()}  # biases start at zero, as flax's do


def initialisers(initial: str, fan_in: int) -> dict[str, Any]:
    """Initialisers for a flax layer, each output of which depends on fan_in inputs: nn.Dense(features,
    **initialisers(i, c)).

    Args:
      initial: "torch": U(-1, 1) / sqrt(fan_in). "flax": none, so the layer has flax's: truncated normal kernels of
        variance 1 / fan_in (LeCun's), biases of 0. "xavier": uniform kernels of variance
        2 / (fan_in + features), biases of 0.
      fan_in: the number of inputs.
    """

    def uniform(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -(fan_in**-0.5), fan_in**-0.5)

    return {"torch": {"kernel_init": uniform, "bias_init": uniform}, "flax": {}, "xavier": XAVIER}[initial]
