"""ERM, and BN and BN-alpha as its differences.

ERM: empirical risk minimisation on the queries of each episode (Vapnik, 1998; episodic as in the paper's section 4.2).

    loss = CE(f(x_q), y_q)        normalised in training by the queries' own statistics, afterwards by the running ones

erm_iid is the standard ERM, which the paper does not run. Its step has shuffled images of all domains as queries,
as many images as an episode holds.

BN (Schneider et al., 2020; trained as ARM-BN, Zhang et al., 2021) differs from ERM in: adapt, and a loss that uses it.

    y_q = f(x_q; mean and variance of every normalisation layer taken from the support)

bn_alpha is BN without a training of its own, whose statistics are a blend (Schneider et al., 2020),
for n support images:

    (1 - a) running + a support,  a = n / (n + N)        N: `prior`, as how many images the running statistics count
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from cxda_jax.config.fields import NOT_NEGATIVE, POSITIVE, SHARE, Field, Group
from cxda_jax.losses import cross_entropy
from cxda_jax.machine import backend
from cxda_jax.methods.entry import BLACK, GREY, ORANGE, WINE, Config, Entry, Style
from cxda_jax.nets.building import build_net
from cxda_jax.nets.classifier import Classifier, fresh
from cxda_jax.types import Array, Episode, Images, Inputs, Method, Variables

RUNNING_RATE = 0.1  # running = 0.9 old + 0.1 batch
BATCH_NORM = Group("Batch normalisation of bn and the cxda methods.", {
    "statistics": Field("flow", "Of training queries: flow the support's with gradients; stop without; own their own.",
                        choices=("flow", "stop", "own")),
    "momentum": Field(1.0, "Share of the support's statistics for the query; the rest are the running ones.", SHARE),
    "test_time_only": Field(False, "bn adapts the checkpoints of erm and has no training of its own."),
    "prior": Field(0.0, "Above 0: n support images have the share n / (n + prior), in place of momentum.",
                   NOT_NEGATIVE, optional=True),
}, at_test=True)  # fmt: skip
BN_ALPHA_FIELDS = Group("Method bn_alpha.", {
    "prior": Field(16.0, "n support images have the share n / (n + prior) in the statistics; the rest are running.",
                   POSITIVE),
}, at_test=True)  # fmt: skip


def erm(net: Classifier) -> Method:
    """ERM, which ignores the support."""

    def init(key: Array, images: Images) -> Variables:
        return fresh(net, key, images.pixels)

    def loss(variables: Variables, episode: Episode, key: Array) -> tuple[Array, Any]:
        logits, exact = net.apply(variables, episode.query.pixels, batch=True, mutable=["batch_stats"])
        return outcome(variables, exact, episode, logits)

    def adapt(variables: Variables, support: Images, key: Array) -> Variables:
        return variables

    def predict(adapted: Variables, query: Images) -> Any:
        return net.apply(adapted, query.pixels)

    return Method("erm", "2", init, loss, adapt, predict, uses_support=False)


def erm_iid(net: Classifier) -> Method:
    """erm() on shuffled images of all domains."""
    return erm(net)._replace(name="erm_iid", trains_mixed=True)


def bn(
    net: Classifier,
    statistics: str = "flow",
    momentum: float = 1.0,
    support_loss: str = "none",
    test_time_only: bool = False,
    prior: float = 0.0,
) -> Method:
    """BN, whose query is normalised by the support's statistics.

    Args:
      net: the network.
      statistics: what normalises training queries. "flow": the support's statistics, with gradients through them;
        "stop": without gradients (as PyTorch's running buffers); "own": the queries' own.
      momentum: share of the support's statistics in what normalises the query; the rest are the running ones.
      support_loss: "own": the support's labels teach too, each image classified from its own features.
      test_time_only: adapt the checkpoints of erm, without a training of its own.
      prior: if above 0, the share of n support images is n / (n + prior), in place of `momentum`.
    """
    share = share_of(momentum, prior)

    def loss(variables: Variables, episode: Episode, key: Array) -> tuple[Array, Any]:
        maps, query_maps, exact, seen = encode_both(net, variables, episode, statistics, share)
        logits = net.apply(seen, query_maps, method="classify")
        own = net.apply(variables, maps, method="classify") if support_loss == "own" else None
        return outcome(variables, exact, episode, logits, own)

    def adapt(variables: Variables, support: Images, key: Array) -> Variables:
        return adapt_statistics(net, variables, support, share)[1]

    episodic = erm(net)._replace(name="bn", loss=loss, adapt=adapt, uses_support=True, takes_places=True)
    return episodic._replace(loss=erm(net).loss, trains_as="erm") if test_time_only else episodic


def bn_alpha(net: Classifier, prior: float = 16.0) -> Method:
    """bn() on the checkpoint of erm, with the share n / (n + prior)."""
    return bn(net, prior=prior, test_time_only=True)._replace(name="bn_alpha")


def share_of(momentum: float, prior: float) -> Callable[[int], float]:
    """A function of the number of support images: their share in the statistics that the query sees; see bn()."""
    return lambda count: count / (count + prior) if prior else momentum


def encode(net: Classifier, variables: Variables, support: Images) -> tuple[Any, Variables]:
    """Maps of the support [n, h, w, c], normalised by its own statistics, and these: {"batch_stats": ...} or {}."""
    whose = True if support.present is None else support.present
    return net.apply(variables, support.pixels, batch=whose, mutable=["batch_stats"], method="map")


def encode_both(
    net: Classifier, variables: Variables, episode: Episode, statistics: str, share: Callable[[int], float]
) -> tuple[Any, Any, Variables, Variables]:
    """Maps of the support and of the query in a training step, the support's statistics,
    and variables with their share.

    `statistics` is as in bn().
    """
    support, query, count = episode.support, episode.query, len(episode.support.pixels)
    if backend.joins_images() and support.present is None and statistics == "flow" and share(count) == 1:
        both = jnp.concatenate([support.pixels, query.pixels])
        maps, exact = net.apply(variables, both, batch=count, mutable=["batch_stats"], method="map")
        return maps[:count], maps[count:], exact, blend_statistics(variables, exact, 1.0)
    maps, exact = encode(net, variables, support)
    seen = blend_statistics(variables, exact, share(count))
    if statistics == "stop":
        seen = {**seen, "batch_stats": jax.lax.stop_gradient(seen["batch_stats"])}
    query_maps = net.apply(seen, query.pixels, batch=statistics == "own", mutable=["batch_stats"], method="map")[0]
    return maps, query_maps, exact, seen


def adapt_statistics(
    net: Classifier, variables: Variables, support: Images, share: Callable[[Any], Any]
) -> tuple[Any, Variables]:
    """Maps of the support [n, h, w, c], normalised by its own statistics, and variables with a share of these.

    `share` is that of so many images. Without images the variables stay as they are.
    """
    if not len(support.pixels):
        return net.apply(variables, support.pixels, method="map"), variables
    maps, exact = encode(net, variables, support)
    if support.present is None:
        return maps, blend_statistics(variables, exact, share(len(support.pixels)))
    count = support.present.sum()
    return maps, blend_statistics(variables, exact, jnp.where(count > 0, share(count), 0.0))


def outcome(
    variables: Variables, exact: Variables, episode: Episode, logits: Any, support_logits: Any = None
) -> tuple[Array, Any]:
    """The value of a method's loss(). Where the support's logits are given, its labels teach like the query's."""
    every, labels = logits, episode.label
    if support_logits is not None:
        every = jnp.concatenate([logits, support_logits])
        labels = jnp.concatenate([labels, episode.support_label])
    loss = cross_entropy(every, labels)
    return loss, {"logits": logits, "batch_stats": blend_statistics(variables, exact, RUNNING_RATE)["batch_stats"]}


def blend_statistics(variables: Variables, exact: Variables, rate: Any) -> Variables:
    """Variables with the statistics (1 - rate) * stored + rate * exact, for `exact` as encode() gives it."""
    old, new = variables["batch_stats"], exact.get("batch_stats", {})
    if not isinstance(rate, float) or rate != 1.0:
        new = jax.tree.map(lambda o, n: (1 - rate) * o + rate * n, old, new)
    return {**variables, "batch_stats": new}


def on_erm(net: Classifier, name: str, **parts: Any) -> Method:
    """A method that adapts the checkpoint of erm() to the support, and differs from it in these parts."""
    return erm(net)._replace(name=name, uses_support=True, takes_places=True, trains_as="erm", **parts)


def calibrated(name: str, variables: Variables) -> tuple[Variables, Any]:
    """The checkpoint's variables, and what the method's calibrate() added to them."""
    if "calibration" not in variables:
        raise ValueError(f"{name} adapts calibrated variables: method.calibrate(variables, known images) first")
    return {k: v for k, v in variables.items() if k != "calibration"}, variables["calibration"]


def places(support: Images) -> Array:
    """bool [n], the places of a support that hold an image."""
    return jnp.ones(len(support.pixels), bool) if support.present is None else support.present


def _bn(config: Config, inputs: Inputs) -> Method:
    return bn(build_net(config, inputs), **config.batch_norm, support_loss=config.train.support_loss)


def entry_of(make: Callable[..., Method], groups: Mapping[str, Group], style: Style, **more: Any) -> Entry:
    """The entry of a method that is made of a plain network and the fields of its groups."""

    def build(config: Config, inputs: Inputs) -> Method:
        fields = {name: value for group in groups for name, value in config[group].items()}
        return make(build_net(config, inputs), **fields)

    return Entry(build, groups, style, **more)


ERM = entry_of(erm, {}, Style(BLACK, "o", (1, 1)), varied=True, page="")
ERM_IID = entry_of(erm_iid, {}, Style(GREY, "s", (1, 3)), varied=True, page="")
BN = Entry(_bn, {"batch_norm": BATCH_NORM}, Style(ORANGE, "^", (5, 1.5)), True, ("none", "own"), page="")
BN_ALPHA = entry_of(bn_alpha, {"bn_alpha": BN_ALPHA_FIELDS}, Style(WINE, (3, 1, 0), (2, 1, 6, 1)), page="")
