"""Parameters of the library and fields of a config: their equal defaults, and who reads them."""

import inspect
import json
import runpy

import pytest

from cxda_jax.config import registry
from cxda_jax.config.fields import Config
from cxda_jax.config.reading import check_stored, config_hash, default, hashed, of_method
from cxda_jax.config.registry import METHODS, groups, schema
from cxda_jax.data import augment
from cxda_jax.methods import cotta, erm, finetune, icrm, label_shift, stata, training_free, unmix
from docs.examples.counted_shares import counted_shares
from tests.lines import refused
from tests.nets import with_examples

CONFIG = json.loads(json.dumps(default().to_dict()))
# Callables that take all fields of a group.
WHOLE = [
    ("batch_norm", erm.bn), ("cotta", cotta.Teaching), ("sf_ocda", finetune.sf_ocda), ("strong", augment.Strong),
    ("augment", augment.Weak), ("bn_alpha", erm.bn_alpha), ("t3a", training_free.t3a), ("lame", training_free.lame),
    ("feature_shift", training_free.feature_shift), ("icrm", icrm.with_transformer), ("counted_shares", counted_shares),
    ("prior_shift", label_shift.prior_shift), ("mlls", label_shift.mlls), ("bbse", label_shift.bbse),
    ("stata", stata.stata), ("unmix", unmix.unmix),
]  # fmt: skip


@pytest.mark.parametrize(("group", "make"), WHOLE, ids=[group for group, _ in WHOLE])
def test_defaults_of_signatures_are_those_of_the_schema(group, make):
    with with_examples():
        fields = schema()[group].fields
    defaults = {n: p.default for n, p in inspect.signature(make).parameters.items() if p.default is not p.empty}
    assert {n: defaults[n] for n in fields} == {n: field.default for n, field in fields.items()}


def stored(method="erm", **groups):
    """What check_stored() makes of the default config with these groups, or without those that are None."""
    config = {name: group for name, group in (CONFIG | {"method": method} | groups).items() if group is not None}
    return check_stored(config, "config", "train again")


def test_a_config_of_an_earlier_version_gets_the_defaults_of_what_it_lacks_and_keeps_what_its_method_reads():
    """A method or an optional field may be missing; a field that is gone may hold the value that changed nothing."""
    erm = stored()
    assert erm.keys() == CONFIG.keys() - {"attention", "cxda_any", "cxda_shares", "icrm", "cml", "sla"}  # for tests
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
    gone = {"attention": own | {"sink": False}, "optimizer": CONFIG["optimizer"] | {"chain": ""}}
    assert stored("cxda_loo", **gone, cxda_any=CONFIG["cxda_any"] | {"plain": 0.5}) == loo
    earlier = {n: v for n, v in CONFIG["cxda_any"].items() if n != "running"}
    for prior, expected in ((0.0, (20.0, True)), (7.0, (7.0, False))):
        found = stored("cxda_any", cxda_any=earlier | {"prior": prior})["cxda_any"]
        assert (found["prior"], found["running"]) == expected
    for name, wrong in (
        ("attention.sink", {"attention": own | {"sink": True}}), ("bn", {"bn": {}}),
        ("optimizer.chain", {"optimizer": CONFIG["optimizer"] | {"chain": "sgd(0.1)"}}),
    ):  # fmt: skip
        with refused(f"^config.{name}: "):
            stored(**wrong)


class Noting(Config):
    """A config that notes which of its groups are read."""

    def __getitem__(self, name):
        self.noted.add(name)
        return super().__getitem__(name)


def test_a_method_reads_the_groups_that_it_declares_and_no_other_moves_its_hash(fixed_store):
    def hashes(**more):
        return [config_hash(hashed({**CONFIG, **more, "method": name})) for name in before]

    before = list(METHODS)
    for name in before:
        config = Noting(CONFIG | {"method": name}, noted=set())
        METHODS[name].build(config, fixed_store.inputs)
        assert config.noted & groups().keys() == {*METHODS[name].groups}, name
    known = hashes()
    assert known == [of_method(CONFIG, name).hash for name in before]
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
