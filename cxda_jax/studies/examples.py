"""Shows what adapting changed on the first test tasks: how many queries it corrected and spoiled, a picture of one, and
what is attended to, kept for reports."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cxda_jax.data.episodes import Plan
from cxda_jax.disk import files
from cxda_jax.studies.attention_maps import Answers, Example, draw_attention
from cxda_jax.training.evaluation import Evaluator, TaskTable
from cxda_jax.training.experiment import Experiment
from cxda_jax.types import Images, Variables

ATTENTION_TASKS = 24  # of which attention.npz keeps the weights, and queries are asked without support too


def without_support(
    experiment: Experiment, evaluator: Evaluator, variables: Variables, plan: Plan, tasks: TaskTable
) -> Answers:
    """The answers to the first tasks' queries, beside those that the method gives without support images."""
    images, first = images_of(experiment), slice(ATTENTION_TASKS)
    unadapted = evaluator.adapt(variables, images(plan.support[0, :0]), jax.random.key(0))
    before = np.stack([np.asarray(evaluator.predict(unadapted, images(rows))[0]) for rows in plan.query[first]])
    return Answers(tasks.labels[first], before, tasks.predictions[first])


def draw_example(path: Path, experiment: Experiment, plan: Plan, answers: Answers, weights: np.ndarray) -> None:
    """A query that adapting corrects, if there is one, and what it attends to; weights as keep_attention gives them."""
    store, domains, (task, query) = experiment.store, experiment.store.row_domains(), answers.example_place()
    asked, support = plan.query[task, query], plan.support[task]
    label, before, after = (int(numbers[task, query]) for numbers in answers)
    example = Example(
        store.images[asked], int(domains[asked]), label, before, after,
        store.images[support], domains[support], weights[task, query].mean(0, dtype=np.float32),
    )  # fmt: skip
    title = f"{experiment.method.name} on {store.info.name}, test task {task + 1}, query {query + 1}"
    shown = example, answers.counts(), store.domain_names, store.info.class_names, title
    files.write_whole(path, lambda partial: draw_attention(partial, *shown))


def keep_attention(
    path: Path, experiment: Experiment, evaluator: Evaluator, variables: Variables, plan: Plan
) -> tuple[np.ndarray, str]:
    """Keeps attention weights [tasks, queries, heads, support] of the first tasks with each image's domain.

    It returns them and the file's SHA-256.
    """
    domains, images, weights = experiment.store.row_domains(), images_of(experiment), []
    supports, queries = plan.support[:ATTENTION_TASKS], plan.query[:ATTENTION_TASKS]
    for support, query in zip(supports, queries, strict=True):
        adapted = evaluator.adapt(variables, images(support), jax.random.key(0))
        assert evaluator.attention
        weights.append(np.asarray(evaluator.attention(adapted, images(query)), np.float16))
    kept = {"weights": np.stack(weights), "support_domain": domains[supports], "query_domain": domains[queries]}
    return kept["weights"], write_arrays(path, kept)


def images_of(experiment: Experiment) -> Callable[[np.ndarray], Images]:
    """The images of rows of the store."""
    store, domains = experiment.store, experiment.store.row_domains()
    return lambda rows: Images(jnp.asarray(store.images[rows]), jnp.asarray(domains[rows]))


def write_arrays(path: Path, arrays: dict[str, Any]) -> str:
    """Writes a .npz file and returns its SHA-256."""
    files.write_whole(path, lambda partial: np.savez_compressed(partial, **arrays))
    return hashlib.sha256(path.read_bytes()).hexdigest()
