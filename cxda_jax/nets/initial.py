"""PyTorch's default initialisation: kernels and biases are U(-1, 1) / sqrt(fan_in)."""

from typing import Any

import jax
import jax.numpy as jnp


def uniform(fan_in: int) -> dict[str, Any]:
    """Initialisers for a flax layer, each output of which depends on fan_in inputs: nn.Dense(features, **uniform(c))."""

    def sample(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -(fan_in**-0.5), fan_in**-0.5)

    return {"kernel_init": sample, "bias_init": sample}
