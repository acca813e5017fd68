"""Which weights of an adapter are kept: how much of what it learnt of errors other domains share, and how far it
believes a buffer, is said by domains that it did not learn from."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from cxda_jax.methods.cxda_shares import ERRORS, changed
from cxda_jax.nets.shares import LOG_FLOOR
from cxda_jax.types import ADAPTER, Variables

NARROWER = (2.0, 4.0, 8.0)  # attention falls off so many times as fast as in the training
PARTS = (0.5, 0.25, 0.0)  # of the errors that training domains show; validation says how much of them others share
MASSES = (1.0, 2.0, 4.0)  # times as many images are to outweigh the shares of training, where balanced mixtures lose
OFF, ALL = -50.0, 50.0  # of the strength of the shares; of log l
CHOICES = len(NARROWER) + len(PARTS) + len(MASSES)  # validations that a selection takes, at most


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
        return self.more_careful(self.likeliest(best, scored)[0])

    def likeliest(self, best: Variables, scored: float) -> tuple[Variables, float]:
        """Of the best variables, those that are less sure of what they know, and the untrained ones, the best, and its
        score."""
        candidates = [(best, scored), *self.less_sure(best), self.untrained]
        return max(candidates, key=lambda candidate: candidate[1])

    def narrower(self, variables: Variables, scored: float) -> Variables:
        """Of the variables, which scored so, those with the narrowest attention up to which each step scores better.

        It is for keys that do not learn: the training then cannot find how narrow attention should be.
        """
        kept = variables
        for times in NARROWER:
            tried = narrowed(variables, times)
            score = self.score(tried)
            if score <= scored:
                break
            kept, scored = tried, score
        return kept

    def less_sure(self, variables: Variables) -> list[tuple[Variables, float]]:
        """The variables with each part of the errors that they know, and their scores."""
        parts = [changed(variables, ERRORS, lambda errors, part=part: errors * part) for part in PARTS]
        return [(less, self.score(less)) for less in parts]

    def more_careful(self, variables: Variables) -> Variables:
        """Of variables that trust a buffer less and less the first that do not lose, or those that lose least."""
        tried = []
        for mass in MASSES:
            less = variables  # for a mass of 1; the same object, so that settle() need not ask for its answers twice
            if mass > 1:
                less = changed(variables, ("log_m",), lambda log_m, mass=mass: log_m + math.log(mass))
            tried.append((less, self.gain(less)))
            if tried[-1][1] >= 0:
                break
        return max(tried, key=lambda candidate: candidate[1])[0]


def narrowed(variables: Variables, times: float) -> Variables:
    """The variables whose attention falls off so many times as fast. An image that counted half still counts half."""
    root = math.sqrt(times)
    for name, by in (("kernel", root), ("bias", 1 / root), ("near", times)):
        variables = changed(variables, (name,), lambda old, by=by: old * by)
    return variables


def by_style(variables: Variables) -> Variables:
    """The variables with which the buffer tells nothing but what the style moves in all images of a domain."""
    return _set(variables, {**dict.fromkeys(ERRORS, 0.0), "strength": OFF, "belief": 0.0})


def without_buffer(variables: Variables) -> Variables:
    """The variables with which the buffer changes no answer."""
    return _set(by_style(variables), {"log_l": ALL})


def with_floor(variables: Variables, floor: float) -> Variables:
    """The variables of an adapter with this floor of fit(), which changes nothing of what was learnt."""
    stats = {name: x for name, x in variables["batch_stats"][ADAPTER].items() if name != LOG_FLOOR}
    stats |= {LOG_FLOOR: jnp.float32(math.log(floor))} if floor else {}
    return {**variables, "batch_stats": {**variables["batch_stats"], ADAPTER: stats}}


def _set(variables: Variables, values: Mapping[str, float]) -> Variables:
    """The variables with all numbers of these parameters of the adapter set so."""
    for name, value in values.items():
        variables = changed(variables, (name,), lambda old, value=value: old * 0 + value)
    return variables
