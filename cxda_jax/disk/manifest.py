"""Manifests: a JSON file with the SHA-256 of files beside it, with facts about them, and with its own SHA-256."""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from cxda_jax.disk import files

NAME = "manifest.json"
FORMAT = 1


def write(
    folder: Path,
    names: Iterable[str] | None = None,
    known: Mapping[str, str] | None = None,
    about: Mapping[str, Any] | None = None,
    unread: Collection[str] = (),
) -> None:
    """Writes the manifest of `folder`.

    Args:
      folder: where the files lie.
      names: which files to record; all by default.
      known: SHA-256 of files that need not be read, by name.
      about: facts about the files, of types that JSON has.
      unread: files to leave out where `names` is not given.
    """
    known = known or {}
    if names is None:
        paths = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
        names = paths - {NAME, *unread}
    content: dict[str, Any] = {
        "format": FORMAT,
        "sha256": {name: known.get(name) or _hash(folder / name) for name in sorted(names)},
        "about": dict(about or {}),
    }
    files.write_text(folder / NAME, json.dumps(files.sealed(content), indent=1))


def find_fault(folder: Path, names: Iterable[str] | None = None) -> str:
    """The first way in which files differ from the manifest of their folder, as words; "" where they are as recorded.

    It looks at the files of `names`, or at all that the manifest records.
    """
    try:
        content = json.loads((folder / NAME).read_bytes())
        told = content["sha256"] if content["format"] == FORMAT else None
    except FileNotFoundError:
        return f"it has no {NAME}, so nothing proves that it is whole"
    except (ValueError, KeyError, TypeError):
        content = told = None
    if content is None or not isinstance(told, dict):
        return f"{NAME} is unreadable"
    if files.is_falsified(content):
        return f"{NAME} differs from its recorded hash"
    for name in told if names is None else names:
        digest = told.get(name)
        if not (folder / name).is_file():
            return f"{name} is missing"
        if _hash(folder / name) != digest:
            return f"{name} differs from its recorded hash"
    return ""


def read_about(folder: Path) -> dict[str, Any]:
    """The facts in a manifest, which find_fault() has checked before. A manifest of an older version has none."""
    return json.loads((folder / NAME).read_bytes()).get("about", {})


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
