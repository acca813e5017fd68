"""Where memory does not suffice, one line names what was asked for and what to lower."""

import contextlib
import re
import shutil

import jax
import numpy as np
import pytest

from cxda_jax.machine import backend, cost, memory
from tests.commands import command


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
