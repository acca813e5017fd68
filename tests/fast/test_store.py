"""Stores: what is written comes back and has an identity; what is broken or interrupted is no store."""

import hashlib
import json

import numpy as np
import pytest

from cxda_jax.data.store import SPLITS, Domain, StoreInfo, cached_store, open_store, write_store
from tests.conftest import INFO, make_domains
from tests.lines import refused


def test_a_store_gives_back_what_was_written(tmp_path):
    rng, sizes = np.random.default_rng(0), (3, 0, 2, 1, 0, 4)
    # Neighbours are pieces of one domain.
    places = [*[("a", "train")] * 3, ("ñ界", "val"), ("", "test"), ("c", "train")]
    pixels = [rng.integers(0, 256, (n, 5, 4, 3), np.uint8) for n in sizes]
    domains = [Domain(*place, x, rng.integers(0, 4, len(x))) for place, x in zip(places, pixels, strict=True)]
    numbers = (0.1, 0.2, 0.3), (-1.0, 2.0, 3.0)
    info = StoreInfo("ñ", tuple("abcd"), *numbers, "macro_f1", "from", ("x", "y"), "free", "pad", (1, 2, 3))
    folder = tmp_path / "a[]*?. ñ界"
    write_store(folder, lambda: info, iter(domains))
    assert [*tmp_path.iterdir()] == [folder]
    store = open_store(folder)
    assert store.info == info and store.num_classes == 4
    assert store.domain_names == ("a", "ñ界", "", "c") and store.split == ("train", "val", "test", "train")
    assert [*store.offsets] == [0, 5, 6, 6, 10] and [*store.row_domains()] == [0] * 5 + [1] + [3] * 4
    assert [[*store.domains(split)] for split in SPLITS] == [[0, 3], [1], [2]]
    np.testing.assert_array_equal(store.images, np.concatenate(pixels), strict=True)
    labels = np.concatenate([d.labels for d in domains]).astype(np.int32)
    np.testing.assert_array_equal(store.labels, labels, strict=True)


def test_the_identity_is_as_it_always_was_and_follows_what_results_depend_on(tmp_path, store):
    assert store.sha256 == "397d0133ad7eda2bb5fde19d4f6e5a460d79a83fd4415f5c5045cc88aff3a30a"
    first, *rest = make_domains()
    pixel, label = first.images.copy(), first.labels.copy()
    pixel[7, 3, 2, 0] ^= 1
    label[29] = (label[29] + 1) % 4

    def identity(info=INFO, **changes):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        write_store(folder, info, [first._replace(**changes), *rest])
        assert open_store(folder).info == info
        return open_store(folder).sha256

    # Its name, and how other images are brought to its size, are no part of it.
    others = {"name": "b", "provenance": "c", "marks": ("d",), "licence": "e", "fit": "pad", "background": (1, 2, 3)}
    assert identity() == identity(INFO._replace(**others)) == store.sha256
    facts = {"class_names": tuple("abce"), "mean": (0.4,), "std": (0.4,), "metric": "macro_f1"}
    changes = ({"images": pixel}, {"labels": label}, {"name": "other"}, {"split": "val"})
    different = [identity(INFO._replace(**{name: value})) for name, value in facts.items()]
    different += [identity(**change) for change in changes]
    assert len({store.sha256, *different}) == 9


def test_stores_of_older_versions_open_with_the_same_identity(tmp_path, store):
    """Their store.json had no hash of its own, or one among those of the files; it did not say how images fit."""
    file = tmp_path / "store" / "store.json"
    card = json.loads(file.read_text())
    seal = card.pop("seal")
    assert seal == hashlib.sha256(json.dumps(card, sort_keys=True).encode()).hexdigest()
    without = {name: value for name, value in card.items() if name not in ("fit", "background")}
    for older in (card | {"sha256": {**card["sha256"], "card": seal}}, without):
        file.write_text(json.dumps(older))
        found = open_store(tmp_path / "store")
        assert found.sha256 == store.sha256 and found.info == StoreInfo(*INFO[:4])
    file.write_text(json.dumps(card | {"sha256": {**card["sha256"], "card": seal}, "provenance": "elsewhere"}))
    with refused("", tmp_path, named="store.json"):
        open_store(tmp_path / "store")


def test_an_interrupted_writer_leaves_nothing_and_the_first_finished_store_stays(tmp_path):
    def stopped(error=KeyboardInterrupt):
        yield make_domains()[0]
        assert not (tmp_path / "store").exists()
        raise error

    def slow():
        cached_store(tmp_path / "store", lambda: (INFO, make_domains(seed=1)))
        yield from make_domains(seed=2)

    with pytest.raises(KeyboardInterrupt):
        write_store(tmp_path / "store", INFO, stopped())
    with pytest.raises(OSError, match=f"{tmp_path}/store"):
        write_store(tmp_path / "store", INFO, stopped(OSError(28, "No space left on device")))
    assert not list(tmp_path.iterdir())
    write_store(tmp_path / "store", INFO, slow())  # a second writer that finishes later drops its own copy
    np.testing.assert_array_equal(open_store(tmp_path / "store").images[:30], make_domains(seed=1)[0].images)
    assert [p.name for p in tmp_path.iterdir()] == ["store"]
