"""One mesh over all devices of all processes, with the one axis "tasks".

The state of a training is whole on each device. Tasks are shared out in equal parts, and each process holds the part of
its own devices on the host. No other module asks how many devices or processes there are.
"""

import contextlib
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from cxda_jax.errors import UserError

AXIS = "tasks"
WHOLE, CUT = jax.P(), jax.P(AXIS)


def processes() -> int:
    return jax.process_count()


def process() -> int:
    """The number of this one."""
    return jax.process_index()


def is_first() -> bool:
    """Whether this process is the one that writes."""
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
        raise UserError(f"tasks_per_step={tasks} cannot be shared by {of}; make it a multiple of {count}")
    return mesh_of(count)


def mesh_of(count: int = 0) -> Mesh | None:
    """The mesh of so many devices, of 0 all; None for a single one."""
    found = jax.devices()[: count or None]
    return Mesh(np.array(found), (AXIS,)) if len(found) > 1 else None


def own_part(rows: np.ndarray) -> np.ndarray:
    """The rows of a step's tasks that the devices of this process take."""
    return np.split(rows, jax.process_count())[jax.process_index()]


def place(mesh: Mesh | None, tree: Any, spec: jax.sharding.PartitionSpec = WHOLE) -> Any:
    """Arrays on the devices of the mesh: what is whole from the same array in each process,
    what is cut from own parts."""
    if mesh is None:
        return tree

    def put(x: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        if isinstance(x, jax.Array) and x.sharding == sharding:
            return x
        return jax.make_array_from_process_local_data(sharding, np.asarray(x))

    return jax.tree.map(put, tree)


def place_rows(mesh: Mesh, array: np.ndarray, by_rows: bool) -> jax.Array:
    """An array of the store on the mesh: whole on each device, or with its rows shared out and filled up with zeros."""
    if not by_rows:
        return place(mesh, array)
    rows = -(-len(array) // mesh.size) * mesh.size

    def part(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(rows)
        own = np.asarray(array[start:stop])
        return np.pad(own, [(0, stop - start - len(own))] + [(0, 0)] * (array.ndim - 1))

    return jax.make_array_from_callback((rows, *array.shape[1:]), NamedSharding(mesh, CUT), part)


def specs(tree: Any) -> Any:
    """The places of the arrays of a tree on their mesh."""
    return jax.tree.map(lambda x: x.sharding.spec, tree)


def over(mesh: Mesh | None, call: Callable[..., Any], inputs: Any, outputs: Any = CUT) -> Callable[..., Any]:
    """The function on each device's part of its arguments. It is the function itself where there is no mesh."""
    if mesh is None:
        return call
    return jax.shard_map(call, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def local(tree: Any) -> Any:
    """The rows of arrays that are on the devices of this process, as arrays of the host."""

    def fetch(x: Any) -> np.ndarray:
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return np.asarray(x)
        if x.is_fully_replicated:
            return np.asarray(x.addressable_data(0))
        shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start)
        return np.concatenate([np.asarray(shard.data) for shard in shards])

    return jax.tree.map(fetch, tree)


def largest(array: np.ndarray) -> np.ndarray:
    """The elementwise maximum of the arrays that the processes have; all must call this."""
    return array if jax.process_count() == 1 else _gathered(array).max(0)


def from_first(work: Callable[[], Any], like: Any = None) -> Any:
    """The result that work() has in the first process, in all of them; a UserError there is one everywhere.

    It gives values that JSON can hold; or a pair of a tree of arrays that has the shapes of `like`, and such
    values. None in place of the pair stays None.
    """
    if jax.process_count() == 1:
        return work()
    from jax.experimental import multihost_utils

    given, fault = None, ""
    if is_first():
        try:
            given = work()
        except UserError as e:
            fault = str(e)
    tree, notes = given if like is not None and given is not None else (None, given)
    fault, exists, notes = json.loads(_text_of_first(json.dumps([fault, given is not None, notes])))
    if fault:
        raise UserError(fault)
    if like is None or not exists:
        return notes
    empty = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
    return multihost_utils.broadcast_one_to_all(local(tree) if is_first() else empty), notes


def together() -> None:
    """Returns once all processes have come here."""
    largest(np.zeros(1, np.int32))


class NoWriter(contextlib.AbstractContextManager["NoWriter"]):
    """In a process that writes no files: takes what it would write, and does nothing."""

    def nothing(self, *_: Any) -> None:
        pass

    save = wait = write = __call__ = __exit__ = nothing


def by_first(make: Callable[..., Any], *arguments: Any) -> Any:
    """make(*arguments) in the process that writes."""
    return make(*arguments) if is_first() else NoWriter()


def step_arguments(devices: Mesh | None, batch: Any, steps: int, stopping: Callable[[], bool]) -> tuple[Any, ...]:
    """The arguments of a program of so many steps: its batch on the devices; of several processes,
    also who is asked to stop."""
    batch = place(devices, batch, CUT if steps == 1 else jax.P(None, AXIS))
    if devices is None or jax.process_count() == 1:
        return (batch,)
    return batch, place(devices, np.full(len(devices.local_devices), stopping(), np.int32), CUT)


def _text_of_first(text: str) -> str:
    from jax.experimental import multihost_utils

    data = np.frombuffer(text.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    padded = np.resize(data, size) if is_first() else np.zeros(size, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8)).decode()


def _gathered(array: np.ndarray) -> np.ndarray:
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array)).reshape(jax.process_count(), *array.shape)
