"""Where an episode's pixels come from: resident on the device, or streamed by tf.data. Both follow the same plans.

A source splits the work in two. batches() runs on the host, ahead of the step; assemble() is pure and runs inside it.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cxda_jax.data.episodes import Plan
from cxda_jax.data.store import DomainStore
from cxda_jax.types import Episode, Images, UserError

PREFETCH = 4


class Source(NamedTuple):
    """batches(plan_of, start, stop) yields what assemble(resident, batch) turns into Episodes [tasks, ...]."""

    resident: Any
    batches: Callable[[Callable[[int], Plan], int, int], Iterator[Any]]
    assemble: Callable[[Any, Any], Episode]


def device_source(store: DomainStore) -> Source:
    """All images on the device as uint8; a batch is a Plan and the step gathers its rows."""
    resident = jax.device_put((np.asarray(store.images), store.labels, store.row_domains()))

    def assemble(resident: Any, plan: Plan) -> Episode:
        return _episode([[jnp.take(array, rows, axis=0) for array in resident] for rows in plan])

    return Source(resident, lambda plan_of, start, stop: map(plan_of, range(start, stop)), assemble)


def tfdata_source(store: DomainStore) -> Source:
    """Images read from disk and prefetched by tf.data; for stores larger than the device."""
    try:
        import tensorflow as tf
    except ImportError:
        raise UserError(
            "train.source='tfdata' needs TensorFlow: pip install 'cxda_jax[data]', or use 'device'"
        ) from None
    tf.config.set_visible_devices([], "GPU")
    domains = store.row_domains()

    def batches(plan_of: Callable[[int], Plan], start: int, stop: int) -> Iterator[Episode]:
        def read(step: np.ndarray) -> list[np.ndarray]:
            plan = plan_of(int(step))
            return [array[rows] for rows in plan for array in (store.images, store.labels, domains)]

        types = [tf.uint8, tf.int32, tf.int32] * 2
        data = tf.data.Dataset.range(start, stop).map(
            lambda step: tf.numpy_function(read, [step], types), num_parallel_calls=2, deterministic=True
        )
        for arrays in data.prefetch(PREFETCH).as_numpy_iterator():
            yield _episode([arrays[:3], arrays[3:]])

    return Source((), batches, lambda resident, episode: episode)


SOURCES: dict[str, Callable[[DomainStore], Source]] = {"device": device_source, "tfdata": tfdata_source}


def _episode(parts: Any) -> Episode:
    (support, support_label, support_domain), (query, label, query_domain) = parts
    return Episode(Images(support, support_domain), Images(query, query_domain), label, support_label)
