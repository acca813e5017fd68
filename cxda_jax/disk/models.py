"""A trained model as plain files: weights.safetensors, config.json, and a manifest of both."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from cxda_jax.disk import files, manifest, safetensors
from cxda_jax.errors import UserError
from cxda_jax.types import Variables

WEIGHTS, CONFIG = "weights.safetensors", "config.json"


def write_model(
    folder: Path,
    variables: Variables,
    config: Mapping[str, Any],
    notes: Mapping[str, Any],
    about: Mapping[str, Any] = {},
) -> None:
    """Writes a model. The weights' header takes the notes, such as the step; the manifest takes facts `about` all."""
    folder.mkdir(exist_ok=True)
    (folder / manifest.NAME).unlink(missing_ok=True)
    arrays = jax.device_get(safetensors.named(variables))
    told = {name: json.dumps(value) for name, value in notes.items()}
    written = files.write_hashed(folder / WEIGHTS, safetensors.pieces(arrays, told))
    files.write_text(folder / CONFIG, json.dumps(config, indent=1) + "\n")
    manifest.write(folder, [WEIGHTS, CONFIG], {WEIGHTS: written}, about)


def is_model(folder: Path) -> bool:
    return (folder / WEIGHTS).exists()


def read_model(folder: Path, like: Variables) -> tuple[Variables, dict[str, Any]]:
    """The variables, with the names, shapes and types of `like`, and the notes."""
    again = "copy it again from where it is whole"
    if fault := manifest.find_fault(folder):
        raise UserError(f"{folder}: {fault}; {again}")
    arrays, notes = safetensors.read(folder / WEIGHTS, f"{folder}/{WEIGHTS}", again)
    try:
        return safetensors.fit(arrays, like), {name: json.loads(text) for name, text in notes.items()}
    except ValueError as e:
        raise UserError(f"{folder}/{WEIGHTS}: {e}; is {CONFIG} the model's own?") from None
