"""Images of a store through a network, a batch at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from cxda_jax.data.store import DomainStore
from cxda_jax.machine import backend
from cxda_jax.machine.progress import Counter
from cxda_jax.training.experiment import Experiment
from cxda_jax.types import Array, Images, Variables

BATCH = 200  # images


def in_batches(function: Callable[[Array], Array], store: DomainStore, rows: np.ndarray, what: str) -> np.ndarray:
    """What a function gives for these images, with a line of progress that says `what` they are."""
    count, parts = Counter(f"  {what}", len(rows)), []
    for start in range(0, len(rows), BATCH):  # the last batch repeats an image, so that one program takes all
        chosen = rows[np.minimum(np.arange(start, start + BATCH), len(rows) - 1)]
        parts.append(np.asarray(function(jnp.asarray(store.images[chosen]))))
        count(min(start + BATCH, len(rows)))
    return np.concatenate(parts)[: len(rows)]


def plain_answers(experiment: Experiment, variables: Variables, rows: np.ndarray, what: str = "images") -> np.ndarray:
    """Logits [images, classes] of the method without any support."""
    method, empty = experiment.method, jax.tree.map(lambda x: x[:0], experiment.example)

    def answer(pixels: Array) -> Array:
        query = Images(pixels, jnp.zeros(len(pixels), jnp.int32))
        return method.predict(method.adapt(variables, empty, jax.random.key(0)), query)

    return in_batches(backend.jit(answer), experiment.store, rows, what)
