"""ERM, and BN as its difference.

ERM: empirical risk minimisation on the queries of each episode (Vapnik, 1998; episodic as in the paper's section 4.2).

    loss = CE(f(x_q), y_q)        normalised in training by the queries' own statistics, afterwards by the running ones

BN (Schneider et al., 2020; trained as ARM-BN, Zhang et al., 2021) differs from ERM in: adapt, and a loss that uses it.

    y_q = f(x_q; mean and variance of every normalisation layer taken from the support)
"""

from typing import Any

import jax

from cxda_jax.losses import cross_entropy
from cxda_jax.nets.classifier import Classifier, initialise
from cxda_jax.types import Array, Episode, Images, Method, UserError, Variables

# How the query meets the support's statistics in training: `flow` differentiates through them, `stop` does not (as
# PyTorch's running buffers), `own` normalises training queries by their own batch instead.
STATISTICS = ("flow", "stop", "own")
RUNNING_RATE = 0.1  # running = 0.9 old + 0.1 batch


def erm(net: Classifier) -> Method:
    def init(key: Array, images: Images) -> Variables:
        return initialise(key, net.init(key, images.pixels))

    def loss(variables: Variables, episode: Episode, key: Array) -> tuple[Array, Any]:
        del key
        logits, exact = net.apply(variables, episode.query.pixels, batch=True, mutable=["batch_stats"])
        return cross_entropy(logits, episode.label), {
            "logits": logits,
            "batch_stats": blend(variables, exact, RUNNING_RATE)["batch_stats"],
        }

    def adapt(variables: Variables, support: Images, key: Array) -> Variables:
        del support, key
        return variables

    def predict(adapted: Variables, query: Images) -> Any:
        return net.apply(adapted, query.pixels)

    return Method("erm", "1", init, loss, adapt, predict)


def bn(net: Classifier, statistics: str = "flow", momentum: float = 1.0) -> Method:
    check_statistics(statistics, momentum)

    def support_statistics(variables: Variables, support: Images) -> Variables:
        return net.apply(variables, support.pixels, batch=True, mutable=["batch_stats"], method="map")[1]

    def loss(variables: Variables, episode: Episode, key: Array) -> tuple[Array, Any]:
        del key
        exact = support_statistics(variables, episode.support)
        adapted = seen_in_training(blend(variables, exact, momentum), statistics)
        logits = net.apply(adapted, episode.query.pixels, batch=statistics == "own", mutable=["batch_stats"])[0]
        return cross_entropy(logits, episode.label), {
            "logits": logits,
            "batch_stats": blend(variables, exact, RUNNING_RATE)["batch_stats"],
        }

    def adapt(variables: Variables, support: Images, key: Array) -> Variables:
        del key
        if not len(support.pixels):
            return variables
        return blend(variables, support_statistics(variables, support), momentum)

    return erm(net)._replace(name="bn", loss=loss, adapt=adapt)


def blend(variables: Variables, exact: Variables, rate: float) -> Variables:
    """Variables whose statistics are (1 - rate) of the stored and rate of the exact ones of a batch."""
    old, new = variables["batch_stats"], exact["batch_stats"]
    stats = new if rate == 1.0 else jax.tree.map(lambda o, n: (1 - rate) * o + rate * n, old, new)
    return {**variables, "batch_stats": stats}


def seen_in_training(adapted: Variables, statistics: str) -> Variables:
    """Adapted variables as the training query sees them."""
    if statistics != "stop":
        return adapted
    return {**adapted, "batch_stats": jax.lax.stop_gradient(adapted["batch_stats"])}


def check_statistics(statistics: str, momentum: float) -> None:
    if statistics not in STATISTICS:
        raise UserError(f"batch_norm.statistics={statistics!r} is not one of {', '.join(STATISTICS)}")
    if not 0 <= momentum <= 1:
        raise UserError(f"batch_norm.momentum={momentum} lies outside 0..1; 1 takes the support's statistics alone")
