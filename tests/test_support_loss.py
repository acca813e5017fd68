"""Supervision of the support in meta-training: `own` and `leave_one_out`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax.methods.cxda import WithMemory, cxda, cxda_loo, cxda_supervised
from cxda_jax.methods.erm import blend_statistics, encode
from cxda_jax.nets import attention as attention_module
from cxda_jax.types import Episode
from tests.nets import KEY, assert_close, build_method, case_of, close, initialised, make_attending, make_images

SHAPE, CLASSES = (20, 20, 1), 5  # maps of 2x2


def make(features, make_method=cxda, n=5):
    net = make_attending(SHAPE, CLASSES, features, 8, heads=2)
    method = make_method(net)
    support = make_images(SHAPE, n, 4).replace(domain=jnp.arange(n) % 2)
    query = make_images(SHAPE, 4, 11).replace(domain=jnp.ones(4, jnp.int32))
    episode = Episode(support, query, jnp.arange(4) % CLASSES, jnp.arange(n) % CLASSES)
    return net, method, initialised(method, SHAPE), episode


def support_logits(net, variables, support):
    """Logits of the support: each image attends to the others, to all, to none."""

    @jax.jit
    def logits_of(variables):
        maps, _ = encode(net, variables, support)
        memory = net.apply(variables, maps, method="remember")
        own = jnp.eye(len(maps), dtype=bool)
        recalled = (net.apply(variables, maps, memory, hidden, method="recall") for hidden in (own, None))
        return *recalled, net.apply(variables, maps, method="classify")

    return logits_of(variables)


def leaving_one_out(net, method, variables, support, remember):
    """The logits of each support image, as a query of a support of the others that has the statistics of all."""
    maps, exact = jax.jit(lambda: encode(net, variables, support))()
    seen = blend_statistics(variables, exact, 1.0)

    @jax.jit
    def logits_of(query, others):
        memory = net.apply(variables, maps[others], method=remember)
        return method.predict(WithMemory(seen, memory, support.domain[others]), query)[0]

    images = np.arange(len(support.pixels))
    return jnp.stack(
        [logits_of(jax.tree.map(lambda x, i=i: x[i : i + 1], support), images[images != i]) for i in images]
    )


@pytest.mark.parametrize("features", ["pool", "flat", "patch", "patch in chunks"])
def test_leaving_one_out_equals_cxda_with_the_others_as_support(features, monkeypatch):
    """Image i's logits equal those of CXDA with i as the query and the others as keys, under the same statistics."""
    features, _, chunked = features.partition(" ")
    net, method, variables, episode = make(features)
    if chunked:
        monkeypatch.setattr(attention_module, "CHUNK", 3 * 2 * 5 * 4)
    logits, everybody, _ = support_logits(net, variables, episode.support)
    assert_close(logits, leaving_one_out(net, method, variables, episode.support, "remember"), 2e-6)
    assert np.abs(np.asarray(everybody - logits)).max() > 1e-3


def test_leaving_one_out_of_the_own_domain():
    net, method, variables, episode = make("pool", cxda_supervised)
    leaving = cxda_supervised(net, support_loss="leave_one_out")
    rows = leaving_one_out(net, method, variables, episode.support, "remember_values")
    expected = log_loss(jnp.concatenate([jax.jit(method.loss)(variables, episode, KEY)[1]["logits"], rows]), episode)
    assert_close(jax.jit(leaving.loss)(variables, episode, KEY)[0], expected, 1e-5)


def log_loss(logits, episode):
    labels = jnp.concatenate([episode.label, episode.support_label])
    log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)
    return -log_p[np.arange(len(labels)), labels].mean()


@pytest.mark.parametrize("features", ["pool", "flat"])
def test_the_loss_is_the_mean_over_all_labelled_images(features):
    net, plain, variables, episode = make(features)
    leaving, _, plainly = support_logits(net, variables, episode.support)
    query_logits = jax.jit(plain.loss)(variables, episode, KEY)[1]["logits"]
    for name, logits in {"own": plainly, "leave_one_out": leaving}.items():
        loss, aux = jax.jit(cxda(net, support_loss=name).loss)(variables, episode, KEY)
        assert_close(loss, log_loss(jnp.concatenate([query_logits, logits]), episode), 1e-5)
        assert_close(aux["logits"], query_logits, 1e-6)
    loo = cxda_loo(net)
    assert loo.name == "cxda_loo" and jax.jit(loo.loss)(variables, episode, KEY)[0] == loss
    adapted = [method.adapt(variables, episode.support, KEY) for method in (loo, plain)]
    jax.tree.map(np.testing.assert_array_equal, *adapted)


def test_labels_of_the_support_reach_the_loss_alone(episode):
    other = episode.replace(support_label=(episode.support_label + 1) % 4)
    for name, changes, matters in [
        ("erm", {}, False), ("bn", {}, False), ("bn", {"train__support_loss": "own"}, True), ("cxda", {}, False),
        ("cxda", {"train__support_loss": "own"}, True), ("cxda_loo", {}, True), ("cml", {}, False), ("icrm", {}, True),
        ("cxda_p2p", {"train__support_loss": "leave_one_out"}, True),
    ]:  # fmt: skip
        method = build_method(name, **changes)
        variables, loss = initialised(method, (16, 16, 1)), jax.jit(method.loss)
        losses = [loss(variables, e, KEY)[0] for e in (episode, other)]
        assert bool(abs(losses[0] - losses[1]) > 1e-4) is matters, name


def test_own_of_bn_is_the_mean_over_both(episode):
    method, plain = build_method("bn", train__support_loss="own"), case_of("bn")
    adapted = plain.adapt(plain.fresh, episode.support, KEY)  # its own statistics normalise the support
    logits = jnp.concatenate([plain.predict(adapted, episode.query), plain.predict(adapted, episode.support)])
    close(jax.jit(method.loss)(plain.fresh, episode, KEY)[0], log_loss(logits, episode))


def test_one_support_image_alone_attends_to_nothing():
    net, _, variables, episode = make("pool", n=1)
    logits, _, plainly = support_logits(net, variables, episode.support)
    np.testing.assert_array_equal(logits, plainly)
