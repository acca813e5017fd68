"""Which weights of an adapter are kept: how much of what it learnt of errors other domains share, and how far it
believes a buffer, is said by domains that it did not learn from."""

import math
from collections.abc import Callable
from typing import NamedTuple

from cxda_jax.methods.cxda_shares import ERRORS, changed
from cxda_jax.types import Variables

PARTS = (0.5, 0.25, 0.0)  # of the errors that training domains show; validation says how much of them others share
MASSES = (1.0, 2.0, 4.0)  # times as many images are to outweigh the shares of training, where balanced mixtures lose
CHOICES = len(PARTS) + len(MASSES)  # validations that a selection takes, at most


class Selection(NamedTuple):
    """The choice of an adapter's weights at the end of its training.

    Attributes:
      score: variables -> how well they do on validation tasks.
      gain: variables -> what a full buffer brings on such tasks of balanced classes.
      untrained: the variables at the start, and their score.
    """

    score: Callable[[Variables], float]
    gain: Callable[[Variables], float]
    untrained: tuple[Variables, float]

    def __call__(self, best: Variables, scored: float) -> Variables:
        """What is kept instead of the best variables, which scored so."""
        candidates = [(best, scored), *self.less_sure(best), self.untrained]
        return self.more_careful(max(candidates, key=lambda candidate: candidate[1])[0])

    def less_sure(self, variables: Variables) -> list[tuple[Variables, float]]:
        """The variables with each part of the errors that they know, and their scores."""
        parts = [changed(variables, ERRORS, lambda errors, part=part: errors * part) for part in PARTS]
        return [(less, self.score(less)) for less in parts]

    def more_careful(self, variables: Variables) -> Variables:
        """Of variables that trust a buffer less and less the first that do not lose, or those that lose least."""
        tried = []
        for mass in MASSES:
            less = changed(variables, ("log_m",), lambda log_m, mass=mass: log_m + math.log(mass))
            tried.append((less, self.gain(less)))
            if tried[-1][1] >= 0:
                break
        return max(tried, key=lambda candidate: candidate[1])[0]
