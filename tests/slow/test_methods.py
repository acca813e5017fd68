"""The conformance suite: the rules that every method keeps. A new method joins through METHODS."""

import jax
import numpy as np
import pytest

from tests.fast.test_methods import EPISODE, INNER, MORE, OTHER, TWINS, case, each, name  # noqa: F401
from tests.nets import KEY, build_method, case_of, close


@pytest.mark.parametrize("name", ["bn", "cxda"])
def test_a_share_of_the_supports_statistics_counts(name):
    """As `momentum` says; and a tenth of them moves the running ones in training."""
    case, variables = case_of(name), case_of(name).fresh
    half = build_method(name, batch_norm__momentum=0.5)

    def statistics(adapted):
        return (adapted if name == "bn" else adapted.variables)["batch_stats"]

    found, plain = jax.jit(half.adapt)(variables, EPISODE.support, KEY), case.loss(variables, EPISODE, KEY)
    exact, stored = statistics(case.adapt(variables, EPISODE.support, KEY)), variables["batch_stats"]
    for share, blended in ((0.5, statistics(found)), (0.1, plain[1]["batch_stats"])):
        close(blended, jax.tree.map(lambda o, e, a=share: (1 - a) * np.asarray(o) + a * np.asarray(e), stored, exact))
