"""Parameters of the library and fields of a config: their names in messages, and their equal defaults."""

import inspect
import json
import re
import runpy
from pathlib import Path
from unittest import mock

import optax
import pytest

from cxda_jax.config import registry
from cxda_jax.config.reading import as_fields, check_stored, config_hash, default, hashed, of_method, read
from cxda_jax.config.registry import METHODS, groups, schema
from cxda_jax.data import augment, glyphs
from cxda_jax.data.episodes import EpisodeSpec
from cxda_jax.methods import anytime, cotta, cxda, erm, finetune, icrm, label_shift, stata, training_free
from cxda_jax.methods.optimizers import make_optimizer
from cxda_jax.nets import attention, cnn, context, pretrained, resnet, transformer
from cxda_jax.training.loop import Schedule
from docs.examples.counted_shares import counted_shares
from tests.lines import refused
from tests.nets import make_net, with_examples

CONFIG = json.loads(json.dumps(default().to_dict()))
NET = make_net((16, 16, 1), 4)
TUNING = finetune.FineTuning(optax.sgd(0.1))
PARAMETERS = [  # a call, what it says of its parameters, and their group
    (lambda: cxda.cxda(NET, momentum=0.5, prior=20.0), "momentum=0.5 and prior=20.0 both set", "batch_norm"),
    (lambda: finetune.ft_em(NET, TUNING._replace(steps=0)), "steps=0 .* at least 1", "finetune"),
    (lambda: cotta.cotta(NET, TUNING, augment.Strong(), cotta.Teaching(copies=0)), "copies=0 .* at least 1", "cotta"),
    (lambda: augment.check_weak(augment.Weak(rotate=181)), "rotate=181 .* at most 180", "augment"),
    (lambda: augment.check_strong(augment.Strong(hue=1)), "hue=1 .* at most 0.5", "strong"),
    (lambda: attention.check_attention(16, 3, 2, "paper"), "heads=3 with ratio=2 .* divisors of 16", "attention"),
    (lambda: pretrained.read_weights(Path("a/weights=b.txt")), "weights=a/weights=b.txt:", "net"),
    (lambda: glyphs.open_glyphs("unused", seed=-1), "seed=-1 must", "data"),
]
# Callables that take all fields of a group.
WHOLE = [
    ("batch_norm", erm.bn), ("cotta", cotta.Teaching), ("sf_ocda", finetune.sf_ocda), ("strong", augment.Strong),
    ("augment", augment.Weak), ("bn_alpha", erm.bn_alpha), ("t3a", training_free.t3a), ("lame", training_free.lame),
    ("feature_shift", training_free.feature_shift), ("icrm", icrm.with_transformer), ("counted_shares", counted_shares),
    ("prior_shift", label_shift.prior_shift), ("mlls", label_shift.mlls), ("bbse", label_shift.bbse),
    ("stata", stata.stata),
]  # fmt: skip
# Callables that take some, and those of their parameters that mean something else there.
SOME = [
    ("batch_norm", cxda.attending), ("train", erm.bn), ("train", cxda.attending),
    ("train", Schedule, "steps_per_call"),  # 0 in a config: the backend's default
    ("finetune", finetune.FineTuning), ("episode", EpisodeSpec), ("attention", attention.CrossAttention),
    ("cml", context.ContextNet), ("net", cnn.CNNTrunk, "dtype", "name"), ("cml", cnn.CNNTrunk, "width"),
    ("sla", cnn.CNNTrunk, "adapters"), ("net", resnet.ResNetTrunk, "dtype", "name", "width"),
    ("sla", resnet.ResNetTrunk, "adapters"), ("optimizer", make_optimizer), ("cxda_any", anytime.cxda_any),
    ("icrm", transformer.CausalTransformer),
]  # fmt: skip


def test_a_parameter_becomes_a_field():
    for call, says, group in PARAMETERS:
        with refused(f"^{says}"):
            call()
        field = re.sub(r"( and | with |^)(\w+[=:])", rf"\1{group}.\2", says)
        groups = (group, "train") if group == "finetune" else (group,)  # both have `steps`; the first counts
        with refused(f"^{field}"), as_fields(CONFIG | {"data": {"seed": -1}}, *groups):
            call()


@pytest.mark.parametrize("entry", [*WHOLE, *SOME], ids=lambda entry: f"{entry[0]}-{entry[1].__name__}")
def test_defaults_of_signatures_are_those_of_the_schema(entry):
    group, make, *others = entry
    with with_examples():
        fields = schema()[group].fields
    defaults = {n: p.default for n, p in inspect.signature(make).parameters.items() if p.default is not p.empty}
    shared = {name for name in defaults if name in fields} - set(others)
    assert shared and {n: defaults[n] for n in shared} == {n: fields[n].default for n in shared}
    assert entry not in WHOLE or shared == set(fields)


def stored(method="erm", **groups):
    """What check_stored() makes of the default config with these groups, or without those that are None."""
    config = {name: group for name, group in (CONFIG | {"method": method} | groups).items() if group is not None}
    return check_stored(config, "config", "train again")


def test_a_config_of_an_earlier_version_gets_the_defaults_of_what_it_lacks_and_keeps_what_its_method_reads():
    """A method or an optional field may be missing; a field that is gone may hold the value that changed nothing."""
    erm = stored()
    assert erm.keys() == CONFIG.keys() - {"attention", "cxda_any", "cxda_shares", "icrm", "cml", "sla"}, (
        "tests may start from it"
    )
    with with_examples():
        assert stored() == erm, "a training can be read where another package's method is gone"
    fields = {name: group.fields for name, group in schema().items() if name in CONFIG and hasattr(group, "fields")}
    optional = {name: {n for n, field in of.items() if field.optional} for name, of in fields.items()}
    assert "init" in optional["net"] and "prior" in optional["batch_norm"]
    left = {group: {n: v for n, v in CONFIG[group].items() if n not in names} for group, names in optional.items()}
    assert stored(**left) == stored(bn_alpha=None, t3a=None, lame=None, feature_shift=None, icrm=None) == erm
    kept = stored(batch_norm=left["batch_norm"] | {"momentum": 0.7})["batch_norm"]
    assert kept == CONFIG["batch_norm"] | {"momentum": 0.7, "prior": 0}
    own = CONFIG["attention"]
    loo = stored("cxda_loo")
    assert loo.keys() & groups().keys() == {"attention", "batch_norm"}
    assert stored("cxda_loo", attention=own | {"sink": False}, cxda_any=CONFIG["cxda_any"] | {"plain": 0.5}) == loo
    earlier = {n: v for n, v in CONFIG["cxda_any"].items() if n != "running"}
    for prior, expected in ((0.0, (20.0, True)), (7.0, (7.0, False))):
        found = stored("cxda_any", cxda_any=earlier | {"prior": prior})["cxda_any"]
        assert (found["prior"], found["running"]) == expected
    with refused(r"^config\.attention\.sink: this version has no such field; train again"):
        stored(attention=own | {"sink": True})
    with refused(r"^config\.bn: this version has no such field; train again"):
        stored(bn={})


def test_a_method_reads_the_groups_that_it_declares_and_no_other_moves_its_hash(fixed_store):
    def hashes(**more):
        return [config_hash(hashed(of_method({**CONFIG, **more}, name))) for name in before]

    before = list(METHODS)
    for name in before:
        noting = mock.MagicMock()
        noting.__getitem__.side_effect = (CONFIG | {"method": name}).__getitem__
        METHODS[name].build(noting, fixed_store.inputs)
        noted = {call.args[0] for call in noting.__getitem__.call_args_list}
        assert noted & groups().keys() == {*METHODS[name].groups}, name
    known = hashes()
    assert hashes(net={n: v for n, v in CONFIG["net"].items() if n != "init"}) == known, "as an older version had it"
    assert not {*known} & {*hashes(net=CONFIG["net"] | {"init": "flax"})}
    with with_examples():
        assert hashes(counted_shares={"strength": 1.0}) == known and "counted_shares" in groups()


def test_another_package_adds_a_method_by_an_entry_point(tmp_path, monkeypatch):
    (tmp_path / "mine-1.dist-info").mkdir()
    text = "[cxda_jax.methods]\nshift = docs.examples.counted_shares:COUNTED_SHARES\n"
    (tmp_path / "mine-1.dist-info" / "entry_points.txt").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    known = runpy.run_path(registry.__file__)["METHODS"]
    assert known.keys() - METHODS.keys() == {"shift"} and "strength" in known["shift"].groups["counted_shares"].fields


def test_a_field_that_the_method_never_reads_is_refused():
    with refused(r"^--config\.batch_norm\.momentum: cxda_any does not read it, only bn, cxda, .*; leave it out"):
        read("glyphs:cxda_any", [("batch_norm.momentum", "0.5")])
    with refused(r"^--config\.icrm\.width: erm does not read it, only icrm; leave it out"):
        read("glyphs:icrm", [("icrm.width", "8"), ("method", "erm")])
    assert read("glyphs:erm", [("cotta.copies", "3")])["cotta"]["copies"] == 3, "for a test"
