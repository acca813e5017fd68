"""How configs are read, changed, checked and shown. What fields there are stands in fields.py."""

import ast
import contextlib
import difflib
import hashlib
import json
import math
import os
import re
import runpy
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cxda_jax.errors import UserError, brief
from cxda_jax.fields import FIELDS, Field, Group

Config = Mapping[str, Any]  # nested dicts of plain values, as in a run's config.json
Changes = Sequence[tuple[str, str]]  # dotted field, text of its new value


def default() -> Any:
    """The paper's protocol, as a ConfigDict. A benchmark's file sets what differs."""
    from ml_collections import ConfigDict

    return ConfigDict(
        {
            name: {n: field.default for n, field in entry.fields.items()} if isinstance(entry, Group) else entry.default
            for name, entry in FIELDS.items()
        }
    )


def variant(argument: str | None) -> tuple[str, bool]:
    """'cxda,smoke' to ("cxda", True): a method, and whether shrink() applies."""
    method, _, rest = (argument or "cxda").partition(",")
    if rest not in ("", "smoke"):
        raise ValueError(f"variant {rest!r} is unknown; the only one is 'smoke', as in :{method},smoke")
    return method, rest == "smoke"


def shrink(c: Any) -> None:
    """Changes a ConfigDict so that all programs run in seconds."""
    c.smoke = True
    c.net.width = 16  # 8 heads of one channel each
    c.net.stages = (1, 1, 1)
    c.cml.width = 8
    c.cotta.copies = 2
    c.finetune.steps = 2
    c.train.steps = 20
    c.train.log_every = 5
    c.evaluation.every_steps = 10
    c.evaluation.val_tasks = 4
    c.evaluation.test_tasks = 10


def folder() -> Path:
    """The folder of this package's configs: beside it in a checkout, inside it where it is installed."""
    inside = Path(__file__).with_name("configs")
    return inside if inside.is_dir() else Path(__file__).parents[1] / "configs"


def load(spec: str, changes: Changes = ()) -> Any:
    """The ConfigDict of `file.py:variant`, or of `name:variant` for configs of this package, with changes applied."""
    from ml_collections import ConfigDict

    path, _, argument = spec.partition(":")
    if path.isidentifier() and (folder() / f"{path}.py").is_file():
        path = str(folder() / f"{path}.py")
    if not os.path.isfile(path):
        names = [p.stem for p in sorted(folder().glob("*.py"))]
        known = [*names, *(str(p) for p in Path("configs").glob("*.py"))]
        near = difflib.get_close_matches(path, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"give a file's path, or one of {', '.join(names)}"
        raise UserError(f"--config={brief(spec)}: no file {brief(path) or repr('')}; {hint}")
    try:
        get_config = runpy.run_path(path).get("get_config")
        config: Any = get_config(argument or None) if get_config else None
    except ValueError as e:  # a message of the config to its user; other errors are bugs in it
        raise UserError(f"--config={brief(spec)}: {brief(' '.join(str(e).split()), 120)}") from e
    except Exception as e:
        what = f"{type(e).__name__}: {brief(' '.join(str(e).split()), 80)}"
        raise UserError(f"--config={brief(spec)}: {what}; --debug shows where") from e
    if not get_config:
        raise UserError(f"--config={brief(spec)}: defines no get_config(argument); see configs/glyphs.py")
    lacking = [name for name in FIELDS if not isinstance(config, ConfigDict) or name not in config]
    if lacking:
        what = f"a config without {lacking[0]}" if isinstance(config, ConfigDict) else f"a {type(config).__name__}"
        raise UserError(f"--config={brief(spec)}: get_config() returns {what}; start from cxda_jax.config.default()")
    for name, text in changes:
        override(config, name, text)
    return config


def resolve(config: Any) -> dict[str, Any]:
    """A ConfigDict as nested dicts of values that JSON can hold, so that a saved config equals the one in use."""
    return json.loads(json.dumps(config.to_dict()))


def read(spec: str, changes: Changes = ()) -> dict[str, Any]:
    """load() and resolve()."""
    return resolve(load(spec, changes))


def changed(config: Config, changes: Changes) -> Config:
    """A copy of a resolved config with changes applied."""
    from ml_collections import ConfigDict

    fields = ConfigDict(config, convert_dict=True)
    for name, text in changes:
        override(fields, name, text)
    return fields.to_dict()


def config_hash(config: Config) -> str:
    """A hash of a resolved config."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def differences(a: Config, b: Config, prefix: str = "config.") -> dict[str, tuple[Any, Any]]:
    """Dotted fields in which two configs differ, with both values."""
    differing = {}
    for name in sorted({*a, *b}):
        x, y = a.get(name), b.get(name)
        if isinstance(x, dict) and isinstance(y, dict):
            differing |= differences(x, y, f"{prefix}{name}.")
        elif x != y:
            differing[prefix + name] = (x, y)
    return differing


# Setting a field from a text. ml_collections' config_flags can do this too, but its errors are long tracebacks.


def override(config: Any, name: str, text: str) -> None:
    """Sets the dotted field `name` of a ConfigDict to `text`, read as the type of the present value."""
    from ml_collections import ConfigDict

    parent = node = config
    parts = name.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(node, ConfigDict) or part not in node:
            at = ".".join(["config", *parts[:depth]])
            if not isinstance(node, ConfigDict):
                raise UserError(
                    f"--config.{brief(name)}: {at} is a single value, it has no field {brief(repr(part), 30)}"
                )
            near = difflib.get_close_matches(part, list(node), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"fields: {', '.join(sorted(node))}"
            message = f"--config.{brief(name)}: {at} has no field {brief(repr(part), 30)}; {hint}"
            raise UserError(textwrap.shorten(message, 200, placeholder=" ..."))
        parent, node = node, node[part]
    if isinstance(node, ConfigDict):
        raise UserError(f"--config.{name} is a group; set one of its fields: {', '.join(sorted(node))}")
    parent[parts[-1]] = _value(name, text, node)


def _value(name: str, text: str, present: Any) -> Any:
    kind = type(present)
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind is tuple:
            value = _literal(text)
            if not isinstance(value, tuple) or {type(v) for v in value} - {type(p) for p in present}:
                raise ValueError
        else:
            value = kind(text)
        # JSON and 64 bits must be able to hold the numbers, so nan and infinity are refused.
        if not all(abs(v) < 2**63 for v in (value if kind is tuple else [value]) if isinstance(v, int | float)):
            raise ValueError
        return value
    except (KeyError, ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        what = "finite float" if kind is float else kind.__name__
        raise UserError(f"--config.{name}={brief(text)}: expected a {what} such as {present!r}") from None


def _literal(text: str) -> Any:
    if len(text) > 1000:  # the parser needs much memory and stack for long texts
        raise ValueError
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes such as "\\d"; a message must stay one line
        return ast.literal_eval(text)


# Checking values.


def check_all(config: Config) -> None:
    """Raises a UserError that names the first field of a resolved config with a value that it may not have."""
    for name, entry in FIELDS.items():
        for field_name, field in entry.fields.items() if isinstance(entry, Group) else [("", entry)]:
            value = config[name][field_name] if field_name else config[name]
            check_value(f"{name}.{field_name}" if field_name else name, value, field)


def check(group: str, **values: Any) -> None:
    """check_all() for parameters of a function that have the names of fields of this group."""
    entry = FIELDS[group]
    assert isinstance(entry, Group)
    for name, value in values.items():
        check_value(name, value, entry.fields[name])


def check_value(name: str, value: Any, field: Field) -> None:
    """Raises a UserError if the value is outside the field's range or choices."""
    if field.choices:
        choose(name, value, field.choices)
    if field.within and not field.within.holds(value):
        low, high = field.within.low, field.within.high
        expected = f"{'at least' if field.within.closed[0] else 'above'} {low:.10g}"
        if high < math.inf:
            expected += f" and {'at most' if field.within.closed[1] else 'below'} {high:.10g}"
        elif not math.isfinite(value):
            expected = f"a finite number {expected}"
        raise UserError(f"{name}={value} must be {expected}")


def choose(name: str, value: Any, allowed: Any) -> Any:
    """Returns the value if it is allowed. Otherwise raises a UserError that suggests the nearest one."""
    if value not in allowed:
        near = difflib.get_close_matches(str(value), map(str, allowed), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(
            f"{name}={brief(repr(value), 30)} is unknown; {hint}choose from {', '.join(map(str, sorted(allowed)))}"
        )
    return value


def lookup(name: str, key: str, table: Mapping[str, Any]) -> Any:
    """The table's entry of this key. Raises a UserError that suggests the nearest key if there is none."""
    return table[choose(name, key, table)]


def check_stored(config: Config, where: str, fix: str, fields: Mapping[str, Field | Group] = FIELDS) -> dict[str, Any]:
    """Checks that a config from a file has all fields, no others, and values of their types.

    Args:
      config: as it was read. The fields of `data` differ from benchmark to benchmark and are not checked.
      where: the file's name, for messages.
      fix: what the user can do, for messages.
      fields: the fields that it must have.

    Returns:
      The config, with the defaults of optional groups that it lacks.
    """
    for name in config:
        if name not in fields:
            raise UserError(f"{where}.{brief(name, 40)}: this version has no such field; {fix}")
    for name, entry in fields.items():
        at = f"{where}.{name}"
        if name not in config and isinstance(entry, Group) and entry.optional:
            config = {**config, name: {n: field.default for n, field in entry.fields.items()}}
        if name not in config:
            raise UserError(f"{at}: missing, though this version has that field; {fix}")
        value = config[name]
        if isinstance(entry, Group):
            if not isinstance(value, dict):
                raise UserError(f"{at}={brief(repr(value), 40)}: expected a group of fields; {fix}")
            if name != "data":
                check_stored(value, at, fix, entry.fields)
        elif not _is_like(value, entry.default):
            raise UserError(f"{at}={brief(repr(value), 40)}: expected {entry.default!r} or the like; {fix}")
    return dict(config)


def _is_like(value: Any, default: Any) -> bool:
    """Whether a value from JSON has the default's type."""
    if isinstance(default, tuple):
        return isinstance(value, list | tuple) and all(type(v) is type(default[0]) for v in value)
    return type(value) in (int, float) if isinstance(default, float) else type(value) is type(default)


# Names of parameters in messages.


@contextlib.contextmanager
def as_fields(config: Config, *groups: str) -> Iterator[None]:
    """A context in which a UserError about parameters names the fields of these groups of the config instead.

    For example, momentum=2.0 becomes batch_norm.momentum=2.0.
    """
    of_groups = ((name, f"{group}.{name}") for group in reversed(groups) if group in config for name in config[group])
    with renamed(dict(of_groups)):
        yield


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """A context in which a UserError names parameters by other names.

    A word counts as a parameter if the message begins with it, if = follows, or if it has an underscore.
    """

    def rename(word: re.Match[str]) -> str:
        name, follows = word.groups()
        is_parameter = name in names and (not word.start() or follows or "_" in name)
        return f"{names[name]}{follows}" if is_parameter else word[0]

    try:
        yield
    except UserError as e:
        raise UserError(re.sub(r"(?<![\w.'\"=/-])(\w+)(=?)", rename, str(e))) from e


# Showing the fields.


def table() -> str:
    """All fields as a Markdown table. A * marks groups that evaluation may change."""
    lines = ["| field | default | may be | meaning |", "|---|---|---|---|"]
    for name, entry in FIELDS.items():
        if isinstance(entry, Group):
            mark = "*" * entry.at_test
            lines.append(f"| **{name}**{mark} | | | {entry.help} |")
            lines += [_row(f"{name}.{n}", field) for n, field in entry.fields.items()]
        else:
            lines.append(_row(name, entry))
    return "\n".join(lines)


def _row(name: str, field: Field) -> str:
    may_be = ", ".join(map(str, field.choices)) or (str(field.within) if field.within else "")
    return f"| {name} | `{field.default!r}` | {may_be} | {field.help} |"
