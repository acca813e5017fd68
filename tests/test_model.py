"""A trained model by itself: its files, its card, and answers that are those of the evaluation."""

import json
import shutil

import jax
import numpy as np
import pytest
from PIL import Image

import cxda_jax
from cxda_jax.device.model import SHIPPED
from cxda_jax.disk import manifest, models
from cxda_jax.errors import UserError
from cxda_jax.experiment import METHODS, build_method, open_data
from cxda_jax.study.identity import read_config
from cxda_jax.study.results import read_result
from cxda_jax.types import Images
from tests.commands import command

TASKS = 50
TRAINED = [name for name in METHODS if name not in ("erm_iid", "sla")]


@pytest.fixture(scope="module")
def runs(smoke, erm_run):
    """A folder of smoke runs, one a network that can be trained, and the data."""
    return smoke[0]


def trained(runs, name):
    """A run of a method, of few steps; the one of erm for what starts from it."""
    if name == "cxda":
        return runs / "run"
    config = read_config(runs / "run")
    if build_method({**config, "method": name}, open_data(config, runs / "data")).trains_as:
        return runs / "erm"
    folder = runs / f"of_{name}"
    if not folder.exists():
        options = "--config.train.steps=4", "--config.evaluation.every_steps=4", "--config.evaluation.test_tasks=4"
        command("train", f"--config=glyphs:{name},smoke", f"--workdir={folder}", f"--data_dir={runs}/data", *options)
    return folder


@pytest.mark.parametrize("name", TRAINED)
def test_a_loaded_model_answers_as_the_evaluation_does(runs, name):
    run = trained(runs, name)
    command("evaluate", f"--runs={run}", f"--methods={name}", f"--num_tasks={TASKS}", f"--data_dir={runs}/data")
    folder = run if read_config(run)["method"] == name else run / name
    result = read_result(run, folder)
    stored, model = result.stored(), cxda_jax.load(run, name)
    store = open_data(result.config, runs / "data")
    domains = store.row_domains()
    key = jax.random.fold_in(jax.random.key(result.config["evaluation"]["seed"]), 2**32 - 1)
    agreeing, classes = [], list(model.card.class_names)
    for task, (support, query) in enumerate(zip(stored["support"], stored["query"], strict=True)):
        of = (domains[support], domains[query]) if model.method.uses_domains else (None, None)
        adapted = model.adapt(store.images[support], of[0], jax.random.fold_in(key, task))
        answers = adapted.predict(store.images[query], of[1])
        assert answers.probabilities.shape == (len(query), len(classes))
        np.testing.assert_allclose(answers.probabilities.sum(1), 1, atol=1e-9)
        np.testing.assert_array_equal(answers.confidences, answers.probabilities.max(1))
        numbers = np.array([classes.index(name) for name in answers.names])
        agreeing += (numbers == stored["predictions"][task]).tolist()
        if model.method.attention and not task:
            weights = adapted.attention(store.images[query], of[1])
            assert weights.shape[::2] == (len(query), len(support))
    assert np.mean(agreeing) == 1.0, name
    assert len(agreeing) == TASKS * stored["query"].shape[1]


def test_a_model_alone_in_a_folder_is_enough(runs, tmp_path):
    shutil.copytree(runs / "run" / "model", tmp_path / "it")
    model = cxda_jax.load(tmp_path / "it")
    assert model.card.class_names[:3] == ("0", "1", "2") and model.card.shape == (28, 28, 1)
    assert (model.card.fit, model.card.background) == ("pad", (255, 255, 255))
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (28, 28, 1), np.uint8) for _ in range(5)]
    before, after = model.predict(images), model.adapt(images[:3]).predict(images)
    assert np.abs(before.probabilities - after.probabilities).max() > 1e-4
    np.testing.assert_array_equal(model.predict(images).probabilities, before.probabilities)
    plain = model.adapt([]).predict(images)
    np.testing.assert_array_equal(plain.probabilities, before.probabilities)
    assert model.predict([]).names == () and model.predict([]).probabilities.shape == (0, 62)
    many = model.predict(images * 30)  # more than one program takes at once
    np.testing.assert_allclose(many.probabilities, np.tile(before.probabilities, (30, 1)), atol=1e-6)
    one = [model.predict([image]).probabilities[0] for image in images]
    np.testing.assert_allclose(one, before.probabilities, atol=1e-6)


def test_the_card_says_what_was_trained_and_what_adapting_brought(runs):
    result = read_result(runs / "run", runs / "run")
    card, row, stored = models.read_card(runs / "run" / "model"), result.row, result.stored()
    assert (card.method, card.seed, card.data) == ("cxda", 0, row["data_name"])
    assert (card.data_hash, card.step) == (row["data_hash"], row["best_step"])
    readme = (runs / "run" / "model" / "README.md").read_text()
    gain = card.gain
    assert gain and gain.sizes == (0, 1, 2, 5, 10, 20, 50, 100) and gain.tasks == 4
    assert gain.mean[0] == gain.low[0] == gain.high[0] == 0
    assert all(low <= mean <= high for low, mean, high in zip(gain.low, gain.mean, gain.high, strict=True))
    np.testing.assert_allclose(np.subtract(gain.score, gain.score[0]), gain.mean, atol=0.011)
    scores = 100 * (stored["predictions"] == stored["labels"]).mean(1)
    test = card.test
    assert test and test["num_tasks"] == len(scores) == row["num_tasks"]
    assert abs(test["avg"] - scores.mean()) < 1e-6 and test["w10"] == row["w10"]
    assert test["avg_low"] <= test["avg"] <= test["avg_high"] and test["w10_low"] <= test["w10_high"]
    half = 1.96 * scores.std() / np.sqrt(len(scores))  # the normal approximation, for ten tasks
    assert abs(test["avg_high"] - test["avg_low"] - 2 * half) < half
    for said in ("# glyphs", "`cxda`, seed 0", f"step {card.step}", card.data_hash[:12], "none needed", "| 100 | "):
        assert said in readme
    assert not manifest.find_fault(runs / "run" / "model")


def test_the_gain_is_that_of_the_contexts_of_the_evaluation(runs):
    """Measured by one program with places, it equals what --context measures with a program for each number."""
    command(
        "evaluate",
        f"--runs={runs}/run",
        "--validation",
        "--context=0,1,10,100",
        "--num_tasks=4",
        f"--data_dir={runs}/data",
    )
    gain = models.read_card(runs / "run" / "model").gain
    for n in (0, 1, 10, 100):
        row = json.loads((runs / "run" / f"cxda,context={n},validation" / "result.json").read_text())
        assert abs(row["avg"] - gain.score[gain.sizes.index(n)]) < 0.01


@pytest.mark.parametrize(
    ("means", "since"),
    [((0, 1, 2), 1), ((0, -1, 2), 2), ((0, 1, -1), None), ((0, 0, 0), None), ((0, 1, 0), None), ((0,), None)],
)
def test_adapting_helps_from_where_it_gains_at_every_larger_size(means, since):
    means = tuple(map(float, means))
    assert models.Gain(tuple(range(len(means))), means, means, means, means, 5).helps_from() == since


def test_what_starts_from_erm_needs_its_network_and_what_it_kept_of_training(runs, tmp_path):
    with pytest.raises(UserError, match="trained as cxda, from which it cannot start"):
        cxda_jax.load(runs / "run", "t3a")
    with pytest.raises(UserError, match="method='lamee'.*did you mean|method='lamee'"):
        cxda_jax.load(runs / "erm", "lamee")
    shutil.copytree(runs / "erm" / "model", tmp_path / "erm")
    (tmp_path / "erm" / models.CALIBRATION).unlink()
    manifest.write(tmp_path / "erm", [path.name for path in (tmp_path / "erm").iterdir() if path.name != manifest.NAME])
    with pytest.raises(UserError, match="'feature_shift': .* lacks what it needs to know of the training images"):
        cxda_jax.load(tmp_path / "erm", "feature_shift")
    assert cxda_jax.load(tmp_path / "erm", "t3a").method.name == "t3a"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: (f / "weights.safetensors").write_bytes(b"no"),
            "weights.safetensors differs from its recorded hash",
        ),
        (lambda f: (f / "card.json").write_text("{}"), "card.json differs from its recorded hash"),
        (lambda f: (f / "manifest.json").unlink(), "no manifest.json"),
        (lambda f: (f / "weights.safetensors").unlink(), "no model in it; give a run of cxda train"),
    ],
)
def test_a_damaged_model_is_one_line(runs, tmp_path, damage, message):
    shutil.copytree(runs / "run" / "model", tmp_path / "it")
    damage(tmp_path / "it")
    with pytest.raises(UserError, match=message):
        cxda_jax.load(tmp_path / "it")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"class_names": None}, "'class_names'|class_names=None"),
        ({"shape": [28, 28]}, r"shape=\(28, 28\) has not 3 numbers"),
        ({"gain": {"sizes": [0]}}, "gain: no 'score'"),
        ({"test": {"avg": "many", "w10": 1, "num_tasks": 2}}, "test: avg='many', expected a number"),
        ({"commit": 5}, "commit=5, expected a text"),
    ],
)
def test_a_card_that_says_something_else_is_one_line(runs, tmp_path, changes, message):
    folder = tmp_path / "it"
    shutil.copytree(runs / "run" / "model", folder)
    content = {**json.loads((folder / models.CARD).read_text()), **changes}
    (folder / models.CARD).write_text(json.dumps(content))
    manifest.write(folder, [path.name for path in folder.iterdir() if path.name != manifest.NAME])
    with pytest.raises(UserError, match=message):
        models.read_card(folder)


def test_a_model_without_a_card_says_what_to_do(runs, tmp_path):
    shutil.copytree(runs / "run" / "model", tmp_path / "it")
    (tmp_path / "it" / models.CARD).unlink()
    manifest.write(tmp_path / "it", [models.WEIGHTS, models.CONFIG])
    with pytest.raises(UserError, match=r"card.json: missing; .* go on with the training's command"):
        cxda_jax.load(tmp_path / "it")


def test_images_of_any_kind_are_fitted_and_wrong_ones_are_one_line(runs, tmp_path):
    model = cxda_jax.load(runs / "run")
    rng = np.random.default_rng(1)
    own = rng.integers(0, 256, (28, 28, 1), np.uint8)
    np.testing.assert_array_equal(model.fit(own), own)
    Image.fromarray(own[..., 0]).save(tmp_path / "it.png")
    for same in (
        own[..., 0],
        tmp_path / "it.png",
        str(tmp_path / "it.png"),
        Image.open(tmp_path / "it.png"),
        own / 255,
    ):
        np.testing.assert_array_equal(model.fit(same), own)
    wide = np.zeros((10, 40, 3), np.uint8)
    fitted = model.fit(wide)
    assert fitted.shape == (28, 28, 1) and (fitted[0] == 255).all() and (fitted[14] == 0).all()  # padded with paper
    for wrong, message in (
        ("it.png", "give a list of images"),
        (own, r"images=an array \(28, 28, 1\): give a list of images"),
        ([tmp_path / "none.png"], "none.png: missing"),
        ([None], "got a NoneType; give a path"),
        ([own[None]], "one image at a time"),
        ([own.astype(float)], r"0\.\.1"),
    ):
        with pytest.raises(UserError, match=message):
            model.predict(wrong)
    with pytest.raises(UserError, match="domains: 1 for 2 images"):
        model.adapt([own, own], domains=[0])
    assert isinstance(model.as_images([own]), Images)


@pytest.mark.parametrize("name", ["glyphs", "unipen"])
def test_the_models_of_the_package_are_small_and_say_where_they_are_from(name):
    folder = SHIPPED / name
    assert sum(path.stat().st_size for path in folder.iterdir()) < 2e6
    model = cxda_jax.load(name)
    card = model.card
    assert (card.data, card.method, len(card.class_names), card.fit) == (
        name,
        {"glyphs": "cxda_any", "unipen": "icrm"}[name],
        62,
        "pad",
    )
    assert len(card.commit) > 6 and "+" not in card.commit
    assert card.licence and card.test and card.gain and card.gain.tasks == 100 and card.test["num_tasks"] == 600
    assert (folder / models.README).read_text() == models.in_words(card) + "\n"
    assert name != "unipen" or "CC BY 4.0" in card.licence
    white = np.full((28, 28, 1), 255, np.uint8)
    assert model.adapt([white] * 3).predict([white]).probabilities.shape == (1, 62)
