"""Whether fit() keeps its word: intervals, trust, the gain to expect and thresholds, against what new domains get.

python -m docs.study.promises OUT.json [draws] [seeds]    # 2000 draws of each case, 6 seeds of each world

The first two parts draw the domains' gains and errors, and use what fit() uses to tell of them. The third part runs
fit() in made-up worlds and compares its report with forty new domains of the same world.
"""

import json
import sys
import time

import numpy as np

import cxda_jax
from cxda_jax.adapter.fit import STEPS, gains_on
from cxda_jax.training import metrics

DOMAINS, SPREADS, GAINS = (3, 5, 10, 20, 40), (0.0, 3.0, 6.0), (0.0, 1.0, 5.0)
LEVELS = np.arange(1, 101) / 100


def intervals(draws, seed=0, tasks=60, noise=10.0):
    """Of each number of domains and spread of their gains, in points: what holds, over all gains.

    A task's gain has the deviation `noise`. Coverage and false trust are nominally 95 % and 2.5 %.
    """
    rng, rows = np.random.default_rng(seed), []
    for count in DOMAINS:
        for spread in SPREADS:
            row = {"domains": count, "spread": spread}
            optimism, raw = [], []
            for gain in GAINS:
                of_domains = gain + spread * rng.normal(size=(draws, count, 1))
                values = (of_domains + noise * rng.normal(size=(draws, count, tasks))).reshape(draws, -1)
                spans = metrics.interval_over_groups(values, np.repeat(np.arange(count), tasks))
                trusted = spans[spans[:, 1] > 0]
                row[f"coverage at {gain:g}"] = float(((spans[:, 1] <= gain) & (gain <= spans[:, 2])).mean())
                row[f"trusted at {gain:g}"] = len(trusted) / draws
                optimism += [metrics.after_selection(span, count) - gain for span in trusted.tolist()]
                raw += list(trusted[:, 0] - gain)
            rows.append({**row, "optimism": float(np.mean(optimism)), "optimism of the means": float(np.mean(raw))})
    return rows


def thresholds(draws, seed=0, images=300, risk=0.05):
    """Of each number of domains, for a classifier and for a weak one: how often the risk passes the promise."""
    rng, rows = np.random.default_rng(seed), []

    def answers(count, images, sure, spread):
        surety = rng.normal(sure, 1.8, (count, images))
        shift = rng.normal(0, spread, (count, 1))
        return 1 / (1 + np.exp(-np.abs(surety))), rng.random(surety.shape) < 1 / (1 + np.exp(-np.abs(surety) - shift))

    for sure, spread in ((1.5, 0.0), (1.5, 0.5), (1.5, 1.0), (0.3, 0.5)):
        confidence, right = answers(2000, 200, sure, spread)
        for count in DOMAINS:
            risks, given = [], []
            for _ in range(draws):
                own, ok = answers(count, images, sure, spread)
                found = np.quantile(own, 1 - LEVELS)
                inside = own[:, :, None] >= found
                level = metrics.surest_within(risk, inside.sum(1), (inside & ~ok[:, :, None]).sum(1))
                taken = confidence >= found[level - 1] if level else np.zeros_like(right)
                risks.append(float((taken & ~right).sum() / max(1, taken.sum())))
                given.append(float(taken.mean()))
            answered = np.array(given) > 0
            rows.append({
                "sure": sure, "spread": spread, "domains": count, "passed": float(np.mean(np.array(risks) > risk)),
                "answered": float(answered.mean()),
                "mean risk": float(np.mean(np.array(risks)[answered])) if answered.any() else None,
                "part of the images": float(np.mean(given)),
            })  # fmt: skip
    return rows


# Classes, domains, images of each, concentration of the shares, surety, bias by style, bias that no style tells, noise.
WORLDS = {
    "like Arabic letters": (28, 25, 280, None, 4.0, 0.3, 0.2, 1.3),
    "like PACS": (7, 3, 400, 5.0, 3.0, 0.5, 0.5, 1.3),
    "skewed": (10, 20, 400, 0.3, 3.0, 0.0, 0.0, 1.5),
    "skewed, ten domains": (10, 10, 400, 0.3, 3.0, 0.3, 0.0, 1.5),
    "even": (10, 20, 400, None, 3.0, 0.0, 0.0, 1.5),
    "hard": (10, 10, 300, 1.0, 2.0, 0.2, 0.8, 1.8),
}


def world(name, seed, first=0, domains=None):
    """Logits, labels, domains and style of a world; other domains with another `first`."""
    classes, count, each, concentration, sure, told, untold, noise = WORLDS[name]
    fixed = np.random.default_rng([seed, 1])
    to_style, to_logits = fixed.normal(size=(6, 24)), told * fixed.normal(size=(6, classes))
    rng = np.random.default_rng([seed, 2, first])
    parts = []
    for domain in range(first, first + (domains or count)):
        p = None if concentration is None else rng.dirichlet(np.full(classes, concentration))
        labels = rng.choice(classes, each, p=p)
        v, other = rng.normal(size=6), untold * rng.normal(size=classes)
        logits = sure * np.eye(classes)[labels] + noise * rng.normal(size=(each, classes)) + v @ to_logits + other
        parts.append((logits, labels, np.full(each, domain), v @ to_style + 2 * rng.normal(size=(each, 24))))
    return [np.concatenate(part) for part in zip(*parts, strict=True)]


def fits(name, seed, steps=STEPS, floor=0.0):
    """What fit() says of a world, and what forty new domains get."""
    logits, labels, domain, style = world(name, seed)
    began = time.time()
    given = {"minutes": 10, "steps": steps, "seed": seed, "floor": floor, "log": lambda _: None}
    adapter = cxda_jax.fit(logits, labels, domain, style=style, **given)
    seconds = time.time() - began
    arrays = world(name, seed, first=1000, domains=40)
    found = gains_on(adapter, *arrays)
    row = {"world": name, "seed": seed, "trusted": adapter.helps, "told": adapter.report["overall"]["100"]}
    for rival in ("0", "em", "own_em", "unmix"):
        row[rival] = adapter.report["overall"][rival]
    risks = {str(risk): risk_of(adapter, risk, arrays) for risk in (0.05, 0.2)}
    return row | {
        "floor": adapter.report["floor"],
        "rare": adapter.report["rare"],
        "expected": adapter.report["expected"],
        "found": found["overall"]["100"],
        "seconds": round(seconds),
        "right": found["right"],
        "thresholds": risks,
    }


def risk_of(adapter, risk, arrays):
    """The part of the new images that is answered at a threshold, and of these the part that is wrong."""
    logits, labels, domain, style = arrays
    confidence, right = [], []
    for d in np.unique(domain):
        of = np.flatnonzero(domain == d)
        device = adapter.adapt(logits[of[:100]], style[of[:100]])
        proba = device.predict_proba(logits[of[100:]], style[of[100:]])
        confidence.append(proba.max(1))
        right.append(proba.argmax(1) == labels[of[100:]])
    given, right = np.concatenate(confidence) >= adapter.threshold_for(risk), np.concatenate(right)
    return [float(given.mean()), float((given & ~right).sum() / max(1, given.sum()))]


def main():
    out = sys.argv[1]
    draws, seeds = (int(sys.argv[i]) if len(sys.argv) > i else usual for i, usual in ((2, 2000), (3, 6)))
    record = {"draws": draws, "intervals": intervals(draws), "thresholds": thresholds(min(draws, 200)), "fits": []}
    for row in record["intervals"]:
        print({name: round(x, 3) for name, x in row.items()}, flush=True)
    for row in record["thresholds"]:
        print(row, flush=True)
    for name in WORLDS:
        for seed in range(seeds):
            record["fits"].append(fits(name, seed))
            print(record["fits"][-1], flush=True)
            with open(out, "w") as file:
                json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
