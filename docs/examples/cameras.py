"""Made-up cameras for the examples beside this file: scikit-learn's digits 0 to 5, under light from one side.

A classifier learns from plain digits, and errs on each camera in another way. The adapter is fitted once, in a minute
or two on two cores, and kept for the next example.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import ndimage
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import cxda_jax

KEPT = Path.home() / ".cache" / "cxda_jax" / "examples" / "cameras"
CLASSES, CAMERAS, EACH = 6, 24, 130
IMAGES, LABELS = load_digits(n_class=CLASSES, return_X_y=True)
IMAGES = IMAGES.reshape(-1, 8, 8) / 16
TRAINING, FOR_FIT, NEW = np.split(np.random.default_rng(0).permutation(len(IMAGES)), [300, 800])  # all different
CLASSIFIER = LogisticRegression(C=0.1, max_iter=1000).fit(IMAGES[TRAINING].reshape(300, -1), LABELS[TRAINING])


class Camera(NamedTuple):
    """What fit() and a device read of images of one camera."""

    logits: np.ndarray
    style: np.ndarray
    labels: np.ndarray


def photograph(number: int, rows: np.ndarray, count: int = EACH) -> Camera:
    """Digits as a camera sees them: blurred, with light from one side and noise, and few classes are frequent."""
    rng = np.random.default_rng([number, 1])
    frequent = rng.dirichlet(np.full(CLASSES, 0.5))[LABELS[rows]]
    chosen = rng.choice(rows, count, p=frequent / frequent.sum())
    along, across = rng.uniform(-0.5, 0.5, (2, 1)) * np.linspace(-1, 1, 8)
    x = ndimage.gaussian_filter(IMAGES[chosen], (0, *rng.uniform(0, 0.9, 2)))
    x = rng.uniform(0.4, 1) * x + along[:, None] + across + rng.normal(0, 0.15, x.shape)
    quarters = x.reshape(count, 2, 4, 2, 4)
    style = np.concatenate([f(quarters, axis=(2, 4)).reshape(count, 4) for f in (np.mean, np.std)], axis=1)
    return Camera(CLASSIFIER.decision_function(x.reshape(count, -1)), style, LABELS[chosen])


def adapter() -> cxda_jax.Adapter:
    """Of 24 cameras. New ones have the numbers from 24 on, and images that no other part has seen."""
    if not KEPT.exists():
        logits, style, labels = map(np.concatenate, zip(*(photograph(i, FOR_FIT) for i in range(CAMERAS)), strict=True))
        domains = np.repeat(np.arange(CAMERAS), EACH)
        cxda_jax.fit(logits, labels, domains, style=style, steps=120, minutes=30).save(KEPT)
    return cxda_jax.load_adapter(KEPT)
