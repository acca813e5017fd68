"""Manifests: a JSON file with the SHA-256 of files beside it, with facts about them, and with its own SHA-256."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cxda_jax.disk import files
from cxda_jax.disk.kinds import Kind, require
from cxda_jax.disk.reading import read_object
from cxda_jax.errors import UserError

NAME = "manifest.json"
FORMAT = 1
_FIELDS = {
    "format": Kind(int, choices=(FORMAT,)), "sha256": Kind(dict, each=str), "about": Kind(dict, absent=True),
    files.SEAL: Kind(str, absent=True),
}  # fmt: skip


def write(folder: Path, names: Iterable[str], known: Mapping[str, str] = {}, about: Mapping[str, Any] = {}) -> None:
    """Writes the manifest of files in `folder`, with facts `about` them.

    Files whose SHA-256 is `known` are not read.
    """
    hashes = {name: known.get(name) or files.hash_file(folder / name) for name in sorted(names)}
    content = {"format": FORMAT, "sha256": hashes, "about": dict(about)}
    files.write_text(folder / NAME, json.dumps(files.sealed(content), indent=1))


def find_fault(folder: Path, names: Iterable[str]) -> str:
    """The first way in which files differ from the manifest of their folder; "" where none does.

    `names` are of all files that will be read: a manifest that may come from somewhere else does not choose them.
    """
    if not (folder / NAME).exists():
        return f"it has no {NAME}, so nothing proves that it is whole"
    try:
        content = read_object(folder / NAME, "")
        require(content, _FIELDS, NAME, "")
    except UserError:
        return f"{NAME} is unreadable"
    if files.is_falsified(content):
        return f"{NAME} differs from its recorded hash"
    for name in names:
        if not (folder / name).is_file():
            return f"{name} is missing"
        if files.hash_file(folder / name) != content["sha256"].get(name):
            return f"{name} differs from its recorded hash"
    return ""


def read_about(folder: Path) -> dict[str, Any]:
    """The facts in a manifest, which find_fault() has checked before. A manifest of an older version has none."""
    return read_object(folder / NAME, "bring it back").get("about", {})
