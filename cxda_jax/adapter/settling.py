"""What an adapter takes from a buffer, and how far a floor bounds it, as domains say that it did not learn from."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from cxda_jax.adapter.judge import WAYS, Turn, planned
from cxda_jax.data.episodes import Plan
from cxda_jax.training import metrics
from cxda_jax.training.selection import with_floor

FLOORS = (0.0, 0.2, 0.5, 1.0)  # from all that a buffer may do to nothing
RARE, ASKED = 5, 100  # a class is rare where a full buffer has at most RARE images of it; a kind of tasks tells of such
# classes if it asks for ASKED of their images
LOST = 2.0  # points that the recall of rare classes may lose


class Settled(NamedTuple):
    """What is taken from a buffer.

    Attributes:
      turns: each with the variables that the domains of the others chose.
      way: of WAYS, that all domains chose.
      floor: likewise.
      floors: by floor, up to this one: the mean gain, and the change of recall of rare classes in the worst kind of
        tasks, in points (None: too few of their images were asked).
    """

    turns: list[Turn]
    way: str
    floor: float
    floors: dict[str, dict[str, float | None]]


def settle(turns: Sequence[Turn], floors: Sequence[float] = FLOORS) -> Settled:
    """Chooses by all domains, and for each turn by those of all others."""
    tried = _Tried(turns)
    everything, of_turns = np.full(len(tried.turn), True), []
    for i, turn in enumerate(turns):
        way = tried.best(tried.turn != i, floors)
        floor = tried.bound(way, tried.turn != i, floors)
        of_turns.append(turn._replace(variables=with_floor(turn.ways[way], floor)))
    way = tried.best(everything, floors)
    floor = tried.bound(way, everything, floors)
    told = {f"{x:g}": {"gain": float(tried.gain(way, x, everything)[0]), "rare": tried.change(way, x, everything)}
            for x in floors if x <= floor}  # fmt: skip
    return Settled(of_turns, way, floor, told)


class _Tried:
    """The right answers of all turns to all tasks that they judge by. `tasks` below are bool, of all tasks."""

    def __init__(self, turns: Sequence[Turn]):
        self.asked = [(turns[i], plan) for of_kind in planned(turns).values() for i, plan in of_kind.items()]
        numbers = [(k, i) for k, of_kind in enumerate(planned(turns).values()) for i in of_kind]
        each = [len(plan.query) for _, plan in self.asked]
        self.kind, self.turn = np.repeat(np.array(numbers), each, axis=0).T
        store = turns[0].judged.store
        self.owner = np.concatenate([store.row_domains()[plan.query[:, 0]] for _, plan in self.asked])
        self.labels, self.rare = store.labels, self._joined(lambda _, plan: _is_rare(store.labels, plan))
        self.plain = self._joined(lambda turn, plan: self._right(turn.plain.logits[plan.query], plan))
        self.by = functools.cache(self._by)  # one evaluation of a way and floor serves all choices

    def _joined(self, of: Callable[[Turn, Plan], np.ndarray]) -> np.ndarray:
        return np.concatenate([of(turn, plan) for turn, plan in self.asked]).astype(float)

    def _right(self, logits: np.ndarray, plan: Plan) -> np.ndarray:
        return logits.argmax(-1) == self.labels[plan.query]

    def _by(self, way: str, floor: float) -> np.ndarray:
        """Which answers are right, [tasks, queries], with this way and floor."""

        def right(turn: Turn, plan: Plan) -> np.ndarray:
            if way == WAYS[-1]:
                return self._right(turn.judged.logits[plan.query], plan)
            return self._right(turn.judged.answers(with_floor(turn.ways[way], floor), plan), plan)

        return self._joined(right)

    def best(self, tasks: np.ndarray, floors: Sequence[float]) -> str:
        """The way with the largest mean gain over taking nothing.

        By its lower bound, twenty domains took nothing where new ones gain six points.
        """
        nothing = self.by(WAYS[-1], floors[0]).mean(1)
        gained = np.stack([self.by(way, floors[0]).mean(1) - nothing for way in WAYS])
        return WAYS[int(metrics.interval_over_groups(gained[:, tasks], self.owner[tasks])[:, 0].argmax())]

    def bound(self, way: str, tasks: np.ndarray, floors: Sequence[float]) -> float:
        """The least floor with which rare classes lose at most LOST; a smaller one where no gain is sure with it."""
        if way == WAYS[-1]:
            return floors[0]
        kept = next((floor for floor in floors if (self.change(way, floor, tasks) or 0) >= -LOST), floors[-1])
        sure = (floor for floor in reversed(floors) if floor <= kept and self.gain(way, floor, tasks)[1] > 0)
        return next(sure, kept)

    def gain(self, way: str, floor: float, tasks: np.ndarray) -> np.ndarray:
        """The mean gain in points over the classifier's own answers, and its interval."""
        gained = (self.by(way, floor) - self.plain).mean(1)
        return 100 * metrics.interval_over_groups(gained[None, tasks], self.owner[tasks])[0]

    def change(self, way: str, floor: float, tasks: np.ndarray) -> float | None:
        """How the recall of rare classes changes in the worst kind of tasks, in points."""
        gained = self.rare * (self.by(way, floor) - self.plain)
        changes, asks = (np.bincount(self.kind[tasks], x.sum(1)[tasks]) for x in (gained, self.rare))
        told = asks >= ASKED
        return float(100 * (changes[told] / asks[told]).min()) if told.any() else None


def _is_rare(labels: np.ndarray, plan: Plan) -> np.ndarray:
    """Whether the class of each query is rare in its buffer, [tasks, queries]."""
    return (labels[plan.support][:, None] == labels[plan.query][..., None]).sum(-1) <= RARE
