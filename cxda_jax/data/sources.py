"""Sources of an episode's pixels: the device's memory, or a stream by tf.data. Both follow the same plans.

A source has two parts. batches() runs on the host, before the step. assemble() is pure and runs
inside the step's program. On a mesh each process makes the batches of its own tasks, and assemble()
runs on each device for the device's own tasks.
"""

import functools
import mmap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cxda_jax.data.episodes import Plan
from cxda_jax.data.store import DomainStore
from cxda_jax.errors import UserError, needing
from cxda_jax.machine import memory, mesh
from cxda_jax.types import Array, Episode, Images

PREFETCH = 4  # batches
READERS = 4  # threads, which mostly wait for the disk


class Source(NamedTuple):
    """Where episodes come from."""

    resident: Any  # arrays on the device, for assemble()
    # (plan_of, start, stop) -> one batch for each of the steps start..stop - 1; plan_of(step) is its Plan
    batches: Callable[[Callable[[int], Plan], int, int], Iterator[Any]]
    assemble: Callable[[Any, Any], Episode]  # (resident, batch) -> Episode [tasks, ...]
    mesh: Mesh | None = None  # of the resident arrays, over which tasks are shared out; None: a single device

    def own_batches(self, plan_of: Callable[[int], Plan], start: int, stop: int) -> Iterator[Any]:
        """batches() of the tasks that this process has on the mesh."""
        if self.mesh is None or jax.process_count() == 1:
            return self.batches(plan_of, start, stop)
        return self.batches(lambda step: Plan(*map(mesh.own_part, plan_of(step))), start, stop)


def device_source(store: DomainStore, devices: Mesh | None = None, by_rows: bool | None = None) -> Source:
    """All images on the device as uint8; a batch is a Plan and the step gathers its rows.

    On a mesh each device has all images. Where they do not fit, each device has an equal part of the rows instead, and
    the devices exchange the images of each step. `by_rows` asks for the one or the other.
    """
    arrays = rows_of(store)
    needed, left = sum(array.nbytes for array in arrays), memory.left_on_device()
    shared = left is not None and needed > left if by_rows is None else by_rows
    parts = devices.size if devices and shared else 1
    if left is not None and needed / parts > left:
        sizes = f"take {needed / parts / 1e9:.1f} GB and the device has {left / 1e9:.1f} GB left"
        fault = f"{len(store.labels)} images {sizes}"
        raise UserError(fault, "train.source", "device", "train.source=tfdata streams them")

    def batches(plan_of: Callable[[int], Plan], start: int, stop: int) -> Iterator[Plan]:
        return map(plan_of, range(start, stop))

    if devices is None:
        resident = jax.device_put(arrays)  # on CPUs this uses the mapped file and takes no memory
        return Source(resident, batches, gather(store))
    resident = tuple(mesh.place_rows(devices, array, shared) for array in arrays)
    return Source(resident, batches, gather(store, _take_from_all if shared else _take), devices)


def rows_of(store: DomainStore) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """device_source()'s resident data: images [rows, h * w * c], labels and domains."""
    # A TPU would lay out [rows, h, w, c] for other operations than this choice of rows,
    # and copy all images in each step.
    return store.images.reshape(len(store.images), -1), store.labels, store.row_domains()


_take = functools.partial(jnp.take, axis=0)


def gather(store: DomainStore, take: Callable[[Array, Any], Array] = _take) -> Callable[[Any, Plan], Episode]:
    """device_source()'s assemble, for rows_of() a store, of which `take` chooses rows."""

    def assemble(resident: Any, plan: Plan) -> Episode:
        parts = [[take(array, rows) for array in resident] for rows in plan]
        shape = store.images.shape[1:]
        return _episode([(pixels.reshape(*y.shape, *shape), y, domain) for pixels, y, domain in parts])

    return assemble


def _take_from_all(array: Array, rows: Any) -> Array:
    """jnp.take() of rows [own tasks, images] from an array of which each device of a mesh has a part."""
    everyones = jax.lax.all_gather(rows, mesh.AXIS, tiled=True)  # row numbers of all tasks: a few bytes
    own = everyones - len(array) * jax.lax.axis_index(mesh.AXIS)
    here = (own >= 0) & (own < len(array))
    taken = jnp.take(array, jnp.where(here, own, 0), axis=0)
    taken = jnp.where(here.reshape(*here.shape, *[1] * (array.ndim - 1)), taken, 0)
    # Each image is in one part alone, so the sum over the devices is that image.
    return jax.lax.psum_scatter(taken, mesh.AXIS, tiled=True)


def tfdata_source(store: DomainStore, devices: Mesh | None = None) -> Source:
    """Images that tf.data reads from disk, in parallel and ahead; for stores larger than the memory."""
    with needing("source='tfdata'", "data", ", or use 'device'"):
        import tensorflow as tf
    tf.config.set_visible_devices([], "GPU")
    domains, images = store.row_domains(), reader(store.images)

    def batches(plan_of: Callable[[int], Plan], start: int, stop: int) -> Iterator[Episode]:
        def read(step: np.ndarray) -> list[np.ndarray]:
            return [part for rows in plan_of(int(step)) for part in (images(rows), store.labels[rows], domains[rows])]

        types = [tf.uint8, tf.int32, tf.int32] * 2
        data = tf.data.Dataset.range(start, stop).map(
            lambda step: tf.numpy_function(read, [step], types), num_parallel_calls=READERS, deterministic=True
        )
        for arrays in data.prefetch(PREFETCH).as_numpy_iterator():
            yield _episode([arrays[:3], arrays[3:]])

    return Source((), batches, lambda resident, episode: episode, devices)


def reader(images: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """A function that returns rows of images.

    Where they are a mapped file larger than the free memory, the system is told all rows before it needs the first, so
    that it reads them at the same time. By itself it would read one after another, each with the 128 kB around it.
    That pays only where the whole file stays in memory.
    """
    mapped: Any = images.base
    room = memory.available()
    advisable = isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_WILLNEED")
    if not advisable or room is None or images.nbytes <= room:
        return images.__getitem__
    mapped.madvise(mmap.MADV_RANDOM)
    size = images[0].nbytes

    def read(rows: np.ndarray) -> np.ndarray:
        for begin in (rows.ravel().astype(np.int64) * size).tolist():
            before = begin % mmap.PAGESIZE
            mapped.madvise(mmap.MADV_WILLNEED, begin - before, before + size)
        return images[rows]

    return read


# Of episodes that the host has made already: its plan_of(step) gives them themselves.
AS_GIVEN = Source((), lambda plan_of, start, stop: map(plan_of, range(start, stop)), lambda resident, episode: episode)
SOURCES: dict[str, Callable[[DomainStore, Mesh | None], Source]] = {"device": device_source, "tfdata": tfdata_source}


def _episode(parts: Any) -> Episode:
    (support, support_label, support_domain), (query, label, query_domain) = parts
    return Episode(Images(support, support_domain), Images(query, query_domain), label, support_label)
