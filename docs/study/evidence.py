"""The study's records as scores of tasks, and paired differences of them with
95 % bootstrap intervals over the tasks."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cxda_jax import metrics
from cxda_jax.study import records
from cxda_jax.study.settings import parse

RECORDS = Path(__file__).parent / "records"
CHANGED = ("_changes", "_spread", "_cells")  # parts that hold a method several times, each under a name of its own
ALONE = ("cifar10_c_full", "cifar10_c_curves")  # parts of another width and length than the rest of their store
APART = (*CHANGED, *ALONE)  # ends of the names of parts whose trainings are not set beside the others of their store
Key = tuple[str, str]  # a label and a setting such as "context=5"; "" is the usual tasks


class Gap(NamedTuple):
    """A difference in points and its 95 % interval, of the mean over tasks and of the worst tenth of them.

    Attributes:
      avg, w10: the difference and both ends; w10 is None where it was not asked for.
      seeds: those that both have.
      of_seeds: the difference of the mean at each of them.
    """

    avg: tuple[float, float, float]
    w10: tuple[float, float, float] | None
    seeds: tuple[int, ...]
    of_seeds: tuple[float, ...]

    @property
    def sign(self) -> int:
        """1 where the interval of the mean and all seeds are above zero, -1 where they are below, else 0."""
        signs = {sign_of(self.avg), *(int(np.sign(x)) for x in self.of_seeds)}
        return signs.pop() if len(signs) == 1 else 0


@dataclasses.dataclass(eq=False)  # so that what follows from it can be cached
class Evidence:
    """The evidence in the records of one store.

    Attributes:
      store: its name; "(smoke)" is added where sizes are too small to mean anything.
      scores: by label and setting, then by seed: the accuracy of each task, [tasks].
      rows: the same keys: result.json's row of each.
      details: what docs/study/details.py found at seed 0.
    """

    store: str
    scores: dict[Key, dict[int, np.ndarray]]
    rows: dict[Key, dict[int, dict[str, Any]]]
    details: dict[str, Any]

    def has(self, *keys: Key) -> bool:
        return all(key in self.scores for key in keys)

    def level(self, key: Key, score: str) -> np.ndarray:
        """avg or w10 of each seed."""
        return np.array([row[score] for row in self.rows[key].values()])

    def gaps(self, pairs: Sequence[tuple[Key, Key]], worst: bool = False) -> dict[tuple[Key, Key], Gap]:
        """The first of each pair minus the second, averaged over the seeds that
        both have. What no seed has is left out.

        Args:
          worst: of the worst tenth of the tasks too, which takes longer.
        """
        wanted, keys = {}, {}
        for a, b in pairs:
            seeds = tuple(sorted(self.scores.get(a, {}).keys() & self.scores.get(b, {}).keys()))
            if seeds:
                wanted[a, b] = seeds
                for key in (a, b):
                    asked = {row[records.RECORDED]["query"] for row in (self.rows[k][s] for k in (a, b) for s in seeds)}
                    assert len(asked) == 1, f"{self.store}: {a} and {b} are of different tasks"
                    keys |= {(key, seed): self.scores[key][seed] for seed in seeds}
        if not wanted:
            return {}
        by_task = np.stack(
            [np.mean([self.scores[a][s] - self.scores[b][s] for s in of], axis=0) for (a, b), of in wanted.items()]
        )
        avg = [by_task.mean(1), *metrics.bootstrap_interval(by_task)]
        lowest = self.lowest(keys, wanted) if worst else {}
        return {
            (a, b): Gap(
                points([each[i] for each in avg]),
                lowest.get((a, b)),
                seeds,
                tuple(round(100 * float((self.scores[a][s] - self.scores[b][s]).mean()), 6) for s in seeds),
            )
            for i, ((a, b), seeds) in enumerate(wanted.items())
        }

    @staticmethod
    def lowest(
        keys: dict[tuple[Key, int], np.ndarray], wanted: dict[tuple[Key, Key], tuple[int, ...]]
    ) -> dict[tuple[Key, Key], tuple[float, float, float]]:
        """The same of the worst tenth of the tasks, from the scores of all keys and seeds."""
        drawn = dict(zip(keys, metrics.bootstrap_worst_decile(np.stack(list(keys.values()))), strict=True))
        found = {}
        for (a, b), seeds in wanted.items():
            exact = np.mean([metrics.worst_decile(keys[a, s]) - metrics.worst_decile(keys[b, s]) for s in seeds])
            samples = np.mean([drawn[a, s] - drawn[b, s] for s in seeds], axis=0)
            found[a, b] = points([float(exact), *np.percentile(samples, [2.5, 97.5]).tolist()])
        return found


def points(shares: Sequence[float]) -> tuple[float, float, float]:
    """Shares as points; rounded, so that the order of sums does not show."""
    mean, low, high = (round(100 * float(share), 6) + 0.0 for share in shares)
    return mean, low, high


def sign_of(gap: tuple[float, float, float]) -> int:
    """1 where the whole interval is above zero, -1 where it is below, 0 where it holds zero."""
    return (gap[1] > 0) - (gap[2] < 0)


def load(folder: Path = RECORDS) -> dict[str, Evidence]:
    """The evidence of each store, and apart from it that of changes to one method."""
    found: dict[str, Evidence] = {}
    for path in sorted(folder.glob("*.records")):
        for one in records.read(path):
            part = path.stem.rpartition("-")[0]
            changed = part.endswith(CHANGED)
            store = part if part.endswith(APART) else one.row["data_name"] + " (smoke)" * bool(one.row.get("smoke"))
            evidence = found.setdefault(store, Evidence(store, {}, {}, {}))
            setting = one.row["setting"]
            label = one.run.split("/")[-2] if changed else parse(setting).left_out_of(one.row["label"])
            key = label, setting
            # Records that others send may hold what is there already. The first count.
            evidence.scores.setdefault(key, {}).setdefault(one.row["seed"], one.scores)
            evidence.rows.setdefault(key, {}).setdefault(one.row["seed"], dict(one.row))
    for path in sorted(folder.glob("*.json")):
        told = json.loads(path.read_text())
        part = path.stem.rpartition("-")[0]
        of_data = (e for e in found.values() if e.store not in ALONE and told["data_hash"] in hashes(e))
        evidence = found.get(part) if part in ALONE else next(of_data, None)
        if evidence:
            fill(evidence.details, {name: value for name, value in told.items() if isinstance(value, dict)})
    return found


def fill(known: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Adds what is not known yet, in dictionaries within too."""
    for name, value in more.items():
        if isinstance(value, dict):
            fill(known.setdefault(name, {}), value)
        else:
            known.setdefault(name, value)


def hashes(evidence: Evidence) -> set[str]:
    return {row["data_hash"] for of in evidence.rows.values() for row in of.values()}
