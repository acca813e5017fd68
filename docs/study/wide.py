"""Adapting a wide, frozen network: what fit() gains beside what needs no training, on tasks of new domains.

python -m docs.study.wide FEATURES.npz OUT.json [seeds]
python -m docs.study.wide FEATURES.npz OUT.json heads     the gain on heads of other widths, which know less by heart
python -m docs.study.wide OUT.json FIGURE.png             a figure of these

FEATURES.npz holds features [n, d] of a pretrained network (its last layer's input), style [n, d'], labels [n], domain
[n] and split [n] (train, val or test). The head, two dense layers on the features, is trained on 36/56 of the training
domains until it knows their images by heart, or of few domains on 36/56 of their images; fit() has the others.
docs/results.md says how the features were made.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import cxda_jax
from cxda_jax.adapter.diagnosis import diagnose
from cxda_jax.data.episodes import FEW, Draw, EpisodeSpec, sample_plans
from cxda_jax.data.store import DomainStore, StoreInfo
from cxda_jax.methods.label_shift import fit_temperature, shares_by_confusions, shares_by_em, undoing
from cxda_jax.methods.training_free import FLOOR, regularise, unit

KINDS = [(domains, *shares) for domains in (1, 5) for shares in (
    ("dirichlet", 0.1), ("dirichlet", 0.3), ("dirichlet", 1.0), ("even", 1.0))]  # fmt: skip
HEADS = [(16, 20), (64, 20), (256, 20), (1024, 1), (1024, 3), (1024, 20)]  # hidden features and epochs
TRAINED = "no adapter; the head learns from its domains too"
PLAIN, OURS = "no adaptation", ("cxda_shares", "cxda_shares, images known by heart")
TASKS, SEEN = 400, 36 / 56  # test tasks of a kind; the part of the training domains that the head learns from


def train_head(x, labels, classes, seed, hidden, epochs, batch=500):
    """A function from features to logits. With 1,024 hidden features and 20 epochs it has learnt these by heart."""
    mean, std, rng = x.mean(0), x.std(0) + 1e-6, np.random.default_rng(seed)
    one, two = jax.random.split(jax.random.key(seed))
    first = jax.random.normal(one, (x.shape[1], hidden)) * np.sqrt(2 / x.shape[1])
    params = [first, jnp.zeros(hidden), jax.random.normal(two, (hidden, classes)) / np.sqrt(hidden), jnp.zeros(classes)]
    steps, data, targets = len(x) // batch, jnp.asarray((x - mean) / std), jnp.asarray(labels)
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-3, steps * epochs))

    def logits_of(p, x):
        return jax.nn.relu(x @ p[0] + p[1]) @ p[2] + p[3]

    def loss(p, rows):
        return optax.softmax_cross_entropy_with_integer_labels(logits_of(p, data[rows]), targets[rows]).mean()

    def step(carried, rows):
        updates, state = optimizer.update(jax.grad(loss)(carried[0], rows), carried[1])
        return (optax.apply_updates(carried[0], updates), state), None

    epoch, state = jax.jit(lambda carried, order: jax.lax.scan(step, carried, order)[0]), optimizer.init(params)
    for _ in range(epochs):
        params, state = epoch((params, state), rng.permutation(len(x))[: steps * batch].reshape(steps, batch))
    return lambda x: np.asarray(logits_of(params, (x - mean) / std))


def answers(z, features, plan, owner, labels, calibration):
    """Logits of the queries [tasks, queries, classes], by the names of what needs no training. A star marks what no
    device can know."""
    scale, bias, of_classes, trained = calibration
    calm = z * scale + bias
    own = (owner[plan.support] == owner[plan.query[:, :1]]).astype(np.float32)
    whole = np.ones_like(own)
    by_em = jax.jit(jax.vmap(lambda p, w: shares_by_em(p, trained, 50, 10.0, w)))

    def moved(logits, weights):
        shares = np.asarray(by_em(jax.nn.softmax(logits[plan.support]), weights))
        return logits[plan.query] + np.log(shares / trained)[:, None]

    p = np.asarray(jax.nn.softmax(z))
    undone = np.asarray(
        jax.jit(jax.vmap(shares_by_confusions, (0, None)))(p[plan.support].mean(1), undoing(of_classes))
    )
    blackbox = (100 * undone + 10 * trained) / 110
    counted = np.stack(
        [np.bincount(labels[s][o > 0], minlength=len(trained)) for s, o in zip(plan.support, own, strict=True)]
    )
    counted = (counted + 3 * trained * 1.0) / (counted.sum(1, keepdims=True) + 3)

    vectors, probabilities = jnp.asarray(features), jnp.asarray(p)

    def lame(support, query):
        rows = jnp.concatenate([support, query[None]])
        return regularise(unit(vectors[rows]), jnp.log(probabilities[rows] + FLOOR), "knn", 5, 20)[-1]

    lames = jax.jit(jax.vmap(lame, (None, 0)))
    return {
        PLAIN: z[plan.query],
        "prior_shift": moved(z, whole),
        "mlls": moved(calm, whole),
        "bbse": z[plan.query] + np.log(blackbox / trained)[:, None],
        "lame": np.stack([np.asarray(lames(s, q)) for s, q in zip(*plan, strict=True)]),
        "mlls, domains known*": moved(calm, own),
        "labels of the own domain's buffer*": calm[plan.query] + np.log(counted / trained)[:, None],
    }


def foretold(z, labels, domain):
    """What a diagnosis expects an adapter to gain, by kind of task, from images that the head has not learnt."""
    order = np.argsort(domain, kind="stable")
    names, starts = np.unique(domain[order], return_index=True)
    info = StoreInfo("features", tuple(map(str, range(z.shape[1]))), (0.0,), (1.0,))
    offsets, pixels = np.append(starts, len(order)), np.zeros((len(order), 1, 1, 1), np.uint8)
    store = DomainStore(info, pixels, labels[order], offsets, ("val",) * len(names), tuple(map(str, names)), "")
    found = diagnose(store, z[order], 1.0)
    return {kind: round(found.expected(kind), 2) for kind in found.table}


def one_seed(data, seed, hidden=1024, epochs=20, kinds=KINDS, others=True):
    """Scores of each task, by kind and row; with `others`, of what needs no training too."""
    domains, split = np.unique(data["domain"]), {}
    for name in ("train", "test"):
        split[name] = np.unique(data["domain"][data["split"] == name])
    rng, training = np.random.default_rng(seed), np.isin(data["domain"], split["train"])
    if len(split["train"]) < FEW:
        of_head = training & (rng.random(len(training)) < SEEN)
    else:
        of_head = np.isin(data["domain"], rng.permutation(split["train"])[: round(SEEN * len(split["train"]))])
    of_fit = training & ~of_head
    labels, classes = data["labels"], int(data["labels"].max()) + 1

    def answered(learnt):
        head = train_head(data["features"][learnt], labels[learnt], classes, seed, hidden, epochs)
        return head(data["features"])

    z, of_all = answered(of_head), answered(training) if others else None
    right = {name: float((z[rows].argmax(1) == labels[rows]).mean()) for name, rows in
             (("images of the head", of_head), ("images of fit()", of_fit))}  # fmt: skip
    began = time.time()
    told = {}
    for name, rows in zip(OURS, (of_fit, of_head), strict=True):
        given = z[rows], labels[rows], data["domain"][rows], data["style"][rows]
        told[name] = cxda_jax.fit(*given, minutes=60, seed=seed)
    minutes = (time.time() - began) / 60
    p = np.asarray(jax.nn.softmax(z))
    of_classes = np.stack([p[of_fit & (labels == k)].mean(0) for k in range(classes)])
    trained = np.bincount(labels[of_head], minlength=classes) / of_head.sum()
    calibration = (*map(np.asarray, jax.jit(fit_temperature)(z[of_fit], labels[of_fit])), of_classes, trained)
    owner = np.searchsorted(domains, data["domain"])
    offsets, scores = np.searchsorted(owner, np.arange(len(domains) + 1)), {}
    for number, shares, concentration in (kind for kind in kinds if kind[0] <= len(split["test"])):
        spec = EpisodeSpec(number, 100 // number, 20, shares=shares, concentration=concentration)
        plan = sample_plans(Draw(spec, offsets, np.searchsorted(domains, split["test"]), 0, 2, labels), range(TASKS))
        found = answers(z, data["features"], plan, owner, labels, calibration) if others else {PLAIN: z[plan.query]}
        if of_all is not None:
            found[TRAINED] = of_all[plan.query]
        for name, adapter in told.items():
            found[name] = np.stack([
                adapter.adapt(z[s], data["style"][s]).predict_logits(z[q], data["style"][q])
                for s, q in zip(*plan, strict=True)
            ])  # fmt: skip
        kind = f"{number} domain{'s' * (number > 1)}, {shares}" + f" {concentration}" * (shares == "dirichlet")
        scores[kind] = {name: (x.argmax(-1) == labels[plan.query]).mean(1) for name, x in found.items()}
        print(kind, {name: round(100 * float(x.mean()), 1) for name, x in scores[kind].items()}, flush=True)
    expected = foretold(z[of_fit], labels[of_fit], data["domain"][of_fit])
    return scores, {"seed": seed, "right": right, "minutes of two fits": round(minutes, 1), "foretold": expected}


def summary(of_seeds):
    """By kind and row: mean, mean of the worst decile, and the paired difference to no adaptation with its interval."""
    table, rng = {}, np.random.default_rng(0)
    for kind, rows in of_seeds[0].items():
        table[kind] = {}
        for name in rows:
            x, plain = (np.mean([scores[kind][n] for scores in of_seeds], axis=0) for n in (name, PLAIN))
            drawn = rng.integers(len(x), size=(2000, len(x)))
            low, high = np.percentile((x - plain)[drawn].mean(1), [2.5, 97.5])
            worst = np.mean([np.sort(scores[kind][name])[: len(x) // 10].mean() for scores in of_seeds])
            values = {"avg": x.mean(), "w10": worst, "gain": (x - plain).mean(), "low": low, "high": high}
            table[kind][name] = {key: round(100 * float(value), 2) for key, value in values.items()}
    return table


def of_heads(data):
    """The gains on heads of other widths and epochs, one seed each."""
    found = []
    for hidden, epochs in HEADS:
        scores, notes = one_seed(data, 0, hidden, epochs, [k for k in KINDS if k[1:] == ("dirichlet", 0.3)], False)
        found.append({"hidden": hidden, "epochs": epochs, **notes, "table": summary([scores])})
    return {"tasks": TASKS, "heads": found}


def draw(found, path):
    """Gains against the head's width, and against the share of its training images that it knows by heart."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    by_heart = {id(head): 100 * head["right"]["images of the head"] for head in found["heads"]}
    for axis, place in zip(axes, (lambda head: head["hidden"], lambda head: by_heart[id(head)]), strict=True):
        shown = sorted((h for h in found["heads"] if axis is axes[1] or h["epochs"] == 20), key=place)
        for kind, color in zip(shown[0]["table"], ("#D55E00", "#0072B2"), strict=True):
            for name, line, said in zip(OURS, ("-o", "--s"), ("held-out images", "its training images"), strict=True):
                points = [head["table"][kind][name] for head in shown]
                ends = np.array([[p["gain"] - p["low"], p["high"] - p["gain"]] for p in points]).T
                label = f"{kind.split(',')[0]}, adapter on {said}"
                places = [place(head) for head in shown]
                axis.errorbar(places, [p["gain"] for p in points], ends, fmt=line, color=color, label=label, capsize=2)
        axis.axhline(0, color="black", lw=0.6)
    axes[0].set(xscale="log", xlabel="hidden features of the head, 20 epochs", ylabel="gain of 100 images, points")
    axes[1].set(xlabel="training images on which the head is right, %")
    axes[1].legend(fontsize=7, frameon=False, loc=(0.01, 0.08))
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main():
    if sys.argv[2].endswith(".png"):
        with open(sys.argv[1]) as file:
            return draw(json.load(file), sys.argv[2])
    order = np.argsort((loaded := np.load(sys.argv[1]))["domain"], kind="stable")
    data = {name: loaded[name][order] for name in ("features", "style", "labels", "domain", "split")}
    data["features"] = data["features"].astype(np.float32)
    if sys.argv[3:] == ["heads"]:
        with open(sys.argv[2], "w") as file:
            return json.dump(of_heads(data), file, indent=1)
    found = []
    for seed in range(int(sys.argv[3]) if len(sys.argv) > 3 else 3):
        found.append(one_seed(data, seed))
        runs, scores = [notes for _, notes in found], [scores for scores, _ in found]
        with open(sys.argv[2], "w") as file:
            json.dump({"runs": runs, "tasks": TASKS, "table": summary(scores)}, file, indent=1)


if __name__ == "__main__":
    main()
