"""fit() on what a classifier says: what it gains and what it says of that, and what is wrong with its arguments."""

import copy
import functools
import itertools
import json
import math
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pandas
import pytest
import scipy.optimize
from PIL import Image
from scipy.special import softmax

import cxda_jax
from cxda_jax.adapter import adapter as adapters
from cxda_jax.adapter import correction, judge
from cxda_jax.adapter import fit as fitting
from cxda_jax.adapter.correction import Labelled, correct, told_shares
from cxda_jax.adapter.fit import Clock, _checked, deal, gains_on, load_of
from cxda_jax.adapter.judge import by_rival, least_temperature
from cxda_jax.adapter.report import as_html, as_table, in_words
from cxda_jax.data.episodes import Plan
from cxda_jax.errors import UserError
from cxda_jax.training import metrics
from cxda_jax.types import ADAPTER
from docs.study import promises
from tests.commands import command
from tests.conftest import fully_compiled
from tests.lines import flip, one_line, refused

CLASSES, STYLE, RNG = 6, 8, np.random.default_rng(7)


def made(seed=0, domains=24, each=130, strength=2.0):
    """Logits of a classifier that is sure of itself and errs in each domain in another way, labels, domains, styles."""
    rng = np.random.default_rng(seed)
    labels, owner = rng.integers(0, CLASSES, domains * each), np.repeat(np.arange(domains), each)
    logits = strength * np.eye(CLASSES)[labels] + rng.normal(0, 1.2, (len(labels), CLASSES))
    styles = rng.normal(0, 1, (domains, STYLE))
    logits += 0.8 * (styles[:, :CLASSES])[owner]  # its bias follows from the style
    return 3 * logits, labels, owner, styles[owner] + rng.normal(0, 0.3, (len(labels), STYLE))


@pytest.fixture(scope="module", autouse=True)
def fewer_tasks():
    """Judging takes more time than training, and both take more than compiling them."""
    with pytest.MonkeyPatch.context() as patch, fully_compiled():
        for module in (judge, fitting):
            patch.setattr(module, "TASKS", 60)
        patch.setattr(judge, "BLOCK", 20)
        yield


@pytest.fixture(scope="module")
def fit(fewer_tasks):
    """One adapter for all tests that use one, and what fit() said. The README's lines make it, word for word."""
    said, tried, (logits, labels, domains, style) = [], [], made()
    lines = (Path(__file__).parent.parent / "README.md").read_text().split("```python\n")[2].split("```")[0]
    fit_briefly = functools.partial(cxda_jax.fit, minutes=60, steps=120, log=said.append)
    names = {
        "cxda_jax": SimpleNamespace(fit=fit_briefly),
        "logits": logits,
        "labels": labels,
        "domains": domains,
        "style": style,
    }
    names |= {
        "buffer_logits": logits[:5],
        "buffer_style": style[:5],
        "new_logits": logits[5:9],
        "new_style": style[5:9],
    }
    less_sure = fitting.less_sure

    def kept(*args):
        tried[:] = less_sure(*args)  # the adapter that is returned learns last
        return tried

    with pytest.MonkeyPatch.context() as watched:
        watched.setattr(fitting, "less_sure", kept)
        exec(compile(lines, "README.md", "exec"), names)
    assert names["proba"].shape == (4, CLASSES)
    return names["adapter"], said, tried


@pytest.fixture(scope="module")
def new():
    """Images of other domains."""
    return SimpleNamespace(**dict(zip(("logits", "labels", "domains", "style"), made(seed=1), strict=True)))


@pytest.mark.gate
def test_a_device_with_few_classes_gains(fit, new):
    """On new domains: with a buffer of its own images, and with those of two domains of which the style tells its own."""
    adapter, said, _ = fit
    assert adapter.helps and said[-1] == str(adapter) and repr(adapter) == "Adapter(6 classes, style of 8, trusted)"
    rng, right = np.random.default_rng(2), {"alone": [], "own": [], "two": [], "none": []}
    for _ in range(40):
        one, other = rng.choice(16, 2, replace=False)
        kinds = {domain: rng.choice(CLASSES, 2, replace=False) for domain in (one, other)}
        rows = {
            d: rng.permutation(np.flatnonzero((new.domains == d) & np.isin(new.labels, kinds[d]))) for d in (one, other)
        }
        query, own, others = rows[one][:8], rows[one][8:], rows[other]
        for name, buffer in (("own", own), ("two", np.concatenate([own, others])), ("none", own[:0])):
            device = adapter.adapt(new.logits[buffer], new.style[buffer])
            proba = device.predict_proba(new.logits[query], new.style[query])
            np.testing.assert_allclose(proba.sum(1), 1, atol=1e-5)
            right[name].append((proba.argmax(1) == new.labels[query]).mean())
        right["alone"].append((new.logits[query].argmax(1) == new.labels[query]).mean())
    means = {name: np.mean(values) for name, values in right.items()}
    assert means["none"] == means["alone"]
    assert means["own"] > means["alone"] + 0.1 and means["two"] > means["alone"] + 0.05, means


@pytest.mark.gate
def test_validation_says_how_much_of_the_errors_other_domains_share(fit):
    adapter, _, tried = fit
    (whole, *less), own = [v["params"][ADAPTER] for _, v in tried], adapter.variables["params"][ADAPTER]
    assert np.abs(whole["bias"]).max() > 0
    for part, params in zip((0.5, 0.25, 0), less, strict=True):
        for name, x in params.items():
            np.testing.assert_allclose(x, whole[name] * (part if name in ("bias", "offset") else 1), rtol=1e-6)
    best = max(tried, key=lambda scored: scored[0])[1]["params"][ADAPTER]
    for name, x in own.items():
        np.testing.assert_array_equal(x, best[name])


def test_where_balanced_mixtures_lose_a_buffer_is_trusted_less():
    variables = {"params": {ADAPTER: {"log_m": np.float32(1.0), "bias": np.ones(3)}}}

    def found(*gains):
        left = iter(gains)
        own = fitting.more_careful(variables, lambda _: next(left))["params"][ADAPTER]
        np.testing.assert_array_equal(own["bias"], np.ones(3))
        return round(math.exp(own["log_m"] - 1), 3), list(left)

    assert found(0.0, 1.0) == (1, [1.0])
    assert found(-0.1, 0.1, 1.0) == (2, [1.0])
    assert found(-0.2, -0.1, -0.3) == (2, [])


def test_the_gain_of_balanced_mixtures_is_of_validation_tasks_with_even_shares():
    plans = []

    class Told(judge.Judged):
        """Its adapted answers are the labels plus what the variables say."""

        def answers(self, variables, plan):
            if not plan.support.shape[1]:
                return super().answers(variables, plan)
            plans.append(plan)
            return np.eye(CLASSES)[(self.store.labels[plan.query] + variables) % CLASSES]

    logits, labels, domains, style = made(each=260)
    kept = (labels > 0) | (np.arange(len(labels)) % 3 == 0)  # of the first class a third
    logits, labels, domains, style = (x[kept] for x in (logits, labels, domains, style))
    judged = Told(*deal(_checked(logits, labels, domains, {"style": style}, 0))[0])
    gain = fitting._gain_of_balanced(judged)
    best, worst = gain(0), gain(1)
    support, query = plans[0]
    assert best == pytest.approx(1 - (logits.argmax(1) == labels)[query].mean()) and worst == pytest.approx(best - 1)
    assert all(len(np.unique(domains[task])) == 5 for task in support)
    assert {judged.store.split[d] for d in np.unique(domains[support])} == {"val"}
    shares = np.bincount(labels[np.concatenate([support, query], 1)].ravel()) / (60 * 120)
    assert np.abs(shares - 1 / CLASSES).max() < 0.03 < 0.08 < 1 / CLASSES - (labels == 0).mean()


@pytest.mark.parametrize("count", [3, 4, 5, 6, 8, 13, 40])
def test_each_domain_judges_once_and_never_an_adapter_that_it_taught_or_chose(count):
    logits, labels, domains, style = made(domains=count)
    judged = _checked(logits, labels, domains, {"style": style}, 0)
    whole, *turns = deal(judged)
    assert len(turns) == (3 if count < 8 else 4) and {*whole.store.split} == {"train", "val"}
    judges = np.concatenate([turn.store.domains("test") for turn in turns])
    assert sorted(judges) == [*range(count)]
    for turn in turns:
        assert {*turn.store.split} == {"train", "val", "test"} and turn.store.images is judged.store.images
        of = {split: {*turn.rows_of(split)} for split in ("train", "val", "test")}
        assert sum(map(len, of.values())) == len(labels) and not of["test"] & (of["train"] | of["val"])
    small = np.isin(domains, np.arange(count - 3)) & (np.arange(len(labels)) % 13 > 0)  # all but three have 10 images
    dealt = deal(_checked(logits[~small], labels[~small], domains[~small], {"style": style[~small]}, 0))
    for turn in dealt[1:]:
        assert all(turn.most_domains(split) for split in ("train", "val", "test"))


@pytest.mark.gate
def test_the_report_is_of_plain_numbers_and_says_what_was_found(fit):
    adapter, said, _ = fit
    report = json.loads(json.dumps(adapter.report))
    assert report == adapter.report and report["steps"] == report["asked"] == 120
    assert [*report["gain"]] == [*report["headroom"]]  # one name for one kind of tasks
    for row in (*report["gain"].values(), report["overall"]):
        assert row["0"] == [0, 0, 0] and all(row[n][1] <= row[n][0] <= row[n][2] for n in ("5", "20", "100"))
        assert row["over_labels"][0] == pytest.approx(row["100"][0] - row["labels"][0])
        assert f"{row['100'][0]:+.1f} ({row['100'][1]:+.1f} to {row['100'][2]:+.1f})" in said[-1]
    before, after = report["calibration"]["0"]["ece"][0], report["calibration"]["100"]["ece"][1]
    assert after < 0.05 < before
    assert report["drift"]["false_alarms"] < 0.2 and "by heart" not in said[-1]
    assert {*report["by_domain"]} == {*map(str, range(24))}
    gained = list(report["by_domain"].values())
    span = metrics.interval_over_groups(np.array([gained]), np.arange(24))[0]
    np.testing.assert_allclose(report["overall"]["100"], span)
    assert report["expected"] == metrics.after_selection(report["overall"]["100"], 24) <= span[0]
    assert said[-1].startswith("Trusted. ")
    bad = {**report, "right": 0.99, "overall": {**report["overall"], "100": [0.1, -0.1, 0.3]}, "steps": 90}
    bad["gain"] = {"1 domain, <even> shares": {**row, "5": [-1.0, -1.5, -0.5]}}
    told, page = in_words(bad), as_html(bad)
    assert "give images that it was not trained on" in told
    assert told.startswith("Not trusted. ") and "90 of 120" in told
    assert "1 domain, <even> shares with 5 images" in told and "&lt;even&gt;" in page and "<even>" not in page
    assert page.count("<tr>") == 3 and page.count("<td>") == 2 * page.count("<th>")


def test_the_same_labels_without_a_buffer_are_a_rival_that_learns_errors_and_no_shares():
    """Beside scipy's numerical gradient; on skewed domains whose errors follow the style."""
    logits, labels, domains, style = made(seed=3, domains=30)
    kept = RNG.random(len(labels)) < np.where((labels + domains) % CLASSES < 2, 1.0, 0.2)  # other shares in each domain
    arrays = [x[kept].astype(np.float32) for x in (logits, style)] + [x[kept] for x in (labels, domains)]
    first = arrays[3] < 24
    learn, choose = (Labelled(*(x[of] for x in arrays)) for of in (first, ~first))
    found = correct(learn, choose)
    new = domains >= 24  # with all images of these domains
    right = [(z[new].argmax(1) == labels[new]).mean() for z in (logits, found(logits, style))]
    assert right[1] > right[0] + 0.05, right
    offset = told_shares(learn)
    for domain in range(24):
        of, t = learn.domains == domain, np.bincount(learn.labels, minlength=CLASSES) + 0.5
        q = (np.bincount(learn.labels[of], minlength=CLASSES) + t / t.sum()) / (of.sum() + 1)
        np.testing.assert_allclose(offset[of], np.tile(np.log(q) - np.log(t / t.sum()), (of.sum(), 1)), atol=1e-5)
    point, few = RNG.normal(0, 0.3, 1 + CLASSES + STYLE * CLASSES), slice(0, 40)
    z = point[0] * learn.logits[few] + point[1:7] + learn.style[few] @ point[7:].reshape(STYLE, CLASSES) + offset[few]
    expected = -np.log(softmax(z, -1)[np.arange(40), learn.labels[few]]).mean() + 0.05 * (point[7:] ** 2).sum()
    given = (point, learn.style, learn.logits, learn.labels, offset)
    loss, _ = correction._objective()(*(x if x is point else x[few] for x in given), 0.1)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert not correct(learn, choose._replace(labels=choose.logits.argmax(1))).weights.any()  # nothing to correct


@pytest.mark.gate
def test_probabilities_have_the_temperature_of_the_buffer_and_answers_have_none(fit, new):
    adapter, few = fit[0], slice(0, 40)
    own = {n: adapter.report["calibration"][str(n)]["temperature"] for n in adapters.SIZES}
    between = own[5] + (own[20] - own[5]) * math.log(11 / 6) / math.log(21 / 6)
    for n, temperature in ((0, own[0]), (5, own[5]), (10, between), (130, own[100])):
        device = adapter.adapt(new.logits[:n], new.style[:n])
        z = device.predict_logits(new.logits[few], new.style[few])
        p = np.exp(z / temperature - (z / temperature).max(1, keepdims=True))
        proba = device.predict_proba(new.logits[few], new.style[few])
        np.testing.assert_allclose(proba, p / p.sum(1, keepdims=True), rtol=2e-5, atol=1e-7)
        if not n:
            np.testing.assert_array_equal(z, new.logits[few].astype(np.float32))


@pytest.mark.gate
def test_where_validation_does_not_gain_or_the_buffer_is_strange_the_classifier_answers(fit, new):
    adapter, plain = fit[0], new.logits.astype(np.float32)
    useless = adapter._replace(report={**adapter.report, "overall": {"100": [0.1, -0.2, 0.4]}})
    assert (
        not useless.helps and useless.trusted().helps and useless.trusted().adapt(new.logits[:9], new.style[:9]).adapted
    )
    np.testing.assert_array_equal(useless.adapt(new.logits, new.style).predict_logits(new.logits, new.style), plain)
    own, strange = (adapter.adapt(new.logits[:130], new.style[:130] + moved) for moved in (0, 4))
    assert repr([own, strange]) == "[Device(130 images, adapted), Device(130 images, not adapted)]"
    assert not own.drift and "deviations from the domains of fit()" in strange.drift
    np.testing.assert_array_equal(strange.predict_logits(new.logits, new.style), plain)
    stats, known = adapter.variables["batch_stats"]["adapter"], adapter.known
    mean = np.clip((new.style[:130] - stats["mean"]) / stats["std"], -5, 5).mean(0)
    by_hand = np.sqrt(((mean - known["centre"]) ** 2 / (known["between"] + known["within"] / 130)).mean())
    assert adapter.distance(own.images) == pytest.approx(by_hand, rel=1e-4)


@pytest.mark.gate
def test_another_domain_tells_the_gain_beside_em(fit, new):
    adapter, only = fit[0], new.domains == 3
    report = gains_on(adapter, *(x[only] for x in (new.logits, new.labels, new.domains, new.style)))
    assert [*report["by_domain"]] == ["3"] and "expected" not in report
    assert [*report["gain"]] == [f"1 domain, {shares}" for shares in ("own shares", "Dirichlet 0.3", "even shares")]
    for row in report["gain"].values():
        assert row["0"] == [0, 0, 0] and row["over_em"][0] == pytest.approx(row["100"][0] - row["em"][0])
    assert f"{row['em'][0]:+.1f}" in as_table(report) and report["calibration"]["0"][
        "temperature"
    ] == adapter.temperature(0)
    judged = _checked(new.logits, new.labels, new.domains, {"style": new.style}, 0)
    plan = Plan(RNG.integers(0, 2000, (2, 30)), RNG.integers(0, 2000, (2, 4)))
    known, found = adapter.known, by_rival(judged, adapter.known, plan)
    z = judged.rows[:, :CLASSES] * known["scale"] + known["bias"]
    for task, (support, query) in enumerate(zip(*plan, strict=True)):
        q, p = known["shares"], softmax(z[support], -1)
        for _ in range(50):
            r = p * q / known["shares"]
            q = ((r / r.sum(1, keepdims=True)).sum(0) + 10 * known["shares"]) / 40
        np.testing.assert_allclose(found[task], z[query] + np.log(q / known["shares"]), atol=1e-3)


@pytest.mark.gate
def test_a_threshold_follows_from_the_errors_by_domain(fit):
    adapter = fit[0]
    thresholds, accepted, wrong = (adapter.known[name] for name in adapters.CURVES)
    assert accepted.shape == (2, 24, 100) and (wrong <= accepted).all() and (np.diff(thresholds) <= 0).all()
    for risk in (0.3, 0.5):
        level = metrics.surest_within(risk, accepted[1], wrong[1])
        assert level and adapter.threshold_for(risk) == thresholds[1, level - 1] < 1
    plain = adapter._replace(report={**adapter.report, "overall": {"100": [0.1, -0.2, 0.4]}})
    assert plain.threshold_for(0.5) == thresholds[0, metrics.surest_within(0.5, accepted[0], wrong[0]) - 1]
    assert plain.trusted().threshold_for(0.5) == adapter.threshold_for(0.5) != plain.threshold_for(0.5)
    assert adapter._replace(known={**adapter.known, "wrong": accepted}).threshold_for(0.05) == math.inf
    for risk in (5, -1, math.nan, "a"):
        with refused("^risk=.*; give a number from 0 to 1"):
            adapter.threshold_for(risk)


def test_an_image_counts_once_in_the_errors_by_domain():
    query = np.array([[0, 1, 0], [4, 5, 5]])  # of domains 0 and 1
    z = np.log(np.array([[[9.0, 1], [2, 8], [6, 4]], [[3, 7], [5.1, 4.9], [8, 2]]]))
    labels = np.array([[0, 0, 0], [1, 1, 1]])
    asked = judge.Asked(query, labels, {0: z, 100: z}, np.zeros((4, 2)), np.array([0, 1]), np.zeros(2, int))
    found = judge._curves(asked, {0: 1.0, 100: 1.0})
    for level, threshold in enumerate(found["thresholds"][0]):
        for domain in (0, 1):
            accepted, wrong = 0.0, 0.0
            for i, j in itertools.product([domain], range(3)):
                p = np.exp(z[i, j])
                if p.max() / p.sum() >= threshold - 1e-6:
                    times = (query[i] == query[i, j]).sum()
                    accepted, wrong = accepted + 1 / times, wrong + (p.argmax() != labels[i, j]) / times
            assert found["accepted"][1, domain, level] == pytest.approx(accepted)
            assert found["wrong"][1, domain, level] == pytest.approx(wrong)


@pytest.mark.gate
def test_a_buffer_grows_and_shrinks_and_has_any_size(fit, new, monkeypatch):
    adapter, z, s = fit[0], new.logits[:130], new.style[:130]
    first = adapter.adapt(z[:60], s[:60])
    grown, whole = first.observe(z[60:], s[60:]), adapter.adapt(z, s)
    assert len(first.images) == 60 and not len(grown.forget(131).images)
    np.testing.assert_array_equal(grown.forget().images, grown.images[1:])  # as of a SupportBuffer
    for n in (-1, 1.5, "a", True):
        with refused("^n=.*; give a whole number from 0"):
            first.forget(n)
    for device, like in ((grown, whole), (grown.forget(60), adapter.adapt(z[60:], s[60:]))):
        np.testing.assert_array_equal(device.predict_logits(z, s), like.predict_logits(z, s))
    monkeypatch.setattr(adapters, "CELLS", 2**14)  # sixteen queries at a time
    np.testing.assert_allclose(
        whole.predict_logits(z, s), grown.predict_logits(z[::-1], s[::-1])[::-1], rtol=1e-4, atol=1e-4
    )
    assert whole.predict_logits(z[:0], s[:0]).shape == (0, CLASSES)
    sizes = [len(adapters.as_images(np.zeros((n, 1))).pixels) for n in (0, 16, 17, 4096, 4097, 100_000)]
    assert sizes == [16, 16, 32, 4096, 8192, 102_400]


@pytest.mark.gate
def test_a_saved_adapter_is_the_same_in_another_process_and_damage_is_named(fit, new, tmp_path):
    adapter, folder = fit[0], tmp_path / "adapter"
    adapter.save(folder)
    adapter.save(folder)
    np.savez(tmp_path / "new.npz", z=new.logits[:130], s=new.style[:130])
    code = (
        "import sys, numpy, cxda_jax; new = numpy.load('new.npz'); a = cxda_jax.load_adapter('adapter')\n"
        "p = a.adapt(new['z'], new['s']).predict_proba(new['z'], new['s']); numpy.savez('told.npz', p=p, s=str(a))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    with np.load(tmp_path / "told.npz") as arrays:
        told = dict(arrays)
    device = adapter.adapt(new.logits[:130], new.style[:130])
    np.testing.assert_array_equal(told["p"], device.predict_proba(new.logits[:130], new.style[:130]))
    assert str(told["s"]) == str(adapter)
    for name in ("weights.safetensors", "card.json", "manifest.json"):
        flip(folder / name)
        with refused(name, tmp_path):
            cxda_jax.load_adapter(folder)
        (folder / name).unlink()
        with refused(name, tmp_path):
            cxda_jax.load_adapter(folder)
        adapter.save(folder) if name != "manifest.json" else None
    with refused("nope: no such folder; give one that holds an adapter", tmp_path):
        cxda_jax.load_adapter(tmp_path / "nope")
    with refused("holds something else", tmp_path):
        adapter.save(tmp_path)


@pytest.mark.gate
def test_copies_of_an_adapter_and_of_its_device_answer_alike(fit, new):
    asked, device = (new.logits[:9], new.style[:9]), fit[0].adapt(new.logits[:60], new.style[:60])
    for copied in (lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy):
        adapter, own = copied(fit[0]), copied(device)
        assert str(adapter) == str(fit[0]) and adapter.origin == {}
        for same in (own, adapter.adapt(new.logits[:60], new.style[:60])):
            np.testing.assert_array_equal(same.predict_proba(*asked), device.predict_proba(*asked))


@pytest.mark.gate
def test_the_notebook_runs_on_other_photographs(tmp_path, monkeypatch, capsys):
    """In PACS's folders, with a stand-in for the encoder, and with fewer steps."""
    root, rng = Path(__file__).parent.parent, np.random.default_rng(0)
    for number, domain in enumerate(("art_painting", "cartoon", "photo", "sketch")):
        for label in range(CLASSES):
            (folder := tmp_path / "pacs" / "PACS" / domain / f"class {label}").mkdir(parents=True)
            for i in range(40):
                pixels = np.full((5, 5, 3), (40 * label, 60 * number, rng.integers(255)), np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")

    def describe(images):
        seen = images.mean((1, 2)) / 60 + rng.normal(0, 0.5, (len(images), 3))
        return {"features": np.tile(seen[:, :1], 4), "style": np.resize(seen, (len(images), STYLE))}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cxda_jax, "fit", functools.partial(cxda_jax.fit, steps=5))
    names = {"describe": describe, "cxda_jax": cxda_jax}
    for cell in json.loads((root / "docs" / "examples" / "photographs.ipynb").read_text())["cells"]:
        tags, code = cell["metadata"].get("tags", ()), "".join(cell["source"])
        if "readme" in tags:
            assert code in (root / "README.md").read_text()  # test_readme.py runs it
        elif cell["cell_type"] == "code" and not tags:
            exec(compile(code, "photographs.ipynb", "exec"), names)
    said = capsys.readouterr().out
    assert "960 images, 4 features, 8 numbers of style" in said and "right as a new domain" in said
    assert len(names["adapter"].report["by_domain"]) == 3  # each of three domains judged
    assert "expected calibration error" in said and "right before" in said and len(names["axes"]) == 6


@pytest.mark.gate
def test_the_command_fits_the_labelled_images_of_a_file(fit, tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "fit", functools.partial(fitting.fit, steps=5))
    z, labels, domains, style = made(domains=17)
    arrays = {"logits": z, "style": style, "domains": domains}
    told = {"about": '{"encoder": "a.onnx"}', "classes": [*"abcdef"]}
    unknown = np.where(np.arange(len(z)) % 2, -1, labels)  # every other image
    given = np.stack([labels, unknown], 1).ravel()
    given[-240:] = -1  # few of the last domain, which trains, are known
    np.savez(tmp_path / "f.npz", labels=given, **{k: np.repeat(x, 2, 0) for k, x in arrays.items()}, **told)
    np.savez(tmp_path / "own.npz", labels=labels + 1, **arrays)
    np.savez(tmp_path / "no_style.npz", labels=labels, logits=z, domains=domains)
    np.savez(tmp_path / "none.npz", labels=unknown[1::2], **{k: x[1::2] for k, x in arrays.items()}, **told)
    asked = "fit", f"--out={tmp_path}/out"
    assert "holds something else" in command("fit", f"--features={tmp_path}/f.npz", f"--out={tmp_path}", code=2)
    assert "no image has a label" in command(*asked, f"--features={tmp_path}/none.npz", code=2)
    assert "out: missing" in command(*asked, f"--features={tmp_path}/out", code=2)
    assert "labels: 6 is none of the 6" in command(*asked, f"--features={tmp_path}/own.npz", code=2)
    assert "no 'style'" in command(*asked, f"--features={tmp_path}/no_style.npz", code=2)
    said = command(*asked, f"--features={tmp_path}/f.npz")
    assert "load_adapter" in said and re.search("1 of the .* domains that .* have fewer than [0-9]+ images", said)
    adapter = cxda_jax.load_adapter(tmp_path / "out")
    assert (tmp_path / "out" / "report.html").read_text() == as_html(adapter.report)
    assert adapter.report["images"] == (given >= 0).sum() and adapter.keys == "style"
    assert adapter.origin == {"encoder": "a.onnx", "classes": [*"abcdef"]}
    told = command("diagnose", f"--features={tmp_path}/f.npz")
    (kind, row), *_ = adapter.report["headroom"].items()
    assert re.search(rf"{kind} +{row['no adaptation']:.1f} ", told) and "of these images" in told


@pytest.mark.gate
def test_arguments_of_other_forms_are_read_and_of_another_width_refused(fit, new):
    adapter, z, s = fit[0], new.logits[:16], new.style[:16]
    torch = pytest.importorskip("torch")
    told = adapter.adapt(z, s).predict_logits(z, s)
    for form in (
        np.asfortranarray, np.ndarray.tolist, pandas.DataFrame, torch.tensor, lambda x: x.astype(object),
        lambda x: np.ascontiguousarray(x[::-1])[::-1], lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    ):  # fmt: skip
        np.testing.assert_array_equal(adapter.adapt(form(z), form(s)).predict_logits(form(z), form(s)), told)
    half = adapter.adapt(z.astype(np.float16), s.astype(np.float16)).predict_logits(z, s)
    np.testing.assert_allclose(half, told, atol=0.1)
    device = adapter.adapt(z, s)
    for ask in (adapter.adapt, device.observe, device.predict_logits, device.predict_proba):
        for arguments, says in (
            ((z[:, 1:], s), "logits: 5 columns, fit.. had 6"),
            ((z, s[:, 1:]), "style: 7 columns, fit.. had 8"),
            ((z,), "style: missing; give what fit"),
            ((softmax(z, -1), s), "logits: each row sums to 1"),
            ((softmax(z[:1], -1), s[:1]), "logits: each row sums to 1"),
            ((torch.tensor(z, requires_grad=True), s), "logits: .* give its .detach..\\.cpu..\\.numpy.., of bfloat16"),
        ):
            with refused(f"^{says}"):
                ask(*arguments)
    with refused("^style: fit.. had none; leave it out"):
        adapter._replace(keys="logits").adapt(z, s)


def test_what_is_wrong_with_an_argument_is_said_in_one_line():
    for fine in ([[0.3, 0.7004]], np.zeros((0, 5)), [[0.2, 0.9]] * 99, RNG.normal(0.5, 0.5, (30, 2)), [[40.0, 61.0]]):
        assert len(adapters.as_logits(fine)) == len(fine)
    brain = np.asarray([[1.0, -2.5]], jnp.bfloat16)
    assert adapters.as_logits(brain).tolist() == adapters.as_logits(jax.device_put(brain)).tolist() == [[1.0, -2.5]]
    z, y, d, s = made(domains=3, each=20)
    p = np.exp(z - z.max(1, keepdims=True))
    seventh = np.arange(60)[:, None] == 7
    wrong = [
        ((z[0], y, d, s), r"logits: shape \(6,\)"),
        ((z.astype(str), y, d, s), "logits: shape .* give numbers"),
        ((z.astype(complex), y, d, s), "logits: shape .* of complex128; give numbers"),
        ((np.where(seventh, "a", z.astype(object)), y, d, s), "logits: ndarray is no array of numbers"),
        (([[1.0, 2.0], [1.0]], y, d, s), "logits: list is no array of numbers"),
        ((np.where(seventh, np.nan, z), y, d, s), "logits: row 7 has nan"),
        ((np.where(seventh, 1e30, z), y, d, s), r"logits: row 7 has 1e\+30"),
        ((z[:, :1], y * 0, d, s), r"logits: shape \(60, 1\); give at least one image, and a column"),
        ((z, y, d, np.where(seventh, -np.inf, s)), "style: row 7 has -inf"),
        ((z, y, d, s[:-1]), "style: 59 rows, but logits has 60"),
        ((z, y, d, s, s), "features: given beside style"),
        ((z, y, d, None, s[0]), r"features: shape \(8,\)"),
        ((z, y[:-1], d, s), r"labels: shape \(59,\)"),
        ((z, y, d[:, None], s), r"domains: shape \(60, 1\)"),
        ((z, y * 0.5, d, s), "labels: float64; give class numbers"),
        ((z, y.astype(str), d, s), "labels: <U21; give class numbers"),
        ((z, y.astype(str).astype(object), d, s), "labels: object; give class numbers"),
        ((z, y * 0 + 2, d, s), "labels: all are 2; give images of two classes"),
        ((z, y + 1, d, s), "labels: 6 is none of the 6 columns"),
        ((z, y - 1, d, s), "labels: -1 is none"),
        ((np.pad(z, ((0, 0), (0, 1))), y + 1, d, s), r"labels: none is 0, .* on 12%, but on 60% of the labels less 1"),
        ((z, y, np.where(seventh[:, 0], np.nan, d), s), "domains: row 7 has nan; give the domain"),
        ((z, y, np.where(seventh[:, 0], None, d), s), "domains: row 7 has None; give the domain"),
        ((np.ma.array(z, mask=seventh | (z > 1e9)), y, d, s), "logits: 6 values are masked"),
        ((z, y, d, np.ma.masked_less(s, s.max())), "style: 479 values are masked"),
        ((z, y, d, (1j * s).astype(object)), "style: ndarray is no array of numbers"),
        ((p / p.sum(1, keepdims=True), y, d, s), "logits: each row sums to 1"),
        ((np.round(100 * p / p.sum(1, keepdims=True)), y, d, s), "logits: each row sums to 100"),
        ((np.round(p / p.sum(1, keepdims=True), 2), y, d, s), "logits: each row sums to 1"),
        ((1 / (1 + np.exp(-z)), y, d, s), "logits: all numbers lie in 0 to 1"),
        ((z, y, np.minimum(d, 1), s), "domains: 2 of them"),
        ((z, y, d, s), "domains: those that teach have at most 20 images each; give 120 of each"),
        ((z[:0], y[:0], d[:0], s[:0]), r"logits: shape \(0, 6\); give at least one image"),
    ]
    numbers = [("seed", x) for x in ("a", 1.5, -1, None, True)] + [("minutes", x) for x in ("a", -1, math.nan, True)]
    for (arguments, says), options in [(row, {}) for row in wrong] + [
        (((z, y, d, s), f"{name}="), {name: value}) for name, value in [*numbers, ("steps", 0)]
    ]:
        with pytest.raises(UserError, match=f"^{says}") as error:
            cxda_jax.fit(*arguments, **options)
        one_line(error.value)


def test_steps_are_left_out_to_keep_to_the_time_and_the_cosine_ends_at_0():
    rates = {}
    for minutes in (1e6, 20):
        said, taken = [], itertools.count(1)  # a second a step
        clock = Clock(0, 60 * minutes, 2, 1000, said.append)
        for training in (1, 2):
            pace, rates[minutes, training], validations = clock.start(), [], 0
            pace.validation = 2.0
            while pace.left:
                rates[minutes, training].append(pace.rate)
                seconds = next(taken)
                validations += pace.step(lambda seconds=seconds: seconds)
            assert validations == 5 and pace.rate < 1e-12 and pace.asked == 1000
        assert any("time is short" in line for line in said) == (minutes == 20)
        assert any(re.search(r"training 2 of 2, step \d+/1000  eta ", line) for line in said) == (minutes == 1e6)
    steps = np.arange(1000)
    np.testing.assert_allclose(rates[1e6, 2], 1e-2 * (1 + np.cos(np.pi * steps / 1000)) / 2, atol=1e-9)
    first, last = len(rates[20, 1]), len(rates[20, 2])
    assert 500 < first < 600 and 500 < last < 600 and first + last < 20 * 60 - 20  # seconds; and for judging
    assert [load_of(classes) for classes in (6, 65, 100, 1000, 10_000)] == [
        (16, 20),
        (16, 20),
        (16, 13),
        (4, 5),
        (4, 5),
    ]


def test_a_machine_too_slow_for_the_minutes_is_told_those_that_it_needs():
    def steps_in(minutes):
        pace = Clock(0, 60 * minutes, 5, 100, lambda line: None).start()
        pace.validation = 3.0
        while pace.left:  # a second a step, after half a minute of compiling
            pace.step(lambda: 30.0 + pace.taken)
        return pace.taken

    with pytest.raises(UserError, match="^minutes=2: only [0-9]+ of 100 steps") as error:
        steps_in(2)
    assert steps_in(float(re.search("give minutes=([0-9.]+)", one_line(error.value))[1])) == 100


def test_calibration_against_formulas():
    """The error as Guo et al. (2017) define it, in a loop; the temperature where its derivative is 0."""
    rng = np.random.default_rng(0)
    confidence, right = np.append(rng.uniform(0, 1, 999), 1.0), rng.random(1000) < 0.6
    expected = 0.0
    for low in np.arange(15) / 15:
        inside = (confidence >= low) & ((confidence < low + 1 / 15) | (low == 14 / 15))
        expected += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    assert metrics.expected_calibration_error(confidence, right) == pytest.approx(expected)
    surest = confidence >= np.sort(confidence)[-500]
    assert metrics.risk_at(0.5, confidence, right) == pytest.approx(1 - right[surest].mean())
    labels = rng.integers(0, 4, 500)
    z = 3 * (np.eye(4)[labels] + rng.normal(0, 1, (500, 4)))

    def slope(scale):
        p = np.exp(scale * z) / np.exp(scale * z).sum(1, keepdims=True)
        return ((p * z).sum(1) - z[np.arange(500), labels]).mean()

    assert least_temperature(z, labels) == pytest.approx(1 / scipy.optimize.brentq(slope, 0.01, 10), rel=1e-3)


def test_the_calibration_of_a_turn_is_by_the_temperature_of_the_other_turns():
    rng, turn = np.random.default_rng(0), np.repeat([0, 1], 40)
    z = 2 * rng.normal(size=(80, 20, 4))
    p = softmax(z, -1)
    labels = (p.cumsum(-1) < rng.random((80, 20, 1))).sum(-1)  # so z is calibrated
    z[turn == 1] *= 3
    asked = judge.Asked(labels, labels, {0: z}, np.zeros((4, 80)), turn, turn)
    told = judge._calibrated(asked, 0, None)
    own = [softmax(z[turn == i] / (1, 3)[1 - i], -1).max(-1) for i in (0, 1)]  # each has the other's temperature
    right = z.argmax(-1) == labels
    expected = metrics.expected_calibration_error(np.concatenate(own).ravel(), right.ravel())
    assert told["ece"][1] == pytest.approx(expected, abs=0.02) and told["ece"][1] > 0.1 and 1 < told["temperature"] < 3
    assert judge._calibrated(asked, 0, 1.0)["ece"][0] == judge._calibrated(asked, 0, 1.0)["ece"][1]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # of checks that scikit-learn skips
def test_the_estimator_is_one_of_scikit_learn():
    from sklearn.utils.estimator_checks import check_estimator

    check_estimator(cxda_jax.CXDAClassifier())  # none is expected to fail


@pytest.mark.gate
def test_the_estimator_trains_on_some_domains_and_adapts_by_others(monkeypatch):
    from sklearn.base import clone
    from sklearn.svm import LinearSVC

    monkeypatch.setattr(adapters.Adapter, "helps", True)  # after so few steps
    z, labels, domains, _ = made()
    names = np.array(list("fedcba"))[labels]
    model = clone(cxda_jax.CXDAClassifier(LinearSVC(), steps=10, random_state=0))
    model.fit(z, names, domains)
    before = model.predict_proba(z[:50])
    assert (model.predict(z) == names).mean() > 0.5 and before.shape == (50, CLASSES)
    after = model.adapt(z[domains == 3]).predict_proba(z[:50])
    assert model.device_ is not None and after.shape == (50, CLASSES)
    for same in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        np.testing.assert_array_equal(same.predict_proba(z[:50]), after)
    with refused("^sample_domain: fit.. had none"):
        cxda_jax.CXDAClassifier().fit(z, names).adapt(z)
    with refused("^sample_domain: row 3 has None"):
        cxda_jax.CXDAClassifier().fit(z, names, np.where(np.arange(len(z)) == 3, None, domains))
    with refused("^sample_domain: shape .* four domains at least"):
        cxda_jax.CXDAClassifier().fit(z, names, domains % 3)


@pytest.mark.gate
def test_an_estimator_without_a_trusted_adapter_is_its_classifier_trained_on_all_domains(fit, monkeypatch):
    from sklearn.linear_model import LogisticRegression

    z, labels, domains, _ = made(domains=8)
    overall = {**fit[0].report["overall"], "100": [0.5, -0.5, 1.5]}
    untrusted = fit[0]._replace(report={**fit[0].report, "overall": overall})
    monkeypatch.setattr("cxda_jax.adapter.sklearn.fit", lambda *args, **options: untrusted)
    with pytest.warns(UserWarning, match="trained again on all domains"):
        model = cxda_jax.CXDAClassifier(LogisticRegression(max_iter=500)).fit(z, labels, domains)
    plain = LogisticRegression(max_iter=500).fit(z, labels)
    for adapted in (model, model.adapt(z[domains == 3])):
        np.testing.assert_allclose(adapted.predict_proba(z[:50]), plain.predict_proba(z[:50]), atol=1e-6)


@pytest.mark.exhaustive
def test_what_fit_promises_is_what_new_domains_get():
    for row in promises.intervals(1000):
        assert all(row[f"coverage at {gain:g}"] > 0.93 for gain in promises.GAINS), row
        assert row["trusted at 0"] < 0.04 and row["optimism"] < 0.5, row
    for row in promises.thresholds(100):
        assert row["passed"] <= 0.15, row
    assert np.mean([row["passed"] for row in promises.thresholds(100)]) < 0.06
    found = [promises.fits("skewed", seed, steps=200) for seed in (0, 1)]
    assert all(row["trusted"] and row["expected"] < row["found"][0] + 2 for row in found), found
