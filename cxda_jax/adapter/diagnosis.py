"""Says beforehand whether a buffer can help a classifier, and through what. Nothing is trained.

Rows with a star know what no device can know. Their gain is the headroom: how much is there to be gained.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import scipy.sparse
from scipy.special import softmax

from cxda_jax.data.episodes import Draw, EpisodeSpec, Plan, domains_for, in_shares, sample_plans
from cxda_jax.data.store import DomainStore
from cxda_jax.errors import UserError
from cxda_jax.machine import backend
from cxda_jax.machine.progress import aligned
from cxda_jax.methods.label_shift import FLOOR, shares_by_em, temperature_of
from cxda_jax.types import Array

PLAIN, CALIBRATED, KNOWN_DOMAIN = "no adaptation", "calibrated", "mlls, domain known*"
TRUE_SHARES, ERRORS = "true shares*", "errors of the domain*"
FIRST = 120  # images of a task of one domain
TASKS, STEPS, SMOOTHING, LEAST = 200, 50, 10.0, 1.0  # LEAST: points, below which a gain is none
BLOCK = 50  # tasks that one program answers at once
BY_HEART = 0.98  # right answers, from which on an adapter learns nothing
SHARES = {"natural": "own shares", "dirichlet": "Dirichlet 0.3", "even": "even shares"}  # of a task's classes
UNFORESEEN = "What follows the style of an image is not foreseen here: fit() measures it."


def kind_of(number: int, shares: str) -> str:
    """The name of a kind of tasks: of so many domains, with such shares of the classes."""
    return f"{number} domain{'s' * (number > 1)}, {SHARES[shares]}"


KINDS = {kind_of(number, shares): (number, shares) for number in (1, 5) for shares in SHARES}


class Diagnosis(NamedTuple):
    """Mean accuracies in per cent by kind of task and row, and the share of right answers on `images`."""

    table: Mapping[str, Mapping[str, float]]
    by_heart: float
    images: str = "its training images"

    def gain(self, kind: str, row: str) -> float:
        """The points that a row gains; 0 for a kind that the data cannot give."""
        return self.table[kind][row] - self.table[kind][PLAIN] if kind in self.table else 0.0

    def __str__(self) -> str:
        rows = list(next(iter(self.table.values())))
        lines = [
            [kind, *(f"{scores[row]:.1f}" for row in rows), f"{self.expected(kind):+.1f}"]
            for kind, scores in self.table.items()
        ]
        return "\n".join([*aligned([["accuracy, %", *rows, "expected gain"], *lines]), "", self.verdict(), UNFORESEEN])

    def expected(self, kind: str) -> float:
        """The points that an adapter can be expected to gain: what calibration gives, or EM on the domain's images.

        An adapter learns to do both, and to do neither where they harm. It may gain more where errors follow the style.
        """
        return max(0.0, self.gain(kind, CALIBRATED), self.gain(kind, KNOWN_DOMAIN))

    def headroom(self) -> str:
        """One sentence on whether a buffer can help."""
        own, skewed = (max(0.0, self.gain(kind_of(1, shares), TRUE_SHARES)) for shares in ("natural", "dirichlet"))
        errors = max(0.0, self.gain(kind_of(1, "even"), ERRORS))
        if max(own, skewed, errors) < LEAST:
            return "Neither the shares of the classes nor the errors of a domain leave a buffer a point to gain."
        parts = [f"its own shares of the classes ({own:+.1f} points, if they were known)"] * (own >= LEAST)
        parts += [f"skewed shares, where a device has them ({skewed:+.1f})"] * (skewed >= LEAST)
        parts += [f"how the classifier errs on its domain ({errors:+.1f})"] * (errors >= LEAST)
        return f"A buffer can help through {', and '.join(parts)}."

    def verdict(self) -> str:
        """headroom(), and one sentence on what the classifier knows by heart."""
        heart = f"The classifier is right on {self.by_heart:.1%} of {self.images}"
        if self.by_heart > BY_HEART:
            heart += ": an adapter learns nothing from these; hold other images out for it"
        return f"{self.headroom()} {heart}."


def diagnose(
    store: DomainStore, logits: np.ndarray, by_heart: float, split: str = "val", seed: int = 0, tasks: int = TASKS
) -> Diagnosis:
    """A diagnosis on the domains of a split.

    Args:
      store: the labels, domains and splits; its images are not read.
      logits: of the classifier, [rows of the store, classes]; those of the split count.
      by_heart: the share of training images on which the classifier is right.
      split: which domains; the classifier must not have learnt from them.
      seed: of the tasks.
      tasks: of a kind.
    """
    table, owner = {}, store.row_domains()

    @functools.cache  # most kinds of tasks have the same domains
    def calibrate(domains: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        rows = np.isin(owner, domains)
        return temperature_of(logits[rows], store.labels[rows])

    for kind, (number, shares) in KINDS.items():
        spec = EpisodeSpec(number, 100 // number, 20, shares=shares, skip_small=True)
        domains = domains_for(spec, store, split)[0]
        if len(domains) >= max(2, number):
            draw = Draw(spec, store.offsets, domains, seed, 2, store.labels)
            table[kind] = _rows(store, logits, draw, tasks, calibrate)
    if not table:
        raise UserError(f"{store.info.name}: a diagnosis needs two domains of split {split!r} with {FIRST} images each")
    return Diagnosis(table, by_heart)


def _rows(
    store: DomainStore, logits: np.ndarray, draw: Draw, tasks: int, calibrate: Callable[[tuple[int, ...]], Any]
) -> dict[str, float]:
    """The rows of one kind of tasks. Each half of the domains is calibrated on the other half."""
    owner, labels, classes = store.row_domains(), store.labels, store.num_classes
    calm, prior = np.array(logits, np.float64), np.zeros((2, classes))
    for half in (0, 1):
        own, other = np.isin(owner, draw.domains[half::2]), draw.domains[1 - half :: 2]
        scale, bias = calibrate(tuple(other))
        calm[own] = calm[own] * scale + bias
        counts = np.bincount(labels[np.isin(owner, other)], minlength=classes) + 0.5
        prior[half] = counts / counts.sum()
    plan = sample_plans(draw, range(tasks))
    asked = owner[plan.query[:, 0]]
    t = prior[np.searchsorted(draw.domains, asked) % 2]
    own = (owner[plan.support] == asked[:, None]).astype(np.float64)

    def moved(z: np.ndarray, shares: np.ndarray, trained: np.ndarray) -> np.ndarray:
        return z[plan.query] + np.log(np.maximum(shares, FLOOR) / trained)[:, None]

    def estimated(z: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return moved(z, by_em(softmax(z[plan.support], -1), t, weights), t)

    pairs = zip(plan.support, own, strict=True)
    counted = np.stack([np.bincount(labels[s][w > 0], minlength=classes) for s, w in pairs])
    smoothed = (counted + SMOOTHING * t) / (counted.sum(1, keepdims=True) + SMOOTHING)
    answers = {
        PLAIN: logits[plan.query],
        CALIBRATED: calm[plan.query],
        "prior_shift": estimated(logits, np.ones_like(own)),
        "mlls": estimated(calm, np.ones_like(own)),
        KNOWN_DOMAIN: estimated(calm, own),
        "labels of its images*": moved(calm, smoothed, t),
        TRUE_SHARES: moved(calm, np.stack([_true_shares(draw, i, d, classes) for i, d in enumerate(asked)]), t),
        ERRORS: logits[plan.query] + _errors(logits, labels, owner, plan, asked)[:, None],
    }
    return {name: 100 * float((z.argmax(-1) == labels[plan.query]).mean()) for name, z in answers.items()}


def by_em(p: np.ndarray, trained: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The shares [tasks, classes] of buffers: p [tasks, n, classes], trained [tasks, classes], weights [tasks, n]."""
    return in_blocks(_by_em, p, trained, weights)


@jax.jit
@jax.vmap
def _by_em(p: Array, trained: Array, weights: Array) -> Array:
    return shares_by_em(p, trained, STEPS, SMOOTHING, weights)


def in_blocks(program: Callable[..., Any], *tasks: np.ndarray) -> np.ndarray:
    """What a program says of tasks, whose arrays have one axis in common. It is asked in blocks of one size, so that it
    is compiled once for all numbers of tasks. The last block is filled up with some of its own."""
    count = len(tasks[0])

    def of_block(start: int) -> np.ndarray:
        block = np.resize(np.arange(start, min(start + BLOCK, count)), BLOCK)
        return np.asarray(program(*(x[block] for x in tasks)))

    return np.concatenate([*backend.in_threads(of_block, range(0, count, BLOCK))])[:count]


def _true_shares(draw: Draw, task: int, domain: int, classes: int) -> np.ndarray:
    """The shares of the classes among a domain's images, or where a task draws them, among its first ones."""
    rows = np.arange(draw.offsets[domain], draw.offsets[domain + 1])
    if draw.spec.shares != "natural":
        rows = in_shares(draw, task, domain, FIRST)
    assert draw.labels is not None
    return np.bincount(draw.labels[rows], minlength=classes) / len(rows)


def _errors(logits: np.ndarray, labels: np.ndarray, owner: np.ndarray, plan: Plan, asked: np.ndarray) -> np.ndarray:
    """How much rarer each class is in the answers for a task's domain than in its labels, of images not in the task."""
    classes, rows = logits.shape[1], np.concatenate(plan, axis=1)
    own = (owner[rows] == asked[:, None]).astype(np.float64)  # no image is in a task twice
    each = scipy.sparse.csr_array((np.ones(len(owner)), (owner, np.arange(len(owner)))))

    def others(x: np.ndarray) -> np.ndarray:
        """The sum over the images of the domain that are not in the task, [tasks, classes]."""
        return np.maximum((each @ x)[asked] - np.einsum("tn,tnc->tc", own, x[rows]), 0) + SMOOTHING / classes

    return np.log(others(np.eye(classes, dtype=np.float32)[labels]) / others(softmax(logits, -1)))
