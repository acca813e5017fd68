"""How a layer starts: as PyTorch's do by default, kernels and biases U(-1, 1) / sqrt(fan_in)."""

from typing import Any

import jax
import jax.numpy as jnp


def uniform(fan_in: int) -> dict[str, Any]:
    """The initialisers of a flax layer each of whose outputs sees `fan_in` inputs: nn.Dense(features, **uniform(c))."""

    def draw(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -(fan_in**-0.5), fan_in**-0.5)

    return {"kernel_init": draw, "bias_init": draw}
