"""Manifests: a JSON file that holds the SHA-256 of files beside it, what else is to be known of them, and its own SHA-256."""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from cxda_jax import files

NAME = "manifest.json"
FORMAT = 1


def write(
    folder: Path,
    names: Iterable[str] | None = None,
    known: Mapping[str, str] | None = None,
    about: Mapping[str, Any] | None = None,
    unread: Collection[str] = (),
) -> None:
    """Records the SHA-256 of files under `folder`: of those named, or of all but the `unread`.

    Those `known` from the bytes that were written are not read again. `about` is what else is to be known of them.
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
    """What tells the files under `folder`, or those of the given names, from its manifest; nothing if they are the same."""
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
    """What the manifest says beside hashes, once find_fault() has found none; nothing in one of an older version."""
    return json.loads((folder / NAME).read_bytes()).get("about", {})


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
