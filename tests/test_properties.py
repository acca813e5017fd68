"""What holds for all inputs: plans, metrics, augmentation and ranges of fields."""

import functools
import math
import re
import tempfile
from pathlib import Path

import hypothesis.extra.numpy as hnp
import jax
import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from cxda_jax import augment, metrics
from cxda_jax.config import check
from cxda_jax.data.episodes import EpisodeSpec, check_spec, mixed_spec, sample_plans
from cxda_jax.data.sources import device_source, tfdata_source
from cxda_jax.data.store import SPLITS, Domain, DomainStore, open_store, write_store
from cxda_jax.errors import UserError
from cxda_jax.fields import FIELDS, Group
from tests.conftest import INFO
from tests.lines import one_line

# For tests whose examples take long: a failing example is not made smaller.
NOT_SHRUNK = (Phase.explicit, Phase.generate)
FALSE_ALARM = 1e-9  # the probability that a chi-square test below fails by chance
SEEDS = st.integers(0, 2**32 - 1)


# Plans


@st.composite
def split_stores(draw):
    """A store as far as plans see it: domains of any size, in any order of the splits."""
    sizes = draw(st.lists(st.integers(0, 12), min_size=1, max_size=9))
    splits = draw(st.lists(st.sampled_from(SPLITS), min_size=len(sizes), max_size=len(sizes)))
    rows = sum(sizes)
    images, labels = np.zeros((rows, 1, 1, 1), np.uint8), np.zeros(rows, np.int32)
    names = tuple(f"d{i}" for i in range(len(sizes)))
    return DomainStore(INFO, images, labels, np.cumsum([0, *sizes]), tuple(splits), names, "")


SPECS = st.builds(EpisodeSpec, st.integers(0, 4), st.integers(0, 4), st.integers(0, 4), st.booleans(), st.just(False))


def fits(spec, sizes):
    """Whether domains of these sizes hold such tasks."""
    if spec.mixed:
        return 1 <= spec.num_query <= sum(sizes)
    need = 1 if spec.replacement else spec.per_domain + spec.num_query
    return min(spec[:3]) >= 1 and len(sizes) >= spec.num_domains and min(sizes) >= need


@settings(max_examples=300)
@given(split_stores(), SPECS, st.booleans(), st.sampled_from(SPLITS), SEEDS, st.integers(0, 2**40))
def test_a_plan_is_what_its_spec_says_or_the_spec_is_refused(store, spec, mixed, split, seed, first):
    spec = mixed_spec(spec) if mixed else spec
    domains, owner = store.domains(split), store.row_domains()
    sizes = np.diff(store.offsets)[domains]
    if not fits(spec, sizes):
        with pytest.raises(UserError) as refused:
            check_spec(spec, store, split)
        one_line(refused.value)
        return
    check_spec(spec, store, split)
    plan = sample_plans(spec, store.offsets, domains, seed, range(first, first + 3))
    assert plan.support.dtype == plan.query.dtype == np.int32
    assert plan.support.shape == (3, spec.num_domains * spec.per_domain) and plan.query.shape == (3, spec.num_query)
    for support, query in zip(*plan, strict=True):
        used = np.concatenate([support, query])
        assert np.isin(owner[used], domains).all() and (used >= 0).all()
        if not spec.replacement or spec.mixed:
            assert len(set(used)) == len(used)
        if not spec.mixed:
            blocks = owner[support].reshape(spec.num_domains, spec.per_domain)
            assert (blocks == blocks[:, :1]).all() and len(set(blocks[:, 0])) == spec.num_domains
            assert len(set(owner[query])) == 1 and owner[query[0]] in blocks[:, 0]


@given(
    st.lists(st.integers(8, 12), min_size=3, max_size=6),
    SPECS.filter(lambda spec: min(spec[:3]) >= 1 and spec.num_domains <= 3),
    st.booleans(),
    SEEDS,
    st.lists(st.integers(0, 2**40), min_size=1, max_size=8),
)
def test_a_task_is_the_same_in_whatever_company(sizes, spec, mixed, seed, tasks):
    offsets, domains = np.cumsum([0, *sizes]), np.arange(len(sizes))
    if mixed:
        spec = mixed_spec(spec)._replace(num_query=min(mixed_spec(spec).num_query, sum(sizes)))
    together = sample_plans(spec, offsets, domains, seed, tasks)
    for i, task in enumerate(tasks):
        first = (task // 2) * 2
        beside = sample_plans(spec, offsets, domains, seed, range(first, first + 2))
        for found, expected in zip(beside, together, strict=True):
            np.testing.assert_array_equal(found[task - first], expected[i])


@pytest.mark.parametrize("replacement", [False, True])
def test_every_draw_is_uniform(replacement):
    """One draw of each task, so that the draws are independent: domain, pair of domains, query's place, row, two rows."""
    scipy = pytest.importorskip("scipy.stats")
    sizes, count = np.array([6, 9, 6, 12]), 6000
    spec = EpisodeSpec(num_domains=2, per_domain=2, num_query=2, replacement=replacement)
    offsets, domains = np.cumsum([0, *sizes]), np.array([0, 2, 3])
    plan = sample_plans(spec, offsets, domains, 11, range(count))
    owner = np.repeat(np.arange(4), sizes)
    pairs = owner[plan.support[:, [0, 2]]]
    place = (pairs[:, 1] == owner[plan.query[:, 0]]).astype(int)

    def compare(drawn, chances):
        """`drawn` are numbers of outcomes, `chances` the probabilities of all outcomes."""
        observed = np.bincount(drawn, minlength=len(chances))
        expected = np.array(chances) * count
        assert not observed[expected == 0].any()
        used = expected > 0
        assert scipy.chisquare(observed[used], expected[used]).pvalue > FALSE_ALARM

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
    mixed = sample_plans(mixed_spec(spec), offsets, domains, 12, range(count)).query
    for rows in (mixed[:, 0], mixed[:, -1]):
        compare(rows, np.isin(owner, domains) / sizes[domains].sum())


@settings(max_examples=6, phases=NOT_SHRUNK)
@given(
    st.lists(st.integers(4, 9), min_size=2, max_size=4), st.sampled_from([(3, 2, 1), (2, 5, 3)]), st.integers(1, 2),
    st.booleans(), SEEDS,
)  # fmt: skip
def test_both_sources_give_equal_bytes(sizes, shape, num_domains, mixed, seed):
    pytest.importorskip("tensorflow")
    spec = EpisodeSpec(num_domains, per_domain=2, num_query=2)
    spec = mixed_spec(spec) if mixed else spec
    rng = np.random.default_rng(seed)
    domains = [Domain(f"d{i}", "train", *drawn_rows(rng, n, shape)) for i, n in enumerate(sizes)]
    with tempfile.TemporaryDirectory() as folder:
        write_store(Path(folder) / "store", info_of(domains), domains)
        store = open_store(Path(folder) / "store")

        def plan_of(step):
            return sample_plans(spec, store.offsets, store.domains("train"), seed, range(2 * step, 2 * step + 2))

        device, stream = device_source(store), tfdata_source(store)
        for plan, batch in zip(device.batches(plan_of, 0, 3), stream.batches(plan_of, 0, 3), strict=True):
            ours, theirs = device.assemble(device.resident, plan), stream.assemble((), batch)
            owner = store.row_domains()
            parts = (ours.support, ours.support_label), (ours.query, ours.label)
            for (images, label), rows in zip(parts, plan, strict=True):
                for array, column in ((images.pixels, store.images), (images.domain, owner), (label, store.labels)):
                    np.testing.assert_array_equal(array, column[rows])
            jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), ours, theirs)


def drawn_rows(rng, count, shape):
    return rng.integers(0, 256, (count, *shape), np.uint8), rng.integers(0, len(INFO.class_names), count)


def info_of(domains):
    """The least that a store of these must say of itself."""
    channels = domains[0].images.shape[-1]
    return INFO._replace(mean=(0.5,) * channels, std=(0.5,) * channels)


# Metrics

ANSWERS = st.tuples(st.integers(1, 6), st.integers(1, 40)).flatmap(
    lambda drawn: hnp.arrays(np.int32, (2, drawn[1]), elements=st.integers(0, drawn[0]))
)
SCORES = hnp.arrays(float, st.integers(1, 60), elements=st.floats(0, 1))


@settings(max_examples=200)
@given(ANSWERS, SEEDS)
def test_scores_equal_scikit_learns_and_ignore_the_order_of_queries(answers, seed):
    sklearn = pytest.importorskip("sklearn.metrics")
    predictions, labels = answers
    theirs = {
        "accuracy": sklearn.accuracy_score(labels, predictions),
        "macro_f1": sklearn.f1_score(labels, predictions, labels=np.unique(labels), average="macro", zero_division=0),
        "macro_f1_union": sklearn.f1_score(labels, predictions, average="macro", zero_division=0),
    }
    order = np.random.default_rng(seed).permutation(len(labels))
    for name, score in metrics.METRICS.items():
        found = score(predictions, labels)
        assert found == pytest.approx(theirs[name], abs=1e-12) and 0 <= found <= 1
        assert score(predictions[order], labels[order]) == pytest.approx(found, abs=1e-12)
        assert score(labels, labels) == 1
        np.testing.assert_array_equal(metrics.scores(name, predictions[None], labels[None]), [found])


@settings(max_examples=200)
@given(SCORES, SEEDS)
def test_the_worst_decile_is_the_mean_of_the_lowest_tenth(scores, seed):
    count = max(1, math.floor(len(scores) / 10))
    found = metrics.worst_decile(scores)
    assert found == pytest.approx(np.partition(scores, count - 1)[:count].mean(), abs=1e-12)
    assert metrics.worst_decile(np.random.default_rng(seed).permutation(scores)) == found


@settings(max_examples=200)
@given(hnp.arrays(float, st.integers(1, 30), elements=st.floats(-1e6, 1e6)))
def test_mean_and_standard_error_equal_scipys(values):
    scipy = pytest.importorskip("scipy.stats")
    mean, error = metrics.mean_sem(values)
    assert mean == pytest.approx(math.fsum(values) / len(values), rel=1e-9, abs=1e-6)
    assert error == pytest.approx(scipy.sem(values) if len(values) > 1 else math.nan, rel=1e-9, abs=1e-6, nan_ok=True)
    np.testing.assert_equal(metrics.mean_sem(list(values)), (mean, error))
    assert not error < 0


# Augmentation

IMAGE_SHAPES = [(6, 9, 1), (8, 8, 3)]  # few: each is compiled anew
IMAGES = 5
SHARE = st.floats(0, 1, width=32)
WEAK = jax.jit(
    lambda key, pixels, rotate, fill, probability, crop, flip: augment.weak(
        key, pixels, augment.Weak(crop, flip, rotate, fill, probability)
    ),
    static_argnums=(5, 6),
)
STRONG = jax.jit(augment.strong, static_argnums=2)
STRONG_OFF = augment.Strong(0, 0, 0, 0, 0, 0, 0, 0, 0, False, 0)
STRENGTHS = [
    augment.Strong(),
    augment.Strong(**{n: f.within.high for n, f in FIELDS["strong"].fields.items() if f.within}, invert=True),
    STRONG_OFF._replace(noise=0.2, hue=0.1, translate=0.3),
]


def some_images(seed, shape):
    """Floats with exact blacks and whites among them."""
    images = np.random.default_rng(seed).random((IMAGES, *shape), np.float32)
    return np.where(images < 0.1, 0, np.where(images > 0.9, 1, images)).astype(np.float32)


def check_augmentation(augmented, seed, images, neighbour):
    """`augmented(key, images)`: in range, the same for equal keys, and of each image by itself."""
    key = jax.random.key(seed)
    out = np.asarray(augmented(key, images))
    assert out.shape == images.shape and out.dtype == np.float32
    assert np.isfinite(out).all() and out.min() >= -1e-5 and out.max() <= 1 + 1e-5
    np.testing.assert_array_equal(out, augmented(key, images))
    others = np.array(1 - images)
    others[neighbour] = images[neighbour]
    np.testing.assert_array_equal(np.asarray(augmented(key, others))[neighbour], out[neighbour])
    return out


@settings(max_examples=40, phases=NOT_SHRUNK)
@given(
    SEEDS, st.sampled_from(IMAGE_SHAPES), st.integers(0, IMAGES - 1), st.floats(0, 180, width=32), SHARE, SHARE,
    st.sampled_from([(True, True), (True, False)]),
)  # fmt: skip
def test_weak_augmentation(seed, shape, neighbour, rotate, fill, probability, parts):
    augment.check_weak(augment.Weak(*parts, rotate, fill, probability))
    images = some_images(seed, shape)
    check_augmentation(lambda k, x: WEAK(k, x, rotate, fill, probability, *parts), seed, images, neighbour)
    off = WEAK(jax.random.key(seed), images, rotate, fill, 0.0, *parts)
    np.testing.assert_allclose(off, images, rtol=0, atol=1e-6)


@settings(max_examples=40, phases=NOT_SHRUNK)
@given(SEEDS, st.sampled_from(IMAGE_SHAPES), st.integers(0, IMAGES - 1), st.sampled_from(STRENGTHS))
def test_strong_augmentation(seed, shape, neighbour, options):
    augment.check_strong(options)
    images = some_images(seed, shape)
    out = check_augmentation(lambda k, x: STRONG(k, x, options), seed, images, neighbour)
    assert np.abs(out - images).max() > 1e-3
    for off in (STRONG_OFF, STRONG_OFF._replace(invert=True)):
        np.testing.assert_allclose(STRONG(jax.random.key(seed), images, off), images, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", IMAGE_SHAPES)
def test_equal_images_are_drawn_differently(shape):
    images = np.repeat(some_images(0, shape)[:1], IMAGES, 0)
    for augmented in (
        lambda k: WEAK(k, images, 30.0, 0.0, 1.0, True, True), lambda k: STRONG(k, images, augment.Strong())
    ):  # fmt: skip
        out = np.asarray(augmented(jax.random.key(1)))
        assert len({image.tobytes() for image in out}) == IMAGES
        assert (out != np.asarray(augmented(jax.random.key(2)))).any()


# Fields: all numbers of the schema, with their ranges.

NUMBERS = {
    f"{group}.{name}": field.within
    for group, entry in FIELDS.items() if isinstance(entry, Group)
    for name, field in entry.fields.items() if field.within
}  # fmt: skip


@settings(max_examples=500)
@given(st.sampled_from(sorted(NUMBERS)), st.floats() | st.floats(-1, 2) | st.integers(-(2**63), 2**63))
@example("optimizer.learning_rate", 0.0)
@example("sf_ocda.confidence", 1.0)
@example("augment.rotate", 180.5)
def test_a_number_is_accepted_inside_its_range_alone(name, value):
    group, field = name.split(".")
    low, high, (from_low, to_high) = NUMBERS[name]
    low_holds, high_holds = low <= value if from_low else low < value, value <= high if to_high else value < high
    if low_holds and high_holds:
        check(group, **{field: value})
        return
    with pytest.raises(UserError, match=rf"^{field}={re.escape(str(value))} must be .*{low:.10g}") as refused:
        check(group, **{field: value})
    one_line(refused.value)


@given(st.floats(0, 1))
@example(1e-4)
def test_a_blur_is_none_or_wide_enough_to_compute(sigma):
    options = augment.Strong(blur=sigma)
    if sigma == 0 or sigma >= augment.SHARPEST:
        augment.check_strong(options)
    else:
        with pytest.raises(UserError, match=rf"^blur={sigma} .*0 to switch it off"):
            augment.check_strong(options)
