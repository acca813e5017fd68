"""The whole study of a benchmark, from one command: trains what trains, tests everything, and writes the report.

cxda reproduce --benchmark=glyphs
cxda reproduce --benchmark=glyphs --seeds=0 --only=erm,cxda,ft_em
cxda reproduce --benchmark=glyphs --smoke --workers=2
cxda reproduce --benchmark=unipen --variant=sizes --tests=usual,contexts
cxda reproduce --benchmark=cifar_c --list
cxda reproduce --benchmark=cifar_c --job=3

The study is a list of jobs: one training for each method and seed, and evaluations of what they leave (methods that
start from erm, other numbers of domains and of support images, one step of fine-tuning). A job that ended well is
marked under STUDY/jobs and never repeated while its config, its data and its method stay what they are; the same
command again does what is missing, wherever it was stopped. A job that fails is named, with its log, and the rest goes
on.

--tests takes kinds of tests: usual (of methods that start from another's run), one_step (of fine-tuning), other_tasks
(other numbers of domains and of support images), contexts (buffers of any size), other_starts (from erm_iid in place
of erm).
--most_images=100 leaves out buffers of more images in other_tasks and contexts, where they take much of the time.

--list shows the jobs by number, with what each one needs, also without data, and --job=NUMBER does one, once, however
often it is asked for. It ends with 69 where a job that it needs is not done. So any queue can work a study off. The
command without both then writes the report.

STUDY/METHOD/SEED holds the runs and their results, STUDY/report the tables, the figures and report.html, with the
paper's figures beside ours where the data are the paper's.
"""

from absl import flags

from cxda_jax.errors import UserError

from . import cli

_BENCHMARK = flags.DEFINE_string("benchmark", None, "The data set of the study.", allow_override=True)
flags.adopt_module_key_flags(cli)
_STUDY = flags.DEFINE_string("study", None, "Where the study is kept; runs/study/BENCHMARK unless given.")
_SEEDS = flags.DEFINE_list("seeds", [], "Training seeds; 0,1,2 if empty, 0,1 with --smoke.")
_ONLY = flags.DEFINE_list("only", [], "Methods; all if empty.", allow_override=True)
_VARIANT = flags.DEFINE_string(
    "variant", "", "A variant of the benchmark's config: sizes of unipen, small of cifar10_c."
)
_TESTS = flags.DEFINE_list("tests", [], "Kinds of tests; all if empty.")
_MOST_IMAGES = flags.DEFINE_integer(
    "most_images", 0, "The largest buffer of other_tasks and contexts; as large as the data give if 0.", lower_bound=0
)
_SMOKE = flags.DEFINE_bool(
    "smoke", False, "The whole study in minutes, with networks and data too small to mean anything."
)
_WORKERS = flags.DEFINE_integer(
    "workers", None, "Jobs at once; one for each GPU, or for two CPU cores.", lower_bound=1, allow_override=True
)
_LIST = flags.DEFINE_bool("list", False, "List the jobs by number, with the numbers of those that each one needs.")
_JOB = flags.DEFINE_string("job", "", "Do the job with this number or id alone, as a queue asks for it.")


def main() -> None:
    with cli.loading(goes_on=True):
        from cxda_jax.studies import local
        from cxda_jax.studies.folders import read_study
        from cxda_jax.studies.jobs import find_job, listing, make_study, planned, prepare_jobs
        from cxda_jax.studies.reporting import make_report
    benchmark = cli.insist(_BENCHMARK.value, "--benchmark", "name one, such as --benchmark=glyphs")
    study = make_study(benchmark, _STUDY.value, _SEEDS.value, _ONLY.value, _SMOKE.value, _VARIANT.value, _TESTS.value)
    study = study._replace(most_images=_MOST_IMAGES.value)
    if _LIST.value:
        return print(listing(study, planned(study, cli.DATA_DIR.value)[1]))
    jobs = prepare_jobs(study, cli.DATA_DIR.value)
    if _JOB.value:
        job = find_job(jobs, _JOB.value)
        if fault := local.run_job(study, jobs, job):
            raise UserError(fault)
        return print(f"{job.name}: done")
    failures = local.run_jobs(study, jobs, _WORKERS.value)
    for line in failures:
        print(f"failed: {line}", flush=True)
    results, faults = read_study(study.folder, study.benchmark)
    if results:
        make_report(study.folder / "report", results, [*faults, *failures], cli.DATA_DIR.value, against="paper")
    if failures:
        raise UserError(f"{len(failures)} of {len(jobs)} jobs failed or were left out; the first: {failures[0]}")


if __name__ == "__main__":
    cli.run(main)
