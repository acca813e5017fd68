"""Stores: round trips, identity, and broken or interrupted ones."""

import hashlib
import json

import numpy as np
import pytest

from cxda_jax.data.store import cached_store, open_store, write_store
from cxda_jax.errors import UserError
from tests.conftest import INFO, make_domains


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


def test_identity_follows_the_bytes(tmp_path, store):
    write_store(tmp_path / "same", INFO, make_domains())
    write_store(tmp_path / "other", INFO, make_domains(seed=1))
    assert open_store(tmp_path / "same").sha256 == store.sha256 != open_store(tmp_path / "other").sha256


@pytest.mark.parametrize("file", ["images.u8", "labels.i32"])
def test_one_flipped_bit_is_noticed(tmp_path, store, file):
    path = tmp_path / "store" / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="differ from their recorded hash"):
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
        with pytest.raises(UserError, match="store.json differs .*; delete the folder"):
            open_store(tmp_path / "store")


def test_the_identity_is_as_it_always_was(store):
    assert store.sha256 == "397d0133ad7eda2bb5fde19d4f6e5a460d79a83fd4415f5c5045cc88aff3a30a"


@pytest.mark.parametrize("bad, message", [
    ({"split": "dev"}, "split 'dev' is not one of"),
    ({"images": np.zeros((30, 16, 16, 1), np.float32)}, "images are float32"),
    ({"images": np.zeros((30, 8, 16, 1), np.uint8)}, "expected uint8"),
    ({"labels": np.zeros(29, int)}, "30 images but 29 labels"),
    ({"labels": np.full(30, 4)}, "outside 0..3"),
])  # fmt: skip
def test_a_bad_domain_leaves_nothing_behind(tmp_path, bad, message):
    first, second = make_domains()[:2]
    with pytest.raises(UserError, match=message):
        write_store(tmp_path / "store", INFO, [first, second._replace(**bad)])
    assert not list(tmp_path.iterdir())


def test_a_domain_is_in_one_place(tmp_path):
    domains = [domain._replace(name=f"camera {i}") for i, domain in enumerate(make_domains())]
    for wrong, where in (
        ([*domains[:-1], domains[-1]._replace(name="camera 0")], "train and in test"),
        ([*domains[:2], domains[0]], "twice"),
    ):
        with pytest.raises(UserError, match=f"store: domain 'camera 0' is .*{where}"):
            write_store(tmp_path / "store", INFO, wrong)
        assert not list(tmp_path.iterdir())
    write_store(tmp_path / "store", INFO, [domains[0], *domains])  # neighbours are pieces of one
    file = tmp_path / "store" / "store.json"
    file.write_text(file.read_text().replace("camera 8", "camera 0"))  # as an earlier version would have written it
    with pytest.raises(UserError, match="store.json: domain 'camera 0' is in train and in test; delete the folder"):
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


def test_no_domains(tmp_path):
    with pytest.raises(UserError, match="no domains to store"):
        write_store(tmp_path / "store", INFO, [])
