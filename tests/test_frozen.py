"""T3A, LAME, BN-alpha and FOA's activation shift against their published formulas, in numpy's float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cxda_jax.methods.frozen import BATCH, regularise
from cxda_jax.nets.classifier import Classifier
from cxda_jax.nets.cnn import CNNHead, CNNTrunk
from tests.conftest import make_episode
from tests.nets import KEY, build_method, case_of, close, make_images

EPISODE = make_episode()
TINY = Classifier(CNNTrunk(8), CNNHead(4), (0.5,), (0.5,))  # the network of build_method()
UNTRAINED = ("t3a", "lame", "bn_alpha", "feature_shift")
FORMULAS = pytest.mark.parametrize("support", [1, 15])


def first(images, count):
    return jax.tree.map(lambda x: x[:count], images)


def known(images):
    """In float64: features [n, d], logits [n, classes], and the last layer's kernel and bias."""
    variables = case_of("erm").variables
    maps = TINY.apply(variables, images.pixels, method="map")
    h = np.asarray(TINY.apply(variables, maps, method="before_last"), np.float64)
    kernel, bias = (np.asarray(variables["params"]["head"]["logits"][name], np.float64) for name in ("kernel", "bias"))
    return h, h @ kernel + bias, kernel, bias


def answer(method, support, variables=None):
    return jax.jit(lambda v, s, q: method.predict(method.adapt(v, s, KEY), q))(
        variables or case_of(method.name).variables, support, EPISODE.query
    )


def softmax(logits):
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def unit(vector):
    return vector / np.linalg.norm(vector)


@FORMULAS
@pytest.mark.parametrize("keep", [1, 3, 0, 100])
def test_t3a_equals_its_formula(support, keep):
    """One class and one vector at a time."""
    images = first(EPISODE.support, support)
    (h, logits, kernel, bias), (queries, *_) = known(images), known(EPISODE.query)
    expected = np.empty((len(queries), 4))
    for k in range(4):
        vectors = [kernel[:, k], *(h[i] for i in range(support) if logits[i].argmax() == k)]
        p = [softmax(vector @ kernel + bias) for vector in vectors]
        order = np.argsort([-(q * np.log(q)).sum() for q in p])
        kept = [unit(vectors[i]) for i in (order[:keep] if keep else order)]
        expected[:, k] = queries @ unit(np.sum(kept, axis=0))
    ours = answer(build_method("t3a", t3a__keep=keep), images)
    close(ours, expected)
    assert np.abs(expected - known(EPISODE.query)[1]).max() > 0.01


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
    p = softmax(logits)
    z = p
    for _ in range(steps):
        z = softmax(np.log(p + 1e-10) + affinity @ z)
    return z


@FORMULAS
@pytest.mark.parametrize(("kind", "neighbours"), [("knn", 1), ("knn", 5), ("rbf", 1), ("rbf", 5), ("linear", 5)])
def test_lame_equals_its_formula_for_each_query_beside_the_support(support, kind, neighbours):
    images = first(EPISODE.support, support)
    (h, logits, *_), (queries, of_queries, *_) = known(images), known(EPISODE.query)
    method = build_method("lame", lame__affinity=kind, lame__neighbours=neighbours, lame__steps=7)
    ours = softmax(np.asarray(answer(method, images), np.float64))
    for i in range(len(queries)):
        both = np.vstack([h, queries[i]]), np.vstack([logits, of_queries[i]])
        close(ours[i], relaxed(*both, kind, neighbours, 7)[-1])


def test_lames_steps_converge():
    """After the usual number of steps, further ones change little: z = softmax(log p + A z)."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((101, 16)) + 3 * np.eye(16)[rng.integers(0, 10, 101)]
    features = jnp.asarray(features / np.linalg.norm(features, axis=1, keepdims=True), jnp.float32)
    scores = jax.nn.log_softmax(jnp.asarray(rng.standard_normal((101, 10)), jnp.float32))
    steps = jax.jit(regularise, static_argnums=(2, 3, 4))
    usual, more = (jax.nn.softmax(steps(features, scores, "knn", 5, count)) for count in (50, 300))
    np.testing.assert_allclose(usual, more, rtol=0, atol=1e-3)
    assert np.abs(usual - jax.nn.softmax(scores)).max() > 0.1


@FORMULAS
def test_feature_shift_moves_the_mean_of_the_features(support):
    images, training = first(EPISODE.support, support), make_episode(5).support
    (h, *_), (queries, _, kernel, bias), (trained, *_) = known(images), known(EPISODE.query), known(training)
    for gamma in (0.5, 1.0):
        method = build_method("feature_shift", feature_shift__gamma=gamma)
        variables = method.calibrate(case_of("erm").variables, training.pixels)
        expected = (queries + gamma * (trained.mean(0) - h.mean(0))) @ kernel + bias
        close(answer(method, images, variables), expected)
    own = answer(method, EPISODE.query, variables)  # of features whose mean becomes that of the training images
    close(own.mean(0), trained.mean(0) @ kernel + bias)


def test_feature_shift_is_calibrated_on_any_number_of_images_and_insists_on_it():
    method, images = build_method("feature_shift"), make_images((16, 16, 1), 2 * BATCH + 7)
    for count in (1, len(images.pixels)):
        part = first(images, count)
        mean = jax.jit(method.calibrate)(case_of("erm").variables, part.pixels)["calibration"]["mean"]
        close(mean, known(part)[0].mean(0))
    with pytest.raises(ValueError, match="calibrate"):
        method.adapt(case_of("erm").variables, EPISODE.support, KEY)


@FORMULAS
def test_the_priors_share_is_that_of_the_count(support):
    """bn_alpha blends the support's statistics with the running ones like n with N images."""
    images, running = first(EPISODE.support, support), case_of("erm").variables["batch_stats"]
    blended = build_method("bn_alpha", bn_alpha__prior=5.0).adapt(case_of("erm").variables, images, KEY)["batch_stats"]
    own = build_method("bn").adapt(case_of("erm").variables, images, KEY)["batch_stats"]
    close(
        blended, jax.tree.map(lambda r, s: (5 * np.asarray(r) + support * np.asarray(s)) / (5 + support), running, own)
    )


@pytest.mark.parametrize("name", ["bn", "cxda"])
def test_a_prior_equals_the_momentum_of_its_share_in_loss_and_answers(name):
    """Of 15 support images and a prior of 5: 15 / 20."""
    variables = case_of(name).variables
    prior, momentum = build_method(name, batch_norm__prior=5.0), build_method(name, batch_norm__momentum=0.75)
    (a, b), (c, d) = (
        (jax.jit(m.loss)(variables, EPISODE, KEY), answer(m, EPISODE.support, variables)) for m in (prior, momentum)
    )
    close((a, b), (c, d), 1e-6)
    assert np.abs(b - answer(build_method(name), EPISODE.support, variables)).max() > 1e-3


@pytest.mark.parametrize("name", UNTRAINED)
def test_without_support_they_are_erm_to_the_last_bits(name):
    empty = first(EPISODE.support, 0)
    np.testing.assert_allclose(
        answer(case_of(name).method, empty), answer(case_of("erm").method, empty), rtol=0, atol=1e-6
    )
