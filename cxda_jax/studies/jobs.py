"""A study as jobs: what there is to do, and what is done.

A job is one command. Its id is a hash of all that its outcome follows from: configs, versions of methods, the data
and the jobs it needs. It is marked done by a file of that name, so a changed config makes a new job and an equal one
is never repeated.
"""

import contextlib
import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cxda_jax.config.fields import Config, choose, lookup
from cxda_jax.config.reading import config_hash, hashed, read, replaced
from cxda_jax.config.registry import METHODS, STARTS
from cxda_jax.data.episodes import EpisodeSpec, check_context, check_spec
from cxda_jax.data.published import PUBLISHED, empty_store
from cxda_jax.data.store import DomainStore
from cxda_jax.disk import files
from cxda_jax.errors import UserError, brief
from cxda_jax.studies.settings import STEPS, USUAL, Setting, reshaped
from cxda_jax.training.experiment import BENCHMARKS, build_method, open_data

TASKS = {
    "num_domains": (1, 2, 5, 10, 20),
    "support_size": (10, 20, 50, 100, 200, 500),
    "context": (0, 1, 2, 5, 10, 20, 50, 100, 200, 500),
}
SMOKE_TASKS = {"num_domains": (2, 5), "support_size": (10, 100), "context": (0, 10, 100)}
# What a study tests: the usual tasks of methods that start from another's run, one step of fine-tuning, other numbers
# of domains and of support images, buffers of any size, and methods that start from erm_iid in place of erm.
TESTS = ("usual", "one_step", "other_tasks", "contexts", "other_starts")


class Job(NamedTuple):
    """One command of the study: a training of one method and seed, or tests of methods on the runs of some seeds."""

    id: str
    name: str
    arguments: tuple[str, ...]  # of the command: its name and flags
    methods: tuple[str, ...]
    needs: tuple[str, ...] = ()  # ids of jobs that must have ended well
    runs: int = 0  # tests: how many runs are tested
    settings: tuple[Setting, ...] = (USUAL,)

    @property
    def trains(self) -> bool:
        return not self.runs

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "cxda_jax", *self.arguments]


class Study(NamedTuple):
    """The choice of what to reproduce, and the folder that keeps it."""

    benchmark: str
    folder: Path
    seeds: tuple[int, ...]
    methods: tuple[str, ...]
    smoke: bool
    variant: str = ""  # of the benchmark's config, such as "small"
    tests: tuple[str, ...] = TESTS
    most_images: int = 0  # the largest buffer of the tests that vary it; as large as the data give if 0

    def config_flag(self, method: str) -> str:
        return f"{self.benchmark}:{','.join(filter(None, [method, self.variant, 'smoke' * self.smoke]))}"

    def config(self, method: str, seed: int = 0) -> Config:
        return replaced(read(self.config_flag(method)), seed=seed)

    def run(self, method: str, seed: int) -> Path:
        return self.folder / method / str(seed)

    def mark(self, job: Job) -> Path:
        """The file that says that a job ended well."""
        return self.folder / "jobs" / f"{job.id}.done"


def plan(study: Study, store: DomainStore, data_dir: str) -> list[Job]:
    """All jobs, each after those it needs. Ids follow from configs, data and versions of methods alone."""
    methods = {name: build_method(study.config(name), store) for name in METHODS}
    start_of = {name: method.trains_as or name for name, method in methods.items()}
    trained = [name for name in METHODS if name in {start_of[wanted] for wanted in study.methods}]
    possible = possible_settings(study, store)
    contexts, others = [s for s in possible if s.context], [s for s in possible if not s.context]
    jobs: list[Job] = []

    def add(
        name: str, arguments: Sequence[str], names: Sequence[str], needs: Sequence[str], identity: Any, **more: Any
    ) -> str:
        number = config_hash({"job": [identity, needs, store.sha256]})[:12]
        texts = (*arguments, f"--data_dir={data_dir}")
        jobs.append(Job(number, name, texts, tuple(names), tuple(needs), **more))
        return number

    trainings: dict[str, list[str]] = {name: [] for name in trained}  # their ids, one for each seed
    for seed in study.seeds:
        for name in trained:
            config, workdir = f"--config={study.config_flag(name)}", f"--workdir={study.run(name, seed)}"
            arguments = ["train", config, f"--config.seed={seed}", workdir]
            identity = [hashed(study.config(name, seed)), methods[name].version]
            trainings[name].append(add(f"train {name} seed {seed}", arguments, [name], [], identity))
    for start in trained:
        started = [name for name in METHODS if start_of[name] == start]
        varied = [name for name in started if METHODS[name].varied]
        tuned = [name for name in varied if not methods[name].feed_forward]
        # What fine-tunes is left out of contexts and of other starts: it would take days.
        forward = [name for name in started if methods[name].feed_forward]
        quick = [name for name in METHODS if methods[name].trains_as and methods[name].feed_forward]
        quick = quick if start in STARTS[1:] else []
        for kind, what, among, settings, flags in (
            ("usual", "the usual tasks", [name for name in started if name != start], [USUAL], []),
            ("one_step", "one step", tuned, [Setting(STEPS, 1)], []),
            ("other_tasks", "other tasks", varied, others, []),
            ("contexts", "contexts", [name for name in forward if methods[name].uses_support], contexts, []),
            (
                "contexts",
                "an empty context",
                [name for name in forward if not methods[name].uses_support],
                contexts[:1],
                [],
            ),
            ("other_starts", f"from {start}", quick, [USUAL], [f"--from={start}"]),
            ("other_starts", f"contexts from {start}", quick, contexts, [f"--from={start}"]),
        ):
            names = [name for name in among if name in study.methods and kind in study.tests]
            if not names or not settings:
                continue
            runs, numbers = listed([str(study.run(start, seed)) for seed in study.seeds]), {}
            for setting in settings:
                if setting.kind:
                    numbers.setdefault(setting.kind.removeprefix("finetune."), []).append(str(setting.number))
            flags = flags + [f"--{kind}={','.join(texts)}" for kind, texts in numbers.items()]
            arguments = ["evaluate", f"--runs={runs}", f"--methods={','.join(names)}", *flags]
            identity = [flags, [(hashed(study.config(name)), methods[name].version) for name in names]]
            add(f"test {what} of {','.join(names)}", arguments, names, trainings[start], identity,
                runs=len(study.seeds), settings=tuple(settings))  # fmt: skip
    return jobs


def listed(names: Sequence[str]) -> str:
    """As a flag that takes a list splits it again, whatever the names hold."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(names)
    return text.getvalue()


def possible_settings(study: Study, store: DomainStore) -> list[Setting]:
    """The paper's other numbers of domains and of support images, and contexts,
    as far as the test domains can give them."""
    config, possible = study.config("erm"), []
    for kind, numbers in (SMOKE_TASKS if study.smoke else TASKS).items():
        wanted = [n for n in numbers if kind == "num_domains" or not study.most_images or n <= study.most_images]
        for setting in (Setting(kind, number) for number in wanted):
            with contextlib.suppress(UserError):
                spec = EpisodeSpec(**reshaped(config, setting).episode)
                check_spec(spec, store, "test")
                if setting.context:
                    check_context(setting.context, spec, store, "test")
                possible.append(setting)
    return possible


def find_job(jobs: Sequence[Job], text: str) -> Job:
    """The job with this number in the list, or with this id."""
    for number, job in enumerate(jobs):
        if text in (job.id, str(number)):
            return job
    raise UserError(
        f"--job={brief(text, 30)}: no such job; give a number from 0 to {len(jobs) - 1}, which --list shows"
    )


def listing(study: Study, jobs: Sequence[Job]) -> str:
    """A line for each job: its number and id, either of which --job takes, its state, name, and the numbers of what it
    needs. The last line has the numbers of trainings and of tests, as sbatch's --array takes them."""
    numbers, lines = {job.id: number for number, job in enumerate(jobs)}, []
    for number, job in enumerate(jobs):
        needs = [numbers[need] for need in job.needs]
        after = f"  after {','.join(map(str, needs))}" * bool(needs)
        lines.append(f"{number:>4}  {job.id}  {'done' if is_done(study, job) else 'to do':<5}  {job.name}{after}")
    first = sum(job.trains for job in jobs)  # the trainings come first
    spans = [f"{a}-{b - 1}" if b > a else "none" for a, b in ((0, first), (first, len(jobs)))]
    return "\n".join([*lines, "trainings: {}; tests: {}".format(*spans)])


def is_done(study: Study, job: Job) -> bool:
    return study.mark(job).exists()


def make_study(
    benchmark: str,
    folder: str | None,
    seeds: Sequence[str],
    methods: Sequence[str],
    smoke: bool = False,
    variant: str = "",
    tests: Sequence[str] = (),
) -> Study:
    """The study that the command line asks for; what is empty stands for the usual."""
    lookup("--benchmark", benchmark, BENCHMARKS)
    for name in methods:
        lookup("--only", name, METHODS)
    for name in tests:
        choose("--tests", name, TESTS)
    seeds = seeds or (["0", "1"] if smoke else ["0", "1", "2"])
    if not all(seed.isdecimal() for seed in seeds):
        raise UserError(f"--seeds={','.join(seeds)}: give whole numbers, such as 0,1,2")
    where = Path(folder or f"runs/study/{'_'.join(filter(None, [benchmark, variant, 'smoke' * smoke]))}")
    names, kinds = tuple(methods) or tuple(METHODS), tuple(tests) or TESTS
    return Study(benchmark, where, tuple(map(int, seeds)), names, smoke, variant, kinds)


def planned(study: Study, data_dir: str) -> tuple[DomainStore, list[Job]]:
    """The data and all jobs. Where the data are missing, a store of the published size stands for them; ids, which
    follow from the data, are blank then."""
    config = study.config("erm")
    if study.benchmark not in PUBLISHED or (Path(data_dir) / config.data.name / "store.json").exists():
        return (store := open_data(config, data_dir)), plan(study, store, data_dir)
    said = "numbers of domains and images are the published ones"
    print(f"{study.benchmark}: no prepared data in {data_dir}; {said}", flush=True)
    jobs = plan(study, store := empty_store(study.benchmark), data_dir)
    blank = {job.id: f"{number:->12}" for number, job in enumerate(jobs)}
    return store, [job._replace(id=blank[job.id], needs=tuple(blank[need] for need in job.needs)) for job in jobs]


def prepare_jobs(study: Study, data_dir: str) -> list[Job]:
    """All jobs, once the data and the study's folder are there."""
    jobs = plan(study, open_data(study.config("erm"), data_dir), data_dir)
    (study.folder / "jobs").mkdir(parents=True, exist_ok=True)
    files.refuse_links(study.folder)
    files.refuse_links(study.folder / "jobs")
    return jobs
