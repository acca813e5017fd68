"""Counted shares: corrects for other shares of the classes, which it counts in its own answers.
Differs from ERM in adapt:

    q(k) = (sum of p_s(k) over the support + a t(k)) / (n + a)

p_s are the checkpoint's probabilities for support image s, and t are the shares of the classes in training. The query's
logits get c (log q - log t).
"""

import jax
import jax.numpy as jnp

from cxda_jax.config.fields import POSITIVE, Field, Group, check
from cxda_jax.methods.entry import WINE, Config, Entry, Style
from cxda_jax.methods.erm import erm
from cxda_jax.nets.building import build_net
from cxda_jax.nets.classifier import Classifier
from cxda_jax.types import Array, Images, Inputs, Known, Method, Variables

COUNTED_SHARES_FIELDS = Group("Method counted_shares.", {
    "strength": Field(1.0, "Share of the correction that is applied.", POSITIVE),
    "smoothing": Field(10.0, "The shares in training count like so many support images.", POSITIVE),
}, at_test=True)  # fmt: skip


def counted_shares(net: Classifier, strength: float = 1.0, smoothing: float = 10.0) -> Method:
    """Counted shares, which start from the checkpoint of erm.

    Args:
      net: the network.
      strength: c above; the share of the correction that is applied.
      smoothing: a above; the shares in training count like so many support images.
    """
    check(COUNTED_SHARES_FIELDS, strength=strength, smoothing=smoothing)

    def calibrate(variables: Variables, known: Known) -> Variables:
        counts = 1 + jnp.bincount(known.labels, length=len(net.last_layer(variables)["bias"]))
        return {**variables, "calibration": {"shares": counts / counts.sum()}}

    def adapt(variables: Variables, support: Images, key: Array) -> Variables:
        del key
        source = {k: v for k, v in variables.items() if k != "calibration"}
        if not len(support.pixels):
            return source
        trained, p = variables["calibration"]["shares"], jax.nn.softmax(net.apply(source, support.pixels))
        there = jnp.ones(len(p)) if support.present is None else support.present.astype(jnp.float32)
        shares = (there @ p + smoothing * trained) / (there.sum() + smoothing)
        last = net.last_layer(source)
        return net.with_last_layer(source, {**last, "bias": last["bias"] + strength * jnp.log(shares / trained)})

    method = erm(net)._replace(name="counted_shares", adapt=adapt, calibrate=calibrate)
    return method._replace(uses_support=True, takes_places=True, trains_as="erm")


def _build(config: Config, inputs: Inputs) -> Method:
    return counted_shares(build_net(config, inputs), **config["counted_shares"])


COUNTED_SHARES = Entry(_build, {"counted_shares": COUNTED_SHARES_FIELDS}, style=Style(WINE, "D", (6, 2, 2, 2)))
