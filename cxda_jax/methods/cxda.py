"""CXDA: feed-forward latent domain adaptation by cross-attention (Bohdal et al., WACV 2024), and two variants.

    z = f(x_q) + MCA(LN f(x_s); LN f(x_q)),  y = head(z)        f normalised by the support's statistics

cxda             differs from BN in: adapt also keeps the support's keys and values, predict attends to them
cxda_p2p         the same functions over a net whose tokens are the positions of the map (`features="patch"`)
cxda_supervised  attention is 1/n over the n support images of the query's domain and 0 elsewhere
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from cxda_jax.losses import cross_entropy
from cxda_jax.methods.erm import RUNNING_RATE, blend, check_statistics, erm, seen_in_training
from cxda_jax.nets.classifier import Classifier, initialise
from cxda_jax.types import Array, Episode, Images, Method, Variables


class Adapted(NamedTuple):
    """Variables with the support's statistics, the encoded support and (read by cxda_supervised alone) its domains."""

    variables: Variables
    memory: Any
    domain: Array


def cxda(net: Classifier, statistics: str = "flow", momentum: float = 1.0, zero_out: bool = False) -> Method:
    return _attending(net, "cxda", "remember", _recall, statistics, momentum, zero_out)._replace(
        attention=lambda adapted, query: net.apply(adapted.variables, query.pixels, adapted.memory, method="weights")
    )


def cxda_p2p(net: Classifier, **options: Any) -> Method:
    return cxda(net, **options)._replace(name="cxda_p2p")


def cxda_supervised(net: Classifier, statistics: str = "flow", momentum: float = 1.0, zero_out: bool = False) -> Method:
    return _attending(net, "cxda_supervised", "remember_values", _mix_domain, statistics, momentum, zero_out)._replace(
        attention=lambda adapted, query: domain_weights(query.domain, adapted.domain), uses_domains=True
    )


def domain_weights(query: Array, support: Array) -> Array:
    """[n_query, 1, n_support]: 1/n over the support images of each query's domain; all 0 where there are none."""
    same = query[:, None] == support[None, :]
    return (same / jnp.maximum(1, same.sum(-1, keepdims=True)))[:, None]


def _recall(net: Classifier, adapted: Adapted, query: Images, **options: Any) -> Any:
    return net.apply(adapted.variables, query.pixels, adapted.memory, method="recall", **options)


def _mix_domain(net: Classifier, adapted: Adapted, query: Images, **options: Any) -> Any:
    weights = domain_weights(query.domain, adapted.domain)
    return net.apply(adapted.variables, query.pixels, weights, adapted.memory, method="mix", **options)


def _attending(net, name, remember, recall, statistics, momentum, zero_out) -> Method:
    """`remember` names the net's function that encodes the support; recall(net, adapted, query) gives logits."""
    check_statistics(statistics, momentum)

    def init(key: Array, images: Images) -> Variables:
        def everything(net: Classifier, pixels: Array) -> Array:
            memory = getattr(net, remember)(pixels)
            if remember == "remember":
                return net.recall(pixels, memory)
            return net.mix(pixels, jnp.ones((1, 1, 1)), memory)

        return initialise(key, net.init(key, images.pixels, method=everything), zero_out)

    def encode(variables: Variables, support: Images) -> tuple[Any, Variables]:
        return net.apply(variables, support.pixels, batch=True, mutable=["batch_stats"], method=remember)

    def loss(variables: Variables, episode: Episode, key: Array) -> tuple[Array, Any]:
        del key
        memory, exact = encode(variables, episode.support)
        seen = seen_in_training(blend(variables, exact, momentum), statistics)
        adapted = Adapted(seen, memory, episode.support.domain)
        logits = recall(net, adapted, episode.query, batch=statistics == "own", mutable=["batch_stats"])[0]
        return cross_entropy(logits, episode.label), {
            "logits": logits,
            "batch_stats": blend(variables, exact, RUNNING_RATE)["batch_stats"],
        }

    def adapt(variables: Variables, support: Images, key: Array) -> Adapted:
        del key
        if not len(support.pixels):
            memory = net.apply(variables, support.pixels, method=remember)
            return Adapted(variables, memory, support.domain)
        memory, exact = encode(variables, support)
        return Adapted(blend(variables, exact, momentum), memory, support.domain)

    def predict(adapted: Adapted, query: Images) -> Array:
        return recall(net, adapted, query)

    return erm(net)._replace(name=name, init=init, loss=loss, adapt=adapt, predict=predict)
