"""The conformance suite: what every method must keep, whatever it does inside. A new method joins through METHODS."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import common
from cxda_jax import augment, experiment
from cxda_jax.data.store import DomainStore
from cxda_jax.experiment import METHODS, NETS, build_net
from cxda_jax.methods.erm import erm
from cxda_jax.methods.finetune import FineTuning, ft_em
from cxda_jax.nets.classifier import Classifier
from cxda_jax.nets.resnet import LinearHead
from cxda_jax.train import init_state, train_step
from cxda_jax.types import Images, UserError
from docs.examples.t3a import t3a
from tests.conftest import INFO, make_episode
from tests.nets import PatchTrunk, fill

KEY = jax.random.key(0)
ALL = METHODS | {"t3a": lambda c, store: t3a(build_net(c, store))}  # the documentation's example keeps the rules too
NO_AUGMENT = augment.Weak(crop=False, flip=False, rotate=0.0)


def build_method(name, features="pool", **changes):
    """A method at the size of a test; changes are written group__field=value."""
    config = common.default()
    config.net.width, config.attention.features, config.attention.heads = 8, features, 2
    config.cml.width, config.finetune.steps, config.finetune.rate, config.cotta.copies = 4, 2, 5.0, 3
    for field, value in changes.items():
        group, _, leaf = field.partition("__")
        config[group][leaf] = value
    images = np.zeros((2, 16, 16, 1), np.uint8)
    store = DomainStore(INFO, images, np.zeros(2, np.int32), np.array([0, 2]), ("train",), ("d0",), "")
    config.method = name
    return (experiment.build_method if name in METHODS else ALL[name])(config.to_dict(), store)


@pytest.fixture(params=[*ALL, "cxda-flat", "cxda_supervised-flat"])
def case(request):
    return made_once(request.param)


@functools.cache
def made_once(name):
    name, _, features = name.partition("-")
    method = build_method(name, features or "pool")
    return method, some_variables(method, make_episode())


@pytest.fixture
def method(case):
    return case[0]


@pytest.fixture
def variables(case):
    return case[1]


def some_variables(method, episode):
    """Weights whose running statistics have met images, as after some training. (With fresh ones hardly any ReLU of
    so small a network is alive, and most tests would compare constants.)"""
    variables = jax.jit(method.init)(KEY, episode.support)
    running = jax.jit(lambda variables, episode: method.loss(variables, episode, KEY)[1]["batch_stats"])
    for seed in range(100, 120):
        variables = {**variables, "batch_stats": running(variables, make_episode(seed))}
    return method.calibrate(variables, episode.query.pixels) if method.calibrate else variables


def answer(method, variables, episode):
    return method.predict(method.adapt(variables, episode.support, KEY), episode.query)


def close(a, b, tolerance=1e-5):
    scale = max(1.0, float(np.abs(np.asarray(b)).max()))
    np.testing.assert_allclose(np.asarray(a) / scale, np.asarray(b) / scale, atol=tolerance, rtol=0)


def test_the_record_names_itself(method):
    assert method.name in ALL and method.version


def test_jit_equals_eager(method, variables, episode):
    close(jax.jit(lambda v: answer(method, v, episode))(variables), answer(method, variables, episode))


def test_vmap_over_episodes_equals_a_loop(method, variables):
    episodes = [make_episode(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *episodes)
    logits = jax.vmap(lambda e: answer(method, variables, e))(stacked)
    losses, aux = jax.vmap(lambda e: method.loss(variables, e, KEY))(stacked)
    for i, episode in enumerate(episodes):
        close(logits[i], answer(method, variables, episode))
        loss, alone = method.loss(variables, episode, KEY)
        close(losses[i], loss)
        jax.tree.map(lambda a, b, i=i: close(a[i], b), aux["batch_stats"], alone["batch_stats"])


def test_adapt_leaves_its_inputs_untouched_and_is_idempotent(method, variables, episode):
    before = jax.tree.map(np.array, (variables, episode))
    first = method.adapt(variables, episode.support, KEY)
    second = method.adapt(variables, episode.support, KEY)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    jax.tree.map(np.testing.assert_array_equal, (variables, episode), before)
    np.testing.assert_array_equal(method.predict(first, episode.query), method.predict(second, episode.query))


def test_answers_depend_on_the_query(method, variables, episode):
    logits = answer(method, variables, episode)
    assert float(jnp.abs(logits - logits[:1]).max()) > 1e-3


def test_only_the_stochastic_depend_on_the_key(method, variables, episode):
    keys = [jax.random.key(seed) for seed in range(1, 4)]
    answers = [method.predict(method.adapt(variables, episode.support, key), episode.query) for key in keys]
    assert method.stochastic is not all(np.array_equal(answers[0], other) for other in answers[1:])


def test_order_of_the_support_is_irrelevant(method, variables, episode):
    if method.stochastic:
        pytest.skip("each image draws its own key")
    order = np.random.default_rng(1).permutation(len(episode.support_label))
    shuffled = episode.replace(support=jax.tree.map(lambda x: x[order], episode.support))
    close(answer(method, variables, shuffled), answer(method, variables, episode))


def test_each_query_is_predicted_on_its_own(method, variables, episode):
    adapted = method.adapt(variables, episode.support, KEY)
    together = method.predict(adapted, episode.query)
    for i in range(len(episode.label)):
        close(method.predict(adapted, jax.tree.map(lambda x, i=i: x[i : i + 1], episode.query))[0], together[i])


def test_domains_matter_only_where_declared(method, variables, episode):
    other = episode.replace(support=episode.support.replace(domain=(episode.support.domain + 1) % 3))
    same = np.allclose(answer(method, variables, other), answer(method, variables, episode), atol=1e-6)
    assert same is not method.uses_domains


def test_the_support_matters_where_declared(method, variables, episode):
    other = episode.replace(support=make_episode(7).support.replace(domain=episode.support.domain))
    same = np.array_equal(answer(method, variables, other), answer(method, variables, episode))
    assert same is not method.uses_support


def test_attention_rows_sum_to_one(method, variables, episode):
    if method.attention is None:
        assert not hasattr(method.adapt(variables, episode.support, KEY), "memory")
        return
    weights = method.attention(method.adapt(variables, episode.support, KEY), episode.query)
    assert weights.shape[::2] == (len(episode.label), len(episode.support_label))
    close(weights.sum(-1), np.ones(weights.shape[:2]))


def test_an_empty_support_falls_back_to_the_plain_path(method, variables, episode):
    empty = Images(episode.support.pixels[:0], episode.support.domain[:0])
    logits = method.predict(method.adapt(variables, empty, KEY), episode.query)
    assert np.isfinite(logits).all()
    erm = build_method("erm")
    if (
        jax.tree.structure(erm.init(KEY, episode.support)["params"]["trunk"])
        == jax.tree.structure(variables["params"]["trunk"])
        and "context" not in variables["params"]
    ):
        close(logits, erm.predict(variables, episode.query))
    elif not method.uses_support:
        close(logits, answer(method, variables, episode))


def test_no_recompilation_on_a_second_call(method, variables):
    task = jax.jit(lambda v, e: answer(method, v, e))
    for seed in range(3):
        task(variables, make_episode(seed))
    assert task._cache_size() == 1


def test_what_has_no_training_starts_from_another_methods_variables(method, variables, episode):
    if not method.trains_as:
        return
    other = build_method(method.trains_as)
    assert not other.trains_as
    jax.tree.map(np.testing.assert_array_equal, *(jax.jit(m.init)(KEY, episode.support) for m in (method, other)))
    shapes = [jax.eval_shape(m.loss, variables, episode, KEY) for m in (method, other)]
    assert shapes[0] == shapes[1]


@pytest.fixture(params=[name for name in [*NETS, "patches"] if name != common.default().net.name])
def other_net(request, monkeypatch):
    """The tests above are of the default network; these of each other one, and of one that has no statistics to adapt."""
    monkeypatch.setitem(NETS, "patches", lambda c, classes: (PatchTrunk(), LinearHead(classes)))
    return request.param


@pytest.mark.parametrize("name", ALL)
def test_each_network_works_with_each_method(name, other_net, episode):
    changes = {"net__name": other_net, "net__stages": (1,), "finetune__steps": 1, "cotta__copies": 1}
    if (name, other_net) == ("sla", "patches"):
        with pytest.raises(UserError, match="net.name='patches' has no adapters; .* cnn, resnet50"):
            build_method(name, **changes)
        return
    method = build_method(name, **changes)
    variables = fill(jax.eval_shape(method.init, KEY, episode.support))  # compiles nothing
    assert ("trunk" in variables["batch_stats"]) is (other_net != "patches")
    if not method.trains_as:
        learn = jax.jit(
            jax.value_and_grad(lambda p: method.loss({**variables, "params": p}, episode, KEY), has_aux=True)
        )
        (loss, aux), grads = learn(variables["params"])
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((loss, aux, grads)))
        assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads["head"]))
        assert jax.tree.map(jnp.shape, aux["batch_stats"]) == jax.tree.map(jnp.shape, variables["batch_stats"])
    if method.calibrate:
        variables = method.calibrate(variables, episode.query.pixels)
    adapt, predict = jax.jit(method.adapt), jax.jit(method.predict)
    adapted = adapt(variables, episode.support, KEY)
    logits = predict(adapted, episode.query)
    beside = episode.query.replace(pixels=episode.query.pixels.at[1:].set(255))
    np.testing.assert_array_equal(predict(adapted, beside)[0], logits[0])
    plain = predict(adapt(variables, jax.tree.map(lambda x: x[:0], episode.support), KEY), episode.query)
    assert logits.shape == plain.shape == (8, 4) and np.isfinite(logits).all() and np.isfinite(plain).all()
    if name in ("erm", "bn", "t3a"):
        assert np.array_equal(logits, plain) is (name == "erm" or (name, other_net) == ("bn", "patches"))


def test_only_networks_with_batch_normalisation_train_it_alone(episode):
    net = Classifier(PatchTrunk(), LinearHead(4), (0.5,), (0.5,))
    method = ft_em(net, FineTuning(optax.sgd(0.1), trainable="batch_norm"))
    with pytest.raises(UserError, match="trainable='batch_norm': the network has no batch normalisation .* 'all'"):
        method.adapt(erm(net).init(KEY, episode.support), episode.support, KEY)


def test_overfits_one_episode(method, episode):
    tx = optax.sgd(0.05, 0.9)
    state = init_state(method, tx, 0, episode.support)
    episodes = jax.tree.map(lambda x: x[None], episode)
    step = jax.jit(lambda state: train_step(method, tx, NO_AUGMENT, state, episodes, KEY))
    first = step(state)[1]["loss"]
    for _ in range(50):
        state, measured = step(state)
    assert measured["loss"] < 0.1 < first
    assert measured["accuracy"] == 1


@pytest.mark.parametrize("name", ["bn", "cxda"])
def test_statistics_options(name, episode):
    """All ways of training give the same loss but for `own`, and `stop` another gradient; momentum blends."""
    make = {s: build_method(name, batch_norm__statistics=s) for s in ("flow", "stop", "own")}
    variables = jax.jit(make["flow"].init)(KEY, episode.support)
    loss = {s: m.loss(variables, episode, KEY)[0] for s, m in make.items()}
    grads = {
        s: jax.grad(lambda p, m=m: m.loss({**variables, "params": p}, episode, KEY)[0])(variables["params"])
        for s, m in make.items()
    }
    close(loss["flow"], loss["stop"])
    assert abs(loss["flow"] - loss["own"]) > 1e-3
    kernel = {s: np.asarray(g["trunk"]["conv0"]["kernel"]) for s, g in grads.items()}
    assert np.abs(kernel["flow"] - kernel["stop"]).max() > 1e-4

    exact = make["flow"].adapt(variables, episode.support, KEY)
    half = build_method(name, batch_norm__momentum=0.5).adapt(variables, episode.support, KEY)
    stats = [(a if name == "bn" else a.variables)["batch_stats"]["trunk"]["bn0"]["mean"] for a in (exact, half)]
    close(stats[1], 0.5 * stats[0] + 0.5 * variables["batch_stats"]["trunk"]["bn0"]["mean"])


def test_support_statistics_are_the_numpy_ones(episode):
    method = build_method("bn")
    variables = jax.jit(method.init)(KEY, episode.support)
    adapted = method.adapt(variables, episode.support, KEY)
    x = (np.asarray(episode.support.pixels, np.float32) / 255 - 0.5) / 0.5
    conv = jax.lax.conv_general_dilated(
        x, variables["params"]["trunk"]["conv0"]["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    maps = np.asarray(conv + variables["params"]["trunk"]["conv0"]["bias"], np.float64)
    stats = adapted["batch_stats"]["trunk"]["bn0"]
    close(stats["mean"], maps.mean((0, 1, 2)))
    close(stats["var"], maps.var((0, 1, 2)))


def test_running_statistics_move_by_a_tenth(episode):
    method = build_method("bn")
    variables = jax.jit(method.init)(KEY, episode.support)
    exact = method.adapt(variables, episode.support, KEY)["batch_stats"]
    running = method.loss(variables, episode, KEY)[1]["batch_stats"]
    jax.tree.map(lambda r, o, e: close(r, 0.9 * o + 0.1 * e), running, variables["batch_stats"], exact)
