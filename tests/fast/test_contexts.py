"""Context curves: which images have arrived, how the curves are paired and measured, and what is shown."""

import itertools

import numpy as np
import pytest
import scipy.integrate
import scipy.stats

from cxda_jax.config.reading import read
from cxda_jax.data.episodes import Context, Draw, EpisodeSpec, sample_plans
from cxda_jax.studies.curves import AREA, differences, find_curves
from cxda_jax.studies.result import by_store
from cxda_jax.studies.statistics import paired_differences, shared_scores
from cxda_jax.training import metrics
from tests.results import make_result, write_result

SPEC = EpisodeSpec(num_domains=3, per_domain=4, num_query=5)
USUAL = 12  # support images
OFFSETS = np.cumsum([0, 30, 33, 40, 25, 0, 31])  # one domain that is not drawn is empty
DOMAINS = np.array([0, 1, 2, 5])
OWNER = np.repeat(np.arange(6), np.diff(OFFSETS))
SIZES = (0, 5, 100, 200)
CHANCES = {"bn": (0.60, 0.50, 0.64, 0.66), "cxda_loo": (0.58, 0.66, 0.72, 0.74)}
LABELS = np.random.default_rng(0).integers(0, 3, OFFSETS[-1])


def plans(size=None, order="mixed", tasks=range(40), spec=SPEC):
    draw = Draw(spec, OFFSETS, DOMAINS, 3, 2, LABELS)
    return sample_plans(draw, tasks, None if size is None else Context(size, order))


@pytest.mark.parametrize("order", ["mixed", "by_domain", "by_class"])
def test_a_context_is_the_beginning_of_every_larger_one_whose_rounds_are_new_images(order):
    usual, largest = plans(), plans(60, order)
    for size in (0, 1, 5, 11, 12, 13, 24, 59):
        plan = plans(size, order)
        assert plan.support.dtype == plan.query.dtype == np.int32
        np.testing.assert_array_equal(plan.support, largest.support[:, :size])
        np.testing.assert_array_equal(plan.query, usual.query)
    np.testing.assert_array_equal(np.sort(largest.support[:, :USUAL]), np.sort(usual.support))
    for support, query, first in zip(largest.support, usual.query, usual.support, strict=True):
        assert len({*support, *query}) == 60 + 5, "no image twice, and none among the queries"
        for round_of in support.reshape(5, USUAL):
            np.testing.assert_array_equal(np.sort(OWNER[round_of]), np.sort(OWNER[first]))
    other = plans(60, "by_class" if order == "mixed" else "mixed").support.reshape(-1, 5, USUAL)
    np.testing.assert_array_equal(np.sort(other), np.sort(largest.support.reshape(-1, 5, USUAL)))
    if order == "by_class":
        changes = (np.diff(LABELS[largest.support].reshape(-1, 5, USUAL)) != 0).sum(-1)
        assert changes.max() == 2, "three classes, one after the other"
        assert (np.bincount(LABELS[largest.support[:, 0]]) > 4).all(), "any class may come first"
    if order == "by_domain":  # in the order of the task
        np.testing.assert_array_equal(largest.support[:, :USUAL], usual.support)
        np.testing.assert_array_equal(OWNER[largest.support], np.tile(OWNER[usual.support], 5))
    np.testing.assert_array_equal(plans(60, order, [17]).support[0], largest.support[17])  # in whatever company


def test_mixed_images_come_in_uniform_order():
    usual, plan = (plans(size, tasks=range(1500)) for size in (None, 2))
    places = np.argmax(usual.support[:, :, None] == plan.support[:, None, :], axis=1)  # of the first two, in the plan
    pairs = np.bincount(places @ [USUAL, 1], minlength=USUAL**2).reshape(USUAL, USUAL)
    assert not np.diag(pairs).any()
    assert scipy.stats.chisquare(pairs[~np.eye(USUAL, dtype=bool)]).pvalue > 1e-9


def write(folder, method, size, chance, seed=0, noise=0, query=0, **row):
    """A result of 60 tasks, right with a given chance: the same draw for all, so they are alike."""
    rng = np.random.default_rng(seed)
    hits = rng.random((60, 5)) * 0.7 + np.random.default_rng((noise, size, seed)).random((60, 5)) * 0.3 < chance
    queries, support = query + np.arange(300).reshape(60, 5), np.full((60, size), size)
    config, setting = read("glyphs:cxda"), f"context={size}"
    made = make_result(method, seed, "glyphs", setting, config=config, steps=9, reached_step=9, **row)
    target = folder / made.label / str(seed)
    return write_result(made, target, np.zeros_like(hits, int), 1 - hits.astype(int), support, queries)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Results of three methods in contexts of four sizes, two seeds each, as evaluations leave them."""
    folder, results = tmp_path_factory.mktemp("contexts"), []
    for seed in (0, 1):
        results.append(write(folder, "erm_iid", 0, 0.62, seed, noise=7, uses_support=False))
        for noise, (method, chances) in enumerate(CHANCES.items()):
            for size, chance in zip(SIZES, chances, strict=True):
                results.append(write(folder, method, size, chance, seed, noise, uses_support=True))
    return by_store(results)["glyphs"]


def levels(study, label, score="avg"):
    """By size, the scores of both seeds."""
    found = [r for r in study if r.variant == label]
    return {r.setting.number: [getattr(o, score) for o in found if o.setting == r.setting] for r in found}


def test_the_worst_tenth_of_bootstrap_samples_is_that_of_repeated_tasks():
    scores = np.random.default_rng(0).integers(0, 6, (3, 47)) / 5
    found = metrics.bootstrap_worst_decile(scores, 200)
    assert found.shape == (3, 200)
    counts = np.random.default_rng(0).multinomial(47, np.full(47, 1 / 47), 100)  # the first hundred samples
    for row, drawn in zip(scores, found, strict=True):
        expected = [metrics.worst_decile(np.repeat(row, times)) for times in counts]
        np.testing.assert_allclose(drawn[:100], expected, atol=1e-12)


def test_differences_are_those_of_any_paired_results_and_of_scipys_bootstrap(study):
    curves = find_curves(study, "context")
    shared, faults = shared_scores([r for curve in curves for r in curve.results()])
    assert not faults
    for against, base in (("", "{},context=0"), ("erm_iid", "erm_iid,context=0")):
        found = differences(curves, shared, against)
        assert set(found) == {(m, n) for m in CHANCES for n in (*SIZES, AREA) if n or against}
        for (label, size), d in ((key, d) for key, d in found.items() if key[1] != AREA):
            pair = f"{label},context={size}", base.format(label)
            theirs = paired_differences([r for r in study if r.label in pair], pair[1])[0][pair]
            np.testing.assert_allclose(d.avg, theirs.avg, atol=1e-9)
            assert d.of_seeds == theirs.of_seeds and d.seeds == (0, 1)
    for label, score in itertools.product(CHANCES, ("avg", "w10")):  # what uses no support is alike at all sizes
        d, of_sizes = getattr(found[label, AREA], score), [np.mean(levels(study, label, score)[n]) for n in (0, 5, 100)]
        area = scipy.integrate.trapezoid(of_sizes, np.log1p([0, 5, 100])) / np.log(101)
        assert d.mean == pytest.approx(area - np.mean(levels(study, "erm_iid", score)[0])) and d.low < d.mean < d.high
    hits = [shared[f"{m},context=0", s] for m in ("cxda_loo", "erm_iid") for s in (0, 1)]

    def statistic(*scores, axis):
        of = [np.sort(each, axis=axis)[..., :6].mean(axis) for each in scores]
        return 50 * (of[0] + of[1] - of[2] - of[3])

    theirs = scipy.stats.bootstrap(hits, statistic, paired=True, method="percentile", n_resamples=4000, rng=0)
    ours, points = found["cxda_loo", 0].w10, [np.mean(levels(study, m, "w10")[0]) for m in ("cxda_loo", "erm_iid")]
    assert ours.mean == pytest.approx(points[0] - points[1])
    np.testing.assert_allclose((ours.low, ours.high), theirs.confidence_interval, atol=1.0)  # in steps of 0.33
