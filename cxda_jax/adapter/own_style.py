"""The correction by the image's own style in fit(): which domains teach it, and whether it pays. And its rival where
the classifier can be changed: a last layer that learns from the same images."""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from cxda_jax.adapter.correction import Correction, Labelled, corrections, mean_of, nothing
from cxda_jax.adapter.judge import FitData, some_of
from cxda_jax.methods.cxda_shares import SMALLEST, spread
from cxda_jax.training.metrics import interval_over_groups

FOLDS = 5  # of domains
WIDEST, MOST = 2048, 2**17  # numbers of a style, and numbers [style, classes]; more would take minutes: none is tried
MAPS = 6  # whose moments are a style, at most
CELLS, FEWEST = 2**27, 2000  # numbers [images, style, classes] that corrections learn from, and images at least


def room(classes: int) -> int:
    """The most numbers of a style, or of features, that a layer can be learnt of."""
    return min(WIDEST, MOST // classes)


def fitting(widths: Sequence[int], deepest: int) -> list[int]:
    """The numbers of maps of so many channels, whose moments and the image's a correction has room for: of the first
    `deepest` maps, as deep and then as many as possible; one at least."""
    for end in range(deepest, 1, -1):
        for count in range(min(MAPS, end), 1, -1):
            chosen = spread(count, end)
            if 2 * (3 + sum(widths[i] for i in chosen)) <= WIDEST:
                return chosen
    return [0] if widths else []


class Taught(NamedTuple):
    """What the domains of a turn teach.

    Attributes:
      data: of the turn, corrected if that pays.
      correction: for new domains; None where it does not surely gain on domains that did not teach it.
      alone: the gain in points of each domain by corrections of single folds to which it does not belong, on average.
        All are 0 where there is no correction.
      taught: the domains that teach such a correction, on average.
    """

    data: FitData
    correction: Correction | None
    alone: np.ndarray
    taught: float


def untaught(data: FitData) -> Taught:
    """A turn without a correction."""
    return Taught(data, None, np.zeros(len(data.store.split)), 1.0)


def in_one_form(found: Iterator[Taught]) -> Generator[Taught, None, None]:
    """What all domains of one fit() teach, and then what its turns do; where all domains teach a correction, turns
    without one get one that changes nothing.

    So their trainings share a program. A second one takes six seconds to compile on two cores of an Intel Xeon.
    """
    whole = next(found)
    yield whole
    for turn in found:
        if turn.correction or not (known := whole.correction):
            yield turn
        else:
            none = nothing(len(known.bias), known.mean, known.std)
            yield turn._replace(data=corrected_by(turn.data, none), correction=none)


def beyond_turns(whole: Taught, turns: Sequence[Taught]) -> float:
    """The points that a correction by all domains gains beyond those of the turns, on average; at least 0.

    The corrections of single folds gain more in the whole, where more domains teach each. If what is missing falls as
    1 / domains, as much more is gained by all domains than by those of a turn, times a factor that follows from their
    numbers.
    """

    def missing(domains: Sequence[float]) -> float:
        return 1 / float(np.mean(domains))

    of_turns = np.concatenate([turn.alone[turn.data.store.domains("test")] for turn in turns])
    own = [len(turn.alone) - len(turn.data.store.domains("test")) for turn in turns]
    fewer = missing([turn.taught for turn in turns]) - missing([whole.taught])
    factor = (missing(own) - missing([len(whole.alone)])) / fewer if fewer > 0 else 0.0
    return max(0.0, factor * float(whole.alone.mean() - of_turns.mean()))


class OwnStyle:
    """The corrections of one fit().

    Of all images it knows the mean and the deviation of the styles, and nothing else. Those who take part in a turn are
    dealt into FOLDS, each of which is corrected by what the others teach.
    """

    def __init__(self, judged: FitData):
        self.judged = judged
        self.mean, self.std = judged.style.mean(0), judged.style.std(0) + SMALLEST

    def of(self, turn: FitData) -> Taught:
        """What a turn teaches. Domains that judge teach nothing, and are corrected as new domains are."""
        store = turn.store
        own = np.concatenate([store.domains(split) for split in ("train", "val")])
        own = np.random.Generator(np.random.Philox(key=[turn.seed, 1])).permutation(own)
        folds = [own[i::FOLDS] for i in range(min(FOLDS, len(own)))]
        fold_of = np.full(len(store.split), len(folds))  # those that judge are in none
        for i, fold in enumerate(folds):
            fold_of[fold] = i
        teach = np.stack([(fold_of != i) & (fold_of < len(folds)) for i in range(len(folds))])
        rows, owner = turn.rows_of("train", "val"), store.row_domains()
        right = turn.logits[rows].argmax(1) == store.labels[rows]
        best, gains = None, np.zeros(len(rows))
        for found in corrections(self._labelled(rows), teach, self.mean, self.std):
            z = np.zeros_like(turn.logits)
            for domain in own:
                of = slice(*store.offsets[domain : domain + 2])
                z[of] = found[fold_of[domain]](turn.logits[of], turn.style[of])
            gained = (z[rows].argmax(1) == store.labels[rows]).astype(float) - right
            if gained.mean() > gains.mean():
                best, gains = found, gained
            elif best:  # more careful ones were better
                break
        _, low, _ = interval_over_groups(gains[None], owner[rows])[0]
        if best is None or not low > 0:
            return untaught(turn)._replace(taught=float(teach.sum(1).mean()))
        for_new, alone = mean_of(best), np.zeros(len(store.split))
        alone[own] = 100 * (np.bincount(owner[rows], gains)[own] / np.bincount(owner[rows])[own])
        for domain in store.domains("test"):
            of = slice(*store.offsets[domain : domain + 2])
            z, style, labels = turn.logits[of], turn.style[of], store.labels[of]
            right = [(one(z, style).argmax(1) == labels).mean() for one in best]
            alone[domain] = 100 * (np.mean(right) - (z.argmax(1) == labels).mean())
        data = _corrected(turn, lambda domain: [*best, for_new][fold_of[domain]])
        return Taught(data, for_new, alone, float(teach.sum(1).mean()))

    def _labelled(self, rows: np.ndarray) -> Labelled:
        return _some(self.judged, rows, self.judged.logits, self.judged.style)


def last_layers(
    judged: FitData, tests: Sequence[np.ndarray], all_teach: bool = False
) -> tuple[list[np.ndarray], Correction]:
    """Logits of all images [n, classes] for each of some turns, by last layers that learnt from the domains that do not
    judge in it; and the mean of these layers, for new domains.

    A layer adds a linear function of the features to the classifier's logits, with a ridge that the other turns choose.

    Args:
      judged: all images.
      tests: the domains that judge, by turn.
      all_teach: whether all images teach, or as many as there is time for in fit().
    """
    features, store = judged.features, judged.store
    assert features is not None
    plain, owner = judged.logits, store.row_domains()
    teach = np.stack([~np.isin(np.arange(len(store.split)), test) for test in tests])
    rows = np.arange(len(owner))
    images = Labelled(plain, features, store.labels, owner) if all_teach else _some(judged, rows, plain, features)
    by_penalty, right = [], []
    for found in corrections(images, teach, features.mean(0), features.std(0) + SMALLEST, knows_common=False):
        rows = [np.flatnonzero(np.isin(owner, test)) for test in tests]
        z = np.zeros_like(plain)
        for layer, own in zip(found, rows, strict=True):
            z[own] = layer(plain[own], features[own])
        by_penalty.append((z, found))
        right.append([(z[own].argmax(1) == store.labels[own]).sum() for own in rows])
    scores = np.array(right)
    chosen = [int((scores.sum(1) - scores[:, i]).argmax()) for i in range(len(tests))]
    return [by_penalty[i][0] for i in chosen], mean_of(by_penalty[int(scores.sum(1).argmax())][1])


def _some(judged: FitData, rows: np.ndarray, logits: np.ndarray, style: np.ndarray) -> Labelled:
    """As many of these rows as there is time for. Some are repeated, so that their number, which a program is compiled
    for and which costs time, is one of few and at most a quarter larger."""
    rows = some_of(rows, judged, max(FEWEST, CELLS // (style.shape[1] * judged.store.num_classes)))
    grain = max(1, 2 ** ((len(rows) - 1).bit_length() - 3))
    again = np.random.default_rng(judged.seed).choice(rows, -len(rows) % grain, replace=False)
    rows = np.sort(np.concatenate([rows, again]))
    return Labelled(logits[rows], style[rows], judged.store.labels[rows], judged.store.row_domains()[rows])


def corrected_by(data: FitData, correction: Correction | None) -> FitData:
    """The data as new domains are corrected."""
    return _corrected(data, lambda domain: correction) if correction else data


def _corrected(data: FitData, by: Callable[[int], Correction]) -> FitData:
    """Data whose images have three parts: corrected logits, Correction.moves() and style; `by` tells the correction of
    each domain."""
    store, classes = data.store, data.store.num_classes
    images = np.zeros((len(store.images), 1, 1, store.images.shape[-1] + classes), np.float32)
    for domain in range(len(store.split)):
        of, correction = slice(*store.offsets[domain : domain + 2]), by(domain)
        style = data.style[of]
        images[of, 0, 0] = np.concatenate([correction(data.logits[of], style), correction.moves(style), style], axis=1)
    return data._replace(store=store._replace(images=images), corrected=True)
