"""The parts that the commands share: flags, --config.field=value, and one line for a user's mistake.

Nothing heavy is imported here or at the top of a command, so that --help answers at once.
"""

import contextlib
import io
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging

from cxda_jax.disk.reading import system_fault
from cxda_jax.errors import UserError, brief, printable
from cxda_jax.machine import stops

_DEBUG = flags.DEFINE_bool("debug", False, "Show a traceback with errors.")
_HELP_CONFIG = flags.DEFINE_bool("help_config", False, "List the fields of configs, with what each may be, and end.")
DATA_DIR = flags.DEFINE_string(
    "data_dir", os.environ.get("CXDA_DATA_DIR") or os.path.expanduser("~/.cache/cxda_jax"),
    "Where generated and prepared data sets are kept; $CXDA_DATA_DIR sets it too.",
)  # fmt: skip
_DETERMINISTIC = flags.DEFINE_bool(
    "deterministic", False, "On GPUs, give the same bits in every run, more slowly; CPUs always do."
)
_goes_on = False
CHANGES: list[tuple[str, str]] = []  # --config.field=value of the command line


# Flags of several commands. A process that imports several commands, as tests do, shares them: allow_override says so.


def define_runs() -> Any:
    text = "Run directories: quoted patterns, such as 'runs/glyphs/*/*'."
    return flags.DEFINE_list("runs", [], text, allow_override=True)


def insist_on_runs(patterns: list[str]) -> list[str]:
    return insist(patterns, "--runs", "give a run directory or a quoted pattern such as 'runs/glyphs/*/*'")


def insist(value: Any, flag: str, fix: str) -> Any:
    """The value of a flag that must be given."""
    if not value:
        raise UserError(f"{flag} is missing; {fix}")
    return value


def of_predictions(predictions: Any, others: Sequence[Any], only: Sequence[Any]) -> bool:
    """Whether a command is about a file of predictions. A UserError for one of the `others` with it, and for one of
    `only` without it."""
    wrong = others if predictions.value else only
    for flag in (flag for flag in wrong if flag.value != flag.default):
        told = f"given {'beside' if predictions.value else 'without'} --predictions"
        raise UserError(told, f"--{flag.name}", flag.value, "leave it out" if predictions.value else "give that too")
    return bool(predictions.value)


def define_other_data() -> Any:
    text = "The data differ from those that the run was trained on, and are meant to; results are marked."
    return flags.DEFINE_bool("other_data", False, text, allow_override=True)


def define_distributed() -> None:
    """The flags that joined() reads."""
    flags.DEFINE_bool(
        "distributed", False, "Work together with the same command in other processes: all that Slurm started, "
        "or one on each host of a Cloud TPU slice, or those that the next three flags say.", allow_override=True,
    )  # fmt: skip
    text = "HOST:PORT of process 0, where no Slurm and no Cloud TPU says it."
    flags.DEFINE_string("coordinator", "", text, allow_override=True)
    flags.DEFINE_integer("num_processes", -1, "How many processes there are, with --coordinator.", allow_override=True)
    flags.DEFINE_integer("process_id", -1, "The number of this one, from 0, with --coordinator.", allow_override=True)


def joined() -> contextlib.AbstractContextManager[None]:
    """Around the work of a command that several processes may share. Before it nothing may ask JAX for its devices."""
    given = [name for name in ("num_processes", "process_id") if flags.FLAGS[name].value != -1]
    given = ["coordinator"] * bool(flags.FLAGS.coordinator) + given
    if not flags.FLAGS.distributed:
        if given:
            raise UserError(f"--{given[0]} is for several processes; add --distributed, or leave it out")
        return contextlib.nullcontext()
    count, which = flags.FLAGS.num_processes, flags.FLAGS.process_id
    if given and len(given) < 3:
        missing = next(name for name in ("coordinator", "num_processes", "process_id") if name not in given)
        raise UserError(f"--{missing} is missing; give it beside --{given[0]}, or none of them on Slurm and Cloud TPU")
    if given and not re.fullmatch(r".+:\d+", flags.FLAGS.coordinator):
        where = brief(flags.FLAGS.coordinator, 60)
        raise UserError(f"--coordinator={where}: expected HOST:PORT of process 0, such as node1:8476")
    if given and not 0 <= which < count:
        raise UserError(f"--process_id={which}: expected 0 to {count - 1}, for --num_processes={count}")
    from cxda_jax.machine import hosts

    return hosts.joined(flags.FLAGS.coordinator, count, which, quiet=not _DEBUG.value)


def run(main: Callable[[], None]) -> None:
    """Runs a command. A UserError or a wrong flag prints one line and exits with its code, mostly 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the name of a file may hold any bytes
    try:
        app.run(lambda _: _guarded(main), flags_parser=_parse)
    except BrokenPipeError:  # of --help
        sys.exit(128 + signal.SIGPIPE)
    finally:
        _flush()


def _parse(argv: Sequence[str]) -> Sequence[str]:
    try:
        rest = flags.FLAGS(take_changes(argv))
        if _HELP_CONFIG.value:
            from cxda_jax.config import reading

            print(reading.table())
            sys.exit(0)
        if DATA_DIR.value.startswith("~"):  # as the default does where no home is known
            raise UserError(f"--data_dir={DATA_DIR.value}: no home folder; name a folder, here or in $CXDA_DATA_DIR")
    except (flags.Error, UserError) as e:
        _fail(str(e))
    except SystemExit:  # absl ends --help with 1
        sys.exit(0)
    if len(rest) > 1:
        _fail(f"unexpected argument {rest[1]!r}; flags are written --name=value")
    return rest


def _guarded(main: Callable[[], None]) -> None:
    if not _DEBUG.value:
        logging.set_verbosity(logging.FATAL)  # orbax tells of every file it opens, and of a full disk in pages
        sys.excepthook = _pass_over_orbax
    try:
        main()
    except stops.Stopped as e:
        stops.say((stops.LINE if _goes_on else stops.ANEW).format(e.name))
        sys.exit(e.code)
    except (UserError, OSError) as e:
        if isinstance(e, BrokenPipeError) and _is_unread():
            sys.exit(128 + signal.SIGPIPE)
        if _DEBUG.value:
            traceback.print_exc()
        _fail(system_fault(e)) if isinstance(e, OSError) else _fail(str(e), e.code)
    finally:
        stops.unwatch()


@contextlib.contextmanager
def loading(changes: bool = False, goes_on: bool = False) -> Iterator[None]:
    """Around a command's imports, which take seconds.

    Until they end a signal ends the process at once; then it is watched.

    Args:
      changes: the command takes --config.field=value.
      goes_on: once it was stopped, the same command goes on from what it saved.
    """
    global _goes_on
    _goes_on = goes_on
    if CHANGES and not changes:
        raise UserError(f"--config.{brief(CHANGES[0][0])}: this command changes no field of a config; leave it out")
    yield
    if _DETERMINISTIC.value:
        from cxda_jax.machine import backend

        backend.make_deterministic()
    stops.watch()


def take_changes(argv: Sequence[str]) -> list[str]:
    """Moves --config.field=value from argv to CHANGES, since absl knows nothing of it."""
    rest, CHANGES[:] = [], []
    arguments = iter(argv)
    for argument in arguments:
        name, equals, text = argument.lstrip("-").removeprefix("config.").partition("=")
        if not re.match(r"-+config\.", argument):
            rest.append(argument)
        elif not equals and (text := next(arguments, None)) is None:
            raise UserError(f"--config.{brief(name)} has no value; write --config.{brief(name)}=VALUE")
        else:
            CHANGES.append((name, text))
    return rest


def _flush() -> None:
    """Writes out what was printed. Python would do so at its end too, but with pages of errors where nobody reads."""
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError as e:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(e, BrokenPipeError):
            _fail(system_fault(e))


def _is_unread() -> bool:
    """Whether the reader of our output has closed it, as `head` does."""
    output = select.poll()
    output.register(1, 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


def _pass_over_orbax(kind: type[BaseException], e: BaseException, trace: Any) -> None:
    """Leaves out what orbax's writing threads print for each array once one has failed.

    The failure itself is raised later.
    """
    if str(e) != "Event loop is closed":
        sys.__excepthook__(kind, e, trace)


def _fail(message: str, code: int = UserError.code) -> NoReturn:
    with contextlib.suppress(BrokenPipeError):
        print("error: " + printable(" ".join(message.split())), file=sys.stderr)
    sys.exit(code)
