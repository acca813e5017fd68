"""What a config may ask for: a value out of range or that does not fit is named in one line, all others are built."""

import contextlib
import copy
import math

import jax
import numpy as np
import pytest

from cxda_jax.config.fields import Group
from cxda_jax.config.reading import checked, load, resolve
from cxda_jax.config.registry import schema
from cxda_jax.data.store import DomainStore
from cxda_jax.errors import UserError
from cxda_jax.training.experiment import build_method, build_on, start_from_weights
from cxda_jax.types import Images
from tests.conftest import INFO
from tests.fast.test_overrides import BASE, VALUES
from tests.lines import one_line, refused

IN_FIELDS = {
    **{name: field for name, field in schema().items() if not isinstance(field, Group)},
    **{f"{g}.{n}": field for g, of in schema().items() if isinstance(of, Group) for n, field in of.fields.items()},
}  # fmt: skip
RANGES = {name: field.within for name, field in IN_FIELDS.items() if field.within}
VALUE_REFUSED = [  # the method, the field, its text, what the line says
    ("cxda", "optimizer.name", "adamw", "='adamw': unknown; did you mean 'adam'. choose from adam, sgd$"),
    ("bn", "batch_norm.momentum", "1.5", "=1.5: must be at least 0 and at most 1$"),
    ("bn", "train.support_loss", "leave_one_out", "='leave_one_out': bn does not know it; choose from none, own"),
    ("cxda", "episode.num_domains", "4", "=4: split 'train' of tiny has 3 domains; set episode.num_domains=3"),
    ("cxda_any", "train.support_loss", "own", "=.own.: cxda_any does not know it; choose from none"),
    ("erm", "episode.num_query", "9999", "has 30 images, episode.per_domain . episode.num_query needs 10009"),
    ("cxda", "attention.heads", "7", "=7: times attention.ratio=2 .* the divisors of 16"),
    ("icrm", "icrm.heads", "7", "=7: it does not divide icrm.width=16; choose a divisor"),
    *[("erm", "net.stages", t, "=.*; give one to six counts of 1 to 100 blocks") for t in ("()", "(0, 2)", "(101,)")],
]  # fmt: skip


def small_config(method, *changes):
    small = {"episode.num_domains": "3", "episode.per_domain": "4", "episode.num_query": "5"}
    return load(f"configs/glyphs.py:{method},smoke", [*small.items(), *changes])


def built(fields, store):
    """The experiment and the start of its run, or None where a UserError of one line says why not."""
    try:
        experiment = build_on(config := checked(fields), store)
        start_from_weights(config.net, {"params": {}, "batch_stats": {}})
    except UserError as e:
        one_line(e)
        return None
    return experiment


def shapes(method, store):
    return jax.eval_shape(method.init, jax.random.key(0), Images(store.images[:2], np.zeros(2, np.int32)))


def test_a_number_outside_its_range_is_named():
    config = copy.deepcopy(BASE)
    for name, within in RANGES.items():
        kind, (group, _, field) = type(VALUES[name]), name.rpartition(".")
        ends = [x for x, closed in zip(within[:2], within.closed, strict=True) if closed and math.isfinite(x)]
        outside = {within.low - 1, within.high + 1, 2**62, -(2**62), math.nan, *within[:2]} - set(ends)
        for value in [*ends, *outside]:
            if kind is int and not math.isfinite(value):
                continue
            (config[group] if group else config)[field] = kind(value)
            taken = value in ends or within.low < value < within.high
            said = rf"^{name}=\S+ must be (at least|above|at most|below|a finite number) "
            with contextlib.nullcontext() if taken else refused(said, field=name):
                checked(config)
        (config[group] if group else config)[field] = VALUES[name]


def test_a_choice_that_there_is_not_is_named():
    config = copy.deepcopy(BASE)
    for name in (name for name, field in IN_FIELDS.items() if field.choices):
        (group, _, field), choice = name.rpartition("."), IN_FIELDS[name].choices[-1]
        config[group][field] = type(choice)(99)
        with refused(f"^{name}='?99'?: unknown; .*choose from .*{choice}", field=name):
            checked(config)
        config[group][field] = choice
        with contextlib.suppress(UserError):  # of values that do not go together
            checked(config)


def test_values_that_do_not_fit_together(fixed_store):
    for method, name, text, said in VALUE_REFUSED:
        config = small_config(method, ("episode.per_domain", "10"), ("episode.num_query", "20"), (name, text))
        config.net.name = "resnet50" if name == "net.stages" else config.net.name
        with refused(f"^(?=.*{name}).*{said}"):
            build_on(checked(resolve(config)), fixed_store)


def test_the_largest_networks_have_shapes(fixed_store):
    for method, name in (("erm", "net.width"), ("cml", "cml.width"), ("sla", "sla.adapters")):
        config = small_config(method, (name, str(RANGES[name].high)))
        assert "params" in shapes(built(resolve(config), fixed_store).method, fixed_store)


@pytest.mark.parametrize(("padding", "least", "method"), [("arm", 16, "cxda"), ("same", 4, "cml")])
def test_images_too_small_for_the_network_are_refused(padding, least, method):
    config = checked(resolve(small_config(method, ("net.padding", padding))))
    for shape in ((least, least + 3, 1), (least + 3, least - 1, 1)):
        images = np.zeros((2, *shape), np.uint8)
        store = DomainStore(INFO, images, np.zeros(2), np.array([0, 2]), ("train",), ("a",), "")
        said = f"net.padding='{padding}': takes images from {least} pixels"
        with contextlib.nullcontext() if min(shape[:2]) >= least else refused(said):
            assert "params" in shapes(build_method(config, store), store)
