"""What the text of a compiled program says: the exchanges between devices, fusions, and the bytes that are read and written."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

SIZES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8} | {
    f"{s}{8 * n}": n for s in "su" for n in (1, 2, 4, 8)
}
COLLECTIVES = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast"
# Operations that move no bytes of the memory: they name, group or wait.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id", "opt-barrier",
    "while", "conditional", "call", "async-done", "copy-done", "slice-done", "all-reduce-done", "all-gather-done",
}  # fmt: skip
_PARTS = {"slice", "dynamic-slice", "gather"}  # operations that read only a part of their first operand
_ARRAY = re.compile(rf"\b({'|'.join(sorted(SIZES, key=len, reverse=True))})\[([\d,<=]*)\](\{{[^}}]*\}})?")
_ON_CHIP = "S(1)"  # in an array's layout: it lies in the fast memory of a TPU's core


class Instruction(NamedTuple):
    """One line of a program."""

    name: str
    kind: str  # of the result, such as f32[8,128]{1,0} or a tuple of such
    operation: str
    operands: tuple[str, ...]  # names
    rest: str  # attributes


class Collective(NamedTuple):
    """An exchange between devices."""

    operation: str
    types: str  # of the arrays, such as "f32"; "bf16 f32" if there are several
    arrays: int
    bytes: int  # of the result, on one device


Program = Mapping[str, list[Instruction]]  # by computation; that of name "" is where the program begins


def parse(text: str) -> Program:
    """The computations of a program's text."""
    program: dict[str, list[Instruction]] = {}
    lines: list[Instruction] = []
    for line in text.splitlines():
        if opened := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            lines = program.setdefault("" if opened[1] else opened[2], [])
        elif found := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)$", line):
            kind, _, rest = _cut(found[2])
            if called := re.match(r"([\w\-]+)\(", rest):
                inside, _, attributes = _cut(rest[called.end() - 1 :])
                names = tuple(re.findall(r"%([\w.\-]+)", inside)) or tuple(re.findall(r"([\w.\-]+)(?:,|\)$)", inside))
                number = (inside[1:-1],) if called[1] == "parameter" else names
                lines.append(Instruction(found[1], kind, called[1], number, attributes))
    return program


def _cut(text: str) -> tuple[str, str, str]:
    """A text up to the first space that is in no parentheses, the space, and what follows."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character in "({") - (character in ")}")
        if depth == 0 and (character == " " or text[0] == "(" and character == ")"):
            end = i + (character == ")")
            return text[:end], " ", text[end:].strip()
    return text, "", ""


def size(kind: str) -> int:
    """Bytes of an array, or of all arrays of a tuple."""
    return sum(_bytes(name, sides) for name, sides, _ in _ARRAY.findall(kind))


def stored(kind: str) -> int:
    """size() without the arrays that lie in a core's fast memory."""
    return sum(_bytes(name, sides) for name, sides, layout in _ARRAY.findall(kind) if _ON_CHIP not in layout)


def _bytes(name: str, sides: str) -> int:
    return SIZES[name] * math.prod(int(side.lstrip("<=")) for side in sides.split(",") if side)


def collectives(program: Program) -> list[Collective]:
    """All exchanges between devices, the largest first."""
    found = []
    for line in _all(program):
        operation = line.operation.removesuffix("-start")
        if operation in COLLECTIVES:
            arrays = _ARRAY.findall(line.kind)
            types = " ".join(sorted({name for name, *_ in arrays}))
            found.append(Collective(operation, types, len(arrays), size(line.kind)))
    return sorted(found, key=lambda c: -c.bytes)


def fusions(program: Program) -> int:
    """How many groups of operations the compiler made one."""
    return sum(line.operation == "fusion" for line in _all(program))


def traffic(program: Program, name: str = "") -> int:
    """Bytes that a computation reads and writes: of each operation the operands and the result, and nothing inside a fusion.

    What lies in a core's fast memory does not count. A fusion that uses only slices of an operand reads these alone. A loop counts as often as the compiler says that it runs.
    """
    lines = program.get(name, [])
    kinds, total = {line.name: line.kind for line in lines}, 0
    for line in lines:
        for called, times in _called(line):
            total += times * traffic(program, called)
        if line.operation in _FREE:
            continue
        if line.operation in _PARTS:
            total += size(line.kind) + stored(line.kind)
        elif line.operation == "dynamic-update-slice":
            total += 2 * stored(kinds.get(line.operands[1], ""))
        else:
            total += stored(line.kind)
            total += sum(_read(program, line, i, kinds.get(name, "")) for i, name in enumerate(line.operands))
    return total


def cycles(text: str) -> int:
    """The sum of what the TPU compiler estimates for each operation of a program's beginning, in cycles; 0 for GPUs."""
    return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', text[text.rfind("\nENTRY ") :])))


def _read(program: Program, line: Instruction, number: int, kind: str) -> int:
    """Bytes that an operation reads of its operand of this number and kind."""
    inside = program.get(_attribute(line.rest, "calls")) if line.operation == "fusion" else None
    names = {of.name for of in inside or () if of.operation == "parameter" and of.operands == (str(number),)}
    users = [of for of in inside or () if names & set(of.operands)]
    parts = [of for of in users if of.operation in _PARTS and of.operands[0] in names]
    if users and len(parts) == len(users):
        return min(stored(kind), sum(size(of.kind) for of in parts))
    return stored(kind)


def _called(line: Instruction) -> Iterator[tuple[str, int]]:
    """The computations that an operation runs, and how often."""
    if line.operation == "while":
        known = re.search(r'known_trip_count"?:\{"n":"(\d+)"', line.rest)
        yield _attribute(line.rest, "body"), int(known[1]) if known else 1
    elif line.operation == "call":
        yield _attribute(line.rest, "to_apply"), 1


def _attribute(text: str, name: str) -> str:
    found = re.search(rf"\b{name}=%?([\w.\-]+)", text)
    return found[1] if found else "?"


def _all(program: Program) -> Iterator[Instruction]:
    for lines in program.values():
        yield from lines
