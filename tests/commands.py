"""Commands, run in this process: what a user types, without the seconds that a new process takes to import JAX."""

import contextlib
import importlib
import io
import sys
import time
from unittest import mock

import pytest
from absl.testing import flagsaver

from cxda_jax.machine import backend
from launch import cli

TOOLS = "ahead", "bench"  # which are commands too


def command(name, *arguments, code=0) -> str:
    """What a command prints, or what it writes to stderr where its exit code is not 0."""
    main = importlib.import_module(
        f"tools.{name}.__main__" if name in TOOLS else f"launch.{name}"
    ).main  # first: flagsaver would forget its flags
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", [name, *map(str, arguments)]),
        mock.patch.object(backend, "keep_freed_memory"),  # it is for the whole life of a process
        mock.patch.object(backend, "peak_matrix_side", lambda: 64),  # each training measures the machine's products
        flagsaver.flagsaver(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as exit,
    ):
        cli.run(main)
    cli.CHANGES.clear()
    assert (exit.value.code or 0) == code, out.getvalue() + err.getvalue()
    return err.getvalue() if code else out.getvalue()


def wait_until(happened, process=None, seconds=60):
    """Fails where the process ends first."""
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until and (process is None or process.poll() is None)
        time.sleep(0.05)
