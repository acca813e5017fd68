"""The whole study of a benchmark, from one command: trains what trains, tests everything, and writes the report.

python -m launch.reproduce --benchmark=glyphs
python -m launch.reproduce --benchmark=glyphs --seeds=0 --only=erm,cxda,ft_em
python -m launch.reproduce --benchmark=glyphs --smoke --workers=2
python -m launch.reproduce --benchmark=cifar_c --dry_run
python -m launch.reproduce --benchmark=cifar_c --executor=slurm --slurm=partition=gpu,gpus_per_node=1

The study is a list of jobs: one training for each method and seed, and evaluations of what they leave (methods that start
from erm, other numbers of domains and of support images, one step of fine-tuning). A job that ended well is marked under
STUDY/jobs and never repeated while its config, its data and its method stay what they are; the same command again does
what is missing, wherever it was stopped. A job that fails is named, with its log, and the rest goes on. --dry_run lists the
jobs and what they will take, from steps timed on this machine; while the data are missing, on made-up images, with the
published numbers of domains and images.

STUDY/METHOD/SEED holds the runs and their results, STUDY/report the tables, the figures and report.html, with the paper's
figures beside ours where the data are the paper's.
"""

from collections.abc import Callable
from pathlib import Path

from absl import flags

from cxda_jax import files
from cxda_jax.analysis.results import read_results
from cxda_jax.data.published import PUBLISHED, empty_store, sample_store
from cxda_jax.data.raw import cores
from cxda_jax.experiment import BENCHMARKS, METHODS, lookup, open_data
from cxda_jax.progress import duration
from cxda_jax.types import UserError
from launch import cli, report
from launch.estimate import estimate
from launch.study import Job, Study, is_done, plan, run_here, run_on_slurm, visible_gpus

# Other launchers have a flag of this name too; a process that imports several shares it.
_BENCHMARK = flags.DEFINE_string(
    "benchmark", None, f"One of {', '.join(BENCHMARKS)}.", required=True, allow_override=True
)
flags.adopt_module_key_flags(cli)
_STUDY = flags.DEFINE_string("study", None, "Where the study is kept; runs/study/BENCHMARK unless given.")
_SEEDS = flags.DEFINE_list("seeds", [], "Training seeds; 0,1,2 if empty, 0,1 with --smoke.")
_ONLY = flags.DEFINE_list("only", [], "Methods; all if empty.")
_SMOKE = flags.DEFINE_bool(
    "smoke", False, "The whole study in minutes, with networks and data too small to mean anything."
)
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "List the jobs, time some steps, and estimate what the study takes.")
_WORKERS = flags.DEFINE_integer("workers", None, "Jobs at once; one for each GPU, or for two CPU cores.", lower_bound=1)
_EXECUTOR = flags.DEFINE_enum("executor", "local", ["local", "slurm"], "Where the jobs run; slurm needs submitit.")
_SLURM = flags.DEFINE_list("slurm", [], "Parameters of the queue: partition=gpu,timeout_min=600,gpus_per_node=1.")


def main() -> None:
    lookup("--benchmark", _BENCHMARK.value, BENCHMARKS)
    study = read_flags()
    if _DRY_RUN.value:
        dry_run(study)
        return
    jobs = plan(study, open_data(study.config("erm"), cli.DATA_DIR.value), cli.DATA_DIR.value)
    (study.folder / "jobs").mkdir(parents=True, exist_ok=True)
    files.refuse_links(study.folder)
    files.refuse_links(study.folder / "jobs")
    if _EXECUTOR.value == "slurm":
        parts = (part.partition("=") for part in _SLURM.value)
        failures = run_on_slurm(study, jobs, {name: text for name, _, text in parts})
    else:
        gpus = visible_gpus()
        # A smoke job compiles, on one core, more than it computes.
        alone = cores() if study.smoke else max(1, cores() // 2)
        failures = run_here(study, jobs, _WORKERS.value or len(gpus) or alone, gpus)
    for line in failures:
        print(f"failed: {line}", flush=True)
    results, faults = read_results(path.parent for path in study.folder.glob("*/*/config.json"))
    others = [r for r in results if r.row["benchmark"] != study.benchmark]
    faults += failures + [f"{r.folder}: left out, since it is of {r.row['benchmark']}" for r in others]
    if len(others) < len(results):
        kept = [r for r in results if r.row["benchmark"] == study.benchmark]
        report.make_report(study.folder / "report", kept, faults, True, cli.DATA_DIR.value)
    if failures:
        raise UserError(f"{len(failures)} of {len(jobs)} jobs failed or were left out; the first: {failures[0]}")


def read_flags() -> Study:
    cli.overrides(())
    methods = tuple(_ONLY.value) or tuple(METHODS)
    for name in methods:
        lookup("--only", name, METHODS)
    seeds = _SEEDS.value or (["0", "1"] if _SMOKE.value else ["0", "1", "2"])
    if not all(seed.isdecimal() for seed in seeds):
        raise UserError(f"--seeds={','.join(seeds)}: give whole numbers, such as 0,1,2")
    folder = Path(_STUDY.value or f"runs/study/{_BENCHMARK.value}{'_smoke' if _SMOKE.value else ''}")
    return Study(_BENCHMARK.value, folder, tuple(map(int, seeds)), methods, _SMOKE.value)


def dry_run(study: Study) -> None:
    """Lists the jobs and their times, before the data are there too."""
    config, data_dir = study.config("erm"), cli.DATA_DIR.value
    if study.benchmark not in PUBLISHED or (Path(data_dir) / config["data"]["name"] / "store.json").exists():
        store = open_data(config, data_dir)
        jobs = plan(study, store, data_dir)
        print(listing(study, jobs, estimate(study, jobs, store, store)))
        return
    print(
        f"{study.benchmark}: no prepared data in {data_dir}; numbers of domains and images are the published ones, and "
        "steps are timed on made-up images",
        flush=True,
    )
    store = empty_store(study.benchmark)
    jobs = [job._replace(id="-" * len(job.id)) for job in plan(study, store, data_dir)]  # ids follow from the data
    print(listing(study, jobs, estimate(study, jobs, store, sample_store(study.benchmark))))


def listing(study: Study, jobs: list[Job], seconds: Callable[[Job], float | None]) -> str:
    lines, left = [], 0.0
    for job in jobs:
        if is_done(study, job):
            state = "done"
        else:
            took = seconds(job)
            left += took or 0.0
            state = duration(took) if took is not None else "?"
        lines.append(f"{job.id}  {state:>8}  {job.name}")
    return "\n".join([*lines, f"{len(jobs)} jobs; {duration(left)} to go, one after another, on this machine"])


if __name__ == "__main__":
    cli.run(main)
