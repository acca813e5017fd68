"""A study in a Slurm queue: what ends it, what brings it back, and that nothing saved is lost. The queue is a real one."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time

import pytest
import yaml

from cxda_jax.config import read
from cxda_jax.errors import UserError
from cxda_jax.experiment import METHODS
from cxda_jax.study import slurm
from cxda_jax.study.jobs import Job, Study, is_done
from tests.commands import command
from tests.lines import ROOT
from tests.slurm_node import needs_slurm, said, slurm_node, wait_until

STEPS = 600  # some 20 seconds
PARAMETERS = ["ntasks=1", "time=10"]


def make_study(folder, methods=tuple(METHODS)):
    (folder / "jobs").mkdir(parents=True, exist_ok=True)
    return Study("glyphs", folder, (0,), methods, smoke=True)


def job(name, *arguments, needs=()):
    return Job(name, name, arguments, (), needs)


def good(name, needs=()):
    return job(name, "--version", needs=needs)


def bad(name):
    return job(name, "trian")


def training(folder, data_dir, steps=STEPS):
    """One that saves at its end alone, or when it is stopped."""
    fields = (f"train.steps={steps}", "train.save_every=1000000", "evaluation.every_steps=1000000", "train.log_every=1")
    flags = [f"--config.{field}" for field in fields]
    return job(
        f"train{steps}", "train", "--config=glyphs:erm,smoke", f"--workdir={folder}", f"--data_dir={data_dir}", *flags
    )


def log_of(study, job):
    path = study.folder / "jobs" / f"{job.id}.log"
    return path.read_text() if path.exists() else ""


def weights(log):
    return re.findall(rf"step {STEPS}  validation .* weights (\w+)", log)


@pytest.fixture(scope="module")
def queue(tmp_path_factory):
    with slurm_node(tmp_path_factory.mktemp("slurm") / "node"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        yield


@pytest.fixture(scope="module")
def unstopped(tmp_path_factory, data_dir):
    """The weights of a training that nobody stopped."""
    folder = tmp_path_factory.mktemp("unstopped")
    flags = training(folder / "run", data_dir).arguments
    done = subprocess.run(
        [sys.executable, "-m", "cxda_jax", *flags], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return weights(done.stdout)


def in_background(study, jobs, parameters=PARAMETERS, **more):
    """The study waiting for its jobs, as a process that can be stopped."""
    code = f"""if True:
        import sys
        from pathlib import Path
        from cxda_jax.study import slurm
        from cxda_jax.study.jobs import Job, Study
        from launch import cli
        def main():
            with cli.loading():
                pass
            jobs = [Job(*fields) for fields in {[tuple(job)[:5] for job in jobs]!r}]
            study = Study("glyphs", Path({str(study.folder)!r}), (0,), (), True)
            print(slurm.run_jobs(study, jobs, {parameters!r}, **{more!r}))
        cli.run(main)
    """
    command = [sys.executable, "-u", "-c", code]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def submitted(study):
    return [entry["number"] for entry in slurm.read_kept(study).values()]


def has_begun(study, job, starts=1):
    """Whether a start of the training has taken some steps."""
    return lambda: (
        len(re.split(r"queue: .*: start", log_of(study, job))) == starts + 1
        and re.search(r"step \d+/\d+  eta(?!.*: start)", log_of(study, job), re.S)
    )


# Without a queue


EXAMPLES = sorted((ROOT / "docs" / "examples" / "cluster").iterdir())


def trainings_of(path):
    """The flags of the training that an example starts."""
    return re.findall(r"--[\w.]+(?:=\S+)?", re.split(r"\|\||\ncode", path.read_text().partition("cxda train ")[2])[0])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_well_formed(path):
    if path.suffix == ".yaml":
        (hosts,) = yaml.safe_load(path.read_text())["spec"]["replicatedJobs"]
        its = hosts["template"]["spec"]
        (container,) = its["template"]["spec"]["containers"]
        (text,) = container["args"]
        assert its["parallelism"] == its["completions"] == int(re.findall(r"--num_processes=(\d+)", text)[0])
        subprocess.run(["bash", "-n", "-c", text], check=True)
    else:
        subprocess.run(["bash", "-n", path], check=True)
    flags = dict(flag.removeprefix("--").partition("=")[::2] for flag in trainings_of(path))
    changes = [(name.removeprefix("config."), value) for name, value in flags.items() if name.startswith("config.")]
    devices = {"one_node.sbatch": 8, "tpu_slice.sh": 16}.get(path.name, 32)
    assert read(flags["config"], changes)["train"]["tasks_per_step"] == devices
    assert "workdir" in flags and ("distributed" in flags) == (path.name != "one_node.sbatch")


def test_options_are_those_of_sbatch():
    given = ["partition=gpu", "timeout_min=600", "gpus_per_node=1", "--mem-per-cpu=2G", "exclusive"]
    options = ["--partition=gpu", "--time=600", "--gpus-per-node=1", "--mem-per-cpu=2G", "--exclusive"]
    assert slurm.read_options(given) == options
    with pytest.raises(UserError, match="^job_name=x: the study sets this option of sbatch itself; leave it out$"):
        slurm.read_options(["job-name=x"])


def test_without_slurm_one_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="^sbatch is not on this machine; give the command where"):
        slurm.run_jobs(make_study(tmp_path), [good("a")], [])
    error = command("reproduce", "--benchmark=glyphs", "--cancel=now", code=2)
    assert error.count("\n") == 1 and "--cancel=now is for jobs in a queue; give --executor=slurm too" in error


def test_time_limits_follow_what_was_measured(tmp_path):
    study = make_study(tmp_path)
    jobs = [job("a")._replace(methods=("erm",), arguments=("train",))]
    assert slurm.time_limit(study, jobs) is None
    speed = {"compile_s": 95.0, "steps": 1000, "step_s": 0.1, "tasks": 100, "task_s": 1.0, "test_tasks": 10}
    fast = {name: x / 10 for name, x in speed.items()}
    (tmp_path / "speed.json").write_text(json.dumps({"slow": {"erm smoke": speed}, "fast": {"erm smoke": fast}}))
    assert slurm.time_limit(study, jobs) == 10 + 3 * 5  # 5 + 95 + 100 + 100 s, three times, and ten minutes
    assert slurm.time_limit(study, [*jobs, job("b")._replace(methods=("bn",))]) is None, "one was not measured"


@pytest.mark.parametrize("text, minutes", [
    ("90", 90), ("90:30", 90.5), ("1:30:00", 90), ("1-12", 2160), ("1-12:30", 2190), ("0-0:30:30", 30.5), ("soon", None)
])  # fmt: skip
def test_times_are_written_as_slurm_does(text, minutes):
    assert slurm.minutes_of(text) == minutes


def test_a_training_has_time_to_save():
    assert [slurm.notice(minutes) for minutes in (None, 1, 5, 600)] == [120, 12, 60, 120]


FAKES = {"squeue": "echo $STATE N/A", "scontrol": 'echo "$@" >"$ASKED"; exec sleep 0.2'}


@pytest.mark.parametrize(
    "sent, state, code, says",
    [
        (signal.SIGUSR2, "RUNNING", 1, "its time limit is too short: it saved no new step within it"),
        (signal.SIGTERM, "RUNNING", -15, "stopped by SIGTERM; it is in the queue again"),
        (signal.SIGTERM, "COMPLETING", 143, "SIGTERM: Slurm ends this job"),
    ],
)
def test_a_signal_on_a_node_ends_with_the_right_words(tmp_path, data_dir, monkeypatch, sent, state, code, says):
    for name, text in FAKES.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    study, asked = make_study(tmp_path / "a b"), tmp_path / "asked"
    work = training(tmp_path / "run", data_dir, 10**6)
    script = tmp_path / "batch"
    script.write_text(slurm.batch_script(study, [good("a"), work]))
    variables = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "1", "STATE": state,
                 "ASKED": str(asked), "PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"}  # fmt: skip
    process = subprocess.Popen(["sh", script], env={**os.environ, **variables})
    try:
        wait_until(lambda: "start 1 as job 8_1" in log_of(study, work), None)
        time.sleep(0.3)  # its command has not saved anything yet
        process.send_signal(sent)
        if code == -15:
            wait_until(lambda: says in log_of(study, work), None)
            process.send_signal(sent)  # as Slurm does when it takes the job back
        assert process.wait(60) == code
    finally:
        process.kill()
    assert says in log_of(study, work) and not is_done(study, work)
    assert (asked.read_text() if asked.exists() else "") == ("requeue 8_1\n" if code == -15 else "")


def test_a_node_runs_the_job_of_its_task_and_says_how_it_ended(tmp_path, monkeypatch):
    study, script = make_study(tmp_path / "it's"), tmp_path / "batch"
    script.write_text(slurm.batch_script(study, [good("a b"), bad("b")]))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for task, code in ("0", 0), ("1", 1), ("0", 0):
        variables = {**os.environ, "SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": task}
        assert subprocess.run(["sh", script], env=variables).returncode == code
    assert is_done(study, good("a b")) and not is_done(study, bad("b"))
    assert log_of(study, good("a b")).count("start 1") == 2, "a log keeps what was said before"
    assert "queue: 'trian' is no command; choose from" in log_of(study, bad("b")).splitlines()[-1]


# In a queue


@needs_slurm
def test_jobs_run_in_order_once_and_failures_are_named(queue, tmp_path, capsys):
    study = make_study(tmp_path / "50% of it")
    jobs = [good("a"), bad("b"), good("c", needs=("a",)), good("d", needs=("b",)), good("e", needs=("a",))]
    failures = slurm.run_jobs(study, jobs, PARAMETERS, workers=1)
    assert [line.split(";")[0] for line in failures] == [
        "b: 'trian' is no command", "d: left out, since what it needs failed"
    ]  # fmt: skip
    assert [is_done(study, job) for job in jobs] == [True, False, True, False, True]
    assert submitted(study)[0].endswith("_0") and len({n.split("_")[0] for n in submitted(study)}) == 3, "three arrays"
    assert "5 jobs, 0 done before, 0 in the queue" in capsys.readouterr().out
    assert len(slurm.run_jobs(study, jobs, PARAMETERS)) == 2
    assert "5 jobs, 3 done before, 0 in the queue" in capsys.readouterr().out
    with pytest.raises(UserError, match="(?i)invalid partition"):
        slurm.run_jobs(study, jobs, ["partition=none"])
    with pytest.raises(UserError, match="unrecognized option '--partitions=low'"):
        slurm.run_jobs(study, jobs, ["partitions=low"])


@needs_slurm
@pytest.mark.parametrize("partition, sent", [("low", "SIGTERM"), ("patient", "SIGUSR2")])
def test_a_job_that_gives_way_goes_on_from_the_step_it_had_reached(
    queue, tmp_path, data_dir, unstopped, partition, sent, capsys
):
    study, work = make_study(tmp_path / "study"), training(tmp_path / "run", data_dir)
    after = good("after", needs=(work.id,))
    process = in_background(study, [work, after], [f"partition={partition}", "ntasks=2"])
    wait_until(has_begun(study, work), None)
    subprocess.run(["sbatch", "--partition=high", "--ntasks=2", "--output=/dev/null", "--wrap=sleep 2"], check=True)
    out, _ = process.communicate(timeout=180)
    log = log_of(study, work)
    assert out.endswith("[]\n"), out
    assert "start 1 as" in log and "start 2 as" in log and f"{sent}" in log
    first, second = re.split(r"start 2 as.*\n", log)
    reached = max(int(step) for step in re.findall(r"^step (\d+)/", first, re.M))
    assert 0 < reached < STEPS and f"resumed from step {reached} of {STEPS}" in second, "no step is lost"
    assert weights(second) == unstopped and is_done(study, after)
    assert log.index("start 2") and out.index("[1/2] train") < out.index("[2/2] after")


@needs_slurm
def test_a_cancelled_job_ends_the_wait_and_the_same_command_goes_on(queue, tmp_path, data_dir, unstopped):
    study, work = make_study(tmp_path / "study"), training(tmp_path / "run", data_dir)
    jobs = [work, good("after", needs=(work.id,))]
    process = in_background(study, jobs)
    wait_until(has_begun(study, work), None)
    subprocess.run(["scancel", submitted(study)[0]], check=True)
    out, _ = process.communicate(timeout=120)
    assert f"{work.name}: somebody cancelled it (log: " in out and "after: left out, since what it needs failed" in out
    assert "SIGTERM: Slurm ends this job" in log_of(study, work) and not is_done(study, jobs[1])
    assert slurm.run_jobs(study, jobs, PARAMETERS) == []
    log = log_of(study, work)
    reached = max(int(step) for step in re.findall(r"^step (\d+)/", log.split("resumed")[0], re.M))
    assert f"resumed from step {reached} of {STEPS}" in log and weights(log) == unstopped


@needs_slurm
def test_a_training_goes_on_after_its_time_limit(queue, tmp_path, data_dir):
    study, work = make_study(tmp_path / "study"), training(tmp_path / "run", data_dir, 10**6)
    process = in_background(study, [work], ["ntasks=1", "time=2"])
    wait_until(has_begun(study, work, starts=3), None, seconds=400)
    slurm.cancel(study)
    out, _ = process.communicate(timeout=60)
    assert "somebody cancelled it" in out
    first, second, third = re.split(r"queue: .*: start \d as.*\n", log_of(study, work))[1:]
    for before, after in ((first, second), (second, third)):
        reached = max(int(step) for step in re.findall(r"^step (\d+)/", before, re.M))
        assert "stopped by SIGUSR2; it is in the queue again" in before
        assert f"resumed from step {reached} of" in after


@needs_slurm
def test_a_time_limit_that_lets_nothing_be_saved_is_named(queue, tmp_path, data_dir, monkeypatch):
    study, work = make_study(tmp_path / "study"), training(tmp_path / "run", data_dir, 10**6)
    monkeypatch.setattr(slurm, "NOTICE", 1)  # too late to be heard
    monkeypatch.setattr(slurm, "batch_script", lambda *_: "#!/bin/sh\ntrap '' USR2\nsleep 1000 & wait; wait\n")
    (failure,) = slurm.run_jobs(study, [work], ["ntasks=1", "time=1"])
    assert failure.startswith(
        f"{work.name}: was ended at its time limit before it could save; give more minutes by time="
    )


@needs_slurm
def test_a_stopped_command_finds_its_jobs_again(queue, tmp_path, data_dir, capsys):
    study, work = make_study(tmp_path / "study"), training(tmp_path / "run", data_dir)
    process = in_background(study, [work])
    wait_until(has_begun(study, work), None)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130 and "the same command waits for it again" in out
    numbers = submitted(study)
    assert slurm.run_jobs(study, [work], PARAMETERS) == [] and is_done(study, work)
    assert "1 jobs, 0 done before, 1 in the queue" in capsys.readouterr().out
    assert submitted(study) == numbers and log_of(study, work).count(": start ") == 1


@needs_slurm
@pytest.mark.parametrize("when", ["at_stop", "now"])
def test_jobs_are_cancelled_when_asked(queue, tmp_path, data_dir, when):
    study, work = make_study(tmp_path / "study"), training(tmp_path / "run", data_dir, 10**6)
    process = in_background(study, [work, good("after", needs=(work.id,))], cancel_if_stopped=when == "at_stop")
    wait_until(has_begun(study, work), None)
    if when == "now":
        slurm.cancel(study)
    else:
        process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert ("somebody cancelled it" if when == "now" else f"took 2 jobs of {study.folder} out of the queue") in out
    wait_until(lambda: not said("squeue", "--noheader"), None)
    assert (tmp_path / "run" / "last").is_dir() and "saves" not in log_of(study, work)


def reproduce(tmp_path, data_dir, executor, *flags):
    command = [
        sys.executable, "-m", "launch.reproduce", "--benchmark=glyphs", "--smoke", "--seeds=0", "--only=erm,ft_em",
        f"--study={tmp_path}/{executor}", f"--data_dir={data_dir}", f"--executor={executor}", *flags,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def hashes(folder):
    found = {path.relative_to(folder): json.loads(path.read_text()) for path in folder.glob("erm/0/**/result.json")}
    return {path: (row["predictions_sha256"], row["weights_hash"]) for path, row in found.items()}


@needs_slurm
def test_a_whole_study_gives_what_it_gives_without_a_queue(queue, tmp_path, data_dir):
    first = reproduce(tmp_path, data_dir, "slurm", "--slurm=ntasks=1,time=10")
    assert "in the queue" in first and "report.html: " in first
    folder = tmp_path / "slurm"
    numbers = submitted(make_study(folder))
    assert "0 in the queue" in reproduce(tmp_path, data_dir, "slurm") and submitted(make_study(folder)) == numbers
    reproduce(tmp_path, data_dir, "local", "--workers=2")
    assert hashes(folder) == hashes(tmp_path / "local") and len(hashes(folder)) > 10


@needs_slurm
@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.suffix == ".sbatch"], ids=lambda path: path.name)
def test_slurm_takes_the_examples_but_for_their_size(queue, path):
    """This node has no GPU, and there is one of it: the examples are asked for without both."""
    small = [
        line
        for line in path.read_text().splitlines()
        if not re.match(r"#SBATCH --(gpus|nodes|cpus|mem|partition)", line)
    ]
    assert "#SBATCH" in "\n".join(small)
    done = subprocess.run(["sbatch", "--test-only"], input="\n".join(small), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
