"""CXDA: feed-forward latent domain adaptation by cross-attention (Bohdal et al., WACV 2024), and three variants.

    z = f(x_q) + MCA(LN f(x_s); LN f(x_q)),  y = head(z)        f normalised by the support's statistics

cxda             differs from BN in: adapt also keeps the support's keys and values, predict attends to them
cxda_p2p         the same functions over a net whose tokens are the positions of the map (`features="patch"`)
cxda_supervised  attention is 1/n on the n support images of the query's domain and 0 elsewhere
cxda_loo         differs in its loss alone: each support image is a query to the others too (not in the paper)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from cxda_jax.methods.entry import BLUE, PURPLE, RED, SKY, Config, Entry, Style
from cxda_jax.methods.erm import BATCH_NORM, adapt_statistics, encode_both, erm, outcome, share_of
from cxda_jax.nets.attention import ATTENTION
from cxda_jax.nets.building import build_attending_net
from cxda_jax.nets.classifier import Classifier, fresh
from cxda_jax.types import Array, Episode, Images, Inputs, Method, Variables

SUPPORT_LOSS = ("none", "own", "leave_one_out")


class WithMemory(NamedTuple):
    """The result of adapt() of the cxda methods."""

    variables: Variables  # with the support's statistics
    memory: Any  # the encoded support: arrays [tokens, ...]
    domain: Array  # [n_support]; cxda_supervised alone reads it
    present: Array | None = None  # [n_support]: the places that hold an image; None: all

    def hidden(self, queries: int) -> Array | None:
        """bool [queries, n_support], True for places without an image."""
        return None if self.present is None else jnp.broadcast_to(~self.present, (queries, len(self.present)))


def cxda(net: Classifier, **options: Any) -> Method:
    """CXDA, whose queries attend to the support, for a network with a CrossAttention; the options are attending()'s."""

    def remember(variables: Variables, maps: Array) -> Any:
        return net.apply(variables, maps, method="remember")

    def answer(adapted: WithMemory, maps: Array, domain: Array, leave_own_out: bool = False) -> Any:
        hidden = jnp.eye(len(maps), dtype=bool) if leave_own_out else adapted.hidden(len(maps))
        return net.apply(adapted.variables, maps, adapted.memory, hidden, method="recall")

    def weights(adapted: WithMemory, query: Images) -> Any:
        maps = net.apply(adapted.variables, query.pixels, method="map")
        return net.apply(adapted.variables, maps, adapted.memory, adapted.hidden(len(maps)), method="weights")

    def touch_all(net: Classifier, pixels: Array) -> Array:
        maps = net.map(pixels)
        return net.recall(maps, net.remember(maps))

    return attending(net, Parts(remember, answer, touch_all), **options)._replace(name="cxda", attention=weights)


def cxda_p2p(net: Classifier, **options: Any) -> Method:
    """Patch-to-patch CXDA: cxda() with a network whose `features` are "patch"; options as there."""
    return cxda(net, **options)._replace(name="cxda_p2p")


def cxda_loo(net: Classifier, **options: Any) -> Method:
    """cxda() with support_loss="leave_one_out"; the other options as there."""
    return cxda(net, **options | {"support_loss": "leave_one_out"})._replace(name="cxda_loo")


def cxda_supervised(net: Classifier, **options: Any) -> Method:
    """CXDA with known domains, in training and test: attention is the mean over the query's domain;
    options as cxda()."""

    def remember(variables: Variables, maps: Array) -> Any:
        return net.apply(variables, maps, method="remember_values")

    def answer(adapted: WithMemory, maps: Array, domain: Array, leave_own_out: bool = False) -> Any:
        weights = domain_weights(domain, adapted, leave_own_out)
        return net.apply(adapted.variables, maps, weights, adapted.memory, method="mix")

    def touch_all(net: Classifier, pixels: Array) -> Array:
        maps = net.map(pixels)
        return net.mix(maps, jnp.ones((1, 1, 1)), net.remember_values(maps))

    return attending(net, Parts(remember, answer, touch_all), **options)._replace(
        name="cxda_supervised",
        attention=lambda adapted, query: domain_weights(query.domain, adapted),
        uses_domains=True,
    )


def domain_weights(query: Array, adapted: WithMemory, leave_own_out: bool = False) -> Array:
    """Equal weights [n_query, 1, n_support] for the support images of each query's domain; all 0 if there are none.

    Args:
      query: domains [n_query].
      adapted: whose domains are the support's.
      leave_own_out: the queries are the support itself, and no image gets a weight for itself.
    """
    same = query[:, None] == adapted.domain[None, :]
    same &= True if adapted.present is None else adapted.present
    same &= ~(leave_own_out & jnp.eye(*same.shape, dtype=bool))
    return (same / jnp.maximum(1, same.sum(-1, keepdims=True)))[:, None]


class Parts(NamedTuple):
    """The parts in which the methods of the cxda family differ.

    Attributes:
      remember: (variables, maps of the support) -> memory.
      answer: (adapted, maps of queries, their domains, leave_own_out) -> logits.
      touch_all: (net, pixels) -> anything that depends on all parameters.
    """

    remember: Any
    answer: Any
    touch_all: Any


def attending(
    net: Classifier,
    parts: Parts,
    statistics: str = "flow",
    momentum: float = 1.0,
    support_loss: str = "none",
    prior: float = 0.0,
) -> Method:
    """A method of the cxda family.

    Args:
      net: a network with a CrossAttention.
      statistics: as in bn().
      momentum: as in bn().
      support_loss: "own": the support's labels teach too, each image classified without attention. "leave_one_out":
        they teach, each image attending to the others.
      prior: as in bn().
    """
    (remember, answer, touch_all), share = parts, share_of(momentum, prior)

    def init(key: Array, images: Images) -> Variables:
        return fresh(net, key, images.pixels, touch_all)

    def loss(variables: Variables, episode: Episode, key: Array) -> tuple[Array, Any]:
        support, query = episode.support, episode.query
        maps, query_maps, exact, seen = encode_both(net, variables, episode, statistics, share)
        adapted = WithMemory(seen, remember(variables, maps), support.domain)
        logits = answer(adapted, query_maps, query.domain)
        support_logits = None
        if support_loss == "own":
            support_logits = net.apply(variables, maps, method="classify")
        elif support_loss == "leave_one_out":
            support_logits = answer(adapted, maps, support.domain, True)
        return outcome(variables, exact, episode, logits, support_logits)

    def adapt(variables: Variables, support: Images, key: Array) -> WithMemory:
        maps, seen = adapt_statistics(net, variables, support, share)
        return WithMemory(seen, remember(variables, maps), support.domain, support.present)

    def predict(adapted: WithMemory, query: Images) -> Array:
        return answer(adapted, net.apply(adapted.variables, query.pixels, method="map"), query.domain)

    return erm(net)._replace(init=init, loss=loss, adapt=adapt, predict=predict, uses_support=True, takes_places=True)


def _entry(make: Callable[..., Method], style: Style, features: str = "", **more: Any) -> Entry:
    """An entry of the family. `features` is what its tokens always are; "" leaves that to the config."""

    def build(config: Config, inputs: Inputs) -> Method:
        norm = {name: value for name, value in config.batch_norm.items() if name != "test_time_only"}
        net = build_attending_net(config, inputs, features)
        return make(net, **norm, support_loss=config.train.support_loss)

    return Entry(build, {"attention": ATTENTION, "batch_norm": BATCH_NORM}, style, support_loss=SUPPORT_LOSS, **more)


CXDA = _entry(cxda, Style(RED, "*"), varied=True, page="own", holds_out=True)
CXDA_LOO = _entry(cxda_loo, Style(SKY, "p", (10, 2)), varied=True, page="own", holds_out=True)
CXDA_P2P = _entry(cxda_p2p, Style(PURPLE, "P", (9, 2, 1, 2)), features="patch")
CXDA_SUPERVISED = _entry(cxda_supervised, Style(BLUE, "X", (9, 2, 1, 2, 1, 2)))
