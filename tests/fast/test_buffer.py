"""SupportBuffer: equal to adapting to what it holds, by one program for every fill, from several threads."""

import cxda_jax
from cxda_jax.device.model import Model
from tests.lines import refused
from tests.nets import CARD, build_method


def test_what_cannot_be_is_one_line():
    for name, options, message in [
        ("ft_em", {}, "ft_em would need another program for each number of images in the buffer; use Model.adapt"),
        ("cxda_supervised", {}, "cxda_supervised must know the domain of each image"),
        ("cxda", {"capacity": 2.5}, "capacity=2.5; give a whole number from 1"),
        ("cxda", {"seed": -1}, "seed=-1; give a whole number from 0"),
    ]:
        with refused(message):
            cxda_jax.SupportBuffer(Model(CARD, build_method(name), None, None), **options)
