"""SLA (Deecke et al., 2022). Differs from ERM in its network: each convolution is

    y = BN(conv(x) + sum_k g_k(x) A_k(x))        A_k: 1x1 convolutions, g: gates, which depend on the image

All parts are trained on ERM's loss. The support is not used.
"""

from cxda_jax.methods.erm import erm
from cxda_jax.nets.classifier import Classifier
from cxda_jax.types import Method


def sla(net: Classifier) -> Method:
    """erm() with a network whose trunk has latent adapters."""
    return erm(net)._replace(name="sla")
