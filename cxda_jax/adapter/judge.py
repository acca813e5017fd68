"""Judges adapters on domains from which they learnt nothing: gains and how sure they are, calibration and drift.

An adapter that fit() returns has learnt from all domains, so no domain is left to judge it. Its report is of others in
its place: the domains are dealt into turns, and in each turn an adapter that learnt from the other domains is judged.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
import scipy.special

from cxda_jax.adapter.adapter import PLAIN, SIZES, apart, standardised
from cxda_jax.adapter.device import CELLS, method_of, probabilities
from cxda_jax.adapter.diagnosis import FIRST, SHARES, STEPS, Diagnosis, by_em, diagnose, in_blocks, kind_of
from cxda_jax.data.episodes import Context, Draw, EpisodeSpec, Plan, domains_for, in_shares, sample_plans
from cxda_jax.data.store import DomainStore
from cxda_jax.errors import UserError
from cxda_jax.machine import backend
from cxda_jax.methods import unmix
from cxda_jax.methods.label_shift import FLOOR, shares_by_answers, temperature_of
from cxda_jax.nets.shares import LARGEST, LOG_FLOOR, OWN, SMALLEST, bounded
from cxda_jax.training import metrics
from cxda_jax.training.selection import with_floor
from cxda_jax.types import ADAPTER, Array, Images, Variables

TASKS = 200  # of a kind
START = 2**21  # numbers in the arrays from which a calibration, and the start of the training, are measured
FULL = SIZES[-1]
WAYS = ("learnt", "careful", "style", "none")  # what is taken from a buffer, the one to prefer first
ANSWERS = (PLAIN, *map(str, SIZES))
RIVALS = ("em", "own_em", "unmix", "refit")  # EM with FULL images: of the classifier's answers; of those corrected by
# the own style; and of these in each of some clusters of the keys. A last layer that learns from the domains, no buffer
LEVELS = np.arange(1, 101) / 100  # coverages, surest answers first, at which errors are counted by domain
DRAWS = 30  # buffers that are drawn of each domain, to find the limit of drift
MOST_DOMAINS = 100  # from which that limit follows
DIAGNOSED = 2**19  # logits that the diagnosis reads at most: more would take it minutes


class FitData(NamedTuple):
    """Images for fit(). Domains of split "train" teach an adapter, those of "val" choose, and those of "test" judge.

    Attributes:
      store: whose images are logits and style, [n, 1, 1, classes + d].
      queries: of a task.
      seed: of the tasks.
      corrected: whether the logits are corrected by the own style. Then Correction.moves() stands before the style,
        [n, 1, 1, 2 classes + d].
      one_set: whether the domains are random parts of one set.
      features: of the classifier's last layer, [n, d], if they are known.
    """

    store: DomainStore
    queries: int
    seed: int
    corrected: bool = False
    one_set: bool = False
    features: np.ndarray | None = None

    @property
    def rows(self) -> np.ndarray:
        return self.store.images[:, 0, 0]

    @property
    def logits(self) -> np.ndarray:
        return self.rows[:, : self.store.num_classes]

    @property
    def style(self) -> np.ndarray:
        return self.rows[:, (1 + self.corrected) * self.store.num_classes :]

    def rows_of(self, *splits: str) -> np.ndarray:
        """The numbers of the images of some splits."""
        domains = np.concatenate([self.store.domains(split) for split in splits])
        return np.flatnonzero(np.isin(self.store.row_domains(), domains))

    def most_domains(self, split: str) -> int:
        """The most domains, up to five, that a task can have; 0 where none has images enough."""
        sizes = np.diff(self.store.offsets)[self.store.domains(split)]
        return max(k * int((sizes >= FULL // k + self.queries).sum() >= k) for k in range(1, 6))

    def draw(self, split: str, stream: int, spec: EpisodeSpec) -> Draw:
        domains = domains_for(spec, self.store, split)[0]
        return Draw(spec, self.store.offsets, domains, self.seed, stream, self.store.labels)

    def keyed(self, variables: Variables) -> tuple["FitData", Variables]:
        """The images with their keys in place of the style, and variables that answer the same from these. A style may
        have a hundred times as many numbers, and fit() does not change how keys are made of it."""
        keys, count = keys_of(self, variables), (1 + self.corrected) * self.store.num_classes
        rank, size = keys.shape[1], max(float(np.abs(keys).max()) / LARGEST, SMALLEST)  # so that no key is clipped
        images = np.concatenate([self.rows[:, :count], keys], axis=1)[:, None, None]
        own, stats = variables["params"][ADAPTER], variables["batch_stats"][ADAPTER]
        stats = {**stats, "mean": np.zeros(rank, np.float32), "std": np.full(rank, size, np.float32)}
        if OWN in stats:
            stats[OWN] = {"content": stats[OWN]["content"]}  # all that is read where images are corrected already
        found = {ADAPTER: {**own, "kernel": size * math.sqrt(rank) * np.eye(rank, dtype=np.float32)}}
        data = self._replace(store=self.store._replace(images=images))
        return data, {"params": {**variables["params"], **found}, "batch_stats": {ADAPTER: stats}}

    def answers(self, variables: Variables, plan: Plan, most: int = FULL) -> np.ndarray:
        """The adapted logits [tasks, queries, classes]; without a support those of the classifier.

        Of a larger support the first `most` images count.
        """
        if not (count := min(most, plan.support.shape[1])):
            return self.logits[plan.query]
        log_floor = variables["batch_stats"][ADAPTER].get(LOG_FLOOR)
        # Without the floor: a program that reads one would be compiled beside the one that all trainings share.
        given = jax.device_put(with_floor(variables, 0))
        program = _answering(self.store.num_classes, self.corrected)
        # One program answers with buffers of all sizes.
        present, places = np.arange(FULL) < count, np.resize(np.arange(count), FULL)

        def of_block(support: np.ndarray, query: np.ndarray) -> Array:
            return program(given, present, self.rows[support[:, places]], self.rows[query])

        answer = in_blocks(of_block, *plan)
        return answer if log_floor is None else self.floored(variables, plan, answer, log_floor)

    def floored(self, variables: Variables, plan: Plan, answer: np.ndarray, log_floor: Any) -> np.ndarray:
        """An answer of answers(), given without a floor, as it is with a floor of this logarithm."""
        z = self.logits[plan.query] * np.exp(-np.float32(variables["params"][ADAPTER]["log_t"]))
        return np.asarray(bounded(z, answer, np.float32(log_floor)))


class Turn(NamedTuple):
    """An adapter, and the domains of split "test" that judge it beside its rivals.

    Attributes:
      judged: on what. If its logits are corrected by the own style, those of the other domains are by what others
        taught.
      plain: the same with the classifier's own logits.
      variables: of the adapter.
      rivals: what EM knows of each of the two, by calibrated(): "em" of the classifier's own logits, and of the
        corrected ones "own_em", which "unmix" knows too.
      ways: variables by WAYS without a floor, of which settle() chooses.
      refit: logits [n, classes] by a last layer that the other domains taught, if the features are known.
    """

    judged: FitData
    plain: FitData
    variables: Variables
    rivals: Mapping[str, Mapping[str, np.ndarray]]
    ways: Mapping[str, Variables] = {}
    refit: np.ndarray | None = None


class AnsweredTasks(NamedTuple):
    """Tasks of one kind, and what was answered.

    Attributes:
      query: rows [tasks, queries].
      labels: [tasks, queries].
      logits: [tasks, queries, classes]: of the classifier alone, PLAIN, and of the adapter by size of the buffer.
      right: the right answers of each task [tasks], of `logits` and of RIVALS.
      owner: the domain of the queries, [tasks].
      turn: the number of the turn, [tasks].
    """

    query: np.ndarray
    labels: np.ndarray
    logits: Mapping[str, np.ndarray]
    right: Mapping[str, np.ndarray]
    owner: np.ndarray
    turn: np.ndarray


@functools.cache
def _answering(classes: int, corrected: bool) -> Callable[..., Array]:
    method = method_of(classes, corrected)

    def answering(variables: Variables, present: Array, support: Array, query: Array) -> Array:
        def one(task: tuple[Array, Array]) -> Array:
            support, query = (Images(x[:, None, None], jnp.zeros(len(x), jnp.int32)) for x in task)
            adapted = method.adapt(variables, support.replace(present=present), jax.random.key(0))
            return method.predict(adapted, query)

        cells = support.shape[1] * max(query.shape[1], classes)
        return jax.lax.map(one, (support, query), batch_size=min(len(query), max(1, CELLS // cells)))

    return backend.jit(answering, effort=2)


def headroom(judged: FitData) -> Mapping[str, Mapping[str, float]] | None:
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
    return diagnose(some, judged.logits[rows], 0.0, seed=judged.seed, tasks=tasks).table


def diagnosis(judged: FitData) -> str:
    """headroom() as a table, and in words."""
    if not (known := headroom(judged)):
        raise UserError(f"domains: fewer than two have {FIRST} images; give more of each")
    right = judged.logits.argmax(1) == judged.store.labels
    return str(Diagnosis(known, float(right.mean()), "these images"))


def report_on(
    judged: FitData,
    corrected: FitData,
    variables: Variables,
    turns: Sequence[Turn],
    plans: Mapping[str, Mapping[int, Plan]],
    facts: Mapping[str, Any],
    known: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A report, and the arrays that an adapter keeps of what it was judged on.

    Args:
      judged: all images.
      corrected: the same, corrected by the own style if that pays.
      variables: of the adapter that fit() returns.
      turns: that judge, and no domain judges in two of them.
      plans: the tasks, of planned().
      facts: of the training, which the report repeats.
      known: headroom()'s.
    """
    rival, own = (calibrated(data, np.arange(len(data.rows))) for data in (judged, corrected))
    found, kept = judge(turns, plans)
    stats = jax.device_get(variables["batch_stats"][ADAPTER])
    scaled = standardised(judged.style, stats["mean"], stats["std"])
    span = found["overall"][str(FULL)]
    expected = metrics.after_selection(span, len(found["by_domain"])) + (facts["beyond_turns"] if span[1] > 0 else 0.0)
    told, means = drift(judged, scaled, [turn.judged.store.domains("test") for turn in turns])
    return {
        "images": len(judged.rows),
        "right": float((judged.logits.argmax(1) == judged.store.labels).mean()),
        "domains": len(judged.store.split),
        "turns": len(turns), **facts, "tasks": TASKS, "headroom": known, **found, "expected": expected, "drift": told,
    }, {**means, **kept, **rival, **{f"own_{name}": own[name] for name in ("scale", "bias")}}  # fmt: skip


def calibrated(judged: FitData, rows: np.ndarray) -> dict[str, np.ndarray]:
    """What the rival knows of such images: 1 / T, b and t of mlls() in methods/label_shift.py."""
    some, labels = some_of(rows, judged), judged.store.labels
    scale, bias = temperature_of(judged.logits[some], labels[some])
    known = {"scale": scale, "bias": bias, "shares": shares_by_answers(labels[rows], judged.logits[some], scale)}
    return {name: np.asarray(x, np.float32) for name, x in known.items()}


def some_of(rows: np.ndarray, judged: FitData, most: int = 0) -> np.ndarray:
    """The rows, or a random part of them where there are more than `most`; 0: as many as START allows."""
    shuffled = np.random.default_rng(judged.seed).permutation(rows)
    return np.sort(shuffled[: most or max(1000, START // judged.rows.shape[1])])


def judge(
    turns: Sequence[Turn],
    plans: Mapping[str, Mapping[int, Plan]],
    temperatures: Mapping[str, float] | None = None,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Parts of a report: gains by kind of task and size of buffer, and calibration. With them, the errors by domain
    and confidence, from which thresholds follow.

    Args:
      turns: that judge.
      plans: the tasks, of planned().
      temperatures: by name of ANSWERS. None: those of the least cross-entropy. What is said of a turn's answers is then
        by the temperature of the other turns.
    """
    store = turns[0].judged.store
    kinds = [(kind, i) for kind, of_kind in plans.items() for i in of_kind]
    each = [*backend.in_threads(lambda kind, i: ask(turns[i], plans[kind][i], i), *zip(*kinds, strict=True))]
    asked = {kind: _joined([x for x, (own, _) in zip(each, kinds, strict=True) if own == kind]) for kind in plans}
    whole = _joined([*asked.values()])
    calibration = {name: _calibrated(whole, name, (temperatures or {}).get(name)) for name in ANSWERS}
    overall = _gain(whole)
    groups, which = np.unique(whole.owner, return_inverse=True)
    gained = np.bincount(which, whole.right[str(FULL)] - whole.right[PLAIN]) / np.bincount(which)
    temperature = {name: calibration[name]["temperature"] for name in (PLAIN, str(FULL))}
    return {
        "gain": {name: _gain(part) for name, part in asked.items()},
        "overall": overall,
        "by_domain": {store.domain_names[d]: 100 * float(x) for d, x in zip(groups, gained, strict=True)},
        "calibration": calibration,
    }, _curves(whole, temperature)  # fmt: skip


def planned(turns: Sequence[Turn]) -> dict[str, dict[int, Plan]]:
    """The tasks that turns judge by, by kind and number of the turn, where its domains have the images for them."""
    most = min(turn.judged.most_domains("test") for turn in turns)
    plans: dict[str, dict[int, Plan]] = {}
    for stream, (number, shares) in enumerate([(n, s) for n in dict.fromkeys((1, most)) for s in SHARES if n], 2):
        for i, turn in enumerate(turns):
            spec = EpisodeSpec(number, FULL // number, turn.judged.queries, shares=shares, skip_small=True)
            draw = turn.judged.draw("test", stream, spec)
            if len(draw.domains) >= number:
                tasks = range(-(-TASKS // len(turns)))
                plan = sample_plans(draw, tasks, Context(number * spec.per_domain))
                plans.setdefault(kind_of(number, shares), {})[i] = plan
    if not plans:
        what = f"{FULL + turns[0].judged.queries} images"
        raise UserError(f"domains: too few have {what}, so nothing can be judged; give more images of each")
    return plans


def ask(turn: Turn, plan: Plan, number_of_turn: int) -> AnsweredTasks:
    """The answers of a turn to tasks."""
    judged = turn.judged
    y = judged.store.labels[plan.query]
    found = {PLAIN: turn.plain.logits[plan.query]}
    found |= {str(n): judged.answers(turn.variables, plan, n) for n in SIZES}
    em = by_rival(turn.plain.logits, turn.rivals["em"], plan)
    rivals = {
        "em": em,
        "own_em": by_rival(judged.logits, turn.rivals["own_em"], plan) if judged.corrected else em,
        "unmix": by_unmixing(judged, keys_of(judged, turn.variables), turn.rivals["own_em"], plan),
    }
    if turn.refit is not None:
        rivals["refit"] = turn.refit[plan.query]
    right = {name: (z.argmax(-1) == y).mean(1) for name, z in {**found, **rivals}.items()}
    owner = judged.store.row_domains()[plan.query[:, 0]]
    return AnsweredTasks(plan.query, y, found, right, owner, np.full(len(y), number_of_turn))


def _joined(parts: Sequence[AnsweredTasks]) -> AnsweredTasks:
    joined = jax.tree.map(lambda *arrays: np.concatenate(arrays), *(part._asdict() for part in parts))
    return AnsweredTasks(**joined)


def by_rival(logits: np.ndarray, rival: Mapping[str, np.ndarray], plan: Plan) -> np.ndarray:
    """The logits [tasks, queries, classes] of the strongest rival without training: mlls with the whole buffer."""
    z = logits * rival["scale"] + rival["bias"]
    trained = np.broadcast_to(rival["shares"], (len(plan.support), z.shape[1]))
    p = scipy.special.softmax(z[plan.support], axis=-1)
    shares = by_em(p, trained, np.ones(plan.support.shape, np.float32))
    return z[plan.query] + np.log(np.maximum(shares, FLOOR) / trained)[:, None]


def keys_of(judged: FitData, variables: Variables) -> np.ndarray:
    """The keys of all images, [n, rank], as an adapter with these variables has them."""
    kernel, stats = variables["params"][ADAPTER]["kernel"], jax.device_get(variables["batch_stats"][ADAPTER])
    return standardised(judged.style, stats["mean"], stats["std"]) @ np.asarray(kernel) / np.sqrt(judged.style.shape[1])


def of_style(variables: Variables, start: Variables) -> Variables:
    """The variables that read the style again, for those that FitData.keyed() made of `start`, or that learnt since."""
    own, stats = variables["params"][ADAPTER], variables["batch_stats"][ADAPTER]
    before, read = start["params"][ADAPTER], start["batch_stats"][ADAPTER]
    kernel, std = np.asarray(own["kernel"]), np.asarray(stats["std"])
    kernel = np.asarray(before["kernel"]) @ (kernel / std[:, None]) / math.sqrt(len(std))
    stats = {**stats, **{name: read[name] for name in ("mean", "std", OWN) if name in read}}
    return {"params": {ADAPTER: {**own, "kernel": kernel}}, "batch_stats": {ADAPTER: stats}}


def by_unmixing(judged: FitData, keys: np.ndarray, rival: Mapping[str, np.ndarray], plan: Plan) -> np.ndarray:
    """The logits [tasks, queries, classes] of EM in the cluster of each query. k-means finds the clusters of a buffer's
    keys [n, rank]."""
    z = judged.logits * rival["scale"] + rival["bias"]
    p = scipy.special.softmax(z[plan.support], axis=-1)
    shares = np.asarray(_unmixing()(p, keys[plan.support], keys[plan.query], rival["shares"]))
    return z[plan.query] + np.log(np.maximum(shares, FLOOR) / rival["shares"])


@functools.cache
def _unmixing() -> Callable[..., Array]:
    """The shares of the classes around each query [queries, classes], of a buffer with posteriors p [n, classes]; for
    several tasks."""

    def unmixed(p: Array, keys: Array, asked: Array, trained: Array) -> Array:
        centres, shares = unmix.shares_in_clusters(p, keys, jnp.ones(len(p)), trained, unmix.CLUSTERS, STEPS, unmix.FEW)
        return shares[unmix.distances(asked, centres).argmin(1)]

    return backend.jit(jax.vmap(unmixed, (0, 0, 0, None)), effort=1)


def _gain(asked: AnsweredTasks) -> dict[str, Any]:
    """The accuracy of the classifier alone, and what is gained, with their 95 % intervals for the mean of new domains.

    That is by size, and by RIVALS; "over_em": the gain with FULL images less the rival's; "over_0": less that without a
    buffer.
    """
    plain = asked.right[PLAIN]
    rows = {name: x - plain for name, x in asked.right.items() if name != PLAIN}
    rows |= {f"over_{name}": rows[str(FULL)] - rows[name] for name in ("0", *RIVALS) if name in rows}
    spans = 100 * metrics.interval_over_groups(np.stack([plain, *rows.values()]), asked.owner)
    return {"plain": float(spans[0, 0]), **dict(zip(rows, spans[1:].tolist(), strict=True))}


def _calibrated(asked: AnsweredTasks, name: str, given: float | None) -> dict[str, Any]:
    """The calibration of the answers of this name in ANSWERS."""
    z, y = asked.logits[name].reshape(-1, asked.logits[name].shape[-1]), asked.labels.ravel()
    turn, right = np.repeat(asked.turn, asked.labels.shape[1]), z.argmax(1) == y

    def least(rows: np.ndarray) -> float:
        some = rows[:: max(1, rows.size * z.shape[1] // START)]
        return least_temperature(z[some], y[some])

    temperature = given or least(np.arange(len(y)))
    before, after = probabilities(z, 1.0).max(1), np.empty(len(y))
    for i in np.unique(turn):
        other = np.flatnonzero(turn != i)
        after[turn == i] = probabilities(z[turn == i], given or least(other)).max(1)
    return {
        "temperature": temperature,
        "ece": [metrics.expected_calibration_error(confidence, right) for confidence in (before, after)],
        "risk": {str(coverage): metrics.risk_at(coverage, after, right) for coverage in metrics.COVERAGES},
    }


def _curves(asked: AnsweredTasks, temperatures: Mapping[str, float]) -> dict[str, np.ndarray]:
    """How many images of each domain are answered, and how many of these wrongly, at falling thresholds of confidence.

    The first axis is of the classifier alone, and with a full buffer: `thresholds` [2, levels], `accepted` and `wrong`
    [2, domains, levels]. An image that was asked more than once counts as one.
    """
    owner, query = np.repeat(asked.owner, asked.query.shape[1]), asked.query.ravel()
    (_, which, times), domains = np.unique(query, return_inverse=True, return_counts=True), np.unique(owner)
    weight, group = 1 / times[which], np.searchsorted(domains, owner)
    found: dict[str, list[Any]] = {"thresholds": [], "accepted": [], "wrong": []}
    for name, temperature in temperatures.items():
        z = asked.logits[name].reshape(len(query), -1)
        confidence, wrong = probabilities(z, temperature).max(1), z.argmax(1) != asked.labels.ravel()
        thresholds = np.quantile(confidence, 1 - LEVELS)
        level = np.searchsorted(-thresholds, -confidence)  # the first at which it is accepted
        for what, counted in (("accepted", weight), ("wrong", weight * wrong)):
            counts = np.zeros((len(domains), len(LEVELS) + 1))
            np.add.at(counts, (group, level), counted)
            found[what].append(counts[:, :-1].cumsum(1))
        found["thresholds"].append(thresholds)
    return {name: np.array(x, np.float32) for name, x in found.items()}


def least_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """The temperature of the least cross-entropy, between exp(-5) and exp(5)."""
    below = (logits - logits.max(1, keepdims=True)).T.copy()  # sums over classes run along images
    own = below[labels, np.arange(len(labels))]

    def cross_entropy(log_t: float) -> float:
        scale = np.float32(np.exp(-log_t))
        return float(np.mean(np.log(np.exp(below * scale).sum(0)) - own * scale))

    found: Any = scipy.optimize.minimize_scalar(cross_entropy, bounds=(-5, 5), method="bounded")
    return float(np.exp(found.x))


def drift(
    judged: FitData, scaled: np.ndarray, tests: Sequence[np.ndarray]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A part of a report, and what an adapter knows of its domains, from standardised styles [n, d] of the store.

    The limit is the largest distance of a domain's buffer from the other domains. Buffers have 5, 20 or 100 images with
    any shares of the classes. `tests` are domains by turn: their buffers beyond the limit of the other domains are
    false alarms.
    """
    offsets, chosen = judged.store.offsets, np.arange(len(judged.store.split))[:MOST_DOMAINS]
    means = np.stack([scaled[slice(*offsets[d : d + 2])].mean(0) for d in chosen])
    within = np.mean([scaled[slice(*offsets[d : d + 2])].var(0) for d in chosen], axis=0)
    draw = judged.draw("test", 1, EpisodeSpec(shares="any"))
    buffers = [[scaled[in_shares(draw, i, d)[: SIZES[1 + i % 3]]] for i in range(DRAWS)] for d in chosen]

    def distances(domain: int, others: np.ndarray) -> list[float]:
        near = means[others]
        return [apart(buffer, near.mean(0), near.var(0, ddof=1), within) for buffer in buffers[domain]]

    def limit_of(domains: np.ndarray) -> float:
        return max(max(distances(d, domains[domains != d])) for d in domains)

    told: dict[str, Any] = {"limit": None, "false_alarms": None}
    if len(chosen) >= 4:
        told["limit"] = limit_of(chosen)
        beyond = []
        for test in (np.intersect1d(test, chosen) for test in tests):
            others = np.setdiff1d(chosen, test)
            if len(test) and len(others) >= 3:
                limit = limit_of(others)
                beyond += [x > limit for d in test for x in distances(d, others)]
        told["false_alarms"] = float(np.mean(beyond)) if beyond else None
    known = {"centre": means.mean(0), "between": means.var(0, ddof=1), "within": within}
    return told, {name: x.astype(np.float32) for name, x in known.items()}
