"""What fit() finds in made-up arrays: few domains with skewed shares, and a thousand classes.

python -m docs.study.made_up OUT.json [seeds]     # gains of twenty domains with skewed shares, three seeds
python -m docs.study.made_up thousand             # seconds and memory of 50,000 images of 1,000 classes

A classifier gives 3 onehot(label) + noise + bias v B. The style of an image is v A + 2 noise. Each domain has v, six
numbers, and shares of Dirichlet 0.3.
"""

import json
import resource
import sys
import time

import numpy as np

import cxda_jax
from cxda_jax.adapter.fit import gains_on

KINDS = ((0.0, 1.55), (0.5, 1.1))  # bias and noise of a classifier that errs alike everywhere, and of one that does not


def few(seed, bias, noise, first=0, domains=20, each=400, classes=10):
    """Logits, labels, domains and style; other domains of the same world with another `first`."""
    world = np.random.default_rng(1000 * seed)
    to_style, to_logits = world.normal(size=(6, 24)), world.normal(size=(6, classes)) * bias
    rng = np.random.default_rng([seed, 7, first])
    parts = []
    for domain in range(first, first + domains):
        labels = rng.choice(classes, each, p=rng.dirichlet(np.full(classes, 0.3)))
        v = rng.normal(size=6)
        logits = 3.0 * np.eye(classes)[labels] + noise * rng.normal(size=(each, classes)) + v @ to_logits
        parts.append((logits, labels, np.full(each, domain), v @ to_style + 2 * rng.normal(size=(each, 24))))
    return [np.concatenate(part) for part in zip(*parts, strict=True)]


def many(classes=1000, images=50_000, domains=50):
    """The same for many classes; the style says the domain alone."""
    rng, each = np.random.default_rng(0), images // domains
    domain = np.repeat(np.arange(domains), each)
    labels = np.concatenate([rng.choice(classes, each, p=p) for p in rng.dirichlet(np.full(classes, 0.3), domains)])
    logits = rng.normal(size=(images, classes)).astype(np.float32)
    logits[np.arange(images), labels] += 3.4
    style = rng.normal(size=(domains, 24))[domain] + 2 * rng.normal(size=(images, 24))
    return logits, labels, domain, style.astype(np.float32)


def fitted(arrays, minutes=2.0):
    """The adapter, with what it took and how often the classifier is right."""
    logits, labels, domain, style = arrays
    began = time.time()
    adapter = cxda_jax.fit(logits, labels, domain, style=style, minutes=minutes, log=lambda _: None)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    right = float((logits.argmax(1) == labels).mean())
    return adapter, {"right": right, "seconds of fit()": round(time.time() - began), "GB": round(memory, 2)}


def main():
    if sys.argv[1] == "thousand":
        print(json.dumps(fitted(many())[1]))
        return
    runs = []
    for seed in range(int(sys.argv[2]) if len(sys.argv) > 2 else 3):
        for bias, noise in KINDS:
            adapter, row = fitted(few(seed, bias, noise), minutes=10.0)
            logits, labels, domain, style = few(seed, bias, noise, first=100, domains=40)
            found = gains_on(adapter, logits, labels, domain, style=style)
            row |= {"seed": seed, "bias": bias, "helps": adapter.helps, "validation": adapter.report["gain"]}
            runs.append({**row, "gain": found["gain"], "headroom": found["headroom"]})
            print(seed, bias, row["seconds of fit()"], {k: v["100"] for k, v in found["gain"].items()}, flush=True)
            with open(sys.argv[1], "w") as file:
                json.dump({"runs": runs}, file, indent=1)


if __name__ == "__main__":
    main()
