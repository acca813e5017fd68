"""Parameters of the library and fields of a config: their names in messages, and their equal defaults."""

import ast
import inspect
import json
import re
from pathlib import Path

import numpy as np
import optax
import pytest

from cxda_jax import augment, backend
from cxda_jax.config import as_fields, check, check_stored, default
from cxda_jax.data import glyphs
from cxda_jax.data.episodes import EpisodeSpec, check_spec
from cxda_jax.data.sources import SOURCES
from cxda_jax.errors import UserError
from cxda_jax.experiment import NETS, SMALLEST
from cxda_jax.fields import FIELDS, Field, Group
from cxda_jax.methods.anytime import cxda_any
from cxda_jax.methods.cotta import cotta
from cxda_jax.methods.cxda import attending, cxda
from cxda_jax.methods.erm import bn, bn_alpha
from cxda_jax.methods.finetune import FineTuning, ft_em, sf_ocda
from cxda_jax.methods.frozen import feature_shift, lame, t3a
from cxda_jax.methods.icrm import with_transformer
from cxda_jax.nets.attention import CrossAttention, check_attention
from cxda_jax.nets.cnn import PADDINGS, CNNTrunk
from cxda_jax.nets.context import ContextNet
from cxda_jax.nets.pretrained import convert, read_weights
from cxda_jax.nets.resnet import ResNetTrunk
from cxda_jax.nets.transformer import CausalTransformer
from cxda_jax.optimizers import OPTIMIZERS, make_optimizer
from cxda_jax.train import NotFinite, Schedule
from docs.examples import entries
from docs.examples.prior_shift import prior_shift
from tests.commands import command
from tests.lines import ROOT, refused
from tests.nets import build_method, make_net

CONFIG = default().to_dict()
NET = make_net((16, 16, 1), 4)
TUNING = FineTuning(optax.sgd(0.1))
FREE = "report", "study", "bench", "experiment", "config", "disk"  # made for the commands


@pytest.mark.parametrize(("call", "says", "groups", "field"), [
    (lambda: bn(NET, momentum=2.0), "momentum=2.0 must be .* at most 1", ["batch_norm"], "batch_norm.momentum=2.0"),
    (lambda: cxda(NET, momentum=0.5, prior=20.0), "momentum=0.5 and prior=20.0 both set .* prior at 0", ["batch_norm"],
     "batch_norm.momentum=0.5 and batch_norm.prior=20.0 both set"),
    (lambda: bn(NET, support_loss="leave_one_out"), "support_loss='leave_one_out' .* own", ["train"],
     "train.support_loss='leave_one_out'"),
    (lambda: cxda(NET, statistics="flo"), "statistics='flo' .* did you mean 'flow'", ["batch_norm"],
     "batch_norm.statistics='flo'"),
    (lambda: cxda(NET, support_loss="no"), "support_loss='no' .* leave_one_out", ["train"], "train.support_loss='no'"),
    (lambda: ft_em(NET, TUNING._replace(steps=0)), "steps=0 .* at least 1", ["finetune", "train"], "finetune.steps=0"),
    (lambda: sf_ocda(NET, TUNING, augment.Strong(), 2.0), "probability=2.0 .* at most 1", ["sf_ocda"],
     "sf_ocda.probability=2.0"),
    (lambda: cotta(NET, TUNING, augment.Strong(), copies=0), "copies=0 .* at least 1", ["cotta"], "cotta.copies=0"),
    (lambda: augment.check_weak(augment.Weak(rotate=181)), "rotate=181 .* at most 180", ["augment"], "augment.rotate=181"),
    (lambda: augment.check_strong(augment.Strong(hue=1)), "hue=1 .* at most 0.5", ["strong"], "strong.hue=1"),
    (lambda: check_attention(16, 3, 2, "paper"), "heads=3 with ratio=2 .* divisors of 16", ["attention"],
     "attention.heads=3 with attention.ratio=2"),
    (lambda: read_weights(Path("a/weights=b.txt")), "weights=a/weights=b.txt:", ["net"], "net.weights=a/weights=b.txt:"),
    (lambda: convert({"a": np.ones(1)}, {"params": {}, "batch_stats": {}}), "weights: .* dont_load", ["net"], "net.weights: "),
    (lambda: glyphs.open_glyphs("unused", seed=-1), "seed=-1 must", ["data"], "data.seed=-1 must"),
])  # fmt: skip
def test_a_parameter_becomes_a_field(call, says, groups, field):
    with pytest.raises(UserError, match=f"^{says}"):
        call()
    with pytest.raises(UserError, match=f"^{re.escape(field)}"), as_fields(CONFIG | {"data": {"seed": -1}}, *groups):
        call()


@pytest.mark.parametrize(("field", "value", "fix"), [
    ("finetune.steps", 0, "at least 1"), ("finetune.trainable", "head", "batch_norm"), ("finetune.rate", -1.0, "at least 0"),
    ("finetune.rate", 1e300, "lower it"), ("sf_ocda.draw", "batch", "image"), ("sf_ocda.confidence", 1.0, "below 1"),
    ("cotta.restore", -0.1, "at least 0"), ("cotta.answer", "anchor", "teacher"), ("strong.brightness", -1.0, "at least 0"),
    ("strong.blur", 1e-4, "0 to switch it off"), ("cml.convs", 1, "2, 3"), ("sla.adapters", 0, "at least 1"),
    ("attention.scale", "none", "paper"), ("net.name", "cn", "did you mean 'cnn'"), ("net.init", "keras", "flax, torch"), ("train.source", "disk", "device"),
    ("optimizer.name", "sdg", "did you mean 'sgd'"), ("optimizer.learning_rate", float("nan"), "finite"),
])  # fmt: skip
def test_a_wrong_field_is_named_with_its_fix_whatever_the_method(field, value, fix):
    """The last two hold for the check alone: a method does not read them."""
    large = {"optimizer__learning_rate": 1e10} if value == 1e300 else {}
    with refused(rf"^{field}={re.escape(repr(value))} .*{re.escape(fix)}"):
        build_method("sf_ocda", **{field.replace(".", "__"): value}, **large)


# The callables whose parameters are fields of a group. Parameters of these names mean something else there.
SIGNATURES = [
    ("batch_norm", bn, ()), ("batch_norm", attending, ()), ("train", bn, ()), ("train", attending, ()),
    ("train", Schedule, ("steps_per_call",)),  # 0 in a config: the backend's default
    ("cotta", cotta, ()), ("sf_ocda", sf_ocda, ()), ("finetune", FineTuning, ()), ("strong", augment.Strong, ()),
    ("augment", augment.Weak, ()), ("episode", EpisodeSpec, ()), ("attention", CrossAttention, ()),
    ("net", CNNTrunk, ("dtype", "name")), ("cml", CNNTrunk, ("width",)), ("cml", ContextNet, ()),
    ("sla", CNNTrunk, ("adapters",)), ("sla", ResNetTrunk, ("adapters",)), ("net", ResNetTrunk, ("dtype", "name", "width")),
    ("bn_alpha", bn_alpha, ()), ("t3a", t3a, ()), ("lame", lame, ()), ("feature_shift", feature_shift, ()),
    ("prior_shift", prior_shift, ()), ("optimizer", make_optimizer, ()), ("cxda_any", cxda_any, ()),
    ("icrm", with_transformer, ()), ("icrm", CausalTransformer, ()),
]  # fmt: skip
# These take all fields of their group.
WHOLE = [
    bn,
    cotta,
    sf_ocda,
    augment.Strong,
    augment.Weak,
    bn_alpha,
    t3a,
    lame,
    feature_shift,
    prior_shift,
    with_transformer,
]


@pytest.mark.parametrize(("group", "make", "others"), SIGNATURES, ids=lambda x: getattr(x, "__name__", ""))
def test_defaults_of_signatures_are_those_of_the_schema(group, make, others):
    with entries.registered():
        fields = FIELDS[group].fields
    defaults = {n: p.default for n, p in inspect.signature(make).parameters.items() if p.default is not p.empty}
    shared = {name for name in defaults if name in fields} - set(others)
    assert shared and {n: defaults[n] for n in shared} == {n: fields[n].default for n in shared}
    if make in WHOLE and group != "train":
        assert shared == set(fields)


def test_choices_of_the_schema_are_the_registries_keys():
    choices = {f"{g}.{n}": f.choices for g in ("net", "optimizer", "train") for n, f in FIELDS[g].fields.items()}
    assert choices["net.name"] == tuple(NETS) and choices["optimizer.name"] == tuple(OPTIMIZERS)
    assert choices["train.source"] == tuple(SOURCES) and choices["net.padding"] == tuple(PADDINGS) == tuple(SMALLEST)
    for entry in FIELDS.values():
        for field in entry.fields.values() if isinstance(entry, Group) else [entry]:
            assert not field.choices or field.default in field.choices
            assert not field.within or field.within.holds(field.default)
            assert field.help.endswith((".", "..."))
    for group, entry in FIELDS.items():
        for name, field in entry.fields.items() if isinstance(entry, Group) else ():
            if field.choices:
                with refused(f"^{name}='neither' is unknown; .*{field.choices[0]}"):
                    check(group, **{name: "neither"})


def test_a_config_from_before_a_method_existed_gets_the_defaults_of_its_group():
    stored = json.loads(json.dumps(CONFIG))
    assert check_stored(stored, "config", "train again") == stored
    with entries.registered():
        assert check_stored(stored, "config", "train again") == stored | {
            "prior_shift": {"steps": 20, "smoothing": 10.0}
        }
        with refused(r"^config\.prior_shift\.smoothing: missing, .* train again"):
            check_stored(stored | {"prior_shift": {"steps": 3}}, "config", "train again")
    with refused(r"^config\.bn: this version has no such field; train again"):
        check_stored(stored | {"bn": {}}, "config", "train again")


def test_runs_from_before_the_prior_keep_their_momentum():
    stored = json.loads(json.dumps(CONFIG))
    stored["batch_norm"]["momentum"] = 0.7
    older = {name: group for name, group in stored.items() if name not in ("bn_alpha", "t3a", "lame", "feature_shift")}
    older["batch_norm"] = {name: value for name, value in stored["batch_norm"].items() if name != "prior"}
    assert stored["batch_norm"]["prior"] == 0 and check_stored(older, "config", "train again") == stored


def test_fields_of_earlier_versions_are_left_out_where_they_changed_nothing():
    stored = json.loads(json.dumps(CONFIG))
    older = stored | {"attention": stored["attention"] | {"sink": False}}
    older["cxda_any"] = stored["cxda_any"] | {"plain": 0.5}
    assert check_stored(older, "run: config", "train again") == stored
    older["attention"]["sink"] = True
    with refused(r"^run: config\.attention\.sink: this version has no such field; train again"):
        check_stored(older, "run: config", "train again")


def test_a_config_from_before_an_optional_field_existed_gets_its_default(monkeypatch):
    stored = json.loads(json.dumps(CONFIG))
    monkeypatch.setitem(FIELDS["net"].fields, "new", Field(2.5, "New.", optional=True))
    assert check_stored(stored, "config", "train again")["net"] == stored["net"] | {"new": 2.5}
    stored["net"]["new"] = 3.5
    assert check_stored(stored, "config", "train again")["net"] == stored["net"]
    monkeypatch.setitem(FIELDS["net"].fields, "needed", Field(1, "New."))
    with refused(r"^config\.net\.needed: missing, .* train again"):
        check_stored(stored, "config", "train again")


def test_a_config_from_before_any_optional_field_existed_gets_all_their_defaults():
    older = json.loads(json.dumps(CONFIG))
    optional = [(g, n) for g, e in FIELDS.items() if isinstance(e, Group) for n, f in e.fields.items() if f.optional]
    for group, name in optional:
        del older[group][name]
    assert ("net", "init") in optional
    assert check_stored(older, "config", "train again") == json.loads(json.dumps(CONFIG))


def test_the_help_of_derived_values_is_true(monkeypatch):
    fields = FIELDS["train"].fields["steps_per_call"], FIELDS["evaluation"].fields["per_call"]
    for field, value in zip(fields, (backend.default_steps_per_call, backend.default_tasks_per_call), strict=True):
        (told,) = re.findall(r"0: 1 on CPUs, (\d+) elsewhere", field.help)
        for platform, expected in (("cpu", 1), ("gpu", int(told))):
            monkeypatch.setattr(backend.jax, "default_backend", lambda platform=platform: platform)
            assert value() == expected


def test_names_amid_a_message_become_fields_and_words_do_not(fixed_store):
    for groups, said in (
        ((), r"images, per_domain \+ num_query"),
        (("episode",), r"episode.per_domain \+ episode.num_query"),
    ):
        with refused(f"{said} needs 40;"), as_fields(CONFIG, *groups):
            check_spec(EpisodeSpec(num_domains=2), fixed_store, "train")
    text = "the steps of 'num_query=3' in train.steps=2, x/steps=1: epochs, --steps=3"
    with refused(f"^{text}$"), as_fields(CONFIG, "train", "episode"):
        raise UserError(text)


def test_the_launcher_adds_the_flag_that_shows_a_step(tmp_path, data_dir):
    bare = str(NotFinite(1))
    assert bare.startswith("step 1: the loss") and "--" not in bare
    told = command(
        "train", "--config=glyphs:erm,smoke", f"--workdir={tmp_path}/run", f"--data_dir={data_dir}",
        "--config.data.writers=(5, 5, 5)", "--config.data.drawings=41", "--config.optimizer.learning_rate=1e15",
        "--config.train.log_every=1", "--config.net.width=8", "--config.episode.per_domain=1", code=2,
    )  # fmt: skip
    expected = (
        r"step (\d+): the loss or its gradients are not finite; .*; the same command with --replay_step=\1 shows "
    )
    assert re.search(expected + "its episode; a lower optimizer.learning_rate may help", told), told


def test_the_library_knows_neither_fields_nor_flags():
    groups = "|".join(name for name, value in CONFIG.items() if isinstance(value, dict))
    foreign = re.compile(rf"(?<![\w/.])(({groups})\.[a-z_]+(=| |$)|(?<!pip install )--[a-z])")
    found = []
    for path in sorted((ROOT / "cxda_jax").rglob("*.py")):
        if path.relative_to(ROOT / "cxda_jax").as_posix().startswith(FREE):
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "UserError":
                texts = [n.value for n in ast.walk(call) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
                found += [f"{path.name}:{call.lineno}: {text}" for text in texts if foreign.search(text)]
    assert not found
