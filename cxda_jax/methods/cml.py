"""CML: contextual meta-learning, the main form of ARM (Zhang et al., 2021). Differs from ERM in:

    y_q = f([x_q, c]),  c = mean over the support of g(x_s)        g: a context network of as many channels as the image

g is trained together with f. It is always normalised by the support's own statistics; f is normalised as in ERM.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from cxda_jax.config.fields import Field, Group, Range
from cxda_jax.methods.entry import GREEN, Config, Entry, Style
from cxda_jax.methods.erm import erm, outcome
from cxda_jax.nets.building import build_context_net
from cxda_jax.nets.classifier import Classifier, fresh
from cxda_jax.types import Array, Episode, Images, Inputs, Method, Variables

CML_FIELDS = Group("Method cml.", {
    "width": Field(64, "Channels of the context network.", Range(1, 8192), smoke=8),
    "convs": Field(3, "cnn: convolutions of the main network; 2 as ARM has.", choices=(2, 3)),
})  # fmt: skip


class WithContext(NamedTuple):
    """The result of cml's adapt(): the variables and the support's context [h, w, channels]."""

    variables: Variables
    context: Any


def cml(net: Classifier) -> Method:
    """CML, for a network with a ContextNet, whose trunk takes the context's channels after the image's."""

    def init(key: Array, images: Images) -> Variables:
        def touch_all(net: Classifier, pixels: Array) -> Array:
            return net(pixels, context=net.summarise(pixels))

        return fresh(net, key, images.pixels, touch_all)

    def summarise(variables: Variables, support: Images) -> Any:
        if not len(support.pixels):
            return jnp.zeros((*support.pixels.shape[1:-1], net.context.features))
        return net.apply(variables, support.pixels, support.present, method="summarise")

    def loss(variables: Variables, episode: Episode, key: Array) -> tuple[Array, Any]:
        context = summarise(variables, episode.support)
        logits, exact = net.apply(variables, episode.query.pixels, True, context, mutable=["batch_stats"])
        return outcome(variables, exact, episode, logits)

    def adapt(variables: Variables, support: Images, key: Array) -> WithContext:
        return WithContext(variables, summarise(variables, support))

    def predict(adapted: WithContext, query: Images) -> Any:
        return net.apply(adapted.variables, query.pixels, context=adapted.context)

    return erm(net)._replace(
        name="cml", init=init, loss=loss, adapt=adapt, predict=predict, uses_support=True, takes_places=True
    )


def _build(config: Config, inputs: Inputs) -> Method:
    return cml(build_context_net(config, inputs, **config.cml))


CML = Entry(_build, {"cml": CML_FIELDS}, style=Style(GREEN, "D", (5, 1.5, 1, 1.5)), varied=True)
