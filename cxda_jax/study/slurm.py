"""The jobs of a study in a Slurm queue."""

from collections.abc import Sequence
from typing import Any

from cxda_jax.errors import UserError
from cxda_jax.study.jobs import Job, Study, is_done
from cxda_jax.study.local import perform


class Requeued:
    """A job as submitit runs it; stopped at its time limit, it is queued again and resumes from its checkpoint."""

    def __call__(self, study: Study, job: Job) -> str:
        return "" if is_done(study, job) else perform(study, job)

    def checkpoint(self, study: Study, job: Job) -> Any:
        import submitit

        return submitit.helpers.DelayedSubmission(self, study, job)


def run_jobs(study: Study, jobs: list[Job], parameters: Sequence[str]) -> list[str]:
    """Submits what is not done, each job after those it needs, and waits; returns a line for each that failed.

    `parameters` are those of the queue, written name=value.
    """
    try:
        import submitit
    except ImportError:
        raise UserError("--executor=slurm needs submitit: pip install 'cxda_jax[slurm]'") from None
    pairs = (part.partition("=") for part in parameters)
    options = queue_parameters({name: int(text) if text.isdecimal() else text for name, _, text in pairs})
    submitted: dict[str, Any] = {}
    todo = [job for job in jobs if not is_done(study, job)]
    for job in todo:
        executor = submitit.AutoExecutor(folder=str(study.folder / "jobs" / "slurm"), cluster="slurm")
        executor.update_parameters(name=job.name.replace(" ", "_")[:40], **options)
        if after := [submitted[need].job_id for need in job.needs if need in submitted]:
            executor.update_parameters(slurm_dependency="afterok:" + ":".join(after))
        submitted[job.id] = executor.submit(Requeued(), study, job)
        print(f"submitted {job.name} as {submitted[job.id].job_id}", flush=True)
    failures = []
    for job in todo:
        try:
            failures.append(submitted[job.id].result())
        except Exception as e:  # whatever the queue says of a lost job
            failures.append(f"{job.name}: {str(e).strip().splitlines()[-1][:160]}")
    return [failure for failure in failures if failure]


def queue_parameters(given: dict[str, Any]) -> dict[str, Any]:
    """submitit takes its own names as they are, and those of Slurm with a prefix."""
    own = ("timeout_min", "gpus_per_node", "cpus_per_task", "mem_gb", "nodes", "tasks_per_node")
    return {k if k in own or k.startswith("slurm_") else f"slurm_{k}": v for k, v in given.items()}
