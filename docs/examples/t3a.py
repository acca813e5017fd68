"""T3A (Iwasawa and Matsuo, 2021), in the form that keeps the classifier's scale. Differs from ERM in adapt alone:

    w_k <- |w_k| unit(unit(w_k) + sum of unit(h(x_s)) over the support images that teach class k)

h is what the last layer sees, w its weights. An image teaches the class that the checkpoint gives it, if it is among
the `keep` of that class with the least entropy.
"""

import jax
import jax.numpy as jnp

from cxda_jax import Images, Method, erm
from cxda_jax.nets import Classifier


def t3a(net: Classifier, keep: int = 10) -> Method:
    def adapt(variables, support: Images, key):
        del key
        last = net.last_layer(variables)
        maps = net.apply(variables, support.pixels, method="map")
        h = net.apply(variables, maps, method="before_last")
        p = jax.nn.softmax(h @ last["kernel"] + last["bias"])
        entropy, taught = jax.scipy.special.entr(p).sum(-1), p.argmax(-1)
        better = (entropy[:, None] > entropy[None]) & (taught[:, None] == taught[None])
        teaches = jax.nn.one_hot(taught, p.shape[-1]) * (better.sum(-1, keepdims=True) < keep)
        length = jnp.linalg.norm(last["kernel"], axis=0)
        kernel = length * unit(last["kernel"] / length + unit(h.T) @ teaches)
        return net.with_last_layer(variables, {**last, "kernel": kernel})

    return erm(net)._replace(name="t3a", adapt=adapt, uses_support=True, trains_as="erm")


def unit(columns: jax.Array) -> jax.Array:
    return columns / jnp.maximum(1e-12, jnp.linalg.norm(columns, axis=0))
