"""What labels teach without any buffer: the logits of a classifier corrected by the image's own style.

    z' = a z + b + s U

z are the logits and s the standardised style of one image. Of a device's images there is more to know: the part p of
their styles that all have in common, whatever their classes. It is the mean of s less what the classes explain, y M,
where M are the means of the classes if each domain has a mean of its own. Where p is known, other weights are for it:

    z' = a z + b + (s - p) U + p V = a z + b + s U - p W        W = U - V

nets/shares.py finds p W in a buffer, by W and C = M W. a, b, U and V have the least cross-entropy on labelled images of
some domains, of both formulas alike, plus a penalty on the squares of U and V. While they are learnt, log q - log t is
added to z', where q are the shares of the classes in the image's domain and t those in all: otherwise they would learn
which classes these domains have.

An adapter must not learn from logits that were corrected by their own labels, since new domains have no such logits.
So the domains lie in groups, and each group is corrected by what the other groups taught. New domains get the mean of
all these corrections.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from cxda_jax.adapter.adapter import standardised
from cxda_jax.losses import into_slopes
from cxda_jax.methods.cxda_shares import SMALLEST
from cxda_jax.nets.shares import OWN
from cxda_jax.types import ADAPTER, Variables

PENALTIES = (1.0, 0.1, 0.01, 0.001)  # from the most careful on
STEPS, TOLERANCE = 15, 1e-5  # of lbfgs(), for each of them
MEMORY = 10  # the latest steps, from which lbfgs() learns the curvature
ENOUGH = 1e-4  # a step is taken if the value falls by this part of what the gradient promises
SHORTEST = 1e-3  # a step is halved until it is; below this part of it the search ends
ROUNDS = 10  # in which the means of classes and of domains are found in turn
CURVATURE = 0.1  # of the cross-entropy in a logit, about


class Correction(NamedTuple):
    """z' of the formula, as a function of logits [..., classes] and style [..., d]."""

    scale: float
    bias: np.ndarray  # [classes]
    weights: np.ndarray  # U, [d, classes]
    common: np.ndarray  # W, [d, classes]
    content: np.ndarray  # C, [classes, classes]
    mean: np.ndarray  # of the style, [d]
    std: np.ndarray

    def __call__(self, logits: np.ndarray, style: np.ndarray) -> np.ndarray:
        return self.scale * logits + self.bias + standardised(style, self.mean, self.std) @ self.weights

    def moves(self, style: np.ndarray) -> np.ndarray:
        """s W, [..., classes]."""
        return standardised(style, self.mean, self.std) @ self.common

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """As nets/shares.py reads it."""
        return {name: np.asarray(x, np.float32) for name, x in self._asdict().items()}


class Labelled(NamedTuple):
    """Images of some domains: logits [n, classes], style [n, d], labels [n], and the numbers of their domains [n]."""

    logits: np.ndarray
    style: np.ndarray
    labels: np.ndarray
    domains: np.ndarray


def corrections(
    images: Labelled, teach: np.ndarray, mean: np.ndarray, std: np.ndarray, knows_common: bool = True
) -> Iterator[list[Correction]]:
    """For each of PENALTIES what some domains teach, for styles of this mean and deviation.

    L-BFGS learns all of a penalty at once, along the axes of the styles and in steps that fit the curvature there.

    Args:
      images: of all domains.
      teach: which domains teach each of the corrections, bool [corrections, domains].
      mean: of the style, [d].
      std: of the style, [d].
      knows_common: whether V is learnt too; otherwise p is 0.
    """
    order = np.argsort(images.domains, kind="stable")
    images = Labelled(*(x[order] for x in images))
    s, classes, count = standardised(images.style, mean, std).astype(np.float32), images.logits.shape[1], len(teach)
    spread, axes = np.linalg.eigh(s.T @ s / len(s))
    cells = counts_of(images, teach.shape[1])
    which = images.domains * classes + images.labels, np.arange(len(s))
    sums = scipy.sparse.csr_array((np.ones(len(s), np.float32), which), (cells.size, len(s))) @ s
    content, parts = common_parts(sums.reshape(*cells.shape, -1), cells, teach)
    unit = float(images.logits.std()) + SMALLEST  # of logits, so that a, b and U have steps of one size
    shares = np.stack([told_shares(cells, own).T for own in teach])
    weight = (teach / (teach @ cells.sum(1))[:, None])[:, images.domains]
    parts, held = parts @ axes * knows_common, cells.any(1)  # the domains that have images
    of_parts = np.square(parts).mean((0, 1))
    arrays = (s @ axes).T, images.logits.T / unit, shares[..., held], parts[held].transpose(1, 2, 0), weight
    as_floats = functools.partial(np.ascontiguousarray, dtype=np.float32)
    shown = _Shown._make((*map(as_floats, arrays), images.labels, cells.sum(1).astype(int)[held]))
    a, b, u = np.full((count, 1), unit), np.zeros((count, classes)), np.zeros((count, 2, s.shape[1], classes))
    for penalty in PENALTIES:
        root = np.sqrt(CURVATURE * np.maximum([spread, of_parts], 0) + penalty)[..., None]
        loss = functools.partial(_loss, shown=shown, root=as_floats(root), penalty=penalty)
        found = lbfgs(loss, as_floats(np.concatenate([a, b, (u * root).reshape(count, -1)], 1)), STEPS, TOLERANCE)
        a, b, u = np.split(found.astype(np.float64), [1, 1 + classes], axis=1)
        u = u.reshape(count, 2, -1, classes) / root
        weights, others = np.moveaxis((axes @ u).astype(np.float32), 1, 0)
        given = a[:, 0] / unit, b.astype(np.float32), weights, weights - others
        each = zip(content.astype(np.float32), *given, strict=True)
        yield [Correction._make((*of, m @ of[-1], mean, std)) for m, *of in each]


def nothing(classes: int, mean: np.ndarray, std: np.ndarray) -> Correction:
    """The correction that changes nothing."""
    weights = np.zeros((len(mean), classes))
    return Correction(1.0, np.zeros(classes), weights, weights, np.zeros((classes, classes)), mean, std)


def added(variables: Variables, correction: Correction | None) -> Variables:
    """The variables of an adapter with a correction by the own style, or without one."""
    stats = {name: x for name, x in variables["batch_stats"][ADAPTER].items() if name != OWN}
    own = {OWN: correction.arrays} if correction else {}
    return {**variables, "batch_stats": {**variables["batch_stats"], ADAPTER: {**stats, **own}}}


def correction_in(variables: Variables) -> Correction | None:
    """The correction that added() put there."""
    own = variables["batch_stats"][ADAPTER].get(OWN)
    return Correction(**{**{n: np.asarray(x) for n, x in own.items()}, "scale": float(own["scale"])}) if own else None


def mean_of(corrections: Sequence[Correction]) -> Correction:
    """The correction whose answers are the means of those of these, which have one mean and deviation of styles."""
    scale, *others = (np.mean([getattr(each, name) for each in corrections], axis=0) for name in Correction._fields[:5])
    return Correction._make((float(scale), *others, corrections[0].mean, corrections[0].std))


def counts_of(images: Labelled, domains: int) -> np.ndarray:
    """How many images each domain has of each class, [domains, classes]."""
    counts = np.zeros((domains, images.logits.shape[1]))
    np.add.at(counts, (images.domains, images.labels), 1)
    return counts


def told_shares(counts: np.ndarray, teach: np.ndarray) -> np.ndarray:
    """log q - log t of each domain, [domains, classes], where t are the shares in those that teach. t counts like one
    image in q."""
    total = counts[teach].sum(0) + 0.5
    t = total / total.sum()
    return np.log((counts + t) / (counts.sum(1, keepdims=True) + 1)) - np.log(t)


def common_parts(sums: np.ndarray, counts: np.ndarray, teach: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the images of a class have in common within domains, [corrections, classes, d], by the domains that teach
    each, and what those of a domain have in common beyond their classes, [domains, corrections, d].

    Args:
      sums: of the standardised styles of each class in each domain, [domains, classes, d].
      counts: of its images, [domains, classes].
      teach: as in corrections().
    """
    of_class = np.zeros((len(teach), *sums.shape[1:]))
    of_domain = np.zeros((len(sums), len(teach), sums.shape[2]))
    whole, images = sums.sum(1), np.maximum(counts.sum(1), 1)[:, None]
    for i, own in enumerate(teach):
        of_own = sums[own].sum(0)
        for _ in range(ROUNDS):
            of_class[i] = (of_own - counts[own].T @ of_domain[own, i]) / (counts[own].sum(0)[:, None] + 1)
            of_class[i] -= of_class[i].mean(0)
            of_domain[:, i] = (whole - counts @ of_class[i]) / images
    return of_class, of_domain


def lbfgs(
    function: Callable[[np.ndarray], tuple[float, np.ndarray]], x: np.ndarray, steps: int, tolerance: float
) -> np.ndarray:
    """Where a convex function is nearly least, by L-BFGS.

    SciPy's L-BFGS-B also keeps bounds, and takes three times as long with some hundred thousand numbers.

    Args:
      function: x -> its value and its gradient.
      x: the start, of any shape.
      steps: at most.
      tolerance: the step that lowers the value by less than this part of it, or of 1 where that is more, is the last.
    """
    (value, gradient), known = function(x), []
    for _ in range(steps):
        direction, parts = -gradient, []
        for move, change, product in reversed(known):
            parts.append(np.vdot(move, direction) / product)
            direction -= parts[-1] * change
        if known:
            _, change, product = known[-1]
            direction *= product / np.vdot(change, change)
        else:
            direction /= max(1.0, np.linalg.norm(gradient))
        for (move, change, product), part in zip(known, reversed(parts), strict=True):
            direction += (part - np.vdot(change, direction) / product) * move
        length, promised = 1.0, float(np.vdot(gradient, direction))
        while not (new := function(x + length * direction))[0] <= value + ENOUGH * length * promised:
            length /= 2
            if length < SHORTEST:
                return x
        move, change, gained = length * direction, new[1] - gradient, value - new[0]
        x, (value, gradient) = x + move, new
        if gained <= tolerance * max(abs(value), 1.0):
            break
        if (product := np.vdot(move, change)) > 0:
            known = [*known[1 - MEMORY :], (move, change, product)]
    return x


class _Shown(NamedTuple):
    """What corrections learn from: images, those of a domain together, and what is known of their domains."""

    s: np.ndarray  # [d, n], along the axes of the styles
    logits: np.ndarray  # [classes, n], of about one size
    shares: np.ndarray  # told_shares() of each correction, [corrections, classes, domains]
    parts: np.ndarray  # common to the images of a domain, [corrections, d, domains]
    weight: np.ndarray  # of an image, [corrections, n]
    labels: np.ndarray  # [n]
    counts: np.ndarray  # the images of each domain, one at least


def _loss(point: np.ndarray, shown: _Shown, root: np.ndarray, penalty: Any) -> tuple[float, np.ndarray]:
    """The sum over corrections of their cross-entropies with penalties, and its gradient, of a, b, U and V
    [corrections, 1 + classes + 2 d classes].

    In NumPy, one correction after another, as its logits then stay in the cache. A program of all at once takes as long
    with ten classes, twice as long with 62, and half a second to compile for each number of images.
    """
    s, logits, shares, parts, weight, labels, counts = shown
    count, classes, (d, n) = *shares.shape[:2], s.shape
    (a, b), both = np.split(point[:, : 1 + classes], [1], axis=1), point[:, 1 + classes :].reshape(count, 2, d, classes)
    both = both / root
    u, v = (both[:, i].swapaxes(1, 2) for i in (0, 1))
    moved, common = (u.reshape(-1, d) @ s).reshape(count, classes, n), (u - v) @ parts
    loss, slopes, starts = penalty / 2 * np.vdot(both, both), [], np.cumsum(counts) - counts
    for i, z in enumerate(moved):
        z += a[i] * logits + b[i][:, None] + np.repeat(shares[i], counts, axis=1)
        known = z - np.repeat(common[i], counts, axis=1)
        loss += sum(into_slopes(x, labels, weight[i] / 2) for x in (z, known))
        # From here on z, known and common[i] are the slopes of what they were.
        common[i] = np.add.reduceat(known, starts, axis=1)
        z += known
        slopes.append(np.append(np.vdot(z, logits), z.sum(1)))
    of_common = parts @ common.swapaxes(1, 2)
    of_both = penalty * both
    of_both[:, 0] += (moved.reshape(-1, n) @ s.T).reshape(count, classes, d).swapaxes(1, 2) - of_common
    of_both[:, 1] += of_common
    return float(loss), np.concatenate([slopes, (of_both / root).reshape(count, -1)], axis=1)
