"""The adapter of cxda_shares: attention from a query to a buffer, whose values are class posteriors.

z are the logits of an image and s its style: means and deviations of its early maps. k = W s are the keys. Image j of
the buffer counts for the query q like

    a_j = sigmoid(b - |k_q - k_j|^2)        images; N is the sum of all a_j

The buffer's mean key, weighted by a, says how the network errs on such images. It moves the logits of buffer and query:

    u = z / T + N / (N + n) (U mean(k) + c)

EM finds the shares q of the classes on the device. It begins with t, the shares in training, which count like m images:

    r_j(k) = softmax(u_j)(k) q(k) / t(k), divided by its sum over k;  q <- (sum of a_j r_j + m t) / (N + m)

The query's answer is u_q + g (log q - log t). Learned are W, b, T, U, c, n, m and g. Without images it is z_q itself.

Where cxda_jax.fit found that it pays, z are logits that were corrected by the image's own style, a z + b + s V. Then
the buffer shows which part of the styles its domain has in all images, whatever their classes, and what it moves is
taken from the logits of buffer and query after half of EM's steps, rounded up. The other steps go on from there. With
the last r of the steps before:

    (sum of a_j s_j W - sum of a_j r_j C) / (N + l)

C is what the classes explain of s W, and l is learned; adapter/correction.py finds the rest.

An adapter that weighs evidence has a g of each query, from a small network of what the buffer looks like: a classifier
that errs on a new domain looks like a device with few classes, and the evidence tells the two apart, see evidence().

A floor f bounds what a buffer can do, and protects rare classes. The answer's odds are those of z_q / T times a factor
for each class. None of these is less than f times the largest, so an answer that is 1 / f times as likely stays.

U and c learn from another answer, u_q + log q - log t, where q are the shares of the buffer's labels. Otherwise they
would learn which classes each training domain has, and a device has others. The own correction is learnt before.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

NEAR, LARGEST = 0.2, 5.0  # deviation of keys at the start, so that all images count; and of style, which is clipped
FLOOR, HUGE = 1e-12, 1e30
SMALLEST = 1e-6  # of what divides, or whose logarithm is taken, where gradients pass
FARTHEST = (
    20.0  # of the logits that a query adds to the buffer's, those further below the largest count as so far below
)
EVIDENCE, HIDDEN = 6, 16  # numbers that tell how far to believe the buffer, and units of the network that reads them
_product = functools.partial(jnp.einsum, precision="highest")  # else accelerators round what is summed
OWN = "own"  # among the adapter's batch_stats: the correction by the own style; nothing is corrected where it is absent
LOG_FLOOR = "log_floor"  # likewise log f; all factors are allowed where it is absent


class Keyed(NamedTuple):
    """Images as the adapter knows them.

    Attributes:
      logits: of the trained network, [n, classes], after the correction by the own style if there is one.
      keys: [n, rank].
      moves: s W above, [n, classes]; None where nothing is corrected.
    """

    logits: jax.Array
    keys: jax.Array
    moves: jax.Array | None = None


class Posteriors(NamedTuple):
    """softmax(z_j + u_q) of each image j of the buffer for each query q, as the quotient

        e_j(k) m_q(k) / d_qj        e = exp(z), m = exp(u), d = m e^T

    All that is needed of it are products of matrices, so no array [queries, n, classes] is made. A training step of
    16 tasks takes 13 ms in place of 43 with 62 classes, and 7 in place of 10 with ten (two cores of an Intel Xeon).

    Attributes:
      images: e, [n, classes].
      queries: m, [queries, classes].
      whole: d, [queries, n].
    """

    images: jax.Array
    queries: jax.Array
    whole: jax.Array

    @classmethod
    def of(cls, logits: jax.Array, moved: jax.Array) -> "Posteriors":
        """Of z [n, classes] and u [queries, classes]."""
        # Clipped, so that compilers do not fuse the product before with the difference, whose largest is then not 0.
        z, u = (jnp.clip(x, -HUGE, HUGE) for x in (logits, moved))
        z, u = (x - jax.lax.stop_gradient(x.max(-1, keepdims=True)) for x in (z, u))
        e, m = jnp.exp(z), jnp.exp(jnp.maximum(u, -FARTHEST))  # so d is no less than exp(-FARTHEST)
        return cls(e, m, _product("qc,nc->qn", m, e))

    def times(self, factors: jax.Array) -> jax.Array:
        """The sum of the posteriors times factors [queries, classes] over the classes, [queries, n]."""
        return _product("qc,nc->qn", self.queries * factors, self.images) / self.whole

    def added(self, weights: jax.Array) -> jax.Array:
        """The sum of the posteriors times weights [queries, n] over the images, [queries, classes]."""
        return self.queries * _product("qn,nc->qc", weights / self.whole, self.images)

    def dealt(self, factors: jax.Array, weights: jax.Array) -> jax.Array:
        """The sum over the images of their weights [queries, n], each dealt to the classes in proportion to the
        posteriors times factors [queries, classes]. It is factors added(weights / times(factors)), without d."""
        ours = self.queries * factors
        likely = _product("qc,nc->qn", ours, self.images) + FLOOR * self.whole
        return ours * _product("qn,nc->qc", weights / likely, self.images)

    def squares(self) -> jax.Array:
        """The sum of the squares over the classes, [queries, n]."""
        return _product("qc,nc->qn", jnp.square(self.queries), jnp.square(self.images)) / jnp.square(self.whole)


class ShareAdapter(nn.Module):
    """The adapter, for `classes` classes.

    Attributes:
      rank: numbers of a key.
      steps: of EM.
      most: buffer images that count for a query; of more, those that count most.
      weighs: whether it weighs evidence, and may correct by the own style.
    """

    classes: int
    rank: int
    steps: int
    most: int = 1000
    weighs: bool = False

    def setup(self) -> None:
        self.bias = self.param("bias", nn.initializers.zeros, (self.rank, self.classes))
        self.offset = self.param("offset", nn.initializers.zeros, (self.classes,))
        starts = {"near": 2.0, "log_t": 0.0, "log_n": 2.0, "log_m": 1.0, "strength": 0.0}
        self.scalars = {name: self.param(name, nn.initializers.constant(x), ()) for name, x in starts.items()}
        if self.weighs:
            self.common = self.param("log_l", nn.initializers.constant(2.0), ())
            shapes = {"evidence_kernel": (EVIDENCE, HIDDEN), "evidence_bias": (HIDDEN,), "belief": (HIDDEN,)}
            starts = {"evidence_kernel": nn.initializers.normal(0.3)}
            self.belief = {n: self.param(n, starts.get(n, nn.initializers.zeros), of) for n, of in shapes.items()}
        self.trained = self.variable("batch_stats", "shares", lambda: jnp.full(self.classes, 1 / self.classes))

    @nn.compact
    def keys(self, style: jax.Array) -> jax.Array:
        """Style [n, d] to keys [n, rank]."""
        d = style.shape[-1]
        mean = self.variable("batch_stats", "mean", lambda: jnp.zeros(d))
        std = self.variable("batch_stats", "std", lambda: jnp.ones(d))
        kernel = self.param("kernel", nn.initializers.normal(NEAR), (d, self.rank))
        return jnp.clip((style - mean.value) / std.value, -LARGEST, LARGEST) @ kernel / math.sqrt(d)

    def known(self, logits: jax.Array, style: jax.Array, moves: jax.Array | None = None) -> Keyed:
        """Images with logits [n, classes] and style [n, d], as the adapter knows them.

        `moves` [n, classes] are those of Keyed, for logits that are corrected already.
        """
        keys = self.keys(style)
        if moves is not None or not self.has_variable("batch_stats", OWN):
            return Keyed(logits, keys, moves)
        own = self.get_variable("batch_stats", OWN)
        scaled = jnp.clip((style - own["mean"]) / own["std"], -LARGEST, LARGEST)
        return Keyed(own["scale"] * logits + own["bias"] + scaled @ own["weights"], keys, scaled @ own["common"])

    def weights(self, query: jax.Array, keys: jax.Array, present: jax.Array | None) -> jax.Array:
        """How much each image of the buffer counts for each query: a above, [queries, n].

        Args:
          query: keys of queries.
          keys: of the buffer.
          present: bool [n], the places that hold an image; None: all do.
        """
        weights = jax.nn.sigmoid(self.scalars["near"] - jnp.square(query[:, None] - keys).sum(-1))
        return weights if present is None else weights * present

    def attention(self, query: jax.Array, keys: jax.Array, present: jax.Array | None) -> jax.Array:
        """The part of each image in the shares of the classes, [queries, 1, n]. What training saw has the rest."""
        weights = self.weights(query, keys, present)
        return (weights / (weights.sum(-1, keepdims=True) + jnp.exp(self.scalars["log_m"])))[:, None]

    def answer(self, query: Keyed, buffer: Keyed, present: jax.Array | None) -> jax.Array:
        """Logits of queries [queries, classes]; `present` is as in weights()."""
        if not len(buffer.keys):
            return query.logits
        weights = self.weights(query.keys, buffer.keys, present)
        if len(buffer.keys) > self.most:  # each query has a choice of its own, so they come one after another
            weights, chosen = jax.lax.top_k(weights, self.most)

            def one(x: Any) -> jax.Array:
                alone, its_weights, rows = x
                near = jax.tree.map(lambda part: jnp.take(part, rows, axis=0), buffer)
                return self._answer(jax.tree.map(lambda part: part[None], alone), its_weights[None], near)[0]

            adapted = jax.lax.map(one, (query, weights, chosen))
        else:
            adapted = self._answer(query, weights, buffer)
        return adapted if present is None else jnp.where(present.any(), adapted, query.logits)

    def told(self, query: Keyed, buffer: Keyed, present: jax.Array | None, labels: jax.Array) -> jax.Array:
        """The answer where the labels of the buffer [n] tell the shares. t counts like one image."""
        weights, t = self.weights(query.keys, buffer.keys, present), self.trained.value
        seen, classes = jax.lax.stop_gradient(weights), jax.nn.one_hot(labels, self.classes)
        shares = (seen @ classes + t) / (seen.sum(-1, keepdims=True) + 1)
        z = query.logits - self._common(weights, buffer.moves, weights @ classes)
        return z * jnp.exp(-self.scalars["log_t"]) + self._moved(weights, buffer) + jnp.log(shares / t)

    def _moved(self, weights: jax.Array, buffer: Keyed) -> jax.Array:
        count = weights.sum(-1, keepdims=True)  # [queries, 1]
        mean = weights @ buffer.keys / (count + FLOOR)
        return count / (count + jnp.exp(self.scalars["log_n"])) * (mean @ self.bias + self.offset)

    def _common(self, weights: jax.Array, moves: jax.Array | None, counts: jax.Array) -> jax.Array:
        """What the common part of the styles moves, [queries, classes], where the buffer has `counts` images of
        each class, [queries, classes]."""
        if moves is None:
            return jnp.zeros(())
        found = weights @ moves - counts @ self.get_variable("batch_stats", OWN)["content"]
        return found / (weights.sum(-1, keepdims=True) + jnp.exp(self.common))

    def _estimated(self, p: Posteriors, weights: jax.Array, shares: Any, steps: int) -> tuple[jax.Array, jax.Array]:
        """The shares of the classes by so many steps of EM, which begin with `shares`, and how many images the buffer
        has of each by them, [queries, classes].

        An adapter that weighs evidence learns from the last step alone, as if those before had found a fixed point. The
        gains are within 0.1 points on average, and its training step takes three quarters of the time.
        """
        t, mass, counts = self.trained.value, jnp.exp(self.scalars["log_m"]), jnp.zeros(())
        for step in range(steps):
            if self.weighs and step == steps - 1:
                shares = jax.lax.stop_gradient(shares)
            counts = p.dealt(shares / t, weights)
            shares = (counts + mass * t) / (weights.sum(-1, keepdims=True) + mass)
        return shares, counts

    def _answer(self, query: Keyed, weights: jax.Array, buffer: Keyed) -> jax.Array:
        x, t, moved = self.scalars, self.trained.value, self._moved(weights, buffer)
        sharpness, common = jnp.exp(-x["log_t"]), jnp.zeros(())
        p = Posteriors.of(buffer.logits * sharpness, moved)
        after = 0 if buffer.moves is None else self.steps // 2
        shares, counts = self._estimated(p, weights, jnp.broadcast_to(t, p.queries.shape), self.steps - after)
        if buffer.moves is not None:
            common = sharpness * self._common(weights, buffer.moves, counts)
            p = Posteriors.of(buffer.logits * sharpness, moved - common)
            shares, _ = self._estimated(p, weights, shares, after)
        strength = x["strength"]
        if self.weighs:
            kernel, bias, belief = self.belief.values()
            strength += (jnp.tanh(evidence(p, shares, t, weights) @ kernel + bias) @ belief)[:, None]
        answer = query.logits * sharpness + moved - common + 2 * jax.nn.sigmoid(strength) * jnp.log(shares / t)
        if not self.has_variable("batch_stats", LOG_FLOOR):
            return answer
        return bounded(query.logits * sharpness, answer, self.get_variable("batch_stats", LOG_FLOOR))


def bounded(z: Any, answer: Any, log_floor: Any) -> Any:
    """The answer with a floor for the factors by which it changes the odds of z, of JAX or of NumPy."""
    factors = answer - z
    return z + factors.clip(min=factors.max(-1, keepdims=True) + log_floor)


def evidence(p: Posteriors, shares: jax.Array, trained: jax.Array, weights: jax.Array) -> jax.Array:
    """What the buffer of each query looks like, [queries, EVIDENCE], in numbers of about -1 to 1.

    They are the logarithm of the number of images; how far the estimated shares are from those in training, and by how
    much they make the buffer's answers likelier; how far the mean answer is from the shares in training; the sums of
    the squares of an answer and of the shares, which say how sure they are. (A maximum would say so too. But its
    gradient is not finite where the compiler computes it twice, with other last bits.)

    Args:
      p: of the buffer.
      shares: as EM finds them, [queries, classes].
      trained: in training, [classes].
      weights: how much each image of the buffer counts, [queries, n].
    """
    count, whole = weights.sum(-1), math.log(len(trained))

    def mean(x: jax.Array) -> jax.Array:
        return (weights * x).sum(-1) / jnp.maximum(count, SMALLEST)

    answer = p.added(weights) / jnp.maximum(count, SMALLEST)[:, None]
    likelier = mean(jnp.log(p.times(shares / trained) + SMALLEST))
    apart, answered = ((q * jnp.log(q / trained + SMALLEST)).sum(-1) / whole for q in (shares, answer))
    found = (
        jnp.log1p(count) - 3, 2 * apart - 1, 8 * likelier / whole - 1, 4 * answered,
        4 * mean(p.squares()) - 2, 2 * jnp.square(shares).sum(-1) - 1,
    )  # fmt: skip
    return jnp.stack(found, -1)
