"""The command `cxda`: cxda COMMAND --help says what each of them does."""

import runpy
import sys
from pathlib import Path

from cxda_jax import stops
from cxda_jax.version import VERSION

COMMANDS = {
    "train": "train one method on one benchmark, and test it",
    "evaluate": "test trained runs, and compare them",
    "diagnose": "say whether a buffer can help a classifier, and through what",
    "demo": "show in seconds what adapting does",
    "adapt": "adapt a model to your own images, and see what changed",
    "export": "write a model as programs for a device, or as a web page",
    "features": "describe images by an encoder that you have, for cxda fit",
    "fit": "learn to adapt a classifier that you have",
    "prepare": "make a data set of downloads or of your own images",
    "reproduce": "run the whole study of a benchmark",
    "report": "make tables, figures and a page of results",
    "benchmark": "measure speed beside PyTorch",
    "compile": "compile a training for accelerators that are not there",
    "doctor": "say what this machine has, and how to mend what is missing",
}


def main() -> None:
    name = sys.argv[1] if sys.argv[1:] else "--help"
    if name in ("--help", "-h", "help"):
        lines = [f"  {command:<11}{what}" for command, what in COMMANDS.items()]
        print("usage: cxda COMMAND [--flag=value ...]", "", *lines, "", "cxda COMMAND --help says more.", sep="\n")
    elif name == "--version":
        print(VERSION)
    elif name not in COMMANDS:
        print(f"error: {name!r} is no command; choose from {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    else:
        stops.watch_imports()
        sys.argv[:2] = [f"cxda {name}"]
        here = Path(__file__).parent
        installed = (here / "launch").is_dir()  # inside this package, and not beside it as in a checkout
        if not installed:
            sys.path.insert(0, str(here.parent))
        runpy.run_module(
            f"cxda_jax.launch.{name}" if installed else f"launch.{name}", run_name="__main__", alter_sys=True
        )


if __name__ == "__main__":
    main()
