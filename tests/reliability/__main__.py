"""Tries to lose or to falsify a run, and counts how often that succeeds.

python -m tests.reliability kill --times=200 --out=docs/results/reliability-kill.json

  kill   kills runs of launch.train (SIGKILL) at random times, a fifth of them three times, and resumes them until they end:
         state, best weights, metrics and results must be those of an undisturbed run, bit by bit
  stop   the same with SIGTERM and SIGINT while a run compiles, trains, validates and saves; checks exit codes and lines too
  flip   flips one bit of one file of a run (of any file) or of a data set: it must be noticed, or change nothing
  hash   measures what a checkpoint costs, with and without its hashes, and in orbax's own format
  soak   trains, stops, resumes and tests in one process, again and again: measures memory, open files and threads; draws a plot

Each ends with exit code 1 if anything was lost or wrong.
"""

import argparse
import json
import sys
from pathlib import Path

from cxda_jax import backend
from cxda_jax.bench.measure import describe_machine
from tests.reliability import flips, hashing, processes, soak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kill", "stop", "flip", "hash", "soak"])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--workers", type=int, default=2, help="runs at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    a = parser.parse_args()
    backend.keep_freed_memory()  # before JAX's threads begin, as the commands do: each thread would get an arena of its own
    machine = describe_machine(None)  # before the work, so that the commit is that of the code which is tried
    found = {
        "kill": lambda: processes.disturb(a.what, a.times, a.seed, a.workers),
        "stop": lambda: processes.disturb(a.what, a.times, a.seed, a.workers),
        "flip": lambda: flips.flip(a.times, a.seed),
        "hash": hashing.time_checkpoints,
        "soak": lambda: soak.soak(60 * a.minutes, a.out),
    }[a.what]()
    print(json.dumps({k: v for k, v in found.items() if k not in ("trials", "samples")}, indent=1))
    if a.out:
        a.out.write_text(json.dumps({"what": a.what, "seed": a.seed} | found | machine, indent=1) + "\n")
    sys.exit(bool(found["failures"]))


if __name__ == "__main__":
    main()
