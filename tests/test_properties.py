"""What must hold whatever the input: plans, metrics, augmentation, stores and the command line's overrides.

Examples are derived from the tests themselves, so each run tries the same ones.
"""

import copy
import json
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
from cxda_jax.data.episodes import EpisodeSpec, check_spec, mixed_spec, sample_plans
from cxda_jax.data.sources import device_source, tfdata_source
from cxda_jax.data.store import SPLITS, Domain, DomainStore, StoreInfo, open_store, write_store
from cxda_jax.experiment import BENCHMARKS, LIMITS, METHODS, build_method, build_on, start_from_weights
from cxda_jax.types import Images, UserError
from launch import cli
from tests.conftest import INFO, make_domains

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")

# For tests whose examples take long: a failure is shown as it was found.
NOT_SHRUNK = (Phase.explicit, Phase.generate)
FALSE_ALARM = 1e-9  # of each chi-square test below, over all seeds; the seeds are fixed
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
        assert_short(refused.value)
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

    def check(drawn, chances):
        """`drawn` are numbers of outcomes, `chances` those of all outcomes."""
        observed = np.bincount(drawn, minlength=len(chances))
        expected = np.array(chances) * count
        assert not observed[expected == 0].any()
        used = expected > 0
        assert scipy.chisquare(observed[used], expected[used]).pvalue > FALSE_ALARM

    of_row = np.where(np.isin(owner, domains), 1 / (len(domains) * sizes[owner]), 0)
    check(pairs @ [4, 1], [1 / 6 * (a != b and {a, b} <= {0, 2, 3}) for a in range(4) for b in range(4)])
    check(place, [0.5, 0.5])
    for rows in (plan.support[:, 0], plan.support[:, 3], plan.query[:, 0], plan.query[:, 1]):
        check(rows, of_row)
    # An image of the support and one of the query, where they are of one domain.
    rows, both = len(owner), np.where(place, plan.support[:, 2], plan.support[:, 0])
    chances = np.zeros((rows, rows))
    for d in domains:
        inside = slice(offsets[d], offsets[d + 1])
        chances[inside, inside] = 1 / (3 * sizes[d] ** 2) if replacement else 1 / (3 * sizes[d] * (sizes[d] - 1))
    if not replacement:
        np.fill_diagonal(chances, 0)
    check(both * rows + plan.query[:, 1], chances.ravel())
    mixed = sample_plans(mixed_spec(spec), offsets, domains, 12, range(count)).query
    for rows in (mixed[:, 0], mixed[:, -1]):
        check(rows, np.isin(owner, domains) / sizes[domains].sum())


@settings(max_examples=6, phases=NOT_SHRUNK)
@given(
    st.lists(st.integers(4, 9), min_size=2, max_size=4),
    st.sampled_from([(3, 2, 1), (2, 5, 3)]),
    st.integers(1, 2),
    st.booleans(),
    SEEDS,
)
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
            np.testing.assert_array_equal(ours.query.pixels, store.images[plan.query])
            for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
                assert a.dtype == b.dtype
                np.testing.assert_array_equal(a, b)


def drawn_rows(rng, count, shape):
    return rng.integers(0, 256, (count, *shape), np.uint8), rng.integers(0, len(INFO.class_names), count)


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
        "macro_f1": sklearn.f1_score(
            labels, predictions, labels=np.unique(labels), average="macro", zero_division=0
        ),
    }  # fmt: skip
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
    assert scores.min() - 1e-12 <= found <= scores.mean() + 1e-12
    shuffled = np.random.default_rng(seed).permutation(scores)
    assert metrics.worst_decile(shuffled) == found


@settings(max_examples=200)
@given(hnp.arrays(float, st.integers(1, 30), elements=st.floats(-1e6, 1e6)))
def test_mean_and_standard_error_equal_scipys(values):
    scipy = pytest.importorskip("scipy.stats")
    mean, error = metrics.mean_sem(values)
    assert mean == pytest.approx(math.fsum(values) / len(values), rel=1e-9, abs=1e-6)
    if len(values) == 1:
        assert math.isnan(error)
    else:
        assert error == pytest.approx(scipy.sem(values), rel=1e-9, abs=1e-6) and error >= 0
        assert metrics.mean_sem(list(values)) == (mean, error)


# Augmentation

IMAGE_SHAPES = [(6, 9, 1), (8, 8, 3)]  # few: each is compiled anew
IMAGES = 5
TURNED = st.floats(0, 180, width=32)
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
    augment.Strong(**{field: high for field, (_, high) in augment.LIMITS.items()}, invert=True),
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
    SEEDS,
    st.sampled_from(IMAGE_SHAPES),
    st.integers(0, IMAGES - 1),
    TURNED, SHARE, SHARE,
    st.sampled_from([(True, True), (True, False)]),
)  # fmt: skip
def test_weak_augmentation(seed, shape, neighbour, rotate, fill, probability, parts):
    augment.check(augment.Weak(*parts, rotate, fill, probability))
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
    np.testing.assert_allclose(STRONG(jax.random.key(seed), images, STRONG_OFF), images, rtol=0, atol=1e-6)
    inverted = STRONG_OFF._replace(invert=True)
    np.testing.assert_allclose(STRONG(jax.random.key(seed), images, inverted), images, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", IMAGE_SHAPES)
def test_equal_images_are_drawn_differently(shape):
    images = np.repeat(some_images(0, shape)[:1], IMAGES, 0)
    for augmented in (
        lambda k: WEAK(k, images, 30.0, 0.0, 1.0, True, True), lambda k: STRONG(k, images, augment.Strong())
    ):  # fmt: skip
        out = np.asarray(augmented(jax.random.key(1)))
        assert len({image.tobytes() for image in out}) == IMAGES
        assert (out != np.asarray(augmented(jax.random.key(2)))).any()


@given(st.sampled_from(["rotate", "fill", "probability"]), st.floats() | st.floats(-1, 2))
@example("rotate", 180.5)
def test_weak_options_are_accepted_inside_their_limits_alone(field, value):
    high = 180 if field == "rotate" else 1
    check_limits(lambda: augment.check(augment.Weak()._replace(**{field: value})), f"augment.{field}", value, 0, high)


@settings(max_examples=300)
@given(st.sampled_from(sorted(augment.LIMITS)), st.floats() | st.floats(-1, 2))
@example("blur", 1e-4)
def test_strong_options_are_accepted_inside_their_limits_alone(field, value):
    low, high = augment.LIMITS[field]
    low = augment.SHARPEST if field == "blur" and value else low
    options = augment.Strong()._replace(**{field: value})
    check_limits(lambda: augment.check_strong(options), f"strong.{field}", value, low, high)


def check_limits(check, field, value, low, high):
    if low <= value <= high:
        check()
        return
    with pytest.raises(UserError, match=re.escape(f"{field}={value} lies outside")) as refused:
        check()
    assert_short(refused.value)


# Stores

NAMES = st.text(max_size=12)


@st.composite
def domain_lists(draw):
    """Domains of arbitrary names, splits and sizes, of which one at least has rows."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)))
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any))
    rng = np.random.default_rng(draw(SEEDS))
    return [Domain(draw(NAMES), draw(st.sampled_from(SPLITS)), *drawn_rows(rng, n, shape)) for n in sizes]


def infos(channels):
    return st.builds(
        StoreInfo,
        name=NAMES,
        class_names=st.tuples(NAMES, NAMES, NAMES, NAMES),
        mean=st.tuples(*[st.floats(-1, 1)] * channels),
        std=st.tuples(*[st.floats(-1, 1).filter(bool)] * channels),
        metric=st.sampled_from(sorted(metrics.METRICS)),
        provenance=NAMES,
        marks=st.lists(NAMES, max_size=2).map(tuple),
    )


def info_of(domains):
    """The least that a store of these must say of itself."""
    channels = domains[0].images.shape[-1]
    return INFO._replace(mean=(0.5,) * channels, std=(0.5,) * channels)


@settings(max_examples=100)
@given(domain_lists(), st.text("a[]*?. ñ界", min_size=1, max_size=6).filter(lambda name: name.strip(".")), st.data())
def test_a_store_gives_back_what_was_written(domains, folder_name, data):
    info = data.draw(infos(domains[0].images.shape[-1]))
    with tempfile.TemporaryDirectory() as folder:
        write_store(Path(folder) / folder_name, info, iter(domains))
        assert [p.name for p in Path(folder).iterdir()] == [folder_name]
        store = open_store(Path(folder) / folder_name)
        merged = [[domains[0]]]
        for domain in domains[1:]:
            same = domain[:2] == merged[-1][0][:2]
            merged[-1].append(domain) if same else merged.append([domain])
        assert store.info == info
        assert list(zip(store.domain_names, store.split, strict=True)) == [pieces[0][:2] for pieces in merged]
        assert list(np.diff(store.offsets)) == [sum(len(p.labels) for p in pieces) for pieces in merged]
        np.testing.assert_array_equal(store.images, np.concatenate([d.images for d in domains]))
        np.testing.assert_array_equal(store.labels, np.concatenate([d.labels for d in domains]))
        assert store.images.dtype == np.uint8 and store.labels.dtype == np.int32
        for split in SPLITS:
            assert list(store.domains(split)) == [i for i, p in enumerate(merged) if p[0].split == split]
        assert list(np.bincount(store.row_domains(), minlength=len(merged))) == list(np.diff(store.offsets))


@settings(max_examples=60)
@given(domain_lists(), st.data())
def test_the_identity_changes_with_any_byte_or_label(domains, data):
    which = data.draw(st.sampled_from([i for i, d in enumerate(domains) if len(d.labels)]))
    changed, (images, labels) = list(domains), (domains[which].images.copy(), domains[which].labels.copy())
    if data.draw(st.booleans()):
        images.flat[data.draw(st.integers(0, images.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        row = data.draw(st.integers(0, len(labels) - 1))
        labels[row] = (labels[row] + data.draw(st.integers(1, 3))) % 4
    changed[which] = domains[which]._replace(images=images, labels=labels)
    with tempfile.TemporaryDirectory() as folder:
        hashes = {}
        for name, written in {"one": domains, "same": copy.deepcopy(domains), "other": changed}.items():
            write_store(Path(folder) / name, info_of(domains), written)
            hashes[name] = open_store(Path(folder) / name).sha256
    assert hashes["one"] == hashes["same"] != hashes["other"]


def without_images(domains):
    return [d._replace(images=d.images[:0], labels=d.labels[:0]) for d in domains]


def with_one(**changes):
    """Changes the last domain that has rows, each field by a function of the domain."""

    def spoil(domains):
        which = max(i for i, d in enumerate(domains) if len(d.labels))
        bad = domains[which]._replace(**{field: change(domains[which]) for field, change in changes.items()})
        return [*domains[:which], bad, *domains[which + 1 :]]

    return spoil


SPOILT = [
    without_images,
    lambda domains: [],
    lambda domains: [d._replace(images=d.images[:, :0]) for d in domains],
    with_one(split=lambda d: "dev" * 99),
    with_one(split=lambda d: d.split.upper(), name=lambda d: "long " * 99),
    with_one(images=lambda d: d.images.astype(np.int64)),
    with_one(images=lambda d: d.images[..., 0]),
    with_one(images=lambda d: np.concatenate([d.images, d.images], 1)),
    with_one(images=lambda d: d.images[1:]),
    with_one(labels=lambda d: d.labels[1:]),
    with_one(labels=lambda d: d.labels + 4),
    with_one(labels=lambda d: d.labels - 4),
    with_one(labels=lambda d: d.labels + 0.5),
    with_one(labels=lambda d: np.full(len(d.labels), np.nan)),
    with_one(labels=lambda d: d.labels[:, None]),
    with_one(labels=lambda d: d.labels.astype(str)),
]


UNSAID = [{"mean": (0.5,) * 9}, {"std": (math.nan,)}, {"std": (0.0,)}, {"class_names": ()}]


@pytest.mark.parametrize("change", UNSAID)
def test_a_store_that_could_not_be_opened_is_not_written(change, tmp_path):
    with pytest.raises(UserError, match=next(iter(change)) if "class_names" not in change else "a label lies outside"):
        write_store(tmp_path / "store", INFO._replace(**change), make_domains())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("spoil", SPOILT)
@settings(max_examples=10)
@given(domains=domain_lists())
def test_what_cannot_be_stored_is_refused_and_leaves_nothing(spoil, domains):
    good = next(d for d in domains if len(d.labels))
    spoilt = spoil([good, *domains])
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(UserError) as refused:
            write_store(Path(folder) / "store", info_of(domains), spoilt)
        assert not list(Path(folder).iterdir())
        assert_short(refused.value, folder)


# Overrides

BASE = cli.resolve(cli.load_config("configs/glyphs.py:cxda,smoke"))
SYMBOLS = list("=.,:-+_()[]{}'\"\\ \t\n\0aeE019%$~é界\u2028\ud800\U0001f600")
NUMBERS = [
    "0", "-0", "1", "-1", "2", "7", "0.5", "1.0", "-0.5", "1e-5", "1e-400", "1e400", "-1e400", "1e30", "nan", "-nan", "inf",
    "-inf", "infinity", "1_0", "0x10", "١٢", "²", "99999", "2147483648", "4294967296", "-9223372036854775809",
    "18446744073709551616", "9" * 30, "9" * 5000, "1/2", "None", "5j",
]  # fmt: skip
TEXTS = [
    "", " ", "true", "True", "FALSE", "yes", "off", "nan", "cxda", "erm", "sgd", "adam", "resnet50", "bfloat16", "support",
    "stop", "own", "leave_one_out", "batch_norm", "image", "teacher", "patch", "flat", "head_dim", "same", "worst_decile",
    "../..", "/dev/null", "a\0b", "a\nb", "\x1b[31m", "é界", "\ud800", "x" * 300, "y " * 20_000, "=", "==", "a=b", "--seed=1",
]  # fmt: skip
TUPLES = [
    "()", "(1,)", "(1, 2, 3)", "(1, 1)", "1, 2", "(0,)", "(-1, 2)", "(1.5,)", "(True,)", "(None,)", "('fc',)", "('',)", "('a', 1)",
    "[1, 2]", "{1: 2}", "{[]}", "((1,),)", "(1", "1)", "(nan,)", "(1e400,)", "(9999999999,)", f"({'9' * 5000},)", f"({'9' * 25},)",
    "(" * 500 + ")" * 500, "[" * 90_000, "-" * 90_000 + "1", f"({'1,' * 400})", f"({'1,' * 90_000})", "(1 2)", "('\\d',)", "(1if 1else 2,)",
    "(__import__('os'),)", "lambda: 0", "(10**10**10,)", "b'x',", "f'{1}',", "(1,\0)", "#", "\\", "(1,)(2)",
]  # fmt: skip


def flat(config, prefix=""):
    for name, value in config.items():
        yield from flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]


FIELDS = dict(flat(BASE))
GROUPS = [name for name, value in BASE.items() if isinstance(value, dict)]


def one_of(rng, values):
    return values[rng.integers(len(values))]


def mistyped(rng, text):
    """The text after up to three slips of the finger."""
    for _ in range(rng.integers(1, 4)):
        at = rng.integers(len(text) + 1)
        kind = rng.integers(5)
        if kind == 0:
            text = text[:at] + one_of(rng, SYMBOLS) + text[at:]
        elif kind == 1:
            text = text[:at] + text[at + 1 :]
        elif kind == 2:
            text = text[:at] + text[at : at + 2][::-1] + text[at + 2 :]
        elif kind == 3:
            text = text[:at] + text[at : at + 1].swapcase() + text[at + 1 :]
        else:
            text = text[:at] + text[max(0, at - rng.integers(1, 6)) :]
    return text


def some_name(rng):
    name, kind = one_of(rng, list(FIELDS)), rng.integers(20)
    if kind < 11:
        return name
    other = one_of(rng, list(FIELDS))
    return [
        mistyped(rng, name), mistyped(rng, name), mistyped(rng, name), one_of(rng, GROUPS), f"{name}.{other}", name.split(".")[-1],
        f"{one_of(rng, GROUPS)}.{other.split('.')[-1]}", f"{name}{one_of(rng, SYMBOLS)}", one_of(rng, SYMBOLS) * rng.integers(1, 3000),
    ][kind - 11]  # fmt: skip


def some_value(rng, name):
    kind = rng.integers(8)
    if kind < 2:
        return one_of(rng, NUMBERS)
    if kind == 2:
        return one_of(rng, TUPLES)
    if kind == 3:
        return one_of(rng, TEXTS)
    present = str(FIELDS.get(name, one_of(rng, list(FIELDS.values()))))
    if kind == 4:
        return present
    if kind == 5:
        return str(one_of(rng, list(FIELDS.values())))
    if kind == 6 and rng.random() < 0.1:
        return "".join(one_of(rng, SYMBOLS) for _ in range(rng.integers(60)))
    return mistyped(rng, present)


def assert_short(error, *folders):
    """One line, once its whitespace is folded as the launchers do, that a terminal shows whole."""
    message = " ".join(str(error).split())
    for folder in folders:
        message = message.replace(str(folder), "")
    assert 10 < len(message) <= 200, f"{len(message)}: {message[:300]}"


@pytest.fixture
def overrides(monkeypatch):
    """The command line's overrides, forgotten afterwards."""
    monkeypatch.setattr(cli, "_overrides", [])
    return cli._overrides


def as_read(value):
    """JSON has no tuples."""
    return list(value) if isinstance(value, tuple) else value


def test_ten_thousand_overrides_are_each_taken_or_refused_in_one_line(overrides):
    rng, config = np.random.default_rng(0), cli.load_config("configs/glyphs.py:cxda,smoke")
    present = dict(flat(config.to_dict()))
    taken = 0
    for _ in range(10_000):
        name = some_name(rng)
        text = some_value(rng, name)
        arguments = ["train", f"--config.{name}={text}"] if rng.random() < 0.9 else ["train", f"--config.{name}", text]
        try:
            rest = cli._take_overrides(arguments)
            assert len(overrides) == 1 and rest[:1] == ["train"]
            cli.override(config, *overrides[0])
        except UserError as e:
            assert_short(e)
            continue
        taken += 1
        resolved = cli.resolve(config)
        assert json.loads(json.dumps(resolved, allow_nan=False)) == resolved
        name = overrides[0][0]
        group, _, field = name.rpartition(".")
        node = config[group] if group else config
        assert type(node[field]) is type(present[name])
        assert dict(flat(resolved)) == FIELDS | {name: as_read(node[field])}
        node[field] = present[name]
    assert cli.resolve(config) == BASE  # what was refused has changed nothing
    assert 2000 < taken < 8000


@settings(max_examples=300)
@given(st.sampled_from(sorted(FIELDS)), st.text())
def test_any_text_is_taken_or_refused_in_one_line(name, text):
    config = cli.load_config("configs/glyphs.py:cxda,smoke")
    try:
        cli.override(config, name, text)
    except UserError as e:
        assert_short(e)
    assert json.loads(json.dumps(cli.resolve(config), allow_nan=False)) == cli.resolve(config)


def test_a_tuple_longer_than_anyone_types_is_refused(overrides):
    config = cli.load_config("configs/glyphs.py:cxda,smoke")
    for text in (f"({'1,' * 600})", "(" * 600 + ")" * 600):
        with pytest.raises(UserError, match="expected a tuple such as") as refused:
            cli.override(config, "net.stages", text)
        assert_short(refused.value)


@pytest.mark.parametrize("value", [2**62, 100_001, -(2**62), 0])
def test_data_are_not_made_in_absurd_numbers(tmp_path, value):
    makers = {
        "glyphs": [{"drawings": value}, {"writers": (1, value, 1)}, {"writers": (value,) * 300}],
        "glyphs_c": [{"images": value}],
    }
    for benchmark, changes in makers.items():
        for change in changes:
            with pytest.raises(UserError, match=f"data.{next(iter(change))}=") as refused:
                BENCHMARKS[benchmark]({"benchmark": benchmark, "data": change}, tmp_path)
            assert_short(refused.value)
    assert not list(tmp_path.iterdir())


@given(st.text(max_size=400))
def test_data_of_any_name_are_found_missing_in_one_line(name):
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(UserError, match="no prepared data") as refused:
            BENCHMARKS["folder"]({"benchmark": "folder", "data": {"name": name}}, Path(folder))
        assert_short(refused.value, folder)


@pytest.fixture(scope="module")
def small_store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    write_store(folder / "store", INFO, make_domains())
    return open_store(folder / "store")


SMALL = {"episode": {"num_domains": 3, "per_domain": 4, "num_query": 5}, "attention": {"features": "pool"}}


def small_config(method):
    config = cli.load_config(f"configs/glyphs.py:{method},smoke")
    config.update(SMALL)
    return config


def taken(config, name, text):
    try:
        cli.override(config, name, text)
    except UserError:
        return False
    return True


def built(config, store):
    """The experiment and the start of its run, or None where a UserError of one line says why not."""
    try:
        experiment = build_on(config, store)
        start_from_weights(config, {"params": {}, "batch_stats": {}})
    except UserError as e:
        assert_short(e)
        return None
    return experiment


def shapes(method, store):
    return jax.eval_shape(method.init, jax.random.key(0), Images(store.images[:2], np.zeros(2, np.int32)))


def test_what_is_taken_is_built_or_refused_in_one_line(small_store):
    rng, found = np.random.default_rng(1), 0
    pools = {int: NUMBERS, float: NUMBERS, list: TUPLES}
    methods, fields = list(METHODS), [name for name in FIELDS if not name.startswith(("data.", "benchmark"))]
    for i in range(400):
        config, changes = small_config(methods[i % len(methods)]), 0
        config.net.name = one_of(rng, ["cnn", "cnn", "resnet50"])
        for name in (fields[i % len(fields)], *(one_of(rng, fields) for _ in range(rng.integers(3)))):
            changes += any(taken(config, name, one_of(rng, pools.get(type(FIELDS[name]), TEXTS))) for _ in range(3))
        experiment = built(cli.resolve(config), small_store) if changes else None
        if experiment is None:
            continue
        found += 1
        if not experiment.method.trains_as:
            assert len(next(experiment.source.batches(experiment.train_plans, 0, 1)).query)
        assert len(experiment.task_plans("test")(range(1)).query) == 1
        if i % 10 == 0:
            assert "params" in shapes(experiment.method, small_store)
    assert 40 < found < 360


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_a_number_outside_its_limits_is_named(small_store, name):
    low, high = LIMITS[name]
    for value in (low - 1, high + 1, 2**62, -(2**62)):
        config = small_config("cxda")
        cli.override(config, name, str(value))
        with pytest.raises(UserError) as refused:
            build_on(cli.resolve(config), small_store)
        assert str(refused.value) == f"{name}={value} must be at {f'least {low}' if value < low else f'most {high}'}"


@pytest.mark.parametrize(("method", "name"), [("erm", "net.width"), ("cml", "cml.width"), ("sla", "sla.adapters")])
def test_the_largest_networks_have_shapes(small_store, method, name):
    config = small_config(method)
    cli.override(config, name, str(LIMITS[name][1]))
    assert "params" in shapes(built(cli.resolve(config), small_store).method, small_store)


@pytest.mark.parametrize(("field", "value"), [("heads", 3), ("ratio", -1), ("ratio", 0), ("scale", "none")])
def test_wrong_attention_is_refused_before_a_run_begins(small_store, field, value):
    config = small_config("cxda_p2p")
    config.attention[field] = value
    with pytest.raises(UserError, match=f"attention.{field}={value!r}") as refused:
        build_on(cli.resolve(config), small_store)
    assert_short(refused.value)


@pytest.mark.parametrize("stages", ["()", "(0, 2)", "(1, -1)", "(101,)", "(9999999999, 1)", "(1, 1, 1, 1, 1, 1, 1)"])
def test_stages_that_no_network_has_are_refused(small_store, stages):
    config = small_config("erm")
    config.net.name = "resnet50"
    cli.override(config, "net.stages", stages)
    with pytest.raises(UserError, match="net.stages=.*: give one to six counts of 1 to 100 blocks") as refused:
        build_on(cli.resolve(config), small_store)
    assert_short(refused.value)


@pytest.mark.parametrize("name", ["seed", "evaluation.seed"])
def test_the_largest_seed_is_used(small_store, name):
    config = small_config("cotta")
    cli.override(config, name, str(LIMITS[name][1]))
    experiment = built(cli.resolve(config), small_store)
    plan = experiment.task_plans("test")(range(3)) if name != "seed" else experiment.train_plans(2)
    assert len(plan.query) and jax.random.key(experiment.config["seed"]).shape == ()


@given(st.sampled_from(["learning_rate", "momentum", "weight_decay"]), st.floats())
@example("learning_rate", 0.0)
@example("learning_rate", 1.0)
@example("momentum", 0.0)
@example("momentum", 1.0)
@example("weight_decay", 0.0)
@example("weight_decay", math.inf)
def test_an_optimizer_is_built_from_numbers_that_it_can_use(small_store, field, value):
    config = cli.resolve(small_config("ft_em"))
    config["optimizer"][field] = value
    good = math.isfinite(value) and value >= 0 and (field, value) != ("learning_rate", 0)
    if good and (field != "momentum" or value < 1):
        assert built(config, small_store)
        return
    with pytest.raises(UserError, match=re.escape(f"optimizer.{field}={value} must be a")) as refused:
        build_on(config, small_store)
    assert_short(refused.value)


@pytest.mark.parametrize(("padding", "least"), [("arm", 16), ("same", 4)])
@pytest.mark.parametrize("method", ["erm", "cxda", "cml"])
def test_images_too_small_for_the_network_are_refused(padding, least, method):
    config = small_config(method)
    config.net.padding = padding
    for shape in ((least, least + 3, 1), (least - 1, least + 3, 1), (least + 3, least - 1, 1), (1, 1, 1)):
        store = DomainStore(
            INFO, np.zeros((2, *shape), np.uint8), np.zeros(2), np.array([0, 2]), ("train",), ("a",), ""
        )
        if min(shape[:2]) >= least:
            assert "params" in shapes(build_method(cli.resolve(config), store), store)
        else:
            with pytest.raises(UserError, match=f"net.padding='{padding}' takes images from {least} pixels") as refused:
                build_method(cli.resolve(config), store)
            assert_short(refused.value)
