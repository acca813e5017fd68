"""An assembler of the part of WebAssembly's text format that live/kernel.wat uses.

It takes one function, which is exported, in a module that imports a memory. Its instructions stand one after another,
not nested in brackets. Blocks are loops with a name. The bytes are those that `wat2wasm` makes.
"""

import re
import struct
from collections.abc import Iterator

from cxda_jax.errors import UserError

TYPES = {"i32": 0x7F, "f32": 0x7D, "v128": 0x7B}
LOCAL = {"local.get": 0x20, "local.set": 0x21, "local.tee": 0x22}
PLAIN = {"i32.lt_u": 0x49, "i32.gt_s": 0x4A, "i32.add": 0x6A, "i32.sub": 0x6B, "i32.mul": 0x6C, "i32.shl": 0x74}
VECTOR = {"f32x4.add": 0xE4, "f32x4.mul": 0xE6}  # after 0xFD
MEMORY = {
    "v128.load": (0x00, 4),
    "v128.load32_splat": (0x09, 2),
    "v128.store": (0x0B, 4),
}  # with the alignment's exponent


def assemble(text: str) -> bytes:
    """The bytes of a module."""
    words = iter(re.findall(r'[()]|"[^"]*"|[^\s()]+', re.sub(r";;.*", "", text)))
    module = _tree(words)
    parts = {part[0]: part for part in module[1:]}
    _, place, name, (_, pages) = parts["import"]
    function = parts["func"]
    heads = [part for part in function[1:] if isinstance(part, list)]
    params = [part for part in heads if part[0] == "param"]
    locals_ = [part for part in heads if part[0] == "local"]
    exported = next(part[1] for part in heads if part[0] == "export")
    numbers = {part[1]: number for number, part in enumerate([*params, *locals_])}
    body = b"".join(_instructions([part for part in function[1:] if isinstance(part, str)], numbers))
    kinds = [bytes([TYPES[kind]]) for *_, kind in locals_]
    groups = [[kinds[0], 1]]
    for kind in kinds[1:]:
        if kind == groups[-1][0]:
            groups[-1][1] += 1
        else:
            groups.append([kind, 1])
    code = _vector([_number(count) + kind for kind, count in groups]) + body + b"\x0b"
    signature = b"\x60" + _vector([bytes([TYPES[kind]]) for *_, kind in params]) + _vector([])
    sections = {
        1: [signature],
        2: [_name(place) + _name(name) + b"\x02\x00" + _number(int(pages))],
        3: [b"\x00"],  # the function has the first signature
        7: [_name(exported) + b"\x00\x00"],
        10: [_number(len(code)) + code],
    }
    made = (bytes([number]) + _sized(_vector(entries)) for number, entries in sections.items())
    return b"\0asm\x01\0\0\0" + b"".join(made)


def _tree(words: Iterator[str]) -> list:
    """The text between brackets, as nested lists. The first bracket opens the whole."""
    open_lists: list[list] = [[]]
    for word in words:
        if word == "(":
            open_lists.append([])
        elif word == ")":
            closed = open_lists.pop()
            open_lists[-1].append(closed)
        else:
            open_lists[-1].append(word)
    return open_lists[0][0]


def _instructions(words: list[str], numbers: dict[str, int]) -> Iterator[bytes]:
    waiting, loops = iter(words), []
    for word in waiting:
        if word in LOCAL:
            yield bytes([LOCAL[word]]) + _number(numbers[next(waiting)])
        elif word in PLAIN:
            yield bytes([PLAIN[word]])
        elif word in VECTOR:
            yield b"\xfd" + _number(VECTOR[word])
        elif word in MEMORY:
            code, alignment = MEMORY[word]
            yield b"\xfd" + _number(code) + bytes([alignment, 0])
        elif word == "i32.const":
            yield b"\x41" + _signed(int(next(waiting)))
        elif word == "v128.const":
            next(waiting)  # i32x4
            yield b"\xfd\x0c" + struct.pack("<4i", *(int(next(waiting)) for _ in range(4)))
        elif word == "loop":
            loops.append(next(waiting))
            yield b"\x03\x40"
        elif word == "end":
            loops.pop()
            yield b"\x0b"
        elif word == "br_if":
            yield b"\x0d" + _number(loops[::-1].index(next(waiting)))
        else:
            raise UserError(f"kernel.wat: {word} is not known to the assembler; add it to cxda_jax/export/wasm.py")


def _number(value: int) -> bytes:
    """Unsigned LEB128."""
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _number(rest) if rest else bytes([low])


def _signed(value: int) -> bytes:
    """Signed LEB128."""
    low, rest = value & 0x7F, value >> 7
    if rest == (-1 if low & 0x40 else 0):
        return bytes([low])
    return bytes([low | 0x80]) + _signed(rest)


def _sized(data: bytes) -> bytes:
    return _number(len(data)) + data


def _vector(entries: list[bytes]) -> bytes:
    return _number(len(entries)) + b"".join(entries)


def _name(quoted: str) -> bytes:
    return _sized(quoted.strip('"').encode())
