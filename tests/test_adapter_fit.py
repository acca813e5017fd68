"""fit() on what a classifier says: it gains on skewed devices, and says what is wrong with its arguments."""

import numpy as np
import pytest

import cxda_jax
from tests.lines import refused

CLASSES, STYLE = 6, 8


def made(seed=0, domains=16, each=130, strength=2.0):
    """Logits of a classifier that is sure of itself and errs in each domain in another way, labels, domains, styles."""
    rng = np.random.default_rng(seed)
    labels, owner = rng.integers(0, CLASSES, domains * each), np.repeat(np.arange(domains), each)
    logits = strength * np.eye(CLASSES)[labels] + rng.normal(0, 1.2, (len(labels), CLASSES))
    styles = rng.normal(0, 1, (domains, STYLE))
    logits += 0.8 * (styles[:, :CLASSES])[owner]  # its bias follows from the style
    return 3 * logits, labels, owner, styles[owner] + rng.normal(0, 0.3, (len(labels), STYLE))


@pytest.mark.gate
def test_a_device_with_few_classes_gains():
    """On new domains: with a buffer of its own images, and with those of two domains of which the style tells its own."""
    said = []
    logits, labels, domains, style = made()
    adapter = cxda_jax.fit(logits, labels, domains, style, steps=300, log=said.append)
    assert adapter.helps and "with 100 images" in said[-1]
    new = made(seed=1)
    rng, right = np.random.default_rng(2), {"alone": [], "own": [], "two": [], "none": []}
    for _ in range(40):
        one, other = rng.choice(16, 2, replace=False)
        kinds = {domain: rng.choice(CLASSES, 2, replace=False) for domain in (one, other)}
        rows = {d: rng.permutation(np.flatnonzero((new[2] == d) & np.isin(new[1], kinds[d]))) for d in (one, other)}
        query, own, others = rows[one][:8], rows[one][8:], rows[other]
        for name, buffer in (("own", own), ("two", np.concatenate([own, others])), ("none", own[:0])):
            device = adapter.adapt(new[0][buffer], new[3][buffer])
            proba = device.predict_proba(new[0][query], new[3][query])
            np.testing.assert_allclose(proba.sum(1), 1, atol=1e-5)
            right[name].append((proba.argmax(1) == new[1][query]).mean())
        right["alone"].append((new[0][query].argmax(1) == new[1][query]).mean())
    means = {name: np.mean(values) for name, values in right.items()}
    assert means["none"] == means["alone"]
    assert means["own"] > means["alone"] + 0.1 and means["two"] > means["alone"] + 0.05, means


def test_what_is_wrong_with_an_argument_is_said_in_one_line():
    z, y, d, s = made(domains=3, each=20)
    p = np.exp(z - z.max(1, keepdims=True))
    for arguments, says in (
        ((z[0], y, d, s), r"logits: shape \(6,\)"),
        ((z.astype(str), y, d, s), "logits: shape .* give numbers"),
        ((np.where(np.arange(60)[:, None] == 7, np.nan, z), y, d, s), "logits: row 7 is not finite"),
        ((z, y, d, s[:-1]), "style: 59 rows, but logits has 60"),
        ((z, y[:-1], d, s), r"labels: shape \(59,\)"),
        ((z, y, d[:, None], s), r"domains: shape \(60, 1\)"),
        ((z, y * 0.5, d, s), "labels: float64; give class numbers"),
        ((z, y + 1, d, s), "labels: 6 is none of the 6 columns"),
        ((z, y - 1, d, s), "labels: -1 is none"),
        ((p / p.sum(1, keepdims=True), y, d, s), "logits: each row sums to 1"),
        ((z, y, np.zeros(60), s), "domains: 1 of them"),
        ((z, y, d, s), "num_domains=2, but .* 0 domains with 70 images"),
        ((z[:0], y[:0], d[:0], s[:0]), "domains: 0 of them"),
    ):
        with refused(f"^{says}"):
            cxda_jax.fit(*arguments)
