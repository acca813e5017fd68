"""Shows what adapting changed on the first test tasks: how many queries it corrected and spoiled, a picture of one, and
what is attended to, kept for reports."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cxda_jax.data.episodes import Plan
from cxda_jax.data.store import DomainStore
from cxda_jax.disk import files
from cxda_jax.pages.figures import plain
from cxda_jax.studies.result import Result
from cxda_jax.studies.sheet import show
from cxda_jax.training.evaluation import Evaluator
from cxda_jax.training.experiment import Experiment
from cxda_jax.types import Images, Variables

FIRST = slice(24)  # tasks of which attention.npz keeps the weights, and queries are asked without support too
GREEN, RED = "#00674b", "#b3261e"
VERDICTS = {  # by whether the answers without and with support images are right
    (False, True): "Corrected by adapting",
    (True, True): "Right with and without adapting",
    (True, False): "Spoiled by adapting",
    (False, False): "Wrong with and without adapting",
}


def with_examples(
    result: Result, experiment: Experiment, evaluator: Evaluator, variables: Variables, plan: Plan
) -> Result:
    """The result with the answers to the first tasks without support, and what is attended to, if the method attends.

    Attention weights are [tasks, queries, heads, support].
    """
    images, key = images_of(experiment), jax.random.key(0)
    unadapted = evaluator.adapt(variables, images(plan.support[0, :0]), key)
    before = np.stack([np.asarray(evaluator.predict(unadapted, images(rows))[0]) for rows in plan.query[FIRST]])
    result = dataclasses.replace(result, unadapted=before)
    corrected, spoiled = _changed(result)
    counted = int((result.stored()["labels"][FIRST] >= 0).sum())
    counts = {"compared": counted, "corrected": int(corrected.sum()), "spoiled": int(spoiled.sum())}
    if not evaluator.attention:
        return dataclasses.replace(result, **counts)
    domains, weights = experiment.store.row_domains(), []
    supports, queries = plan.support[FIRST], plan.query[FIRST]
    for support, query in zip(supports, queries, strict=True):
        adapted = evaluator.adapt(variables, images(support), key)
        weights.append(np.asarray(evaluator.attention(adapted, images(query)), np.float16))
    kept = {"weights": np.stack(weights), "support_domain": domains[supports], "query_domain": domains[queries]}
    return dataclasses.replace(result, **counts, arrays={**result.arrays, "attention": kept})


def _changed(result: Result) -> tuple[np.ndarray, np.ndarray]:
    """Whether adapting corrects each query of the first tasks, and whether it spoils it."""
    labels, after = (result.stored()[name][FIRST] for name in ("labels", "predictions"))
    was, now = result.unadapted == labels, after == labels
    return now & ~was, was & ~now


def example_place(result: Result) -> tuple[int, int]:
    """The task with most queries that adapting corrects, and the first of these.

    Where no query is corrected, those that are right count instead.
    """
    corrected, _ = _changed(result)
    labels, after = (result.stored()[name][FIRST] for name in ("labels", "predictions"))
    good = corrected if corrected.any() else after == labels
    task = int(good.sum(1).argmax())
    return task, int(good[task].argmax())


def images_of(experiment: Experiment) -> Callable[[np.ndarray], Images]:
    """The images of rows of the store."""
    store, domains = experiment.store, experiment.store.row_domains()
    return lambda rows: Images(jnp.asarray(store.images[rows]), jnp.asarray(domains[rows]))


def draw_example(path: Path, result: Result, store: DomainStore) -> None:
    """A query that adapting corrects, if there is one, and what it attends to; of a result that has examples."""
    assert result.unadapted is not None
    stored, domains, (task, query) = result.stored(), store.row_domains(), example_place(result)
    asked, support = stored["query"][task, query], stored["support"][task]
    before, label, after = (
        int(x[task, query]) for x in (result.unadapted, stored["labels"], stored["predictions"])
    )  # fmt: skip
    example = Example(
        store.images[asked], int(domains[asked]), label, before, after, store.images[support], domains[support],
        result.stored("attention")["weights"][task, query].mean(0, dtype=np.float32),
    )  # fmt: skip
    title = f"{result.method} on {store.info.name}, test task {task + 1}, query {query + 1}"
    counts = {"compared": result.compared, "corrected": result.corrected, "spoiled": result.spoiled}
    shown = example, counts, store.domain_names, store.info.class_names, title
    files.write_whole(path, lambda partial: draw_attention(partial, *shown))


class Example(NamedTuple):
    """One query and its task's support images, with pixels of 0..255 and numbers of classes and domains."""

    query: np.ndarray  # [h, w, c]
    domain: int
    label: int
    before: int  # the answers, as in Answers
    after: int
    support: np.ndarray  # [n, h, w, c]
    domains: np.ndarray  # [n]
    weights: np.ndarray  # [n]; they sum to 1


def draw_attention(
    path: Path, example: Example, counts: Mapping[str, Any], domain_names: Sequence[str], class_names: Sequence[str],
    title: str,
) -> None:  # fmt: skip
    """Writes a picture of a query, its two answers and the support images that it attends to most and least.

    Weights are shown as multiples of uniform attention. A star marks images of the query's own domain. The counts are
    of all queries of the test, from Answers.counts; the title says what was tested.
    """
    size = len(example.support)
    times, count = example.weights * size, min(5, size)
    order = np.argsort(-times, kind="stable")
    figure = Figure(figsize=(max(8, 1.6 * (count + 1) + 1), 5.8), layout="constrained")
    grid = figure.subplots(2, count + 1, squeeze=False, width_ratios=[1.4, *[1] * count])

    def show_image(axes: Axes, image: np.ndarray, domain: int, above: str) -> None:
        show(axes, image)
        axes.set_title(above, fontsize=10)
        axes.set_xlabel(f"{'* ' * (domain == example.domain)}{plain(domain_names[domain], 18, 3)}", fontsize=9)
        axes.set(xticks=[], yticks=[])

    for row, chosen in enumerate((order[:count], order[::-1][:count])):
        for axes, i in zip(grid[row][1:], chosen, strict=True):
            show_image(axes, example.support[i], int(example.domains[i]), f"{times[i]:.2f} x uniform")
        grid[row][1].set_ylabel(f"attended to {('most', 'least')[row]}", fontsize=11)
    label = plain(class_names[example.label], 16)
    show_image(grid[0][0], example.query, example.domain, f"query, shows '{label}'")
    axes = grid[1][0]
    axes.axis("off")
    look: dict[str, Any] = {"ha": "center", "va": "top", "transform": axes.transAxes}
    answers = {"answer without support images": example.before, f"answer with {size} of them": example.after}
    for top, (words, answer) in zip((0.92, 0.42), answers.items(), strict=True):
        mark, color = ("\u2713 right", GREEN) if answer == example.label else ("\u2717 wrong", RED)
        axes.text(0.5, top, words, fontsize=10, **look)
        axes.text(0.5, top - 0.11, f"'{plain(class_names[answer], 16)}'", fontsize=14, color=color, **look)
        # This font has both marks.
        axes.text(0.5, top - 0.25, mark, fontsize=12, color=color, family="DejaVu Sans", **look)
    verdict = VERDICTS[example.before == example.label, example.after == example.label]
    figure.suptitle(f"{verdict}: {plain(title, 50)}", fontsize=12)
    changed = f"corrected {counts['corrected']} and spoiled {counts['spoiled']}"
    legend = "* the query's own domain    2 x uniform: twice an equal share of the attention"
    told = f"Of {counts['compared']} queries, adapting to the support images {changed}.\n{legend}"
    figure.supxlabel(told, fontsize=11)
    figure.savefig(path, dpi=120)
