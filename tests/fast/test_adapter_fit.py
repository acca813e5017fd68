"""fit() on what a classifier says: what it gains and what it says of that, and what is wrong with its arguments."""

import functools
import itertools
import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from scipy.special import softmax

import cxda_jax
from cxda_jax.adapter import adapter as adapters
from cxda_jax.adapter import correction, fit, judge, own_style, settling
from cxda_jax.adapter.correction import Labelled, common_parts, corrections, counts_of, mean_of, told_shares
from cxda_jax.adapter.fit import JUDGING, as_fit_data, deal, load_of
from cxda_jax.adapter.judge import least_temperature
from cxda_jax.adapter.report import of_rare
from cxda_jax.data.episodes import Plan
from cxda_jax.nets.shares import LOG_FLOOR
from cxda_jax.training import metrics
from cxda_jax.training.pace import AHEAD, Pace, TimeLimit
from cxda_jax.training.selection import CHOICES, Selection
from cxda_jax.types import ADAPTER
from tests.lines import refused
from tests.logits import CLASSES, RNG, STYLE, fewer_tasks, made  # noqa: F401


def test_where_balanced_mixtures_lose_a_buffer_is_trusted_less():
    variables = {"params": {ADAPTER: {"log_m": np.float32(1.0), "bias": np.ones(3)}}}

    def found(*gains):
        left = iter(gains)
        choice = Selection(lambda _: 0.0, lambda _: next(left), (variables, 0.0))
        own = choice.more_careful(variables)["params"][ADAPTER]
        np.testing.assert_array_equal(own["bias"], np.ones(3))
        return round(math.exp(own["log_m"] - 1), 3), list(left)

    assert found(0.0, 1.0) == (1, [1.0])
    assert found(-0.1, 0.1, 1.0) == (2, [1.0])
    assert found(-0.2, -0.1, -0.3) == (2, [])


def test_attention_becomes_narrower_as_long_as_it_pays():
    own = {"kernel": RNG.normal(size=(4, 2)), "bias": RNG.normal(size=(2, 3)), "near": 0.7}
    style, scores = RNG.normal(size=(5, 4)), iter((0.6, 0.7, 0.7))
    variables = {"params": {ADAPTER: own}}
    choice = Selection(lambda _: next(scores), lambda _: 0.0, (variables, 0.0))
    kept = choice.narrower(variables, 0.5)["params"][ADAPTER]
    far, of_kept = (np.square(style @ x["kernel"]).sum(1) for x in (own, kept))
    np.testing.assert_allclose(kept["near"] - of_kept, 4 * (own["near"] - far))
    np.testing.assert_allclose(style @ kept["kernel"] @ kept["bias"], style @ own["kernel"] @ own["bias"])


@pytest.mark.parametrize("count", [3, 4, 5, 6, 8, 13, 40])
def test_each_domain_judges_once_and_never_an_adapter_that_it_taught_or_chose(count):
    logits, labels, domains, style = made(domains=count)
    judged = as_fit_data(logits, labels, domains, style, None, 0)
    whole, *turns = deal(judged)
    assert len(turns) == (3 if count < 8 else 4) and {*whole.store.split} == {"train", "val"}
    judges = np.concatenate([turn.store.domains("test") for turn in turns])
    assert sorted(judges) == [*range(count)]
    for turn in turns:
        assert {*turn.store.split} == {"train", "val", "test"} and turn.store.images is judged.store.images
        of = {split: {*turn.rows_of(split)} for split in ("train", "val", "test")}
        assert sum(map(len, of.values())) == len(labels) and not of["test"] & (of["train"] | of["val"])
    small = np.isin(domains, np.arange(count - 3)) & (np.arange(len(labels)) % 13 > 0)  # all but three have 10 images
    dealt = deal(as_fit_data(*(x[~small] for x in (logits, labels, domains, style)), None, 0))
    for turn in dealt[1:]:
        assert all(turn.most_domains(split) for split in ("train", "val", "test"))


@pytest.mark.parametrize(
    ("width", "keys", "read"),
    [(20, "style", "both"), (2044, "style", "features"), (20, "features", "features"), (2100, "style", None)],
)
def test_the_last_layer_beside_the_adapter_reads_features_and_style_where_both_have_room(
    monkeypatch, width, keys, read
):
    """2,048 numbers at most for so few classes."""
    logits, labels, domains, style = made(domains=6)
    features, seen, said = RNG.normal(size=(len(labels), width)).astype(np.float32), [], []
    judged = as_fit_data(logits, labels, domains, style if keys == "style" else None, features, 0)
    monkeypatch.setattr(fit, "last_layers", lambda given, tests: (seen.append(given.features) or [labels] * 2, None))
    turns = [judge.Turn(judged, turn, {}, {}) for turn in deal(judged)[1:3]]
    found, told = fit._beside_last_layers(turns, judged, keys, said.append)
    assert told == {"both": "features and the style", "features": "features", None: ""}[read]
    assert all((turn.refit is labels) == (read is not None) for turn in found) and len(said) == (read is None)
    expected = {"both": [np.concatenate([features, style.astype(np.float32)], 1)], "features": [features], None: []}[
        read
    ]
    np.testing.assert_array_equal(seen, expected)


def test_the_maps_of_a_style_leave_room_for_a_correction():
    """ResNet-18's widths, where six maps over the whole depth have 3,078 numbers; a vision transformer; one map."""
    resnet = [64] * 5 + [128] * 4 + [256] * 4 + [512] * 4
    at = own_style.fitting(resnet, len(resnet))
    assert at[0] == 0 and 2 * (3 + sum(resnet[i] for i in at)) <= own_style.WIDEST
    assert resnet[at[-1]] == 512 and at[-1] == len(resnet) - 1
    assert own_style.fitting([384] * 12, 6) == [0, 5] and own_style.fitting([16] * 20, 20) == [0, 4, 8, 11, 15, 19]
    assert own_style.fitting([4096], 1) == own_style.fitting([4096, 4096], 2) == [0] and own_style.fitting([], 0) == []


def skewed(seed=3, count=30):
    """Labelled images of domains that have other shares each, and err in ways that follow the style."""
    logits, labels, domains, style = made(seed=seed, domains=count)
    kept = RNG.random(len(labels)) < np.where((labels + domains) % CLASSES < 2, 1.0, 0.2)
    return Labelled(*(x[kept].astype(np.float32) for x in (logits, style)), labels[kept], domains[kept])


def test_a_correction_learns_errors_and_neither_shares_nor_what_a_domain_has_in_common():
    """Its loss beside the formula, and finite differences; what domains and classes have in common, beside least
    squares."""
    images, teach = skewed(), np.ones((2, 30), bool)
    teach[0, 24:], teach[1, :6] = False, False
    cells = counts_of(images, 30)
    s = adapters.standardised(images.style, *(moments := (images.style.mean(0), images.style.std(0))))
    dummies = np.eye(30)[images.domains], np.eye(CLASSES)[images.labels]
    content, parts = common_parts(np.einsum("nm,nk,nd->mkd", *dummies, s), cells, teach)
    own = teach[0][images.domains]
    found = np.linalg.lstsq(np.concatenate(dummies, 1)[own], s[own], rcond=None)[0][30:]
    np.testing.assert_allclose(content[0], found - found.mean(0), atol=0.03)  # which counts one image more
    left = s - content[0][images.labels]
    np.testing.assert_allclose(parts[7, 0], left[images.domains == 7].mean(0), atol=1e-6)
    for domain, offset in enumerate(told_shares(cells, teach[0])):
        t = cells[:24].sum(0) + 0.5
        q = (cells[domain] + t / t.sum()) / (cells[domain].sum() + 1)
        np.testing.assert_allclose(offset, np.log(q) - np.log(t / t.sum()), atol=1e-9)
    point, root = RNG.normal(0, 0.3, (2, 1 + CLASSES + 2 * STYLE * CLASSES)), RNG.uniform(0.5, 2, (2, STYLE, 1))
    offsets, expected = np.stack([told_shares(cells, each).T for each in teach]), 0.0
    for i, each in enumerate(teach):
        (u, v), common = point[i, 7:].reshape(2, STYLE, CLASSES) / root, parts[images.domains, i]
        z = point[i, 0] * images.logits + point[i, 1:7] + offsets[i].T[images.domains]
        for moved in (z + s @ u, z + (s - common) @ u + common @ v):
            expected -= np.log(softmax(moved, -1)[np.arange(len(z)), images.labels])[each[images.domains]].mean() / 2
        expected += 0.05 * ((u**2).sum() + (v**2).sum())
    weight = (teach / (teach @ cells.sum(1))[:, None])[:, images.domains]
    together, count = np.argsort(images.domains), cells.sum(1).astype(int)
    arrays = s[together].T, images.logits[together].T, offsets, parts.transpose(1, 2, 0), weight[:, together]
    shown = correction._Shown(*arrays, images.labels[together], count)
    loss, slope = correction._loss(point, shown, root, 0.1)
    assert loss == pytest.approx(expected, rel=1e-9)
    for _ in range(5):
        way = RNG.normal(size=point.shape)
        up, down = (correction._loss(point + x * way, shown, root, 0.1)[0] for x in (1e-5, -1e-5))
        assert (slope * way).sum() == pytest.approx((up - down) / 2e-5, rel=1e-5)
    for of_penalty in corrections(images, teach, *moments):
        for each, found in zip(teach, of_penalty, strict=True):
            new = ~each[images.domains]
            right = [(z.argmax(1) == images.labels)[new].mean() for z in (images.logits, found(*images[:2]))]
            assert right[1] > right[0] - 0.01
        np.testing.assert_allclose(of_penalty[0].content, content[0] @ of_penalty[0].common, rtol=1e-3, atol=1e-5)
    assert right[1] > right[0] + 0.05, right
    others = found._replace(scale=found.scale + 1, bias=found.bias * 2, weights=found.weights * 3)
    both = (found(*images[:2]) + others(*images[:2])) / 2
    np.testing.assert_allclose(mean_of([found, others])(*images[:2]), both, rtol=1e-4, atol=1e-4)


def test_a_convex_function_is_least_where_its_slope_is_nothing():
    """A quadratic beside its solution; of a steep one, which the first steps miss by far; and where it has no value."""
    a = RNG.normal(size=(30, 8))
    matrix, aim = a.T @ a, RNG.normal(size=(2, 4))

    def quadratic(x):
        away = matrix @ (x - aim).ravel()
        return float((x - aim).ravel() @ away) / 2, away.reshape(2, 4)

    for times in (1e-3, 1.0, 1e3):
        found = correction.lbfgs(lambda x, times=times: [times * y for y in quadratic(x)], aim + 5, 60, 0.0)
        np.testing.assert_allclose(found, aim, atol=1e-3)
    stopped = correction.lbfgs(
        lambda x: (quadratic(x)[0] if x.min() > 0 else np.nan, quadratic(x)[1]), aim + 5, 60, 0.0
    )
    assert stopped.min() > 0 and quadratic(stopped)[0] < quadratic(aim + 5)[0]


def test_images_are_corrected_by_what_other_domains_taught(monkeypatch):
    """Each correction adds a number of its own to the logits of the first class; here it always pays."""
    logits, labels, domains, style = made(domains=12)
    judged, taught = as_fit_data(logits, labels, domains, style, None, 0), []

    def numbers(images, teach, mean, std):
        taught.extend({*np.flatnonzero(each)} for each in teach)
        assert {*images.domains} == set.union(*taught)
        plain = correction.nothing(CLASSES, mean, std)
        yield [plain._replace(bias=np.eye(CLASSES)[0] * (i + 1), scale=-1.0) for i in range(len(teach))]  # harms
        yield [plain] * len(teach)

    monkeypatch.setattr(own_style, "corrections", numbers)
    turn = deal(judged)[1]
    useless = own_style.OwnStyle(judged)
    assert useless.of(turn)[:2] == (turn, None)
    judged.store.labels[:] = judged.logits.argmin(1)  # now it pays
    taught.clear()
    corrected, mean, alone, teachers = useless.of(turn)
    judging = {*turn.store.domains("test")}
    assert len(taught) == own_style.FOLDS and not judging & set.union(*taught) and mean.bias[0] == 3
    assert teachers == np.mean([*map(len, taught)]) < 12 - len(judging)
    for domain in range(12):
        rows = domains == domain
        moved, z = (corrected.logits[rows] + judged.logits[rows])[:, 0], corrected.logits[rows]
        if domain in judging:
            np.testing.assert_allclose(moved, 3, rtol=1e-5)
            z = [i * np.eye(CLASSES)[0] - judged.logits[rows] for i in range(1, own_style.FOLDS + 1)]
        else:
            (which,) = {*moved.round(3)}
            assert domain not in taught[int(which) - 1]
        own = judged.store.labels[rows]
        gained = (np.argmax(z, -1) == own).mean() - (judged.logits[rows].argmax(1) == own).mean()
        np.testing.assert_allclose(alone[domain], 100 * gained)
    np.testing.assert_array_equal(corrected.style, judged.style)
    assert not corrected.rows[:, CLASSES : 2 * CLASSES].any()  # the style moves nothing


def test_what_more_domains_gain_follows_from_the_folds():
    """Where a gain of n domains is 5 - 12 / n, twelve gain 12 / 9 - 1 points more than nine; of a gain that falls with
    more domains nothing is promised."""
    logits, labels, domains, style = made(domains=12)
    whole, *turns = deal(as_fit_data(logits, labels, domains, style, None, 0))

    def taught(data, own, sign):
        of_fold = own * (1 - 1 / own_style.FOLDS)
        return own_style.untaught(data)._replace(alone=np.full(12, 5 - sign * 12 / of_fold), taught=of_fold)

    def grown(sign):
        return own_style.beyond_turns(taught(whole, 12, sign), [taught(turn, 9, sign) for turn in turns])

    np.testing.assert_allclose([grown(1), grown(-1)], [12 / 9 - 1, 0])
    assert own_style.beyond_turns(own_style.untaught(whole), [*map(own_style.untaught, turns)]) == 0


def test_un_mixing_finds_the_shares_of_each_cluster():
    """Five far apart, of which each query is in one, and all images at one place; beside a loop of EM."""
    rng, trained = np.random.default_rng(5), np.array([0.5, 0.3, 0.2])
    owner, asked = np.arange(60) % 5, np.array([2, 0, 4, 4])
    p = softmax(rng.normal(0, 2, (60, 3)) + 2 * np.eye(3)[owner % 3], -1)
    for spread, parts in ((10, [p[owner == cluster] for cluster in asked]), (0, [p] * 4)):
        keys, queries = (spread * (np.eye(5)[at] + rng.normal(0, 0.01, (len(at), 5))) for at in (owner, asked))
        found = np.asarray(judge._unmixing()(p[None], keys[None], queries[None], trained))[0]
        for shares, part in zip(found, parts, strict=True):
            q = trained
            for _ in range(50):
                r = part * q / trained
                q = ((r / r.sum(1, keepdims=True)).sum(0) + 3 * trained) / (len(part) + 3)
            np.testing.assert_allclose(shares, q, atol=1e-4)


LOG_T = 2.0


def settled_on(monkeypatch, ways, floors, labels, plain=None, asked=4, kinds=lambda plans: {"any": plans}):
    """What settle() finds for turns of two domains with 100 images each, which are buffer and queries alike.

    `ways` are of each turn, by WAYS: the answers that are right with each floor, bool [2, 100]. A floor of 1 tells which
    are right without a buffer; where it is not given, every other one. Of the classifier's own answers those are right
    that `plain` says, bool [100], or every other one.
    """
    store = SimpleNamespace(
        labels=np.tile(labels, 12), num_classes=2, offsets=np.arange(7) * 200,
        row_domains=lambda: np.repeat(np.arange(6), 200),
    )  # fmt: skip
    monkeypatch.setattr(settling, "ASKED", asked)
    halves = np.tile(np.arange(100) % 2 == 0, (2, 1))

    def logits(right, size):
        return size[..., None] * np.eye(2)[np.where(right, labels, 1 - labels)]

    def turn(of_ways):
        without = of_ways[0].get(1.0, halves)

        def size(way):
            """How sure an answer without a buffer is: so that it changes where the answers with a floor do."""
            found = np.full((2, 100), 3.0)
            found[way[0.0] != without] = 0.1
            found[(way[0.0] != without) & (way.get(0.5, without) == without)] = 1.0
            return found

        def answers(variables, plan):
            way = variables["way"]
            alone, moved = logits(without, size(way)), 9 * logits(way[0.0], (way[0.0] != without) * 1.0)
            return of_rows(alone + moved, plan)  # what is without a buffer divided by the temperature

        def of_rows(z, plan):
            return z[store.row_domains()[plan.query] % 2, plan.query % 100]

        alone = np.tile(logits(without, size(of_ways[0])).repeat(2, 0).reshape(400, 2), (3, 1))
        judged = SimpleNamespace(store=store, answers=answers, logits=alone * np.exp(LOG_T), seed=0)
        judged.floored = functools.partial(judge.FitData.floored, judged)
        own = halves if plain is None else np.tile(plain, (2, 1))
        classifier = np.tile(logits(own, np.ones((2, 100))).repeat(2, 0).reshape(400, 2), (3, 1))
        stats = {"params": {ADAPTER: {"log_t": LOG_T}}, "batch_stats": {ADAPTER: {}}}
        given = {name: {**stats, "way": way} for name, way in zip(judge.WAYS, (*of_ways, {0.0: halves}), strict=True)}
        return judge.Turn(judged, SimpleNamespace(logits=classifier), {}, {}, given)

    rows = np.arange(1200).reshape(3, 2, 2, 100)
    plans = {i: Plan(rows[i, :, 0], rows[i, :, 1]) for i in range(len(ways))}
    monkeypatch.setattr(settling, "planned", lambda _: kinds(plans))
    return settling.settle([turn(of_ways) for of_ways in ways], floors)


def test_what_is_taken_from_a_buffer_is_best_on_the_domains_of_other_turns(monkeypatch):
    """Each turn has two domains, on which each way has its own part of right answers; "none" has half of them."""
    ways = [  # in the order of WAYS
        ((0.9, 0.9), (0.6, 0.6), (0, 0)),
        ((0.4, 0.6), (0.6, 0.6), (0.9, 0.9)),
        ((0.55, 0.45), (0.6, 0.6), (0.1, 0.1)),
    ]
    given = [[{0.0: np.arange(100) < np.round(100 * np.array(x))[:, None]} for x in of_turn] for of_turn in ways]
    found = settled_on(monkeypatch, given, (0.0,), np.zeros(100, int))
    means = [turn.variables["way"][0.0].mean(1).tolist() for turn in found.turns]
    assert means == [[0.6, 0.6], [0.4, 0.6], [0.55, 0.45]] and (found.way, found.floor) == ("learnt", 0.0)
    assert found.floors == {"0": {"gain": pytest.approx(100 * (3.2 / 6 - 0.5)), "rare": None}} and found.rare is None


RARE = np.arange(100) % 25 == 24


def right(common, of_rare):
    """Answers that are right: of the 96 images that are not rare, and of the four that are."""
    found = np.empty(100, bool)
    found[RARE], found[~RARE] = np.array([0, 2, 1, 3]) < of_rare, np.arange(96) < common
    return found


def floors_of(turns):
    return [float(np.exp(turn.variables["batch_stats"][ADAPTER].get(LOG_FLOOR, -np.inf))) for turn in turns]


@pytest.mark.parametrize(("sure", "taken"), [(True, 1.0), (False, 0.5)])
def test_a_floor_protects_rare_classes_as_far_as_a_gain_stays_sure(monkeypatch, sure, taken):
    """The classifier has half of the rare images right; with growing floors none, one and two of four are. Of the
    others 80, 70 and 60 of 96 are right, or by domain with the last floor 33 to 63."""

    def way(turn):
        last = [60, 60] if sure else [33 + 10 * turn, 43 + 10 * turn]
        return {0.0: right(80, 0)[None] | np.zeros((2, 1), bool), 0.5: np.array([right(70, 1)] * 2),
                1.0: np.array([right(x, 2) for x in last])}  # fmt: skip

    found = settled_on(monkeypatch, [[way(i)] * 3 for i in range(3)], (0.0, 0.5, 1.0), RARE.astype(int))
    assert (found.way, found.floor) == ("learnt", taken)
    assert found.floors["0"] == {"gain": pytest.approx(30), "rare": pytest.approx(-50, abs=8)}
    assert found.floors["0.5"] == {"gain": pytest.approx(21), "rare": pytest.approx(-25, abs=8)}
    assert len(found.floors) == 3 and found.rare == pytest.approx(0 if sure else -25, abs=8)
    assert floors_of(found.turns) == pytest.approx([taken] * 3)


def test_rare_classes_tell_by_the_mean_of_domains_and_by_enough_images(monkeypatch):
    """Six domains have four rare images each, of which the classifier has two right. In one domain, which has three
    tasks, the buffer loses both, and in the others none."""
    ways = [[{0.0: np.array([right(80, 0 if i == 0 else 2), right(80, 2)])}] * 3 for i in range(3)]
    often = {"kinds": lambda plans: {"any": {**plans, 0: Plan(*(x[[0, 0, 0, 1]] for x in plans[0]))}}}
    told = settled_on(monkeypatch, ways, (0.0,), RARE.astype(int), asked=24, **often)
    assert told.rare == pytest.approx(-50 / 6, abs=2) == told.floors["0"]["rare"]
    assert settled_on(monkeypatch, ways, (0.0,), RARE.astype(int), asked=25).rare is None
    for name, most in (("OWNERS", 6), ("LEAST", 4)):
        for least in (most, most + 1):
            with monkeypatch.context() as patch:
                patch.setattr(settling, name, least)
                found = settled_on(patch, ways, (0.0,), RARE.astype(int))
                assert (found.rare is None) == (least > most)


@pytest.mark.parametrize(("lost", "floor"), [(30.0, 0.0), (20.0, 0.5)])
def test_the_kind_of_tasks_that_is_worst_for_rare_classes_decides(monkeypatch, lost, floor):
    """One of six domains loses its two right answers of four, without a floor. In one kind of tasks there are six
    domains, in the other two."""
    way = {0.5: np.array([right(70, 2)] * 2), 1.0: np.array([right(60, 2)] * 2)}
    ways = [[way | {0.0: np.array([right(80, 2 if i else 0), right(80, 2)])}] * 3 for i in range(3)]
    monkeypatch.setattr(settling, "LOST", lost)
    kinds = {"plain": right(40, 2), "kinds": lambda plans: {"six": plans, "two": {0: plans[0]}}}
    found = settled_on(monkeypatch, ways, (0.0, 0.5), RARE.astype(int), asked=8, **kinds)
    assert found.floor == floor and found.floors["0"]["rare"] == pytest.approx(-25, abs=4)


def test_a_floor_need_not_mend_what_the_own_style_loses(monkeypatch):
    """The classifier has all rare images right. Two of four are without a buffer, and with a floor of a half; none
    without a floor."""
    way = {x: np.array([right(*of)] * 2) for x, of in ((0.0, (90, 0)), (0.5, (80, 2)), (1.0, (70, 2)))}
    found = settled_on(monkeypatch, [[way] * 3] * 3, (0.0, 0.5, 1.0), RARE.astype(int), plain=right(40, 4))
    assert found.floor == 0.5 and found.rare == pytest.approx(-50, abs=8)


def test_a_turn_that_no_other_tells_of_takes_all_that_was_learnt(monkeypatch):
    ways = [[{0.0: np.tile(right(80, 0), (2, 1))}] * 3]
    found = settled_on(monkeypatch, ways, (0.0, 0.5, 1.0), RARE.astype(int), asked=9)
    assert found.turns[0].variables["way"][0.0][0].sum() == 80 and found.floor == 0.0 and found.rare is None


def test_the_report_tells_of_another_floor_only_where_it_offers_a_choice():
    floors = {"0": {"gain": 4.7, "rare": -28.0}, "0.5": {"gain": 2.8, "rare": -4.0}, "1": {"gain": 0.0, "rare": 0.0}}
    asked = {"floor": 0.5, "rare": -4.2, "takes": "learnt", "floors": floors, "overall": {"100": [2.8, 1.0, 4.6]}}
    limit, told, unbound, kept = of_rare(asked)
    assert "by 2 at most" in limit and "-4.2 points" in told and "+4.7" in unbound and "-28.0" in unbound
    assert "floor=1" in kept and "+0.0" in kept
    assert " would change " in [*of_rare({**asked, "overall": {"100": [2.8, -1.0, 6.6]}})][1] and " changes " in told
    assert len([*of_rare({**asked, "floors": {n: {"gain": 2.8, "rare": 0.0} for n in ("0", "0.5")}})]) == 2
    assert [*of_rare({**asked, "floor": 0.0, "takes": "none", "floors": {"0": floors["1"]}})] == []
    (too_few,) = of_rare({**asked, "floor": 0.0, "rare": None, "floors": {"0": {"gain": 1.0, "rare": None}}})
    assert too_few.startswith("Too few")
    assert [*of_rare({})] == []
    assert [*of_rare({"floor": 1.0, "takes": "learnt"})] == ["With a floor of 1 a buffer changes no answer."]


def test_queries_of_rare_classes_come_as_often_as_the_buffer_suggests():
    """Classes with 94, 4, 2 and 0 images in the first buffer, and one more of each counts. In the second domain all
    images are of one class."""
    labels = np.concatenate([np.repeat(np.arange(4), [500, 10, 40, 50]), np.zeros(600, int)])
    store = SimpleNamespace(
        labels=labels, num_classes=4, offsets=np.array([0, 600, 1200]), row_domains=lambda: np.repeat([0, 1], 600)
    )
    own = np.concatenate([np.arange(94), np.arange(500, 504), np.arange(510, 512)])
    plan = Plan(np.stack([own, np.arange(600, 700)]), np.tile([[7] * 300, [607] * 300], 1))
    found = settling.asking_for_rare(store, plan, np.random.default_rng(0))
    assert found.support.tolist() == [own.tolist()] and not np.isin(found.query, own).any()
    asked = np.bincount(labels[found.query[0]], minlength=4) / 300
    assert asked.tolist() == pytest.approx([0, 5 / 9, 3 / 9, 1 / 9], abs=0.08)


def test_an_image_counts_once_in_the_errors_by_domain():
    query = np.array([[0, 1, 0], [4, 5, 5]])  # of domains 0 and 1
    z = np.log(np.array([[[9.0, 1], [2, 8], [6, 4]], [[3, 7], [5.1, 4.9], [8, 2]]]))
    labels = np.array([[0, 0, 0], [1, 1, 1]])
    asked = judge.AnsweredTasks(query, labels, {"plain": z, "100": z}, {}, np.array([0, 1]), np.zeros(2, int))
    found = judge._curves(asked, {"plain": 1.0, "100": 1.0})
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


def test_logits_of_other_forms_are_read():
    for fine in ([[0.3, 0.7004]], np.zeros((0, 5)), [[0.2, 0.9]] * 99, RNG.normal(0.5, 0.5, (30, 2)), [[40.0, 61.0]]):
        assert len(adapters.as_logits(fine)) == len(fine)
    assert adapters.as_logits(jax.device_put(np.asarray([[1.0, -2.5]], jnp.bfloat16))).tolist() == [[1.0, -2.5]]


def test_what_is_wrong_with_an_argument_is_named():
    z, y, d, s = made(domains=3, each=20)
    shares, seventh = softmax(z, -1), np.arange(60)[:, None] == 7
    good = {"logits": z, "labels": y, "domains": d, "style": s}
    for name, values in {
        "logits": (
            z[0], z[:0], z[:, :1], z.astype(complex), np.where(seventh, "a", z.astype(object)), [[1.0, 2.0], [1.0]],
            np.where(seventh, np.nan, z), np.where(seventh, 1e30, z), np.ma.array(z, mask=seventh | (z > 1e9)),
            shares, np.round(100 * shares), np.round(shares, 2), 1 / (1 + np.exp(-z)),
        ),
        "labels": (y[:-1], y * 0.5, y.astype(str), y * 0 + 2, y + 1, y - 1),
        "domains": (d[:, None], np.where(seventh[:, 0], None, d), np.minimum(d, 1), d, None),  # of 20 images each
        "style": (np.where(seventh, -np.inf, s), s[:-1], np.ma.masked_less(s, s.max()), (1j * s).astype(object)),
        "features": (s[1:],), "seed": (1.5, -1, True), "minutes": ("a", math.nan), "steps": (0,), "floor": (-0.1, 2, "a"),
    }.items():  # fmt: skip
        for value in values:
            with refused(f"^{name}[:=]"):
                cxda_jax.fit(**{**good, name: value})
    with refused("^parts="):  # without domains
        cxda_jax.fit(np.tile(z, (8, 1)), np.tile(y, 8), parts=("style",))
    with refused("^labels: none is 0"):  # so they count from 1
        cxda_jax.fit(np.pad(z, ((0, 0), (0, 1))), y + 1, d, s)


def test_steps_are_left_out_to_keep_to_the_time_and_the_cosine_ends_at_0():
    rates = {}
    for minutes in (1e6, 20):
        said, seconds = [], 0
        limit = TimeLimit(0, 60 * minutes, 2, JUDGING, said.append)
        for training in (1, 2):
            pace, rates[minutes, training], validations = Pace(limit, 1000, 1e-2, 5, CHOICES, 2.0), [], 0
            waited, behind = [0], []
            while pace.left:
                rates[minutes, training].append(pace.rate)
                seconds += 1  # a step
                limit.now = lambda seconds=seconds: seconds
                step = pace.taken + 1
                pace.after_step(step, functools.partial(waited.append, step))
                behind.append(step - max(waited))
                validations += pace.due(pace.taken)
            assert validations == 5 and pace.rate < 1e-12 and pace.asked == 1000 and max(behind) == 2 * AHEAD - 1
        assert any("time is short" in line for line in said) == (minutes == 20)
        assert any(re.search(r"training 2 of 2, step \d+/1000  eta ", line) for line in said) == (minutes == 1e6)
    steps = np.arange(1000)
    np.testing.assert_allclose(rates[1e6, 2], 1e-2 * (1 + np.cos(np.pi * steps / 1000)) / 2, atol=1e-9)
    first, last = len(rates[20, 1]), len(rates[20, 2])
    assert 500 < first < 600 and 500 < last < 600 and first + last < 20 * 60 - 20  # seconds; and for judging
    assert [load_of(classes) for classes in (6, 131, 200, 1000, 10_000)] == [(8, 20), (8, 20), (8, 13), (4, 5), (4, 5)]


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
    asked = judge.AnsweredTasks(labels, labels, {"0": z}, {}, turn, turn)
    told = judge._calibrated(asked, "0", None)
    own = [softmax(z[turn == i] / (1, 3)[1 - i], -1).max(-1) for i in (0, 1)]  # each has the other's temperature
    right = z.argmax(-1) == labels
    expected = metrics.expected_calibration_error(np.concatenate(own).ravel(), right.ravel())
    assert told["ece"][1] == pytest.approx(expected, abs=0.02) and told["ece"][1] > 0.1 and 1 < told["temperature"] < 3
    assert judge._calibrated(asked, "0", 1.0)["ece"][0] == judge._calibrated(asked, "0", 1.0)["ece"][1]
