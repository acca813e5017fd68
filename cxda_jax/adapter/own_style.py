"""The correction by the image's own style in fit(): which domains teach it, and whether it pays."""

import numpy as np

from cxda_jax.adapter.correction import Correction, Labelled, correct, mean_of
from cxda_jax.adapter.judge import FitData, some_of
from cxda_jax.methods.cxda_shares import SMALLEST
from cxda_jax.training.metrics import interval_over_groups

FOLDS, CHOOSING = 5, 5  # of domains; of so many that teach one chooses
LARGEST = 2**17  # numbers [style, classes] of a correction; a larger one would take minutes and is not tried
CELLS, FEWEST = 2**27, 2000  # numbers [images, style, classes] that a correction learns from, and images at least


class OwnStyle:
    """The corrections of one fit().

    Of all images it knows the mean and the deviation of the styles, and nothing else. Those who take part in a turn are
    dealt into FOLDS, each of which is corrected by what the others teach.
    """

    def __init__(self, judged: FitData):
        self.judged = judged
        style = judged.rows[:, judged.store.num_classes :]
        self.mean, self.std = style.mean(0), style.std(0) + SMALLEST

    def taught(self, domains: np.ndarray) -> Correction:
        """The correction that these domains teach, one in CHOOSING of which chooses."""
        choosing = domains[::CHOOSING]
        learn, choose = (self._labelled(some) for some in (np.setdiff1d(domains, choosing), choosing))
        if len(learn.labels):
            return correct(learn, choose, self.mean, self.std)
        d, classes = len(self.mean), self.judged.store.num_classes  # one domain cannot do both
        return Correction(1.0, np.zeros(classes), np.zeros((d, classes)), self.mean, self.std)

    def of(self, turn: FitData) -> tuple[FitData, Correction | None]:
        """The data of a turn, corrected, and the correction for new domains; None where it does not surely gain on
        domains that did not teach it. Then the data stay as they are.

        Domains that judge teach nothing, and are corrected as new domains are.
        """
        store, classes = turn.store, turn.store.num_classes
        own = np.concatenate([store.domains(split) for split in ("train", "val")])
        own = np.random.Generator(np.random.Philox(key=[turn.seed, 1])).permutation(own)
        folds = [own[i::FOLDS] for i in range(min(FOLDS, len(own)))]
        found = [self.taught(np.setdiff1d(own, fold)) for fold in folds]
        mean, images, gains = mean_of(found), store.images.copy(), []
        for domain in range(len(store.split)):
            rows = images[slice(*store.offsets[domain : domain + 2]), 0, 0]
            labels = store.labels[slice(*store.offsets[domain : domain + 2])]
            by = next((each for fold, each in zip(folds, found, strict=True) if domain in fold), None)
            corrected = (by or mean)(rows[:, :classes], rows[:, classes:])
            if by:
                gains.append((corrected.argmax(1) == labels).mean() - (rows[:, :classes].argmax(1) == labels).mean())
            rows[:, :classes] = corrected
        _, low, _ = interval_over_groups(np.array([gains]), np.arange(len(gains)))[0]
        if not low > 0:
            return turn, None
        return turn._replace(store=store._replace(images=images)), mean

    def _labelled(self, domains: np.ndarray) -> Labelled:
        judged, store = self.judged, self.judged.store
        rows = np.flatnonzero(np.isin(store.row_domains(), domains))
        most = max(FEWEST, CELLS // (len(self.mean) * store.num_classes))
        rows = some_of(rows, judged, most) if len(rows) else rows
        return Labelled(
            judged.logits[rows], judged.rows[rows, store.num_classes :], store.labels[rows], store.row_domains()[rows]
        )
