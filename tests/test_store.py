"""Stores: round trips, identity, and broken or interrupted ones."""

import hashlib
import json
import math

import numpy as np
import pytest

from cxda_jax.data.store import StoreInfo, cached_store, open_store, write_store
from tests.conftest import INFO, make_domains
from tests.lines import flip, refused


def test_round_trip(store):
    domains = make_domains()
    assert store.info == INFO and store.num_classes == 4
    assert store.domain_names == tuple(d.name for d in domains)
    for i, domain in enumerate(domains):
        rows = slice(store.offsets[i], store.offsets[i + 1])
        np.testing.assert_array_equal(store.images[rows], domain.images)
        np.testing.assert_array_equal(store.labels[rows], domain.labels)
        assert (store.row_domains()[rows] == i).all()
    assert [list(store.domains(s)) for s in ("train", "val", "test")] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_the_identity_is_as_it_always_was_and_follows_the_bytes(tmp_path, store):
    assert store.sha256 == "397d0133ad7eda2bb5fde19d4f6e5a460d79a83fd4415f5c5045cc88aff3a30a"
    write_store(tmp_path / "same", INFO, make_domains())
    write_store(tmp_path / "other", INFO, make_domains(seed=1))
    assert open_store(tmp_path / "same").sha256 == store.sha256 != open_store(tmp_path / "other").sha256
    padded = INFO._replace(fit="pad", background=(1, 2, 3))  # how other images are brought to its size
    write_store(tmp_path / "padded", padded, make_domains())
    found = open_store(tmp_path / "padded")
    assert found.sha256 == store.sha256 and found.info == padded


def test_a_store_that_does_not_say_how_images_are_fitted_gets_the_defaults(tmp_path, store):
    file = tmp_path / "store" / "store.json"
    card = json.loads(file.read_text())
    assert card.pop("fit") == "squash" and card.pop("background") == [255, 255, 255] and card.pop("seal")
    file.write_text(json.dumps(card))
    found = open_store(tmp_path / "store")
    assert found.sha256 == store.sha256 and found.info == StoreInfo(*INFO[:4])


@pytest.mark.parametrize("field, value, said", [
    ("fit", "stretch", "fit='stretch' is not one of squash, crop, pad"),
    ("fit", 3, "fit=3, expected a text"),
    ("background", [1, 2], r"background=\[1, 2\] is not three whole numbers in 0..255"),
    ("background", [1, 2, 256], "is not three whole numbers"),
    ("background", [1, 2, 0.5], "is not three whole numbers"),
    ("background", [True, 0, 0], "is not three whole numbers"),
    ("background", "white", "background='white', expected a list"),
])  # fmt: skip
def test_a_fit_or_a_background_that_is_none_is_refused(tmp_path, store, field, value, said):
    file = tmp_path / "store" / "store.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with refused(f"store.json: .*{said}.*; delete the folder and prepare it again", tmp_path):
        open_store(tmp_path / "store")


@pytest.mark.parametrize("file", ["images.u8", "labels.i32"])
def test_one_flipped_bit_is_noticed(tmp_path, store, file):
    flip(tmp_path / "store" / file)
    with refused(f"{file} differs from its recorded hash; delete the folder", tmp_path):
        open_store(tmp_path / "store")


@pytest.mark.parametrize("hashes_card", [True, False])
def test_stores_of_older_versions_open_with_the_same_identity(tmp_path, store, hashes_card):
    """Their store.json had its hash among those of the files, and before that none."""
    file = tmp_path / "store" / "store.json"
    card = json.loads(file.read_text())
    seal = card.pop("seal")
    assert seal == hashlib.sha256(json.dumps(card, sort_keys=True).encode()).hexdigest()
    if hashes_card:
        card["sha256"]["card"] = seal
    file.write_text(json.dumps(card))
    assert open_store(tmp_path / "store").sha256 == store.sha256
    file.write_text(json.dumps(card | {"provenance": "elsewhere"}))
    if hashes_card:
        with refused("store.json differs .*; delete the folder", tmp_path):
            open_store(tmp_path / "store")


@pytest.mark.parametrize("info, bad, said", [
    ({}, {"split": "dev", "name": "d" * 300}, r"^domain d{40}\.\.\.d{17}: split 'dev' is not one of train, val, test$"),
    ({}, {"images": np.zeros((30, 16, 16, 1), np.float32)}, "images are float32"),
    ({}, {"images": np.zeros((30, 8, 16, 1), np.uint8)}, "expected uint8"),
    ({}, {"labels": np.zeros(29, int)}, "30 images but 29 labels"),
    ({}, {"labels": np.full(30, 4)}, "outside 0..3"),
    ({"class_names": ()}, {}, "a label lies outside"),
    ({"mean": (0.5,) * 9}, {}, "mean="),  # this and what follows open_store would refuse
    ({"std": (math.nan,)}, {}, "std="),
    ({"std": (0.0,)}, {}, "std="),
    ({"fit": "stretch"}, {}, "fit='stretch' is not one of squash, crop, pad; nothing was written"),
    ({"background": (0, 0)}, {}, "background="),
])  # fmt: skip
def test_what_cannot_be_stored_leaves_nothing_behind(tmp_path, info, bad, said):
    first, second = make_domains()[:2]
    with refused(said, tmp_path):
        write_store(tmp_path / "store", INFO._replace(**info), [first, second._replace(**bad)])
    with refused("no domains to store", tmp_path):
        write_store(tmp_path / "store", INFO, [])
    assert not list(tmp_path.iterdir())


def test_a_domain_is_in_one_place(tmp_path):
    domains = [domain._replace(name=f"camera {i}") for i, domain in enumerate(make_domains())]
    for wrong, where in (
        ([*domains[:-1], domains[-1]._replace(name="camera 0")], "train and in test"),
        ([*domains[:2], domains[0]], "twice"),
    ):
        with refused(f"store: domain 'camera 0' is .*{where}", tmp_path):
            write_store(tmp_path / "store", INFO, wrong)
        assert not list(tmp_path.iterdir())
    write_store(tmp_path / "store", INFO, [domains[0], *domains])  # neighbours are pieces of one
    file = tmp_path / "store" / "store.json"
    file.write_text(file.read_text().replace("camera 8", "camera 0"))  # as an earlier version would have written it
    with refused("store.json: domain 'camera 0' is in train and in test; delete the folder", tmp_path):
        open_store(tmp_path / "store")


def test_an_interrupted_writer_leaves_nothing_behind(tmp_path):
    def domains():
        yield make_domains()[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_store(tmp_path / "store", INFO, domains())
    assert not list(tmp_path.iterdir())


def test_the_first_finished_store_stays(tmp_path):
    """A second writer that finishes later drops its own copy."""

    def slow():
        cached_store(tmp_path / "store", lambda: (INFO, make_domains(seed=1)))
        yield from make_domains(seed=2)

    write_store(tmp_path / "store", INFO, slow())
    np.testing.assert_array_equal(open_store(tmp_path / "store").images[:30], make_domains(seed=1)[0].images)
    assert [p.name for p in tmp_path.iterdir()] == ["store"]
