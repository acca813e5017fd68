"""T3A, LAME, BN-alpha, StatA and FOA's activation shift against their published formulas, in numpy's float64."""

import jax
import numpy as np
import pytest

from cxda_jax.methods.stata import stata
from cxda_jax.methods.training_free import BATCH, affinities
from cxda_jax.types import Known
from tests.conftest import make_episode
from tests.nets import KEY, TINY, build_method, case_of, close, make_images, softmax

EPISODE = jax.tree.map(np.asarray, make_episode())
ENDS = pytest.mark.parametrize("support", [pytest.param(1, marks=pytest.mark.weekly), 15])


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
    program = jax.jit(lambda v, s, q: [m.predict(m.adapt(v, s, KEY), q) for m in methods])
    return program(variables or case_of(methods[0].name).variables, support, EPISODE.query)


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
    np.fill_diagonal(distance, np.inf)  # an image is no neighbour of its own
    nearest = np.argsort(distance, axis=1)[:, : min(neighbours, n - 1)]
    width = np.take_along_axis(distance, nearest[:, -1:], 1).mean()
    np.fill_diagonal(distance, 0)
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
    variables = jax.jit(methods[0].calibrate)(case_of("erm").variables, Known(training.pixels, *[None] * 4))
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


def log_normal(x, u, s):
    return [-((x - u[k]) ** 2 / s[k] + np.log(s[k])).sum() / 2 for k in range(4)]


def mixture_of(anchor, h, logits, alpha, neighbours, steps, temperature):
    """StatA's Gaussians and z, one image and one class at a time, the neighbours of each image, and the shares b."""
    n, (m, v), shares = len(h), anchor, np.empty(4)
    near = [sorted((j for j in range(n) if j != i), key=lambda j, i=i: -h[i] @ h[j])[:neighbours] for i in range(n)]
    pairs = np.array([[(i in near[j]) + (j in near[i]) for j in range(n)] for i in range(n)])
    z, u, s = softmax(logits), m.copy(), np.tile(v, (4, 1))
    for step in range(steps + 1):
        given = [np.log(softmax(logits[i])) + np.array(log_normal(h[i], u, s)) / temperature for i in range(n)]
        for _ in range(5):
            z = softmax(np.array([given[i] + (pairs[i] * (h @ h[i])) @ z / (2 * neighbours) for i in range(n)]))
        for k in range(4 if step < steps else 0):
            size = (z.argmax(1) == k).sum()
            b, weights = size / (size + alpha), z[:, k] / z[:, k].sum()
            shares[k] = b
            u[k] = b * sum(weights[i] * h[i] for i in range(n)) + (1 - b) * m[k]
            s[k] = b * sum(weights[i] * (h[i] - u[k]) ** 2 for i in range(n)) + (1 - b) * (v + (m[k] - u[k]) ** 2)
    return u, s, z, near, shares


def joined(x, scores, h, mixture, neighbours, temperature):
    """StatA's logits of a query, which joins the support."""
    u, s, z, near = mixture
    cosine, logits = h @ x, np.log(softmax(scores)) + np.array(log_normal(x, u, s)) / temperature
    mine = np.argsort(-cosine)[:neighbours]
    for j in range(len(h)):
        joins = len(near[j]) < neighbours or cosine[j] > min(h[j] @ h[i] for i in near[j])
        logits += (int(j in mine) + int(joins)) * cosine[j] * z[j] / (2 * neighbours)
    return logits


@ENDS
def test_stata_equals_its_formula(support):
    """Of training images that lack class 3. A class without support images keeps its anchor bit for bit."""
    images, training, labels = first(EPISODE.support, support), EPISODE.query, np.arange(8) % 3
    (h, logits, *_), (queries, plain, *_) = known(images), known(training)
    h, queries = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (h, queries))
    m = np.stack([*(queries[labels == k].mean(0) for k in range(3)), queries.mean(0)])
    v = ((queries - m[labels]) ** 2).mean(0)
    v = np.maximum(v, 0.01 * v.mean() + 1e-8)
    options = [(1.0, 3, 10, 50.0), (0.3, 2, 4, 20.0), (5.0, 20, 1, 100.0)]
    methods = [stata(TINY, *row) for row in options]

    @jax.jit
    def everything(variables, known, support, query):
        kept = methods[0].calibrate(variables, known)
        adapted = [method.adapt(kept, support, KEY) for method in methods]
        return kept["calibration"], adapted, [i.predict(a, query) for i, a in zip(methods, adapted, strict=True)]

    calibrated = Known(training.pixels, labels, None, None, None)
    anchor, adapted, answers = everything(case_of("erm").variables, calibrated, images, EPISODE.query)
    for (alpha, neighbours, steps, temperature), mixture, ours in zip(options, adapted, answers, strict=True):
        u, s, z, near, shares = mixture_of((m, v), h, logits, alpha, neighbours, steps, temperature)
        close([mixture.means, mixture.variances, mixture.z], [u, s, z], 1e-4)
        absent = shares == 0
        assert absent.any()
        for found, kept in ((mixture.means, anchor["means"]), (mixture.variances, [anchor["variance"]] * 4)):
            np.testing.assert_array_equal(found[absent], np.asarray(kept)[absent])
        for x, scores, found in zip(queries, plain, ours, strict=True):
            close(found, joined(x, scores, h, (u, s, z, near), neighbours, temperature), 1e-4)


def test_in_places_fewer_images_than_neighbours_have_no_more_neighbours():
    """Of LAME and StatA: an image is no neighbour of its own, and a free place is none."""
    images, (queries, plain, *_) = first(EPISODE.support, 9), known(EPISODE.query)
    h, logits, kernel, _ = known(EPISODE.support)
    anchor = {"means": kernel.T / 10, "variance": np.full(len(kernel), 0.1)}
    kept, of_lame = case_of("erm").variables, build_method("lame", lame__neighbours=3, lame__steps=7)
    of_stata = stata(TINY, 1.0, 3, 4, 50.0)

    @jax.jit
    def both(variables, support, query):
        anchored = {**variables, "calibration": anchor}
        adapted = of_lame.adapt(variables, support, KEY), of_stata.adapt(anchored, support, KEY)
        return of_lame.predict(adapted[0], query), of_stata.predict(adapted[1], query)

    unit_h, unit_queries = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (h, queries))
    for n in range(1, 6):
        found = np.asarray(both(kept, images.replace(present=np.arange(9) < n), EPISODE.query), np.float64)
        *mixture, _ = mixture_of([*anchor.values()], unit_h[:n], logits[:n], 1.0, 3, 4, 50.0)
        for i, (x, scores) in enumerate(zip(queries, plain, strict=True)):
            beside = np.vstack([h[:n], x]), np.vstack([logits[:n], scores])
            close(softmax(found[0, i]), relaxed(*beside, "knn", 3, 7)[-1])
            close(found[1, i], joined(unit_queries[i], scores, unit_h[:n], mixture, 3, 50.0), 1e-4)
