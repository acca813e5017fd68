"""Where memory does not suffice, one line names what was asked for and what to lower."""

import contextlib
import re

import jax
import numpy as np
import pytest

from cxda_jax.data.sources import device_source
from cxda_jax.errors import UserError
from cxda_jax.machine import backend, cost, memory
from tests.lines import refused

XLA, FIELDS, OUT = jax.errors.JaxRuntimeError, "net.width or episode.*", "RESOURCE_EXHAUSTED: Out of memory"


def test_running_out_of_memory_is_one_line():
    for told, error in {
        "104.7 GB": XLA(f"{OUT} allocating 104717893440 bytes."),
        "12.50 GiB": XLA(f"{OUT} while trying to allocate 12.50GiB.\nBufferAssignment:\n" + 99 * "x\n"),
        "29.8 GiB": MemoryError("Unable to allocate 29.8 GiB for an array with shape (4000000000,)"),
    }.items():
        said = f"^out of memory: {told} asked for at once; lower {re.escape(FIELDS)}$"
        with pytest.raises(UserError, match=said), memory.named(FIELDS):
            raise error
    with pytest.raises(XLA, match="^INVALID_ARGUMENT"), memory.named(FIELDS):
        raise XLA("INVALID_ARGUMENT: allocating 7 bytes")


def test_a_store_larger_than_the_device_names_its_size_the_room_and_the_way_out(fixed_store, monkeypatch):
    needed = fixed_store.images.nbytes + fixed_store.labels.nbytes + fixed_store.row_domains().nbytes
    monkeypatch.setattr(memory, "left_on_device", lambda: needed)
    device_source(fixed_store)
    monkeypatch.setattr(memory, "left_on_device", lambda: needed - 1)
    with refused("source='device'.* 270 images.*source=tfdata"):
        device_source(fixed_store)


@pytest.mark.slow
def test_the_check_knows_what_a_program_needs_and_costs_no_second_compilation(monkeypatch):
    x, program = jax.device_put(np.ones((1000, 10), np.float32)), jax.jit(lambda x: x @ x.T)
    counted, raises = cost.Compilations(), pytest.raises(memory.TooLarge)
    # The product takes 4,000,000 bytes. What was freed can be taken again, and the system may say nothing.
    for available, freed, fits in ((3_900_000, 0, False), (4_100_000, 0, True), (None, 0, True), (0, 5_000_000, True)):
        monkeypatch.setattr(memory, "available", lambda available=available: available)
        monkeypatch.setattr(backend, "freed_memory", lambda freed=freed: freed)
        with contextlib.nullcontext() if fits else raises:
            memory.insist_it_fits(program, x)
    program(x)
    assert counted.programs == 1
