"""Adapting a classifier of PACS to the domain that it never saw, three seeds for each of the four domains.

python -m docs.study.pacs FEATURES.npz OUT.json [seeds [images]]

FEATURES.npz is of `cxda features`: features of a pretrained network (its last layer's input), style, labels and
domains. The classifier is a logistic regression on the features of three domains, and the fourth is the device.
fit() has logits of these three. Each of them is described by a classifier that the other two trained, so it is new to
that classifier. With `images` at the end, one half of the images trains the classifier and fit() has the other half;
then no domain is new.
"""

import json
import sys
import time

import numpy as np
from sklearn.linear_model import LogisticRegression

import cxda_jax
from cxda_jax.adapter.diagnosis import Diagnosis
from cxda_jax.adapter.fit import gains_on
from docs.study.devices import loaded

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")


def classifier(x, labels):
    """A function from features to logits."""
    mean, std = x.mean(0), x.std(0) + 1e-6
    head = LogisticRegression(C=1e-3, max_iter=300).fit((x - mean) / std, labels)
    return lambda x: head.decision_function((x - mean) / std).astype(np.float32)


def one_case(data, held_out, seed, by_domain):
    """What an adapter gains on a domain, with what a diagnosis of the images of fit() expects."""
    x, style, labels, domain = (data[name] for name in ("features", "style", "labels", "domain"))
    known, device = domain != held_out, domain == held_out
    first = known & (np.random.default_rng(seed).random(len(labels)) < 0.5)
    learnt, own = (known, known) if by_domain else (first, known & ~first)
    z = classifier(x[learnt], labels[learnt])(x)
    right, given = float((z[learnt].argmax(1) == labels[learnt]).mean()), z.copy()
    for d in np.unique(domain[own]) if by_domain else ():
        others = known & (domain != d)
        given[domain == d] = classifier(x[others], labels[others])(x[domain == d])
    began = time.time()
    adapter = cxda_jax.fit(given[own], labels[own], domain[own], style[own], minutes=60, seed=seed)
    seconds = time.time() - began
    found = gains_on(adapter, z[device], labels[device], domain[device], style[device])
    own_shares = np.bincount(labels[device]) / device.sum()
    known_shares = z[device] + np.log(own_shares / (np.bincount(labels[learnt]) / learnt.sum()))
    told = Diagnosis(adapter.report["headroom"], 0.0)
    expected = {kind: told.expected(kind) for kind in told.table}
    return {
        "domain": DOMAINS[held_out], "seed": seed, "seconds of fit()": round(seconds), "right of its own": right,
        "helps": adapter.helps, "validation": adapter.report["overall"], "expected": expected,
        "effective classes": float(np.exp(-(own_shares * np.log(own_shares)).sum())),
        "right with true shares*": float((known_shares.argmax(1) == labels[device]).mean()), **found,
    }  # fmt: skip


def main():
    data, cases = loaded(sys.argv[1]), []
    for seed in range(int(sys.argv[3]) if len(sys.argv) > 3 else 3):
        for held_out in range(len(DOMAINS)):
            cases.append(one_case(data, held_out, seed, sys.argv[4:] != ["images"]))
            print(DOMAINS[held_out], seed, cases[-1]["overall"], cases[-1]["gain"], flush=True)
            with open(sys.argv[2], "w") as file:
                json.dump({"cases": cases}, file, indent=1)


if __name__ == "__main__":
    main()
