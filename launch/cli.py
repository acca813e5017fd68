"""What the launchers share: reading `--config=file.py:variant --config.field=value`, and one line for a user's mistake."""

import ast
import contextlib
import difflib
import hashlib
import io
import json
import os
import platform
import runpy
import select
import signal
import stat
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict

from configs import common
from cxda_jax import backend
from cxda_jax.reading import reason, system_fault
from cxda_jax.types import UserError, brief, printable
from launch import stops
from launch.usage import data_folder

_DEBUG = flags.DEFINE_bool("debug", False, "Show a traceback with errors.")
DATA_DIR = flags.DEFINE_string("data_dir", data_folder(), "Where generated and prepared data sets are kept.")
_DETERMINISTIC = flags.DEFINE_bool(
    "deterministic", False, "On GPUs, give the same bits in every run, more slowly; CPUs always do."
)
_overrides: list[tuple[str, str]] = []


def run(main: Callable[[], None]) -> None:
    """Runs a launcher. A UserError or a wrong flag prints one line and exits with 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the name of a file may hold any bytes

    def parse(argv: Sequence[str]) -> Sequence[str]:
        try:
            rest = flags.FLAGS(_take_overrides(argv))
        except (flags.Error, UserError) as e:
            _fail(str(e))
        except SystemExit:  # of --helpfull and its like, which absl ends with 1
            sys.exit(0)
        if len(rest) > 1:
            _fail(f"unexpected argument {rest[1]!r}; flags are written --name=value")
        return rest

    def guarded(_: Sequence[str]) -> None:
        if not _DEBUG.value:
            logging.set_verbosity(logging.FATAL)  # orbax tells of every file it opens, and of a full disk in pages
            sys.excepthook = _pass_over_orbax
        if _DETERMINISTIC.value:
            backend.make_deterministic()
        try:
            stops.watch()
            _explained(main)
        except stops.Stopped as e:
            stops.say(stops.LINE.format(e.name))
            sys.exit(e.code)
        finally:
            stops.unwatch()

    try:
        app.run(guarded, flags_parser=parse)
    finally:
        _flush()


def _explained(main: Callable[[], None]) -> None:
    """Runs it, and makes one line of what a user or the system did wrong."""
    try:
        main()
    except (UserError, OSError) as e:
        if isinstance(e, BrokenPipeError) and _is_unread():
            sys.exit(128 + signal.SIGPIPE)
        if _DEBUG.value:
            traceback.print_exc()
        _fail(system_fault(e) if isinstance(e, OSError) else str(e))


def _flush() -> None:
    """Writes out what was printed, before Python does: where nobody reads it any more, that would print pages."""
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError as e:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(e, BrokenPipeError):
            _fail(system_fault(e))


def _is_unread() -> bool:
    """Whether whoever read our output has closed it, as `head` does."""
    output = select.poll()
    output.register(1, 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


def keep_compiled() -> None:
    """Has JAX keep compiled programs for later processes, in $JAX_COMPILATION_CACHE_DIR or the user's cache folder.

    What is loaded from there is run, so nobody else may be able to write there.
    """
    named = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(named) if named else Path(home) / "cxda_jax" / "compiled" / _machine()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return  # a machine without a home folder compiles anew
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UserError(
            f"{folder}: others can write to this folder of compiled programs; chmod 700 it, or name another in "
            "$JAX_COMPILATION_CACHE_DIR"
        )
    jax.config.update("jax_compilation_cache_dir", str(folder))


def _machine() -> str:
    """A name for machines that can run each other's programs: homes are shared between others too."""
    facts = [platform.machine()]
    if Path("/proc/cpuinfo").exists():
        facts += [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith(("model name", "flags"))][
            :2
        ]
    return hashlib.sha256("".join(facts).encode()).hexdigest()[:12]


def load_config(spec: str) -> ConfigDict:
    """Reads `file.py:variant` and applies the command line's --config.field=value overrides to it."""
    path, _, variant = spec.partition(":")
    if not os.path.isfile(path):
        near = difflib.get_close_matches(path, [str(p) for p in Path("configs").glob("*.py")], n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else "run from the repository's root, or give the file's path"
        raise UserError(f"--config={brief(spec)}: no file {brief(path) or repr('')}; {hint}")
    try:
        get_config = runpy.run_path(path).get("get_config")
        config: Any = get_config(variant or None) if get_config else None
    except Exception as e:
        if _DEBUG.value:
            traceback.print_exc()
        # A ValueError is what a config says to the user; the others are slips in it.
        what = reason(e, 120) if isinstance(e, ValueError) else f"{type(e).__name__}: {reason(e)}; --debug shows where"
        raise UserError(f"--config={brief(spec)}: {what}") from e
    if not get_config:
        raise UserError(f"--config={brief(spec)}: defines no get_config(argument); see configs/glyphs.py")
    lacking = [k for k in common.default() if not isinstance(config, ConfigDict) or k not in config]
    if lacking:
        found = f"a config without {lacking[0]}" if isinstance(config, ConfigDict) else f"a {type(config).__name__}"
        raise UserError(f"--config={brief(spec)}: get_config() returns {found}; start from configs.common.default()")
    for name, text in _overrides:
        override(config, name, text)
    return config


def resolve(config: ConfigDict) -> dict[str, Any]:
    """Plain nested dicts of what JSON can hold, so that a saved config equals the one in use."""
    return json.loads(json.dumps(config.to_dict()))


def overrides(allowed: Sequence[str]) -> list[tuple[str, str]]:
    """The command line's --config.field=value pairs, for a launcher that lets only some groups be changed."""
    for name, _ in _overrides:
        if name.partition(".")[0] not in allowed:
            can = ", ".join(allowed) or "no field"
            raise UserError(f"--config.{brief(name)}: a trained run fixes it; this command can change {can}")
    return list(_overrides)


def override(config: ConfigDict, name: str, text: str) -> None:
    """Sets the dotted field `name` to `text`, read as the type of the present value."""
    parent = node = config
    parts = name.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(node, ConfigDict) or part not in node:
            at = ".".join(["config", *parts[:depth]])
            if not isinstance(node, ConfigDict):
                raise UserError(
                    f"--config.{brief(name)}: {at} is a single value, it has no field {brief(repr(part), 30)}"
                )
            near = difflib.get_close_matches(part, list(node), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"fields: {', '.join(sorted(node))}"
            message = f"--config.{brief(name)}: {at} has no field {brief(repr(part), 30)}; {hint}"
            raise UserError(textwrap.shorten(message, 200, placeholder=" ..."))
        parent, node = node, node[part]
    if isinstance(node, ConfigDict):
        raise UserError(f"--config.{name} is a group; set one of its fields: {', '.join(sorted(node))}")
    parent[parts[-1]] = _read(name, text, node)


def _read(name: str, text: str, present: Any) -> Any:
    kind = type(present)
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind is tuple:
            value = _literal(text)
            if not isinstance(value, tuple) or {type(v) for v in value} - {type(p) for p in present}:
                raise ValueError
        else:
            value = kind(text)
        # Of numbers, those that JSON gives back and 64 bits hold: not nan either.
        if not all(abs(v) < 2**63 for v in (value if kind is tuple else [value]) if isinstance(v, int | float)):
            raise ValueError
        return value
    except (KeyError, ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        what = "finite float" if kind is float else kind.__name__
        raise UserError(f"--config.{name}={brief(text)}: expected a {what} such as {present!r}") from None


def _literal(text: str) -> Any:
    if len(text) > 1000:  # no tuple of settings is; the parser's memory and stack would be the limit
        raise ValueError
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "\\d" and the like; a message is one line
        return ast.literal_eval(text)


def _take_overrides(argv: Sequence[str]) -> list[str]:
    """Moves --config.field=value out of argv, which absl knows nothing of."""
    rest, _overrides[:] = [], []
    arguments = iter(argv)
    for argument in arguments:
        stem = argument.lstrip("-")
        if not argument.startswith("-") or not stem.startswith("config."):
            rest.append(argument)
            continue
        name, equals, text = stem.removeprefix("config.").partition("=")
        text = text if equals else next(arguments, None)
        if text is None:
            raise UserError(f"--config.{brief(name)} has no value; write --config.{brief(name)}=VALUE")
        _overrides.append((name, text))
    return rest


def _pass_over_orbax(kind: type[BaseException], e: BaseException, trace: Any) -> None:
    """Its writing threads, once one has failed, print this for each array; the failure itself is raised where it is waited for."""
    if str(e) != "Event loop is closed":
        sys.__excepthook__(kind, e, trace)


def _fail(message: str) -> NoReturn:
    with contextlib.suppress(BrokenPipeError):
        print("error: " + printable(" ".join(message.split())), file=sys.stderr)
    sys.exit(2)
