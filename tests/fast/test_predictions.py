"""Files of SpeciesNet and MegaDetector: how they are read beside a plain loop, what is written back, and mistakes."""

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.special import softmax

from cxda_jax.adapter.features import read_labelled
from cxda_jax.adapter.predictions import LEAST, read_predictions
from cxda_jax.device.traps import _rewritten
from tests import traps
from tests.commands import command
from tests.lines import refused
from tests.traps import NAMES, OTHER, SPECIES, write_json, write_table

FORMATS = {"speciesnet": 5, "older_speciesnet": 5, "megadetector": 3}
COLUMNS = {name: i for i, name in enumerate(NAMES)}
FILES, LABELS, SCORES = traps.survey(3, 5)
RNG = np.random.default_rng(1)
DETECTED = traps.box(0.5) | {"raw_classifications": {"classes": [SPECIES["fox"]], "scores": [0.7]}}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "labels.csv", "label", FILES, LABELS)
    return tmp_path


def made(kind="speciesnet", most=3, **options):
    return getattr(traps, kind)(FILES, SCORES, most, **options)


def opened(content, path="p.json"):
    with open(path, "w") as file:
        json.dump(content, file)
    return read_predictions(Path(path))


def by_hand(scores, names):
    """Logits of one image: what is listed, and the rest of 1 in equal parts for columns that are not."""
    given = dict(zip(names, scores, strict=True))
    absent = [name for name in NAMES if name not in given]
    part = min([*scores, *((1 - sum(scores)) / len(absent) for _ in absent[:1])])
    return [math.log(max(given.get(name, part), LEAST)) for name in NAMES]


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_gives_the_logits_of_what_it_lists(kind):
    found = opened(made(kind))
    logits, field = found.logits(COLUMNS)
    texts = {text: name for name, text in SPECIES.items()} | {OTHER: "lynx"}
    for row, place in zip(logits, found.places, strict=True):
        names = [found.names.get(key, texts.get(key)) for key, _ in place.listed]
        np.testing.assert_allclose(row, by_hand([score for _, score in place.listed], names), rtol=1e-5)
    assert field == "scores" and len(logits) == len(FILES) == sum(place.leads for place in found.places)
    assert found.cameras(None) == [file.rpartition("/")[0] for file in FILES]
    assert found.about["predictions"] == ("MegaDetector" if kind == "megadetector" else "SpeciesNet")


def test_a_column_is_named_by_the_text_or_by_its_last_part():
    found = opened(made())
    both, _ = found.logits({SPECIES["deer"]: 0, "cow": 1, "fox": 2, "boar": 3, "blank": 4})
    np.testing.assert_array_equal(both, found.logits(COLUMNS)[0])
    twice = {"classes": [SPECIES["fox"], "uuid-9;;;;;;fox"], "scores": [0.5, 0.25]}  # two classes of one name
    alone = {"filepath": "a/b.jpg", "detections": [traps.box(0.5) | {"raw_classifications": twice}]}
    found = opened({"predictions": [alone]})
    np.testing.assert_allclose(np.exp(found.logits({"fox": 0, "cow": 1})[0]), [[0.75, 0.25]], rtol=1e-6)
    twice["scores"] = [0.5, 0.1]  # what is not listed has no more than the least that is
    np.testing.assert_allclose(np.exp(opened({"predictions": [alone]}).logits({"fox": 0, "cow": 1})[0]), [[0.6, 0.1]])


def test_target_logits_are_read_where_they_tell_all_columns():
    content = made(targets=True)
    logits, field = opened(content).logits(COLUMNS)
    assert field == "target_logits"
    np.testing.assert_allclose(softmax(logits, 1), SCORES[:, :-1] / SCORES[:, :-1].sum(1, keepdims=True), atol=1e-4)
    assert opened(content).logits({**COLUMNS, "lynx": 5})[1] == "scores"
    for prediction in content["predictions"]:  # as older versions wrote them, perhaps of another image
        prediction["classifications"] = prediction.pop("detections")[0]["raw_classifications"]
    assert opened(content).logits(COLUMNS)[1] == "scores"


def test_the_most_confident_classified_detection_stands_for_the_image():
    content = made()
    first, second, third, *_ = content["predictions"]
    first["detections"] = [traps.box(0.99, "2"), DETECTED, DETECTED | {"conf": 0.6}]
    first["detections"][2]["raw_classifications"] = {"classes": [SPECIES["cow"]], "scores": [0.8]}
    second["detections"], third["failures"] = [], ["DETECTOR"]
    del third["detections"]
    found = opened(content)
    assert [(place.image, place.leads) for place in found.places[:3]] == [(0, False), (0, True), (3, True)]
    assert found.places[1].listed == [(SPECIES["cow"], 0.8)]
    written, _, _, answers = rewritten(content, np.tile([0, 0, 9.0, 0, 0], (len(found.places), 1)))
    assert [answer.file for answer in answers] == [FILES[0], *FILES[3:]] and answers[0].before == "cow"
    assert {SPECIES["fox"]} == {place.held["classes"][0] for place in written.places}  # all detections


def test_cameras_and_labels_come_from_tables_that_name_the_end_of_a_path(here):
    content = made()
    content["predictions"][0]["filepath"] = "C:\\survey\\camera00\\0000.jpg"
    names = [file.removeprefix("survey/") for file in FILES]
    write_table(here / "locations.csv", "location", names, np.repeat(["north", "south"], [10, 5]))
    write_table(here / "some.csv", "label", [*names[:9], "other.jpg"], [*LABELS[:9], "lynx"])
    found = opened(content)
    assert found.cameras(here / "locations.csv") == ["north"] * 10 + ["south"] * 5
    assert found.told(here / "some.csv", "label") == [*LABELS[:9], *[""] * 6]
    text = (here / "some.csv").read_text()
    (here / "theirs.csv").write_text(text.replace("file,", "filepath,"))
    assert found.told(here / "theirs.csv", "label") == found.told(here / "some.csv", "label")
    (here / "theirs.csv").write_text(text.replace(",", ";"))
    with refused("no column 'file', 'label' beside 'file;label'", here):
        found.told(here / "theirs.csv", "label")
    for table, column, rows, said in (
        ("l", "location", [(names[0], "a")], "file='survey/camera00/0001.jpg'"), ("l", "label", [("0001.jpg", "fox")], "0001.jpg"),
        ("l", "label", [(FILES[1], "fox"), (names[1], "cow")], "label 'fox' before"), ("l", "label", [("x.jpg", "fox")], "x.csv|no file"),
        ("l", "other", [(names[0], "a")], "no column 'label'"),
    ):  # fmt: skip
        write_table(here / f"{table}.csv", column, *zip(*rows, strict=True))
        with refused(said, here):
            found.cameras(here / "l.csv") if column == "location" else found.told(here / "l.csv", "label")


def test_the_command_writes_what_fit_takes(here):
    content = made("megadetector")
    content["images"][4] |= {"detections": None, "failure": "Failure image access"}
    write_json(here / "p.json", content)
    write_table(here / "labels.csv", "label", FILES[:12], LABELS[:12])
    asked = "features", "--predictions=p.json", "--labels=labels.csv", "--out=f.npz"
    said = command(*asked)
    assert "14 images of 3 cameras, 1 without classes" in said and " of 11 labels" in said
    with np.load("f.npz") as arrays:
        kept, shown, paths = arrays["logits"], arrays["labels"], arrays["paths"].tolist()
    assert paths == [file for i, file in enumerate(FILES) if i != 4] and (shown[11:] == -1).all()
    names = sorted({*LABELS[:12]})
    known = read_labelled(here / "f.npz")
    assert known.style is None and known.origin["classes"] == names and known.origin["predictions"] == "MegaDetector"
    assert [names[i] for i in known.labels] == [label for i, label in enumerate(LABELS[:12]) if i != 4]
    expected = read_predictions(here / "p.json").logits({name: i for i, name in enumerate(names)})[0]
    np.testing.assert_array_equal(kept, expected)
    assert "as it is" in command(*asked)
    content["images"][0]["detections"][0]["classifications"][0][1] += 0.001
    write_json(here / "p.json", content)
    assert "f.npz: made with images=" in command(*asked, code=2)
    (here / "names.txt").write_text("\n".join([*NAMES, "kudu"]))
    assert "kudu" in command(*asked[:-1], "--out=g.npz", "--classes=names.txt")
    assert read_labelled(here / "g.npz").logits.shape[1] == 6


def test_what_looks_like_a_slip_is_told(here):
    """A mistyped label, lines of other files, one camera for all images, and classes that nobody labelled."""
    write_json(here / "p.json", made())
    asked = "features", "--predictions=p.json", "--out=f.npz", "--labels=labels.csv"
    write_table(here / "labels.csv", "label", FILES[:2], ["Deear", "fox"])
    said = command(*asked, code=2)
    assert "label='Deear'" in said and "'deer'" in said
    write_table(here / "labels.csv", "label", [*FILES[:2], "elsewhere/7.jpg"], ["deer", "fox", "cow"])
    said = command(*asked)
    assert "elsewhere/7.jpg" in said and "with labels: 1" in said and "boar" in said and "--locations" not in said
    write_table(here / "one.csv", "location", FILES, ["x"] * len(FILES))
    assert "--locations" in command(*asked[:2], "--out=g.npz", asked[3], "--locations=one.csv")


def test_flags_of_images_and_of_predictions_do_not_mix(here):
    write_json(here / "p.json", made())
    for name, wrong in (
        ("features", "--encoder=m.onnx"), ("features", "--images=a"), ("features", "--size=32"),
        ("adapt", "--buffer=a"), ("adapt", "--encoder=m.onnx"), ("adapt", "--method=t3a"),
    ):  # fmt: skip
        said = command(name, "--predictions=p.json", wrong, code=2)
        assert wrong.partition("=")[0] in said and "beside --predictions" in said
    for name, wrong in (("features", "--labels=labels.csv"), ("adapt", "--locations=a.csv")):
        assert f"{wrong}: given without --predictions" in command(name, wrong, code=2)
    assert "--labels is missing" in command("features", "--predictions=p.json", "--out=f.npz", code=2)


def changed(content, *places, to):
    """A copy in which the value at these places is another; None: it is missing."""
    content = copy.deepcopy(content)
    *inner, last = places
    held = content
    for place in inner:
        held = held[place]
    if to is None:
        del held[last]
    else:
        held[last] = to
    return content


IN = "predictions", 2, "detections", 0
RAW = *IN, "raw_classifications"
PAIRS = "images", 2, "detections", 0, "classifications"
WRONG = [
    ("speciesnet", ("predictions",), None, "predictions"), ("speciesnet", ("predictions",), {}, "predictions"),
    ("speciesnet", ("info",), 3, "info"), ("speciesnet", IN[:2], "x", "predictions.2"),
    ("speciesnet", (*IN[:2], "filepath"), None, "filepath"), ("speciesnet", (*IN[:2], "filepath"), 7, "filepath=7"),
    ("speciesnet", (*IN[:2], "detections"), 7, "detections=7"), ("speciesnet", (*IN, "conf"), "high", "conf='high'"),
    ("speciesnet", RAW, [1], r"\[1\]"), ("speciesnet", (*RAW, "classes"), None, "classes"),
    ("speciesnet", (*RAW, "scores", 0), 1.5, "scores.0=1.5"), ("speciesnet", (*RAW, "scores", 0), True, "scores.0=True"),
    ("speciesnet", (*RAW, "scores", 0), math.nan, "scores.0=nan"), ("speciesnet", (*RAW, "scores"), [0.5], "scores="),
    ("speciesnet", (*RAW, "classes", 1), 4, "classes.1=4"), ("speciesnet", RAW, {"classes": [], "scores": []}, "without classes"),
    ("older_speciesnet", ("predictions", 2, "classifications"), 5, "camera00/0002.jpg"),
    ("megadetector", ("images",), 5, "images=5"), ("megadetector", ("images", 2, "file"), None, "file"),
    ("megadetector", (*PAIRS, 0), ["10"], "classifications.0"), ("megadetector", (*PAIRS, 0, 0), "99", "class '99'"),
    ("megadetector", (*PAIRS, 0, 0), 10, "classes.0=10"), ("megadetector", (*PAIRS, 0, 1), "x", "scores.0='x'"),
    ("megadetector", ("classification_categories", "10"), 5, "classification_categories.10=5"),
    ("megadetector", ("classification_categories",), None, "lacks the class"),
    ("megadetector", ("info", "adapted_by"), "cxda_jax 1", "info.adapted_by='cxda_jax 1'"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "places", "to", "said"), WRONG)
def test_what_is_no_such_file_is_named(kind, places, to, said, here):
    with refused(said, here, named="p.json"):
        opened(changed(made(kind), *places, to=to), here / "p.json")


def test_a_label_that_no_prediction_names_is_a_mistake_unless_all_columns_are_given(here):
    write_json(here / "p.json", made())
    write_table(here / "labels.csv", "label", FILES, ["Deer", *LABELS[1:]])
    asked = "features", "--predictions=p.json", "--labels=labels.csv", "--out=f.npz"
    assert "label='Deer'" in command(*asked, code=2)
    (here / "names.txt").write_text("\n".join(NAMES))
    assert "--classes: the label 'Deer'" in command(*asked, "--classes=names.txt", code=2)


def rewritten(content, factors, columns=COLUMNS):
    """What is written back, and the logits that were read."""
    found = opened(content)
    logits, _ = found.logits(columns)
    own = factors - np.log((softmax(logits, 1) * np.exp(factors)).sum(1, keepdims=True))  # sums stay
    answers = list(_rewritten(found, columns, logits, own, [""] * len(found.files)))
    return found, logits, own, answers


@pytest.mark.parametrize("kind", FORMATS)
def test_without_a_change_a_file_stays_as_it_is(kind):
    content = made(kind)
    found = opened(content)
    answers = list(_rewritten(found, COLUMNS, *[np.zeros((len(FILES), 5))] * 2, [""] * len(FILES)))
    assert found.content == content and [a.before for a in answers] == [a.after for a in answers]


@pytest.mark.parametrize("kind", FORMATS)
def test_scores_follow_the_factors_and_all_else_stays(kind):
    content = made(kind, FORMATS[kind])
    found, logits, own, answers = rewritten(content, RNG.normal(0, 1.5, (len(FILES), 5)))
    before, after = (list(flat(c)) for c in (content, found.content))
    places = {name: value for name, value in after if dict(before).get(name) != value}
    assert places and all("classif" in name and "processed" not in name for name in places)
    for row, factor, place, answer in zip(logits, own, found.places, answers, strict=True):
        new, expected = dict(listed_in(place.held)), np.exp(row).sum() * softmax(row + factor)
        for key, score in place.listed:
            column = found.column(key, COLUMNS)
            if column < 0:
                assert new[key] == score
            elif score >= LEAST:
                assert abs(new[key] - expected[column]) < 1e-4
        scores = [score for _, score in listed_in(place.held)]
        assert scores == sorted(scores, reverse=True) and sum(scores) <= 1.001
        assert answer.after_confidence == scores[0]


def flat(value, name=""):
    """The values in a file, by their places."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(inner, f"{name}.{key}")
    else:
        yield name, value


def listed_in(held):
    return list(zip(held["classes"], held["scores"], strict=True)) if "classes" in held else held["classifications"]


def test_target_logits_move_with_the_scores():
    content = made(targets=True)
    found, logits, own, _ = rewritten(content, RNG.normal(0, 1, (len(FILES), 5)))
    for row, factor, place in zip(logits, own, found.places, strict=True):
        np.testing.assert_allclose(place.held["target_logits"], row + factor, rtol=1e-5)


def test_the_likeliest_class_is_added_where_it_was_not_listed():
    alone = {"classes": [SPECIES["fox"]], "scores": [0.6]}
    content = {"predictions": [{"filepath": "a.jpg", "classifications": alone}, {"filepath": "b.jpg", "classifications": {
        "classes": [SPECIES["cow"]], "scores": [0.9]}}]}  # fmt: skip
    columns = {"fox": 0, "cow": 1, "boar": 2}
    found, logits, own, (first, _) = rewritten(content, np.array([[0, 3.0, 0], [0, 0, 0]]), columns)
    expected = softmax(logits[0] + own[0])
    assert found.content["predictions"][0]["classifications"]["classes"] == [SPECIES["cow"], SPECIES["fox"]]
    assert (
        first.before == "fox"
        and first.after == "cow"
        and first.after_confidence == pytest.approx(expected[1], abs=1e-5)
    )
    listed, *_ = rewritten(content, np.array([[0, 0, 3.0], [0, 0, 0]]), columns)  # no text of the file is a boar
    assert listed.content["predictions"][0]["classifications"]["classes"] == [SPECIES["fox"]]


def test_a_file_may_hold_no_images():
    found = opened({"predictions": []})
    assert found.logits(COLUMNS)[0].shape == (0, 5) and not found.places
    with refused("names no file"):
        found.told(Path("labels.csv"), "label")
