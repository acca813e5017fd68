"""cxda_any: masks, sizes of the subsets, its loss, and the buffer that grows and shrinks by one image at a time."""

import jax
import numpy as np
import pytest

from cxda_jax.methods.anytime import cxda_any, random_subsets
from cxda_jax.methods.erm import encode
from cxda_jax.types import Episode
from tests.nets import KEY, assert_close, close, initialised, make_attending, make_images

SHAPE, CLASSES, N = (20, 20, 1), 5, 7  # maps of 2x2
SUPPORT, QUERY = (jax.tree.map(np.asarray, make_images(SHAPE, n, seed)) for n, seed in ((N, 4), (4, 11)))


def make(features="flat", learned=3, **options):
    net = make_attending(SHAPE, CLASSES, features, 8, heads=2, learned=learned)
    method = cxda_any(net, **options)
    return net, method, initialised(method, SHAPE)


def test_subsets_leave_oneself_out_and_have_the_sizes_that_are_promised():
    full, n, rounds = 0.4, 120, 200
    draw = jax.vmap(random_subsets, (0, None, None))
    seen, few = jax.jit(
        lambda: (draw(jax.random.split(KEY, rounds), n, full), draw(jax.random.split(KEY, 2000), 5, 0.0))
    )()
    seen = np.asarray(seen)
    assert not seen[:, np.arange(n), np.arange(n)].any()
    sizes = seen.sum(-1).ravel()
    assert abs((sizes == n - 1).mean() - full) < 0.02
    drawn = sizes[sizes < n - 1]
    for k in (0, 1, 4, 19, 60):  # P(1 + size <= k + 1) = log(k + 2) / log(n), as 1 + size is the integer part of n^u
        assert abs((drawn <= k).mean() - np.log(k + 2) / np.log(n)) < 0.02
    assert abs((np.asarray(few).sum(-1) == 4).mean() - (1 - np.log(5) / np.log(6))) < 0.02, "all others are drawn too"


@pytest.mark.parametrize("learned", [4, 0])
def test_weights_are_the_softmax_over_what_is_seen_and_the_learned_tokens(learned):
    net, _, variables = make("pool", learned)
    rng, params = np.random.default_rng(1), variables["params"]["attention"]
    query, support = (rng.normal(size=(n, 8)).astype(np.float32) for n in (3, N))
    hidden = rng.random((3, N)) < 0.5
    hidden[0] = True

    def attend(attention, query, support, hidden):
        memory = attention.remember(support)
        return attention.weights(query, memory, hidden), attention.recall(query, memory, hidden)

    given = {"params": params}, query, support, hidden
    weights, adapted = jax.jit(lambda variables, *x: net.attention.apply(variables, *x, method=attend))(*given)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def normed(x):
        x = np.asarray(x, np.float64)
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * p["norm"]["scale"] + p["norm"]["bias"]

    tokens = normed(np.concatenate([p["tokens"], support]) if learned else support)
    q, k, v = normed(query) @ p["query"]["kernel"], tokens @ p["key"]["kernel"], tokens @ p["value"]["kernel"]
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
    net, method, variables = make("patch", full=0.5)
    episode = Episode(SUPPORT, QUERY, np.arange(4) % CLASSES, np.arange(N) % CLASSES)
    images = jax.tree.map(lambda *x: np.concatenate(x), QUERY, SUPPORT)
    labels = np.concatenate([episode.label, episode.support_label])
    maps, exact = jax.tree.map(np.asarray, jax.jit(lambda: encode(net, variables, images))())
    seen = np.asarray(jax.jit(random_subsets, static_argnums=(1, 2))(KEY, len(labels), 0.5))

    @jax.jit
    def answer(others, own):
        return net.apply(variables, own, net.apply(variables, others, method="remember"), method="recall")

    rows = np.concatenate([answer(maps[seen[i]], maps[i : i + 1]) for i in range(len(labels))]).astype(np.float64)
    loss, aux = jax.jit(method.loss)(variables, episode, KEY)
    own = rows[np.arange(len(labels)), labels]
    assert_close(loss, (np.log(np.exp(rows).sum(-1)) - own).mean(), 1e-5)
    assert_close(aux["logits"], rows[:4], 1e-5)
    running = variables["batch_stats"], exact["batch_stats"]
    close(aux["batch_stats"], jax.tree.map(lambda old, new: 0.9 * np.asarray(old) + 0.1 * new, *running))


def test_the_statistics_are_a_blend_by_the_number_of_support_images():
    """And the memory is that of maps normalised by the blend."""
    net, method, variables = make(prior=5.0)

    @jax.jit
    def made(support):
        adapted = method.adapt(variables, support, KEY)
        maps = net.apply(adapted.variables, support.pixels, method="map")
        return adapted, net.apply(adapted.variables, maps, method="remember"), encode(net, variables, support)[1]

    for count in (N, 1):
        adapted, memory, own = made(jax.tree.map(lambda x, n=count: x[:n], SUPPORT))
        stored, share = variables["batch_stats"], count / (count + 5.0)
        blend = jax.tree.map(lambda a, b, s=share: (1 - s) * np.asarray(a) + s * b, stored, own["batch_stats"])
        close(adapted.variables["batch_stats"], blend)
        close(adapted.memory, memory)
