"""cxda_any: masks, sizes of the subsets, its loss, and the buffer that grows and shrinks by one image at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax.methods.anytime import cxda_any, random_subsets, stream
from cxda_jax.methods.erm import blend_statistics, encode
from cxda_jax.nets.attention import Memory
from cxda_jax.types import Episode
from tests.nets import KEY, assert_close, close, initialised, make_attending, make_images

SHAPE, CLASSES, N = (20, 20, 1), 5, 7  # maps of 2x2


def make(features="flat", learned=3, **options):
    net = make_attending(SHAPE, CLASSES, features, 8, heads=2, learned=learned)
    method = cxda_any(net, **options)
    episode = Episode(
        make_images(SHAPE, N, 4), make_images(SHAPE, 4, 11), jnp.arange(4) % CLASSES, jnp.arange(N) % CLASSES
    )
    return net, method, initialised(method, SHAPE), episode


def test_subsets_leave_oneself_out_and_have_the_sizes_that_are_promised():
    full, n, rounds = 0.4, 120, 200
    seen = jax.jit(jax.vmap(lambda key: random_subsets(key, n, full)))(jax.random.split(KEY, rounds))
    assert not np.asarray(seen)[:, np.arange(n), np.arange(n)].any()
    sizes = np.asarray(seen).sum(-1).ravel()
    assert abs((sizes == n - 1).mean() - full) < 0.02
    drawn = sizes[sizes < n - 1]
    for k in (0, 1, 4, 19, 60):  # P(1 + size <= k + 1) = log(k + 2) / log(n), as 1 + size is the integer part of n^u
        assert abs((drawn <= k).mean() - np.log(k + 2) / np.log(n)) < 0.02
    others = np.asarray(seen)[:, 0, 1:].mean(0)  # all others are as likely
    assert others.std() < 2 * np.sqrt(0.25 / rounds)


@pytest.mark.parametrize("features", ["pool", "flat", "patch"])
@pytest.mark.parametrize("learned", [3, 0])
def test_hidden_images_change_nothing_to_the_bit(features, learned):
    """And an image that sees no other gets the answer without support, which without learned tokens is the plain network's."""
    net, _, variables, episode = make(features, learned)
    hidden = np.random.default_rng(0).random((4, N)) < 0.5
    hidden[0], hidden[1] = True, False
    mask = jnp.asarray(hidden)

    @jax.jit
    def logits(pixels):
        maps, query = (net.apply(variables, x, method="map") for x in (pixels, episode.query.pixels))
        memory = net.apply(variables, maps, method="remember")
        nothing = jax.tree.map(lambda x: x[:0], memory)
        recalls = (net.apply(variables, query, *what, method="recall") for what in ((memory, mask), (nothing,)))
        return *recalls, net.apply(variables, query, method="classify")

    before, without, plain = logits(episode.support.pixels)
    assert_close(before[0], without[0], 1e-6)
    assert np.allclose(without, plain, atol=1e-6) is not bool(learned)
    for i in range(N):
        after = logits(episode.support.pixels.at[i].set(0.3))[0]
        np.testing.assert_array_equal(after[hidden[:, i]], before[hidden[:, i]])
        assert (np.abs(after - before).max(1)[~hidden[:, i]] > 0).all()


@pytest.mark.parametrize("learned", [4, 0])
def test_weights_are_the_softmax_over_what_is_seen_and_the_learned_tokens(learned):
    net, _, variables, _ = make("pool", learned)
    attention, rng = net.attention, np.random.default_rng(1)
    query, support = (jnp.asarray(rng.normal(size=(n, 8)), jnp.float32) for n in (3, N))
    hidden = rng.random((3, N)) < 0.5
    hidden[0] = True
    params = {"params": variables["params"]["attention"]}
    memory: Memory = attention.apply(params, support, method="remember")
    weights = attention.apply(params, query, memory, jnp.asarray(hidden), method="weights")
    adapted = attention.apply(params, query, memory, jnp.asarray(hidden), method="recall")
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params["params"])

    def normed(x):
        x = np.asarray(x, np.float64)
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * p["norm"]["scale"] + p["norm"]["bias"]

    tokens = np.concatenate([p["tokens"], support]) if learned else support
    q, k, v = (
        normed(query) @ p["query"]["kernel"],
        normed(tokens) @ p["key"]["kernel"],
        normed(tokens) @ p["value"]["kernel"],
    )
    seen = np.concatenate([np.ones((3, learned), bool), ~hidden], axis=1)
    summed = np.zeros((3, 4))
    for head, at in enumerate((slice(0, 2), slice(2, 4))):  # the features of a head
        odds = np.exp(q[:, at] @ k[:, at].T / np.sqrt(8 / 2)) * seen
        expected = odds / np.maximum(odds.sum(-1, keepdims=True), 1e-300)
        np.testing.assert_allclose(weights[:, head], expected[:, learned:], atol=1e-5)
        summed[:, at] = expected @ v[:, at]
    np.testing.assert_allclose(adapted, query + summed @ p["out"]["kernel"], atol=1e-5)
    assert (np.abs(adapted - query).max(1) > 1e-3).tolist() == [bool(learned), True, True]


def test_the_loss_is_that_of_each_image_with_its_own_subset_as_support():
    net, method, variables, episode = make(full=0.5)
    images = jax.tree.map(lambda *x: jnp.concatenate(x), episode.query, episode.support)
    labels = np.concatenate([episode.label, episode.support_label])
    maps, exact = jax.jit(lambda: encode(net, variables, images))()
    seen, rows = np.asarray(random_subsets(KEY, len(labels), 0.5)), []
    for i in range(len(labels)):
        memory = net.apply(variables, maps[seen[i]], method="remember")
        rows.append(net.apply(variables, maps[i : i + 1], memory, method="recall")[0])

    def cross_entropy(logits):
        return -np.asarray(jax.nn.log_softmax(logits), np.float64)[np.arange(len(labels)), labels].mean()

    loss, aux = jax.jit(method.loss)(variables, episode, KEY)
    assert_close(loss, cross_entropy(jnp.stack(rows)), 1e-5)
    assert_close(aux["logits"], jnp.stack(rows)[:4], 1e-5)
    close(aux["batch_stats"], blend_statistics(variables, exact, 0.1)["batch_stats"])
    assert 0 < seen.sum() < seen.size - len(seen)


@pytest.mark.parametrize(("count", "prior"), [(N, 5.0), (1, 5.0), (0, 5.0), (N, 0.0)])
def test_the_statistics_are_a_blend_by_the_number_of_support_images(count, prior):
    net, method, variables, episode = make(prior=prior)
    support = jax.tree.map(lambda x: x[:count], episode.support)
    stored, share = variables["batch_stats"], count / (count + prior) if prior else 0
    own = encode(net, variables, support)[1]["batch_stats"] if count else stored
    adapted = method.adapt(variables, support, KEY)
    close(adapted.variables["batch_stats"], jax.tree.map(lambda old, new: (1 - share) * old + share * new, stored, own))
    maps = net.apply(adapted.variables, support.pixels, method="map")
    expected = net.apply(variables, maps, method="remember")
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), adapted.memory, expected)


@pytest.mark.parametrize("features", ["flat", "patch"])
def test_a_buffer_equals_adapting_to_the_same_set(features):
    _, method, variables, episode = make(features, prior=0.0)
    pixels, query, traced = episode.support.pixels, episode.query, []

    def counted(function):
        def called(*arguments):
            traced.append(function)
            return function(*arguments)

        return jax.jit(called)

    form = stream(method)
    append, evict, predict = counted(form.append), counted(form.evict), counted(form.predict)

    adapted_to = jax.jit(lambda support: method.predict(method.adapt(variables, support, KEY), query))

    def expected(rows):
        return adapted_to(jax.tree.map(lambda x: x[np.array(rows, int)], episode.support))

    buffer = form.empty(variables, pixels[0], 4)
    assert_close(predict(buffer, query), expected([]), 1e-6)
    held = []
    for i in range(N):  # the last three replace the oldest
        buffer = append(buffer, pixels[i])
        held = [*held, i][-4:]
        assert_close(predict(buffer, query), expected(held), 1e-6)
    buffer = evict(buffer, 1)  # images 4, 5, 6 took the places 0, 1, 2 of images 0, 1, 2
    assert_close(predict(buffer, query), expected([4, 6, 3]), 1e-6)
    buffer = append(buffer, pixels[0])  # into the free place
    assert_close(predict(buffer, query), expected([4, 0, 6, 3]), 1e-6)
    for place in range(4):
        buffer = evict(buffer, place)
    assert_close(predict(buffer, query), expected([]), 1e-6)
    assert len(traced) == 3, "nothing is compiled again as the buffer grows and shrinks"
