"""A study's jobs: each is planned once, after what it needs; what is done stays done, and what fails is named."""

import json
import sys
import textwrap
from collections import Counter
from unittest import mock

import pytest

from cxda_jax.config.registry import METHODS
from cxda_jax.disk import files
from cxda_jax.errors import TooEarly, UserError
from cxda_jax.studies import jobs, local
from cxda_jax.studies.jobs import Job, Study, find_job, listing, plan
from cxda_jax.training.experiment import open_data
from tests.commands import command
from tests.lines import refused
from tests.nets import build_method


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return open_data(make_study(folder).config("erm"), folder)


def make_study(folder, seeds=(0, 1), methods=tuple(METHODS), smoke=True, **more):
    (folder / "jobs").mkdir(parents=True, exist_ok=True)
    return Study("glyphs", folder, seeds, methods, smoke, **more)


def start_of(job):
    return "erm_iid" if "--from=erm_iid" in job.command else "erm"


def test_everything_is_planned_once_after_what_it_needs(store, tmp_path):
    jobs = plan(make_study(tmp_path), store, "data")
    trainings = {(job.methods, job.arguments[2]): job.id for job in jobs if job.trains}
    trained = {method for ((method,), _) in trainings}
    assert trained == {m for m in METHODS if not build_method(m).trains_as}
    assert len(trainings) == 2 * len(trained), "two seeds each"
    tests = [job for job in jobs if not job.trains]
    assert all({job.id for job in jobs[:i]}.issuperset(job.needs) for i, job in enumerate(jobs))
    for job in tests:
        (start,) = {name if name in trained else start_of(job) for name in job.methods}
        assert set(job.needs) == {trainings[(start,), f"--config.seed={seed}"] for seed in (0, 1)}
    tested = Counter((name, start_of(job), str(s)) for job in tests for name in job.methods for s in job.settings)
    assert set(tested.values()) == {1}
    forms = {}
    for name, start, form in tested:
        forms.setdefault((name, start), set()).add(form.partition("=")[0])
    assert forms["cxda", "erm"] == {"num_domains", "support_size", "context"}
    assert forms["ft_em", "erm"] == {"", "num_domains", "support_size", "finetune.steps"}
    assert forms["t3a", "erm"] == forms["t3a", "erm_iid"] == {"", "context"}


def test_ids_follow_configs_and_data_alone(store, tmp_path):
    full = make_study(tmp_path, smoke=False)
    ids = [job.id for job in plan(make_study(tmp_path / "a"), store, "data")]
    assert ids == [job.id for job in plan(make_study(tmp_path / "b"), store, "elsewhere")]
    for study, data in ((make_study(tmp_path), store._replace(sha256="other")), (full, store)):
        assert not set(ids) & {job.id for job in plan(study, data, "data")}
    built = jobs.build_method
    with mock.patch.object(jobs, "build_method", lambda *given: built(*given)._replace(version="new")):
        assert not set(ids) & {job.id for job in plan(make_study(tmp_path), store, "data")}


class Script(Job):
    """A job that is some code."""

    @property
    def command(self):
        return [sys.executable, "-c", *self.arguments]


def script(text, *needs, name):
    return Script(name, name, (textwrap.dedent(text),), (), needs)


def test_jobs_run_in_order_once_each_with_a_gpu_of_its_own_and_failures_are_named(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    study, log = make_study(tmp_path), tmp_path / "log"
    (study.folder / "jobs" / "compiled").mkdir()  # programs that came with a study are not run
    say = f"""
        import os, time
        open({str(log)!r}, 'a').write('%s ' + os.environ['CUDA_VISIBLE_DEVICES'] + '\\n')
        assert 'JAX_COMPILATION_CACHE_DIR' not in os.environ
        time.sleep(0.3)
    """
    jobs = [
        script(say % "a", name="a"),
        script(f"{say % 'b'}\n        print('working'); raise SystemExit('error: config.x=1 is wrong')", name="b"),
        script(say % "c", "a", name="c"),
        script(say % "d", "b", name="d"),
        script(say % "e", "c", "d", name="e"),
    ]
    monkeypatch.setattr(local, "visible_gpus", lambda: ["3", "5"])
    failures = local.run_jobs(study, jobs, 2)
    assert [line.split(" (log")[0] for line in failures] == [
        "b: config.x=1 is wrong", "d: left out, since what it needs failed", "e: left out, since what it needs failed"
    ]  # fmt: skip
    names, gpus = zip(*map(str.split, log.read_text().splitlines()), strict=True)
    assert sorted(names[:2]) == ["a", "b"] and names[2:] == ("c",) and sorted(gpus[:2]) == ["3", "5"]
    assert "working" in (tmp_path / "jobs" / "b.log").read_text()
    with files.locked(study.folder / "jobs"), pytest.raises(UserError, match="jobs is in use by process"):
        local.run_jobs(study, jobs, 1)  # a second study
    jobs[1] = script(say % "b", name="b")
    assert local.run_jobs(study, jobs, 1) == local.run_jobs(study, jobs, 1) == []
    assert [line[0] for line in log.read_text().splitlines()[3:]] == ["b", "d", "e"]  # a and c were done
    assert json.loads((tmp_path / "jobs" / "e.done").read_text())["name"] == "e"


def test_a_job_that_a_queue_asks_for_is_done_once_and_after_what_it_needs(tmp_path, data_dir):
    study, log = make_study(tmp_path), tmp_path / "log"
    jobs = [
        script(f"open({str(log)!r}, 'a').write({name!r})", *needs, name=name) for name, needs in (("a", ()), ("b", "a"))
    ]
    with pytest.raises(TooEarly, match="such as 'a'"):
        local.run_job(study, jobs, jobs[1])
    (study.folder / "jobs" / "a").mkdir()
    with files.locked(study.folder / "jobs" / "a"), pytest.raises(TooEarly, match="is in use by process"):
        local.run_job(study, jobs, jobs[0])
    assert [local.run_job(study, jobs, find_job(jobs, text)) for text in ("0", "a", "1")] == ["", "", ""]
    assert log.read_text() == "ab"
    assert [line.split()[2:4] for line in listing(study, jobs).splitlines()[:-1]] == [["done", "a"], ["done", "b"]]
    with refused(named="--job=2"):
        find_job(jobs, "2")
    flags = ["--benchmark=glyphs", "--smoke", "--seeds=0", "--only=t3a", "--tests=usual", f"--study={tmp_path}/study"]
    assert "such as 'train erm seed 0'" in command("reproduce", *flags, f"--data_dir={data_dir}", "--job=1", code=69)
