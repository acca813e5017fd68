"""Measures what adapting brings, by the number of support images, on validation tasks at the end of a training."""

from typing import Any

import jax.numpy as jnp

from cxda_jax.data.episodes import Context
from cxda_jax.disk.models import Gain
from cxda_jax.studies.statistics import measure
from cxda_jax.studies.testing import score
from cxda_jax.training.evaluation import compile_task
from cxda_jax.training.experiment import Experiment
from cxda_jax.types import Array, Images, Method, Variables

SIZES = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500)


def measure_gain(experiment: Experiment, variables: Variables) -> Gain | None:
    """The gain on the validation tasks, whose images arrive in random order; None for a method that no places fit."""
    method, spec, tasks = experiment.method, experiment.spec, experiment.num_tasks["val"]
    if not (method.uses_support and method.takes_places) or experiment.exhaustive:
        return None
    usual = spec.num_domains * spec.per_domain
    sizes = (*(n for n in SIZES if n < usual), usual)
    experiment = experiment._replace(context=Context(usual))  # all sizes see the beginning of the same order
    evaluator = compile_task(with_the_first_images(method), experiment.source)
    tables = [score(experiment, evaluator, {"own": variables, "count": jnp.asarray(n)}, "val", tasks) for n in sizes]
    scores = {n: table.scores for n, table in zip(sizes, tables, strict=True)}
    gaps = measure(scores, {n: {0: {n: 1.0, 0: -1.0} if n else {0: 0.0}} for n in sizes})
    spans = [gaps[n].avg for n in sizes]
    return Gain(
        sizes,
        score=tuple(round(100 * float(table.scores.mean()), 2) for table in tables),
        mean=tuple(round(span.mean, 2) for span in spans),
        low=tuple(round(span.low, 2) for span in spans),
        high=tuple(round(span.high, 2) for span in spans),
        tasks=tasks,
    )


def with_the_first_images(method: Method) -> Method:
    """The method on the first images of each support.

    Its variables are {"own": those of the method, "count": how many}.
    """

    def adapt(variables: Any, support: Images, key: Array) -> Any:
        present = jnp.arange(len(support.pixels)) < variables["count"]
        return method.adapt(variables["own"], support.replace(present=present), key)

    return method._replace(adapt=adapt)
