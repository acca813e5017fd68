"""The command `cxda`: cxda COMMAND --help says what each of them does."""

import runpy
import sys
from pathlib import Path

from cxda_jax import stops

COMMANDS = {
    "train": "train one method on one benchmark, and test it",
    "evaluate": "test trained runs, and compare them",
    "prepare": "make a data set of downloads or of your own images",
    "reproduce": "run the whole study of a benchmark",
    "report": "make tables, figures and a page of results",
    "benchmark": "measure speed beside PyTorch",
    "doctor": "say what this machine has, and how to mend what is missing",
}


def usage() -> str:
    lines = [f"  {name:<11}{what}" for name, what in COMMANDS.items()]
    return "\n".join(["usage: cxda COMMAND [--flag=value ...]", "", *lines, "", "cxda COMMAND --help says more."])


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(usage())
        return
    if arguments[0] == "--version":
        from cxda_jax.version import VERSION

        print(VERSION)
        return
    if arguments[0] not in COMMANDS:
        print(f"error: {arguments[0]!r} is no command; choose from {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    stops.watch_imports()
    sys.argv[:2] = [f"cxda {arguments[0]}"]
    runpy.run_module(f"{home()}.{arguments[0]}", run_name="__main__", alter_sys=True)


def home() -> str:
    """The package of the commands: inside this one where it is installed, beside it in a checkout."""
    here = Path(__file__).parent
    if (here / "launch").is_dir():
        return "cxda_jax.launch"
    sys.path.insert(0, str(here.parent))
    return "launch"


if __name__ == "__main__":
    main()
