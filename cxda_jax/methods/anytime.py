"""CXDA for buffers of any size (not in the paper).

cxda_any differs from cxda_loo in:

network  has learned tokens, which every image attends to beside the support, and alone if there is none
loss     each labelled image attends to its own random subset of the others, from none of them to all
adapt    statistics are a blend, (1 - a) running + a support, a = n / (n + N) for n support images; N: `prior`

With running=True the running statistics alone normalise all images. What is kept of an image then depends
on that image alone: a buffer takes an image in or lets one go at the price of one image, and is
exactly what adapt() makes of the same set.
"""

from typing import Any

import jax
import jax.numpy as jnp

from cxda_jax.config.fields import POSITIVE, SHARE, Field, Group, Range
from cxda_jax.methods.cxda import WithMemory, cxda
from cxda_jax.methods.entry import RED, Config, Entry, Style
from cxda_jax.methods.erm import adapt_statistics, encode, outcome
from cxda_jax.nets.attention import ATTENTION
from cxda_jax.nets.building import build_attending_net
from cxda_jax.nets.classifier import Classifier
from cxda_jax.types import Array, Episode, Images, Inputs, Method, Variables

CXDA_ANY_FIELDS = Group("Method cxda_any.", {
    "full": Field(0.0, "Share of the training images that see all others; the rest see a random number of them.",
                  SHARE),
    "learned": Field(32, "Learned tokens, which each image attends to beside the support.", Range(0, 100_000),
                     optional=True),
    "prior": Field(20.0, "N in the share n / (n + N) of n support images in the statistics.", POSITIVE, optional=True),
    "running": Field(False, "The running statistics alone normalise all images; no prior then.", optional=True),
})  # fmt: skip


def cxda_any(net: Classifier, full: float = 0.0, prior: float = 20.0, running: bool = False) -> Method:
    """CXDA that is trained for each number of support images.

    Args:
      net: a network with a CrossAttention, which has learned tokens.
      full: share of the training images that see all others. The rest see a random number n of them:
        1 + n is log-uniform.
      prior: as how many images the running statistics count beside the support's, in adapt().
      running: the running statistics alone count.
    """

    def loss(variables: Variables, episode: Episode, key: Array) -> tuple[Array, Any]:
        both = jax.tree.map(lambda *x: jnp.concatenate(x), episode.query, episode.support)
        labels, queries = jnp.concatenate([episode.label, episode.support_label]), len(episode.label)
        maps, exact = encode(net, variables, both)
        memory = net.apply(variables, maps, method="remember")
        hidden = ~random_subsets(key, len(labels), full)
        logits: Any = net.apply(variables, maps, memory, hidden, method="recall")
        return outcome(variables, exact, episode, logits[:queries], logits[queries:])

    def adapt(variables: Variables, support: Images, key: Array) -> WithMemory:
        if not running:
            variables = adapt_statistics(net, variables, support, lambda count: count / (count + prior))[1]
        maps = net.apply(variables, support.pixels, method="map")
        return WithMemory(variables, net.apply(variables, maps, method="remember"), support.domain, support.present)

    return cxda(net)._replace(name="cxda_any", version="2", loss=loss, adapt=adapt)


def random_subsets(key: Array, n: int, full: float) -> Array:
    """For each of n images a random subset of the others: bool [n, n], True where row i holds image j.

    A row holds all others with probability `full`. Otherwise it holds k of them, where 1 + k is log-uniform in 1 to n.
    """
    size_key, full_key, order_key = jax.random.split(key, 3)
    size = jnp.floor(jnp.exp(jax.random.uniform(size_key, (n,)) * jnp.log(n + 1))).astype(int) - 1
    size = jnp.minimum(size, n - 1)  # rounding may lead above
    size = jnp.where(jax.random.bernoulli(full_key, full, (n,)), n - 1, size)
    order = jnp.where(jnp.eye(n, dtype=bool), 2.0, jax.random.uniform(order_key, (n, n)))  # oneself comes last
    return order.argsort(-1).argsort(-1) < size[:, None]


def _build(config: Config, inputs: Inputs) -> Method:
    options = config.cxda_any
    net = build_attending_net(config, inputs, learned=options["learned"])
    return cxda_any(net, options["full"], options["prior"], options["running"])


_GROUPS = {"attention": ATTENTION, "cxda_any": CXDA_ANY_FIELDS}
CXDA_ANY = Entry(_build, _GROUPS, Style(RED, (7, 1, 0), (12, 1)), varied=True, page="blended", holds_out=True)
