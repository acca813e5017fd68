"""T3A, LAME, BN-alpha and FOA's activation shift against their published formulas, in numpy's float64."""

import jax
import numpy as np
import pytest

from cxda_jax.methods.training_free import BATCH, affinities
from cxda_jax.nets.classifier import Classifier
from cxda_jax.nets.cnn import CNNHead, CNNTrunk
from cxda_jax.types import Known
from tests.conftest import make_episode
from tests.nets import KEY, build_method, case_of, close, make_images

pytestmark = pytest.mark.gate
EPISODE = jax.tree.map(np.asarray, make_episode())
TINY = Classifier(CNNTrunk(8), CNNHead(4), (0.5,), (0.5,))  # the network of build_method()
ENDS = pytest.mark.parametrize("support", [1, 15])


def first(images, count):
    return jax.tree.map(lambda x: x[:count], images)


@jax.jit
def before_last(variables, pixels):
    return TINY.apply(variables, TINY.apply(variables, pixels, method="map"), method="before_last")


def known(images):
    """In float64: features [n, d], logits [n, classes], and the last layer's kernel and bias."""
    variables = case_of("erm").variables
    h = np.asarray(before_last(variables, images.pixels), np.float64)
    kernel, bias = (np.asarray(variables["params"]["head"]["logits"][name], np.float64) for name in ("kernel", "bias"))
    return h, h @ kernel + bias, kernel, bias


def answers(methods, support, variables=None):
    """Those of several methods, by one program."""
    return jax.jit(lambda v, s, q: [m.predict(m.adapt(v, s, KEY), q) for m in methods])(
        variables or case_of(methods[0].name).variables, support, EPISODE.query
    )


def softmax(logits):
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def unit(vector):
    return vector / np.linalg.norm(vector)


@ENDS
def test_t3a_equals_its_formula(support):
    images, kept = first(EPISODE.support, support), (1, 3, 0, 100)
    (h, logits, kernel, bias), (queries, plain, *_) = known(images), known(EPISODE.query)
    for keep, ours in zip(kept, answers([build_method("t3a", t3a__keep=k) for k in kept], images), strict=True):
        expected = np.empty((len(queries), 4))
        for k in range(4):
            vectors = [kernel[:, k], *(h[i] for i in range(support) if logits[i].argmax() == k)]
            p = [softmax(vector @ kernel + bias) for vector in vectors]
            order = np.argsort([-(q * np.log(q)).sum() for q in p])
            chosen = [unit(vectors[i]) for i in (order[:keep] if keep else order)]
            expected[:, k] = queries @ unit(np.sum(chosen, axis=0))
        close(ours, expected)
        assert np.abs(expected - plain).max() > 0.01


def relaxed(h, logits, kind, neighbours, steps):
    """LAME's z for all images, from distances taken one at a time."""
    h, n = np.stack([unit(vector) for vector in h]), len(h)
    distance = np.array([[np.linalg.norm(a - b) for b in h] for a in h])
    nearest = [
        sorted((j for j in range(n) if j != i), key=lambda j, i=i: distance[i, j])[:neighbours] for i in range(n)
    ]
    width = np.mean([distance[i, nearest[i][-1]] for i in range(n)])
    affinity = {
        "knn": np.array([[float(j in nearest[i]) for j in range(n)] for i in range(n)]),
        "rbf": np.exp(-(distance**2) / (2 * width**2)),
        "linear": h @ h.T,
    }[kind]
    p = z = softmax(logits)
    for _ in range(steps):
        z = softmax(np.log(p + 1e-10) + affinity @ z)
    return z


@ENDS
def test_lame_equals_its_formula_for_each_query_beside_the_support(support):
    images, kinds = first(EPISODE.support, support), [("knn", 5), ("rbf", 1), ("rbf", 5), ("linear", 5)]
    (h, logits, *_), (queries, of_queries, *_) = known(images), known(EPISODE.query)
    methods = [build_method("lame", lame__affinity=kind, lame__neighbours=n, lame__steps=7) for kind, n in kinds]
    for options, found in zip(kinds, answers(methods, images), strict=True):
        ours = softmax(np.asarray(found, np.float64))
        for i in range(len(queries)):
            both = np.vstack([h, queries[i]]), np.vstack([logits, of_queries[i]])
            close(ours[i], relaxed(*both, *options, 7)[-1])


def test_of_equal_images_exactly_so_many_are_neighbours():
    features = np.repeat(np.eye(3, dtype=np.float32), 4, axis=0)
    present = np.arange(12) != 1
    found = np.asarray(jax.jit(lambda *x: affinities(x[0], "knn", 2, x[1]))(features, present))
    assert found.sum(1).tolist() == [2, 0] + [2] * 10 and found[0].nonzero()[0].tolist() == [2, 3]


@ENDS
def test_feature_shift_moves_the_mean_of_the_features(support):
    """To that of the training images, of which calibrate() takes any number."""
    images, training, gammas = first(EPISODE.support, support), make_images((16, 16, 1), 2 * BATCH + 7), (0.5, 1.0)
    (h, *_), (queries, _, kernel, bias), (trained, *_) = known(images), known(EPISODE.query), known(training)
    methods = [build_method("feature_shift", feature_shift__gamma=gamma) for gamma in gammas]
    variables = jax.jit(methods[0].calibrate)(case_of("erm").variables, Known(training.pixels, *[None] * 3))
    for gamma, ours in zip(gammas, answers(methods, images, variables), strict=True):
        close(ours, (queries + gamma * (trained.mean(0) - h.mean(0))) @ kernel + bias)


@ENDS
def test_the_priors_share_is_that_of_the_count(support):
    """bn_alpha blends the support's statistics with the running ones like n with N images."""
    variables = case_of("erm").variables
    methods = build_method("bn_alpha", bn_alpha__prior=5.0), build_method("bn")
    adapt = jax.jit(lambda s: [m.adapt(variables, s, KEY)["batch_stats"] for m in methods])
    blended, own = adapt(first(EPISODE.support, support))
    stored, share = variables["batch_stats"], support / (5 + support)
    close(blended, jax.tree.map(lambda r, s: (1 - share) * np.asarray(r) + share * np.asarray(s), stored, own))
