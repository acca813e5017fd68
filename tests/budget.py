"""What a run of the tests costs, by file: seconds, programs, processes, and installations.

Seconds depend on the machine. The numbers of XLA's programs and of Python processes do not.
So each ring has a ceiling for these two, and a run of a whole ring that exceeds it fails.
"""

import collections
import os
import runpy
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

HOOKS = Path(__file__).with_name("hooks")
FOLDER = "CXDA_TESTS_COUNTS"


class Ceiling(NamedTuple):
    programs: int
    processes: int


# By ring. Whoever raises a number adds to its line what was bought for it.
CEILINGS = {
    "fast": Ceiling(100, 8),  # two of them for corrections by the own style
    # 220 programs for cxda_shares, its training on descriptions and three closed forms; 110 for stata, a trunk that stays
    # and what fit() says and keeps, and as many for a classifier with its adapter, its commands and its programs.
    # 86 for predictions of camera traps; 70 for un-mixing, models of PyTorch by name and examples.
    "slow": Ceiling(1600, 24),
    "weekly": Ceiling(950, 50),
}
RINGS = {"not slow and not weekly": "fast", "slow": "slow", "weekly": "weekly"}  # by what -m says


def start_counting():
    """Before JAX is imported, in the process that starts all others."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="cxda_jax_counts_")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HOOKS), os.environ.get("PYTHONPATH")]))
        runpy.run_path(str(HOOKS / "sitecustomize.py"))


class Counts:
    """The sets of what was counted, by kind and file of tests. What no test asked for is left out."""

    def __init__(self, folder):
        self.found = collections.defaultdict(set)
        for path in Path(folder).iterdir():
            for line in path.read_text().splitlines():
                kind, file, what = line.split("\t")
                if file:
                    self.found["program" if kind == "found" else kind, file].add(what)
                if file and kind == "compiled":
                    self.found["program", file].add(what)

    def of(self, kind, file=None) -> set[str]:
        return set().union(*(what for (a, b), what in self.found.items() if a == kind and file in (None, b)))


def table(counts, seconds) -> list[str]:
    """A line for each file, slowest first. A program of several files counts in each of them, and once in the sum."""
    lines = [f"{'seconds':>8} {'programs':>9} {'compiled':>9} {'processes':>10} {'installs':>9}"]
    kinds = ("program", "compiled", "process", "install")
    for file in [*sorted(seconds, key=seconds.__getitem__, reverse=True), None]:
        programs, compiled, processes, installs = (len(counts.of(kind, file)) for kind in kinds)
        spent = seconds[file] if file else sum(seconds.values())
        lines.append(f"{spent:8.1f} {programs:9} {compiled:9} {processes:10} {installs:9}  {file or 'all'}")
    return lines


def excess(ring, counts) -> list[str]:
    """What a whole ring took above its ceiling."""
    if ring not in CEILINGS:
        return []
    ceiling = CEILINGS[ring]
    took = {"program": ceiling.programs, "process": ceiling.processes}
    return [
        f"tests/budget.py: {len(counts.of(kind))} of kind {kind} in this ring, at most {most} are allowed; save some"
        for kind, most in took.items()
        if len(counts.of(kind)) > most
    ]


class Budget:
    """A plugin of the process that reports."""

    def __init__(self):
        self.seconds = collections.Counter()

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session, exitstatus):
        self.counts, self.excess = Counts(os.environ[FOLDER]), []
        shutil.rmtree(os.environ[FOLDER], ignore_errors=True)
        options = session.config.option
        if session.config.args_source is pytest.Config.ArgsSource.TESTPATHS and not options.keyword:
            self.excess = excess(RINGS.get(options.markexpr, ""), self.counts)
        if self.excess and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        for line in [*table(self.counts, self.seconds), *self.excess]:
            terminalreporter.write_line(line)


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Budget())
