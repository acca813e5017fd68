"""SLA (Deecke et al., 2022). Differs from ERM in its network alone: each convolution is

    y = BN(conv(x) + sum_k g_k(x) A_k(x))        A_k: 1x1 convolutions, g: gates that look at the image itself

All of it is trained on ERM's loss; the support is unused.
"""

from cxda_jax.methods.erm import erm
from cxda_jax.nets.classifier import Classifier
from cxda_jax.types import Method


def sla(net: Classifier) -> Method:
    """`net` has a trunk with adapters."""
    return erm(net)._replace(name="sla")
