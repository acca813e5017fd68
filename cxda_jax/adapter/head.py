"""A head for an encoder without logits: a last layer that learns from a part of the domains. fit() has the others."""

from collections.abc import Callable

import numpy as np

from cxda_jax.adapter.adapter import Head, as_numbers
from cxda_jax.adapter.features import Labelled
from cxda_jax.adapter.fit import FEWEST, as_fit_data, domains_of
from cxda_jax.adapter.own_style import FOLDS, last_layers
from cxda_jax.errors import UserError, brief


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
    head = _last_layer(features[own], labels[own], numbers[own], classes, seed)
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


def _last_layer(features: np.ndarray, labels: np.ndarray, domains: np.ndarray, classes: int, seed: int) -> Head:
    """A linear function of the features, with the ridge that is best for domains from which it did not learn.

    Where there is one domain, random parts of it stand in for domains.
    """
    shuffled, parts = np.random.default_rng(seed).permutation, np.unique(domains, return_inverse=True)[1]
    if not parts.any():
        parts = shuffled(len(labels)) % FOLDS
    fold = shuffled(parts.max() + 1) % FOLDS
    judged = as_fit_data(np.zeros((len(labels), classes)), labels, parts, None, features, seed)
    _, found = last_layers(judged, [np.flatnonzero(fold == i) for i in np.unique(fold)], all_teach=True)
    weights = found.weights / found.std[:, None]
    return Head(weights.astype(np.float32), (found.bias - found.mean @ weights).astype(np.float32))
