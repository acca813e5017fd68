"""T3A (Iwasawa and Matsuo, 2021), in a form that keeps the lengths of the classifier's weights. Differs from ERM in adapt:

    w_k <- |w_k| unit(unit(w_k) + sum of unit(h(x_s)) over the support images that teach class k)

h(x) is the last layer's input and w_k its weights for class k. An image teaches the class that the checkpoint predicts, if
it is among the `keep` images of this class with the least entropy.
"""

from typing import Any

import jax
import jax.numpy as jnp

from cxda_jax import config
from cxda_jax.methods.erm import erm
from cxda_jax.nets.classifier import Classifier
from cxda_jax.types import Array, Images, Method, Variables


def t3a(net: Classifier, keep: int = 10, temperature: float = 1.0) -> Method:
    """T3A, which starts from the checkpoint of erm.

    Args:
      net: the network.
      keep: how many support images may teach a class.
      temperature: logits are divided by it before the entropy is taken.
    """
    config.check("t3a", keep=keep, temperature=temperature)

    def adapt(variables: Variables, support: Images, key: Array) -> Variables:
        del key
        last = net.last_layer(variables)
        maps = net.apply(variables, support.pixels, method="map")
        h: Any = net.apply(variables, maps, method="before_last")
        p = jax.nn.softmax((h @ last["kernel"] + last["bias"]) / temperature)
        entropy, taught = jax.scipy.special.entr(p).sum(-1), p.argmax(-1)
        better = (entropy[:, None] > entropy[None]) & (taught[:, None] == taught[None])
        teaches = jax.nn.one_hot(taught, p.shape[-1]) * (better.sum(-1, keepdims=True) < keep)
        length = jnp.linalg.norm(last["kernel"], axis=0)
        kernel = length * unit(last["kernel"] / length + unit(h.T) @ teaches)
        return net.with_last_layer(variables, {**last, "kernel": kernel})

    return erm(net)._replace(name="t3a", adapt=adapt, uses_support=True, trains_as="erm")


def unit(columns: Array) -> Array:
    """Columns [d, n], each divided by its length."""
    return columns / jnp.maximum(1e-12, jnp.linalg.norm(columns, axis=0))
