"""python -m tests [fast|slow|weekly] [arguments of pytest]: says what it runs, and runs it."""

import subprocess
import sys

RINGS = {
    "fast": ("what to run while you work; README's second command", "not slow and not weekly"),
    "slow": ("what the gate adds, .ci/run", "slow"),
    "weekly": ("long searches, many kills, browsers: once a week and before a release", "weekly"),
}


def main() -> int:
    given = sys.argv[1:]
    ring, more = ("fast", given) if not given or given[0].startswith("-") else (given[0], given[1:])
    if ring not in RINGS:
        print(f"error: {ring!r} is no ring of tests; choose from {', '.join(RINGS)}", file=sys.stderr)
        return 2
    about, marks = RINGS[ring]
    two = [] if ring == "fast" else ["-n", "2", "--dist", "worksteal"]
    command = [sys.executable, "-m", "pytest", "-m", marks, *two, *more]
    print(f"{ring}: {about}\n{' '.join(command[1:])}", flush=True)
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
