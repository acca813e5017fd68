"""Judges an adapter on validation tasks: what it gains, how sure it may be, and what it takes for drift."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
import scipy.special

from cxda_jax import metrics
from cxda_jax.data.episodes import Context, Draw, EpisodeSpec, Plan, domains_for, in_shares, sample_plans
from cxda_jax.data.store import DomainStore
from cxda_jax.fitted import CELLS, SIZES, apart, method_of, probabilities, standardised
from cxda_jax.machine import backend
from cxda_jax.runs.diagnosis import BY_HEART, FIRST, Diagnosis, diagnose
from cxda_jax.types import ADAPTER, Array, Images, Variables

TASKS = 200  # of a kind
FULL = SIZES[-1]
SHARES = {"natural": "their own shares", "dirichlet": "Dirichlet 0.3", "even": "even shares"}
COVERAGES = (1.0, 0.8, 0.5)
DRAWS, MOST_DOMAINS = 30, 100  # buffers of each domain, and the domains, that say what is no drift
DIAGNOSED = 2**19  # logits that the diagnosis reads, as it takes minutes for more


class Judged(NamedTuple):
    """What an adapter is judged on.

    Attributes:
      store: whose images are logits and style, [n, 1, 1, classes + d].
      queries: of a task.
      seed: of the tasks.
    """

    store: DomainStore
    queries: int
    seed: int

    @property
    def rows(self) -> np.ndarray:
        return self.store.images[:, 0, 0]

    def most_domains(self, split: str) -> int:
        """The most domains, up to five, that a task can have; 0 where none has images enough."""
        sizes = np.diff(self.store.offsets)[self.store.domains(split)]
        return max(k * int((sizes >= FULL // k + self.queries).sum() >= k) for k in range(1, 6))

    def draw(self, split: str, stream: int, spec: EpisodeSpec) -> Draw:
        domains = domains_for(spec, self.store, split)[0]
        return Draw(spec, self.store.offsets, domains, self.seed, stream, self.store.labels)

    def answers(self, variables: Variables, plan: Plan) -> np.ndarray:
        """The adapted logits [tasks, queries, classes]; without a support those of the classifier."""
        if not plan.support.shape[1]:
            return self.rows[plan.query, : self.store.num_classes]
        return np.asarray(_answering(self.store.num_classes)(variables, *(self.rows[part] for part in plan)))


@functools.cache
def _answering(classes: int) -> Callable[..., Array]:
    method = method_of(classes)

    def answering(variables: Variables, support: Array, query: Array) -> Array:
        def one(task: tuple[Array, Array]) -> Array:
            support, query = (Images(x[:, None, None], jnp.zeros(len(x), jnp.int32)) for x in task)
            return method.predict(method.adapt(variables, support, jax.random.key(0)), query)

        cells = query.shape[1] * support.shape[1] * classes
        return jax.lax.map(one, (support, query), batch_size=min(len(query), max(1, CELLS // cells)))

    return backend.jit(answering)


def headroom(judged: Judged) -> Mapping[str, Mapping[str, float]] | None:
    """The table of a diagnosis on all domains, as the classifier was trained on none. Of many images it reads some.

    None where fewer than two domains have the images for it.
    """
    store, rng = judged.store, np.random.default_rng(judged.seed)
    domains = rng.permutation(np.flatnonzero(np.diff(store.offsets) >= FIRST))
    domains = domains[: max(5, DIAGNOSED // (store.num_classes * (FIRST + 10)))]
    each = max(FIRST + 10, DIAGNOSED // (store.num_classes * max(1, len(domains))))
    parts = [rng.permutation(np.arange(*store.offsets[d : d + 2]))[:each] for d in domains]
    if len(parts) < 2:
        return None
    rows, count = np.concatenate(parts), len(parts)
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
    some = store._replace(images=store.images[:0], labels=store.labels[rows], offsets=offsets, split=("val",) * count)
    tasks = max(1, min(TASKS, CELLS // (FULL * store.num_classes)))
    return diagnose(some, judged.rows[rows, : store.num_classes], 0.0, seed=judged.seed, tasks=tasks).table


def report_on(judged: Judged, variables: Variables, steps: int, known: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A report, and the arrays that an adapter keeps of what it was judged on; `known` is headroom()'s."""
    store, classes = judged.store, judged.store.num_classes
    found, answers = judge(judged, variables)
    stats = jax.device_get(variables["batch_stats"][ADAPTER])
    told, means = drift(judged, standardised(judged.rows[:, classes:], stats["mean"], stats["std"]))
    return {
        "images": len(judged.rows),
        "right": float((judged.rows[:, :classes].argmax(1) == store.labels).mean()),
        "domains": {split: len(store.domains(split)) for split in ("train", "val")},
        "steps": steps, "tasks": TASKS, "headroom": known, **found, "drift": told,
    }, {**means, **answers}  # fmt: skip


def judge(judged: Judged, variables: Variables) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Parts of a report: gains by kind of task and size of buffer, and calibration. With them, the answers that
    thresholds follow from.

    Temperatures are those of even tasks, and all that is said of them is of odd tasks.
    """
    gain, answers, labels = {}, {n: [] for n in SIZES}, []
    kinds = [(number, shares) for number in dict.fromkeys((1, judged.most_domains("val"))) for shares in SHARES]
    by_task = []
    for stream, (number, shares) in enumerate(kinds, 2):
        spec = EpisodeSpec(number, FULL // number, judged.queries, shares=shares, skip_small=True)
        draw = judged.draw("val", stream, spec)
        if len(draw.domains) < number:
            continue
        plan = sample_plans(draw, range(TASKS), Context(number * spec.per_domain))
        y = judged.store.labels[plan.query]
        found = {n: judged.answers(variables, Plan(plan.support[:, :n], plan.query)) for n in SIZES}
        right = np.stack([(z.argmax(-1) == y).mean(1) for z in found.values()])
        by_task.append(right - right[0])
        spans = _spans(by_task[-1])
        name = f"{number} domain{'s' * (number > 1)}, {SHARES[shares]}"
        gain[name] = {"plain": 100 * float(right[0].mean()), **dict(zip(map(str, SIZES), spans, strict=True))}
        labels.append(y)
        for n, z in found.items():
            answers[n].append(z)
    overall = _spans(np.concatenate(by_task, axis=1)[-1:])[0]
    y, calibration, confident = np.stack(labels), {}, {}
    for n in SIZES:
        calibration[str(n)], *confident[n] = _calibrated(np.stack(answers[n]), y)
    confidence, right = confident[FULL if overall[1] > 0 else 0]
    order = np.argsort(-confidence, kind="stable")
    return {"gain": gain, "overall": overall, "calibration": calibration}, {
        "confidence": confidence[order], "right": right[order],
    }  # fmt: skip


def _spans(gains: np.ndarray) -> list[list[float]]:
    """Mean and 95 % interval of gains [sizes, tasks], in points."""
    ends = metrics.bootstrap_interval(gains)
    return [[100 * float(x) for x in (mean, low, high)] for mean, low, high in zip(gains.mean(1), *ends, strict=True)]


def _calibrated(logits: np.ndarray, labels: np.ndarray) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """The calibration of answers [kinds, tasks, queries, classes]; and confidences and what is right of odd tasks."""
    (z, y), (held, of_held) = (
        (logits[:, half::2].reshape(-1, logits.shape[-1]), labels[:, half::2].ravel()) for half in (0, 1)
    )
    temperature = least_temperature(z, y)
    right = held.argmax(1) == of_held
    before, after = (probabilities(held, t).max(1) for t in (1.0, temperature))
    return {
        "temperature": temperature,
        "ece": [metrics.expected_calibration_error(confidence, right) for confidence in (before, after)],
        "risk": {str(coverage): metrics.risk_at(coverage, after, right) for coverage in COVERAGES},
    }, after, right  # fmt: skip


def least_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """The temperature of the least cross-entropy, between exp(-5) and exp(5)."""
    own = logits[np.arange(len(labels)), labels]

    def cross_entropy(log_t: float) -> float:
        scale = np.float32(np.exp(-log_t))
        return float(np.mean(np.asarray(scipy.special.logsumexp(logits * scale, axis=1)) - own * scale))

    found: Any = scipy.optimize.minimize_scalar(cross_entropy, bounds=(-5, 5), method="bounded")
    return float(np.exp(found.x))


def drift(judged: Judged, scaled: np.ndarray) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A part of a report, and what an adapter knows of training domains, from standardised styles [n, d] of the store.

    The limit is the largest distance of a training domain's buffer from the others. Buffers have 5, 20 or 100 images
    with any shares of the classes. Those of validation domains beyond the limit are false alarms.
    """
    offsets, limit, beyond = judged.store.offsets, None, None
    training = judged.store.domains("train")[:MOST_DOMAINS]
    means = np.stack([scaled[slice(*offsets[d : d + 2])].mean(0) for d in training])
    within = np.mean([scaled[slice(*offsets[d : d + 2])].var(0) for d in training], axis=0)

    draw = judged.draw("train", 1, EpisodeSpec(shares="any"))

    def distances(domain: int, others: np.ndarray) -> list[float]:
        buffers = [scaled[in_shares(draw, i, domain)[: SIZES[1 + i % 3]]] for i in range(DRAWS)]
        return [apart(buffer, others.mean(0), others.var(0, ddof=1), within) for buffer in buffers]

    if len(training) >= 4:
        limit = max(max(distances(d, np.delete(means, i, axis=0))) for i, d in enumerate(training))
        validating = judged.store.domains("val")[:MOST_DOMAINS]
        beyond = float(np.mean([x > limit for d in validating for x in distances(d, means)]))
    between = means.var(0, ddof=1) if len(means) > 1 else np.ones_like(within)
    known = {"centre": means.mean(0), "between": between, "within": within}
    return {"limit": limit, "false_alarms": beyond}, {name: x.astype(np.float32) for name, x in known.items()}


def in_words(report: Mapping[str, Any]) -> str:
    """A report as one paragraph."""
    gain, overall, cal = report["gain"], report["overall"], report["calibration"]
    known = report["headroom"]
    unknown = f"Fewer than two domains have {FIRST} images: the headroom is not known."
    said = [Diagnosis(known, 0.0).headroom() if known else unknown]
    if report["right"] > BY_HEART:
        said.append(f"The classifier knows these images by heart: {report['right']:.1%} of its answers are right. "
                    "An adapter learns nothing from them; give images that it was not trained on.")  # fmt: skip
    for name, row in gain.items():
        sizes = [f"{_span(row[str(n)])} with {n}" for n in SIZES[1:]]
        said.append(f"{name}: {row['plain']:.1f} % are right without a buffer, {', '.join(sizes)} images.")
    harms = [f"{name} with {n} images" for name, row in gain.items() for n in SIZES[1:] if row[str(n)][2] < 0]
    said.append(f"These surely lose: {'; '.join(harms)}." if harms else "No kind of task surely loses.")
    verdict = "it helps" if overall[1] > 0 else "it does not surely help, so it gives the classifier's own answers"
    said.append(f"Over all tasks with {FULL} images it gains {_span(overall)}: {verdict}.")
    plain, adapted = cal["0"], cal[str(FULL if overall[1] > 0 else 0)]
    said.append(
        f"The calibration error is {plain['ece'][0]:.1%} for the classifier and {adapted['ece'][1]:.1%} for "
        f"predict_proba(); of the surest 80 % of answers {plain['risk']['0.8']:.1%} and {adapted['risk']['0.8']:.1%} "
        "are wrong."
    )
    alarms = report["drift"]["false_alarms"]
    said.append("Too few domains: drift is never told." if alarms is None else
                f"{alarms:.1%} of the buffers of validation domains are taken for drift.")  # fmt: skip
    return " ".join(said)


def _span(numbers: list[float]) -> str:
    mean, low, high = numbers
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"
