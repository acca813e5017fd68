"""SLA (Deecke et al., 2022). Differs from ERM in its network: each convolution is

    y = BN(conv(x) + sum_k g_k(x) A_k(x))        A_k: 1x1 convolutions, g: gates, which depend on the image

All parts are trained on ERM's loss. The support is not used.
"""

from cxda_jax.config.fields import Field, Group, Range
from cxda_jax.methods.entry import WINE, Config, Entry, Style
from cxda_jax.methods.erm import erm
from cxda_jax.nets.building import build_net
from cxda_jax.nets.classifier import Classifier
from cxda_jax.types import Inputs, Method

SLA_FIELDS = Group("Method sla.", {
    "adapters": Field(2, "Adapters after each layer.", Range(1, 1000)),
    "zero_adapters": Field(False, "They start at zero, so the network starts as one without them."),
    "all_convs": Field(False, "resnet50: adapters beside convolutions with kernels of one pixel too.", optional=True),
})  # fmt: skip


def sla(net: Classifier) -> Method:
    """erm() with a network whose trunk has latent adapters."""
    return erm(net)._replace(name="sla")


def _build(config: Config, inputs: Inputs) -> Method:
    return sla(build_net(config, inputs, **config.sla))


SLA = Entry(_build, {"sla": SLA_FIELDS}, style=Style(WINE, (4, 1, 0), (4, 1, 1, 4)))
