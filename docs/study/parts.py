"""What each part of fit(floor=0) gains on new domains, beside naive ways that read the same images.

python -m docs.study.parts FEATURES.npz OUT.json [seeds]
python -m docs.study.parts FEATURES.npz OUT.json [seeds] CLEAN.npz     of a head that saw the images of CLEAN.npz alone

FEATURES.npz holds features [n, d] of a pretrained network (its last layer's input), style [n, d'], labels [n], domain
[n] and split [n] (train, val or test). A head of two dense layers memorises 36/56 of the training domains, and fit()
has the others. Where the file holds logits, no head learns, and fit() has all training domains. CLEAN.npz holds
features and labels of other images. A linear head learns from these, and fit() gets 400 images of each of 20 training
domains.
"""

import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import jax
import jax.numpy as jnp
import numpy as np
import optax

import cxda_jax
from cxda_jax.adapter import judge
from cxda_jax.adapter.correction import correction_in
from cxda_jax.adapter.fit import as_fit_data
from cxda_jax.adapter.own_style import FOLDS, corrected_by, last_layers
from cxda_jax.data.episodes import Draw, EpisodeSpec, sample_plans
from cxda_jax.training.metrics import interval_over_groups

KINDS = [(domains, *shares) for domains in (1, 5) for shares in (
    ("dirichlet", 0.1), ("dirichlet", 0.3), ("dirichlet", 1.0), ("even", 1.0))]  # fmt: skip
SEEN = 36 / 56  # the part of the training domains that the head learns from
TASKS, DOMAINS, IMAGES = 200, 20, 400  # of a kind; for fit() beside a head of clean images, and of each of them
PLAIN, OURS, OWN, EMPTY = "no adaptation", "fit()", "own style", "fit(), no image"
REFIT, BOTH = "refit", "refit with style"
NAMES = {"em": "EM", "own_em": "own style, then EM", "unmix": "own style, then EM in clusters"}


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


def clean_head(x, labels, steps=400):
    """A linear function from features to logits, by gradient descent with a ridge."""
    mean, std = x.mean(0), x.std(0) + 1e-6
    images, targets = jnp.asarray((x - mean) / std), jnp.asarray(labels)
    params, optimizer = (jnp.zeros((x.shape[1], labels.max() + 1)), jnp.zeros(labels.max() + 1)), optax.lbfgs()

    def loss(p):
        z = images @ p[0] + p[1]
        ridge = 0.5e-2 * jnp.square(p[0]).sum()
        return optax.softmax_cross_entropy_with_integer_labels(z, targets).mean() + ridge

    state, both = optimizer.init(params), optax.value_and_grad_from_state(loss)
    for _ in range(steps // 4):
        value, slope = both(params, state=state)
        updates, state = optimizer.update(slope, state, params, value=value, grad=slope, value_fn=loss)
        params = optax.apply_updates(params, updates)
    weights, bias = map(np.asarray, params)
    return lambda x: ((x - mean) / std) @ weights + bias


def setting(data, seed, clean):
    """The logits of all images, the rows for fit(), and the test domains."""
    train, test = (np.unique(data["domain"][data["split"] == name]) for name in ("train", "test"))
    if "logits" in data:
        return data["logits"], np.flatnonzero(data["split"] == "train"), test
    order, rng = np.random.default_rng(seed).permutation(train), np.random.default_rng(100 + seed)
    if clean is not None:
        few = rng.permutation(np.flatnonzero(np.isin(data["domain"], order[:DOMAINS])))
        rank = np.zeros(len(few), int)
        for domain in order[:DOMAINS]:
            rank[data["domain"][few] == domain] = np.arange((data["domain"][few] == domain).sum())
        return clean_head(*clean)(data["features"]), np.sort(few[rank < IMAGES]), test
    of_head = np.isin(data["domain"], order[: round(SEEN * len(train))])
    classes = int(data["labels"].max()) + 1
    head = train_head(data["features"][of_head], data["labels"][of_head], classes, seed, 1024, 20)
    return head(data["features"]), np.flatnonzero(np.isin(data["domain"], train) & ~of_head), test


def fitted(data, z, rows, seed, floor=None):
    """An adapter of fit() that learns from some rows of the data, whose logits are z; the seconds that it took; and a
    function from a plan to the logits of its queries by row of the study."""
    labels, style, features, domain = (data[name] for name in ("labels", "style", "features", "domain"))
    began = time.time()
    given = z[rows], labels[rows], domain[rows], style[rows], features[rows]
    adapter = cxda_jax.fit(*given, minutes=60, seed=seed, floor=floor, log=lambda _: None)
    seconds = time.time() - began
    always = adapter.trusted()
    refitted = refit(given, z, features, seed)
    both = np.concatenate([features, style], 1)
    refitted_with_style = refit((*given[:4], both[rows]), z, both, seed)
    everything = as_fit_data(z, labels, domain, style, None, seed)
    own = corrected_by(everything, correction_in(adapter.variables))
    knows = {name: adapter.known[name] for name in ("scale", "bias", "shares")}
    knows_own = knows | {name: adapter.known[f"own_{name}"] for name in ("scale", "bias")}
    keys = judge.keys_of(own, adapter.variables)

    def answers(plan):
        adapted = [always.adapt(z[s], style[s]).predict_logits(z[q], style[q]) for s, q in zip(*plan, strict=True)]
        return {
            PLAIN: z[plan.query], REFIT: refitted[plan.query], BOTH: refitted_with_style[plan.query],
            OWN: own.logits[plan.query],
            NAMES["em"]: judge.by_rival(everything.logits, knows, plan),
            NAMES["own_em"]: judge.by_rival(own.logits, knows_own, plan),
            NAMES["unmix"]: judge.by_unmixing(own, keys, knows_own, plan), OURS: np.stack(adapted),
        }  # fmt: skip

    return adapter, seconds, refitted, answers


def refit(given, z, features, seed):
    """The logits of all images by a last layer that learnt from what fit() is given. Cross-validation by domains
    chooses its ridge."""
    learnt = as_fit_data(*given, seed)
    folds = np.random.default_rng(0).permutation(len(learnt.store.split)) % FOLDS
    _, layer = last_layers(learnt, [np.flatnonzero(folds == i) for i in range(FOLDS)], all_teach=True)
    return layer(z, features)


def named(number, shares, concentration):
    """A kind of tasks, in words."""
    asked = {"natural": "own shares", "dirichlet": f"dirichlet {concentration}", "weeds": "days of weeds"}
    asked = asked.get(shares, shares)
    return f"{number} domain{'s' * (number > 1)}, {asked}"


def one_seed(data, seed, clean=None):
    """Right answers of each task by kind and row, the domains that ask, and notes."""
    z, rows, test = setting(data, seed, clean)
    labels, style, domain = (data[name] for name in ("labels", "style", "domain"))
    adapter, seconds, refitted, answers = fitted(data, z, rows, seed, 0.0)
    always = adapter.trusted()
    names, owner = np.unique(domain, return_inverse=True)
    offsets, scores, asked = np.searchsorted(owner, np.arange(len(names) + 1)), {}, {}
    for number, shares, concentration in [(1, "natural", 1.0), (5, "natural", 1.0), *KINDS]:
        spec = EpisodeSpec(number, 100 // number, 20, shares=shares, concentration=concentration)
        asking = np.searchsorted(names, test)
        asking = asking[np.diff(offsets)[asking] >= spec.per_domain + spec.num_query]
        plan = sample_plans(Draw(spec, offsets, asking, seed, 2, labels), range(TASKS))
        kind = named(number, shares, concentration)
        scores[kind] = {name: (x.argmax(-1) == labels[plan.query]).mean(1) for name, x in answers(plan).items()}
        asked[kind] = owner[plan.query[:, 0]]
        print(kind, {name: round(100 * float(x.mean()), 1) for name, x in scores[kind].items()}, flush=True)
    new, empty = np.isin(domain, test), always.adapt(z[:0], style[:0])
    alone = [z[new], empty.predict_logits(z[new], style[new]), refitted[new]]
    told = {kind: row["100"] for kind, row in adapter.report["gain"].items()}
    notes = {
        "seed": seed, "seconds of fit()": round(seconds), "trusted": adapter.helps, "takes": adapter.report["takes"],
        "told": adapter.report["overall"]["100"], "expected": adapter.report["expected"], "told by kind": told,
        "all new images, %": dict(zip((PLAIN, EMPTY, REFIT), (100 * float((x.argmax(1) == labels[new]).mean())
                                                             for x in alone), strict=True)),
    }  # fmt: skip
    return scores, asked, notes


def summary(of_seeds):
    """By kind and row: mean, mean of the worst tenth of the tasks, and the gain with its interval over new domains."""
    table = {}
    for kind, rows in of_seeds[0][0].items():
        tasks = {name: np.concatenate([scores[kind][name] for scores, _, _ in of_seeds]) for name in rows}
        owner = np.concatenate([asked[kind] for _, asked, _ in of_seeds])
        table[kind] = {}
        for name, x in tasks.items():
            each = [100 * float((scores[kind][name] - scores[kind][PLAIN]).mean()) for scores, _, _ in of_seeds]
            _, low, high = 100 * interval_over_groups((x - tasks[PLAIN])[None], owner)[0]
            values = {"avg": 100 * x.mean(), "w10": 100 * np.sort(x)[: len(x) // 10].mean(), "gain": np.mean(each)}
            values |= {"low": low, "high": high}
            table[kind][name] = {key: round(float(value), 2) for key, value in values.items()}
            table[kind][name]["of each seed"] = [round(gain, 2) for gain in each]
    return table


def main():
    order = np.argsort((loaded := np.load(sys.argv[1]))["domain"], kind="stable")
    data = {name: loaded[name][order] for name in loaded.files if name != "names"}
    data["features"], clean = data["features"].astype(np.float32), None
    if len(sys.argv) > 4:
        of_clean = np.load(sys.argv[4])
        clean = of_clean["features"].astype(np.float32), of_clean["labels"]
    found = []
    for seed in range(int(sys.argv[3]) if len(sys.argv) > 3 else 3):
        with ProcessPoolExecutor(1, get_context("spawn")) as new:  # three seeds in one process ran out of memory
            found.append(new.submit(one_seed, data, seed, clean).result())
        with open(sys.argv[2], "w") as file:
            json.dump({"tasks": TASKS, "runs": [notes for *_, notes in found], "table": summary(found)}, file, indent=1)


if __name__ == "__main__":
    main()
