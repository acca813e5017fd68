"""ERM, and BN as its difference.

ERM: empirical risk minimisation on the queries of each episode (Vapnik, 1998; episodic as in the paper's section 4.2).

    loss = CE(f(x_q), y_q)        normalised in training by the queries' own statistics, afterwards by the running ones

erm_iid, the standard ERM that the paper does not run, differs in what a step's queries are: shuffled images of all
domains, as many as an episode holds.

BN (Schneider et al., 2020; trained as ARM-BN, Zhang et al., 2021) differs from ERM in: adapt, and a loss that uses it.

    y_q = f(x_q; mean and variance of every normalisation layer taken from the support)
"""

from typing import Any

import jax
import jax.numpy as jnp

from cxda_jax.losses import cross_entropy
from cxda_jax.nets.classifier import Classifier, fresh
from cxda_jax.types import Array, Episode, Images, Method, UserError, Variables, brief

# How the query meets the support's statistics in training: `flow` differentiates through them, `stop` does not (as
# PyTorch's running buffers), `own` normalises training queries by their own batch instead.
STATISTICS = ("flow", "stop", "own")
# How the labels of the support teach in training: not at all (the paper), each image classified from its own features,
# or from what it draws from the others.
SUPPORT_LOSSES = ("none", "own", "leave_one_out")
RUNNING_RATE = 0.1  # running = 0.9 old + 0.1 batch


def erm(net: Classifier) -> Method:
    def init(key: Array, images: Images) -> Variables:
        return fresh(net, key, images.pixels)

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

    return Method("erm", "2", init, loss, adapt, predict, uses_support=False)


def erm_iid(net: Classifier) -> Method:
    return erm(net)._replace(name="erm_iid", trains_mixed=True)


def bn(
    net: Classifier,
    statistics: str = "flow",
    momentum: float = 1.0,
    support_loss: str = "none",
    test_time_only: bool = False,
) -> Method:
    """With `test_time_only` it adapts the checkpoints of ERM and has no training of its own."""
    check_statistics(statistics, momentum)
    check_support_loss(support_loss, ("none", "own"))

    def encode(variables: Variables, support: Images) -> tuple[Any, Variables]:
        return net.apply(variables, support.pixels, batch=True, mutable=["batch_stats"], method="map")

    def loss(variables: Variables, episode: Episode, key: Array) -> tuple[Array, Any]:
        del key
        maps, exact = encode(variables, episode.support)
        adapted = seen_in_training(blend(variables, exact, momentum), statistics)
        logits = net.apply(adapted, episode.query.pixels, batch=statistics == "own", mutable=["batch_stats"])[0]
        all_logits, all_labels = logits, episode.label
        if support_loss == "own":
            support_logits: Any = net.apply(variables, maps, method="classify")
            all_logits = jnp.concatenate([logits, support_logits])
            all_labels = jnp.concatenate([all_labels, episode.support_label])
        return cross_entropy(all_logits, all_labels), {
            "logits": logits,
            "batch_stats": blend(variables, exact, RUNNING_RATE)["batch_stats"],
        }

    def adapt(variables: Variables, support: Images, key: Array) -> Variables:
        del key
        if not len(support.pixels):
            return variables
        return blend(variables, encode(variables, support)[1], momentum)

    episodic = erm(net)._replace(name="bn", loss=loss, adapt=adapt, uses_support=True)
    return episodic._replace(loss=erm(net).loss, trains_as="erm") if test_time_only else episodic


def blend(variables: Variables, exact: Variables, rate: float) -> Variables:
    """Variables whose statistics are (1 - rate) of the stored and rate of the exact ones of a batch.

    A network that keeps none stays as it is.
    """
    old, new = variables["batch_stats"], exact.get("batch_stats", {})
    stats = new if rate == 1.0 else jax.tree.map(lambda o, n: (1 - rate) * o + rate * n, old, new)
    return {**variables, "batch_stats": stats}


def seen_in_training(adapted: Variables, statistics: str) -> Variables:
    """Adapted variables as the training query sees them."""
    if statistics != "stop":
        return adapted
    return {**adapted, "batch_stats": jax.lax.stop_gradient(adapted["batch_stats"])}


def check_statistics(statistics: str, momentum: float) -> None:
    if statistics not in STATISTICS:
        raise UserError(f"statistics={brief(repr(statistics))} is not one of {', '.join(STATISTICS)}")
    if not 0 <= momentum <= 1:
        raise UserError(f"momentum={momentum} lies outside 0..1; 1 takes the support's statistics alone")


def check_support_loss(support_loss: str, allowed: tuple[str, ...] = SUPPORT_LOSSES) -> None:
    if support_loss not in allowed:
        raise UserError(f"support_loss={brief(repr(support_loss))} is not one of {', '.join(allowed)} for this method")
