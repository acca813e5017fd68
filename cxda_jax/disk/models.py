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
    about: Mapping[str, Any] | None = None,
) -> None:
    """Writes a model.

    Args:
      folder: where; it is made if it is not there.
      variables: the weights.
      config: the resolved config that they were trained with.
      notes: facts such as the step and its validation score, for the header of the weights.
      about: facts for the manifest.
    """
    folder.mkdir(exist_ok=True)
    (folder / manifest.NAME).unlink(missing_ok=True)
    arrays = jax.device_get(safetensors.named(variables))
    told = {name: json.dumps(value) for name, value in notes.items()}
    written = files.write_hashed(folder / WEIGHTS, safetensors.pieces(arrays, told))
    files.write_text(folder / CONFIG, json.dumps(config, indent=1) + "\n")
    manifest.write(folder, [WEIGHTS, CONFIG], known={WEIGHTS: written}, about=about)


def is_model(folder: Path) -> bool:
    return (folder / WEIGHTS).exists()


def read_model(folder: Path, like: Variables) -> tuple[Variables, dict[str, Any]]:
    """The variables, with the names, shapes and types of `like`, and the notes."""
    fault = manifest.find_fault(folder)
    if fault:
        raise UserError(f"{folder}: {fault}; copy it again from where it is whole")
    arrays, notes = safetensors.read(folder / WEIGHTS, f"{folder}/{WEIGHTS}", "copy it again from where it is whole")
    try:
        variables = safetensors.fit(arrays, like)
    except ValueError as e:
        raise UserError(f"{folder}/{WEIGHTS}: {e}; is {CONFIG} the model's own?") from None
    return variables, {name: json.loads(text) for name, text in notes.items()}
