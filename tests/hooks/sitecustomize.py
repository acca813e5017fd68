"""Counts what the tests cost: each Python process, and each program that JAX compiles or finds in its cache.

Python imports a module of this name when a process starts. tests/budget.py puts this folder on PYTHONPATH, and adds up.
"""

import logging
import os
import sys


def note(kind, what):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]  # pytest sets it, and children inherit it
    try:
        with open(os.path.join(os.environ["CXDA_TESTS_COUNTS"], str(os.getpid())), "a") as file:
            file.write(f"{kind}\t{test}\t{what}\n")
    except (KeyError, OSError):  # no run of the tests asks for it any more
        pass


def program(record):
    """JAX says in its log for each program whether its cache has it; only what it says to users goes on."""
    if "ersistent compilation cache hit" in record.msg:
        note("found", record.args[1])
    elif "PERSISTENT COMPILATION CACHE MISS" in record.msg:
        note("compiled", record.args[1])
    return record.levelno >= logging.WARNING


log = logging.getLogger("jax._src.compiler")
log.setLevel(logging.DEBUG)
log.addFilter(program)
note("process", os.getpid())
if "pip" in sys.orig_argv and "install" in sys.orig_argv:
    note("install", os.getpid())
