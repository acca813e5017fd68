"""A head for an encoder without logits: a last layer that learns from a part of the domains. fit() has the others."""

from collections.abc import Callable

import numpy as np

from cxda_jax.adapter.adapter import Head, as_numbers
from cxda_jax.adapter.features import Labelled
from cxda_jax.adapter.fit import FEWEST, domains_of
from cxda_jax.errors import UserError, brief, needing
from cxda_jax.methods.cxda_shares import SMALLEST

STEPS = 1000  # of L-BFGS, at most


def learn_head(found: Labelled, part: float, seed: int, log: Callable[[str], None]) -> tuple[Labelled, Head]:
    """The images of the domains that taught the head nothing, with its logits; and the head.

    Args:
      found: images with features.
      part: of the domains that teach the head, or their number from 1 on.
      seed: chooses these domains.
      log: takes a line on how often the head is right.
    """
    names, numbers = domains_of("domains", found.domains)
    count = round(part * len(names)) if part < 1 else int(part)
    if not 1 <= count <= len(names) - FEWEST or part > 1 and part != count:
        fix = f"give a part or a number from 1 to {len(names) - FEWEST}" if len(names) > FEWEST else "give more domains"
        raise UserError(
            f"{len(names)} domains; one must teach the head, and fit() needs {FEWEST} others", "head", part, fix
        )
    chosen = np.sort(np.random.default_rng(seed).permutation(len(names))[:count])
    own, labels = np.isin(numbers, chosen), found.labels
    classes = len(found.origin.get("classes", ())) or int(labels.max()) + 1
    if wrong := labels[(labels < 0) | (labels >= classes)].tolist():
        raise UserError(f"labels: {wrong[0]} is none of the {classes} classes; count classes from 0")
    if classes < 2:
        raise UserError("labels: all are 0; give images of two classes at least")
    if lacking := sorted({*range(classes)} - {*labels[own].tolist()}):
        name = brief(str(found.origin.get("classes", range(classes))[lacking[0]]), 40)
        raise UserError(f"class {name} is in none of its {count} domains", "head", part, "give more, or another --seed")
    features = as_numbers("features", found.features)
    head = _regression(features[own], labels[own])
    logits = head(features)
    right = logits.argmax(1) == labels
    taught = brief(", ".join(map(str, names[chosen])), 60)
    log(
        f"head: learnt from {count} of {len(names)} domains ({taught}), on whose {own.sum()} images it is right on "
        f"{right[own].mean():.1%}; on {right[~own].mean():.1%} of {(~own).sum()} images of the others, for fit()"
    )
    origin = found.origin and {**found.origin, "head": [str(name) for name in names[chosen]]}
    others = (logits[~own], labels[~own], found.domains[~own], found.style[~own], features[~own])
    return Labelled(*others, origin), head


def _regression(features: np.ndarray, labels: np.ndarray) -> Head:
    """Logistic regression on standardised features, as a function of the features themselves."""
    with needing("features without logits", "sklearn"):
        from sklearn.linear_model import LogisticRegression
    mean, std = features.mean(0), features.std(0) + SMALLEST
    found = LogisticRegression(max_iter=STEPS).fit((features - mean) / std, labels)
    weights, bias = found.coef_, found.intercept_
    if len(weights) == 1:  # of the second of two classes
        weights, bias = np.concatenate([-weights, weights]) / 2, np.concatenate([-bias, bias]) / 2
    weights = weights / std
    return Head(weights.T.astype(np.float32), (bias - weights @ mean).astype(np.float32))
