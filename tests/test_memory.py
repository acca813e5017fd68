"""Where memory does not suffice, one line names what was asked for and what to lower."""

import contextlib
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest

from cxda_jax import backend, cost, memory
from cxda_jax.data.sources import device_source
from cxda_jax.errors import UserError
from tests.commands import command
from tests.lines import ROOT, refused
from tests.test_train import run

gate = pytest.mark.gate
XLA, FIELDS = jax.errors.JaxRuntimeError, "net.width or episode.*"
OUT = "RESOURCE_EXHAUSTED: Out of memory"


def test_running_out_of_memory_is_one_line():
    for error, told in (
        (XLA(f"{OUT} allocating 104717893440 bytes."), ": 104.7 GB"),
        (XLA(f"{OUT} while trying to allocate 12.50GiB.\nBufferAssignment:\n" + 99 * "x\n"), ": 12.50 GiB"),
        (XLA("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm."), ""),
        (MemoryError("Unable to allocate 29.8 GiB for an array with shape (4000000000,)"), ": 29.8 GiB"),
    ):
        with pytest.raises(UserError) as e, memory.named(FIELDS):
            raise error
        assert str(e.value) == f"out of memory{told and f'{told} asked for at once'}; lower {FIELDS}"
    for error in (XLA("INVALID_ARGUMENT: allocating 7 bytes"), ValueError("RESOURCE_EXHAUSTED")):
        with pytest.raises(type(error)) as e, memory.named(FIELDS):
            raise error
        assert e.value is error  # other errors stay what they are


@gate
def test_training_and_testing_say_what_to_lower(smoke, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 0)
    monkeypatch.setattr(backend, "freed_memory", lambda: 0)
    shutil.copytree(smoke[0] / "run", tmp_path / "run")
    (tmp_path / "run" / "predictions.npz").unlink()
    train = "train", "--config=glyphs:cxda,smoke", f"--workdir={tmp_path}/new"
    test = "evaluate", f"--runs={tmp_path}/run"
    for line, fields in (
        (train, "train.tasks_per_step, net.width, episode.* or evaluation.per_call"),
        (test, "evaluation.per_call, episode.* or cotta.copies"),
    ):
        said = command(*line, f"--data_dir={smoke[0]}/data", code=2)
        told = rf"error: out of memory: a program needs 0\.\d GB, 0\.0 GB are free; lower {re.escape(fields)}\n"
        assert re.fullmatch(told, said), said


@gate
def test_threads_share_one_pool_of_freed_memory():
    """Else each keeps what it has freed to itself, and a process that trains again and again grows for hours."""
    code = """
        import ctypes
        from cxda_jax import backend
        backend.keep_freed_memory()
        import jax, jax.numpy as jnp
        jax.jit(lambda x: (x @ x).sum())(jnp.ones((500, 500))).block_until_ready()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_info"):  # of glibc
            libc.fopen.restype = ctypes.c_void_p
            file = ctypes.c_void_p(libc.fopen(b"/dev/stderr", b"w"))
            libc.malloc_info(0, file)
            libc.fclose(file)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "<malloc" not in done.stderr or done.stderr.count("<heap nr=") == 1


@gate
def test_a_program_that_will_not_fit_is_not_started(fixed_store, tmp_path, monkeypatch):
    """On CPUs, where the system would end the process in its midst."""
    monkeypatch.setattr(backend, "freed_memory", lambda: 0)
    for room, begun in ((1000, False), (20_000, True)):  # the state takes 5,000, the step 70,000
        monkeypatch.setattr(memory, "available", lambda room=room: room)
        with pytest.raises(memory.TooLarge, match=r"needs 0\.0 GB, 0\.0 GB are free"):
            run(fixed_store, tmp_path)
        assert (tmp_path / "metrics.jsonl").exists() == begun
    assert (tmp_path / "metrics.jsonl").read_text() == ""


@gate
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


def test_what_is_available_is_what_the_system_says():
    assert 0 <= backend.freed_memory() < 2**40
    if Path("/proc/meminfo").exists():
        total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
        assert 0 < memory.available() < 2 * total + 2**40


def test_a_store_larger_than_the_device_names_its_size_the_room_and_the_way_out(fixed_store, monkeypatch):
    needed = fixed_store.images.nbytes + fixed_store.labels.nbytes + fixed_store.row_domains().nbytes
    monkeypatch.setattr(memory, "left_on_device", lambda: needed)
    resident = device_source(fixed_store).resident
    if jax.default_backend() == "cpu":  # the mapped file itself, where other devices hold a copy
        assert resident[0].unsafe_buffer_pointer() == fixed_store.images.ctypes.data
    monkeypatch.setattr(memory, "left_on_device", lambda: needed - 1)
    with refused(r"source='device'.* 270 images.*0\.0 GB and the device has 0\.0 GB.*source=tfdata"):
        device_source(fixed_store)


def test_what_a_device_has_left_is_what_it_says(monkeypatch):
    class Device:
        def __init__(self, told):
            self.memory_stats = lambda: told

    for told, left in [(None, None), ({}, None), ({"bytes_limit": 100, "bytes_in_use": 30}, 70)]:
        monkeypatch.setattr(jax, "local_devices", lambda told=told: [Device(told)])
        assert memory.left_on_device() == left
