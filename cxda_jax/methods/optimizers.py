"""The optimisers of trainings and of fine-tuning: sgd and adam as PyTorch has them."""

from collections.abc import Callable

import optax

OPTIMIZERS: dict[str, Callable[[float, float], optax.GradientTransformation]] = {  # (learning rate, momentum)
    "sgd": lambda rate, momentum: optax.sgd(rate, momentum or None),
    "adam": lambda rate, momentum: optax.adam(rate),
}


def make_optimizer(
    name: str, learning_rate: float, momentum: float, weight_decay: float
) -> optax.GradientTransformation:
    """An optimiser of OPTIMIZERS. Weight decay is L2, which is added to the gradient as PyTorch does."""
    return optax.chain(optax.add_decayed_weights(weight_decay), OPTIMIZERS[name](learning_rate, momentum))
