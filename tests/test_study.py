"""A study's jobs: what is done stays done, and what fails is named."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from unittest import mock

import pytest
from absl import flags

from cxda_jax import stops
from cxda_jax.experiment import METHODS, open_data
from cxda_jax.study import estimate, local
from cxda_jax.study.jobs import Job, Study, plan, possible_settings
from cxda_jax.study.runs import find_runs
from cxda_jax.study.settings import Setting
from tests.commands import command

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return open_data(make_study(folder).config("erm"), folder)


def make_study(folder, seeds=(0, 1), methods=tuple(METHODS), smoke=True):
    (folder / "jobs").mkdir(parents=True, exist_ok=True)
    return Study("glyphs", folder, seeds, methods, smoke)


def test_the_plan_trains_what_trains_and_tests_the_rest(store, tmp_path):
    jobs = plan(make_study(tmp_path), store, "data")
    trainings = [job for job in jobs if job.trains]
    assert len(trainings) == 11 * 2 and len({job.id for job in jobs}) == len(jobs)
    (usual,) = [job for job in jobs if job.name.startswith("test the usual tasks")]
    quick = ("bn_alpha", "t3a", "lame", "feature_shift")
    assert usual.methods == ("ft_em", "ft_im", "sf_ocda", "cotta", *quick) and len(usual.needs) == 2
    again = [job for job in jobs if "--from=erm_iid" in job.command]
    needed = tuple(j.id for j in trainings if j.methods == ("erm_iid",))
    assert [(job.methods, job.needs) for job in again] == [(quick, needed)] * 2, "the usual tasks and contexts"
    assert {name for job in trainings for name in job.methods} == set(METHODS) - set(usual.methods)
    (steps,) = [job for job in jobs if "--steps=1" in job.command]
    assert steps.methods == ("ft_em", "ft_im") and steps.settings == (Setting("finetune.steps", 1),)
    other = {job.methods: job for job in jobs if "other tasks" in job.name}
    assert set(other) == {
        ("erm", "ft_em", "ft_im"), ("erm_iid",), ("bn",), ("cml",), ("cxda",), ("cxda_loo",), ("cxda_any",), ("icrm",)
    }  # fmt: skip
    contexts = {job.methods: job for job in jobs if "context" in job.name}
    alone = (
        "erm_iid",
        "erm",
        "bn",
        "cml",
        "cxda",
        "cxda_p2p",
        "cxda_supervised",
        "cxda_loo",
        "cxda_any",
        "icrm",
        "sla",
    )
    assert set(contexts) == {quick, *((name,) for name in alone)}, "what fine-tunes would take days"
    sizes = {
        "--context=0": [("erm",), ("erm_iid",), ("sla",)],
        "--context=0,10,100": [("bn",), ("cml",), ("cxda",), quick],
    }
    for flag, names in sizes.items():  # what uses no support is tested in an empty one alone
        assert all(flag in contexts[name].command for name in names)
    arguments = other[("cxda",)].command
    assert "--methods=cxda" in arguments and "--num_domains=2,5" in arguments and "--support_size=10,100" in arguments
    known = set()
    for job in jobs:  # each after what it needs
        assert known.issuperset(job.needs)
        known.add(job.id)
    assert [job.name for job in plan(make_study(tmp_path, (0,), ("ft_em", "cxda")), store, "data")] == [
        "train erm seed 0", "train cxda seed 0", "test the usual tasks of ft_em", "test one step of ft_em",
        "test other tasks of ft_em", "test other tasks of cxda", "test contexts of cxda",
    ], "some methods bring what they start from"  # fmt: skip
    some = make_study(tmp_path, (0,), ("ft_em", "cxda"))._replace(tests=("usual", "contexts"))
    assert [job.name for job in plan(some, store, "data")][2:] == [
        "test the usual tasks of ft_em",
        "test contexts of cxda",
    ]
    small = plan(some._replace(most_images=10, tests=("contexts", "other_tasks")), store, "data")[2:]
    sizes = [
        [a for a in job.arguments if a.startswith("--support_size=") or a.startswith("--context=")] for job in small
    ]
    assert sizes == [["--support_size=10"], ["--support_size=10"], ["--context=0,10"]], "no larger buffer"


def test_runs_are_named_so_that_any_folder_is_found_again(store, tmp_path):
    study = make_study(tmp_path / "a,b[1]", methods=("erm",))
    job = plan(study, store, "data")[-1]
    for seed in (0, 1):
        study.run("erm", seed).mkdir(parents=True)
        (study.run("erm", seed) / "config.json").touch()
    (runs,) = [flags.ListParser().parse(a.removeprefix("--runs=")) for a in job.command if a.startswith("--runs=")]
    assert find_runs(runs) == [study.run("erm", 0), study.run("erm", 1)] and job.runs == 2


def test_ids_follow_configs_and_data_alone(store, tmp_path):
    full = make_study(tmp_path, smoke=False)
    ids = [job.id for job in plan(make_study(tmp_path / "a"), store, "data")]
    assert ids == [job.id for job in plan(make_study(tmp_path / "b"), store, "elsewhere")]
    for study, data in ((make_study(tmp_path), store._replace(sha256="other")), (full, store)):
        assert not set(ids) & {job.id for job in plan(study, data, "data")}
    # Tasks that 5 test writers of 120 drawings cannot give are left out.
    assert list(map(str, possible_settings(full, store))) == [
        "num_domains=2", "num_domains=5", *(f"support_size={n}" for n in (10, 20, 50, 100, 200)),
        *(f"context={n}" for n in (0, 1, 2, 5, 10, 20, 50, 100, 200, 500)),
    ]  # fmt: skip


class Script(Job):
    """A job that is some code."""

    @property
    def command(self):
        return [sys.executable, "-c", *self.arguments]


def script(text, *needs, name):
    return Script(name, name, (textwrap.dedent(text),), (), needs)


def run_jobs(study, jobs, workers, gpus=()):
    with mock.patch.object(local, "visible_gpus", lambda: list(gpus)):
        return local.run_jobs(study, jobs, workers)


def test_jobs_run_in_order_once_and_failures_are_named(tmp_path):
    study, log = make_study(tmp_path), tmp_path / "log"
    say = f"open({str(log)!r}, 'a').write('%s\\n')"
    jobs = [
        script(say % "a", name="a"),
        script(f"import sys; {say % 'b'}; print('working'); sys.exit('error: config.x=1 is wrong')", name="b"),
        script(say % "c", "a", name="c"),
        script(say % "d", "b", name="d"),
        script(say % "e", "c", "d", name="e"),
    ]
    failures = run_jobs(study, jobs, 2)
    assert [line.split(" (log")[0] for line in failures] == [
        "b: config.x=1 is wrong", "d: left out, since what it needs failed", "e: left out, since what it needs failed"
    ]  # fmt: skip
    lines = log.read_text().split()
    assert sorted(lines) == ["a", "b", "c"] and lines.index("a") < lines.index("c")
    assert "working" in (tmp_path / "jobs" / "b.log").read_text()
    jobs[1] = script(say % "b", name="b")
    assert run_jobs(study, jobs, 1) == []
    assert log.read_text().split()[3:] == ["b", "d", "e"]  # a and c were done
    assert run_jobs(study, jobs, 1) == [] and len(log.read_text().split()) == 6
    assert json.loads((tmp_path / "jobs" / "e.done").read_text())["name"] == "e"


def test_each_job_has_a_gpu_of_its_own(tmp_path):
    text = f"import os, time; time.sleep(0.3); open({str(tmp_path)!r} + '/%s', 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
    assert run_jobs(make_study(tmp_path), [script(text % name, name=name) for name in "wxyz"], 2, ["3", "5"]) == []
    for at_once in ("wx", "yz"):
        assert sorted((tmp_path / name).read_text() for name in at_once) == ["3", "5"]


def test_the_time_left_counts_what_runs_beside():
    assert local.seconds_left([10.0], [], 4, 1) == 40
    assert local.seconds_left([10.0, 20.0], [5.0], 2, 2) == (10 + 2 * 15) / 2
    assert local.seconds_left([100.0], [95.0, 97.0, 120.0], 0, 4) == 5  # all began together: it ends with the slowest
    assert local.seconds_left([100.0], [0.0], 0, 4) == 100


def test_jobs_that_share_a_gpu_share_its_memory(monkeypatch):
    monkeypatch.delenv(local.MEMORY, raising=False)
    assert local.environments(["3", "5"], 2) == [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in ("3", "5")]
    found = local.environments(["3", "5"], 3)
    for gpu in ("3", "5"):
        parts = [float(of[local.MEMORY]) for of in found if of["CUDA_VISIBLE_DEVICES"] == gpu]
        assert len(parts) == 2 and 0.8 < sum(parts) < 1
    monkeypatch.setenv(local.MEMORY, "0.2")  # the user's own word counts
    assert local.environments(["3"], 2) == [{"CUDA_VISIBLE_DEVICES": "3"}] * 2
    assert local.environments([], 2) == [{}, {}]


def alive(pid):
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def wait_until(happened, process=None, seconds=60):
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until and (process is None or process.poll() is None)
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="jobs die with their study on Linux alone")
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_study_takes_its_jobs_along_and_goes_on_where_it_was(tmp_path, sent):
    """The second start must not find a job of the first still at work."""
    log = tmp_path / "log"
    code = f"""
    import sys
    sys.path.insert(0, {str(ROOT)!r})
    from tests.test_study import make_study, run_jobs, script
    from pathlib import Path
    add = "import os, time; f = open({str(log)!r}, 'a'); f.write('%s %d\\\\n' % ('{{name}}', os.getpid())); f.flush(); time.sleep({{wait}})"
    jobs = [script(add.format(name='a', wait=0), name='a'), script(add.format(name='b', wait=float(sys.argv[1])), 'a', name='b')]
    from cxda_jax import stops
    stops.watch()
    try:
        print(run_jobs(make_study(Path({str(tmp_path)!r})), jobs, 1))
    except stops.Stopped as e:
        sys.exit(e.code)
    """
    start = [sys.executable, "-c", textwrap.dedent(code)]
    process = subprocess.Popen([*start, "60"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: log.exists() and "b " in log.read_text(), process)
    child = int(log.read_text().split()[-1])
    process.send_signal(sent)
    process.communicate(timeout=20)
    assert process.returncode == (-sent if sent == signal.SIGKILL else 128 + sent)
    wait_until(lambda: not alive(child))
    done = subprocess.run([*start, "0"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["a", "b", "b"]


@pytest.mark.parametrize("signals", [1, 2])
def test_each_job_gets_one_signal_of_a_terminals_and_a_second_ends_it(tmp_path, signals):
    """A terminal sends Ctrl-C to all processes of the group."""
    job = f"""
        import pathlib, signal, sys, time
        came, here = [], pathlib.Path({str(tmp_path)!r})
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: came.append(number))
        (here / "begun").touch()
        while not came:
            time.sleep(0.02)
        time.sleep({1 if signals == 1 else 60})
        (here / "saved").write_text(str([int(n) for n in came]))
        sys.exit(143)
    """
    code = f"""
        from pathlib import Path
        from launch import cli
        from tests.test_study import make_study, run_jobs, script
        def main():
            with cli.loading():
                pass
            run_jobs(make_study(Path({str(tmp_path)!r})), [script({job!r}, name="a")], 1)
        cli.run(main)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE, start_new_session=True)
    wait_until((tmp_path / "begun").exists, process)
    began = time.monotonic()
    for _ in range(signals):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.5)
    said = process.communicate(timeout=30)[1].splitlines()
    assert process.returncode == 130 and time.monotonic() - began < 20
    if signals == 1:
        assert (tmp_path / "saved").read_text() == "[15]"
        assert said == [stops.SOON, stops.LINE.format("SIGINT")]
    else:
        assert said == [stops.SOON] and not (tmp_path / "saved").exists()


def test_a_study_that_was_received_gives_its_jobs_no_programs(tmp_path, monkeypatch):
    """What is loaded from a folder of compiled programs is run."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    study = make_study(tmp_path / "study")
    (study.folder / "jobs" / "compiled").mkdir(mode=0o700)
    (study.folder / "jobs" / "compiled" / "planted").touch()
    job = "from cxda_jax import backend; print(backend.keep_compiled())"
    assert local.perform(study, script(job, name="a")) == ""
    used = Path((study.folder / "jobs" / "a.log").read_text().strip())
    assert used.is_relative_to(tmp_path / "mine") and used.is_dir()


def test_the_estimate_times_each_method_once(store, tmp_path, capsys):
    study = make_study(tmp_path, (0, 1), ("erm",))
    jobs = plan(study, store, "data")
    seconds = estimate.estimate(study, jobs, store, store)
    said = [line.removeprefix("[1/1] timing erm: ") for line in capsys.readouterr().out.splitlines()]
    assert said[0] == "compiling a training step, then 3 of them" and len(said) == 2
    assert re.fullmatch(r"\S+s a step, compiled in \S+s; compiling a test task, then 3 of them", said[1])
    (kept,) = json.loads((tmp_path / "speed.json").read_text()).values()
    speed = kept["erm smoke"]
    assert speed["steps"] == 20 and speed["tasks"] == 2 * 4 + 10 and 0 < speed["step_s"] < speed["compile_s"]
    train, _, other, empty = jobs
    assert seconds(train) == pytest.approx(5 + speed["compile_s"] + 20 * speed["step_s"] + 18 * speed["task_s"])
    # Two runs; tasks of 2 x 50 + 50, 5 x 20 + 20, 5 x 2 + 2 and again 5 x 20 + 20 images, as shares of 120.
    images = 150 / 120 + 1 + 12 / 120 + 1
    assert seconds(other) == pytest.approx(5 + 4 * speed["compile_s"] / 2 + 2 * 10 * speed["task_s"] * images)
    assert seconds(empty) == pytest.approx(5 + speed["compile_s"] / 2 + 2 * 10 * speed["task_s"] * 20 / 120)
    estimate.estimate(study, jobs, store, store)
    assert "timing" not in capsys.readouterr().out  # it is kept


def test_the_estimate_says_how_long_it_takes_itself_and_keeps_what_it_has(store, tmp_path, capsys, monkeypatch):
    def time_method(config, store, sample, say):
        if config["method"] == "cotta":
            raise KeyboardInterrupt
        time.sleep(0.6)
        say("compiling")

    monkeypatch.setattr(estimate, "time_method", time_method)
    study = make_study(tmp_path, (0,), ("erm", "bn", "cotta"))
    with pytest.raises(KeyboardInterrupt):
        estimate.estimate(study, plan(study, store, "data"), store, store)
    assert capsys.readouterr().out.splitlines() == ["[1/3] timing bn: compiling"]
    assert list(*json.loads((tmp_path / "speed.json").read_text()).values()) == ["bn smoke"]
    study = make_study(tmp_path, (0,), ("erm", "bn", "cml"))
    estimate.estimate(study, plan(study, store, "data"), store, store)
    assert capsys.readouterr().out.splitlines() == [
        "[1/2] timing cml: compiling",
        "[2/2] timing erm: compiling  eta 1s",
    ]


def reproduce(tmp_path, name, wait=True):
    command = [
        sys.executable, "-m", "launch.reproduce", "--benchmark=glyphs", "--smoke", "--seeds=0", "--only=erm,ft_em",
        f"--study={tmp_path}/{name}", f"--data_dir={tmp_path}/data", "--workers=2",
    ]  # fmt: skip
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
    if not wait:
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, env=environment)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tables(folder):
    """All cells but those that hold times or places."""
    cells = csv.DictReader((folder / "report" / "tables.csv").read_text().splitlines())
    return [{k: v for k, v in cell.items() if k != "runs"} for cell in cells if cell["table"] != "runtime"]


def test_a_study_from_one_command_repeats_nothing(tmp_path):
    first = reproduce(tmp_path, "study")
    study = tmp_path / "study"
    results = sorted(study.glob("erm/0/**/result.json"))
    assert {path.parent.name for path in results} == {
        "0", "ft_em", "ft_em,finetune.steps=1", "erm,num_domains=2", "erm,num_domains=5", "erm,support_size=10",
        "erm,support_size=100", "ft_em,num_domains=2", "ft_em,num_domains=5", "ft_em,support_size=10",
        "ft_em,support_size=100", "erm,context=0",
    }  # fmt: skip
    assert "5 jobs, 0 done before" in first and "[5/5]" in first and "report.html: 12 results, 5 tables" in first
    before = {path: path.read_bytes() for path in [*results, *(study / "report").glob("*.*")]}
    assert "5 jobs, 5 done before" in reproduce(tmp_path, "study")
    assert {path: path.read_bytes() for path in before} == before

    # Killed at other points of its work each time, it goes on where it was, and ends the same.
    other, kept = tmp_path / "killed", {}
    for wanted, wait in ((0, 4.0), (2, 1.0)):
        process = reproduce(tmp_path, "killed", wait=False)
        wait_until(lambda wanted=wanted: len(list(other.glob("jobs/*.done"))) >= wanted, seconds=120)
        time.sleep(wait)
        process.kill()
        process.wait()
        done = {path: path.stat().st_mtime_ns for path in other.glob("jobs/*.done")}
        assert len(done) >= wanted and kept.items() <= done.items(), "what was done is not done again"
        kept = done
    assert f"5 jobs, {len(kept)} done before" in reproduce(tmp_path, "killed")
    assert kept.items() <= {path: path.stat().st_mtime_ns for path in other.glob("jobs/*.done")}.items()
    assert tables(other) == tables(study) and len(tables(study)) > 20


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--benchmark=glyfs",), "--benchmark='glyfs' is unknown; did you mean 'glyphs'?"),
        (("--benchmark=glyphs", "--only=cxdaa"), "--only='cxdaa' is unknown; did you mean 'cxda'?"),
        (("--benchmark=glyphs", "--seeds=a"), "--seeds=a: give whole numbers, such as 0,1,2"),
        (("--benchmark=cifar_c",), "cifar_c: no prepared data; python -m launch.prepare --benchmark=cifar_c"),
        (("--benchmark=folder", "--dry_run"), "folder: no prepared data; python -m launch.prepare --benchmark=folder"),
    ],
)
def test_mistakes_cost_one_line(tmp_path, arguments, message):
    error = command("reproduce", *arguments, f"--data_dir={tmp_path}", code=2)
    assert error.count("\n") == 1 and message in error
