"""What a config may ask for: any text is taken or refused by its field, and what is taken is built."""

import copy
import json
import math
import runpy

from cxda_jax.config.fields import Group
from cxda_jax.config.reading import checked, load, override, read, resolve
from cxda_jax.config.registry import schema
from cxda_jax.errors import UserError
from cxda_jax.training.experiment import build_on, open_data
from tests.lines import ROOT, one_line, refused

WHOLE = runpy.run_path(str(ROOT / "configs" / "glyphs.py"))["get_config"]("cxda,smoke")  # the fields of all methods
BASE = resolve(WHOLE)
FIELDS = {f"{g}.{n}": field for g, of in schema().items() if isinstance(of, Group) for n, field in of.fields.items()}
TEXTS = [
    "0", "-1", "7", "0.5", "1e-5", "1e400", "nan", "1_0", "0x10", "²", "9" * 5000, "", "true", "None", "cxda", "sgd", "../..",
    "a\0b", "\x1b[31m", "\ud800", "x" * 300, "a=b", "()", "(1,)", "(1, 2, 3)", "(-1, 2)", "(1.5,)", "('fc',)", "{[]}",
    "(" * 500 + ")" * 500, "-" * 90_000 + "1", "(__import__('os'),)", "(10**10**10,)", "lambda: 0", "#",
]  # fmt: skip


def small_config(method, *changes):
    small = {"episode.num_domains": "3", "episode.per_domain": "4", "episode.num_query": "5"}
    return load(f"configs/glyphs.py:{method},smoke", [*small.items(), *changes])


def flat(config, prefix=""):
    for name, value in config.items():
        yield from flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]


def test_any_text_is_taken_or_refused_by_its_field_and_never_run(tmp_path, monkeypatch):
    """A text that is taken keeps the field's kind and can be written as JSON; one that is refused changes nothing."""
    monkeypatch.chdir(tmp_path)
    config, taken = copy.deepcopy(WHOLE), 0
    present = dict(flat(config.to_dict()))
    for name, before in present.items():
        for text in TEXTS:
            try:
                override(config, name, text)
            except UserError as e:
                assert name in one_line(e)
                continue
            found, taken = dict(flat(config.to_dict()))[name], taken + 1
            assert type(found) is type(before) and json.dumps(resolve(config), allow_nan=False)
            config.update_from_flattened_dict({name: before})
    assert resolve(config) == BASE and taken > len(present) and not [*tmp_path.iterdir()]


def test_a_number_outside_its_range_and_a_choice_that_there_is_not_are_named():
    config = copy.deepcopy(BASE)
    for name, field in FIELDS.items():
        group, _, leaf = name.partition(".")
        present, accepted, wrong = config[group][leaf], [], []
        if field.within:
            low, high, closed = field.within
            ends = {x for x, inside in zip((low, high), closed, strict=True) if inside and math.isfinite(x)}
            beyond = {low - 1, high + 1, 2**62, -(2**62), math.nan, low, high} - ends
            kind = type(present)
            accepted, wrong = ([kind(x) for x in xs if kind is float or math.isfinite(x)] for xs in (ends, beyond))
            wrong = [x for x in wrong if x != x or not low < x < high]
        elif field.choices:
            wrong = [type(field.choices[-1])(99)]
        for value in wrong:
            config[group][leaf] = value
            with refused(field=name):
                checked(config)
        for value in accepted:
            config[group][leaf] = value
            checked(config)
        config[group][leaf] = present


def test_values_that_do_not_fit_together_or_the_data_are_named(fixed_store, tmp_path):
    for method, name, text in (
        ("bn", "train.support_loss", "leave_one_out"), ("cxda_any", "train.support_loss", "own"),
        ("cxda", "episode.num_domains", "4"), ("erm", "episode.num_query", "9999"), ("cxda", "attention.heads", "7"),
        ("icrm", "icrm.heads", "7"), ("erm", "net.stages", "(0, 2)"),
    ):  # fmt: skip
        config = small_config(method, ("episode.per_domain", "10"), ("episode.num_query", "20"), (name, text))
        config.net.name = "resnet50" if name == "net.stages" else config.net.name
        with refused(named=name):
            build_on(checked(resolve(config)), fixed_store)
    for benchmark, name, text in (
        ("glyphs", "data.writers", "(6, 5)"), ("glyphs_c", "data.images", "-3"), ("folder", "data.name", "mine"),
        ("femnist", "data.name", "../elsewhere"),
    ):  # fmt: skip
        with refused("", tmp_path, named=text if name == "data.name" else name):
            open_data(read(f"{benchmark}:cxda,smoke", [(name, text)]), tmp_path)
    assert not [*tmp_path.iterdir()]
