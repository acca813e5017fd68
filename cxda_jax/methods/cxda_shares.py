"""CXDA for class shares: attention over the buffer finds which classes this device meets, and how the network errs on
images like the query. nets/shares.py has the formulas. Differs from ERM in: adapt, and what trains.

The network itself is that of a training of erm_iid and stays as it is. The adapter learns from tasks of other
images: those whose labels that training has not seen, since there is nothing to correct on images known by heart.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from flax import linen as nn

from cxda_jax.config.fields import COUNT, POSITIVE, Field, Group, Range
from cxda_jax.losses import cross_entropy
from cxda_jax.methods.entry import RED, Config, Entry, Style
from cxda_jax.methods.erm import erm
from cxda_jax.methods.label_shift import shares_by_answers, temperature_of
from cxda_jax.nets.building import build_net
from cxda_jax.nets.classifier import Classifier
from cxda_jax.nets.shares import LARGEST, Keyed, ShareAdapter
from cxda_jax.types import (
    ADAPTER,
    TRUNK,
    Array,
    Described,
    Episode,
    Frozen,
    Images,
    Inputs,
    Method,
    OnDescribed,
    Variables,
)

SMALLEST = 1e-6  # of what divides
RIDGE = 0.1  # see discriminants()
VALIDATIONS = 5  # of an adapter's training


class AdapterSpec(NamedTuple):
    """What an adapter is, and how it is trained. CXDA_SHARES_FIELDS says what each number means and may be."""

    rank: int = 16
    maps: int = 6
    em_steps: int = 5
    held_out: float = 0.35
    steps: int = 1000
    rate: float = 1e-2
    tasks_per_step: int = 16


ADAPTER_DEFAULTS = AdapterSpec()
CXDA_SHARES_FIELDS = Group("Method cxda_shares.", {
    "rank": Field(ADAPTER_DEFAULTS.rank, "Numbers of a key.", Range(1, 1024), smoke=4),
    "maps": Field(ADAPTER_DEFAULTS.maps, "So many maps of the trunk, spread over its depth, whose moments are an "
                                         "image's style.", COUNT),
    "em_steps": Field(ADAPTER_DEFAULTS.em_steps, "Steps of EM for the shares of the classes.", Range(1, 100)),
    "held_out": Field(ADAPTER_DEFAULTS.held_out, "The part of the training data, by domains, that the network is not "
                      "trained on and the adapter is; 0: both are trained on all.", Range(0, 1, (True, False))),
    "steps": Field(ADAPTER_DEFAULTS.steps, "Steps of the adapter's training.", Range(1, 2**31 - 1), smoke=20),
    "rate": Field(ADAPTER_DEFAULTS.rate, "Adam's rate at the start of it; a cosine leads to 0.", POSITIVE),
    "tasks_per_step": Field(ADAPTER_DEFAULTS.tasks_per_step, "Tasks of such a step.", COUNT, smoke=2),
})  # fmt: skip


ERRORS = ("bias", "offset")  # the adapter's parameters that move logits: U and c


class WithBuffer(NamedTuple):
    """The result of adapt(): the variables, and the buffer as the adapter knows it."""

    variables: Variables
    buffer: Keyed
    present: Array | None  # bool [n]: the places that hold an image; None: all do


def cxda_shares(
    net: Classifier,
    rank: int = ADAPTER_DEFAULTS.rank,
    maps: int = ADAPTER_DEFAULTS.maps,
    em_steps: int = ADAPTER_DEFAULTS.em_steps,
) -> Method:
    """CXDA for class shares.

    Args:
      net: the plain network.
      rank: numbers of a key.
      maps: so many of the trunk's maps, spread over its depth, whose moments are an image's style.
      em_steps: steps of EM for the shares of the classes.
    """
    adapter = ShareAdapter(net.head.num_classes, rank, em_steps)

    def describe(variables: Variables, pixels: Array) -> tuple[Array, Array]:
        return logits_and_style(net, variables, pixels, maps)

    def joined(variables: Variables, pixels: Array) -> Array:
        return jnp.concatenate(describe(variables, pixels), axis=-1)

    def init(key: Array, images: Images) -> Variables:
        plain = erm(net).init(key, images)
        new = fresh(adapter, key, describe(plain, images.pixels)[1])
        return {kind: {**tree, **new[kind]} for kind, tree in plain.items()}

    on_images = OnDescribed(joined, on_described(net.head.num_classes, rank, em_steps), measure)
    return _attending(adapter, describe, init)._replace(frozen=Frozen("erm_iid", on_images))


def on_described(
    classes: int,
    rank: int = ADAPTER_DEFAULTS.rank,
    em_steps: int = ADAPTER_DEFAULTS.em_steps,
    weighs: bool = False,
    corrected: bool = False,
) -> Method:
    """cxda_shares() for images that are described already: their pixels are logits and style, [n, 1, 1, classes + d].

    It reads the variables of the adapter alone.

    Args:
      classes: of the network.
      rank: numbers of a key.
      em_steps: steps of EM for the shares of the classes.
      weighs: whether it weighs evidence, and may correct by the own style, as that of cxda_jax.fit does.
      corrected: whether the logits were corrected by the own style before. Then each image has three parts: logits,
        `moves` of Keyed, and style, [n, 1, 1, 2 classes + d].
    """
    adapter = ShareAdapter(classes, rank, em_steps, weighs=weighs)

    def describe(variables: Variables, pixels: Array) -> tuple[Array, ...]:
        flat = pixels.reshape(len(pixels), pixels.shape[-1])
        parts = jnp.split(flat, [classes, 2 * classes] if corrected else [classes], axis=1)
        return parts[0], parts[-1], *parts[1:-1]

    def init(key: Array, images: Images) -> Variables:
        return fresh(adapter, key, describe({}, images.pixels)[1])

    return _attending(adapter, describe, init)


def measure(variables: Variables, described: Described, learnt: np.ndarray) -> Variables:
    """The variables of cxda_shares() or on_described() as the adapter's training begins with them.

    The keys tell its domains apart as well as a linear map of the style can (Fisher's discriminants), and the
    temperature is that of the least cross-entropy. From random keys some trainings find nothing.

    Args:
      variables: new ones.
      described: the images that the adapter will learn from.
      learnt: class numbers of the network's training images, which give the shares in training.
    """
    own, stats = variables["params"][ADAPTER], variables["batch_stats"]
    classes, rank = own["bias"].shape[1], own["bias"].shape[0]
    logits, style = np.split(np.asarray(described.images, np.float64), [classes], axis=1)
    mean, std = style.mean(0), style.std(0) + SMALLEST
    scale, _ = temperature_of(logits, np.asarray(described.labels))
    kernel = np.array(own["kernel"])
    directions = discriminants(np.clip((style - mean) / std, -LARGEST, LARGEST), described.domains, rank)
    # Images of one domain then are apart by 1 on the average, squared.
    kernel[:, : directions.shape[1]] = directions * math.sqrt(style.shape[1] / (2 * rank))
    known = {"mean": mean, "std": std, "shares": shares_by_answers(learnt, logits, scale)}

    def as_floats(x: Any) -> Array:
        return jax.device_put(np.asarray(x, np.float32))  # jnp.asarray() compiles a program for each shape

    new = {**own, "kernel": kernel, "log_t": -np.log(np.maximum(scale, SMALLEST))}
    return {
        "params": {**variables["params"], ADAPTER: jax.tree.map(as_floats, new)},
        "batch_stats": {**stats, ADAPTER: jax.tree.map(as_floats, known)},
    }


def discriminants(style: np.ndarray, domains: np.ndarray, most: int) -> np.ndarray:
    """Directions [d, at most `most`] in which the means of domains differ most, for a variance of 1 inside domains.

    There are fewer of them than domains, and zeros in place of those in which the means do not differ. RIDGE of the
    mean variance is added, as style has many dependent numbers.

    They are sought among what the means of domains span, as that has fewer dimensions than a wide style: with 5,000
    numbers a generalised eigenvalue problem takes five times as long.
    """
    _, domains = np.unique(domains, return_inverse=True)
    counts = np.bincount(domains)
    means = np.stack([style[domains == d].mean(0) for d in range(len(counts))])
    inside = style - means[domains]
    within = inside.T @ inside / len(style)
    d = len(within)
    within[np.diag_indices(d)] += max(RIDGE * np.trace(within) / d, SMALLEST)
    some = min(most, len(counts) - 1, d)
    apart = np.sqrt(counts / len(style))[:, None] * (means - style.mean(0))
    whole = scipy.linalg.solve(within, apart.T, assume_a="pos")
    ratios, mixed = np.linalg.eigh(apart @ whole)  # of the variance between domains to that inside
    first = slice(None, -1 - some, -1)
    return whole @ mixed[:, first] / np.sqrt(np.maximum(ratios[first], SMALLEST**2))


def fresh(adapter: ShareAdapter, key: Array, style: Array) -> Variables:
    """New variables of the adapter alone, under its name."""
    new = adapter.init(jax.random.fold_in(key, 1), style, method="keys")
    return {kind: {ADAPTER: tree} for kind, tree in new.items()}


def logits_and_style(net: Classifier, variables: Variables, pixels: Array, maps: int) -> tuple[Any, Any]:
    """Logits [n, classes] and style [n, d]: means and deviations over the places of the image, and of so many maps.

    A map is what a child of the trunk gives, but for convolutions and dense layers.
    """

    def is_map(module: nn.Module, _: str) -> bool:
        return module.path[:-1] == (TRUNK,) and not isinstance(module, nn.Conv | nn.Dense)

    applied: Any = net.apply(variables, pixels, capture_intermediates=is_map, mutable=["intermediates"])
    logits, kept = applied
    outputs = [called["__call__"][0] for called in kept["intermediates"].get(TRUNK, {}).values()]
    moments = []
    for x in [net.apply(variables, pixels, method="normalise"), *(outputs[i] for i in spread(maps, len(outputs)))]:
        x, places = x.astype(jnp.float32), tuple(range(1, x.ndim - 1))
        moments += [x.mean(places), x.std(places)]
    return logits, jnp.concatenate(moments, axis=-1)


def spread(maps: int, count: int) -> list[int]:
    """The numbers of the chosen maps: so many of `count`, spread over the depth."""
    return [round(i) for i in np.linspace(0, count - 1, min(maps, count))]


def _attending(
    adapter: ShareAdapter,
    describe: Callable[[Variables, Array], tuple[Array, ...]],
    init: Callable[[Array, Images], Variables],
) -> Method:
    """The method whose images are described so: (variables, pixels) -> logits, style, and perhaps `moves` of Keyed."""

    def parts_of(variables: Variables) -> Variables:
        return {kind: tree[ADAPTER] for kind, tree in variables.items() if ADAPTER in tree}

    def known(variables: Variables, pixels: Array) -> Keyed:
        described = jax.lax.stop_gradient(describe(variables, pixels))
        found: Any = adapter.apply(parts_of(variables), *described, method="known")
        return found

    def answer(variables: Variables, query: Keyed, buffer: Keyed, present: Array | None) -> Any:
        return adapter.apply(parts_of(variables), query, buffer, present, method="answer")

    def loss(variables: Variables, episode: Episode, key: Array) -> tuple[Array, Any]:
        if adapter.weighs:  # learnt keys would know the domains that teach, and make the evidence look surer than it is
            variables = changed(variables, ("kernel",), jax.lax.stop_gradient)
        buffer, query = known(variables, episode.support.pixels), known(variables, episode.query.pixels)
        present, told = episode.support.present, episode.support_label
        present = draw_present(key, len(told)) if present is None else present
        where_known: Any = adapter.apply(parts_of(variables), query, buffer, present, told, method="told")
        logits = answer(changed(variables, ERRORS, jax.lax.stop_gradient), query, buffer, present)
        both = cross_entropy(logits, episode.label) + cross_entropy(where_known, episode.label)
        return both, {"logits": logits, "batch_stats": variables["batch_stats"]}

    def adapt(variables: Variables, support: Images, key: Array) -> WithBuffer:
        return WithBuffer(variables, known(variables, support.pixels), support.present)

    def predict(adapted: WithBuffer, query: Images) -> Any:
        return answer(adapted.variables, known(adapted.variables, query.pixels), adapted.buffer, adapted.present)

    def attention(adapted: WithBuffer, query: Images) -> Any:
        keys, (variables, buffer, present) = known(adapted.variables, query.pixels).keys, adapted
        return adapter.apply(parts_of(variables), keys, buffer.keys, present, method="attention")

    return Method("cxda_shares", "3", init, loss, adapt, predict, attention, takes_places=True)


def changed(variables: Variables, names: Sequence[str], change: Callable[[Any], Any]) -> Variables:
    """The variables with these parameters of the adapter changed."""
    own = variables["params"][ADAPTER]
    own = {**own, **{name: change(own[name]) for name in names}}
    return {**variables, "params": {**variables["params"], ADAPTER: own}}


def draw_present(key: Array, n: int) -> Array:
    """A random part of n places, as a buffer fills: all of them with probability 1/2, else a number whose logarithm is
    uniform."""
    full_key, size_key, order_key = jax.random.split(key, 3)
    some = jnp.exp(jax.random.uniform(size_key) * jnp.log(n + 1.0))
    size = jnp.where(jax.random.bernoulli(full_key), n, jnp.floor(some))
    return jax.random.permutation(order_key, n) < size


def _build(config: Config, inputs: Inputs) -> Method:
    options = {name: config.cxda_shares[name] for name in ("rank", "maps", "em_steps")}
    return cxda_shares(build_net(config, inputs), **options)


CXDA_SHARES = Entry(_build, {"cxda_shares": CXDA_SHARES_FIELDS}, style=Style(RED, "s"), varied=True, page="shares")
