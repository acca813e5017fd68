"""fit() on what a classifier says: what it gains and what it says of that, and what is wrong with its arguments."""

import functools
import json
import math
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pandas
import pytest
from PIL import Image
from scipy.special import softmax
from sklearn import config_context
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import cxda_jax
from cxda_jax.adapter import adapter as adapters
from cxda_jax.adapter import device as devices
from cxda_jax.adapter import fit as fitting
from cxda_jax.adapter import own_style
from cxda_jax.adapter.adapter import Head
from cxda_jax.adapter.correction import PENALTIES, added, correction_in
from cxda_jax.adapter.features import read_labelled
from cxda_jax.adapter.fit import as_fit_data, gains_on
from cxda_jax.adapter.judge import FitData, by_rival, of_style
from cxda_jax.adapter.own_style import corrected_by, in_one_form, untaught
from cxda_jax.adapter.page import as_html
from cxda_jax.adapter.report import COLUMNS, in_words, span_of
from cxda_jax.data import augment
from cxda_jax.data.episodes import Plan
from cxda_jax.data.sources import AS_GIVEN
from cxda_jax.training import loop, metrics
from cxda_jax.training.selection import Selection, narrowed, with_floor
from cxda_jax.types import ADAPTER, Images
from docs.study import promises
from tests.commands import command
from tests.lines import flip, refused
from tests.logits import CLASSES, RNG, STYLE, fewer_tasks, made, new  # noqa: F401
from tests.nets import build_method
from tests.pages import Elements


@pytest.fixture(scope="module")
def fit(fewer_tasks):
    """One adapter for all tests that use one, and what fit() said. The README's lines make it, word for word."""
    said, tried, kept_of, began, (logits, labels, domains, style) = [], [], [], [], made()
    lines = (Path(__file__).parents[2] / "README.md").read_text().split("```python\n")[1].split("```")[0]
    fit_briefly = functools.partial(cxda_jax.fit, minutes=60, steps=120, log=said.append)
    names = {"labels": labels, "domains": domains}
    for name, array in (("logits", logits), ("style", style)):
        names |= {name: array, f"buffer_{name}": array[:5], f"new_{name}": array[5:9]}
    call, keyed = Selection.likeliest, FitData.keyed

    def noted(data, variables):
        began[:] = [variables]
        return keyed(data, variables)

    def kept(choice, best, scored):  # the adapter that is returned learns last
        tried[:] = [(scored, best), *((score, less) for less, score in choice.less_sure(best))]
        kept_of.append(found := call(choice, best, scored))
        return found

    with pytest.MonkeyPatch.context() as watched:
        watched.setattr(Selection, "likeliest", kept)
        watched.setattr(FitData, "keyed", noted)
        watched.setattr(cxda_jax, "fit", fit_briefly)
        exec(compile(lines, "README.md", "exec"), names)
    assert names["proba"].shape == (4, CLASSES)
    read = functools.partial(of_style, start=began[0])
    return names["adapter"], said, ([(score, read(variables)) for score, variables in tried], read(kept_of[-1][0]))


def test_a_device_with_few_classes_gains(fit, new):
    """On new domains: with a buffer of its own images, and with those of two domains of which the style tells its own.

    What was learnt of shares gains there, though fit() may leave it out, as most devices of its report have more classes.
    """
    adapter, said, (_, learnt) = fit
    assert adapter.helps and said[-1] == str(adapter) and repr(adapter) == "Adapter(6 classes, style of 8, trusted)"
    adapter = adapter._replace(variables=learnt)
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
    assert means["none"] > means["alone"]  # by the image's own style
    assert means["own"] > max(means["none"], means["alone"] + 0.05) and means["two"] > means["alone"] + 0.05, means


def test_keys_in_place_of_the_style_give_the_same_answers(fit, new):
    """Those of a device, with a floor and with attention that is narrower."""
    given, buffer, asked = fit[0].variables, np.arange(70), np.arange(80, 90)
    judged = as_fit_data(new.logits, new.labels, new.domains, new.style, None, 0)
    z, s = judged.logits.copy(), judged.style.copy()
    plan = Plan(buffer[None], asked[None])
    for variables in (given, with_floor(given, 0.9), narrowed(given, 4.0)):
        corrected = corrected_by(judged, correction_in(variables))
        data, of_keys = corrected.keyed(variables)
        device = fit[0]._replace(variables=variables).adapt(z[buffer], s[buffer])
        for found in (data.answers(of_keys, plan), corrected.answers(variables, plan)):
            np.testing.assert_allclose(found[0], device.predict_logits(z[asked], s[asked]), atol=1e-4)
    _, of_keys = corrected.keyed(given)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6),
                 of_style(narrowed(of_keys, 4.0), given), variables)  # fmt: skip


def test_turns_without_a_correction_answer_alike_in_the_form_of_those_with_one(fit, new):
    given, plan = fit[0].variables, Plan(np.arange(70)[None], np.arange(80, 90)[None])
    turn = untaught(as_fit_data(new.logits, new.labels, new.domains, new.style, None, 0))
    whole, plain = turn._replace(correction=correction_in(given)), added(given, None)
    kept, moved = in_one_form(iter([whole, turn]))
    found = moved.data.answers(added(given, moved.correction), plan)
    assert kept is whole and moved.data.corrected and [*in_one_form(iter([turn, turn]))] == [turn, turn]
    np.testing.assert_allclose(found, turn.data.answers(plain, plan), atol=1e-4)


def test_a_step_that_compiles_quickly_has_the_values_of_any_other(new):
    """The options of the compiler that spare time change no more than last bits, and of new weights not one."""
    pixels = Images(RNG.integers(0, 255, (2, 28, 28, 1), np.uint8), np.zeros(2, np.int32))
    method = build_method("cxda")
    jax.tree.map(np.testing.assert_array_equal, loop.init_variables(method, 1, pixels),
                 jax.jit(method.init)(jax.random.key(1), pixels))  # fmt: skip
    judged = as_fit_data(new.logits, new.labels, new.domains, new.style, None, 0)
    learner = loop.Learner(devices.method_of(CLASSES), fitting.optimizer(), augment.Weak(False, False, 0.0))
    images = jax.tree.map(lambda x: x[:2], fitting._images(judged.rows))
    state = loop.init_state(learner.method, learner.optimizer, 0, images)
    plan = Plan(np.arange(400).reshape(4, 100), np.arange(400, 480).reshape(4, 20))
    present = fitting.filled(np.random.default_rng(0), 4, 100)
    arguments = (), fitting._episodes(judged.rows, judged.store.labels, plan, present), jax.random.key(0)
    quick, other = (loop.Programs(learner, AS_GIVEN, effort=effort)(1, state, arguments, print) for effort in (1, 3))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6)
    jax.tree.map(close, (quick[0].optimizer, quick[1]), (other[0].optimizer, other[1]))  # gradients, loss, accuracy
    assert float(quick[1]["loss"]) > 0 and int(quick[0].step) == 1


def test_validation_says_how_much_of_the_errors_other_domains_share(fit):
    tried, kept = fit[2]
    (whole, *less), own = [v["params"][ADAPTER] for _, v in tried], kept["params"][ADAPTER]
    assert np.abs(whole["bias"]).max() > 0
    for part, params in zip((0.5, 0.25, 0), less, strict=True):
        for name, x in params.items():
            np.testing.assert_allclose(x, whole[name] * (part if name in ("bias", "offset") else 1), rtol=1e-6)
    best = max(tried, key=lambda scored: scored[0])[1]["params"][ADAPTER]
    for name, x in own.items():
        np.testing.assert_array_equal(x, best[name])


def test_the_report_is_of_plain_numbers_and_says_what_was_found(fit):
    adapter, said, _ = fit
    report = json.loads(json.dumps(adapter.report))
    assert report == adapter.report and report["steps"] == report["asked"] == 120
    assert [*report["gain"]] == [*report["headroom"]]  # one name for one kind of tasks
    for row in (*report["gain"].values(), report["overall"]):
        assert all(row[n][1] <= row[n][0] <= row[n][2] for n in ("0", "5", "20", "100"))
        for rival in ("0", "em", "own_em", "unmix"):
            assert row[f"over_{rival}"][0] == pytest.approx(row["100"][0] - row[rival][0])
        assert f"{row['100'][0]:+.1f} ({row['100'][1]:+.1f} to {row['100'][2]:+.1f})" in said[-1]
    assert report["calibration"]["100"]["ece"][1] < 0.05 < report["calibration"]["plain"]["ece"][0]
    assert report["drift"]["false_alarms"] < 0.2 and {*report["by_domain"]} == {*map(str, range(24))}
    span = metrics.interval_over_groups(np.array([[*report["by_domain"].values()]]), np.arange(24))[0]
    np.testing.assert_allclose(report["overall"]["100"], span)
    selected = metrics.after_selection(report["overall"]["100"], 24)
    assert report["expected"] == selected + report["beyond_turns"] and selected <= span[0]
    bad = {**report, "overall": {**report["overall"], "100": [0.1, -0.1, 0.3]}, "steps": 90}
    without = {**report, "overall": {**report["overall"], "0": [0.0, 0.0, 0.0]}}
    for tries, told in ((True, "style does not surely gain"), (False, "style was not tried")):
        assert told in in_words({**without, "tries": tries}) and told not in said[-1]
    assert said[-1].startswith("Trusted.") and in_words(bad).startswith("Not trusted.") and "90 of 120" in in_words(bad)


def test_the_page_shows_all_gains_of_the_report(fit):
    adapter = fit[0]
    page = Elements(as_html(adapter))
    for name, row in (*adapter.report["gain"].items(), ("all", adapter.report["overall"])):
        cells = [span_of(row[column]) for column in COLUMNS if column in row]
        assert f"{name}{row['plain']:.1f}{''.join(cells)}" in page.text
    for risk in (0.05, 0.2):
        told = adapter.threshold_for(risk)
        assert f"{risk:.0%}{'–' if math.isinf(told) else f'{told:.3f}'}" in page.text


def test_a_device_estimates_its_class_shares(fit, new, monkeypatch):
    """As a loop over the images of its buffer does, with the formulas of nets/shares.py."""
    adapter, learnt = fit[0], fit[2][1]
    stats = learnt["batch_stats"][ADAPTER]
    plain = {**learnt, "batch_stats": {ADAPTER: {n: x for n, x in stats.items() if n != "own"}}}
    rows = np.flatnonzero((new.domains == 3) & (new.labels < 2))[:24]
    z, s = new.logits[rows], new.style[rows]
    w, t = jax.tree.map(np.float64, learnt["params"][ADAPTER]), np.float64(stats["shares"])
    k = np.clip((s - stats["mean"]) / stats["std"], -5, 5) @ w["kernel"] / np.sqrt(STYLE)
    for variables, own in ((plain, None), (learnt, correction_in(learnt))):
        found, logits = [], own(z, s) if own else z
        common = np.clip((s - own.mean) / own.std, -5, 5) @ own.common if own else None
        for key in k:
            a = 1 / (1 + np.exp(((key - k) ** 2).sum(1) - w["near"]))
            u = logits / np.exp(w["log_t"]) + a.sum() / (a.sum() + np.exp(w["log_n"])) * (
                a / a.sum() @ k @ w["bias"] + w["offset"]
            )
            q = t
            for steps in (3, 2) if own else (5,):
                for _ in range(steps):
                    r = softmax(u, -1) * q / t
                    counts = a @ (r / r.sum(1, keepdims=True))
                    q = (counts + np.exp(w["log_m"]) * t) / (a.sum() + np.exp(w["log_m"]))
                if own:
                    moved = (a @ common - counts @ own.content) / (a.sum() + np.exp(w["log_l"]))
                    u = u - moved / np.exp(w["log_t"])
            found.append(q)
        device = adapter._replace(variables=variables).adapt(z, s)
        np.testing.assert_allclose(device.shares(), np.mean(found, 0), atol=2e-4)
        assert device.shares()[:2].sum() > 0.5 > 1.3 * t[:2].sum()
    strange, silent = (
        adapter.adapt(z, s + 4),
        adapter._replace(report={**adapter.report, "overall": {"100": [0, -1, 1]}}),
    )
    assert all(device.shares() is None for device in (strange, silent.adapt(z, s), adapter.adapt(z[:0], s[:0])))
    calm = adapter._replace(report={**adapter.report, "drift": {"limit": None}})
    whole, last = (calm.adapt(new.logits[-n:], new.style[-n:]) for n in (60, 16))
    monkeypatch.setattr(devices.ShareAdapter, "most", 16)
    np.testing.assert_allclose(whole.shares(), last.shares(), atol=1e-5)


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
            own_style = correction_in(adapter.variables)
            np.testing.assert_allclose(z, own_style(new.logits[few], new.style[few]), rtol=1e-4, atol=1e-4)
    silent = adapter._replace(report={**adapter.report, "overall": {"100": [0.0, -1.0, 1.0]}}).adapt(
        new.logits[:5], new.style[:5]
    )
    z = new.logits[few] / adapter.report["calibration"]["plain"]["temperature"]
    np.testing.assert_allclose(
        silent.predict_proba(new.logits[few], new.style[few]), softmax(z, -1), rtol=1e-4, atol=1e-7
    )


def test_where_validation_does_not_gain_or_the_buffer_is_strange_the_classifier_answers(fit, new):
    adapter, plain = fit[0], new.logits.astype(np.float32)
    useless = adapter._replace(report={**adapter.report, "overall": {"100": [0.1, -0.2, 0.4]}})
    assert not useless.helps and useless.trusted().adapt(new.logits[:9], new.style[:9]).adapted
    np.testing.assert_array_equal(useless.adapt(new.logits, new.style).predict_logits(new.logits, new.style), plain)
    own, strange = (adapter.adapt(new.logits[:130], new.style[:130] + moved) for moved in (0, 4))
    assert repr([own, strange]) == "[Device(130 images, adapted), Device(130 images, not adapted)]"
    assert not own.drift and "deviations from the domains of fit()" in strange.drift
    np.testing.assert_array_equal(strange.predict_logits(new.logits, new.style), plain)
    stats, known = adapter.variables["batch_stats"]["adapter"], adapter.known
    mean = np.clip((new.style[:130] - stats["mean"]) / stats["std"], -5, 5).mean(0)
    by_hand = np.sqrt(((mean - known["centre"]) ** 2 / (known["between"] + known["within"] / 130)).mean())
    assert adapter.distance(own.images) == pytest.approx(by_hand, rel=1e-4)


def test_another_domain_tells_the_gain_beside_em(fit, new):
    adapter, only = fit[0], new.domains == 3
    report = gains_on(adapter, *(x[only] for x in (new.logits, new.labels, new.domains, new.style)))
    assert [*report["by_domain"]] == ["3"] and "expected" not in report
    assert [*report["gain"]] == [f"1 domain, {shares}" for shares in ("own shares", "Dirichlet 0.3", "even shares")]
    for row in report["gain"].values():
        assert row["0"][0] and row["over_em"][0] == pytest.approx(row["100"][0] - row["em"][0])
    assert report["calibration"]["0"]["temperature"] == adapter.temperature(0)
    judged = as_fit_data(new.logits, new.labels, new.domains, new.style, None, 0)
    plan = Plan(RNG.integers(0, 2000, (2, 30)), RNG.integers(0, 2000, (2, 4)))
    known, found = adapter.known, by_rival(judged.logits, adapter.known, plan)
    z = judged.rows[:, :CLASSES] * known["scale"] + known["bias"]
    for task, (support, query) in enumerate(zip(*plan, strict=True)):
        q, p = known["shares"], softmax(z[support], -1)
        for _ in range(50):
            r = p * q / known["shares"]
            q = ((r / r.sum(1, keepdims=True)).sum(0) + 10 * known["shares"]) / 40
        np.testing.assert_allclose(found[task], z[query] + np.log(q / known["shares"]), atol=1e-3)


def test_a_new_last_layer_learns_from_the_domains_that_do_not_judge():
    """It is right about as often as scikit-learn's with the best ridge."""
    logits, labels, domains, style = made()
    features = np.concatenate([logits / logits.std(0), style], 1)
    tests = [np.arange(i, 24, 3) for i in range(3)]
    layers, _ = own_style.last_layers(as_fit_data(logits, labels, domains, style, features, 0), tests)
    for layer, test in zip(layers, tests, strict=True):
        own = np.isin(domains, test)
        ridges = (LogisticRegression(C=1 / (p * (~own).sum()), max_iter=500) for p in PENALTIES)
        right = max(head.fit(features[~own], labels[~own]).score(features[own], labels[own]) for head in ridges)
        assert (layer[own].argmax(1) == labels[own]).mean() > right - 0.02


def test_one_set_without_domains_teaches_class_shares_alone(new):
    """Every image of a buffer counts alike, and where it looks otherwise the classifier's own answers stay."""
    z, labels, _, style = made(strength=3.0)
    adapter = cxda_jax.fit(z, labels, style=style, features=z, minutes=60, steps=60, floor=0.01, log=lambda _: None)
    report, right = adapter.report, []
    assert np.exp(adapter.variables["batch_stats"][ADAPTER]["log_floor"]) == pytest.approx(0.01)
    assert "floor of 0.01" in str(adapter)
    assert report["floors"]["0.01"]["gain"] == pytest.approx(report["overall"]["100"][0], abs=0.02)
    assert report["one_set"] and not report["corrects"] and report["domains"] == 12 and adapter.helps
    assert report["overall"]["refit"][0] > report["overall"]["0"][0] == 0 and "random parts" in str(adapter)
    for i in range(20):
        some = np.flatnonzero(np.isin(labels, (i % 6, (i + 1) % 6)))
        asked, rows = np.split(np.random.default_rng(i).permutation(some)[:120], [20])
        assert (device := adapter.adapt(z[rows], style[rows])).adapted
        right.append([(x[asked].argmax(1) == labels[asked]).mean() for x in (z, device.predict_logits(z, style))])
    assert np.diff(np.mean(right, 0)) > 0.05 and not np.any(adapter.variables["params"][ADAPTER]["kernel"])
    assert all(adapter.adapt(new.logits[of], new.style[of]).drift for of in (new.domains == d for d in range(24)))


def test_a_floor_limits_how_much_less_likely_a_buffer_makes_a_class(fit, new):
    """With a floor of 1 it changes nothing."""
    adapter, rows = fit[0], np.flatnonzero((new.domains == 3) & (new.labels < 2))
    z, s = new.logits[rows], new.style[rows]

    def answers(floor):
        return adapter._replace(variables=with_floor(fit[2][1], floor)).adapt(z, s).predict_logits(z, s)

    factors = answers(0) - answers(1)
    assert factors.min() < -0.2
    for floor in (0.9, math.exp(factors.min() / 2)):
        np.testing.assert_allclose(answers(floor) - answers(1), np.maximum(factors, math.log(floor)), atol=1e-4)


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
        with refused("^risk="):
            adapter.threshold_for(risk)


def test_a_buffer_grows_and_shrinks_and_has_any_size(fit, new, monkeypatch):
    adapter, z, s = fit[0], new.logits[:130], new.style[:130]
    first = adapter.adapt(z[:60], s[:60])
    grown, whole = first.observe(z[60:], s[60:]), adapter.adapt(z, s)
    assert len(first.images) == 60 and not len(grown.forget(131).images)
    np.testing.assert_array_equal(grown.forget().images, grown.images[1:])  # as of a SupportBuffer
    for device, like in ((grown, whole), (grown.forget(60), adapter.adapt(z[60:], s[60:]))):
        np.testing.assert_array_equal(device.predict_logits(z, s), like.predict_logits(z, s))
    monkeypatch.setattr(devices, "CELLS", 2**12)  # sixteen queries at a time
    turned = grown.predict_logits(z[::-1], s[::-1])[::-1]
    np.testing.assert_allclose(whole.predict_logits(z, s), turned, rtol=1e-4, atol=1e-4)
    assert whole.predict_logits(z[:0], s[:0]).shape == (0, CLASSES)
    sizes = [len(devices.as_images(np.zeros((n, 1))).pixels) for n in (0, 16, 17, 4096, 4097, 100_000)]
    assert sizes == [16, 16, 32, 4096, 8192, 102_400]


def test_a_saved_adapter_is_the_same_in_another_process(fit, new, tmp_path):
    adapter = fit[0]
    for _ in range(2):
        adapter.save(tmp_path / "adapter")
    np.savez(tmp_path / "new.npz", z=new.logits[:130], s=new.style[:130])
    code = (
        "import sys, numpy, cxda_jax; new = numpy.load('new.npz'); a = cxda_jax.load_adapter('adapter')\n"
        "p = a.adapt(new['z'], new['s']).predict_proba(new['z'], new['s']); numpy.savez('told.npz', p=p, s=str(a))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    told = dict(np.load(tmp_path / "told.npz"))
    device = adapter.adapt(new.logits[:130], new.style[:130])
    np.testing.assert_array_equal(told["p"], device.predict_proba(new.logits[:130], new.style[:130]))
    assert str(told["s"]) == str(adapter)


def test_an_adapter_comes_from_a_folder_or_the_hub_with_the_same_checks(fit, new, tmp_path, monkeypatch):
    """A small hub of folders, called as huggingface_hub is."""
    adapter, hub = fit[0], tmp_path / "hub"

    def upload_folder(repo_id, folder_path):
        shutil.copytree(folder_path, hub / repo_id, dirs_exist_ok=True)
        return f"commit of {repo_id}"

    def snapshot_download(repo_id, revision, allow_patterns):
        (found,) = [hub / repo_id] if (hub / repo_id).is_dir() else []
        assert {path.name for path in found.iterdir()} == {*allow_patterns}
        return str(found)

    made_of = {"create_repo": lambda repo, private, exist_ok: (hub / repo).mkdir(parents=True, exist_ok=exist_ok)}
    package = SimpleNamespace(upload_folder=upload_folder, snapshot_download=snapshot_download, **made_of)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "huggingface_hub", None)
        with refused(named="cxda_jax[hub]"):
            cxda_jax.Adapter.from_pretrained("me/none")
    monkeypatch.setitem(sys.modules, "huggingface_hub", package)
    assert adapter.push_to_hub("me/mine") == "commit of me/mine"
    told = adapter.adapt(new.logits[:5], new.style[:5]).predict_logits(new.logits[:9], new.style[:9])
    for place in ("me/mine", str(hub / "me" / "mine")):
        device = cxda_jax.Adapter.from_pretrained(place).adapt(new.logits[:5], new.style[:5])
        np.testing.assert_array_equal(device.predict_logits(new.logits[:9], new.style[:9]), told)
    flip(hub / "me" / "mine" / "weights.safetensors")
    for place in ("me/mine", str(hub / "me" / "mine")):
        with refused(named="weights.safetensors"):
            cxda_jax.Adapter.from_pretrained(place)
    with refused(field="repo", value="me/other"):
        cxda_jax.Adapter.from_pretrained("me/other")


def test_the_notebook_runs_on_other_photographs(tmp_path, monkeypatch, capsys):
    """In PACS's folders, with a stand-in for the encoder, and with fewer steps."""
    root, rng = Path(__file__).parents[2], np.random.default_rng(0)
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
        if cell["cell_type"] == "code" and not tags:  # test_readme.py runs that of the package's own model
            exec(compile(code, "photographs.ipynb", "exec"), names)
    said = capsys.readouterr().out
    assert "960 images, 4 features, 8 numbers of style" in said and "right as a new domain" in said
    assert len(names["adapter"].report["by_domain"]) == 3  # each of three domains judged
    assert "expected calibration error" in said and "right before" in said and len(names["axes"]) == 6


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
    np.savez(tmp_path / "no_style.npz", labels=labels, logits=z, domains=domains, features=z)
    asked = "fit", f"--out={tmp_path}/out"
    for name, named in (("own", "labels: 6"), ("no_style", "'style'"), ("none", "none.npz: missing")):
        assert named in command(*asked, f"--features={tmp_path}/{name}.npz", code=2)
    said = command(*asked, f"--features={tmp_path}/f.npz", "--floor=0.3")
    assert (
        "load_adapter" in said
        and "floor of 0.3" in said
        and re.search("1 of the .* domains that .* have fewer than [0-9]+ images", said)
    )
    adapter = cxda_jax.load_adapter(tmp_path / "out")
    assert (tmp_path / "out" / "report.html").read_text() == as_html(adapter)
    assert adapter.report["images"] == (given >= 0).sum() and adapter.keys == "style"
    assert adapter.origin == {"encoder": "a.onnx", "classes": [*"abcdef"]}
    told = command("diagnose", f"--features={tmp_path}/f.npz")
    assert all(f"{row['no adaptation']:.1f} " in told for row in adapter.report["headroom"].values())


def test_the_command_learns_a_head_from_some_domains_and_fits_the_others(fit, tmp_path, monkeypatch):
    given, (z, labels, domains, style), file = {}, made(domains=17), tmp_path / "f.npz"
    monkeypatch.setattr(fitting, "fit", lambda *rows, **_: given.update(rows=rows) or fit[0])
    features = np.concatenate([100 * z + 7, style], axis=1, dtype=np.float32)
    told = {"about": '{"encoder": "a.onnx"}', "classes": [*"abcdef"], "style": style, "labels": labels}
    told |= {"features": features, "domains": np.char.add("d", domains.astype(str))}
    np.savez(tmp_path / "whole.npz", logits=z, **told)
    np.savez(file, **told)
    ask = "fit", f"--out={tmp_path}/out"
    for name, part in (("f", 15.0), ("f", 0.01), ("f", 2.5), ("whole", 0.5)):
        assert f"--head={part}: " in command(*ask, f"--features={tmp_path}/{name}.npz", f"--head={part}", code=2)
    said, adapter = command(*ask, f"--features={file}", "--head=5"), cxda_jax.load_adapter(tmp_path / "out")
    own = np.isin(told["domains"], adapter.origin["head"])
    ridges = (make_pipeline(StandardScaler(), LogisticRegression(C=10.0**-i, max_iter=1000)) for i in range(5))
    by_sklearn = max(ridge.fit(features[own], labels[own]).score(features[~own], labels[~own]) for ridge in ridges)
    found = read_labelled(file, adapter.head)
    right = (found.logits.argmax(1) == labels)[~own].mean()
    assert right > by_sklearn - 0.02
    for x, other in zip(given["rows"], found[:5], strict=True):
        np.testing.assert_array_equal(x, other[~own])
    assert len(adapter.origin["head"]) == 5 and f"{right:.1%} of" in said
    assert "no 'logits'" in command("diagnose", f"--features={file}", code=2)
    weights, bias = adapter.head
    for i, head in enumerate((Head(weights, bias[1:]), Head(weights[:, 1:], bias[1:]), Head(weights, bias * np.nan))):
        adapter._replace(head=head).save(tmp_path / f"{i}")
        with refused("(weights|bias)(=| has)", tmp_path):
            cxda_jax.load_adapter(tmp_path / f"{i}")


def test_arguments_of_other_forms_are_read_and_of_another_width_refused(fit, new):
    adapter, z, s = fit[0], new.logits[:16], new.style[:16]
    torch = pytest.importorskip("torch")
    device = adapter.adapt(z, s)
    told = device.predict_logits(z, s)

    class Exported:  # by DLPack alone
        def __init__(self, x):
            self.__dlpack__, self.__dlpack_device__ = x.__dlpack__, x.__dlpack_device__

    def learnt(x):
        return torch.tensor(x, requires_grad=True) * 1

    for form in (
        np.asfortranarray, np.ndarray.tolist, pandas.DataFrame, torch.tensor, lambda x: x.astype(object), learnt,
        Exported, lambda x: Exported(torch.tensor(x)), lambda x: jax.device_put(np.float32(x)),
    ):  # fmt: skip
        np.testing.assert_array_equal(adapter.adapt(form(z), form(s)).predict_logits(form(z), form(s)), told)
    rough, given = zip(
        *((x.astype(jnp.bfloat16), torch.tensor(x).bfloat16()) for x in map(np.float32, (z, s))), strict=True
    )
    np.testing.assert_array_equal(device.predict_logits(*given), device.predict_logits(*rough))
    for ask in (adapter.adapt, device.observe, device.predict_logits, device.predict_proba):
        for name, arguments in (
            ("logits", (z[:, 1:], s)), ("logits", (torch.ones(3, 6, device="meta"), s)), ("style", (z, s[:, 1:])), ("style", (z,)), ("logits", (softmax(z, -1), s)),
        ):  # fmt: skip
            with refused(f"^{name}: "):
                ask(*arguments)


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
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict_proba(z[:50]), after)
    with refused("^sample_domain: "):
        cxda_jax.CXDAClassifier().fit(z, names).adapt(z)
    for wrong in (np.where(np.arange(len(z)) == 3, None, domains), domains % 3):
        with refused("^sample_domain: "):
            cxda_jax.CXDAClassifier().fit(z, names, wrong)


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


def test_a_pipeline_routes_the_domains_to_the_estimator(fit, monkeypatch):
    given = []
    monkeypatch.setattr("cxda_jax.adapter.sklearn.fit", lambda *args, **options: given.append(args) or fit[0])
    _, labels, domains, style = made(domains=8)
    base = LogisticRegression(max_iter=500)
    with config_context(enable_metadata_routing=True):
        model = cxda_jax.CXDAClassifier(base, random_state=0).set_fit_request(sample_domain="domains")
        pipeline = make_pipeline(StandardScaler(), model).fit(style, labels, domains=domains)
        with pytest.raises(TypeError, match="domains"):  # which nobody asks for here
            make_pipeline(StandardScaler(), base).fit(style, labels, domains=domains)
    (_, taught, of, scaled), scaler = given[0], pipeline[0]
    held = np.isin(domains, of)  # half of the domains; the estimator numbers them as they are here
    assert len({*of}) == 4 and len(of) == held.sum()
    np.testing.assert_array_equal(taught, labels[held])
    np.testing.assert_allclose(scaled, scaler.transform(style)[held])
    pipeline[-1].adapt(scaler.transform(style[domains == 3]))
    assert pipeline.predict_proba(style[:9]).shape == (9, CLASSES)


@pytest.mark.weekly
def test_what_fit_promises_is_what_new_domains_get():
    for row in promises.intervals(1000):
        assert all(row[f"coverage at {gain:g}"] > 0.93 for gain in promises.GAINS), row
        assert row["trusted at 0"] < 0.04 and row["optimism"] < 0.5, row
    passed = [row["passed"] for row in promises.thresholds(100)]
    assert max(passed) <= 0.15 and np.mean(passed) < 0.06
    found = [promises.fits("skewed", seed, steps=200) for seed in (0, 1)]
    assert all(row["trusted"] and row["expected"] < row["found"][0] + 2 for row in found), found


@pytest.mark.weekly
@pytest.mark.filterwarnings("ignore")  # of checks that scikit-learn skips
def test_the_estimator_is_one_of_scikit_learn():
    from sklearn.utils.estimator_checks import check_estimator

    check_estimator(cxda_jax.CXDAClassifier())  # none is expected to fail
