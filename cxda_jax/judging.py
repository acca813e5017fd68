"""Judges an adapter on validation tasks: what it gains, how sure it may be, and what it takes for drift."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
import scipy.special

from cxda_jax import metrics
from cxda_jax.data.episodes import Context, Draw, EpisodeSpec, Plan, domains_for, in_shares, sample_plans
from cxda_jax.data.store import DomainStore
from cxda_jax.errors import UserError
from cxda_jax.fitted import CELLS, SIZES, apart, method_of, probabilities, standardised
from cxda_jax.machine import backend
from cxda_jax.methods.label_shift import FLOOR, fit_temperature, shares_of
from cxda_jax.results.formats import aligned
from cxda_jax.runs.diagnosis import BY_HEART, FIRST, Diagnosis, by_em, diagnose
from cxda_jax.types import ADAPTER, Array, Images, Variables

TASKS, RESAMPLES = 200, 2000  # of a kind; for an interval
START = 2**21  # numbers of images, from which a calibration is measured, and the training's start
FULL = SIZES[-1]
SHARES = {"natural": "their own shares", "dirichlet": "Dirichlet 0.3", "even": "even shares"}
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


def diagnosis(judged: Judged) -> str:
    """headroom() as a table, and in words."""
    if not (known := headroom(judged)):
        raise UserError(f"domains: fewer than two have {FIRST} images; give more of each")
    right = judged.rows[:, : judged.store.num_classes].argmax(1) == judged.store.labels
    return str(Diagnosis(known, float(right.mean()), "these images"))


def report_on(
    judged: Judged, variables: Variables, steps: dict[str, int], known: Any, turns: Sequence[dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A report, and the arrays that an adapter keeps of what it was judged on.

    `steps` has those that were taken and asked for, `known` is headroom()'s, and `turns` has what judge() found overall
    where other domains validated.
    """
    store, classes = judged.store, judged.store.num_classes
    rival = calibrated(judged)
    found, answers = judge(judged, variables, rival, turns=turns)
    stats = jax.device_get(variables["batch_stats"][ADAPTER])
    told, means = drift(judged, standardised(judged.rows[:, classes:], stats["mean"], stats["std"]))
    return {
        "images": len(judged.rows),
        "right": float((judged.rows[:, :classes].argmax(1) == store.labels).mean()),
        "domains": {split: len(store.domains(split)) for split in ("train", "val")},
        **steps, "tasks": TASKS, "headroom": known, **found, "drift": told,
    }, {**means, **answers, **rival}  # fmt: skip


def calibrated(judged: Judged) -> dict[str, np.ndarray]:
    """What the rival knows of training domains: 1 / T, b and t of mlls() in methods/label_shift.py."""
    own = np.flatnonzero(np.isin(judged.store.row_domains(), judged.store.domains("train")))
    classes, some = judged.store.num_classes, some_of(own, judged)
    scale, bias = jax.jit(fit_temperature)(judged.rows[some, :classes], judged.store.labels[some])
    known = {"scale": scale, "bias": bias, "shares": shares_of(jnp.asarray(judged.store.labels[own]), classes)}
    return {name: np.asarray(x, np.float32) for name, x in known.items()}


def some_of(rows: np.ndarray, judged: Judged) -> np.ndarray:
    """Rows, or a part of them where there are many."""
    shuffled = np.random.default_rng(judged.seed).permutation(rows)
    return np.sort(shuffled[: max(1000, START // judged.rows.shape[1])])


def judge(
    judged: Judged,
    variables: Variables,
    rival: Mapping[str, np.ndarray],
    temperatures: Mapping[int, float] | None = None,
    turns: Sequence[dict[str, Any]] = (),
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Parts of a report: gains by kind of task and size of buffer, and calibration. With them, the answers that
    thresholds follow from.

    Args:
      judged: on what.
      variables: of the adapter.
      rival: calibrated()'s.
      temperatures: by size. None: that of no images is of all images, the others are of even tasks, and what is said of
        these is of odd tasks.
      turns: what was found overall where other domains validated.
    """
    gain, answers, labels, rights, owners = {}, {n: [] for n in SIZES}, [], [], []
    kinds = [(number, shares) for number in dict.fromkeys((1, judged.most_domains("val"))) for shares in SHARES]
    for stream, (number, shares) in enumerate(kinds, 2):
        spec = EpisodeSpec(number, FULL // number, judged.queries, shares=shares, skip_small=True)
        draw = judged.draw("val", stream, spec)
        if len(draw.domains) < number:
            continue
        plan = sample_plans(draw, range(TASKS), Context(number * spec.per_domain))
        y = judged.store.labels[plan.query]
        found = {n: judged.answers(variables, Plan(plan.support[:, :n], plan.query)) for n in SIZES}
        given = [*found.values(), by_rival(judged, rival, plan)]
        rights.append(np.stack([(z.argmax(-1) == y).mean(1) for z in given]))
        owners.append(judged.store.row_domains()[plan.query[:, 0]])
        gain[f"{number} domain{'s' * (number > 1)}, {SHARES[shares]}"] = _gain(rights[-1], owners[-1])
        labels.append(y)
        for n, z in found.items():
            answers[n].append(z)
    if not rights:
        raise UserError(f"domains: none has {FULL + judged.queries} images, so nothing can be judged; give more")
    right, owner = np.concatenate(rights, axis=1), np.concatenate(owners)
    each = [_gain(right, owner), *turns]
    overall = _over_turns(each)
    of_domains = [100 * float((right[-2] - right[0])[owner == d].mean()) for d in np.unique(owner)]
    by_domain = [turn[str(FULL)][0] for turn in each] if turns else of_domains
    y, calibration, confident = np.stack(labels), {}, {}
    if not temperatures:  # of the classifier alone, all domains tell
        some = some_of(np.arange(len(judged.rows)), judged)
        temperatures = {0: least_temperature(judged.rows[some, : judged.store.num_classes], judged.store.labels[some])}
    for n in SIZES:
        calibration[str(n)], *confident[n] = _calibrated(np.stack(answers[n]), y, temperatures.get(n))
    confidence, right = confident[FULL if overall[str(FULL)][1] > 0 else 0]
    order = np.argsort(-confidence, kind="stable")
    return {"gain": gain, "overall": overall, "by_domain": by_domain, "calibration": calibration}, {
        "confidence": confidence[order], "right": right[order],
    }  # fmt: skip


def by_rival(judged: Judged, rival: Mapping[str, np.ndarray], plan: Plan) -> np.ndarray:
    """The logits [tasks, queries, classes] of the strongest rival without training: mlls with the whole buffer."""
    z = judged.rows[:, : judged.store.num_classes] * rival["scale"] + rival["bias"]
    trained = np.broadcast_to(rival["shares"], (len(plan.support), z.shape[1]))
    p = scipy.special.softmax(z[plan.support], axis=-1)
    shares = np.asarray(by_em(p, trained, np.ones(plan.support.shape, np.float32)))
    return z[plan.query] + np.log(np.maximum(shares, FLOOR) / trained)[:, None]


def _gain(right: np.ndarray, owner: np.ndarray) -> dict[str, Any]:
    """The accuracy of answers [SIZES + 1, tasks] without a buffer, and mean and 95 % interval of what is gained.

    That is by size; "em": by the last row, the rival; "over_em": the gain with FULL images less the rival's. The
    interval is over the domains of the queries [tasks] and over the tasks.
    """
    gains = np.concatenate([right - right[0], right[-2:-1] - right[-1:]])
    spans = 100 * np.stack([gains.mean(1), *metrics.interval_over_groups(gains, owner, RESAMPLES)], axis=1)
    names = *map(str, SIZES), "em", "over_em"
    return {"plain": 100 * float(right[0].mean()), **dict(zip(names, spans.tolist(), strict=True))}


def _over_turns(each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One domain's gains over all tasks. Of several, the mean, and the least and the largest instead of an interval."""
    if len(each) == 1:
        return each[0]
    means = {name: np.array([turn[name][0] for turn in each]) for name in each[0] if name != "plain"}
    return {
        "plain": float(np.mean([turn["plain"] for turn in each])),
        **{name: [float(x) for x in (gains.mean(), gains.min(), gains.max())] for name, gains in means.items()},
    }


def _calibrated(
    logits: np.ndarray, labels: np.ndarray, temperature: float | None
) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """The calibration of answers [kinds, tasks, queries, classes]; and confidences, and what is right.

    A temperature that is not given is that of even tasks, and the rest is of odd ones.
    """
    (z, y), (held, of_held) = (
        (logits[:, start::step].reshape(-1, logits.shape[-1]), labels[:, start::step].ravel())
        for start, step in ((0, 2), (0, 1) if temperature else (1, 2))
    )
    temperature = temperature or least_temperature(z, y)
    right = held.argmax(1) == of_held
    before, after = (probabilities(held, t).max(1) for t in (1.0, temperature))
    return {
        "temperature": temperature,
        "ece": [metrics.expected_calibration_error(confidence, right) for confidence in (before, after)],
        "risk": {str(coverage): metrics.risk_at(coverage, after, right) for coverage in metrics.COVERAGES},
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


def as_table(report: Mapping[str, Any]) -> str:
    """The gains of a report as lines of a table."""
    head = ["accuracy, %", "plain", *(f"{n} images" for n in SIZES[1:]), f"EM, {FULL}", f"over EM, {FULL}"]
    lines = [
        [name, f"{row['plain']:.1f}", *(_span(row[column]) for column in (*map(str, SIZES[1:]), "em", "over_em"))]
        for name, row in [*report["gain"].items(), ("all", report["overall"])]
    ]
    return "\n".join(aligned([head, *lines]))


def in_words(report: Mapping[str, Any]) -> str:
    """A report as one paragraph."""
    gain, overall, cal = report["gain"], report["overall"][str(FULL)], report["calibration"]
    known, verdict = report["headroom"], f"over all tasks with {FULL} images it gains {_span(overall)} points"
    if overall[1] > 0:
        said = [f"Trusted: {verdict}."]
    else:
        said = [f"Not trusted: {verdict}. So devices give the classifier's own answers. More domains help, a style of "
                f"earlier maps, and more minutes where steps were left out: {report['steps']} of {report['asked']} are "
                "done."]  # fmt: skip
    least, most = min(report["by_domain"]), max(report["by_domain"])
    said.append(f"By validation domain that is {least:+.1f} to {most:+.1f}.")
    unknown = f"Fewer than two domains have {FIRST} images: the headroom is not known."
    said.append(Diagnosis(known, 0.0).headroom() if known else unknown)
    if report["right"] > BY_HEART:
        said.append(f"The classifier knows these images by heart: {report['right']:.1%} of its answers are right. "
                    "An adapter learns nothing from them; give images that it was not trained on.")  # fmt: skip
    for name, row in gain.items():
        sizes = [f"{_span(row[str(n)])} with {n}" for n in SIZES[1:]]
        said.append(f"{name}: {row['plain']:.1f} % are right without a buffer, {', '.join(sizes)} images; "
                    f"EM without training gives {_span(row['em'])} with {FULL}.")  # fmt: skip
    harms = [f"{name} with {n} images" for name, row in gain.items() for n in SIZES[1:] if row[str(n)][2] < 0]
    said.append(f"These surely lose: {'; '.join(harms)}." if harms else "No kind of task surely loses.")
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
