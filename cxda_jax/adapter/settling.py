"""What an adapter takes from a buffer, and how far a floor bounds it, as domains say that it did not learn from."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cxda_jax.adapter.adapter import PLAIN
from cxda_jax.adapter.judge import WAYS, Turn, planned
from cxda_jax.data.episodes import Plan
from cxda_jax.data.store import DomainStore
from cxda_jax.machine import backend
from cxda_jax.training import metrics
from cxda_jax.training.selection import with_floor

FLOORS = (0.0, 0.2, 0.5, 1.0)  # from all that a buffer may do to nothing
RARE = 5  # a class is rare where a full buffer has at most so many images of it
# A kind of tasks tells of rare classes by ASKED images of OWNERS domains, or fewer images where only some turns tell. A
# domain tells where it has LEAST such images beside its buffer.
ASKED, OWNERS, LEAST = 20, 2, 3
LOST = 2.0  # points that the recall of rare classes may lose


class Rare(NamedTuple):
    """What becomes of rare classes in the kind of tasks that is worst for them.

    Attributes:
      kind: of the tasks.
      images: distinct ones that were asked for.
      before: the part of them that the classifier gets right, in per cent, on the mean of domains.
      change: by the adapter in points, with its 95 % interval over domains.
    """

    kind: str
    images: int
    before: float
    change: list[float]


class Settled(NamedTuple):
    """What is taken from a buffer.

    Attributes:
      turns: each with the variables that the domains of the others chose.
      way: of WAYS, that all domains chose.
      floor: likewise.
      worst: what becomes of rare classes with what the turns chose; None: too few images are of such classes.
      floors: how their recall changes for all turns with a floor, and the mean gain, by all floors up to that which
        keeps rare classes.
      plans: the tasks that the turns judge by, of planned().
    """

    turns: list[Turn]
    way: str
    floor: float
    worst: Rare | None
    floors: dict[str, dict[str, float | None]]
    plans: dict[str, dict[int, Plan]]

    @property
    def rare(self) -> float | None:
        """How the recall of rare classes changes, in points."""
        return self.worst.change[0] if self.worst else None

    @property
    def facts(self) -> dict[str, Any]:
        """What the report tells of it."""
        told = {"takes": self.way, "floor": self.floor, "rare": self.rare, "floors": self.floors}
        return {**told, "rare_in": self.worst and self.worst._asdict()}


class _Choice(NamedTuple):
    """A way and a floor, and the floor that keeps rare classes."""

    way: str
    floor: float
    kept: float


class _Asked(NamedTuple):
    """Tasks of one kind that a turn judges by; `rare` has those that can ask for rare classes, and asks for these."""

    turn: Turn
    number: int
    kind: str
    plan: Plan
    rare: Plan


def settle(turns: Sequence[Turn], floors: Sequence[float] = FLOORS) -> Settled:
    """Chooses by all domains, and for each turn by those of all others."""
    plans, everything = planned(turns), range(len(turns))
    tried = _Tried(turns, plans, floors)
    chosen = {i: tried.best([other for other in everything if other != i]) for i in everything}
    of_turns = [
        turn._replace(variables=with_floor(turn.ways[chosen[i].way], chosen[i].floor)) for i, turn in enumerate(turns)
    ]
    found, told = tried.best(everything), {}
    for x in (x for x in floors if x <= found.kept):
        with_x = {i: choice._replace(floor=x) for i, choice in chosen.items()}
        told[f"{x:g}"] = {"gain": float(tried.gain(with_x)[0]), "rare": tried.lost(with_x)}
    return Settled(of_turns, found.way, found.floor, tried.worst(chosen), told, plans)


class _Tried:
    """What ways and floors are worth, by the number of the turn."""

    def __init__(self, turns: Sequence[Turn], plans: Mapping[str, Mapping[int, Plan]], floors: Sequence[float]):
        store, rng, self.floors = turns[0].judged.store, np.random.default_rng(turns[0].judged.seed), floors
        self.labels, self.domains, self.turns = store.labels, store.row_domains(), len(turns)
        self.asked = [
            _Asked(turns[i], i, kind, plan, asking_for_rare(store, plan, rng))
            for kind, of_kind in plans.items()
            for i, plan in of_kind.items()
        ]
        self.right = functools.cache(self._right)  # serves all choices
        self._ahead((i, way, False) for way in WAYS[:-1] for i in range(len(self.asked)))

    def _ahead(self, given: Iterable[tuple[int, str, bool]]) -> None:
        """Calls right() with all of these arguments in several threads. It remembers the results."""
        for _ in backend.in_threads(lambda each: self.right(*each), given):
            pass

    def _right(self, at: int, way: str, rare: bool) -> Mapping[float, np.ndarray]:
        """The part of right answers of each task with each floor, by a way or by the classifier, PLAIN."""
        turn, plan = self.asked[at].turn, self.asked[at].rare if rare else self.asked[at].plan

        def right(z: np.ndarray) -> np.ndarray:
            return (z.argmax(-1) == self.labels[plan.query]).mean(1)

        if way in (PLAIN, WAYS[-1]):
            return dict.fromkeys(self.floors, right((turn.plain if way == PLAIN else turn.judged).logits[plan.query]))
        variables = turn.ways[way]
        if way != WAYS[0] and variables is turn.ways[WAYS[0]]:  # no more careful than what was learnt
            return self.right(at, WAYS[0], rare)
        answer = turn.judged.answers(variables, plan)  # the answers with a floor follow from those without
        floored = functools.partial(turn.judged.floored, variables, plan, answer)
        return {x: right(floored(np.log(x)) if x else answer) for x in self.floors}

    def best(self, numbers: Sequence[int]) -> _Choice:
        """The way with the largest mean gain on the domains of some turns, and its floor.

        By the lower bound of the gain, twenty domains took nothing where new ones gain six points. The floor is the
        smallest with which rare classes lose at most LOST, or no more than they lose without any buffer. It is smaller
        yet where no gain is sure with it.
        """

        def each(way: str, floor: float) -> Mapping[int, _Choice]:
            return dict.fromkeys(numbers, _Choice(way, floor, floor))

        first, without = self.floors[0], WAYS[-1]
        if not any(asked.number in numbers for asked in self.asked):
            return _Choice(WAYS[0], first, first)
        way = max(WAYS, key=lambda way: self.gain(each(way, first))[0])
        if way == without:
            return _Choice(way, first, first)
        least = min(-LOST, self.lost(each(without, first)) or 0.0)
        kept = next((x for x in self.floors if (self.lost(each(way, x)) or 0.0) >= least), self.floors[-1])
        up_to = [x for x in self.floors if x <= kept]
        sure = [x for x in up_to if self.gain(each(way, x))[1] > 0]
        some = [x for x in up_to if x < FLOORS[-1]]  # with the last of all floors nothing would be left to adapt
        return _Choice(way, (sure or some or up_to)[-1], kept)

    def gain(self, choices: Mapping[int, _Choice]) -> np.ndarray:
        """The mean gain of some turns in points over the classifier's own answers, and its interval."""
        return self._gained([i for i, asked in enumerate(self.asked) if asked.number in choices], choices)

    def lost(self, choices: Mapping[int, _Choice]) -> float | None:
        """How the recall of rare classes changes in the worst kind of tasks, in points."""
        worst = self.worst(choices)
        return worst.change[0] if worst else None

    def worst(self, choices: Mapping[int, _Choice]) -> Rare | None:
        """What becomes of rare classes in the kind of tasks that is worst for them."""
        kinds: dict[str, list[int]] = {}
        for i, asked in enumerate(self.asked):
            if asked.number in choices and len(asked.rare.query):
                kinds.setdefault(asked.kind, []).append(i)
        self._ahead((i, choices[self.asked[i].number].way, True) for own in kinds.values() for i in own)
        found, enough = [], ASKED * len(choices) / self.turns
        for kind, own in kinds.items():
            images = np.unique(np.concatenate([self.asked[i].rare.query for i in own]))
            if len(images) >= enough and len(np.unique(self.domains[images])) >= OWNERS:
                before = self._of_domains(own, [self.right(i, PLAIN, True)[self.floors[0]] for i in own], True)[0]
                change = self._gained(own, choices, rare=True).tolist()
                found.append(Rare(kind, len(images), float(before), change))
        return min(found, key=lambda each: each.change[0], default=None)

    def _gained(self, own: Sequence[int], choices: Mapping[int, _Choice], rare: bool = False) -> np.ndarray:
        """The gain of some of `asked` in points, on the mean of domains, and its interval."""
        chosen, first = [choices[self.asked[i].number] for i in own], self.floors[0]
        gains = [
            self.right(i, choice.way, rare)[choice.floor] - self.right(i, PLAIN, rare)[first]
            for i, choice in zip(own, chosen, strict=True)
        ]
        return self._of_domains(own, gains, rare)

    def _of_domains(self, own: Sequence[int], values: Sequence[np.ndarray], rare: bool) -> np.ndarray:
        """The mean over domains of a value of each task, and its interval, in hundredths."""
        plans = [self.asked[i].rare if rare else self.asked[i].plan for i in own]
        owner = np.concatenate([self.domains[plan.query[:, 0]] for plan in plans])
        return 100 * metrics.interval_over_groups(np.concatenate(values)[None], owner)[0]


def asking_for_rare(store: DomainStore, plan: Plan, rng: np.random.Generator) -> Plan:
    """The tasks of domains that have images of rare classes, with these images as queries. What the buffer shows of
    each class, and one image more, says how often it is asked for (the rule of succession)."""
    domains, kept, queries = store.row_domains(), [], []
    for task, (support, query) in enumerate(zip(*plan, strict=True)):
        first, end = store.offsets[domains[query[0]] :][:2]
        free = np.ones(end - first, bool)
        free[support[(support >= first) & (support < end)] - first] = False
        own = first + np.flatnonzero(free)
        count, left = (np.bincount(store.labels[rows], minlength=store.num_classes) for rows in (support, own))
        weight = (np.where(count <= RARE, count + 1, 0) / np.maximum(left, 1))[store.labels[own]]
        if np.count_nonzero(weight) >= LEAST:
            kept.append(task)
            queries.append(rng.choice(own, len(query), p=weight / weight.sum()))
    return Plan(plan.support[kept], np.array(queries, int).reshape(len(kept), plan.query.shape[1]))
