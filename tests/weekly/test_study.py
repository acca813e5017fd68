"""A study's jobs: each is planned once, after what it needs; what is done stays done, and what fails is named."""

import csv
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.commands import command, wait_until
from tests.lines import ROOT


def tables(folder):
    """All cells but those that hold times or places."""
    cells = csv.DictReader((folder / "report" / "tables.csv").read_text().splitlines())
    return [{k: v for k, v in cell.items() if k != "runs"} for cell in cells if cell["table"] != "runtime"]


def alive(pid):
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="jobs die with their study on Linux alone")
def test_a_study_from_one_command_repeats_nothing_and_survives_kills(tmp_path, monkeypatch):
    flags = ("--benchmark=glyphs", "--smoke", "--seeds=0", "--only=erm,ft_em", f"--data_dir={tmp_path}/data")
    study, other = tmp_path / "study", tmp_path / "killed"
    first = command("reproduce", *flags, f"--study={study}", "--workers=2")
    results = sorted(study.glob("erm/0/**/result.json"))
    assert "5 jobs, 0 done before" in first and "[5/5]" in first and "report.html: 12 results, 5 tables" in first
    before = {path: path.read_bytes() for path in [*results, *(study / "report").glob("*.*")]}
    assert "5 jobs, 5 done before" in command("reproduce", *flags, f"--study={study}")
    assert {path: path.read_bytes() for path in before} == before
    kept, start = {}, [sys.executable, "-m", "launch.reproduce", *flags, f"--study={other}", "--workers=2"]
    for sent, wanted, wait in ((signal.SIGTERM, 0, 4.0), (signal.SIGKILL, 2, 1.0)):
        process = subprocess.Popen(start, cwd=ROOT, stdout=subprocess.DEVNULL)
        wait_until(lambda wanted=wanted: len(list(other.glob("jobs/*.done"))) >= wanted, process, 120)
        time.sleep(wait)
        children = Path(f"/proc/{process.pid}/task").glob("*/children")
        jobs = [int(pid) for path in children for pid in path.read_text().split()]
        process.send_signal(sent)
        assert process.wait(60) == (-sent if sent == signal.SIGKILL else 128 + sent)
        wait_until(lambda jobs=jobs: not any(map(alive, jobs)))  # the next start must not find one at work
        done = {path: path.stat().st_mtime_ns for path in other.glob("jobs/*.done")}
        assert len(done) >= wanted and kept.items() <= done.items(), "what was done is not done again"
        kept = done
    assert f"5 jobs, {len(kept)} done before" in command("reproduce", *flags, f"--study={other}")
    assert tables(other) == tables(study) and len(tables(study)) > 20
