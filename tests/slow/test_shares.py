"""cxda_shares against its formulas in numpy's float64, and its training on what the network says of the images."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from cxda_jax.adapter.diagnosis import TRUE_SHARES, UNFORESEEN, diagnose, kind_of
from cxda_jax.adapter.fit import filled
from cxda_jax.config.reading import read, replaced
from cxda_jax.data.episodes import split_part
from cxda_jax.data.store import DomainStore
from cxda_jax.errors import UserError
from cxda_jax.methods.cxda_shares import draw_present, on_described
from cxda_jax.nets import shares
from cxda_jax.nets.shares import HIDDEN, Keyed, Posteriors, ShareAdapter
from cxda_jax.studies.folders import read_result
from cxda_jax.training.experiment import build_on
from cxda_jax.training.frozen import network_accuracy, network_config, on_descriptions, on_trunk
from cxda_jax.training.loop import init_state, train_step
from cxda_jax.types import ADAPTER, Episode, Images
from tests.commands import command
from tests.conftest import INFO, make_episode
from tests.nets import KEY, case_of, close, softmax


def test_a_buffer_fills_at_random():
    """In a step of the device, and on the host."""
    draw = jax.jit(jax.vmap(functools.partial(draw_present, n=20)))
    for drawn in (np.asarray(draw(jax.random.split(KEY, 400))), filled(np.random.default_rng(0), 400, 20)):
        sizes = drawn.sum(1)
        assert 0.4 < (sizes == 20).mean() < 0.6 and (sizes >= 1).all()
        assert abs((sizes[sizes < 20] <= 4).mean() - np.log(5) / np.log(21)) < 0.1
        assert np.ptp(drawn[sizes < 20].mean(0)) < 0.2  # all places alike


def test_a_part_is_held_out_by_domains_or_by_images(fixed_store):
    """Of two domains it is images; both parts together are all training images."""
    train = np.flatnonzero(np.isin(fixed_store.row_domains(), fixed_store.domains("train")))
    many = fixed_store._replace(
        offsets=np.arange(fixed_store.offsets[-1] // 5 + 1) * 5,
        split=tuple(np.repeat(fixed_store.split, 6)), domain_names=tuple(map(str, range(54))),
    )  # fmt: skip
    for store, whole in ((fixed_store, False), (many, True)):
        held, others = (split_part(store, 0.4, 7, held) for held in (True, False))
        assert sorted([*held.rows, *others.rows]) == train.tolist()
        for part in (held, others):
            owner, sizes = store.row_domains()[part.rows], np.diff(part.offsets)
            np.testing.assert_array_equal(np.bincount(owner, minlength=len(store.split)), sizes)
            assert whole == set(sizes).issubset({0, 5})
        assert abs(len(held.rows) / len(train) - 0.4) < 0.06
        assert not np.array_equal(held.rows, split_part(store, 0.4, 8, True).rows)


@pytest.mark.parametrize("method", ["icrm", pytest.param("cxda_loo", marks=pytest.mark.weekly)])
def test_a_method_learns_on_a_trunk_that_stays(method, fixed_store):
    """From images that the trunk's training left out; it begins with the parts of that network that it has too."""
    few, net = {"num_domains": 2, "per_domain": 4, "num_query": 3}, {"width": 8, "padding": "same"}
    config = replaced(read(f"glyphs:{method},smoke"), episode=few, net=net, train={"held_out": 0.4})
    experiment = build_on(config, fixed_store)
    training = build_on(network_config(config, experiment.method, 0.4), fixed_store)
    begun = init_state(experiment.method, experiment.recipe.optimizer, 0, experiment.example)
    other = init_state(training.method, training.recipe.optimizer, 1, training.example)
    network, before = jax.device_get(other.variables), jax.device_get(on_trunk(begun, other.variables).variables)
    for kind, part in (("params", "trunk"), ("batch_stats", "trunk"), *[("params", "head")] * (method != "icrm")):
        jax.tree.map(np.testing.assert_array_equal, before[kind][part], network[kind][part])
    learner, plan = experiment.learner, experiment.train_plans(0)
    assert np.isin(np.concatenate([*plan.support, *plan.query]), split_part(fixed_store, 0.4, 0, True).rows).all()
    assert not np.isin(training.train_plans(0).query, split_part(fixed_store, 0.4, 0, True).rows).any()
    batch = experiment.source.assemble(experiment.source.resident, plan)
    after = jax.device_get(jax.jit(functools.partial(train_step, learner))(on_trunk(begun, network), batch, KEY)[0])
    for name, tree in after.variables["params"].items():
        same = jax.tree.leaves(jax.tree.map(np.array_equal, tree, before["params"][name]))
        assert all(same) if name == "trunk" else not any(same)
    right = network_accuracy(training, network)
    assert 0 <= right.others <= 1 and "left to ask the buffer" in str(right)
    assert "warning" in str(right._replace(others=0.99))


RNG = np.random.default_rng(0)
CLASSES, RANK, STYLE, STEPS = 5, 3, 7, 4


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def variables_of(adapter):
    """With no parameter or statistic as it was at the start."""
    fresh = jax.jit(functools.partial(adapter.init, method="keys"))(KEY, np.zeros((2, STYLE), np.float32))
    moved = jax.tree.map(lambda x: np.asarray(x + RNG.normal(0, 0.3, x.shape), np.float32), fresh)
    mean, std, shares = RNG.normal(size=STYLE), RNG.uniform(0.5, 2, STYLE), softmax(RNG.normal(size=CLASSES))
    known = {"mean": mean, "std": std, "shares": shares}
    return {**moved, "batch_stats": {name: x.astype(np.float32) for name, x in known.items()}}


def by_hand(variables, query, buffer, present, labels=None):
    """The answers to queries, one after another; images are pairs of logits and style. Labels tell the shares."""
    w, known = variables["params"], jax.tree.map(np.float64, variables["batch_stats"])
    t, m, answers, places = known["shares"], np.exp(w["log_m"]), [], np.asarray(present, bool)
    own, log_floor = known.pop("own", None), known.pop("log_floor", -np.inf)
    (logits, styles), (asked, of_asked) = (x[places] for x in buffer), query

    def key(style):
        return np.clip((style - known["mean"]) / known["std"], -5, 5) @ w["kernel"] / np.sqrt(STYLE)

    def moves(style, name="common"):
        return np.clip((style - own["mean"]) / own["std"], -5, 5) @ own[name]

    def estimated(logits, q, steps):
        for _ in range(steps):
            r = softmax(logits / np.exp(w["log_t"]) + moved) * q / t
            counts = a @ (r / r.sum(1, keepdims=True))
            q = (counts + m * t) / (a.sum() + m)
        return q, counts

    if own:
        logits, asked = ((own["scale"] * z + own["bias"] + moves(s, "weights")) for z, s in ((logits, styles), query))
    for z, style in zip(asked, of_asked, strict=True):
        a = sigmoid(w["near"] - ((key(style) - key(styles)) ** 2).sum(1))  # of each image of the buffer
        moved = a.sum() / (a.sum() + np.exp(w["log_n"])) * (a / a.sum() @ key(styles) @ w["bias"] + w["offset"])
        after = STEPS // 2 if own else 0
        q, counts = estimated(logits, t, STEPS - after)
        counts = counts if labels is None else a @ np.eye(CLASSES)[labels][places]
        common = (a @ moves(styles) - counts @ own["content"]) / (a.sum() + np.exp(w["log_l"])) if own else 0.0
        z = z - common
        if labels is not None:
            answers.append(z / np.exp(w["log_t"]) + moved + np.log((counts + t) / (a.sum() + 1) / t))
            continue
        q = estimated(logits - common, q, after)[0] if own else q
        factors = moved - common / np.exp(w["log_t"]) + 2 * sigmoid(w["strength"]) * np.log(q / t)
        answers.append((z + common) / np.exp(w["log_t"]) + np.maximum(factors, factors.max() + log_floor))
    return np.array(answers)


def test_answers_are_those_of_the_formula():
    """With places that hold no image, with all of them, and with the nearest few of a large buffer."""
    adapter = ShareAdapter(CLASSES, RANK, STEPS)
    variables = variables_of(adapter)
    query, buffer = ((RNG.normal(0, 2, (n, CLASSES)), RNG.normal(0, 2, (n, STYLE))) for n in (6, 20))
    present = RNG.uniform(size=20) < 0.6

    @functools.partial(jax.jit, static_argnames="most")
    def answer(images, others, present, most=1000):
        described = [Keyed(z, adapter.apply(variables, style, method="keys")) for z, style in (images, others)]
        return adapter.clone(most=most).apply(variables, *described, present, method="answer")

    close(answer(query, buffer, present), by_hand(variables, query, buffer, present), 1e-4)
    close(answer(query, buffer, None), by_hand(variables, query, buffer, np.ones(20, bool)), 1e-4)
    close(answer(query, buffer, present, most=15), by_hand(variables, query, buffer, present), 1e-4)
    labels = RNG.integers(CLASSES, size=20)
    told = jax.jit(functools.partial(adapter.apply, variables, method="told"))
    images, others = ([*part[:1], adapter.apply(variables, part[1], method="keys")] for part in (query, buffer))
    answered = told(Keyed(*images), Keyed(*others), present, labels)
    close(answered, by_hand(variables, query, buffer, present, labels), 1e-4)
    none = answer(query, buffer, np.zeros(20, bool))
    np.testing.assert_array_equal(none, query[0].astype(np.float32))


def test_what_the_style_moves_in_all_images_of_a_domain_is_taken_away():
    """Beside the formula, of an adapter whose evidence says nothing, and which has a floor; logits that were corrected
    before are the same."""
    adapter = ShareAdapter(CLASSES, RANK, STEPS, weighs=True)
    variables = variables_of(adapter)
    shapes = {"scale": (), "bias": CLASSES, "content": (CLASSES,) * 2, "mean": STYLE}
    shapes |= dict.fromkeys(("weights", "common"), (STYLE, CLASSES))
    own = {name: RNG.normal(0, 1, shape).astype(np.float32) for name, shape in shapes.items()}
    variables["batch_stats"]["own"] = {**own, "std": RNG.uniform(0.5, 2, STYLE).astype(np.float32)}
    variables["params"]["belief"] = np.zeros(HIDDEN, np.float32)
    without, variables["batch_stats"]["log_floor"] = dict(variables["batch_stats"]), np.float32(np.log(0.4))
    query, buffer = ((RNG.normal(0, 2, (n, CLASSES)), RNG.normal(0, 2, (n, STYLE))) for n in (6, 20))
    present, labels = RNG.uniform(size=20) < 0.6, RNG.integers(CLASSES, size=20)

    @jax.jit
    def answers(query, buffer):
        images = [adapter.apply(variables, *part, method="known") for part in (query, buffer)]
        again = [
            adapter.apply(variables, image.logits, style, image.moves, method="known")
            for image, (_, style) in zip(images, (query, buffer), strict=True)
        ]
        given = ((images, "answer", ()), (again, "answer", ()), (images, "told", (labels,)))
        return [adapter.apply(variables, *part, present, *more, method=name) for part, name, more in given]

    found, again, told = answers(query, buffer)
    close(found, by_hand(variables, query, buffer, present), 1e-4)
    assert np.abs(found - by_hand({**variables, "batch_stats": without}, query, buffer, present)).max() > 0.1
    close(again, found, 1e-5)
    close(told, by_hand(variables, query, buffer, present, labels), 1e-4)


def test_evidence_moves_the_strength_of_the_shares():
    """Beside its formula in numpy, and beside an adapter without it that has the moved strength."""
    weighing, plain = ShareAdapter(CLASSES, RANK, STEPS, weighs=True), ShareAdapter(CLASSES, RANK, STEPS)
    variables = variables_of(weighing)
    own = variables["params"]
    t = np.asarray(variables["batch_stats"]["shares"])
    query, buffer = (Keyed(RNG.normal(0, 2, (n, CLASSES)), RNG.normal(0, 0.5, (n, RANK))) for n in (3, 20))
    seen, evidence = [], shares.evidence

    def kept(*given):
        seen.append(given)
        return evidence(*given)

    @jax.jit
    def answer(query, buffer):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shares, "evidence", kept)
            return weighing.apply(variables, query, buffer, None, method="answer"), seen[-1], evidence(*seen[-1])

    answers, (p, q, _, a), found = jax.device_get(answer(query, buffer))
    apply = jax.jit(lambda variables: plain.apply(variables, query, buffer, None, method="answer"))
    for i in range(3):
        of_query = p.images * p.queries[i] / p.whole[i][:, None]
        n, answer = a[i].sum(), a[i] @ of_query / a[i].sum()
        apart, answered = ((x * np.log(x / t)).sum() / np.log(CLASSES) for x in (q[i], answer))
        likelier = a[i] @ np.log(of_query @ (q[i] / t)) / n / np.log(CLASSES)
        sure = a[i] @ (of_query**2).sum(1) / n
        expected = [
            np.log1p(n) - 3,
            2 * apart - 1,
            8 * likelier - 1,
            4 * answered,
            4 * sure - 2,
            2 * (q[i] ** 2).sum() - 1,
        ]
        close(found[i], np.array(expected), 1e-3)
        belief = np.tanh(expected @ own["evidence_kernel"] + own["evidence_bias"]) @ own["belief"]
        without = {name: x for name, x in own.items() if name not in ("evidence_kernel", "evidence_bias", "belief")}
        moved = {**variables, "params": {**without, "strength": own["strength"] + belief}}
        close(apply(moved)[i], answers[i], 1e-3)


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_posteriors_are_those_of_softmax_and_have_finite_gradients(scale):
    """Sure answers too, whose probabilities float32 cannot hold."""
    z, u = scale * RNG.normal(size=(20, CLASSES)), RNG.normal(0, 2, (3, CLASSES))
    factors, weights = RNG.uniform(0, 2, (3, CLASSES)), RNG.uniform(size=(3, 20))

    def sums(z, u):
        p = Posteriors.of(z, u)
        return p.times(factors), p.added(weights), p.dealt(factors, weights), p.squares()

    expected = softmax(z + u[:, None])
    plain = [np.einsum("qnc,qc->qn", expected, factors), np.einsum("qnc,qn->qc", expected, weights)]
    plain.append(np.einsum("qnc,qc,qn->qc", expected, factors, weights / plain[0]))
    for ours, theirs in zip(jax.jit(sums)(z, u), (*plain, np.square(expected).sum(-1)), strict=True):
        close(ours, theirs, 1e-5)
    gradients = jax.jit(jax.grad(lambda *x: sum(jnp.log(part + 1e-6).sum() for part in sums(*x)), (0, 1)))
    for x in ((z, u), (z, 30 * u)):
        assert all(np.isfinite(part).all() for part in gradients(*x))


def test_an_adapter_that_weighs_evidence_learns_from_the_last_step_of_em():
    """Its slopes are those of one step that begins where the steps before end."""
    z, u, factors = RNG.normal(size=(20, CLASSES)), RNG.normal(size=(3, CLASSES)), RNG.normal(size=(3, CLASSES))
    plain, weighs = ShareAdapter(CLASSES, RANK, STEPS), ShareAdapter(CLASSES, RANK, STEPS, weighs=True)
    variables, start = variables_of(weighs), np.full((3, CLASSES), 1 / CLASSES)

    @jax.jit
    def slopes(weights):
        def shares(adapter, weights, start, steps):
            return adapter.apply(variables, Posteriors.of(z, u), weights, start, steps, method="_estimated")[0]

        def slope(*given):
            return jax.grad(lambda w: (factors * shares(given[0], w, *given[1:])).sum())(weights)

        before = shares(plain, weights, start, STEPS - 1)
        return slope(weighs, start, STEPS), slope(plain, before, 1), slope(plain, start, STEPS)

    own, last, whole = slopes(RNG.uniform(size=(3, 20)))
    close(own, last, 1e-5)
    assert np.abs(whole - last).max() > 1e-3


def test_the_errors_learn_from_answers_whose_shares_are_known():
    """The gradients of U and c are those of one of the two losses alone, by differences of the formula."""
    method, rng = on_described(CLASSES, RANK, STEPS), np.random.default_rng(3)
    rows = [rng.normal(0, 2, (n, CLASSES + STYLE)).astype(np.float32) for n in (20, 6)]
    images = [Images(x[:, None, None], np.zeros(len(x), np.int32)) for x in rows]
    episode = Episode(*images, rng.integers(CLASSES, size=6), rng.integers(CLASSES, size=20))
    known = variables_of(ShareAdapter(CLASSES, RANK, STEPS))
    variables = {kind: {ADAPTER: tree} for kind, tree in known.items()}
    found = jax.jit(jax.grad(lambda v: method.loss(v, episode, KEY)[0]))(variables)["params"][ADAPTER]
    query, buffer = ((x[:, :CLASSES], x[:, CLASSES:]) for x in rows[::-1])
    present = np.asarray(jax.jit(draw_present, static_argnums=1)(KEY, 20))
    for name, place in (("offset", (1,)), ("bias", (0, 2))):
        losses = []
        for step in (1e-5, -1e-5):
            params = {k: x.astype(np.float64) for k, x in known["params"].items()}
            params[name][place] += step
            answers = by_hand({**known, "params": params}, query, buffer, present, episode.support_label)
            losses.append(-np.log(softmax(answers)[np.arange(6), episode.label]).mean())
        assert found[name][place] == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-3)


def test_the_adapter_learns_from_what_the_network_says_of_the_images(fixed_store):
    """Loss and answers are those of the pixels; what it learns from are the very images that the replay of a step shows."""
    few = {"num_domains": 2, "per_domain": 4, "num_query": 3}
    config = replaced(read("glyphs:cxda_shares,smoke"), episode=few, net={"width": 8, "padding": "same"})
    experiment = build_on(config, fixed_store)
    state = init_state(experiment.method, experiment.recipe.optimizer, 0, experiment.example)
    own = {kind: {k: v for k, v in tree.items() if k != ADAPTER} for kind, tree in state.variables.items()}
    learning, state = on_descriptions(experiment, state, own)
    plan, sources = experiment.train_plans(3), (experiment.source, learning.source)
    given = zip(sources, (plan, learning.train_plans(3)), strict=True)
    pixels, said = (jax.tree.map(lambda x: x[0], source.assemble(source.resident, own)) for source, own in given)
    np.testing.assert_array_equal(pixels.support_label, said.support_label)
    np.testing.assert_array_equal(pixels.query.domain, said.query.domain)
    both = [jax.jit(e.method.loss)(state.variables, x, KEY) for e, x in ((experiment, pixels), (learning, said))]
    close(both[0][0], both[1][0])
    close(both[0][1]["logits"], both[1][1]["logits"])
    held = split_part(fixed_store, 0.35, 0, True).rows
    assert np.isin([*plan.support.ravel(), *plan.query.ravel()], held).all()
    with pytest.raises(UserError, match="train.held_out=0.3"):
        build_on(read("glyphs:bn,smoke", [("train.held_out", "0.3")]), fixed_store)


def test_one_command_trains_the_network_and_the_adapter(tmp_path):
    """The network's weights stay as its own run left them."""
    run, data = tmp_path / "run", f"--data_dir={tmp_path}/data"
    short = ("--config.train.steps=4", "--config.evaluation.every_steps=4", "--config.cxda_shares.steps=6")
    train = ("train", "--config=glyphs:cxda_shares,smoke", f"--workdir={run}", data, *short)
    said = command(*train)
    assert "left to ask the buffer" in said
    network, result = read_result(run / "network", run / "network"), read_result(run, run)
    assert network.method == "erm_iid" and result.method == "cxda_shares"
    assert network.config["train"]["held_out"] == result.config["cxda_shares"]["held_out"] == 0.35
    own, whole = (load_file(folder / "model" / "weights.safetensors") for folder in (run / "network", run))
    assert {name: x.tobytes() for name, x in own.items()}.items() <= {n: x.tobytes() for n, x in whole.items()}.items()
    assert any(ADAPTER in name for name in whole)
    assert set(json.loads((run / "right.json").read_text())) == {"learnt", "others"}
    other = command(*train, "--config.cxda_shares.held_out=0.5", code=2)
    assert f"{run} holds a run with config.cxda_shares.held_out=0.35, not 0.5" in other


def test_style_and_logits_leave_no_gradient_in_the_network():
    case = case_of("cxda_shares")
    episode = make_episode()
    gradient = jax.jit(jax.grad(lambda p: case.method.loss({**case.variables, "params": p}, episode, KEY)[0]))
    grads = jax.device_get(gradient(case.variables["params"]))
    assert all(not x.any() for name, tree in grads.items() if name != ADAPTER for x in jax.tree.leaves(tree))
    assert any(x.any() for x in jax.tree.leaves(grads[ADAPTER]))


def test_a_diagnosis_tells_what_a_buffer_can_help_with():
    """A classifier that hears little of the image gains by shares; one that is biased on each domain, by its errors."""
    rng, domains, each, classes = np.random.default_rng(0), 8, 600, 4
    labels, owner = rng.integers(0, classes, domains * each), np.repeat(np.arange(domains), each)
    store = DomainStore(
        INFO, np.zeros((domains * each, 1, 1, 1), np.uint8), labels.astype(np.int32),
        np.arange(domains + 1) * each, ("val",) * domains, tuple("01234567"), "",
    )  # fmt: skip
    told = functools.partial(diagnose, store, tasks=40)
    weak = (1.2 * np.eye(classes)[labels] + rng.normal(0, 1, (len(labels), classes))).astype(np.float32)
    found = told(weak, 0.9)
    skewed, mixed, even = kind_of(1, "dirichlet"), kind_of(5, "dirichlet"), kind_of(1, "even")
    assert found.gain(skewed, TRUE_SHARES) > 10 and found.gain(skewed, "mlls") > 5
    assert found.gain(skewed, "mlls, domain known*") == pytest.approx(found.gain(skewed, "mlls"))
    assert found.gain(mixed, "mlls, domain known*") > found.gain(mixed, "mlls")
    assert found.expected(skewed) == pytest.approx(found.gain(skewed, "mlls, domain known*"))
    assert found.expected(even) == pytest.approx(max(0, found.gain(even, "calibrated")))
    assert UNFORESEEN in str(found) and "skewed shares" in found.verdict() and "errs on" not in found.verdict()
    biased = weak + 3 * rng.normal(size=(domains, classes))[owner].astype(np.float32)
    assert "errs on its domain" in told(biased, 0.9).verdict()
    sure = (9 * np.eye(classes)[labels]).astype(np.float32)
    verdict = told(sure, 0.999).verdict()
    assert "leave a buffer" in verdict and "learns nothing" in verdict
