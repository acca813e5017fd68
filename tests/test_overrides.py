"""What a user may override on the command line: any text is taken or refused in one line; what is taken is built."""

import json
import math
import re
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cxda_jax.data.store import DomainStore, open_store, write_store
from cxda_jax.experiment import BENCHMARKS, LIMITS, METHODS, build_method, build_on, start_from_weights
from cxda_jax.types import Images, UserError
from launch import cli
from tests.conftest import INFO, make_domains
from tests.lines import assert_short

BASE = cli.resolve(cli.load_config("configs/glyphs.py:cxda,smoke"))
SYMBOLS = list("=.,:-+_()[]{}'\"\\ \t\n\0aeE019%$~é界\u2028\ud800\U0001f600")
NUMBERS = [
    "0", "-0", "1", "-1", "2", "7", "0.5", "1.0", "-0.5", "1e-5", "1e-400", "1e400", "-1e400", "1e30", "nan", "-nan", "inf",
    "-inf", "infinity", "1_0", "0x10", "١٢", "²", "99999", "2147483648", "4294967296", "-9223372036854775809",
    "18446744073709551616", "9" * 30, "9" * 5000, "1/2", "None", "5j",
]  # fmt: skip
TEXTS = [
    "", " ", "true", "True", "FALSE", "yes", "off", "nan", "cxda", "erm", "sgd", "adam", "resnet50", "bfloat16", "support",
    "stop", "own", "leave_one_out", "batch_norm", "image", "teacher", "patch", "flat", "head_dim", "same", "worst_decile",
    "../..", "/dev/null", "a\0b", "a\nb", "\x1b[31m", "é界", "\ud800", "x" * 300, "y " * 20_000, "=", "==", "a=b", "--seed=1",
]  # fmt: skip
TUPLES = [
    "()", "(1,)", "(1, 2, 3)", "(1, 1)", "1, 2", "(0,)", "(-1, 2)", "(1.5,)", "(True,)", "(None,)", "('fc',)", "('',)", "('a', 1)",
    "[1, 2]", "{1: 2}", "{[]}", "((1,),)", "(1", "1)", "(nan,)", "(1e400,)", "(9999999999,)", f"({'9' * 5000},)", f"({'9' * 25},)",
    "(" * 500 + ")" * 500, "[" * 90_000, "-" * 90_000 + "1", f"({'1,' * 400})", f"({'1,' * 90_000})", "(1 2)", "('\\d',)", "(1if 1else 2,)",
    "(__import__('os'),)", "lambda: 0", "(10**10**10,)", "b'x',", "f'{1}',", "(1,\0)", "#", "\\", "(1,)(2)",
]  # fmt: skip


def flat(config, prefix=""):
    for name, value in config.items():
        yield from flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]


FIELDS = dict(flat(BASE))
GROUPS = [name for name, value in BASE.items() if isinstance(value, dict)]


def one_of(rng, values):
    return values[rng.integers(len(values))]


def mistyped(rng, text):
    """The text after up to three slips of the finger."""
    for _ in range(rng.integers(1, 4)):
        at = rng.integers(len(text) + 1)
        kind = rng.integers(5)
        if kind == 0:
            text = text[:at] + one_of(rng, SYMBOLS) + text[at:]
        elif kind == 1:
            text = text[:at] + text[at + 1 :]
        elif kind == 2:
            text = text[:at] + text[at : at + 2][::-1] + text[at + 2 :]
        elif kind == 3:
            text = text[:at] + text[at : at + 1].swapcase() + text[at + 1 :]
        else:
            text = text[:at] + text[max(0, at - rng.integers(1, 6)) :]
    return text


def some_name(rng):
    name, kind = one_of(rng, list(FIELDS)), rng.integers(20)
    if kind < 11:
        return name
    other = one_of(rng, list(FIELDS))
    return [
        mistyped(rng, name), mistyped(rng, name), mistyped(rng, name), one_of(rng, GROUPS), f"{name}.{other}", name.split(".")[-1],
        f"{one_of(rng, GROUPS)}.{other.split('.')[-1]}", f"{name}{one_of(rng, SYMBOLS)}", one_of(rng, SYMBOLS) * rng.integers(1, 3000),
    ][kind - 11]  # fmt: skip


def some_value(rng, name):
    kind = rng.integers(8)
    if kind < 2:
        return one_of(rng, NUMBERS)
    if kind == 2:
        return one_of(rng, TUPLES)
    if kind == 3:
        return one_of(rng, TEXTS)
    present = str(FIELDS.get(name, one_of(rng, list(FIELDS.values()))))
    if kind == 4:
        return present
    if kind == 5:
        return str(one_of(rng, list(FIELDS.values())))
    if kind == 6 and rng.random() < 0.1:
        return "".join(one_of(rng, SYMBOLS) for _ in range(rng.integers(60)))
    return mistyped(rng, present)


@pytest.fixture
def overrides(monkeypatch):
    """The command line's overrides, forgotten afterwards."""
    monkeypatch.setattr(cli, "_overrides", [])
    return cli._overrides


def as_read(value):
    """JSON has no tuples."""
    return list(value) if isinstance(value, tuple) else value


def test_ten_thousand_overrides_are_each_taken_or_refused_in_one_line(overrides):
    rng, config = np.random.default_rng(0), cli.load_config("configs/glyphs.py:cxda,smoke")
    present = dict(flat(config.to_dict()))
    taken = 0
    for _ in range(10_000):
        name = some_name(rng)
        text = some_value(rng, name)
        arguments = ["train", f"--config.{name}={text}"] if rng.random() < 0.9 else ["train", f"--config.{name}", text]
        try:
            rest = cli._take_overrides(arguments)
            assert len(overrides) == 1 and rest[:1] == ["train"]
            cli.override(config, *overrides[0])
        except UserError as e:
            assert_short(e)
            continue
        taken += 1
        resolved = cli.resolve(config)
        assert json.loads(json.dumps(resolved, allow_nan=False)) == resolved
        name = overrides[0][0]
        group, _, field = name.rpartition(".")
        node = config[group] if group else config
        assert type(node[field]) is type(present[name])
        assert dict(flat(resolved)) == FIELDS | {name: as_read(node[field])}
        node[field] = present[name]
    assert cli.resolve(config) == BASE  # what was refused has changed nothing
    assert 2000 < taken < 8000


@settings(max_examples=300)
@given(st.sampled_from(sorted(FIELDS)), st.text())
def test_any_text_is_taken_or_refused_in_one_line(name, text):
    config = cli.load_config("configs/glyphs.py:cxda,smoke")
    try:
        cli.override(config, name, text)
    except UserError as e:
        assert_short(e)
    assert json.loads(json.dumps(cli.resolve(config), allow_nan=False)) == cli.resolve(config)


def test_a_tuple_longer_than_anyone_types_is_refused(overrides):
    config = cli.load_config("configs/glyphs.py:cxda,smoke")
    for text in (f"({'1,' * 600})", "(" * 600 + ")" * 600):
        with pytest.raises(UserError, match="expected a tuple such as") as refused:
            cli.override(config, "net.stages", text)
        assert_short(refused.value)


@pytest.mark.parametrize("value", [2**62, 100_001, -(2**62), 0])
def test_data_are_not_made_in_absurd_numbers(tmp_path, value):
    makers = {
        "glyphs": [{"drawings": value}, {"writers": (1, value, 1)}, {"writers": (value,) * 300}],
        "glyphs_c": [{"images": value}],
    }
    for benchmark, changes in makers.items():
        for change in changes:
            with pytest.raises(UserError, match=f"data.{next(iter(change))}=") as refused:
                BENCHMARKS[benchmark]({"benchmark": benchmark, "data": change}, tmp_path)
            assert_short(refused.value)
    assert not list(tmp_path.iterdir())


@given(st.text(max_size=400))
def test_data_of_any_name_are_found_missing_in_one_line(name):
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(UserError, match="no prepared data") as refused:
            BENCHMARKS["folder"]({"benchmark": "folder", "data": {"name": name}}, Path(folder))
        assert_short(refused.value, folder)


@pytest.fixture(scope="module")
def small_store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    write_store(folder / "store", INFO, make_domains())
    return open_store(folder / "store")


SMALL = {"episode": {"num_domains": 3, "per_domain": 4, "num_query": 5}, "attention": {"features": "pool"}}


def small_config(method):
    config = cli.load_config(f"configs/glyphs.py:{method},smoke")
    config.update(SMALL)
    return config


def taken(config, name, text):
    try:
        cli.override(config, name, text)
    except UserError:
        return False
    return True


def built(config, store):
    """The experiment and the start of its run, or None where a UserError of one line says why not."""
    try:
        experiment = build_on(config, store)
        start_from_weights(config, {"params": {}, "batch_stats": {}})
    except UserError as e:
        assert_short(e)
        return None
    return experiment


def shapes(method, store):
    return jax.eval_shape(method.init, jax.random.key(0), Images(store.images[:2], np.zeros(2, np.int32)))


def test_what_is_taken_is_built_or_refused_in_one_line(small_store):
    rng, found = np.random.default_rng(1), 0
    pools = {int: NUMBERS, float: NUMBERS, list: TUPLES}
    methods, fields = list(METHODS), [name for name in FIELDS if not name.startswith(("data.", "benchmark"))]
    for i in range(400):
        config, changes = small_config(methods[i % len(methods)]), 0
        config.net.name = one_of(rng, ["cnn", "cnn", "resnet50"])
        for name in (fields[i % len(fields)], *(one_of(rng, fields) for _ in range(rng.integers(3)))):
            changes += any(taken(config, name, one_of(rng, pools.get(type(FIELDS[name]), TEXTS))) for _ in range(3))
        experiment = built(cli.resolve(config), small_store) if changes else None
        if experiment is None:
            continue
        found += 1
        if not experiment.method.trains_as:
            assert len(next(experiment.source.batches(experiment.train_plans, 0, 1)).query)
        assert len(experiment.task_plans("test")(range(1)).query) == 1
        if i % 10 == 0:
            assert "params" in shapes(experiment.method, small_store)
    assert 40 < found < 360


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_a_number_outside_its_limits_is_named(small_store, name):
    low, high = LIMITS[name]
    for value in (low - 1, high + 1, 2**62, -(2**62)):
        config = small_config("cxda")
        cli.override(config, name, str(value))
        with pytest.raises(UserError) as refused:
            build_on(cli.resolve(config), small_store)
        assert str(refused.value) == f"{name}={value} must be at {f'least {low}' if value < low else f'most {high}'}"


@pytest.mark.parametrize(("method", "name"), [("erm", "net.width"), ("cml", "cml.width"), ("sla", "sla.adapters")])
def test_the_largest_networks_have_shapes(small_store, method, name):
    config = small_config(method)
    cli.override(config, name, str(LIMITS[name][1]))
    assert "params" in shapes(built(cli.resolve(config), small_store).method, small_store)


@pytest.mark.parametrize(("field", "value"), [("heads", 3), ("ratio", -1), ("ratio", 0), ("scale", "none")])
def test_wrong_attention_is_refused_before_a_run_begins(small_store, field, value):
    config = small_config("cxda_p2p")
    config.attention[field] = value
    with pytest.raises(UserError, match=f"attention.{field}={value!r}") as refused:
        build_on(cli.resolve(config), small_store)
    assert_short(refused.value)


@pytest.mark.parametrize("stages", ["()", "(0, 2)", "(1, -1)", "(101,)", "(9999999999, 1)", "(1, 1, 1, 1, 1, 1, 1)"])
def test_stages_that_no_network_has_are_refused(small_store, stages):
    config = small_config("erm")
    config.net.name = "resnet50"
    cli.override(config, "net.stages", stages)
    with pytest.raises(UserError, match="net.stages=.*: give one to six counts of 1 to 100 blocks") as refused:
        build_on(cli.resolve(config), small_store)
    assert_short(refused.value)


@pytest.mark.parametrize("name", ["seed", "evaluation.seed"])
def test_the_largest_seed_is_used(small_store, name):
    config = small_config("cotta")
    cli.override(config, name, str(LIMITS[name][1]))
    experiment = built(cli.resolve(config), small_store)
    plan = experiment.task_plans("test")(range(3)) if name != "seed" else experiment.train_plans(2)
    assert len(plan.query) and jax.random.key(experiment.config["seed"]).shape == ()


@given(st.sampled_from(["learning_rate", "momentum", "weight_decay"]), st.floats())
@example("learning_rate", 0.0)
@example("learning_rate", 1.0)
@example("momentum", 0.0)
@example("momentum", 1.0)
@example("weight_decay", 0.0)
@example("weight_decay", math.inf)
def test_an_optimizer_is_built_from_numbers_that_it_can_use(small_store, field, value):
    config = cli.resolve(small_config("ft_em"))
    config["optimizer"][field] = value
    good = math.isfinite(value) and value >= 0 and (field, value) != ("learning_rate", 0)
    if good and (field != "momentum" or value < 1):
        assert built(config, small_store)
        return
    with pytest.raises(UserError, match=re.escape(f"optimizer.{field}={value} must be a")) as refused:
        build_on(config, small_store)
    assert_short(refused.value)


@pytest.mark.parametrize(("padding", "least"), [("arm", 16), ("same", 4)])
@pytest.mark.parametrize("method", ["erm", "cxda", "cml"])
def test_images_too_small_for_the_network_are_refused(padding, least, method):
    config = small_config(method)
    config.net.padding = padding
    for shape in ((least, least + 3, 1), (least - 1, least + 3, 1), (least + 3, least - 1, 1), (1, 1, 1)):
        store = DomainStore(
            INFO, np.zeros((2, *shape), np.uint8), np.zeros(2), np.array([0, 2]), ("train",), ("a",), ""
        )
        if min(shape[:2]) >= least:
            assert "params" in shapes(build_method(cli.resolve(config), store), store)
        else:
            with pytest.raises(UserError, match=f"net.padding='{padding}' takes images from {least} pixels") as refused:
                build_method(cli.resolve(config), store)
            assert_short(refused.value)
