"""Supervision of the support in meta-training: `own` and `leave_one_out`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax.methods.cxda import WithMemory, cxda, cxda_loo, cxda_supervised
from cxda_jax.methods.erm import blend_statistics
from cxda_jax.nets import attention as attention_module
from cxda_jax.types import Images
from tests.nets import assert_close, build_method, close, fill, make_attending, make_images

SHAPE, CLASSES, KEY = (28, 28, 1), 5, jax.random.key(0)


def make(features, make_method=cxda, n=9):
    net = make_attending(SHAPE, CLASSES, "flat" if features == "flat" else "pool").clone(features=features)
    method = make_method(net)
    support = make_images(SHAPE, n, 4).replace(domain=jnp.arange(n) % 3)
    variables = fill(jax.eval_shape(method.init, KEY, support))
    return net, method, variables, support


@pytest.mark.parametrize("features", ["pool", "flat", "patch", "patch in chunks"])
def test_leaving_one_out_equals_cxda_with_the_others_as_support(features, monkeypatch):
    """Image i's logits equal those of CXDA with i as the query and the others as keys, under the same statistics."""
    features, _, chunked = features.partition(" ")
    net, method, variables, support = make(features)
    if chunked:
        monkeypatch.setattr(attention_module, "CHUNK", 5 * 8 * 9 * 16)
    maps, exact = net.apply(variables, support.pixels, batch=True, mutable=["batch_stats"], method="map")
    memory = net.apply(variables, maps, method="remember")
    logits = net.apply(variables, maps, memory, True, method="recall")
    seen = blend_statistics(variables, exact, 1.0)
    for i in range(len(support.pixels)):
        others = np.delete(np.arange(len(support.pixels)), i)
        their_memory = net.apply(variables, maps[others], method="remember")
        query = Images(support.pixels[i : i + 1], support.domain[i : i + 1])
        expected = method.predict(WithMemory(seen, their_memory, support.domain[others]), query)
        assert_close(logits[i], expected[0], 2e-6)
    everybody = net.apply(variables, maps, memory, method="recall")
    assert np.abs(np.asarray(everybody - logits)).max() > 1e-3


def test_leaving_one_out_of_the_own_domain():
    net, method, variables, support = make("pool", cxda_supervised)
    leaving = cxda_supervised(net, support_loss="leave_one_out")
    labels = jnp.arange(len(support.pixels)) % CLASSES
    episode = make_episode_of(support, labels)
    maps, exact = net.apply(variables, support.pixels, batch=True, mutable=["batch_stats"], method="map")
    seen, rows = blend_statistics(variables, exact, 1.0), []
    for i in range(len(support.pixels)):
        others = np.delete(np.arange(len(support.pixels)), i)
        values = net.apply(variables, maps[others], method="remember_values")
        query = Images(support.pixels[i : i + 1], support.domain[i : i + 1])
        rows.append(method.predict(WithMemory(seen, values, support.domain[others]), query)[0])
    expected = log_loss(jnp.concatenate([method.loss(variables, episode, KEY)[1]["logits"], jnp.stack(rows)]), episode)
    assert_close(leaving.loss(variables, episode, KEY)[0], expected, 1e-5)


def make_episode_of(support, labels):
    from cxda_jax.types import Episode

    query = make_images(SHAPE, 4, 11).replace(domain=jnp.ones(4, jnp.int32))
    return Episode(support, query, jnp.arange(4) % CLASSES, labels)


def log_loss(logits, episode):
    labels = jnp.concatenate([episode.label, episode.support_label])
    log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)
    return -log_p[np.arange(len(labels)), labels].mean()


@pytest.mark.parametrize("features", ["pool", "flat"])
def test_the_loss_is_the_mean_over_all_labelled_images(features):
    net, plain, variables, support = make(features)
    episode = make_episode_of(support, jnp.arange(len(support.pixels)) % CLASSES)
    maps, _ = net.apply(variables, support.pixels, batch=True, mutable=["batch_stats"], method="map")
    memory = net.apply(variables, maps, method="remember")
    query_logits = plain.loss(variables, episode, KEY)[1]["logits"]
    of = {
        "own": net.apply(variables, maps, method="classify"),
        "leave_one_out": net.apply(variables, maps, memory, True, method="recall"),
    }
    for name, support_logits in of.items():
        loss, aux = cxda(net, support_loss=name).loss(variables, episode, KEY)
        assert_close(loss, log_loss(jnp.concatenate([query_logits, support_logits]), episode), 1e-5)
        np.testing.assert_array_equal(aux["logits"], query_logits)
    loo = cxda_loo(net)
    assert loo.name == "cxda_loo" and loo.loss(variables, episode, KEY)[0] == loss
    jax.tree.map(
        np.testing.assert_array_equal, loo.adapt(variables, support, KEY), plain.adapt(variables, support, KEY)
    )


def test_labels_of_the_support_reach_the_loss_alone(episode):
    other = episode.replace(support_label=(episode.support_label + 1) % 4)
    for name, changes, matters in [
        ("erm", {}, False), ("bn", {}, False), ("bn", {"train__support_loss": "own"}, True), ("cxda", {}, False),
        ("cxda", {"train__support_loss": "own"}, True), ("cxda_loo", {}, True), ("cml", {}, False),
        ("cxda_p2p", {"train__support_loss": "leave_one_out"}, True),
    ]:  # fmt: skip
        method = build_method(name, **changes)
        variables = jax.jit(method.init)(KEY, episode.support)
        losses = [method.loss(variables, e, KEY)[0] for e in (episode, other)]
        assert bool(abs(losses[0] - losses[1]) > 1e-4) is matters, name


def test_own_of_bn_is_the_mean_over_both(episode):
    method, plain = build_method("bn", train__support_loss="own"), build_method("bn")
    variables = jax.jit(method.init)(KEY, episode.support)
    adapted = plain.adapt(variables, episode.support, KEY)  # its own statistics normalise the support
    logits = jnp.concatenate([plain.predict(adapted, episode.query), plain.predict(adapted, episode.support)])
    close(method.loss(variables, episode, KEY)[0], log_loss(logits, episode))


def test_one_support_image_alone_attends_to_nothing():
    net, method, variables, support = make("pool", n=1)
    maps = net.apply(variables, support.pixels, method="map")
    memory = net.apply(variables, maps, method="remember")
    logits = net.apply(variables, maps, memory, True, method="recall")
    np.testing.assert_array_equal(logits, net.apply(variables, maps, method="classify"))
