"""What is written on command lines, and how what went wrong becomes one line."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr

import pytest

from cxda_jax.reading import system_fault
from cxda_jax.types import UserError
from launch import cli, stops
from tests.lines import ROOT


def config():
    return cli.load_config("configs/glyphs.py:cxda")


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("seed", "3", 3),
        ("optimizer.learning_rate", "3e-3", 0.003),
        ("augment.crop", "false", False),
        ("net.dtype", "bfloat16", "bfloat16"),
        ("data.writers", "(4, 3, 2)", (4, 3, 2)),
    ],
)
def test_override(name, text, value):
    c = config()
    cli.override(c, name, text)
    node = c
    for part in name.split("."):
        node = node[part]
    assert node == value


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("seed", "abc", "--config.seed=abc: expected a int such as 0"),
        ("augment.crop", "maybe", "expected a bool such as True"),
        ("data.writers", "(1, 2.5, 3)", "expected a tuple such as"),
        ("data.writers", "7", "expected a tuple such as"),
        ("data.writers", "__import__('os')", "expected a tuple such as"),
        ("optimizer", "adam", "is a group; set one of its fields"),
        ("seed.x", "1", "config.seed is a single value"),
        ("", "1", "config has no field ''"),
    ],
)
def test_bad_overrides(name, text, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        cli.override(config(), name, text)


def test_tuples_may_change_their_length():
    c = config()
    cli.override(c, "net.dont_load", "('fc', 'layer4')")
    cli.override(c, "net.stages", "(2, 2)")
    assert c.net.dont_load == ("fc", "layer4") and c.net.stages == (2, 2)


def test_overrides_are_taken_with_and_without_equals():
    assert cli._take_overrides(["x", "--config=a", "--config.seed=1", "--config.net.width", "8", "--debug"]) == [
        "x", "--config=a", "--debug"
    ]  # fmt: skip
    assert cli._overrides == [("seed", "1"), ("net.width", "8")]
    cli._overrides.clear()
    with pytest.raises(UserError, match="--config.seed has no value"):
        cli._take_overrides(["x", "--config.seed"])
    cli._overrides.clear()


def test_failures_are_folded_into_one_line():
    stderr = io.StringIO()
    with redirect_stderr(stderr), pytest.raises(SystemExit) as exit:
        cli._fail("a\n  b")
    assert exit.value.code == 2 and stderr.getvalue() == "error: a b\n"


@pytest.mark.parametrize(
    "error, line",
    [
        (OSError(28, "No space left on device", "runs/a"), "runs/a: No space left on device; free some space and run the same command again"),
        (OSError(30, "Read-only file system", "/mnt/b"), "/mnt/b: Read-only file system; choose a folder that can be written to"),
        (PermissionError(13, "Permission denied", "c"), "c: Permission denied; choose another folder, or change its rights"),
        (FileNotFoundError(2, "No such file or directory", "d"), "d: No such file or directory; it was there before, or its folder was; bring it back"),
        (OSError("odd"), "a file: odd; --debug shows where"),
    ],
)  # fmt: skip
def test_what_the_system_refuses_is_one_line(error, line):
    assert system_fault(error) == line


@pytest.mark.parametrize(
    "body, code",
    [
        ("print('a')", 0),  # all work was done
        ("print('a', flush=True); print('b', flush=True)", 141),
        ("print('a'); raise UserError('wrong')", 2),
        ("print('a'); raise stops.Stopped(15)", 143),
    ],
)
def test_a_closed_output_ends_a_command_quietly(body, code):
    script = f"from launch import cli, stops\nfrom cxda_jax.types import UserError\ndef main(): {body}\ncli.run(main)"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": ""},
    )  # fmt: skip
    os.close(writing)
    said = {2: "error: wrong\n", 143: f"{stops.LINE.format('SIGTERM')}\n"}.get(code, "")
    assert (done.returncode, done.stderr) == (code, said)


def test_an_output_on_a_full_disk_is_one_line():
    script = "from launch import cli\ncli.run(lambda: print('a'))"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "No space left on device" in done.stderr
