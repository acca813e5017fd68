"""Counted shares: corrects for other shares of the classes, which it counts in its own answers.
Differs from ERM in adapt:

    q(k) = (sum of p_s(k) over the support + a t(k)) / (n + a)

p_s are the checkpoint's probabilities for support image s, and t are the shares of the classes in training. The query's
logits get c (log q - log t).
"""

import jax
import jax.numpy as jnp

from cxda_jax.config.fields import POSITIVE, Field, Group
from cxda_jax.methods.entry import WINE, Style
from cxda_jax.methods.erm import calibrated, entry_of, on_erm, places
from cxda_jax.nets.classifier import Classifier
from cxda_jax.types import Array, Images, Known, Method, Variables

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

    def calibrate(variables: Variables, known: Known) -> Variables:
        counts = 1 + jnp.bincount(known.labels, length=len(net.last_layer(variables)["bias"]))
        return {**variables, "calibration": {"shares": counts / counts.sum()}}

    def adapt(variables: Variables, support: Images, key: Array) -> Variables:
        del key
        source, kept = calibrated("counted_shares", variables)
        if not len(support.pixels):
            return source
        trained, p = kept["shares"], jax.nn.softmax(net.apply(source, support.pixels))
        there = places(support).astype(jnp.float32)
        shares = (there @ p + smoothing * trained) / (there.sum() + smoothing)
        last = net.last_layer(source)
        return net.with_last_layer(source, {**last, "bias": last["bias"] + strength * jnp.log(shares / trained)})

    return on_erm(net, "counted_shares", adapt=adapt, calibrate=calibrate)


COUNTED_SHARES = entry_of(counted_shares, {"counted_shares": COUNTED_SHARES_FIELDS}, Style(WINE, "D", (6, 2, 2, 2)))
