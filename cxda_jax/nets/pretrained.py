"""Weights of PyTorch's ResNet-50 (.pth or .safetensors, with torchvision's names) in our variables.

An array that only one side has is an error, which names the array. The caller can leave out layers.
"""

import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cxda_jax.disk import safetensors
from cxda_jax.disk.reading import reason, refuse_html
from cxda_jax.errors import UserError, needing
from cxda_jax.types import Variables

FIELD = "net.weights"
_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}


def start_from_weights(net: Any, variables: Variables) -> Variables:
    """The variables, in which the weights of the file net.weights replace the new ones, if that field of the config's
    group `net` is set."""
    if not net.weights:
        return variables
    if net.name != "resnet50":
        raise UserError(f"only resnet50 starts from a file; net.name={net.name!r}", FIELD, net.weights)
    return convert(read_weights(Path(net.weights)), variables, tuple(net.dont_load))


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file by name. A .pth may hold tensors alone: a pickle with other objects is refused."""
    if not os.path.isfile(path):  # Path's own raises where a name is too long
        raise UserError("no such file", FIELD, str(path), "give a .safetensors or .pth file, or ''")
    if path.suffix == ".safetensors":
        return safetensors.read(path, f"{FIELD}={path}", "fetch it again")[0]
    if path.suffix not in (".pth", ".pt"):
        raise UserError(f"{path.suffix or 'no suffix'} is not .safetensors, .pth or .pt", FIELD, str(path))
    with needing(f"{FIELD}={path}", "torch", ", or give a .safetensors"):
        import torch  # pyright: ignore[reportMissingImports]  # optional
    refuse_html(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an error must stay one line
            state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict):
            raise TypeError(f"a {type(state).__name__}")
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"{name} is a {type(value).__name__}")
        return {name: tensor.numpy() for name, tensor in state.items()}
    except Exception as e:  # torch raises many kinds
        # torch's own message tells how to load a refused pickle all the same. That would run the code in it.
        known = {pickle.UnpicklingError: "other objects than tensors, or no pickle", EOFError: "an empty file"}
        what = known.get(type(e)) or reason(e, 60)
        raise UserError(f"holds no plain weights ({what})", FIELD, path, "save a model's state_dict()") from None


def convert(
    weights: Mapping[str, np.ndarray], variables: Mapping[str, Any], dont_load: tuple[str, ...] = ("fc",)
) -> dict[str, Any]:
    """Variables in which the trunk and the head have the given weights.

    Attention, context and adapters stay as they are, since PyTorch's network has none. A first convolution with more
    input channels than the weights have repeats theirs. Weights whose names begin with one of dont_load are left out.
    """
    left = {name for name in weights if not name.endswith("num_batches_tracked")}
    left -= {name for name in left if name.startswith(dont_load)}

    def load(path: Any, leaf: Any) -> Any:
        room, *layers, kind = (part.key for part in path[1:])
        name = f"{torch_name(layers)}.{_LEAVES.get(kind, kind)}"
        if room not in ("trunk", "head") or "adapters" in name or name.startswith(dont_load):
            return leaf
        if name not in weights:
            raise UserError(f"{name} is missing", FIELD, fix="are these the weights of a ResNet-50?")
        left.discard(name)
        value = np.asarray(weights[name], leaf.dtype)
        if not np.isfinite(value).all():
            raise UserError(f"{name} holds nan or infinity", FIELD, fix="fetch the file again")
        value = value.transpose(2, 3, 1, 0) if value.ndim == 4 else value.T
        if name == "conv1.weight" and value.ndim == 4 and value.shape[2] < leaf.shape[2]:
            value = value[:, :, np.arange(leaf.shape[2]) % value.shape[2]]
        if value.shape != leaf.shape:
            raise UserError(f"{name} is {value.shape} in our layout, the network's is {leaf.shape}", FIELD)
        return jax.numpy.asarray(value)

    loaded = jax.tree_util.tree_map_with_path(load, {k: variables[k] for k in ("params", "batch_stats")})
    if left:
        fault = f"the network has no {min(left)} ({len(left)} such)"
        raise UserError(fault, FIELD, fix="add its layer to net.dont_load")
    return {**variables, **loaded}


def torch_name(layers: list[str]) -> str:
    """layer1_0/downsample_conv to layer1.0.downsample.0."""
    name = ".".join(layer.replace("_", ".", 1) if layer.startswith("layer") else layer for layer in layers)
    return name.replace("downsample_conv", "downsample.0").replace("downsample_bn", "downsample.1")
