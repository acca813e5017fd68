"""One mesh over all devices of all processes, with the one axis "tasks".

The state of a training is whole on each device. Tasks are shared out in equal parts, and each process holds the part of
its own devices on the host. No other module asks how many devices or processes there are.
"""

import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from cxda_jax.errors import UserError

AXIS = "tasks"
WHOLE, CUT = jax.P(), jax.P(AXIS)


def processes() -> int:
    """The number of processes."""
    return jax.process_count()


def process() -> int:
    """The number of this process, from 0."""
    return jax.process_index()


def is_first() -> bool:
    """Whether this process is the one that writes files."""
    return jax.process_index() == 0


def mesh_for(tasks: int) -> Mesh | None:
    """The mesh on which steps of so many tasks run; None for a single device.

    A single process takes as many of its devices as share the tasks equally. Several processes take all devices.
    """
    count = jax.device_count()
    if jax.process_count() == 1:
        return mesh_of(max(n for n in range(1, count + 1) if tasks % n == 0))
    if tasks % count:
        of = f"{count} devices of {jax.process_count()} processes"
        fix = f"make it a multiple of {count}"
        raise UserError(f"{of} cannot share them", "train.tasks_per_step", tasks, fix)
    return mesh_of(count)


def mesh_of(count: int = 0) -> Mesh | None:
    """The mesh of so many devices, of 0 all; None for a single one."""
    found = jax.devices()[: count or None]
    return Mesh(np.array(found), (AXIS,)) if len(found) > 1 else None


def own_part(rows: np.ndarray) -> np.ndarray:
    """The rows of a step's tasks that the devices of this process take."""
    return np.split(rows, jax.process_count())[jax.process_index()]


def place(mesh: Mesh | None, tree: Any, spec: jax.sharding.PartitionSpec = WHOLE) -> Any:
    """Puts the arrays of a tree on the devices of the mesh; without a mesh, leaves them as they are.

    For WHOLE each process gives the same array. For CUT each one gives the rows of its own devices.
    """
    if mesh is None:
        return tree

    def put(x: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        if isinstance(x, jax.Array) and x.sharding == sharding:
            return x
        return jax.make_array_from_process_local_data(sharding, np.asarray(x))

    return jax.tree.map(put, tree)


def place_rows(mesh: Mesh, array: np.ndarray, by_rows: bool) -> jax.Array:
    """Puts an array of the store on the mesh: whole on each device, or by rows, with zeros after the last one."""
    if not by_rows:
        return place(mesh, array)
    rows = -(-len(array) // mesh.size) * mesh.size

    def part(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(rows)
        own = np.asarray(array[start:stop])
        return np.pad(own, [(0, stop - start - len(own))] + [(0, 0)] * (array.ndim - 1))

    return jax.make_array_from_callback((rows, *array.shape[1:]), NamedSharding(mesh, CUT), part)


def specs(tree: Any) -> Any:
    """The places of the arrays of a tree on their mesh: WHOLE, CUT and the like."""
    return jax.tree.map(lambda x: x.sharding.spec, tree)


def over(mesh: Mesh | None, call: Callable[..., Any], inputs: Any, outputs: Any = CUT) -> Callable[..., Any]:
    """A function that calls `call` on each device with the device's part of the arguments; without a mesh, `call`."""
    if mesh is None:
        return call
    return jax.shard_map(call, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def local(tree: Any) -> Any:
    """Fetches the rows that lie on the devices of this process, as arrays of the host."""

    def fetch(x: Any) -> np.ndarray:
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return np.asarray(x)
        if x.is_fully_replicated:
            return np.asarray(x.addressable_data(0))
        shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start)
        return np.concatenate([np.asarray(shard.data) for shard in shards])

    return jax.tree.map(fetch, tree)


def largest(array: np.ndarray) -> np.ndarray:
    """The elementwise maximum of the arrays of all processes, which must all call this."""
    if jax.process_count() == 1:
        return array
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array)).max(0)


def from_first(work: Callable[[], Any], like: Any = None) -> Any:
    """Calls work() in the first process alone, and returns its result, or raises its UserError, in all processes.

    The result consists of values that JSON can hold. With `like` it is a pair, or None in place of the pair: a tree of
    arrays that has the shapes of `like`, and such values.
    """
    if jax.process_count() == 1:
        return work()
    from jax.experimental import multihost_utils

    result, fault = None, ""
    if is_first():
        try:
            result = work()
        except UserError as e:
            fault = str(e)
    tree, notes = result if like is not None and result is not None else (None, result)
    fault, exists, notes = json.loads(_text_of_first(json.dumps([fault, result is not None, notes])))
    if fault:
        raise UserError(fault)
    if like is None or not exists:
        return notes
    empty = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
    return multihost_utils.broadcast_one_to_all(local(tree) if is_first() else empty), notes


def _text_of_first(text: str) -> str:
    """The text of the first process. Its length is sent before it, since the others do not know it."""
    from jax.experimental import multihost_utils

    data = np.frombuffer(text.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    padded = np.resize(data, size) if is_first() else np.zeros(size, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8)).decode()


def together() -> None:
    """Waits until all processes have called this."""
    largest(np.zeros(1, np.int32))


class NoWriter(contextlib.AbstractContextManager["NoWriter"]):
    """Stands for the writer of files in a process that writes none: its methods do nothing."""

    def nothing(self, *_: Any) -> None:
        pass

    save = wait = write = __call__ = __exit__ = nothing


def by_first(make: Callable[..., Any], *arguments: Any) -> Any:
    """The writer make(*arguments) in the first process, and a NoWriter in the others."""
    return make(*arguments) if is_first() else NoWriter()


def step_arguments(devices: Mesh | None, batches: Sequence[Any], stopping: Callable[[], bool]) -> tuple[Any, ...]:
    """The batches on the devices, for a program of so many steps. Several are stacked along a new first axis.

    With several processes there is a second argument: whether this process is asked to stop, once for each device.
    """
    batch, spec = batches[0], CUT
    if len(batches) > 1:
        batch, spec = jax.tree.map(_stacked, *batches), jax.P(None, AXIS)
    batch = place(devices, batch, spec)
    if devices is None or jax.process_count() == 1:
        return (batch,)
    return batch, place(devices, np.full(len(devices.local_devices), stopping(), np.int32), CUT)


def _stacked(*arrays: Any) -> Any:
    return (np if isinstance(arrays[0], np.ndarray) else jnp).stack(arrays)
