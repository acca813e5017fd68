"""What --help says of a command, read from its source: importing it, with all that it computes with, would take seconds."""

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from absl import flags

ROOT = Path(__file__).parents[1]


def data_folder() -> str:
    return os.environ.get("CXDA_DATA_DIR") or str(Path.home() / ".cache" / "cxda_jax")


LIGHT = {"data_folder": data_folder}  # functions that a flag's definition may call


class Unreadable(Exception):
    """A flag is defined by something that only running it would tell."""


def show(module: str) -> None:
    """Prints the help and ends the process. Where it cannot be read so, absl will print it after the imports."""
    try:
        text = usage(module)
    except (Unreadable, OSError, SyntaxError):
        return
    print(text, flush=True)
    sys.exit(0)


def usage(module: str) -> str:
    """As absl words it."""
    source, found = Source(module), flags.FlagValues()
    here = str(source.path)
    for call, home in source.flags():
        given = [home.value(a) for a in call.args]
        named = {k.arg: home.value(k.value) for k in call.keywords if k.arg}
        define = getattr(flags, ast.unparse(call.func).removeprefix("flags."))
        made = define(*given, **{**named, "flag_values": found, "allow_override": True})
        found.register_key_flag_for_module(here, found[made.name])
    return f"{source.doc}\nflags:\n{found.module_help(here)}\n\nTry --helpfull to get a list of all flags."


class Source:
    """What a module's text says at its top level."""

    def __init__(self, module: str) -> None:
        self.path = ROOT / f"{module.replace('.', '/')}.py"
        tree = ast.parse(self.path.read_text())
        self.doc = ast.get_docstring(tree, clean=False) or ""
        self._imported: dict[str, tuple[str, str]] = {}
        self._assigned: dict[str, ast.expr | None] = {}
        self._calls: list[ast.Call] = []
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module:
                self._imported |= {a.asname or a.name: (node.module, a.name) for a in node.names}
            if isinstance(node, ast.Assign | ast.AnnAssign):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                self._assigned[ast.unparse(target)] = node.value
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr):
                self._calls += [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]

    def flags(self) -> Iterator[tuple[ast.Call, "Source"]]:
        """The calls that define its flags, and those of other modules that it makes its own."""
        for call in self._calls:
            name = ast.unparse(call.func)
            if name.startswith("flags.DEFINE_"):
                yield call, self
            elif name == "flags.adopt_module_key_flags":
                yield from Source(".".join(self._imported[ast.unparse(call.args[0])])).flags()
            elif name == "flags.declare_key_flag":
                definition, home = self.find(ast.unparse(call.args[0]).removesuffix(".name"))
                if isinstance(definition, ast.Call):
                    yield definition, home

    def find(self, name: str) -> tuple[ast.expr | None, "Source"]:
        """What a name is bound to, and where."""
        if name in self._assigned:
            return self._assigned[name], self
        first, _, rest = name.partition(".")
        if first not in self._imported:
            raise Unreadable(name)
        module, there = self._imported[first]
        return Source(f"{module}.{there}").find(rest) if rest else Source(module).find(there)

    def value(self, node: ast.expr | None) -> Any:
        """Of constants, of texts made of them, and of names bound to such; a table stands for the list of its keys."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self.value(item) for item in items]
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                return [name for key, value in pairs for name in ([self.value(key)] if key else self.value(value))]
            case ast.DictComp(
                key=ast.Name(id=key), generators=[ast.comprehension(target=ast.Name(id=name), iter=names)]
            ):
                return self.value(names) if key == name else self._refuse(node)
            case ast.JoinedStr(values=parts):
                return "".join(self.value(part) for part in parts)
            case ast.FormattedValue(value=value):
                return str(self.value(value))
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.value(left) + self.value(right)
            case ast.Call(func=ast.Name(id="list"), args=[names]):
                return self.value(names)
            case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(separator)), attr="join"), args=[names]):
                return separator.join(self.value(names))
            case ast.Call(func=ast.Name(id=name), args=[]) if name in LIGHT:
                return LIGHT[name]()
            case ast.Name() | ast.Attribute():
                found, home = self.find(ast.unparse(node))
                return home.value(found)
        return self._refuse(node)

    def _refuse(self, node: ast.expr | None) -> NoReturn:
        raise Unreadable(f"{self.path}: {ast.unparse(node) if node else ''}")
