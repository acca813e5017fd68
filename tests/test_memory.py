"""Where memory does not suffice, one line names what was asked for and what to lower."""

import functools
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax import backend, cost, memory
from cxda_jax.data.sources import device_source
from cxda_jax.errors import UserError
from cxda_jax.evaluation import evaluate
from cxda_jax.study import testing, training
from cxda_jax.types import Images
from tests.lines import ROOT
from tests.test_train import METHOD, SPEC, run, sample_plans

XLA, FIELDS = jax.errors.JaxRuntimeError, "net.width or episode.*"


@pytest.mark.parametrize("error, told", [
    (XLA("RESOURCE_EXHAUSTED: Out of memory allocating 104717893440 bytes."), "104.7 GB"),
    (XLA("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 53687091200 bytes.\nBufferAssignment:\n" + 99 * "x\n"), "53.7 GB"),
    (XLA("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12.50GiB."), "12.50 GiB"),
    (XLA("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm."), ""),
    (MemoryError("Unable to allocate 29.8 GiB for an array with shape (4000000000,) and data type float64"), "29.8 GiB"),
    (MemoryError("std::bad_alloc"), ""),
    (memory.TooLarge("a program needs 20.5 GB, 8.1 GB are free"), "20.5 GB, 8.1 GB are free"),
])  # fmt: skip
def test_running_out_of_memory_is_one_line(error, told):
    with pytest.raises(UserError) as e, memory.named(FIELDS):
        raise error
    line = str(e.value)
    assert line.startswith("out of memory") and line.endswith(f"lower {FIELDS}") and told in line
    assert "\n" not in line and len(line) <= 120


def test_other_errors_stay_what_they_are():
    for error in (XLA("INVALID_ARGUMENT: allocating 7 bytes"), ValueError("RESOURCE_EXHAUSTED")):
        with pytest.raises(type(error)) as e, memory.named(FIELDS):
            raise error
        assert e.value is error


def test_training_and_testing_say_what_to_lower(monkeypatch):
    anything: Any = types.SimpleNamespace(
        config={"train": {"tasks_per_step": 1}},
        run=None,
        split="test",
        method=None,
        source=None,
        store=types.SimpleNamespace(info=None),
    )

    def fail(*_):
        raise XLA("RESOURCE_EXHAUSTED: Out of memory allocating 104717893440 bytes.")

    monkeypatch.setattr(training, "prepared", fail)
    with pytest.raises(UserError, match=r"104\.7 GB .* lower train\.tasks_per_step, net\.width, episode\.\* or eval"):
        training.train_run(anything.config, anything, anything)
    monkeypatch.setattr(testing, "restore_best", fail)
    with pytest.raises(UserError, match=r"104\.7 GB .* lower evaluation\.per_call, episode"):
        testing.evaluate_run(anything, anything, anything)


def test_what_xla_says_in_a_process_of_limited_memory_is_understood():
    code = """
        import resource
        import jax, jax.numpy as jnp
        from cxda_jax import memory
        from cxda_jax.errors import UserError
        limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + 10 * 2**30
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            with memory.named("x"):
                jax.block_until_ready(jax.jit(lambda: jnp.ones((60_000, 60_000)))())
        except UserError as e:
            print(e)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "out of memory: 14.4 GB asked for at once; lower x\n", done.stderr


def test_a_program_that_will_not_fit_is_not_started(store, tmp_path, monkeypatch):
    """On CPUs, where the system would end the process in its midst."""
    source = device_source(store)
    variables = METHOD.init(jax.random.key(0), Images(store.images[:2], np.zeros(2, np.int32)))
    experiment: Any = types.SimpleNamespace(method=METHOD, source=source)
    monkeypatch.setattr(memory, "available", lambda: 1000)
    monkeypatch.setattr(backend, "freed_memory", lambda: 0)
    with pytest.raises(memory.TooLarge, match=r"needs 0\.0 GB, 0\.0 GB are free"):
        run(store, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()  # of so little, not even the first state fits
    plans = functools.partial(sample_plans, SPEC, store.offsets, store.domains("val"), 0)
    with pytest.raises(memory.TooLarge):
        evaluate(testing.compiled(experiment), variables, source, plans, 2, "accuracy")
    monkeypatch.setattr(memory, "available", lambda: 20_000)  # the state takes 5,000, the step 70,000
    with pytest.raises(memory.TooLarge):
        run(store, tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""


def test_the_check_knows_what_a_program_needs_and_costs_no_second_compilation(monkeypatch):
    counted, program, x = cost.Compilations(), jax.jit(lambda x: x @ x.T), jnp.ones((1000, 10))
    monkeypatch.setattr(backend, "freed_memory", lambda: 0)
    monkeypatch.setattr(memory, "available", lambda: 3_900_000)  # the product takes 4,000,000
    before = counted.programs
    with pytest.raises(memory.TooLarge):
        memory.insist_it_fits(program, x)
    monkeypatch.setattr(memory, "available", lambda: 4_100_000)
    memory.insist_it_fits(program, x)
    program(x)
    assert counted.programs == before + 1
    monkeypatch.setattr(memory, "available", lambda: None)  # where the system says nothing
    memory.insist_it_fits(program, x)
    monkeypatch.setattr(memory, "available", lambda: 0)
    monkeypatch.setattr(backend, "freed_memory", lambda: 5_000_000)  # it can be taken again
    memory.insist_it_fits(program, x)


def test_what_is_available_is_what_the_system_says():
    assert 0 <= backend.freed_memory() < 2**40
    if not Path("/proc/meminfo").exists():
        assert memory.available() is None
    else:
        total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
        assert 0 < (memory.available() or 0) < 2 * total + 2**40


def test_a_store_larger_than_the_device_names_its_size_the_room_and_the_way_out(store, monkeypatch):
    needed = store.images.nbytes + store.labels.nbytes + store.row_domains().nbytes
    monkeypatch.setattr(memory, "left_on_device", lambda: needed)
    device_source(store)
    monkeypatch.setattr(memory, "left_on_device", lambda: needed - 1)
    with pytest.raises(UserError) as e:
        device_source(store)
    line = str(e.value)
    assert all(part in line for part in ("source='device'", f"{len(store.labels)} images", "source=tfdata"))
    assert "0.0 GB and the device has 0.0 GB" in line and len(line) <= 200


def test_what_a_device_has_left_is_what_it_says(monkeypatch):
    class Device:
        def __init__(self, told):
            self.memory_stats = lambda: told

    for told, left in [(None, None), ({}, None), ({"bytes_limit": 100, "bytes_in_use": 30}, 70)]:
        monkeypatch.setattr(jax, "local_devices", lambda told=told: [Device(told)])
        assert memory.left_on_device() == left


def test_on_cpus_a_resident_store_is_the_mapped_file_itself(store):
    if jax.default_backend() != "cpu":
        pytest.skip("other devices hold a copy")
    assert device_source(store).resident[0].unsafe_buffer_pointer() == store.images.ctypes.data
