"""The command `cxda`: cxda COMMAND --help says what each of them does."""

import difflib
import runpy
import sys
from pathlib import Path

from cxda_jax.machine import stops
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
    "doctor": "say what this machine has, and how to mend what is missing",
}
# For bash, and for zsh by its bashcompinit. The flags are those of the command's own --help; all else is a file.
COMPLETION = r"""_cxda() {
    local choices=""
    if ((COMP_CWORD == 1)); then
        choices="COMMANDS completion"
    elif [[ $2 == -* ]]; then
        choices=$("$1" "${COMP_WORDS[1]}" --help 2>/dev/null | sed -n 's/^  --\(\[no\]\)*\([a-z_]*\):.*/--\2/p')
    fi
    COMPREPLY=($(compgen -W "$choices" -- "$2"))
}
complete -o default -F _cxda cxda""".replace("COMMANDS", " ".join(COMMANDS))
SHELLS = {"bash": COMPLETION, "zsh": f"autoload -Uz compinit bashcompinit && compinit && bashcompinit\n{COMPLETION}"}


def main() -> None:
    name = sys.argv[1] if sys.argv[1:] else "--help"
    if name in ("--help", "-h", "help"):
        lines = [f"  {command:<11}{what}" for command, what in COMMANDS.items()]
        more = "cxda COMMAND --help says more; cxda completion bash prints what completes commands and flags by Tab."
        print("usage: cxda COMMAND [--flag=value ...]", "", *lines, "", more, sep="\n")
    elif name == "--version":
        print(VERSION)
    elif name == "completion" and (script := SHELLS.get(" ".join(sys.argv[2:]))):
        print(script)
    elif name == "completion":
        print(f"error: cxda completion: give a shell, {' or '.join(SHELLS)}", file=sys.stderr)
        sys.exit(2)
    elif name not in COMMANDS:
        known = [*COMMANDS, "completion"]
        near = [f"did you mean {name!r}?" for name in difflib.get_close_matches(name, known, 1)]
        print(f"error: {name!r} is no command;", *near, f"choose from {', '.join(known)}", file=sys.stderr)
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
