"""CXDA: feed-forward latent domain adaptation by cross-attention (Bohdal et al., WACV 2024), and three variants.

    z = f(x_q) + MCA(LN f(x_s); LN f(x_q)),  y = head(z)        f normalised by the support's statistics

cxda             differs from BN in: adapt also keeps the support's keys and values, predict attends to them
cxda_p2p         the same functions over a net whose tokens are the positions of the map (`features="patch"`)
cxda_supervised  attention is 1/n over the n support images of the query's domain and 0 elsewhere
cxda_loo         differs in its loss alone: each support image is a query to the others too (not in the paper)
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from cxda_jax.losses import cross_entropy
from cxda_jax.methods.erm import RUNNING_RATE, blend, check_statistics, check_support_loss, erm, seen_in_training
from cxda_jax.nets.classifier import Classifier, fresh
from cxda_jax.types import Array, Episode, Images, Method, Variables


class Adapted(NamedTuple):
    """Variables with the support's statistics, the encoded support and (read by cxda_supervised alone) its domains."""

    variables: Variables
    memory: Any
    domain: Array


def cxda(net: Classifier, **options: Any) -> Method:
    """options: those of _attending."""

    def remember(variables: Variables, maps: Array) -> Any:
        return net.apply(variables, maps, method="remember")

    def answer(adapted: Adapted, maps: Array, domain: Array, leave_own_out: bool = False) -> Any:
        del domain
        return net.apply(adapted.variables, maps, adapted.memory, leave_own_out, method="recall")

    def weights(adapted: Adapted, query: Images) -> Any:
        maps = net.apply(adapted.variables, query.pixels, method="map")
        return net.apply(adapted.variables, maps, adapted.memory, method="weights")

    def everything(net: Classifier, pixels: Array) -> Array:
        maps = net.map(pixels)
        return net.recall(maps, net.remember(maps))

    return _attending(net, remember, answer, everything, **options)._replace(name="cxda", attention=weights)


def cxda_p2p(net: Classifier, **options: Any) -> Method:
    return cxda(net, **options)._replace(name="cxda_p2p")


def cxda_loo(net: Classifier, **options: Any) -> Method:
    return cxda(net, **options | {"support_loss": "leave_one_out"})._replace(name="cxda_loo")


def cxda_supervised(net: Classifier, **options: Any) -> Method:
    def remember(variables: Variables, maps: Array) -> Any:
        return net.apply(variables, maps, method="remember_values")

    def answer(adapted: Adapted, maps: Array, domain: Array, leave_own_out: bool = False) -> Any:
        weights = domain_weights(domain, adapted.domain, leave_own_out)
        return net.apply(adapted.variables, maps, weights, adapted.memory, method="mix")

    def everything(net: Classifier, pixels: Array) -> Array:
        maps = net.map(pixels)
        return net.mix(maps, jnp.ones((1, 1, 1)), net.remember_values(maps))

    return _attending(net, remember, answer, everything, **options)._replace(
        name="cxda_supervised",
        attention=lambda adapted, query: domain_weights(query.domain, adapted.domain),
        uses_domains=True,
    )


def domain_weights(query: Array, support: Array, leave_own_out: bool = False) -> Array:
    """[n_query, 1, n_support]: 1/n over the support images of each query's domain; all 0 where there are none.

    With `leave_own_out` the queries are the support itself, and the diagonal is 0.
    """
    same = query[:, None] == support[None, :]
    same &= ~(leave_own_out & jnp.eye(*same.shape, dtype=bool))
    return (same / jnp.maximum(1, same.sum(-1, keepdims=True)))[:, None]


def _attending(
    net: Classifier,
    remember: Any,  # (variables, maps of the support) -> memory
    answer: Any,  # (adapted, maps of queries, their domains, leave_own_out) -> logits
    everything: Any,  # (net, pixels) touches all parameters
    statistics: str = "flow",
    momentum: float = 1.0,
    support_loss: str = "none",
) -> Method:
    check_statistics(statistics, momentum)
    check_support_loss(support_loss)

    def init(key: Array, images: Images) -> Variables:
        return fresh(net, key, images.pixels, everything)

    def encode(variables: Variables, support: Images) -> tuple[Any, Variables]:
        return net.apply(variables, support.pixels, batch=True, mutable=["batch_stats"], method="map")

    def loss(variables: Variables, episode: Episode, key: Array) -> tuple[Array, Any]:
        del key
        support, query = episode.support, episode.query
        maps, exact = encode(variables, support)
        seen = seen_in_training(blend(variables, exact, momentum), statistics)
        adapted = Adapted(seen, remember(variables, maps), support.domain)
        query_maps = net.apply(seen, query.pixels, statistics == "own", mutable=["batch_stats"], method="map")[0]
        logits = answer(adapted, query_maps, query.domain)
        all_logits, all_labels = logits, episode.label
        if support_loss != "none":
            support_logits: Any
            if support_loss == "own":
                support_logits = net.apply(variables, maps, method="classify")
            else:
                support_logits = answer(adapted, maps, support.domain, True)
            all_logits = jnp.concatenate([logits, support_logits])
            all_labels = jnp.concatenate([all_labels, episode.support_label])
        return cross_entropy(all_logits, all_labels), {
            "logits": logits,
            "batch_stats": blend(variables, exact, RUNNING_RATE)["batch_stats"],
        }

    def adapt(variables: Variables, support: Images, key: Array) -> Adapted:
        del key
        if not len(support.pixels):
            maps = net.apply(variables, support.pixels, method="map")
            return Adapted(variables, remember(variables, maps), support.domain)
        maps, exact = encode(variables, support)
        return Adapted(blend(variables, exact, momentum), remember(variables, maps), support.domain)

    def predict(adapted: Adapted, query: Images) -> Array:
        maps = net.apply(adapted.variables, query.pixels, method="map")
        return answer(adapted, maps, query.domain)

    return erm(net)._replace(init=init, loss=loss, adapt=adapt, predict=predict, uses_support=True)
