"""Prior shift (Saerens, Latinne and Decaestecker, 2002): corrects for other shares
of the classes. Differs from ERM in adapt:

    r_s(k) = p_s(k) q(k) / t(k), divided by its sum over k;
    q(k) <- (sum of r_s(k) over the support + a t(k)) / (n + a)

and so on from q = t. p_s are the checkpoint's probabilities for support image s, and t is their
mean over training images. The query's logits get log q(k) - log t(k). Without a, the published
form, few images would rule out most classes.
"""

from typing import Any

import jax
import jax.numpy as jnp

from cxda_jax.fields import COUNT, POSITIVE, Field, Group, check
from cxda_jax.methods.entry import WINE, Config, Entry, Style
from cxda_jax.methods.erm import erm
from cxda_jax.nets.building import build_net
from cxda_jax.nets.classifier import Classifier
from cxda_jax.types import Array, Images, Inputs, Method, Variables

PRIOR_SHIFT_FIELDS = Group("Method prior_shift.", {
    "steps": Field(20, "How often the shares of the classes are computed anew.", COUNT),
    "smoothing": Field(10.0, "The shares in training count like so many support images.", POSITIVE),
}, at_test=True)  # fmt: skip


def prior_shift(net: Classifier, steps: int = 20, smoothing: float = 10.0) -> Method:
    """Prior shift, which starts from the checkpoint of erm.

    Args:
      net: the network.
      steps: how often the shares of the classes are computed anew.
      smoothing: a above; the shares in training count like so many support images.
    """
    check(PRIOR_SHIFT_FIELDS, steps=steps, smoothing=smoothing)

    def probabilities(variables: Variables, pixels: Array) -> Array:
        logits: Any = net.apply(variables, pixels)
        return jax.nn.softmax(logits)

    def calibrate(variables: Variables, images: Array) -> Variables:
        p = jax.lax.map(lambda image: probabilities(variables, image[None])[0], images, batch_size=100)
        return {**variables, "calibration": {"shares": p.mean(0)}}

    def adapt(variables: Variables, support: Images, key: Array) -> Variables:
        del key
        source = {k: v for k, v in variables.items() if k != "calibration"}
        if not len(support.pixels):
            return source
        trained, p = variables["calibration"]["shares"], probabilities(source, support.pixels)
        there = jnp.ones(len(p), bool) if support.present is None else support.present
        shares = trained
        for _ in range(steps):
            r = p * shares / trained
            counts = jnp.where(there[:, None], r / r.sum(-1, keepdims=True), 0).sum(0)
            shares = (counts + smoothing * trained) / (there.sum() + smoothing)
        last = net.last_layer(source)
        return net.with_last_layer(source, {**last, "bias": last["bias"] + jnp.log(shares / trained)})

    method = erm(net)._replace(name="prior_shift", adapt=adapt, calibrate=calibrate)
    return method._replace(uses_support=True, takes_places=True, trains_as="erm")


def _build(config: Config, inputs: Inputs) -> Method:
    return prior_shift(build_net(config, inputs), **config["prior_shift"])


PRIOR_SHIFT = Entry(_build, {"prior_shift": PRIOR_SHIFT_FIELDS}, style=Style(WINE, "D", (6, 2, 2, 2)))
