"""What docs/study/devices.py asks of devices, and how it counts."""

import json

import numpy as np
from PIL import Image

from cxda_jax.data.store import Domain, StoreInfo, write_store
from docs.study import device_sets, devices

RNG = np.random.default_rng(0)
DATA = {
    "labels": RNG.choice(4, 6 * 200, p=[0.7, 0.2, 0.08, 0.02]).astype(np.int32),
    "domain": np.repeat(np.arange(6), 200),
}


def test_each_new_device_is_asked_as_often_and_has_its_part_of_a_mixed_buffer():
    new, owner = np.array([0, 1, 2, 4, 5]), DATA["domain"]
    for number, part in ((1, 100), (5, 20)):
        plan = devices.plans_of(DATA, new, number, "natural", 1.0, 0)
        assert (owner[plan.query] == np.repeat(new, devices.EACH)[:, None]).all()
        assert ((owner[plan.support] == owner[plan.query[:, :1]]).sum(1) == part).all()
        assert not (plan.support[:, :, None] == plan.query[:, None]).any() and 3 not in owner[plan.support]
        assert (np.diff(np.sort(plan.support, 1)) > 0).all()


def test_replayed_tasks_have_the_shares_of_real_days_and_cameras():
    """A day of one class stays one; a query is neither asked twice nor in the buffer; the mean shares are those of the
    table, in one order of the classes for all devices."""
    data = {"labels": np.tile(np.arange(10), 600), "domain": np.repeat(np.arange(6), 1000)}
    assert len(devices.kinds_of(data)) == len(devices.KINDS) + 4 and devices.kinds_of(DATA) == devices.KINDS
    for name in devices.REPLAYED:
        known = np.array(json.loads(devices.COUNTS.read_text())[name]["devices"], float)
        means, alone, new = [], [], np.arange(6)
        for seed in range(8):
            plan = devices.plans_of(data, new, 1, name, 1.0, seed)
            assert not (plan.support[:, :, None] == plan.query[:, None]).any()
            assert (np.diff(np.sort(plan.query, 1)) > 0).all()
            assert (data["domain"][plan.query] == np.repeat(new, devices.EACH)[:, None]).all()
            drawn = np.stack([np.bincount(data["labels"][own], minlength=10) for own in plan.support]) / 100
            means.append(np.sort(drawn.mean(0)))
            alone.append((drawn.max(1) == 1).mean())
        shares = known / known.sum(1, keepdims=True)
        expected = np.sort(np.pad(shares.mean(0), (0, 10 - known.shape[1])))
        np.testing.assert_allclose(np.mean(means, 0)[-3:], expected[-3:], atol=0.05)
        np.testing.assert_allclose(np.mean(alone), (shares.max(1) > 0.999).mean(), atol=0.08)


def test_a_stream_has_its_classes_one_after_another_and_each_image_once():
    data = {"labels": np.tile(np.arange(10), 120), "domain": np.repeat(np.arange(6), 200)}
    plan = devices.plans_of(data, np.array([1, 4]), 1, "stream", 0.1, 0)
    assert (data["domain"][plan.query] == np.repeat([1, 4], devices.EACH)[:, None]).all()
    whole = np.concatenate([*plan], axis=1)
    assert (np.diff(np.sort(whole, 1)) > 0).all()
    assert np.mean(data["labels"][whole[:, 1:]] == data["labels"][whole[:, :-1]]) > 0.3  # 0.1 by chance


def test_images_that_tell_when_they_were_taken_come_in_that_order(tmp_path):
    """The later in the file, the earlier taken; two of a photograph follow each other by their numbers."""
    names = [f"d{i % 2}/a/C1_IMG_20150101_{900 - i // 4:06}_cell_{99 - i // 2 % 2}.png" for i in range(500)]
    arrays = {"labels": np.arange(500) % 3, "domains": [name[:2] for name in names], "features": np.zeros((500, 1))}
    np.savez(tmp_path / "f.npz", **arrays, style=np.zeros((500, 1)), paths=names)
    data = devices.loaded(tmp_path / "f.npz")
    assert (1, "order taken", 1.0) in devices.kinds_of(data)
    plan = devices.plans_of(data, np.array([1]), 1, "order taken", 1.0, 0)
    assert (data["domain"][plan.query] == 1).all() and len(np.unique(plan.support[:, 0])) == devices.EACH
    assert (np.diff(np.concatenate([*plan], axis=1), axis=1) == -1).all()


def test_devices_count_alike_and_a_rare_class_is_recalled_by_its_own_queries():
    kind = devices.named(*devices.KINDS[0])
    rare, owner = np.zeros((20, 20), bool), np.repeat([0, 1], 10)
    rare[0, :4] = rare[15, :2] = True
    right = {devices.PLAIN: np.zeros((20, 20), bool), devices.OURS: ~rare}
    right[devices.OURS][0, 0] = True  # one of four rare queries of device 0, none of two of device 1
    data = {"labels": np.array([0, 0, 1, 1, 0, 0, 0, 0]), "domain": np.repeat([0, 1], 4)}
    found = devices.summary(data, [({kind: (owner, right, rare)}, {"seed": 0})])
    row = found["table"][kind][devices.OURS]
    assert row["rare queries"] == 6 and row["rare"] == 12.5 and row["rare gain"][0] == 12.5
    np.testing.assert_allclose(row["gain"][0], 100 * (197 / 200 + 198 / 200) / 2, atol=0.01)
    np.testing.assert_allclose([p["classes"] for p in found["points"]], [2 / 1.7548, 1 / 1.7548], atol=1e-3)
    assert [p[devices.OURS] for p in found["points"]] == [98.5, 99.0]


def test_letters_go_to_the_folders_of_their_writers(tmp_path, monkeypatch):
    """In the form of the published CSV files: rows of pixels by columns of the image, and classes from 1 on."""
    monkeypatch.setattr(device_sets, "LETTERS", 2)
    monkeypatch.setattr(device_sets, "WRITERS", 3)
    monkeypatch.setattr(device_sets, "TIMES", {"Train": 2, "Test": 1})
    for part, times in device_sets.TIMES.items():
        writer, label = (x.ravel() for x in np.mgrid[:3, 1 : 2 * times + 1])
        label = (label - 1) % 2 + 1
        pixels = np.zeros((len(label), 32, 32), int)
        pixels[:, 0, 5], pixels[:, 0, 6] = 50 * writer, label  # transposed: row 5 and 6 of column 0
        for what, rows in (("Images", pixels.reshape(len(label), -1)), ("Label", label)):
            np.savetxt(tmp_path / f"csv{part}{what} {len(label)}x1024.csv", rows, "%d", ",")
    device_sets.letters(tmp_path, tmp_path / "out")
    found = sorted((tmp_path / "out").glob("*/*/*.png"))
    assert len(found) == 3 * 2 * 3
    for path in found:
        image = np.asarray(Image.open(path))
        assert (image[5, 0], image[6, 0]) == (50 * int(path.parts[-3][-2:]), int(path.parts[-2]))


def test_prepared_domains_go_to_folders_that_say_their_split(tmp_path):
    info = StoreInfo("made", ("a", "b"), (0.5,), (0.2,))
    images, labels = RNG.integers(0, 256, (9, 4, 4, 1), np.uint8), np.arange(9) % 2
    write_store(
        tmp_path / "store", info, [Domain(f"fog-{split}", split, images, labels) for split in ("train", "test")]
    )
    device_sets.prepared(tmp_path / "store", tmp_path / "out", "5")
    for i, split in enumerate(("train", "test")):
        found = sorted((tmp_path / "out" / f"{split}-fog-{split}").glob("*/*.png"))
        assert len(found) == 5
        for path in found:
            row = int(path.stem) - 9 * i
            assert path.parent.name == "ab"[labels[row]]
            np.testing.assert_array_equal(np.asarray(Image.open(path)), images[row, ..., 0])
    named = np.repeat(["train-a", "test-b"], 130)
    np.savez(
        tmp_path / "f.npz", features=np.ones((260, 2)), style=np.ones((260, 2)), labels=np.ones(260), domains=named
    )
    data = devices.loaded(tmp_path / "f.npz")
    assert {*data["split"][data["domain"] == 0]} == {"test"} and devices.dealt(data, 0)[0].tolist() == [0]


def test_cells_go_to_the_folders_of_patients_with_enough_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(device_sets, "LEAST", 3)
    names = {
        "Parasitized": [
            "C39P4thinF_IMG_1_cell_95.png",
            "C39P4thinF_IMG_1_cell_96.png",
            "C100P61ThinF_IMG_2_cell_1.png",
        ],
        "Uninfected": ["C39P4thinF_IMG_3_cell_2.png", "C1_thinF_IMG_4_cell_7.png"],
    }
    for kind, of_kind in names.items():
        for name in of_kind:
            (tmp_path / kind).mkdir(exist_ok=True)
            Image.new("RGB", (4, 4)).save(tmp_path / kind / name)
    device_sets.cells(tmp_path, tmp_path / "out")
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").glob("**/*.png")}
    assert found == {f"P4/{kind}/{name}" for kind, own in names.items() for name in own if "P4thin" in name}


def test_what_was_foretold_counts_as_kept_inside_its_interval():
    """With as many new devices as judged, both errors count: the interval is wider by the root of two."""
    told = {
        "1 domain, own shares": [5, 3, 7],
        "1 domain, Dirichlet 0.3": [5, 3, 7],
        "5 domains, even shares": [5, 3, 7],
    }
    found = {"1 domain, own shares": 4, "1 domain, dirichlet 0.3": 7.5, "5 domains, even": 1, "1 domain, stream": 9}
    run = {"told": told, "found": found, "domains for fit()": 20, "new": 20, "beyond_turns": 0.4,
           "diagnosed": dict.fromkeys(told, 2.0)}  # fmt: skip
    rows = devices.foretold({"set": {"runs": [run]}})
    assert sum(counts for *_, counts in rows.values()).tolist() == [[1, 1, 1], [2, 0, 1]]
    more = devices.foretold({"set": {"runs": [run | {"beyond_turns": 1}]}})["set", "1 domain, dirichlet 0.3"]
    assert more[-1].tolist() == [[1, 0, 0], [1, 0, 0]]
    head, _, *lines, total = devices.foretold_table({"set": {"runs": [run]}})
    assert len(lines) == 3 and "| one, own shares | +2.0 | +5.4 | +4.0 | 1, 0, 0 | 1, 0, 0 |" in lines[0]
    assert total.endswith("| 1, 1, 1 | 2, 0, 1 |") and head.count("|") == total.count("|")


def test_the_tables_of_the_page_have_each_kind_and_few_rare_images_are_left_out():
    span, rows = [1.25, -0.5, 3.0], (*devices.COLUMNS, devices.PLAIN)
    table = {
        kind: {row: {"avg": 60.0, "gain": span, "rare": 50.0, "rare gain": span, "rare queries": asked} for row in rows}
        for kind, asked in (("1 domain, even", 29), ("5 domains, dirichlet 0.3", 30))
    }
    table["1 domain, own shares"] = table["1 domain, even"]
    real, drawn, rare = "\n".join(devices.tables({"cells": {"table": table}})).split("\n\n")
    assert [line.split(" | ")[1] for line in (real + "\n" + drawn).splitlines() if "`cells`" in line] == [
        "one, own shares", "one, balanced", "five mixed, Dirichlet 0.3"
    ]  # fmt: skip
    assert real.endswith("| +1.2 | +1.2 (-0.5 to +3.0) |") and rare.count("cells") == 1
    for lines, cells in ((real, 12), (drawn, 12), (rare, 10)):
        assert {line.count("|") for line in lines.splitlines()} == {cells}
