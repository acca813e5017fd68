"""Sources of an episode's pixels: the device's memory, or a stream by tf.data. Both follow the same plans.

A source has two parts. batches() runs on the host, before the step. assemble() is pure and runs inside the step's program.
If several processes train together, the tf.data source of each process reads the tasks of its own devices alone.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cxda_jax import memory
from cxda_jax.data.episodes import Plan
from cxda_jax.data.store import DomainStore
from cxda_jax.errors import UserError
from cxda_jax.types import Episode, Images

PREFETCH = 4  # batches
READERS = 4  # threads, which mostly wait for the disk


class Source(NamedTuple):
    """Where episodes come from."""

    resident: Any  # arrays on the device, for assemble()
    # (plan_of, start, stop) -> one batch for each of the steps start..stop - 1; plan_of(step) is its Plan
    batches: Callable[[Callable[[int], Plan], int, int], Iterator[Any]]
    assemble: Callable[[Any, Any], Episode]  # (resident, batch) -> Episode [tasks, ...]


def device_source(store: DomainStore) -> Source:
    """All images on the device as uint8; a batch is a Plan and the step gathers its rows."""
    arrays = rows_of(store)
    needed, left = sum(array.nbytes for array in arrays), memory.left_on_device()
    if left is not None and needed > left:
        raise UserError(
            f"source='device': {len(store.labels)} images take {needed / 1e9:.1f} GB and the device has "
            f"{left / 1e9:.1f} GB left; source=tfdata streams them"
        )
    resident = jax.device_put(arrays)  # on CPUs this uses the mapped file and takes no memory
    return Source(resident, lambda plan_of, start, stop: map(plan_of, range(start, stop)), gather(store))


def rows_of(store: DomainStore) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """device_source()'s resident data: images [rows, h * w * c], labels and domains."""
    # A TPU would lay out [rows, h, w, c] for other operations than this choice of rows, and copy all images in each step.
    return store.images.reshape(len(store.images), -1), store.labels, store.row_domains()


def gather(store: DomainStore) -> Callable[[Any, Plan], Episode]:
    """device_source()'s assemble, for rows_of() a store."""

    def assemble(resident: Any, plan: Plan) -> Episode:
        parts = [[jnp.take(array, rows, axis=0) for array in resident] for rows in plan]
        return _episode(
            [
                [pixels.reshape(*labels.shape, *store.images.shape[1:]), labels, domain]
                for pixels, labels, domain in parts
            ]
        )

    return assemble


def tfdata_source(store: DomainStore, shard: tuple[int, int] | None = None) -> Source:
    """Images that tf.data reads from disk, in parallel and ahead; for stores larger than the memory.

    With a shard (which, count) the source reads one of `count` equal parts of each step's tasks. Without one, each process
    of jax.distributed reads its own part, and the parts become one global array.
    """
    try:
        import tensorflow as tf
    except ImportError:
        raise UserError("source='tfdata' needs TensorFlow: pip install 'cxda_jax[data]', or use 'device'") from None
    tf.config.set_visible_devices([], "GPU")
    domains = store.row_domains()
    which, count = shard or (jax.process_index(), jax.process_count())

    def batches(plan_of: Callable[[int], Plan], start: int, stop: int) -> Iterator[Episode]:
        def read(step: np.ndarray) -> list[np.ndarray]:
            plan = plan_of(int(step))
            parts = [np.split(rows, count)[which] for rows in plan]
            return [array[rows] for rows in parts for array in (store.images, store.labels, domains)]

        if start < stop and (tasks := len(plan_of(start).query)) % count:
            fix = f"make it a multiple of {count}"
            raise UserError(f"tasks_per_step={tasks} cannot be shared by {count} processes; {fix}")
        types = [tf.uint8, tf.int32, tf.int32] * 2
        data = tf.data.Dataset.range(start, stop).map(
            lambda step: tf.numpy_function(read, [step], types), num_parallel_calls=READERS, deterministic=True
        )
        for arrays in data.prefetch(PREFETCH).as_numpy_iterator():
            episode = _episode([arrays[:3], arrays[3:]])
            yield episode if shard or count == 1 else _across_processes(episode)

    return Source((), batches, lambda resident, episode: episode)


def stack(batches: list[Any]) -> Any:
    """The batches of several steps, stacked along a new first axis; a single batch stays as it is."""
    if len(batches) == 1:
        return batches[0]
    return jax.tree.map(lambda *leaves: (np if isinstance(leaves[0], np.ndarray) else jnp).stack(leaves), *batches)


def _across_processes(episode: Episode) -> Episode:
    """One global episode [tasks, ...] on all devices, from the part that each process has."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("tasks",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("tasks"))
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), episode)


SOURCES: dict[str, Callable[[DomainStore], Source]] = {"device": device_source, "tfdata": tfdata_source}


def _episode(parts: Any) -> Episode:
    (support, support_label, support_domain), (query, label, query_domain) = parts
    return Episode(Images(support, support_domain), Images(query, query_domain), label, support_label)
