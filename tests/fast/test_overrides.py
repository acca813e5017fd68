"""Config files and what a user may override in them: any text is taken or refused in one line."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from absl import flags

from cxda_jax.config.reading import load, override, read, resolve
from cxda_jax.errors import UserError
from cxda_jax.training.experiment import BENCHMARKS, open_data
from launch import cli
from tests.lines import ROOT, cases, one_line, refused


def whole():
    """A config with the fields of all methods."""
    return runpy.run_path(str(ROOT / "configs" / "glyphs.py"))["get_config"]("cxda,smoke")


BASE = resolve(whole())
SYMBOLS = list("=.,:-+_()[]{}'\"\\ \t\n\0aeE019%$~é界\u2028\ud800\U0001f600")
NUMBERS = [
    "0", "-0", "1", "-1", "2", "7", "0.5", "1.0", "-0.5", "1e-5", "1e-400", "1e400", "1e30", "nan", "inf", "infinity",
    "1_0", "0x10", "١٢", "²", "4294967296", "-9223372036854775809", "18446744073709551616", "9" * 5000, "1/2", "5j",
]  # fmt: skip
TEXTS = [
    "", " ", "true", "FALSE", "yes", "off", "None", "cxda", "erm", "sgd", "resnet50", "bfloat16", "support", "stop",
    "own", "leave_one_out", "batch_norm", "image", "teacher", "flat", "head_dim", "same", "worst_decile", "../..",
    "/dev/null", "a\0b", "a\nb", "\x1b[31m", "é界", "\ud800", "x" * 300, "y " * 20_000, "==", "a=b", "--seed=1",
]  # fmt: skip
TUPLES = [
    "()", "(1,)", "(1, 2, 3)", "(1, 1)", "1, 2", "(0,)", "(-1, 2)", "(1.5,)", "(True,)", "(None,)", "('fc',)", "('',)",
    "('a', 1)", "[1, 2]", "{1: 2}", "{[]}", "((1,),)", "(1", "(nan,)", "(1e400,)", "(9999999999,)", f"({'9' * 5000},)",
    "(" * 500 + ")" * 500, "[" * 90_000, "-" * 90_000 + "1", f"({'1,' * 90_000})", "('\\d',)", "(1if 1else 2,)",
    "(__import__('os'),)", "lambda: 0", "(10**10**10,)", "b'x',", "f'{1}',", "(1,\0)", "#", "\\",
]  # fmt: skip


def flat(config, prefix=""):
    for name, value in config.items():
        yield from flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]


VALUES = dict(flat(BASE))
NAMES, GROUPS = list(VALUES), [name for name, value in BASE.items() if isinstance(value, dict)]
PART = "from ml_collections import ConfigDict\nget_config = lambda _: ConfigDict({'benchmark': 'x'})\n"
MISTYPED = (
    "from cxda_jax.config import default\ndef get_config(_):\n    c = default()\n    c.cxda_anny = {}\n    return c\n"
)
FILES = [  # text of mine.py, what follows --config=, what the line says
    ("missing", None, "xyz", "no file xyz; give a file's path, or one of .*glyphs"),
    ("unknown variant", None, "configs/glyphs.py:cxda,smok", "variant 'smok' is unknown; .* :cxda,smoke"),
    ("syntax error", "def get_config(:\n", "mine.py", r"SyntaxError: .*\(mine.py, line 1\); --debug"),
    ("raises", "def get_config(_):\n    return 1 / 0\n", "mine.py:x", "ZeroDivisionError: division by zero; --debug"),
    ("takes no variant", "def get_config():\n    pass\n", "mine.py:cxda", "TypeError: get_config.* 0 positional"),
    ("returns a part", PART, "mine.py", "returns a config without .*; start from .*default"),
    ("mistypes a group", MISTYPED, "mine.py", "config=cxda_anny: unknown; did you mean 'cxda_any'"),
]


@cases("text, spec, said", FILES)
def test_config_files(tmp_path, monkeypatch, text, spec, said):
    monkeypatch.chdir(tmp_path if text else ROOT)
    if text:
        Path("mine.py").write_text(text)
    flags.FLAGS.mark_as_parsed()  # --debug is looked at
    with refused(f"^--config={spec}: .*{said}", tmp_path):
        load(spec)


def test_a_text_is_read_as_the_fields_kind():
    for name, text, value in (
        ("seed", "3", 3), ("optimizer.learning_rate", "3e-3", 0.003), ("augment.crop", "false", False),
        ("net.dtype", "bfloat16", "bfloat16"), ("data.writers", "(4, 3, 2)", (4, 3, 2)),
        ("net.stages", "(2, 2)", (2, 2)), ("net.dont_load", "('fc', 'layer4')", ("fc", "layer4")),
    ):  # fmt: skip
        found = dict(flat(load("configs/glyphs.py:cxda", [(name, text)]).to_dict()))[name]
        assert found == value and type(found) is type(value)


REFUSED = [  # --config.NAME=TEXT, what the line says after its first part --config.NAME
    ("optimizer.learning_rat", "1", "config.optimizer has no field 'learning_rat'; did you mean 'learning_rate'"),
    ("zzz", "1", "config has no field 'zzz'; fields: attention, augment, batch_norm, .*"),
    ("episode", "5", ": it is a group; set one of its fields: concentration, .*num_domains, num_query, .*, shares"),
    *[("train.steps", text, f"={text}: expected an int such as") for text in ("ten", "1e3", "", "1.0", "9" * 20)],
    *[("optimizer.learning_rate", t, f"={t}: expected a finite float such as") for t in ("nan", "inf", "0.01,")],
    *[("data.writers", t, r": expected a tuple such as \(6, 5, 5\)") for t in ("7", "(1, 2.5, 3)", "__import__('os')")],
]
DATA = [  # benchmark, the field, its text, what the line says
    ("glyphs", "data.writers", "(6, 5)", "data.writers=.*: expected three counts of at least 1"),
    ("glyphs_c", "data.images", "-3", "data.images=-3: must be at least 1"),
    ("glyphs", "benchmark", "glyphs_d", "benchmark='glyphs_d': unknown; did you mean 'glyphs_c'"),
    ("folder", "data.name", "mine", "{tmp}/mine: no prepared data; .*prepare --benchmark=folder .*--name=mine"),
    ("femnist", "data.name", "../elsewhere", r"{tmp}/\.\./elsewhere: no prepared data; .*--name=\.\./elsewhere"),
]


def one_of(rng, values):
    return values[rng.integers(len(values))]


def some_name(rng):
    name, other, group, symbol = (one_of(rng, values) for values in (NAMES, NAMES, GROUPS, SYMBOLS))
    inside = f"{name}.{other}", f"{group}.{other.split('.')[-1]}", name.split(".")[-1]
    return one_of(rng, [*[name] * 9, group, *inside, name + symbol, symbol * 999, name[:-1], name.swapcase()])


def some_value(rng, name):
    present, other = (str(VALUES.get(n, "")) for n in (name, one_of(rng, NAMES)))
    drawn = [one_of(rng, values) for values in (NUMBERS, NUMBERS, TUPLES, TEXTS)]
    return one_of(rng, [*drawn, present, other, present + one_of(rng, SYMBOLS), other[1:]])


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.weekly)])
def test_random_overrides_are_each_taken_or_refused_in_one_line(count):
    rng, config = np.random.default_rng(0), whole()
    present, taken = dict(flat(config.to_dict())), 0
    for _ in range(count):
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
    assert 0.2 < taken / count < 0.8


def test_texts_that_no_field_takes_data_options_and_absurd_numbers(tmp_path):
    texts = [("glyphs", name, text, rf"--config\.{name}.*{said}") for name, text, said in REFUSED]
    for benchmark, name, text, said in (*texts, *DATA):
        with refused(f"^{said}", tmp_path):
            open_data(read(f"{benchmark}:cxda,smoke", [(name, text)]), tmp_path)
    for benchmark, data in (("glyphs", {"drawings": 2**62}), ("glyphs", {"writers": (1, 0, 1)})):
        with refused(f"data.{next(iter(data))}="):
            BENCHMARKS[benchmark](benchmark, data, tmp_path)
    assert not list(tmp_path.iterdir())
