"""What other packages add, by entry points of theirs."""

import sys
from collections.abc import Callable, Collection
from importlib.metadata import entry_points
from typing import Any

from cxda_jax.errors import brief, printable


def added(group: str, own: Collection[str], fits: Callable[[Any], bool]) -> dict[str, Any]:
    """By name, what installed packages add to a group of entry points.

    A package that cannot be imported, adds what does not fit or takes a name that is taken costs a line on stderr.
    """
    found: dict[str, Any] = {}
    for point in entry_points(group=group):
        fault, value = "", None
        try:
            if point.name in own or point.name in found:
                fault = "the name is taken"
            elif not fits(value := point.load()):
                fault = f"it is a {type(value).__name__}"
        except (Exception, SystemExit) as e:  # a module of others raises exceptions of all kinds
            fault = f"{type(e).__name__}: {e}"
        if fault:
            package = point.dist.name if point.dist else point.module
            what = f"{group} {point.name!r} of the package {package} is left out ({' '.join(fault.split())}"
            line = f"warning: {brief(what, 140)}); mend the package or uninstall it"
            print(printable(line), file=sys.stderr, flush=True)
        else:
            found[point.name] = value
    return found
