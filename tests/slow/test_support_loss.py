"""Supervision of the support in meta-training: `own` and `leave_one_out`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax.methods.cxda import WithMemory, cxda, cxda_loo
from cxda_jax.methods.erm import blend_statistics, encode
from cxda_jax.nets import attention as attention_module
from cxda_jax.types import Episode
from tests.nets import KEY, assert_close, initialised, make_attending, make_images

SHAPE, CLASSES, N = (20, 20, 1), 5, 5  # maps of 2x2
SUPPORT = make_images(SHAPE, N, 4)
EPISODE = Episode(SUPPORT, make_images(SHAPE, 4, 11), np.arange(4) % CLASSES, np.arange(N) % CLASSES)


def make(features):
    net = make_attending(SHAPE, CLASSES, features, 8, heads=2)
    method = cxda(net)
    return net, method, initialised(method, SHAPE)


def support_logits(net, variables, support):
    """Logits of the support: each image attends to the others, to all, to none."""

    @jax.jit
    def logits_of(variables):
        maps, _ = encode(net, variables, support)
        memory = net.apply(variables, maps, method="remember")
        own = jnp.eye(len(maps), dtype=bool)
        recalled = (net.apply(variables, maps, memory, hidden, method="recall") for hidden in (own, None))
        return *recalled, net.apply(variables, maps, method="classify")

    return [np.asarray(logits) for logits in logits_of(variables)]


def leaving_one_out(net, method, variables):
    """The logits of each support image, as a query of a support of the others that has the statistics of all."""

    @jax.jit
    def logits_of(query, others):
        maps, exact = encode(net, variables, SUPPORT)
        memory = net.apply(variables, maps[others], method="remember")
        seen = blend_statistics(variables, exact, 1.0)
        return method.predict(WithMemory(seen, memory, jnp.asarray(SUPPORT.domain)[others]), query)[0]

    rows, images = np.arange(N), jax.tree.map(np.asarray, SUPPORT)
    return np.stack([logits_of(jax.tree.map(lambda x, i=i: x[i : i + 1], images), rows[rows != i]) for i in rows])


def log_loss(logits):
    labels, logits = np.concatenate([EPISODE.label, EPISODE.support_label]), np.concatenate(logits).astype(np.float64)
    return (np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(labels)), labels]).mean()


@pytest.mark.parametrize("features", ["pool", "patch", "patch in chunks"])
def test_leaving_one_out_equals_cxda_with_the_others_as_support(features, monkeypatch):
    features, _, chunked = features.partition(" ")
    net, method, variables = make(features)
    whole = support_logits(net, variables, SUPPORT)
    if chunked:
        monkeypatch.setattr(attention_module, "CHUNK", 3 * 2 * N * 4)
    logits, everybody, _ = found = support_logits(net, variables, SUPPORT)
    assert_close(found, whole, 1e-6)
    assert_close(logits, leaving_one_out(net, method, variables), 2e-6)
    assert np.abs(everybody - logits).max() > 1e-3


def test_the_loss_is_the_mean_over_all_labelled_images():
    net, plain, variables = make("flat")
    methods = plain, cxda(net, support_loss="own"), cxda(net, support_loss="leave_one_out"), cxda_loo(net)
    leaving, _, plainly = support_logits(net, variables, SUPPORT)
    found = jax.jit(lambda: [m.loss(variables, EPISODE, KEY) for m in methods])()
    query = found[0][1]["logits"]
    for (loss, aux), logits in zip(found[1:], (plainly, leaving, leaving), strict=True):
        assert_close(loss, log_loss([query, logits]), 1e-5)
        assert_close(aux["logits"], query, 1e-6)
    adapted = jax.jit(lambda: [m.adapt(variables, SUPPORT, KEY) for m in methods])()
    for other in adapted[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, adapted[0])
