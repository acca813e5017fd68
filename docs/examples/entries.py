"""The entries of the examples in the package's tables.

An own method or network stands in cxda_jax/methods/ or cxda_jax/nets/, and its entries in fields.py and experiment.py.
The examples stand outside the package, so registered() adds their entries for a while.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from cxda_jax import experiment, fields
from cxda_jax.experiment import Entry, build_net
from cxda_jax.fields import COUNT, POSITIVE, Field, Group
from cxda_jax.nets.resnet import LinearHead
from docs.examples.prior_shift import prior_shift
from docs.examples.vit import ViTTrunk

# In METHODS of experiment.py.
METHODS = {
    "prior_shift": Entry(lambda c, store: prior_shift(build_net(c, store), **c["prior_shift"]), ("prior_shift",))
}
# In NETS of experiment.py. The name is also added to the choices of net.name in fields.py.
NETS = {
    "vit": lambda c, num_classes: (
        ViTTrunk(c["width"], dtype=jnp.dtype(c["dtype"]), initial=c["init"]),
        LinearHead(num_classes, jnp.dtype(c["dtype"]), initial=c["init"]),
    )
}
# In FIELDS of fields.py.
FIELDS = {
    "prior_shift": Group("Method prior_shift.", {
        "steps": Field(20, "How often the shares of the classes are computed anew.", COUNT),
        "smoothing": Field(10.0, "The shares in training count like so many support images.", POSITIVE),
    }, at_test=True, optional=True),
}  # fmt: skip


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """A context in which the package knows the examples."""
    tables: Any = ((experiment.METHODS, METHODS), (experiment.NETS, NETS), (fields.FIELDS, FIELDS))
    net = fields.FIELDS["net"]
    assert isinstance(net, Group)
    name = net.fields["name"]
    for table, entries in tables:
        table.update(entries)
    net.fields["name"] = name._replace(choices=(*name.choices, *NETS))
    try:
        yield
    finally:
        for table, entries in tables:
            for key in entries:
                del table[key]
        net.fields["name"] = name
