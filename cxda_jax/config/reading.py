"""Reads, changes, checks and shows configs. registry.schema() lists their fields."""

import ast
import difflib
import hashlib
import json
import os
import runpy
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cxda_jax.config.fields import FIELDS, Config, Field, Group, choose, lookup
from cxda_jax.config.registry import METHODS, groups, held, readers, schema
from cxda_jax.errors import UserError, brief

Changes = Sequence[tuple[str, str]]  # dotted field, text of its new value


def default() -> Any:
    """The paper's protocol, as a ConfigDict with the fields of all methods. A benchmark's file sets what differs."""
    from ml_collections import ConfigDict

    return ConfigDict({name: _default_of(entry) for name, entry in schema().items()})


def _default_of(entry: Field | Group) -> Any:
    return entry.defaults() if isinstance(entry, Group) else entry.default


def variant(argument: str | None, *more: str) -> tuple[Any, ...]:
    """'cxda,smoke' to ("cxda", True): a method, and whether shrink() applies; then
    whether each variant in `more` was asked for."""
    method, *asked = (argument or "cxda").split(",")
    known = ("smoke", *more)
    for name in asked:
        if name not in known or asked.count(name) > 1:
            fix = f"give one of {', '.join(known)}" if more else "the only one is 'smoke'"
            raise ValueError(f"variant {','.join(asked)!r} is unknown; {fix}, as in :{method},{known[-1]}")
    return method, *(name in asked for name in known)


# Learning rates of networks of 16 channels, which validation domains chose: docs/study/tuning.json has the scores.
RATES: Mapping[str, Mapping[str, float]] = {
    "unipen": {
        "erm_iid": 0.01, "cxda_any": 0.1, "icrm": 0.01, "cxda_loo": 0.03, "cxda": 0.03, "bn": 0.03, "erm": 0.03,
        "cml": 0.01,
    },
    "cifar10_c": {
        "erm_iid": 0.03, "cxda_any": 0.03, "icrm": 0.03, "cxda_loo": 0.03, "cxda": 0.01, "bn": 0.01, "erm": 0.01,
        "cml": 0.01,
    },
}  # fmt: skip
LIKE = {"cxda_p2p": "cxda", "cxda_supervised": "cxda", "cxda_shares": "erm_iid"}  # which have the rate of another


def tuned_rate(data: str, method: str) -> float:
    """The learning rate of a method, as it was chosen on `data`, a key of RATES. A method that has none takes erm's."""
    rates = RATES[data]
    return rates.get(LIKE.get(method, method), rates["erm"])


def shrink(c: Any) -> None:
    """Changes a ConfigDict so that all programs run in seconds."""
    c.smoke = True
    for group, entry in schema().items():
        for name, field in entry.fields.items() if isinstance(entry, Group) else ():
            if field.smoke is not None:
                c[group][name] = field.smoke


def own_images(c: Any) -> None:
    """Changes a ConfigDict so that a task's images are of one domain, in the domain's own shares of the classes."""
    c.episode.update(num_domains=1, per_domain=100, skip_small=True)


def load(spec: str, changes: Changes = ()) -> Any:
    """The ConfigDict of `file.py:variant`, or of `name:variant` for configs of this package, with changes applied."""
    from ml_collections import ConfigDict

    inside = Path(__file__).parents[1] / "configs"  # as installed; in a checkout configs/ is beside the package
    folder = inside if inside.is_dir() else Path(__file__).parents[2] / "configs"
    own, flag = {p.stem: str(p) for p in sorted(folder.glob("*.py"))}, f"--config={brief(spec)}"
    path, _, argument = spec.partition(":")
    path = own.get(path, path)
    if not os.path.isfile(path):
        near = difflib.get_close_matches(path, [*own, *map(str, Path("configs").glob("*.py"))], n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"give a file's path, or one of {', '.join(own)}"
        raise UserError(f"{flag}: no file {brief(path) or repr('')}; {hint}")
    try:
        get_config = runpy.run_path(path).get("get_config")
        config: Any = get_config(argument or None) if get_config else None
    except Exception as e:
        said = " ".join(str(e).split())
        if isinstance(e, ValueError):  # a message of the config to its user; other errors are bugs in it
            raise UserError(f"{flag}: {brief(said, 120)}") from e
        raise UserError(f"{flag}: {type(e).__name__}: {brief(said, 80)}; --debug shows where") from e
    if not get_config:
        raise UserError(f"{flag}: defines no get_config(argument); see configs/glyphs.py")
    if lacking := [name for name in FIELDS if not isinstance(config, ConfigDict) or name not in config]:
        what = f"a config without {lacking[0]}" if isinstance(config, ConfigDict) else f"a {type(config).__name__}"
        raise UserError(f"{flag}: get_config() returns {what}; start from cxda_jax.config.default()")
    for name in config:
        choose(f"{flag}: config", name, schema())
    for text in [text for name, text in changes if name == "method"]:
        override(config, "method", text)
    if config.method in METHODS:  # checked() says what is wrong with another name
        kept = held(config.method, for_tests=True)
        for unread in [name for name in config if name not in kept]:
            del config[unread]
    for name, text in changes:
        override(config, name, text)
    return config


def resolve(config: Any) -> dict[str, Any]:
    """A ConfigDict as nested dicts of values that JSON can hold, so that a saved config equals the one in use."""
    return json.loads(json.dumps(config.to_dict()))


def read(spec: str, changes: Changes = ()) -> Config:
    """The config that load() gives, with all that its method reads."""
    return of_method(resolve(load(spec, changes)), for_tests=True)


def checked(fields: Mapping[str, Any]) -> Config:
    """The config of these values, which are plain ones in nested dicts and whole.

    A UserError names the first field with a value that it may not have, alone or beside others.
    """
    method = lookup("method", fields["method"], METHODS)
    for name, entry in schema().items():
        for field_name, field in entry.fields.items() if isinstance(entry, Group) and name in fields else ():
            field.check(f"{name}.{field_name}", fields[name][field_name])
        if isinstance(entry, Field):
            entry.check(name, fields[name])
    config = Config(fields, hash=config_hash(hashed(fields)))
    teaches, episode, norm = config.train.support_loss, config.episode, config.get("batch_norm")
    if teaches not in method.support_loss:
        fix = f"choose from {', '.join(method.support_loss)}"
        raise UserError(f"{config.method} does not know it", "train.support_loss", teaches, fix)
    if config.evaluation.tasks == "exhaustive" and (episode.shares, episode.mixture) != ("natural", "even"):
        fix = "leave it out, or episode.shares and episode.mixture"
        raise UserError("it asks every image in equal parts", "evaluation.tasks", "exhaustive", fix)
    if norm and norm.prior and norm.momentum != 1.0:
        fault = f"batch_norm.momentum={norm.momentum} sets the support's share too"
        raise UserError(fault, "batch_norm.prior", norm.prior, "leave momentum at 1 or prior at 0")
    return config


def replaced(config: Config, **values: Any) -> Config:
    """The config with other values: replaced(config, seed=1, train={"steps": 20})."""
    new = {name: {**config[name], **v} if isinstance(v, Mapping) else v for name, v in values.items()}
    return checked({**config, **new})


def changed(config: Config, changes: Changes) -> Config:
    """The config with changes applied."""
    from ml_collections import ConfigDict

    fields = ConfigDict(config, convert_dict=True)
    for name, text in changes:
        override(fields, name, text)
    return checked(fields.to_dict())


def of_method(config: Mapping[str, Any], method: str = "", for_tests: bool = False) -> Config:
    """The config for a method, or else for its own: with the groups that this one reads, and no others.

    A group that it lacks is as it is by default. `for_tests` is as in held().
    """
    method, fields = method or config["method"], schema()
    kept = held(method, for_tests)
    groups = {n: config[n] if n in config else _default_of(entry) for n, entry in fields.items() if n in kept}
    return checked(groups | {"method": method})


def hashed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config that its hash is made of.

    These are the fields that its method reads, but for optional ones that are as older versions had them. So a new
    method, or a new optional field, changes no hash.
    """
    kept, fields = {name: config[name] for name in held(config["method"])}, schema()
    return {name: _hashed(group, entry.fields) if isinstance(entry := fields[name], Group) else group
            for name, group in kept.items()}  # fmt: skip


def _hashed(group: Mapping[str, Any], fields: Mapping[str, Field]) -> dict[str, Any]:
    usual = {name for name, field in fields.items() if field.optional and group.get(name) == field.default}
    return {name: value for name, value in group.items() if name not in usual}


def config_hash(values: Any) -> str:
    """A hash of values that JSON can hold."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


# Setting a field from a text. ml_collections' config_flags can do this too, but its errors are long tracebacks.


def override(config: Any, name: str, text: str) -> None:
    """Sets the dotted field `name` of a ConfigDict to `text`, read as the type of the present value."""
    from ml_collections import ConfigDict

    parent = node = config
    parts, flag = name.split("."), f"--config.{brief(name)}"
    for depth, part in enumerate(parts):
        at = ".".join(["config", *parts[:depth]])
        lacks = f"no field {brief(repr(part), 30)}"
        if not isinstance(node, ConfigDict):
            raise UserError(f"{at} is a single value, it has {lacks}", flag)
        if not depth and part in groups() and part not in node:
            only = ", ".join(readers(part))
            raise UserError(f"{config.method} does not read it, only {only}", flag, fix="leave it out")
        if part not in node:
            near = difflib.get_close_matches(part, list(node), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"fields: {', '.join(sorted(node))}"
            raise UserError(f"{at} has {lacks}", flag, fix=textwrap.shorten(hint, 80, placeholder=" ..."))
        parent, node = node, node[part]
    if isinstance(node, ConfigDict):
        raise UserError("it is a group", flag, fix=f"set one of its fields: {', '.join(sorted(node))}")
    parent[parts[-1]] = _value(name, text, node)


def _value(name: str, text: str, present: Any) -> Any:
    kind = type(present)
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind is tuple:
            if len(text) > 1000:  # the parser needs much memory and stack for long texts
                raise ValueError
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about escapes such as "\\d"; a message must stay one line
                value = ast.literal_eval(text)
            if not isinstance(value, tuple) or {*map(type, value)} - {*map(type, present)}:
                raise ValueError
        else:
            value = kind(text)
        # JSON and 64 bits must be able to hold the numbers, so nan and infinity are refused.
        if not all(abs(v) < 2**63 for v in (value if kind is tuple else [value]) if isinstance(v, int | float)):
            raise ValueError
        return value
    except (KeyError, ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        what = "finite float" if kind is float else kind.__name__
        expected = f"expected {'an' if what == 'int' else 'a'} {what} such as {present!r}"
        raise UserError(expected, f"--config.{name}", brief(text)) from None


# Configs of earlier versions.

# Fields of earlier versions, and the value that runs may still hold.
RETIRED = {"attention.sink": False, "cxda_any.plain": 0.5, "optimizer.chain": ""}


def check_stored(config: Mapping[str, Any], where: str, fix: str) -> Config:
    """A config from a file as this version would write it, with the defaults of optional fields that it lacks.

    Raises a UserError unless it has all fields, no others, and values that they may have. The fields of `data` differ
    from benchmark to benchmark and are not checked. Messages begin with `where` and end with `fix`.
    """
    own = config.get("cxda_any")
    if isinstance(own, dict) and own.get("prior") == 0:  # once said that the running statistics alone count
        config = {**config, "cxda_any": {**own, "prior": 20.0, "running": True}}
    there = {name: entry for name, entry in schema().items() if name in config or name in FIELDS}
    whole = _stored_fields(config, where, fix, there)
    try:
        return of_method(whole, for_tests=True)
    except UserError as e:
        raise UserError(e.fault, f"{where}.{e.field}", e.value, fix) from None


def _stored_fields(
    config: Mapping[str, Any], where: str, fix: str, fields: Mapping[str, Field | Group]
) -> dict[str, Any]:
    config = {n: v for n, v in config.items() if (".".join(f"{where}.{n}".split(".")[-2:]), v) not in RETIRED.items()}
    for name in config:
        if name not in fields:
            raise UserError("this version has no such field", f"{where}.{brief(name, 40)}", fix=fix)
    for name, entry in fields.items():
        at = f"{where}.{name}"
        if name not in config and isinstance(entry, Field) and entry.optional:
            config[name] = entry.default
        if name not in config:
            raise UserError("missing, though this version has that field", at, fix=fix)
        value = config[name]
        if isinstance(entry, Group):
            if not isinstance(value, dict):
                raise UserError("expected a group of fields", at, value, fix)
            if name != "data":
                config[name] = _stored_fields(value, at, fix, entry.fields)
        elif not _is_like(value, entry.default):
            raise UserError(f"expected {entry.default!r} or the like", at, value, fix)
    return config


def _is_like(value: Any, default: Any) -> bool:
    """Whether a value from JSON has the default's type."""
    if isinstance(default, tuple):
        return isinstance(value, list | tuple) and all(type(v) is type(default[0]) for v in value)
    return type(value) in (int, float) if isinstance(default, float) else type(value) is type(default)


# Showing the fields.


def table() -> str:
    """All fields as a Markdown table. A * marks groups that evaluation may change."""
    lines = ["| field | default | may be | meaning |", "|---|---|---|---|"]
    for name, entry in schema().items():
        if isinstance(entry, Group):
            lines.append(f"| **{name}**{'*' * entry.at_test} | | | {entry.help} |")
        for field_name, field in entry.fields.items() if isinstance(entry, Group) else [("", entry)]:
            dotted = f"{name}.{field_name}" if field_name else name
            may_be = ", ".join(map(str, field.choices)) or str(field.within or "")
            lines.append(f"| {dotted} | `{field.default!r}` | {may_be} | {field.help} |")
    return "\n".join(lines)
