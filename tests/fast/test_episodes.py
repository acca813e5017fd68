"""Plans are a pure function of seed, stream and task, uniform and distinct. Sources give the bytes of a plan's rows."""

import functools
import itertools

import jax
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from cxda_jax.config.reading import read, replaced
from cxda_jax.data.episodes import Context, Draw, EpisodeSpec, _seat, check_spec, mixed_spec, sample_plans
from cxda_jax.data.sources import device_source, tfdata_source
from cxda_jax.data.store import SPLITS, DomainStore
from cxda_jax.errors import UserError
from cxda_jax.machine import mesh
from cxda_jax.training.experiment import build_on
from tests.conftest import INFO
from tests.lines import one_line

SPEC = EpisodeSpec(num_domains=3, per_domain=5, num_query=7)
MIXED = mixed_spec(SPEC)
SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def split_stores(draw):
    """A store as far as plans see it: domains of any size, in any order of the splits."""
    sizes = draw(st.lists(st.integers(0, 12), min_size=1, max_size=9))
    splits = draw(st.lists(st.sampled_from(SPLITS), min_size=len(sizes), max_size=len(sizes)))
    images, labels = np.zeros((sum(sizes), 1, 1, 1), np.uint8), np.zeros(sum(sizes), np.int32)
    names = tuple(f"d{i}" for i in range(len(sizes)))
    return DomainStore(INFO, images, labels, np.cumsum([0, *sizes]), tuple(splits), names, "")


COUNTS = [st.integers(0, 4)] * 3
MIXTURES = st.sampled_from(["even", "any"])
SPECS = st.builds(
    EpisodeSpec, *COUNTS, st.booleans(), st.just(False), st.just("natural"), st.just(0.3), MIXTURES, st.booleans()
)
OF_THREE = SPECS.filter(lambda spec: fits(spec, [8] * 3))
SIZES = st.lists(st.integers(8, 12), min_size=3, max_size=6)
TASKS = st.lists(st.integers(0, 2**40), min_size=1, max_size=8)


def fits(spec, sizes):
    """Whether domains of these sizes hold such tasks."""
    if spec.mixed:
        return 1 <= spec.num_query <= sum(sizes)
    need = 1 if spec.replacement else spec.per_domain + spec.num_query
    if spec.skip_small:
        sizes = [size for size in sizes if size >= need] or [0]
    return min(spec[:3]) >= 1 and len(sizes) >= spec.num_domains and min(sizes) >= need


@settings(max_examples=150)
@given(split_stores(), SPECS, st.booleans(), st.sampled_from(SPLITS), SEEDS, st.integers(0, 2**40))
def test_a_plan_is_what_its_spec_says_or_the_spec_is_refused(store, spec, mixed, split, seed, first):
    if mixed:
        images = spec.num_domains * spec.per_domain + spec.num_query
        spec = mixed_spec(spec)
        assert spec.num_query == images
    domains, owner = store.domains(split), store.row_domains()
    sizes = np.diff(store.offsets)[domains]
    if not fits(spec, sizes):
        with pytest.raises(UserError) as refused:
            check_spec(spec, store, split)
        one_line(refused.value)
        return
    check_spec(spec, store, split)
    plan = sample_plans(Draw(spec, store.offsets, domains, seed), range(first, first + 3))
    assert plan.support.dtype == plan.query.dtype == np.int32
    assert plan.support.shape == (3, spec.num_domains * spec.per_domain) and plan.query.shape == (3, spec.num_query)
    for support, query in zip(*plan, strict=True):
        used = np.concatenate([support, query])
        assert np.isin(owner[used], domains).all() and (used >= 0).all()
        if not spec.replacement or spec.mixed:
            assert len(set(used)) == len(used)
        if spec.mixture == "any" and not spec.mixed:
            assert len(set(owner[query])) == 1 and len(set(owner[support])) <= spec.num_domains
            assert np.count_nonzero(np.diff(owner[support])) == len(set(owner[support])) - 1, "domain after domain"
        elif not spec.mixed:
            blocks = owner[support].reshape(spec.num_domains, spec.per_domain)
            assert (blocks == blocks[:, :1]).all() and len(set(blocks[:, 0])) == spec.num_domains
            assert len(set(owner[query])) == 1 and owner[query[0]] in blocks[:, 0]


@settings(max_examples=40)
@given(SIZES, OF_THREE, st.booleans(), SEEDS, TASKS)
def test_a_task_is_the_same_in_whatever_company(sizes, spec, mixed, seed, tasks):
    offsets, domains = np.cumsum([0, *sizes]), np.arange(len(sizes))
    if mixed:
        spec = mixed_spec(spec)._replace(num_query=min(mixed_spec(spec).num_query, sum(sizes)))
    together = sample_plans(Draw(spec, offsets, domains, seed), tasks)
    for i, task in enumerate(tasks):
        first = (task // 2) * 2
        beside = sample_plans(Draw(spec, offsets, domains, seed), range(first, first + 2))
        for found, expected in zip(beside, together, strict=True):
            np.testing.assert_array_equal(found[task - first], expected[i])


@pytest.mark.parametrize("replacement", [False, True])
def test_every_draw_is_uniform(replacement):
    """One draw of each task, so that draws are independent: domain, pair of domains, query's place, row, two rows."""
    sizes, count = np.array([6, 9, 6, 12]), 6000
    spec = EpisodeSpec(num_domains=2, per_domain=2, num_query=2, replacement=replacement)
    offsets, domains = np.cumsum([0, *sizes]), np.array([0, 2, 3])
    plan = sample_plans(Draw(spec, offsets, domains, 11), range(count))
    owner = np.repeat(np.arange(4), sizes)
    pairs = owner[plan.support[:, [0, 2]]]
    place = (pairs[:, 1] == owner[plan.query[:, 0]]).astype(int)

    def compare(drawn, chances):
        """`drawn` are numbers of outcomes, `chances` the probabilities of all outcomes."""
        observed, expected = np.bincount(drawn, minlength=len(chances)), np.array(chances) * count
        assert not observed[expected == 0].any()
        used = expected > 0
        assert scipy.stats.chisquare(observed[used], expected[used]).pvalue > 1e-9  # how often it fails by chance

    of_row = np.where(np.isin(owner, domains), 1 / (len(domains) * sizes[owner]), 0)
    compare(pairs @ [4, 1], [1 / 6 * (a != b and {a, b} <= {0, 2, 3}) for a in range(4) for b in range(4)])
    compare(place, [0.5, 0.5])
    for rows in (plan.support[:, 0], plan.support[:, 3], plan.query[:, 0], plan.query[:, 1]):
        compare(rows, of_row)
    # An image of the support and one of the query, where they are of one domain.
    rows, both = len(owner), np.where(place, plan.support[:, 2], plan.support[:, 0])
    chances = np.zeros((rows, rows))
    for d in domains:
        inside = slice(offsets[d], offsets[d + 1])
        chances[inside, inside] = 1 / (3 * sizes[d] ** 2) if replacement else 1 / (3 * sizes[d] * (sizes[d] - 1))
    if not replacement:
        np.fill_diagonal(chances, 0)
    compare(both * rows + plan.query[:, 1], chances.ravel())
    mixed = sample_plans(Draw(mixed_spec(spec), offsets, domains, 12), range(count)).query
    for rows in (mixed[:, 0], mixed[:, -1]):
        compare(rows, np.isin(owner, domains) / sizes[domains].sum())


def test_a_generator_that_drew_before_is_set_to_the_place_of_a_new_one():
    used = np.random.Generator(np.random.Philox(5))
    used.integers(10, size=3, dtype=np.uint32)  # half of its last number is kept
    _seat(used, 2**31 - 1, 7, 3, use=9)
    new = np.random.Generator(np.random.Philox(key=[2**31 - 1, 7], counter=[0, 0, 9, 3]))
    for rng in (used, new):
        rng.integers(10, size=3, dtype=np.uint32)
    np.testing.assert_array_equal(used.gumbel(size=9), new.gumbel(size=9))


def test_seeds_and_the_streams_of_one_seed_are_unrelated():
    """Over the same domains, so that equal draws would give equal tasks."""
    pairs = [(0, stream) for stream in range(5)] + [(1, 0)]  # seed and stream
    drawn = [sample_plans(Draw(SPEC, np.arange(11) * 50, np.arange(10), *pair), range(500)) for pair in pairs]
    for one, other in itertools.combinations([plan.support for plan in drawn], 2):
        assert not (one == other).all(1).any()
        alike = (one[:, ::5] // 50 == other[:, ::5] // 50).mean()  # each place holds each of ten domains alike often
        assert abs(alike - 0.1) < 5 * np.sqrt(0.09 / 1500)


def test_training_validation_test_and_calibration_draw_from_streams_of_their_own(fixed_store):
    """At equal seeds and over domains of equal sizes, where task n was the same draw for all of them."""
    episode = dict(zip(SPEC._fields[:3], SPEC[:3], strict=True))
    config = replaced(read("glyphs:erm,smoke"), episode=episode, seed=3, evaluation={"seed": 3})
    experiment = build_on(config, fixed_store)
    plans = {split: experiment.task_plans(split)(range(20)) for split in ("train", "val", "test")}
    draws = [plans[split].support - first for split, first in (("train", 0), ("val", 90), ("test", 180))]
    draws.append(np.concatenate([experiment.train_plans(step).support for step in range(20)]))
    for one, other in itertools.combinations(draws, 2):
        assert ((one >= 0) & (one < 90)).all() and not (one == other).all(1).any()
    usual = sample_plans(Draw(MIXED._replace(num_query=90), fixed_store.offsets, fixed_store.domains("train"), 3), [0])
    assert not np.array_equal(experiment.known_images().images, fixed_store.images[usual.query[0]])
    other = build_on(replaced(config, seed=4), fixed_store)  # another training, tested on the same tasks
    for split, plan in plans.items():
        jax.tree.map(np.testing.assert_array_equal, other.task_plans(split)(range(20)), plan)
    assert not np.array_equal(other.train_plans(0).support, experiment.train_plans(0).support)


SKEWED_COUNTS = np.array([400, 200, 150, 250])
SKEWED = np.repeat(np.arange(4), SKEWED_COUNTS)  # labels of a domain
SHARED = EpisodeSpec(2, 3, 3)


def of_shares(shares, concentration=0.3, tasks=range(2000), context=None):
    """The plans on three such domains, and the classes of their images."""
    labels = np.tile(SKEWED, 3)
    spec = SHARED._replace(shares=shares, concentration=concentration)
    plan = sample_plans(Draw(spec, np.arange(4) * 1000, np.arange(3), 5, 2, labels), tasks, context)
    return plan, labels[plan.support], labels[plan.query]


@pytest.mark.parametrize("shares, concentration", [("even", 0.3), ("dirichlet", 0.3), ("dirichlet", 3.0)])
def test_shares_are_those_of_their_distribution_in_support_and_query_alike(shares, concentration):
    """Two images are of one class with the probability 1 / k, or (a + 1) / (k a + 1) for Dirichlet's concentration a."""
    plan, support, query = of_shares(shares, concentration)
    assert len({*plan.support[0], *plan.query[0]}) == 9
    for classes in (support[:, 0], support[:, 5], query[:, 1]):
        assert scipy.stats.chisquare(np.bincount(classes, minlength=4)).pvalue > 1e-3, "all classes are alike"
    alike = 1 / 4 if shares == "even" else (concentration + 1) / (4 * concentration + 1)
    own = plan.query[:, :1] // 1000 == plan.support[:, :1] // 1000
    pairs = {
        "in the support": support[:, 0] == support[:, 2],
        "with the query": np.where(own, support[:, :3], support[:, 3:])[:, 0] == query[:, 0],
    }
    for what, same in pairs.items():
        assert scipy.stats.binomtest(int(same.sum()), len(same), alike).pvalue > 1e-3, what
    other = support[:, 0] == support[:, 3]
    assert scipy.stats.binomtest(int(other.sum()), len(other), 1 / 4).pvalue > 1e-3, "domains draw by themselves"


def test_a_device_keeps_its_shares_however_many_images_arrive():
    usual = of_shares("any")[0]
    sizes = {n: of_shares("any", context=Context(n))[0] for n in (2, 6, 60)}
    for n, plan in sizes.items():
        np.testing.assert_array_equal(plan.query, usual.query)
        np.testing.assert_array_equal(plan.support[:, : min(n, 6)], sizes[60].support[:, : min(n, 6)])
        assert all(len({*s, *q}) == n + 3 for s, q in zip(*plan, strict=True))
    labels = np.tile(SKEWED, 3)[sizes[60].support]
    first, last = (np.eye(4)[part].mean(1) for part in (labels[:, :6], labels[:, 6:]))
    assert (first.argmax(1) == last.argmax(1)).mean() > 0.5, "the class that leads goes on to lead"


def test_the_parts_of_a_mixture_are_uniform_and_queries_come_in_their_proportion():
    """With k domains, one to three alike: an image and another one, or a query, are of one domain with 2 / (k + 1)."""
    spec, tasks, grown = EpisodeSpec(3, 4, 3, mixture="any"), range(3000), range(50)
    draw = Draw(spec, np.arange(6) * 100, np.arange(5), 5, 2)
    plan = sample_plans(draw, tasks)
    support, query = np.sort(plan.support // 100), plan.query[:, 0] // 100
    assert scipy.stats.chisquare(np.bincount(query, minlength=5)).pvalue > 1e-3
    picked = np.random.default_rng(0).permuted(plan.support // 100, axis=1)
    alike = np.mean([2 / (k + 1) for k in (1, 2, 3)])
    for what, same in {"images": picked[:, 0] == picked[:, 1], "query": picked[:, 2] == query}.items():
        assert scipy.stats.binomtest(int(same.sum()), len(same), alike).pvalue > 1e-3, what
    one = (support[:, :1] == support).all(1).mean()  # k = 1, or parts that gave all twelve to one domain
    assert abs(one - (1 + 2 / 13 + 3 / 91) / 3) < 0.04
    larger = sample_plans(draw, grown, Context(36))
    for images, first in zip(larger.support, plan.support[: len(grown)], strict=True):
        rounds = np.sort(images.reshape(3, 12) // 100)
        assert (rounds == np.sort(first // 100)).all() and len(set(images)) == 36


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SPEC, MIXED])
def test_both_sources_give_the_bytes_of_the_planned_rows(fixed_store, spec, monkeypatch):
    pytest.importorskip("tensorflow")
    many, owner = fixed_store, fixed_store.row_domains()

    def plan_of(step):
        return sample_plans(Draw(spec, many.offsets, many.domains("train"), 0), range(6 * step, 6 * step + 6))

    device, stream = device_source(many), tfdata_source(many)
    assemble = jax.jit(device.assemble)
    whole = [*stream.own_batches(plan_of, 3, 6)]
    for plan, batch, step in zip(device.batches(plan_of, 3, 6), whole, (3, 4, 5), strict=True):
        jax.tree.map(np.testing.assert_array_equal, plan, plan_of(step))
        ours, theirs = assemble(device.resident, plan), stream.assemble((), batch)
        parts = (ours.support, ours.support_label), (ours.query, ours.label)
        for (images, label), rows in zip(parts, plan, strict=True):
            for array, column in ((images.pixels, many.images), (images.domain, owner), (label, many.labels)):
                np.testing.assert_array_equal(array, column[rows])
        jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), ours, theirs)
    (stacked,) = mesh.step_arguments(None, whole, lambda: False)
    np.testing.assert_array_equal(stacked.label, np.stack([episode.label for episode in whole]))
    on_a_mesh, parts = stream._replace(mesh="of all processes"), []
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    for which in range(3):
        monkeypatch.setattr(jax, "process_index", lambda which=which: which)
        parts.append([*on_a_mesh.own_batches(plan_of, 3, 6)])
    for episode, *of_step in zip(whole, *parts, strict=True):
        assert all(len(part.label) == 2 for part in of_step)
        together = jax.tree.map(lambda *arrays: np.concatenate(arrays), *of_step)
        jax.tree.map(np.testing.assert_array_equal, episode, together)
