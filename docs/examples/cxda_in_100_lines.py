"""CXDA, the method of Feed-Forward Latent Domain Adaptation (Bohdal et al., WACV 2024), in jax, flax and optax.

A device has unlabelled images of several unknown domains: the support x_s. It adapts to them by forward passes alone.
This is how it classifies a query x_q, an image of one of these domains:

    z = f(x_q) + MCA(LN f(x_s); LN f(x_q)),    y = h(z)

f is a small convolutional network, whose batch normalisation takes mean and variance from the support. MCA is attention
of several heads, in which the query looks for support images that help it. h is the mean over the positions of the map
and two dense layers. All of them learn beforehand, from simulated tasks, each a support without labels and queries with
labels. The test has other domains.

    python docs/examples/cxda_in_100_lines.py           # some minutes on two CPU cores
    python docs/examples/cxda_in_100_lines.py 0 1 2     # with these seeds

Only the data come from the package: `glyphs`, characters as 340 made-up writers draw them. A domain is a writer.
"""

import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from cxda_jax.data.glyphs import open_glyphs

DOMAINS, SHOTS, QUERIES = 5, 20, 20  # of a task: domains in the support, images of each, queries of one of them
OPTIMIZER = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.03, momentum=0.9))  # in PyTorch's order
START = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")  # PyTorch's: U(-1, 1) / sqrt(fan_in)


class Trunk(nn.Module):
    """f, from images [n, 28, 28, 1] to maps [n, 4, 4, width].

    With `own_statistics` the images are normalised by their own mean and variance, which Flax stores in "batch_stats".
    Otherwise the stored ones count. Momentum 0 means that nothing older is mixed in.
    """

    width: int

    @nn.compact
    def __call__(self, x, own_statistics):
        for i, padding in enumerate((2, 0, 0)):
            x = nn.Conv(self.width, (5, 5), padding=padding, kernel_init=START, name=f"conv{i}")(x)
            x = nn.relu(nn.BatchNorm(not own_statistics, momentum=0, name=f"bn{i}")(x))
            x = nn.max_pool(x, (2, 2), (2, 2)) if i else x
        return x


class CrossAttention(nn.Module):
    """Queries [m, C] and support [n, C] to  x_q + softmax(q k^T / sqrt(C / heads)) v W  for each query.

    q = LN(x_q) W_q, k = LN(x_s) W_k and v = LN(x_s) W_v have C / 2 features, which the heads share out.
    """

    features: int
    heads: int

    def setup(self):
        dense = partial(nn.Dense, use_bias=False, kernel_init=START)
        self.norm = nn.LayerNorm(epsilon=1e-5)
        self.query, self.key, self.value = (dense(self.features // 2) for _ in range(3))
        self.out = dense(self.features)

    def remember(self, support):
        x = self.norm(support)
        return self.split(self.key(x)), self.split(self.value(x))

    def recall(self, query, keys, values):
        scores = jnp.einsum("mhd,nhd->mhn", self.split(self.query(self.norm(query))), keys)
        weights = nn.softmax(scores / np.sqrt(self.features / self.heads))
        return query + self.out(jnp.einsum("mhn,nhd->mhd", weights, values).reshape(len(query), -1))

    def split(self, x):
        return x.reshape(len(x), self.heads, -1)


class CXDA(nn.Module):
    """The whole network. A device calls adapt() once for its support, and then predict() for each query."""

    classes: int = 62
    width: int = 16
    heads: int = 8

    def setup(self):
        self.trunk, self.attention = Trunk(self.width), CrossAttention(4 * 4 * self.width, self.heads)
        self.hidden, self.logits = nn.Dense(200, kernel_init=START), nn.Dense(self.classes, kernel_init=START)

    def adapt(self, support):
        """Keys and values of the support, whose statistics are stored on the way."""
        maps = self.trunk(support, own_statistics=True)
        return self.attention.remember(maps.reshape(len(maps), -1))

    def predict(self, query, keys, values):
        """Logits of queries [m, classes]."""
        maps = self.trunk(query, own_statistics=False)  # normalised as the support was
        z = self.attention.recall(maps.reshape(len(maps), -1), keys, values)
        return self.logits(nn.relu(self.hidden(z.reshape(maps.shape).mean((1, 2)))))

    def __call__(self, support, query):
        return self.predict(query, *self.adapt(support))


class Task(NamedTuple):
    """Images [n, 28, 28, 1] of a support, and of queries with their labels."""

    support: np.ndarray
    query: np.ndarray
    label: np.ndarray


def sample(rng, store, split):
    """A random task: 5 domains of a split are the support's, and one of these is the queries'."""
    domains = rng.choice(store.domains(split), DOMAINS, replace=False)
    rows = [rng.choice(np.arange(*store.offsets[d : d + 2]), SHOTS + QUERIES, replace=False) for d in domains]
    support, query = np.concatenate([r[:SHOTS] for r in rows]), rows[rng.integers(DOMAINS)][SHOTS:]
    images = (1 - store.images[both] / np.float32(255) for both in (support, query))  # bright ink on black
    return Task(*images, store.labels[query])


@partial(jax.jit, static_argnames="net")
def answer(net, params, support, query):
    """Logits of queries. In training, gradients flow through the support's statistics, keys and values too."""
    return net.apply({"params": params}, support, query, mutable="batch_stats")[0]


@partial(jax.jit, static_argnames="net")
def start(net, seed, task):
    params = net.init(jax.random.key(seed), task.support, task.query)["params"]
    return params, OPTIMIZER.init(params)


@partial(jax.jit, static_argnames="net")
def train_step(net, params, state, tasks):
    """One step on the mean loss of several tasks, which are stacked along a new first axis."""

    def loss(params, task):
        logits = answer(net, params, task.support, task.query)
        return optax.softmax_cross_entropy_with_integer_labels(logits, task.label).mean()

    gradients = jax.grad(lambda params: jax.vmap(loss, (None, 0))(params, tasks).mean())(params)
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def evaluate(net, params, store, split, tasks):
    """The accuracy of each of the same random tasks, ascending."""
    drawn = (sample(rng, store, split) for rng in map(np.random.default_rng, range(tasks)))
    answers = ((np.asarray(answer(net, params, task.support, task.query)), task.label) for task in drawn)
    return np.sort([(logits.argmax(-1) == label).mean() for logits, label in answers])


def main(net, store, steps, seed=0, tasks_per_step=1, val_tasks=100, test_tasks=600):
    """Trains, keeps the weights that do best on validation domains, and returns their accuracies on test domains."""
    rng, best = np.random.default_rng(seed), (-1.0, None)
    params, state = start(net, seed, sample(rng, store, "train"))
    for step in range(1, steps + 1):
        tasks = [sample(rng, store, "train") for _ in range(tasks_per_step)]
        params, state = train_step(net, params, state, jax.tree.map(lambda *x: np.stack(x), *tasks))
        if step % (steps // 6) == 0:
            score = evaluate(net, params, store, "val", val_tasks).mean()
            best = max(best, (score, params), key=lambda pair: pair[0])
            print(f"step {step} of {steps}: {score:.1%} on validation domains", flush=True)
    scores = evaluate(net, best[1], store, "test", test_tasks)
    print(f"test: {scores.mean():.1%} on average, {scores[: test_tasks // 10].mean():.1%} in the worst tenth of tasks")
    return best[1], scores


if __name__ == "__main__":
    for seed in map(int, sys.argv[1:] or "0"):
        main(CXDA(), open_glyphs(Path.home() / ".cache/cxda_jax"), steps=2880, seed=seed)
