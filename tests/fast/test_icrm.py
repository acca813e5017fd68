"""ICRM: its transformer against PyTorch's layers, what each image sees, and what a step teaches."""

import jax
import numpy as np

from cxda_jax.methods.icrm import icrm, with_transformer
from tests import nets
from tests.nets import FEMNIST, KEY

SMALL = {"width": 16, "layers": 3, "heads": 4, "context": 10}
# The method, with 14 support images of which its context holds 10.
BUILT = with_transformer(nets.make_net(*FEMNIST, 8), **SMALL)
METHOD = icrm(BUILT)


def test_the_layer_that_reads_out_starts_as_published():
    last = jax.device_get(jax.jit(METHOD.init)(KEY, nets.make_images((28, 28, 1), 2)))["params"]["head"]["fc"]
    reach = (6 / (SMALL["width"] + FEMNIST[1])) ** 0.5  # Xavier's
    assert 0.95 * reach < np.abs(last["kernel"]).max() <= reach and not last["bias"].any()
