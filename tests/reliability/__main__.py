"""Tries to lose or to falsify a run, and counts how often it succeeds.

python -m tests.reliability kill --times=200 --out=docs/results/reliability-kill.json
python -m tests.reliability stop --times=40 --out=docs/results/reliability-stop.json
python -m tests.reliability flip --times=1000 --out=docs/results/reliability-flip.json
python -m tests.reliability hash --out=docs/results/reliability-hash.json
python -m tests.reliability soak --minutes=10 --out=docs/results/reliability-soak.json

  kill   runs of launch.train that are killed (SIGKILL) at random times, a fifth of them three times, and resumed until they end,
         beside one that nobody disturbs: state, best weights, metrics and results must be the same, bit by bit
  stop   the same with SIGTERM and SIGINT while it compiles, trains, validates and saves; exit codes and lines are checked
  flip   one bit of one file of a run (all of them) or of a data set, flipped: it must be noticed, or change nothing
  hash   what a checkpoint costs, its hashes apart, and in the format of orbax itself
  soak   training, stopping, resuming and testing in one process, again and again: memory, open files and threads; draws a plot

All of them end with 1 if anything was lost or wrong.
"""

import argparse
import json
import sys
from pathlib import Path

from cxda_jax import backend
from launch.measure import describe
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
    backend.keep_freed_memory()  # before JAX's threads begin, as in the launchers: each would get an arena of its own
    machine = describe(None)  # before the work: the commit is that of the code which is tried
    if a.what in ("kill", "stop"):
        found = processes.disturb(a.what, a.times, a.seed, a.workers)
    elif a.what == "flip":
        found = flips.flip(a.times, a.seed)
    elif a.what == "hash":
        found = hashing.hashing()
    else:
        found = soak.soak(60 * a.minutes, a.out)
    print(json.dumps({k: v for k, v in found.items() if k not in ("trials", "samples")}, indent=1))
    if a.out:
        a.out.write_text(json.dumps({"what": a.what, "seed": a.seed} | found | machine, indent=1) + "\n")
    sys.exit(1 if found["failures"] else 0)


if __name__ == "__main__":
    main()
