"""A study in a Slurm queue: what is asked of it, what a signal or a time limit does, and that nothing saved is lost."""

import re
import signal
import subprocess

import pytest
import yaml

from cxda_jax import stops
from cxda_jax.config import read
from cxda_jax.study import queued, slurm
from cxda_jax.study.jobs import Job, Study, is_done
from tests.lines import ROOT, refused

EXAMPLES = sorted((ROOT / "docs" / "examples" / "cluster").iterdir())


def make_study(folder):
    (folder / "jobs").mkdir(parents=True, exist_ok=True)
    return Study("glyphs", folder, (0,), ("erm",), smoke=True)


def job(name, *arguments):
    return Job(name, name, arguments, ("erm",), ())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_start_a_training_that_fits_their_devices(path):
    text = path.read_text()
    if path.suffix == ".yaml":
        (hosts,) = (job["template"]["spec"] for job in yaml.safe_load(text)["spec"]["replicatedJobs"])
        ((text,),) = (container["args"] for container in hosts["template"]["spec"]["containers"])
        assert hosts["parallelism"] == hosts["completions"] == int(re.findall(r"--num_processes=(\d+)", text)[0])
    subprocess.run(["bash", "-n", "-c", text], check=True)
    training = re.split(r"\|\||\ncode", text.partition("cxda train ")[2])[0]
    flags = dict(re.findall(r"--([\w.]+)(?:=(\S+))?", training))
    changes = [(name.removeprefix("config."), value) for name, value in flags.items() if name.startswith("config.")]
    devices = {"one_node.sbatch": 8, "tpu_slice.sh": 16}.get(path.name, 32)
    assert read(flags["config"], changes)["train"]["tasks_per_step"] == devices
    assert "workdir" in flags and ("distributed" in flags) == (path.name != "one_node.sbatch")


def test_options_and_times_are_those_of_sbatch(tmp_path, monkeypatch):
    given = ["partition=gpu", "timeout_min=600", "gpus_per_node=1", "--mem-per-cpu=2G", "exclusive"]
    options = ["--partition=gpu", "--time=600", "--gpus-per-node=1", "--mem-per-cpu=2G", "--exclusive"]
    assert slurm.read_options(given) == options
    with refused("^job_name=x: the study sets this option of sbatch itself; leave it out$"):
        slurm.read_options(["job-name=x"])
    times = {"90": 90, "90:30": 90.5, "1:30:00": 90, "1-12:30": 2190, "soon": None}
    assert {text: slurm.minutes_of(text) for text in times} == times
    assert [slurm.notice(minutes) for minutes in (None, 5, 600)] == [120, 60, 120], "a training has time to save"
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused("^sbatch is not on this machine; give the command where"):
        slurm.run_jobs(make_study(tmp_path), [job("a", "train")], [])


@pytest.mark.parametrize(("sent", "state", "saved", "code", "line"), [
    (signal.SIGUSR2, "RUNNING", False, 1, "its time limit is too short: it saved no new step within it"),
    (signal.SIGUSR2, "RUNNING", True, 140, "stopped by SIGUSR2; it is in the queue again"),
    (signal.SIGTERM, "COMPLETING", True, 143, "SIGTERM: Slurm ends this job"),
])  # fmt: skip
def test_a_stopped_job_is_queued_again_if_that_gets_it_further(monkeypatch, capsys, sent, state, saved, code, line):
    asked = []

    def ask(*words):
        asked.append(words)
        return subprocess.CompletedProcess(words, 0, stdout=f"{state} N/A", stderr="")

    monkeypatch.setattr(queued, "ask", ask)
    monkeypatch.setattr(queued.time, "sleep", lambda _: None)
    for name, value in {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    assert queued.stopped(stops.Stopped(sent), saved) == code and line in capsys.readouterr().out
    assert [words for words in asked if words[0] == "scontrol"] == [("scontrol", "requeue", "8_1")] * (code == 140)


@pytest.mark.gate
def test_the_script_runs_the_job_of_its_task_into_its_log(tmp_path, monkeypatch):
    study, jobs = make_study(tmp_path / "it's"), [job("a b", "--version"), job("b", "trian")]
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "9")
    for task, fault in enumerate((0, 1)):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(task))
        assert subprocess.run(["sh", "-c", slurm.batch_script(study, jobs)], cwd=ROOT).returncode == fault
    assert [is_done(study, each) for each in jobs] == [True, False]
    logs = [(study.folder / "jobs" / f"{each.id}.log").read_text() for each in jobs]
    assert ": start 1 as job 9_0" in logs[0] and "queue: 'trian' is no command; choose from" in logs[1]
