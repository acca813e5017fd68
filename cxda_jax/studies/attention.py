"""Attention weights that evaluations kept: they are read, drawn, and made into tasks for the page's explorer."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from cxda_jax.data.store import DomainStore
from cxda_jax.disk.folders import current
from cxda_jax.disk.reading import reason
from cxda_jax.errors import UserError, printable
from cxda_jax.methods.entry import BLUE, RED, Style
from cxda_jax.pages import figures
from cxda_jax.pages.page import ExplorerTask
from cxda_jax.studies.plots import Drawing
from cxda_jax.studies.result import Identity, Result
from cxda_jax.studies.settings import USUAL
from cxda_jax.studies.tables import by_cell
from cxda_jax.training.experiment import open_data


class KeptAttention(NamedTuple):
    """The attention that a result has kept, and the images that it was tested on."""

    result: Result
    store: DomainStore
    weights: np.ndarray  # [tasks, queries, heads, support]; over the support images they sum to 1, or to less
    support_domain: np.ndarray  # [tasks, support]
    query_domain: np.ndarray  # [tasks, queries]

    def __str__(self) -> str:
        return f"{self.result.label}, seed {self.result.seed}"


def kept_attention(results: Sequence[Result], data_dir: str) -> tuple[list[KeptAttention], list[str]]:
    """The kept attention of the first seed of each method of one store, and a fault for each that cannot be shown."""
    kept, faults = [], []
    for seeds in by_cell(r for r in results if r.setting == USUAL).values():
        first = seeds[0]
        if not (current(first.folder) / "attention.npz").exists():
            continue
        try:
            arrays, store = first.stored("attention"), open_data(first.config, data_dir)
            if store.sha256 != first.data_hash:
                raise UserError(f"the data in --data_dir={data_dir} is not what it was tested on")
            kept.append(_checked(KeptAttention(first, store, **arrays)))
        except Exception as e:  # files and configs from elsewhere may raise anything
            faults.append(f"{first.folder}: no attention shown ({e if isinstance(e, UserError) else reason(e)})")
    return kept, faults


def _checked(kept: KeptAttention) -> KeptAttention:
    """Gives it back. Raises a UserError where its arrays do not fit each other or the data."""
    shape, stored, data = kept.weights.shape, kept.result.stored(), kept.store
    shapes = kept.support_domain.shape, stored["support"].shape[1:], kept.query_domain.shape, stored["query"].shape[1:]
    fits = shapes == (shape[::3], shape[3:], shape[:2], shape[1:2]) and shape[0] <= len(stored["query"])
    if not fits or not kept.weights.size:
        raise UserError(f"attention.npz: weights {shape} do not fit their domains or predictions.npz; evaluate again")
    if not np.isfinite(kept.weights).all():
        raise UserError(f"attention.npz: weights {shape} that are not all finite; evaluate again")
    images, classes, domains = len(data.labels), data.num_classes, len(data.domain_names)
    for name, numbers, least, end in (
        ("support domains", kept.support_domain, 0, domains), ("query domains", kept.query_domain, 0, domains),
        ("support", stored["support"], 0, images), ("query", stored["query"], 0, images),
        ("predictions", stored["predictions"], 0, classes),
        ("labels", stored["labels"], -1, classes),  # -1: the query does not count
    ):  # fmt: skip
        if numbers.dtype.kind not in "iu" or not ((numbers >= least) & (numbers < end)).all():
            raise UserError(f"{name} outside 0..{end - 1}, which the data hold; evaluate again")
    return kept


def explorer_tasks(kept: KeptAttention, results: Sequence[Result], count: int) -> list[ExplorerTask]:
    """The first `count` tasks, with the answers of all methods of the same store and seed that were tested on them."""
    result, store, stored = kept.result, kept.store, kept.result.stored()
    domains, classes = (tuple(map(printable, names)) for names in (store.domain_names, store.info.class_names))
    answers = {}
    for other in (r for seeds in by_cell(results).values() for r in seeds):
        unchanged = other.identity == Identity(other.method) and other.seed == result.seed
        if unchanged and (current(other.folder) / "predictions.npz").is_file():
            theirs = other.stored()
            if np.array_equal(theirs["query"][:count], stored["query"][:count]):
                answers[other.label] = theirs["predictions"]

    def words(numbers: np.ndarray) -> tuple[str, ...]:
        return tuple(classes[i] if 0 <= i < len(classes) else f"{i}, no class" for i in numbers.astype(int))

    tasks = []
    for task, weights in enumerate(kept.weights[:count]):
        counts = stored["labels"][task] >= 0
        support, query = stored["support"][task], stored["query"][task][counts]
        tasks.append(ExplorerTask(
            f"{result.store}: task {task + 1} ({kept})",
            store.images[support], tuple(domains[d] for d in kept.support_domain[task]), words(store.labels[support]),
            store.images[query], domains[kept.query_domain[task, 0]], words(stored["labels"][task][counts]),
            {label: words(predictions[task][counts]) for label, predictions in answers.items()}, weights[counts],
        ))  # fmt: skip
    return tasks


def drawings(kept: Sequence[KeptAttention]) -> Iterator[Drawing]:
    """A histogram for each method."""
    for attention in kept:
        label = attention.result.label
        times = attention.weights.mean(2, dtype=np.float32) * attention.weights.shape[-1]  # multiples of uniform
        own = attention.query_domain[:, :, None] == attention.support_domain[:, None, :]  # [tasks, queries, support]
        if not times[~own].any():
            continue  # all weight lies on the own domain: there is nothing to compare
        caption = (
            f"{attention}; {len(times)} tasks. Densities of attention weights on support images of the query's own "
            "domain and of others, averaged over heads."
        )
        figure = histogram(times[own], times[~own])
        yield Drawing(f"attention_{label}", f"attention of {label}", caption, figure)


def histogram(same: np.ndarray, other: np.ndarray) -> Figure:
    """Densities of weights [n] on support images of the query's own domain and of other domains; medians marked.

    Weights are multiples of uniform attention. Both axes are logarithmic, since the two differ in their tails. Weights
    below a thousandth are drawn as a thousandth.
    """
    both = np.concatenate([same, other])
    low, high = max(1e-3, both.min()), max(1e-3, both.max())
    edges = np.geomspace(low / 1.01, high * 1.01, 41)
    kinds = {"own domain": Style(BLUE, "o"), "other domains": Style(RED, "^", (3, 1.5))}
    figure, medians = figures.above_legend(kinds), []
    axes = figure.subplots()
    for part, style in zip((same, other), kinds.values(), strict=True):
        if not len(part):
            continue
        medians.append(f"{np.median(part):.2f}")
        median = max(low, float(np.median(part)))
        density = np.histogram(np.log10(np.clip(part, low, None)), np.log10(edges), density=True)[0]
        axes.stairs(density, edges, color=style.color, linestyle=style.arguments()["linestyle"], lw=1.3)
        axes.axvline(median, **style.arguments(lw=0.8, marker=""))
        axes.plot([median], density[[np.searchsorted(edges, median) - 1]], **style.arguments(mec="white"))
    figures.finish_axes(axes, f"medians {', '.join(medians)}", "weight / uniform", "density per decade")
    axes.set(xscale="log", yscale="log")
    figures.round_ticks(axes)
    return figure
