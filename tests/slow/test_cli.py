"""What is written on command lines, and how what went wrong becomes one line."""

import os
import subprocess
import sys

import pytest

from cxda_jax.machine import stops
from tests.lines import ROOT


@pytest.mark.parametrize(("body", "code", "said"), [
    ("print('a')", 0, ""),  # all work was done
    ("print('a', flush=True); print('b', flush=True)", 141, ""),
    ("say('a'); say('b'); raise UserError('wrong\\n  indeed')", 2, "error: wrong indeed\n"),  # what says so goes on
    ("print('a'); raise stops.Stopped(15)", 143, stops.ANEW.format("SIGTERM") + "\n"),
    ("raise AssertionError('it is the flag that counts')", 141, ""),
    ("print('full')", 2, "error: a file: No space left on device; free some space and run the same command again\n"),
])  # fmt: skip
def test_a_closed_output_ends_a_command_quietly_and_a_full_disk_with_a_line(body, code, said):
    lines = (
        "from launch import cli, stops",
        "from cxda_jax.errors import UserError",
        "from cxda_jax.machine.progress import say",
    )
    script = "\n".join([*lines, f"def main(): {body}", "cli.run(main)"])
    reading, closed = os.pipe()
    os.close(reading)
    with open("/dev/full" if "full" in body else closed, "w") as out:
        done = subprocess.run(
            [sys.executable, "-c", script, *["--help_config"] * ("flag" in body)],
            cwd=ROOT, stdout=out, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": ""},
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, said)
