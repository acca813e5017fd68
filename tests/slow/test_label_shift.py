"""Prior shift, MLLS, BBSE and un-mixing against their published formulas, in numpy's float64, SciPy's optimiser among it."""

import jax
import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
from sklearn.cluster import KMeans

from cxda_jax.methods.cxda_shares import discriminants, logits_and_style
from cxda_jax.methods.label_shift import (
    fit_temperature,
    shares_by_answers,
    shares_by_confusions,
    shares_by_em,
    temperature_of,
    undoing,
)
from cxda_jax.types import Known
from tests.conftest import make_episode
from tests.nets import KEY, TINY, build_method, case_of, close, make_images, softmax

RNG = np.random.default_rng(0)
LABELS = RNG.choice(4, 300, p=[0.55, 0.3, 0.1, 0.05])
LOGITS = (2 * RNG.normal(size=(300, 4)) + 2.5 * np.eye(4)[LABELS] + [0.5, 0, -0.5, 0]).astype(np.float32)
TRAINED = np.array([0.4, 0.2, 0.2, 0.2])


def em(p, trained, smoothing, weights, steps=50):
    shares = trained
    for _ in range(steps):
        r = p * shares / trained
        shares = (weights @ (r / r.sum(1, keepdims=True)) + smoothing * trained) / (weights.sum() + smoothing)
    return shares


@pytest.mark.parametrize("smoothing", [0.0, 10.0])
def test_em_finds_the_shares_of_greatest_likelihood(smoothing):
    p, weights = softmax(LOGITS.astype(np.float64)), RNG.uniform(0, 1, 300)
    ours = np.asarray(jax.jit(shares_by_em, static_argnums=(2, 3))(p, TRAINED, 2000, smoothing, weights))
    close(ours, em(p, TRAINED, smoothing, weights, 2000), 1e-4)

    def loss(free):
        shares = softmax(np.append(free, 0))
        likelihood = (weights * np.log(p @ (shares / TRAINED))).sum()
        return -likelihood - smoothing * (TRAINED * np.log(shares)).sum()

    best = scipy.optimize.minimize(loss, np.zeros(3), tol=1e-10).x
    np.testing.assert_allclose(ours, softmax(np.append(best, 0)), atol=2e-4)


def test_a_class_without_images_is_no_rarer_than_its_answers():
    """Else EM finds it in images of other classes."""
    kept = LABELS != 3
    z, labels = LOGITS[kept], LABELS[kept]
    shares = shares_by_answers(labels, z, 0.7)
    expected = np.append(np.bincount(labels) / len(labels), softmax(0.7 * z).mean(0)[3])
    np.testing.assert_allclose(shares, expected / expected.sum(), rtol=1e-2)
    np.testing.assert_allclose(shares_by_answers(LABELS, LOGITS, 0.7), np.bincount(LABELS) / 300, rtol=1e-5)
    p = softmax(0.7 * z.astype(np.float64))
    rarer = np.append(expected[:3], 0.5 / len(z))
    assert em(p, shares, 0.0, np.ones(len(z)))[3] < 0.5 * em(p, rarer / rarer.sum(), 0.0, np.ones(len(z)))[3]


def test_the_temperature_and_the_biases_have_the_least_cross_entropy():
    def loss(x):
        return -np.log(softmax(LOGITS * x[0] + x[1:])[np.arange(300), LABELS]).mean()

    best = scipy.optimize.minimize(loss, [1, 0, 0, 0, 0], tol=1e-12).x
    for scale, bias in (jax.jit(fit_temperature)(LOGITS, LABELS), temperature_of(LOGITS, LABELS)):
        np.testing.assert_allclose(scale, best[0], atol=2e-3)
        np.testing.assert_allclose(bias, best[1:] - best[1:].mean(), atol=5e-3)


def test_confusions_are_undone():
    """Exactly where the mean is that of a mixture, and with no share below zero elsewhere."""
    of_classes, shares = softmax(RNG.normal(size=(4, 4)) + 2 * np.eye(4)), np.array([0.7, 0.0, 0.2, 0.1])
    undo = jax.jit(lambda mean, of_classes: shares_by_confusions(mean, undoing(of_classes)))
    np.testing.assert_allclose(undo(shares @ of_classes, of_classes), shares, atol=1e-5)
    outside = np.array([0.97, 0.01, 0.01, 0.01])
    expected = np.maximum(0, np.linalg.solve(of_classes.T, outside))
    np.testing.assert_allclose(undo(outside, of_classes), expected / expected.sum(), atol=1e-5)


@pytest.mark.parametrize("name", ["prior_shift", "mlls", "bbse"])
def test_the_answers_are_corrected_for_the_shares(name):
    """By what calibrate() knows of training images and of unseen ones, in which class 3 is absent."""
    seen, unseen = make_images((16, 16, 1), 40, 1), make_images((16, 16, 1), 50, 2)
    labels, unseen_labels = np.arange(40) % 4 // 2 * 2, np.arange(50) % 3
    method, variables, episode = build_method(name), case_of("erm").variables, make_episode()
    predict = case_of("erm").predict
    known = Known(seen.pixels, labels, unseen.pixels, unseen_labels, unseen.domain)

    @jax.jit
    def everything(variables, known, support, query):
        kept = method.calibrate(variables, known)
        return method.predict(method.adapt(kept, support, KEY), query)

    ours = everything(variables, known, episode.support, episode.query)
    asked = episode.support, unseen, episode.query
    of_support, of_unseen, logits = (np.asarray(predict(variables, images), np.float64) for images in asked)
    counts = np.maximum(0.5, np.bincount(labels if name != "mlls" else unseen_labels, minlength=4))
    trained, scale, bias = counts / counts.sum(), 1.0, 0.0
    if name == "mlls":
        scale, bias = temperature_of(of_unseen, unseen_labels)
    p = softmax(of_support * scale + bias)
    if name == "bbse":
        of_classes = np.eye(4)
        for k in range(3):
            of_classes[k] = softmax(of_unseen)[unseen_labels == k].mean(0)
        shares = np.maximum(0, np.linalg.lstsq(of_classes.T, p.mean(0), rcond=0.01)[0])
        shares = (15 * shares / shares.sum() + 10 * trained) / 25
    else:
        shares = em(p, trained, 10.0, np.ones(15))
    theirs = logits * scale + bias + np.log(shares / trained)
    if name == "mlls":  # the bias of a class without unseen images has no least cross-entropy
        assert (ours[:, 3] < ours[:, :3].min(1) - 10).all()
        ours, theirs = (x[:, :3] - x[:, :3].mean(1, keepdims=True) for x in (ours, theirs))
    close(ours, theirs, 1e-3 if name == "mlls" else 1e-4)


def test_un_mixing_corrects_a_query_by_the_cluster_of_its_key():
    """Clusters of the keys by scikit-learn's k-means, and a loop of EM in each of them."""
    method, variables, domains = build_method("unmix"), case_of("erm").variables, np.arange(60) % 3

    def images(count, seed, brightness):
        drawn = make_images((16, 16, 1), count, seed)
        return drawn.replace(pixels=drawn.pixels * np.float32(brightness)[:, None, None, None])

    unseen, labels = images(60, 2, 0.4 + 0.3 * domains), RNG.integers(4, size=60)
    support, query = (images(n, n, RNG.uniform(0.3, 1, n)) for n in (30, 12))

    @jax.jit
    def everything(variables, known, support, query):
        kept = method.calibrate(variables, known)
        asked = known.unseen, support.pixels, query.pixels
        described = [logits_and_style(TINY, variables, pixels, 6) for pixels in asked]
        return method.predict(method.adapt(kept, support, KEY), query), kept["calibration"], described

    given = variables, Known(None, None, unseen.pixels, labels, domains), support, query
    ours, kept, described = jax.device_get(everything(*given))
    (z, s), (z_s, s_s), (z_q, s_q) = (
        (z.astype(np.float64), np.clip((s - kept["mean"]) / kept["std"], -5, 5)) for z, s in described
    )
    of_domains = discriminants(s, domains, 16)
    assert of_domains.shape[1] == 2 and not kept["directions"][:, 2:].any()
    close(np.abs(s @ kept["directions"][:, :2]), np.abs(s @ of_domains), 1e-2)
    scale, bias = temperature_of(z, labels)
    trained, p = np.bincount(labels, minlength=4) / 60, softmax(z_s * scale + bias)
    keys, asked = (s @ kept["directions"] for s in (s_s, s_q))
    start = [keys[np.square(keys - keys.mean(0)).sum(1).argmax()]]
    for _ in range(4):
        start.append(keys[np.square(keys[:, None] - start).sum(-1).min(1).argmax()])
    found = KMeans(5, init=np.array(start), n_init=1, max_iter=20, tol=0).fit(keys)
    parts = [p[found.labels_ == cluster] for cluster in range(5)]
    shares = np.stack([em(part, trained, 3.0, np.ones(len(part))) for part in parts])
    assert len({*found.predict(asked)}) > 1
    close(ours, z_q * scale + bias + np.log(shares[found.predict(asked)] / trained), 1e-3)


@pytest.mark.parametrize(("numbers", "domains"), [(40, 6), (3, 9), (5, 1)])
def test_keys_are_the_directions_in_which_domains_differ_most(numbers, domains):
    of = np.arange(60) % domains
    s = RNG.normal(size=(60, numbers)) + RNG.normal(size=(domains, numbers))[of]
    s[:, -1] = 0  # a number that is the same everywhere
    means = np.stack([s[of == i].mean(0) for i in range(domains)])[of]
    between, within = np.cov(means.T, bias=True), (s - means).T @ (s - means) / 60
    ratios, best = scipy.linalg.eigh(between, within + 0.1 * np.trace(within) / numbers * np.eye(numbers))
    ours, some = discriminants(s, of, 4), min(4, domains - 1, numbers)
    told = ratios[::-1][:some] > 1e-9
    assert ours.shape == (numbers, some) and not ours[:, ~told].round(3).any()
    np.testing.assert_allclose(np.abs(ours[:, told]), np.abs(best[:, ::-1][:, :some][:, told]), atol=1e-6)
