"""The conformance suite: the rules that every method keeps. A new method joins through METHODS."""

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
from cxda_jax.types import Images
from docs.examples import entries
from tests.conftest import make_episode
from tests.nets import ALL, KEY, build_method, case_of, close, fill

NO_AUGMENT = augment.Weak(crop=False, flip=False, rotate=0.0)
EPISODE = make_episode()


@pytest.fixture(params=[*ALL, "cxda-flat", "cxda_supervised-flat"])
def case(request):
    name, _, features = request.param.partition("-")
    return case_of(name, features or "pool")


def test_compiled_functions_equal_eager_ones_and_a_batch_equals_a_loop(case):
    """Answers and losses: compiled, eager (which leaves all inputs as they were), and under vmap over three episodes."""
    method, variables = case.method, case.variables
    episodes = [make_episode(seed) for seed in range(3)]

    def both(episode):
        answer = method.predict(method.adapt(variables, episode.support, KEY), episode.query)
        return answer, None if method.trains_as else method.loss(variables, episode, KEY)

    before = jax.tree.map(np.array, (variables, episodes))
    alone = [
        (case.answer(episode), None if method.trains_as else case.loss(variables, episode, KEY)) for episode in episodes
    ]
    close(both(episodes[0]), alone[0])
    jax.tree.map(np.testing.assert_array_equal, (variables, episodes), before)
    together = jax.jit(jax.vmap(both))(jax.tree.map(lambda *x: jnp.stack(x), *episodes))
    close(together, jax.tree.map(lambda *x: jnp.stack(x), *alone))


def test_the_record_names_itself_and_adapt_is_idempotent(case):
    assert case.method.name in ALL and case.method.version
    first, second = (case.adapt(case.variables, EPISODE.support, KEY) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    np.testing.assert_array_equal(case.predict(first, EPISODE.query), case.predict(second, EPISODE.query))


def test_answers_depend_on_the_query_and_each_on_its_own(case):
    adapted = case.adapt(case.variables, EPISODE.support, KEY)
    logits = case.predict(adapted, EPISODE.query)
    assert float(jnp.abs(logits - logits[:1]).max()) > 1e-3
    for i in range(len(EPISODE.label)):
        alone = EPISODE.query.pixels[i]
        beside = EPISODE.query.replace(pixels=(255 - EPISODE.query.pixels).at[i].set(alone))
        close(case.predict(adapted, beside)[i], logits[i])
    close(case.method.predict(adapted, jax.tree.map(lambda x: x[:1], EPISODE.query))[0], logits[0])


def test_only_the_stochastic_depend_on_the_key(case):
    answers = [case.answer(EPISODE, jax.random.key(seed)) for seed in range(1, 4)]
    assert case.method.stochastic is not all(np.array_equal(answers[0], other) for other in answers[1:])


def test_order_of_the_support_is_irrelevant(case):
    if case.method.stochastic:
        pytest.skip("each image draws its own key")
    order = np.random.default_rng(1).permutation(len(EPISODE.support_label))
    shuffled = EPISODE.replace(support=jax.tree.map(lambda x: x[order], EPISODE.support))
    close(case.answer(shuffled), case.answer(EPISODE))


def test_domains_and_support_matter_only_where_declared(case):
    support, answer = EPISODE.support, case.answer(EPISODE)
    other = case.answer(EPISODE.replace(support=support.replace(domain=(support.domain + 1) % 3)))
    assert np.allclose(other, answer, atol=1e-6) is not case.method.uses_domains
    other = case.answer(EPISODE.replace(support=make_episode(7).support.replace(domain=support.domain)))
    assert np.array_equal(other, answer) is not case.method.uses_support


def test_attention_rows_sum_to_one(case):
    adapted = case.adapt(case.variables, EPISODE.support, KEY)
    if case.method.attention is None:
        assert not hasattr(adapted, "memory")
        return
    weights = case.method.attention(adapted, EPISODE.query)
    assert weights.shape[::2] == (len(EPISODE.label), len(EPISODE.support_label))
    sums = weights.sum(-1)
    if (
        case.method.name == "icrm" or "tokens" in case.variables["params"]["attention"]
    ):  # these or the image have a share too
        assert (sums > 0).all() and (sums < 1).all()
    else:
        close(sums, np.ones(weights.shape[:2]))


def test_an_empty_support_falls_back_to_the_plain_path(case):
    empty = Images(EPISODE.support.pixels[:0], EPISODE.support.domain[:0])
    logits = case.method.predict(case.method.adapt(case.variables, empty, KEY), EPISODE.query)
    assert np.isfinite(logits).all()
    erm = case_of("erm")
    parts = [{part: jax.tree.structure(c.variables["params"][part]) for part in ("trunk", "head")} for c in (case, erm)]
    if "tokens" in case.variables["params"].get("attention", {}):  # they answer too; tests/test_anytime.py says how
        assert not np.allclose(logits, erm.predict(case.variables, EPISODE.query), atol=1e-4)
    elif parts[0] == parts[1] and "context" not in case.variables["params"]:
        close(logits, erm.predict(case.variables, EPISODE.query))
    elif not case.method.uses_support:
        close(logits, case.answer(EPISODE))


def test_one_program_adapts_to_any_images_in_its_places(case):
    """It equals adapting to these images alone, whatever lies in the other places. Without images it is the plain path."""
    if not case.method.takes_places:
        return
    support, rng, traced = EPISODE.support, np.random.default_rng(0), len(case.traced)
    places = len(support.domain)
    for count in (places, 9, 1, 0):
        chosen = np.sort(rng.permutation(places)[:count])
        present = jnp.zeros(places, bool).at[chosen].set(True)
        alone = jax.tree.map(lambda x, chosen=chosen: x[chosen], support)
        answers = []
        for garbage in rng.integers(0, 256, (2, *support.pixels.shape)).astype(np.uint8):
            pixels = jnp.where(present[:, None, None, None], support.pixels, garbage)
            answers.append(case.answer(EPISODE.replace(support=support.replace(pixels=pixels, present=present))))
        np.testing.assert_array_equal(*answers)
        if case.method.stochastic:
            alone = alone.replace(present=jnp.ones(count, bool))  # else it draws an order
        adapted = case.method.adapt(case.variables, alone, KEY)
        close(answers[0], case.method.predict(adapted, EPISODE.query), 1e-4)
    assert len(case.traced) <= traced + 2, "one adapt and one predict"


def test_an_image_is_put_into_its_place_alone(case):
    """remember() encodes it by the statistics at hand: those of adapting to it, if the variables already hold these."""
    if not case.method.remember:
        return
    put, support = (
        jax.jit(case.method.remember),
        EPISODE.support.replace(present=jnp.ones(len(EPISODE.support.domain), bool)),
    )
    adapted = case.adapt(case.variables, support, KEY)
    image, place = jax.tree.map(lambda x: x[3:4], support), 7
    after = put(adapted, place, image)
    jax.tree.map(np.testing.assert_array_equal, after.variables, adapted.variables)
    tokens = len(jax.tree.leaves(adapted.memory)[0]) // len(support.domain)
    for old, new in zip(jax.tree.leaves(adapted.memory), jax.tree.leaves(after.memory), strict=True):
        changed = np.flatnonzero((np.asarray(old) != new).reshape(len(old), -1).any(1))
        assert {*changed} == {*range(place * tokens, (place + 1) * tokens)}
        own = slice(place * tokens, (place + 1) * tokens)
        if case.method.name == "cxda_any":  # its second pass encodes the support by the same statistics
            close(new[own], old[3 * tokens : 4 * tokens])
    freed = put(adapted._replace(present=adapted.present.at[place].set(False)), place, image)
    jax.tree.map(np.testing.assert_array_equal, freed, after)


def test_no_function_is_traced_again_for_other_episodes(case):
    case.answer(EPISODE)
    before = list(case.traced)
    for seed in range(3):
        case.answer(make_episode(seed), jax.random.key(seed))
    assert case.traced == before


def test_what_has_no_training_starts_from_another_methods_variables(case):
    if not case.method.trains_as:
        return
    other = case_of(case.method.trains_as)
    assert not other.method.trains_as
    jax.tree.map(np.testing.assert_array_equal, case.fresh, other.fresh)
    jax.tree.map(np.testing.assert_array_equal, *(c.loss(case.fresh, EPISODE, KEY) for c in (case, other)))


def test_overfits_one_episode(case):
    if case.method.trains_as:
        return  # its loss is that of the method it starts from, as the test above shows
    tx = optax.sgd(0.05, 0.9)
    state = init_state(case.method, tx, 0, EPISODE.support)
    episodes = jax.tree.map(lambda x: x[None], EPISODE)
    step = jax.jit(lambda state: train_step(case.method, tx, NO_AUGMENT, state, episodes, KEY))
    first = step(state)[1]["loss"]
    for _ in range(50):
        state, measured = step(state)
    assert measured["loss"] < 0.1 < first
    assert measured["accuracy"] == 1


# The tests above are of the default network. These are of the others, among them one without statistics to adapt.

OTHERS = [name for name in (*NETS, *entries.NETS) if name != default().net.name]


@pytest.mark.parametrize("net", OTHERS)
@pytest.mark.parametrize("name", ALL)
def test_each_network_works_with_each_method(name, net):
    changes = {"net__name": net, "net__stages": (1,), "finetune__steps": 1, "cotta__copies": 1}
    if (name, net) == ("sla", "vit"):
        with pytest.raises(UserError, match="net.name='vit' has no adapters; .* cnn, resnet50"):
            build_method(name, **changes)
        return
    method = build_method(name, **changes)
    variables = fill(jax.eval_shape(method.init, KEY, EPISODE.support))  # compiles nothing
    assert ("trunk" in variables["batch_stats"]) is (net != "vit")
    if not method.trains_as:
        learn = jax.jit(jax.value_and_grad(lambda v, p: method.loss({**v, "params": p}, EPISODE, KEY), 1, has_aux=True))
        (loss, aux), grads = learn(variables, variables["params"])
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((loss, aux, grads)))
        assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads["head"]))
        assert jax.tree.map(jnp.shape, aux["batch_stats"]) == jax.tree.map(jnp.shape, variables["batch_stats"])
    if method.calibrate:
        variables = method.calibrate(variables, EPISODE.query.pixels)

    @jax.jit
    def answer(variables, support, query):
        return method.predict(method.adapt(variables, support, KEY), query)

    logits = answer(variables, EPISODE.support, EPISODE.query)
    beside = EPISODE.query.replace(pixels=EPISODE.query.pixels.at[1:].set(255))
    np.testing.assert_array_equal(answer(variables, EPISODE.support, beside)[0], logits[0])
    plain = answer(variables, jax.tree.map(lambda x: x[:0], EPISODE.support), EPISODE.query)
    assert logits.shape == plain.shape == (8, 4) and np.isfinite(logits).all() and np.isfinite(plain).all()
    if name in ("erm", "bn", "bn_alpha", "t3a", "lame", "feature_shift"):
        assert np.array_equal(logits, plain) is (name == "erm" or (name, net) in (("bn", "vit"), ("bn_alpha", "vit")))


def test_only_networks_with_batch_normalisation_train_it_alone():
    method = build_method("ft_em", net__name="vit", finetune__trainable="batch_norm")
    variables = fill(jax.eval_shape(method.init, KEY, EPISODE.support))
    with pytest.raises(UserError, match="trainable='batch_norm': .* no batch normalisation .* 'all'"):
        method.adapt(variables, EPISODE.support, KEY)


def test_the_examples_entries_leave_when_asked():
    assert {"prior_shift", "vit"}.isdisjoint({*METHODS, *NETS}) and "prior_shift" not in default()
    with entries.registered():
        assert "prior_shift" in METHODS and "vit" in NETS and default().prior_shift.steps == 20
    assert "prior_shift" not in METHODS


def test_prior_shift_finds_the_shares_of_the_likelihood_and_checks_its_options():
    """Without smoothing the shares after many steps are those of highest likelihood, which no other shares exceed."""
    variables = {**case_of("erm").variables, "calibration": {"shares": jnp.array([0.1, 0.2, 0.3, 0.4])}}
    source = {k: v for k, v in variables.items() if k != "calibration"}
    trained = np.array([0.1, 0.2, 0.3, 0.4])
    p = np.asarray(jax.nn.softmax(case_of("erm").predict(source, EPISODE.support)), np.float64)

    def shares(**options):
        method = build_method("prior_shift", **{f"prior_shift__{name}": value for name, value in options.items()})
        layers = [
            v["params"]["head"]["logits"]["bias"] for v in (method.adapt(variables, EPISODE.support, KEY), source)
        ]
        return np.exp(np.subtract(*layers, dtype=np.float64)) * trained

    def likelihood(shares):
        return np.log((p * shares / trained).sum(-1)).sum()

    found = shares(steps=200, smoothing=1e-6)
    np.testing.assert_allclose(found.sum(), 1, atol=1e-5)
    others = np.random.default_rng(0).dirichlet(np.ones(4), 1000)
    assert all(likelihood(found) > likelihood(other) - 1e-4 for other in [*others, trained])
    np.testing.assert_allclose(shares(smoothing=1e8), trained, atol=1e-5)
    for field, value, fix in (("steps", 0, "at least 1"), ("smoothing", 0.0, "above 0")):
        with pytest.raises(UserError, match=rf"prior_shift\.{field}={value} .*{fix}"):
            build_method("prior_shift", **{f"prior_shift__{field}": value})


# The options of batch normalisation.


@pytest.mark.parametrize("name", ["bn", "cxda"])
def test_statistics_options(name):
    """`own` changes the loss, `stop` only the gradient; momentum blends statistics."""
    make = {s: build_method(name, batch_norm__statistics=s) for s in ("flow", "stop", "own")}
    variables = case_of(name).fresh
    loss, kernel = {}, {}
    for s, m in make.items():
        learn = jax.value_and_grad(lambda p, m=m: m.loss({**variables, "params": p}, EPISODE, KEY), has_aux=True)
        (loss[s], _), grads = jax.jit(learn)(variables["params"])
        kernel[s] = np.asarray(grads["trunk"]["conv0"]["kernel"])
    close(loss["flow"], loss["stop"])
    assert abs(loss["flow"] - loss["own"]) > 1e-3
    assert np.abs(kernel["flow"] - kernel["stop"]).max() > 1e-4
    half = jax.jit(build_method(name, batch_norm__momentum=0.5).adapt)
    adapted = [adapt(variables, EPISODE.support, KEY) for adapt in (case_of(name).adapt, half)]
    stats = [(a if name == "bn" else a.variables)["batch_stats"]["trunk"]["bn0"]["mean"] for a in adapted]
    close(stats[1], 0.5 * stats[0] + 0.5 * variables["batch_stats"]["trunk"]["bn0"]["mean"])


def test_support_statistics_are_the_numpy_ones_and_running_ones_move_by_a_tenth():
    case, variables = case_of("bn"), case_of("bn").fresh
    exact = case.adapt(variables, EPISODE.support, KEY)["batch_stats"]
    x = (np.asarray(EPISODE.support.pixels, np.float32) / 255 - 0.5) / 0.5
    layer = variables["params"]["trunk"]["conv0"]
    maps = jax.lax.conv_general_dilated(x, layer["kernel"], (1, 1), "SAME", dimension_numbers=NUMBERS)
    maps = np.asarray(maps + layer["bias"], np.float64)
    close(exact["trunk"]["bn0"]["mean"], maps.mean((0, 1, 2)))
    close(exact["trunk"]["bn0"]["var"], maps.var((0, 1, 2)))
    running = case.loss(variables, EPISODE, KEY)[1]["batch_stats"]
    close(running, jax.tree.map(lambda o, e: 0.9 * o + 0.1 * e, variables["batch_stats"], exact))
