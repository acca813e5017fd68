"""The conformance suite: the rules that every method keeps. A new method joins through METHODS."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cxda_jax import augment
from cxda_jax.config import default
from cxda_jax.errors import UserError
from cxda_jax.experiment import METHODS, NETS
from cxda_jax.nets.convolution import NUMBERS
from cxda_jax.train import init_state, train_step
from docs.examples import entries
from tests.conftest import make_episode
from tests.nets import ALL, KEY, build_method, case_of, close, fill

# Of numpy, whose operations compile nothing.
EPISODE, OTHER, *MORE = (jax.tree.map(np.asarray, make_episode(seed)) for seed in (0, 7, 1, 2))
COUNT = len(EPISODE.support_label)
RNG = np.random.default_rng(0)
ROWS = {count: np.sort(RNG.permutation(COUNT)[:count]) for count in (4, 0)}  # of the support
INNER = ("erm", "bn", "cxda")
TWINS = ("erm_iid", "cxda_loo", "ft_im")  # differ from another in a loss or a mark, which other tests have


def each(*names, inner=INNER, rare=TWINS):
    rings = {**dict.fromkeys(inner, ()), **dict.fromkeys(rare, pytest.mark.exhaustive)}
    return [pytest.param(name, marks=rings.get(name, pytest.mark.gate)) for name in names]


@pytest.fixture(params=each(*ALL, "cxda-flat"))
def name(request):
    return request.param


@pytest.fixture
def case(name):
    return case_of(*name.split("-"))


@functools.cache
def of_few(name):
    """By one program, answers to fewer support images, by their number; and to one query, alone and among others."""
    case = case_of(*name.split("-"))
    method = case.method

    def answers(variables, episode):
        given, found = jax.tree.leaves((variables, episode)), {}
        for count, rows in ROWS.items() if method.takes_places else [(0, ROWS[0])]:
            support = jax.tree.map(lambda x, rows=rows: x[rows], episode.support)
            if method.stochastic and method.takes_places:
                support = support.replace(present=jnp.ones(count, bool))  # else it draws an order
            adapted = method.adapt(variables, support, KEY)
            found[count] = method.predict(adapted, episode.query)
            alone = method.predict(adapted, jax.tree.map(lambda x: x[2:3], episode.query)), found[count][2:3]
        left = jax.tree.leaves((variables, episode))
        assert [*map(id, given)] == [*map(id, left)], "arguments stay as they are"
        return found, alone

    return jax.jit(answers)(case.variables, EPISODE)


def test_each_record_names_itself_and_only_erm_iid_trains_on_shuffled_images():
    methods = {name: build_method(name) for name in ALL}
    assert all(method.name == name and method.version for name, method in methods.items())
    assert [name for name, method in methods.items() if method.trains_mixed] == ["erm_iid"]


def test_an_answer_depends_on_what_is_declared_alone(case):
    """Key, domains, content and order of the support count where a method says so. Equal questions get equal bits."""
    method, support, answer = case.method, EPISODE.support, case.answer(EPISODE)
    np.testing.assert_array_equal(case.answer(EPISODE), answer)
    keyed = [case.answer(EPISODE, jax.random.key(seed)) for seed in range(1, 4)]
    assert method.stochastic is not all(np.array_equal(keyed[0], other) for other in keyed[1:])
    other = case.answer(EPISODE.replace(support=support.replace(domain=(support.domain + 1) % 3)))
    assert np.allclose(other, answer, atol=1e-6) is not method.uses_domains
    other = case.answer(EPISODE.replace(support=OTHER.support.replace(domain=support.domain)))
    assert np.array_equal(other, answer) is not method.uses_support
    if not method.stochastic:  # in which each image draws its own key
        order = np.random.default_rng(1).permutation(COUNT)
        close(case.answer(EPISODE.replace(support=jax.tree.map(lambda x: x[order], support))), answer)


def test_each_query_is_answered_on_its_own(name, case):
    adapted = case.adapt(case.variables, EPISODE.support, KEY)
    logits = np.asarray(case.predict(adapted, EPISODE.query))
    assert np.abs(logits - logits[:1]).max() > 1e-3
    for i, own in enumerate(EPISODE.query.pixels):
        pixels = 255 - EPISODE.query.pixels
        pixels[i] = own
        close(case.predict(adapted, EPISODE.query.replace(pixels=pixels))[i], logits[i])
    close(*of_few(name)[1])


def test_attention_rows_sum_to_one(case):
    adapted = case.adapt(case.variables, EPISODE.support, KEY)
    if case.method.attention is None:
        assert not hasattr(adapted, "memory")
        return
    weights = np.asarray(jax.jit(case.method.attention)(adapted, EPISODE.query))
    assert weights.shape[::2] == (len(EPISODE.label), COUNT) and (weights >= 0).all()
    sums = weights.sum(-1)
    if case.method.name in ("icrm", "cxda_any"):  # the image itself or learned tokens have a share too
        assert (sums > 0).all() and (sums < 1).all()
    else:
        close(sums, np.ones(weights.shape[:2]))


def test_an_empty_support_falls_back_to_the_plain_path(name, case):
    logits, erm = of_few(name)[0][0], case_of("erm")
    parts = [jax.tree.map(np.shape, [c.variables["params"][part] for part in ("trunk", "head")]) for c in (case, erm)]
    assert np.isfinite(logits).all()
    if case.method.name == "cxda_any":  # its learned tokens answer too
        assert not np.allclose(logits, erm.predict(case.variables, EPISODE.query), atol=1e-4)
    elif parts[0] == parts[1]:
        close(logits, erm.predict(case.variables, EPISODE.query))
    elif not case.method.uses_support:
        close(logits, case.answer(EPISODE))


def test_one_program_adapts_to_any_images_in_its_places(name, case):
    """It equals adapting to these images alone, whatever lies in the other places."""
    if not case.method.takes_places:
        return
    support, whole = EPISODE.support, case.answer(EPISODE)
    traced = len(case.traced)

    def answers(rows):
        present = np.isin(np.arange(COUNT), rows)
        for garbage in RNG.integers(0, 256, (2, *support.pixels.shape)).astype(np.uint8):
            pixels = np.where(present[:, None, None, None], support.pixels, garbage)
            yield case.answer(EPISODE.replace(support=support.replace(pixels=pixels, present=present)))

    for count, rows in ROWS.items():
        first, second = answers(rows)
        np.testing.assert_array_equal(first, second)
        close(first, of_few(name)[0][count], 1e-4)
    if not case.method.stochastic:
        close(next(answers(np.arange(COUNT))), whole, 1e-4)
    assert len(case.traced) <= traced + 2, "one adapt and one predict"


def test_an_image_is_put_into_its_place_alone(case):
    """remember() encodes it by the statistics at hand: those of adapting to it, if the variables already hold these."""
    if not case.method.remember:
        return
    put, support = jax.jit(case.method.remember), EPISODE.support.replace(present=np.ones(COUNT, bool))
    adapted = case.adapt(case.variables, support, KEY)
    image, place = jax.tree.map(lambda x: x[3:4], support), 7
    after = put(adapted, place, image)
    jax.tree.map(np.testing.assert_array_equal, after.variables, adapted.variables)
    tokens = len(jax.tree.leaves(adapted.memory)[0]) // COUNT
    own = slice(place * tokens, (place + 1) * tokens)
    for old, new in zip(*(map(np.asarray, jax.tree.leaves(of.memory)) for of in (adapted, after)), strict=True):
        assert {*np.flatnonzero((old != new).reshape(len(old), -1).any(1))} == {*range(own.start, own.stop)}
        if case.method.name == "cxda_any":  # its second pass encodes the support by the same statistics
            close(new[own], old[3 * tokens : 4 * tokens])
    freed = put(adapted._replace(present=np.arange(COUNT) != place), place, image)
    jax.tree.map(np.testing.assert_array_equal, freed, after)


def test_no_function_is_traced_again_for_other_episodes(case):
    case.answer(EPISODE)
    before = list(case.traced)
    for seed, episode in enumerate(MORE):
        case.answer(episode, jax.random.key(seed))
    assert case.traced == before


def test_what_has_no_training_starts_from_another_methods_variables(case):
    if not case.method.trains_as:
        return
    other = case_of(case.method.trains_as)
    assert not other.method.trains_as
    jax.tree.map(np.testing.assert_array_equal, case.fresh, other.fresh)
    jax.tree.map(np.testing.assert_array_equal, *(c.loss(case.fresh, EPISODE, KEY) for c in (case, other)))


@pytest.mark.parametrize("name", each("bn", "cxda-flat", "cxda_supervised", "cml", "icrm", "lame"))
def test_a_batch_of_episodes_equals_a_loop(name):
    case = case_of(*name.split("-"))
    method, variables, episodes = case.method, case.variables, (EPISODE, *MORE)

    def both(episode):
        answer = method.predict(method.adapt(variables, episode.support, KEY), episode.query)
        return answer, None if method.trains_as else method.loss(variables, episode, KEY)

    alone = [(case.answer(e), None if method.trains_as else case.loss(variables, e, KEY)) for e in episodes]
    together, alone = jax.jit(jax.vmap(both))(jax.tree.map(lambda *x: np.stack(x), *episodes)), zip(*alone, strict=True)
    close(together, tuple(jax.tree.map(lambda *x: np.stack(x), *parts) for parts in alone))


TRAINED = [name for name in ALL if not build_method(name).trains_as]


@pytest.mark.parametrize("name", each(*TRAINED, inner=(), rare=(*TWINS, "cxda_p2p", "cxda_supervised")))
def test_overfits_one_episode(name):
    method, tx, weak = build_method(name), optax.sgd(0.05, 0.9), augment.Weak(False, False, 0.0)
    state, episodes = init_state(method, tx, 0, EPISODE.support), jax.tree.map(lambda x: x[None], EPISODE)
    compiled = jax.jit(lambda state, episodes: train_step(method, tx, weak, state, episodes, KEY))
    step = functools.partial(compiled, episodes=episodes)
    first = step(state)[1]["loss"]
    for _ in range(50):
        state, measured = step(state)
    assert measured["loss"] < 0.1 < first
    assert measured["accuracy"] == 1


# The tests above are of the default network. Of the others each method meets one, and some meet both.

OTHERS = [net for net in (*NETS, *entries.NETS) if net != default().net.name]
PAIRS = [(name, OTHERS[i % len(OTHERS)]) for i, name in enumerate(ALL) if name not in (*TWINS, "sf_ocda", "cotta")]
PAIRS += [("bn", "vit"), ("cml", "resnet50")]


@pytest.mark.gate
@pytest.mark.parametrize(("name", "net"), PAIRS)
def test_a_method_works_with_another_network(name, net):
    method = build_method(name, net__name=net, net__stages=(1,), finetune__steps=1)
    variables = fill(jax.eval_shape(method.init, KEY, EPISODE.support))  # compiles nothing
    assert ("trunk" in variables["batch_stats"]) is (net != "vit")
    beside = EPISODE.query.replace(pixels=np.append(EPISODE.query.pixels[:1], EPISODE.query.pixels[1:] // 2, 0))

    @jax.jit
    def everything(variables, episode, beside):
        learn = jax.value_and_grad(lambda p: method.loss({**variables, "params": p}, episode, KEY), has_aux=True)
        learned = None if method.trains_as else learn(variables["params"])
        if method.calibrate:
            variables = method.calibrate(variables, episode.query.pixels)
        adapted = method.adapt(variables, episode.support, KEY)
        plain = method.adapt(variables, jax.tree.map(lambda x: x[:0], episode.support), KEY)
        asked = ((adapted, episode.query), (adapted, beside), (plain, episode.query))
        return learned, [method.predict(*question) for question in asked]

    learned, (logits, others, plain) = everything(variables, EPISODE, beside)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((learned, logits, plain)))
    assert logits.shape == plain.shape == (8, 4)
    close(others[0], logits[0], 1e-6)
    if learned:
        (_, aux), grads = learned
        assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads["head"]))
        assert jax.tree.map(np.shape, aux["batch_stats"]) == jax.tree.map(np.shape, variables["batch_stats"])
    same = not method.uses_support or (name, net) in (("bn", "vit"), ("bn_alpha", "vit"))
    if name != "ft_em":  # a step from such weights may round to nothing
        assert np.array_equal(logits, plain) is same


def test_what_a_network_lacks_is_named():
    with pytest.raises(UserError, match="net.name='vit' has no adapters; .* cnn, resnet50"):
        build_method("sla", net__name="vit")
    method = build_method("ft_em", net__name="vit", finetune__trainable="batch_norm")
    variables = jax.eval_shape(method.init, KEY, EPISODE.support)
    with pytest.raises(UserError, match="trainable='batch_norm': .* no batch normalisation .* 'all'"):
        jax.eval_shape(method.adapt, variables, EPISODE.support, KEY)


# The documentation's example of an own method.


def test_the_examples_entries_leave_when_asked():
    assert {"prior_shift", "vit"}.isdisjoint({*METHODS, *NETS}) and "prior_shift" not in default()
    with entries.registered():
        assert "prior_shift" in METHODS and "vit" in NETS and default().prior_shift.steps == 20
    assert "prior_shift" not in METHODS


@pytest.mark.gate
def test_prior_shift_finds_the_shares_of_the_likelihood():
    """Without smoothing the shares after many steps are those of highest likelihood, which no other shares exceed."""
    trained, erm = np.array([0.1, 0.2, 0.3, 0.4]), case_of("erm")
    variables = {**erm.variables, "calibration": {"shares": trained.astype(np.float32)}}
    p = np.asarray(jax.nn.softmax(erm.predict(erm.variables, EPISODE.support)), np.float64)
    method = build_method("prior_shift", prior_shift__steps=60, prior_shift__smoothing=1e-6)
    after = jax.jit(method.adapt)(variables, EPISODE.support, KEY)
    layers = [v["params"]["head"]["logits"]["bias"] for v in (after, erm.variables)]
    found = np.exp(np.subtract(*layers, dtype=np.float64)) * trained
    np.testing.assert_allclose(found.sum(), 1, atol=1e-4)
    others = np.random.default_rng(0).dirichlet(np.ones(4), 1000)
    likelihood = [np.log((p * shares / trained).sum(-1)).sum() for shares in (found, trained, *others)]
    assert max(likelihood) < likelihood[0] + 1e-4


# Batch normalisation.


@pytest.mark.gate
@pytest.mark.parametrize("name", ["bn", "cxda"])
def test_statistics_options(name):
    """`own` changes the loss, `stop` only the gradient; momentum blends statistics."""
    methods = {s: build_method(name, batch_norm__statistics=s) for s in ("flow", "stop", "own")}
    half, variables = build_method(name, batch_norm__momentum=0.5), case_of(name).fresh

    def adapted_to(adapted):
        return (adapted if name == "bn" else adapted.variables)["batch_stats"]["trunk"]["bn0"]["mean"]

    @jax.jit
    def everything(variables, episode):
        def loss(params, method):
            return method.loss({**variables, "params": params}, episode, KEY)[0]

        learned = {s: jax.value_and_grad(loss)(variables["params"], m) for s, m in methods.items()}
        return learned, adapted_to(half.adapt(variables, episode.support, KEY))

    learned, blended = everything(variables, EPISODE)
    loss = {s: float(value) for s, (value, _) in learned.items()}
    kernel = {s: np.asarray(grads["trunk"]["conv0"]["kernel"]) for s, (_, grads) in learned.items()}
    close(loss["flow"], loss["stop"])
    assert abs(loss["flow"] - loss["own"]) > 1e-3
    assert np.abs(kernel["flow"] - kernel["stop"]).max() > 1e-4
    support = np.asarray(adapted_to(case_of(name).adapt(variables, EPISODE.support, KEY)))
    close(blended, 0.5 * support + 0.5 * np.asarray(variables["batch_stats"]["trunk"]["bn0"]["mean"]))


def test_support_statistics_are_the_numpy_ones_and_running_ones_move_by_a_tenth():
    case, variables = case_of("bn"), case_of("bn").fresh
    exact = jax.tree.map(np.asarray, case.adapt(variables, EPISODE.support, KEY)["batch_stats"])
    x = (EPISODE.support.pixels.astype(np.float32) / 255 - 0.5) / 0.5
    layer = variables["params"]["trunk"]["conv0"]
    maps = jax.lax.conv_general_dilated(x, layer["kernel"], (1, 1), "SAME", dimension_numbers=NUMBERS)
    maps = np.asarray(maps, np.float64) + np.asarray(layer["bias"])
    close(exact["trunk"]["bn0"]["mean"], maps.mean((0, 1, 2)))
    close(exact["trunk"]["bn0"]["var"], maps.var((0, 1, 2)))
    running = case.loss(variables, EPISODE, KEY)[1]["batch_stats"]
    close(running, jax.tree.map(lambda o, e: 0.9 * np.asarray(o) + 0.1 * e, variables["batch_stats"], exact))
