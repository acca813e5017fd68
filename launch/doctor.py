"""Says what this machine has for the package, and how to mend what is missing.

cxda doctor

One line each: the package, its libraries, JAX's devices, optional packages, free memory, the data folder and
the folder of compiled programs. It exits with 1 where something that every command needs is wrong.
"""

import sys

from absl import flags

from . import cli

flags.adopt_module_key_flags(cli)


def main() -> None:
    with cli.loading():
        from cxda_jax.machine.doctor import examine
    wrong = False
    for finding in examine(cli.DATA_DIR.value):
        print(finding, flush=True)
        wrong |= finding.wrong
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    cli.run(main)
