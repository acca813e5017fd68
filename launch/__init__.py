"""The commands, a file each: python -m launch.train, or `cxda train` where the package is installed."""

import sys

from cxda_jax.machine import stops

if sys.argv[:1] == ["-m"]:  # while Python looks for the module that it will run
    stops.watch_imports()
