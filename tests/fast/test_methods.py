"""The conformance suite: the rules that every method keeps. A new method joins through METHODS."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax.config.reading import default
from cxda_jax.nets.building import NETS
from tests.conftest import make_episode, make_known
from tests.nets import ALL, KEY, build_method, case_of, close, fill

# Of numpy, whose operations compile nothing.
EPISODE, OTHER, *MORE = (jax.tree.map(np.asarray, make_episode(seed)) for seed in (0, 7, 1, 2))
COUNT = len(EPISODE.support_label)
RNG = np.random.default_rng(0)
ROWS = {count: np.sort(RNG.permutation(COUNT)[:count]) for count in (4, 0)}  # of the support
INNER = ("erm", "bn", "cxda")
# They differ from another method in what other tests compare.
TWINS = ("erm_iid", "cxda_loo", "cxda_p2p", "ft_im", "bn_alpha", "cxda-flat", "prior_shift", "bbse")


def each(*names, rare=TWINS):
    rings = {**dict.fromkeys(INNER, ()), **dict.fromkeys(rare, pytest.mark.weekly)}
    return [pytest.param(name, marks=rings.get(name, pytest.mark.slow)) for name in names]


@pytest.fixture(params=each(*ALL, "cxda-flat"))
def name(request):
    return request.param


@pytest.fixture
def case(name):
    return case_of(*name.split("-"))


@functools.cache
def of_few(name):
    """By one program, answers to fewer support images, by their number."""
    case = case_of(*name.split("-"))
    method = case.method

    @jax.jit
    def answers(variables, episode):
        found = {}
        for count, rows in ROWS.items() if method.takes_places else [(0, ROWS[0])]:
            support = jax.tree.map(lambda x, rows=rows: x[rows], episode.support)
            if method.stochastic and method.takes_places:
                support = support.replace(present=jnp.ones(count, bool))  # else it draws an order
            found[count] = method.predict(method.adapt(variables, support, KEY), episode.query)
        return found

    return answers(case.variables, EPISODE)


def test_an_answer_depends_on_what_is_declared_alone(case):
    """Key, domains, content and order of the support count where a method says so. Equal questions get equal bits."""
    method, support, answer = case.method, EPISODE.support, case.answer(EPISODE)
    traced = list(case.traced)
    assert method.version and method.trains_mixed is (method.name == "erm_iid")
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
    assert case.traced == traced, "nothing is compiled again for other episodes"


def test_each_query_is_answered_on_its_own(case):
    adapted = case.adapt(case.variables, EPISODE.support, KEY)
    logits = np.asarray(case.predict(adapted, EPISODE.query))
    assert np.abs(logits - logits[:1]).max() > 1e-3
    for i in (0, 5):
        pixels = 255 - EPISODE.query.pixels
        pixels[i] = EPISODE.query.pixels[i]
        close(case.predict(adapted, EPISODE.query.replace(pixels=pixels))[i], logits[i])


def test_an_empty_support_falls_back_to_the_plain_path(name, case):
    logits, erm = of_few(name)[0], case_of("erm")
    parts = [jax.tree.map(np.shape, [c.variables["params"][part] for part in ("trunk", "head")]) for c in (case, erm)]
    assert np.isfinite(logits).all()
    if parts[0] == parts[1] and case.method.name != "cxda_any":  # whose learned tokens answer too
        close(logits, erm.predict(case.variables, EPISODE.query))


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
        close(first, of_few(name)[count], 1e-4)
    if not case.method.stochastic:
        close(next(answers(np.arange(COUNT))), whole, 1e-4)
    assert len(case.traced) <= traced + 2, "one adapt and one predict"


@pytest.mark.parametrize("name", each("bn", "cxda", "cml", "icrm", "lame", rare=("cml", "lame")))
def test_a_batch_of_episodes_equals_a_loop(name):
    case = case_of(name)
    method, variables, episodes = case.method, case.variables, (EPISODE, *MORE)

    def both(episode):
        answer = method.predict(method.adapt(variables, episode.support, KEY), episode.query)
        return answer, None if method.trains_as else method.loss(variables, episode, KEY)

    alone = [(case.answer(e), None if method.trains_as else case.loss(variables, e, KEY)) for e in episodes]
    together, alone = jax.jit(jax.vmap(both))(jax.tree.map(lambda *x: np.stack(x), *episodes)), zip(*alone, strict=True)
    close(together, tuple(jax.tree.map(lambda *x: np.stack(x), *parts) for parts in alone))


# The tests above are of the default network. Of the others each method meets one, and some meet both.
OTHERS = [net for net in (*NETS, "vit") if net != default().net.name]
PAIRS = [(name, "resnet50" if name == "sla" else OTHERS[i % len(OTHERS)]) for i, name in enumerate(ALL)]
RUN = {("bn", "vit"), ("cml", "resnet50"), ("cxda_any", "vit"), ("cxda_loo", "nnx_net")}

PAIRS += [*sorted(RUN), ("cml", "nnx_net"), ("cxda_shares", "nnx_net")]

# Of each network one method of each kind: statistics, attention, a sequence, adaptive losses, shares, steps of training.
OFTEN = RUN | {(name, net) for name, net in PAIRS if name in ("sla", "icrm", "cml", "cxda_shares", "ft_em")}


@pytest.mark.parametrize(("name", "net"), [
    pytest.param(*pair, marks=pytest.mark.slow if pair in OFTEN else pytest.mark.weekly) for pair in PAIRS
])  # fmt: skip
def test_a_method_works_with_another_network(name, net):
    """Most are traced alone, which compiles nothing."""
    method = build_method(name, net__name=net, net__stages=(1, 1) if name == "sla" else (1,), finetune__steps=1)
    variables = jax.eval_shape(method.init, KEY, EPISODE.support)

    def everything(variables, episode):
        learn = jax.value_and_grad(lambda p: method.loss({**variables, "params": p}, episode, KEY), has_aux=True)
        learned = None if method.trains_as else learn(variables["params"])
        if method.calibrate:
            variables = method.calibrate(variables, make_known())
        supports = episode.support, jax.tree.map(lambda x: x[:0], episode.support)
        return learned, [method.predict(method.adapt(variables, own, KEY), episode.query) for own in supports]

    _, (logits, plain) = jax.eval_shape(everything, variables, EPISODE)
    assert logits.shape == plain.shape == (8, 4)
    if (name, net) in RUN:
        ((_, aux), grads), (logits, plain) = jax.jit(everything)(fill(variables), EPISODE)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((aux, grads, logits)))
        leaves = jax.tree_util.tree_leaves_with_path(grads)
        assert all(np.abs(leaf).max() > 0 for path, leaf in leaves if path[-1].key == "kernel")
        assert np.array_equal(logits, plain) is (name == "bn")  # vit has no statistics


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bn", "cxda"])
def test_a_share_of_the_supports_statistics_counts(name):
    """As `momentum` says; and a tenth of them moves the running ones in training."""
    case, variables = case_of(name), case_of(name).fresh
    half = build_method(name, batch_norm__momentum=0.5)

    def statistics(adapted):
        return (adapted if name == "bn" else adapted.variables)["batch_stats"]

    found, plain = jax.jit(half.adapt)(variables, EPISODE.support, KEY), case.loss(variables, EPISODE, KEY)
    exact, stored = statistics(case.adapt(variables, EPISODE.support, KEY)), variables["batch_stats"]
    for share, blended in ((0.5, statistics(found)), (0.1, plain[1]["batch_stats"])):
        close(blended, jax.tree.map(lambda o, e, a=share: (1 - a) * np.asarray(o) + a * np.asarray(e), stored, exact))
