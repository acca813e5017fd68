"""Config files and what a user may override in them: any text is taken or refused in one line."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from absl import flags
from hypothesis import given, settings
from hypothesis import strategies as st

from cxda_jax.config import load, override, read, resolve
from cxda_jax.errors import UserError
from cxda_jax.experiment import BENCHMARKS, open_data
from launch import cli
from tests.lines import ROOT, cases, one_line, refused

BASE = read("glyphs:cxda,smoke")
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


VALUES = dict(flat(BASE))
NAMES, GROUPS = list(VALUES), [name for name, value in BASE.items() if isinstance(value, dict)]


# Config files

GET = "def get_config(argument=None):\n    "
FILES = [  # text of mine.py, what follows --config=, what the line says
    ("missing", None, "xyz", "no file xyz; give a file's path, or one of .*glyphs"),
    ("missing near", None, "configs/glyphz.py:cxda", "no file configs/glyphz.py; did you mean configs/glyphs.py"),
    ("a folder", None, "configs", "no file configs; did you mean configs/"),
    ("no file name", None, ":cxda", "no file ''; give a file's path"),
    ("unknown variant", None, "configs/glyphs.py:cxda,smok", "variant 'smok' is unknown; .* :cxda,smoke"),
    ("syntax error", "def get_config(:\n", "mine.py", r"SyntaxError: .*\(mine.py, line 1\); --debug"),
    ("binary", b"x = '\xff'\n", "mine.py", "SyntaxError.*; --debug"),
    ("no get_config", "c = 1\n", "mine.py:cxda", r"no get_config\(argument\); see configs/glyphs.py"),
    ("raises", GET + "return 1 / 0\n", "mine.py", "ZeroDivisionError: division by zero; --debug"),
    ("raises a value error", GET + "raise ValueError('a\\n' + 'b ' * 400)\n", "mine.py", r"a b b b .*\.\.\.b b"),
    ("imports what is not there", "import no_such_package\n", "mine.py", "ModuleNotFoundError: .*no_such_package"),
    ("takes no variant", "def get_config():\n    pass\n", "mine.py:cxda", "TypeError: get_config.* 0 positional"),
    ("returns nothing", GET + "pass\n", "mine.py", "returns a NoneType; start from .*default"),
    ("returns a part", "from ml_collections import ConfigDict\nget_config = lambda _: ConfigDict({'benchmark': 'x'})\n",
     "mine.py", "returns a config without .*; start from .*default"),
]  # fmt: skip


@cases("text, spec, said", FILES)
def test_config_files(tmp_path, monkeypatch, text, spec, said):
    monkeypatch.chdir(tmp_path if text else ROOT)
    if text:
        Path("mine.py").write_bytes(text if isinstance(text, bytes) else text.encode())
    flags.FLAGS.mark_as_parsed()  # --debug is looked at
    with refused(f"^--config={spec}: .*{said}", tmp_path):
        load(spec)


# Single fields


@pytest.mark.parametrize(("name", "text", "value"), [
    ("seed", "3", 3), ("optimizer.learning_rate", "3e-3", 0.003), ("augment.crop", "false", False),
    ("net.dtype", "bfloat16", "bfloat16"), ("data.writers", "(4, 3, 2)", (4, 3, 2)), ("net.stages", "(2, 2)", (2, 2)),
    ("net.dont_load", "('fc', 'layer4')", ("fc", "layer4")),
])  # fmt: skip
def test_a_text_is_read_as_the_fields_kind(name, text, value):
    found = dict(flat(load("configs/glyphs.py:cxda", [(name, text)]).to_dict()))[name]
    assert found == value and type(found) is type(value)


TEXT_REFUSED = [  # the method, --config.NAME=TEXT, what the line says after its first part --config.NAME
    ("cxda", "optimizer.learning_rat", "1", "config.optimizer has no field 'learning_rat'; did you mean 'learning_rate'"),
    ("cxda", "data.drawing", "100", "config.data has no field 'drawing'; did you mean 'drawings'"),
    ("cxda", "zzz", "1", "config has no field 'zzz'; fields: attention, augment, batch_norm, .*"),
    ("cxda", "", "1", "config has no field ''; fields: attention"),
    ("cxda", "seed.x", "1", "config.seed is a single value, it has no field 'x'"),
    ("cxda", "episode", "5", "is a group; set one of its fields: num_domains, num_query, per_domain, replacement"),
    *[("cxda", "train.steps", text, f"={text}: expected a int such as") for text in ("ten", "1e3", "", "1.0", "9" * 20)],
    *[("cxda", "optimizer.learning_rate", t, f"={t}: expected a finite float such as") for t in ("nan", "inf", "0.01,")],
    ("cxda", "episode.replacement", "maybe", "=maybe: expected a bool such as False"),
    *[("cxda", "data.writers", t, r": expected a tuple such as \(6, 5, 5\)") for t in ("7", "[6, 5, 5]", "(1, 2.5, 3)", "__import__('os')")],
    *[("cxda", "net.stages", text, ": expected a tuple such as") for text in (f"({'1,' * 600})", "(" * 600 + ")" * 600)],
]  # fmt: skip


@pytest.mark.parametrize(("method", "name", "text", "said"), TEXT_REFUSED, ids=lambda value: value[:20])
def test_texts_that_no_field_takes(method, name, text, said):
    with refused(rf"^--config\.{name}.*{said}"):
        load(f"configs/glyphs.py:{method},smoke", [(name, text)])


# Random texts


def one_of(rng, values):
    return values[rng.integers(len(values))]


def mistyped(rng, text):
    """The text after up to three slips of the finger."""
    for _ in range(rng.integers(1, 4)):
        at = rng.integers(len(text) + 1)
        text = [
            text[:at] + one_of(rng, SYMBOLS) + text[at:],
            text[:at] + text[at + 1 :],
            text[:at] + text[at : at + 2][::-1] + text[at + 2 :],
            text[:at] + text[at : at + 1].swapcase() + text[at + 1 :],
            text[:at] + text[max(0, at - rng.integers(1, 6)) :],
        ][rng.integers(5)]
    return text


def some_name(rng):
    name, other, group = one_of(rng, NAMES), one_of(rng, NAMES), one_of(rng, GROUPS)
    slips = [*(mistyped(rng, name) for _ in range(3)), name + one_of(rng, SYMBOLS), one_of(rng, SYMBOLS) * 999]
    wrong = [group, f"{name}.{other}", name.split(".")[-1], f"{group}.{other.split('.')[-1]}", *slips]
    return name if rng.random() < 0.55 else one_of(rng, wrong)


def some_value(rng, name):
    present, other = (str(VALUES.get(n, "")) for n in (name, one_of(rng, NAMES)))
    drawn = [one_of(rng, values) for values in (NUMBERS, NUMBERS, TUPLES, TEXTS)]
    return one_of(rng, [*drawn, present, other, mistyped(rng, present), mistyped(rng, other)])


def test_ten_thousand_overrides_are_each_taken_or_refused_in_one_line():
    rng, config = np.random.default_rng(0), load("configs/glyphs.py:cxda,smoke")
    present, taken = dict(flat(config.to_dict())), 0
    for _ in range(10_000):
        name = some_name(rng)
        text = some_value(rng, name)
        arguments = [f"--config.{name}={text}"] if rng.random() < 0.9 else [f"--config.{name}", text]
        try:
            rest = cli.take_changes(["train", *arguments])
            assert len(cli.CHANGES) == 1 and rest[:1] == ["train"]
            name, text = cli.CHANGES.pop()
            override(config, name, text)
        except UserError as e:
            one_line(e)
            continue
        taken += 1
        resolved, found = resolve(config), dict(flat(config.to_dict()))[name]
        assert json.loads(json.dumps(resolved, allow_nan=False)) == resolved
        assert type(found) is type(present[name])
        assert dict(flat(resolved)) == VALUES | {name: json.loads(json.dumps(found))}
        config.update_from_flattened_dict({name: present[name]})
    assert resolve(config) == BASE  # what was refused has changed nothing
    assert 2000 < taken < 8000


@settings(max_examples=300)
@given(st.sampled_from(sorted(VALUES)), st.text())
def test_any_text_is_taken_or_refused_in_one_line(name, text):
    config = load("configs/glyphs.py:cxda,smoke")
    try:
        override(config, name, text)
    except UserError as e:
        one_line(e)
    assert json.loads(json.dumps(resolve(config), allow_nan=False)) == resolve(config)


# Data

DATA = [  # benchmark, the field, its text, what the line says
    *[("glyphs", "data.writers", t, r"data.writers=.*: give three counts of at least 1") for t in ("(6, 5)", "(6, 5, 0)")],
    ("glyphs", "data.drawings", "0", "data.drawings=0 must be at least 1"),
    ("glyphs_c", "data.images", "-3", "data.images=-3 must be at least 1"),
    ("glyphs_c", "data.seed", "-3", "data.seed=-3 must not be negative"),
    ("glyphs", "benchmark", "glyphs_d", "benchmark='glyphs_d' is unknown; did you mean 'glyphs_c'"),
    ("folder", "data.name", "mine", "{tmp}/mine: no prepared data; .*prepare --benchmark=folder .*--name=mine"),
    ("femnist", "data.name", "../elsewhere", r"{tmp}/\.\./elsewhere: no prepared data; .*--name=\.\./elsewhere"),
]  # fmt: skip


@pytest.mark.parametrize(("benchmark", "name", "text", "said"), DATA, ids=lambda value: value[:20])
def test_data_options(tmp_path, benchmark, name, text, said):
    with refused(f"^{said}", tmp_path):
        open_data(read(f"{benchmark}:cxda,smoke", [(name, text)]), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [2**62, 100_001, -(2**62), 0])
def test_data_are_not_made_in_absurd_numbers(tmp_path, value):
    of_glyphs = {"drawings": value}, {"writers": (1, value, 1)}, {"writers": (value,) * 300}
    for benchmark, data in [*(("glyphs", data) for data in of_glyphs), ("glyphs_c", {"images": value})]:
        with refused(f"data.{next(iter(data))}="):
            BENCHMARKS[benchmark]({"benchmark": benchmark, "data": data}, tmp_path)
    assert not list(tmp_path.iterdir())


@given(st.text(max_size=400))
def test_data_of_any_name_are_found_missing_in_one_line(name):
    with tempfile.TemporaryDirectory() as folder, refused("no prepared data", folder):
        BENCHMARKS["folder"]({"benchmark": "folder", "data": {"name": name}}, Path(folder))
