"""What holds for all stores: what is written comes back, and what cannot be stored is refused."""

import copy
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cxda_jax import metrics
from cxda_jax.data.store import FITS, SPLITS, Domain, StoreInfo, open_store, write_store
from cxda_jax.errors import UserError
from tests.lines import one_line
from tests.test_properties import SEEDS, drawn_rows, info_of

NAMES = st.text(max_size=12)


@st.composite
def domain_lists(draw):
    """Domains of arbitrary names, splits and sizes, of which one at least has rows."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)))
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any))
    rng, last = np.random.default_rng(draw(SEEDS)), len(sizes) - 1
    names = draw(st.lists(NAMES, min_size=len(sizes), max_size=len(sizes), unique=True))
    places = [(name, draw(st.sampled_from(SPLITS))) for name in names]
    which = sorted(draw(st.integers(0, last)) for _ in sizes)  # equal neighbours are pieces of one domain
    return [Domain(*places[i], *drawn_rows(rng, n, shape)) for i, n in zip(which, sizes, strict=True)]


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
        fit=st.sampled_from(sorted(FITS)),
        background=st.tuples(*[st.integers(0, 255)] * 3),
    )


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


def with_one(**changes):
    """Changes the last domain that has rows, each field by a function of the domain."""

    def spoil(domains):
        which = max(i for i, d in enumerate(domains) if len(d.labels))
        bad = domains[which]._replace(**{field: change(domains[which]) for field, change in changes.items()})
        return [*domains[:which], bad, *domains[which + 1 :]]

    return spoil


SPOILT = [
    lambda domains: [d._replace(images=d.images[:0], labels=d.labels[:0]) for d in domains],
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
        one_line(refused.value, folder)
