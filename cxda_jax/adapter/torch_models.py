"""Classifiers of PyTorch as encoders: logits, features and style of any model, by hooks; timm's, torchvision's and
transformers' models by name.

The style is the moments of the normalised input and of some early blocks' outputs, the features are the input of the
last dense layer. Weights come from the cache of the package that has the model, or are loaded by it.
"""

import contextlib
import hashlib
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cxda_jax.adapter.own_style import fitting
from cxda_jax.data.readers.raw import IMAGENET
from cxda_jax.errors import UserError, brief


class Named(NamedTuple):
    """A model, and what its package says of images.

    Attributes:
      model: of PyTorch.
      size: side of the images that it takes.
      side: of the images of which the model takes the middle; the same: it takes the whole.
      mean: of each channel, for pixels of 0..1.
      std: of each channel.
      fit: how an image that is no square becomes one; see data/store.py.
      logits: whether it gives logits, or else features.
    """

    model: Any
    size: int
    side: int
    mean: Sequence[float]
    std: Sequence[float]
    fit: str = "crop"
    logits: bool = True


def _of_timm(timm: Any, name: str) -> Named:
    model = timm.create_model(name, pretrained=True)
    told = timm.data.resolve_model_data_config(model)
    fit = {"squash": "squash", "border": "pad"}.get(told["crop_mode"], "crop")
    size, has = told["input_size"][-1], model.num_classes > 0
    return Named(model, size, math.floor(size / told["crop_pct"]), told["mean"], told["std"], fit, has)


def _of_torchvision(torchvision: Any, name: str) -> Named:
    weights = torchvision.models.get_model_weights(name).DEFAULT
    told = weights.transforms()
    model = torchvision.models.get_model(name, weights=weights)
    return Named(model, told.crop_size[0], told.resize_size[0], told.mean, told.std)


def _of_transformers(transformers: Any, name: str) -> Named:
    config, told = (kind.from_pretrained(name) for kind in (transformers.AutoConfig, transformers.AutoImageProcessor))
    has = any("ForImageClassification" in each for each in config.architectures or ())
    model = (transformers.AutoModelForImageClassification if has else transformers.AutoModel).from_pretrained(name)
    asked, fit = told.size, "crop"
    side = size = asked.get("shortest_edge") or asked["height"]
    if getattr(told, "do_center_crop", False):
        size = told.crop_size["height"]
    elif not asked.get("shortest_edge"):
        fit = "squash"
    elif size < 384 and (part := getattr(told, "crop_pct", None)):  # ConvNeXt's processor: no crop of larger ones
        side = int(size / part)
    mean, std = (told.image_mean, told.image_std) if told.do_normalize else ([0.0], [1.0])
    scale = 255 * (told.rescale_factor if told.do_rescale else 1)
    return Named(model, size, side, [x / scale for x in mean], [x / scale for x in std], fit, has)


# Each takes the imported package and a name of it. An optional package is no dependency of this file.
SOURCES = {"timm": _of_timm, "torchvision": _of_torchvision, "transformers": _of_transformers}


def _torch() -> Any:
    """PyTorch, which this package does without where nobody has such a model."""
    return importlib.import_module("torch")


def weights_hash(model: Any) -> str:
    """A SHA-256 of the names and the numbers of all weights."""
    torch = _torch()
    told = hashlib.sha256()
    for name, x in sorted(model.state_dict().items()):
        told.update(f"{name} {x.dtype} {[*x.shape]}".encode())
        told.update(x.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return told.hexdigest()


class TorchEncoder:
    """A classifier of PyTorch as a function of images, uint8 [n, h, w, 3], that gives logits, style and features.

    The model is put into evaluation mode.

    Args:
      model: takes float images [n, 3, h, w], and gives logits [n, classes], or an object that has `logits`.
      mean: taken from pixels of 0..1, for each channel.
      std: divides what is left.
      maps: names of the modules whose outputs give the style; if empty, up to six blocks in the first half.
      side: of the square in the middle of an image that the model sees; None: it sees the whole.
      logits: False: the model gives features [n, d] or tokens [n, tokens, d], of which the class's and the mean of the
        patches are the features.
    """

    def __init__(self, model, mean=IMAGENET[0], std=IMAGENET[1], maps=(), side=None, logits=True):
        self.model, self.side, self.logits = model.eval().float(), side, logits
        self.mean, self.std = (np.array(x, np.float32).reshape(-1, 1, 1) for x in (mean, std))
        self.modules = dict(model.named_modules())
        if wrong := [name for name in maps if name not in self.modules]:
            shown = brief(", ".join(_candidates(self.modules)[0]))
            raise UserError(f"no module of the model; name some of {shown}", "maps", wrong[0])
        self.maps: list[str] | None = [*maps] or None  # None: not chosen yet

    def __call__(self, images: np.ndarray) -> dict[str, np.ndarray]:
        torch = _torch()
        cut = round((images.shape[1] - (self.side or images.shape[1])) / 2)  # as torchvision cuts
        middle = slice(cut, self.side and cut + self.side)
        pixels = np.moveaxis(images[:, middle, middle], -1, 1) / np.float32(255)
        x = torch.from_numpy(np.ascontiguousarray((pixels - self.mean) / self.std))
        if self.maps is None:
            self.maps = self._chosen(x[:1])
        answer, moments, last = self._run(x, {name: self.modules[name] for name in self.maps})
        rows = {"logits": answer} if self.logits else {"features": _pooled(answer)}
        if self.logits and last is not None and last.shape[:-1] == answer.shape[:1]:
            rows["features"] = last
        style = torch.cat([_moments(x), *(moments[name] for name in self.maps)], 1)
        return {name: each.numpy() for name, each in (*rows.items(), ("style", style))}

    def _chosen(self, x: Any) -> list[str]:
        for modules in _candidates(self.modules):
            widths = {name: each.shape[1] // 2 for name, each in self._run(x, modules)[1].items()}
            if widths:
                return [[*widths][i] for i in fitting([*widths.values()], -(-len(widths) // 2))]
        return []

    def _run(self, x: Any, modules: dict[str, Any]) -> tuple[Any, dict[str, Any], Any]:
        """The model's answer, moments of the outputs of these modules that are maps, the last dense layer's input."""
        torch = _torch()
        moments, last = {}, [None]

        def keep(name: str) -> Callable[..., None]:
            def hook(module: Any, given: Any, out: Any) -> None:
                out = out[0] if isinstance(out, tuple) else out
                if torch.is_tensor(out) and out.ndim in (3, 4) and math.prod(out.shape[1:]) > max(out.shape[1:]):
                    moments[name] = _moments(out)

            return hook

        def before(module: Any, given: Any) -> None:
            last[0] = given[0] if isinstance(module, torch.nn.Linear) else None

        with contextlib.ExitStack() as hooks, torch.inference_mode():
            for name, module in modules.items():
                hooks.callback(module.register_forward_hook(keep(name)).remove)
            for module in self.model.modules():
                if isinstance(module, torch.nn.Linear | torch.nn.Conv2d):
                    hooks.callback(module.register_forward_pre_hook(before).remove)
            answer = self.model(x)
        for name in ("logits", "last_hidden_state"):
            answer = getattr(answer, name, answer)
        return answer[0] if isinstance(answer, tuple) else answer, moments, last[0]


def _candidates(modules: dict[str, Any]) -> list[dict[str, Any]]:
    """Modules whose outputs may be maps: blocks, which are the outermost members of lists of modules that have modules
    themselves; activations; all layers. The first of these that has maps is taken."""
    torch = _torch()
    lists = {name for name, module in modules.items() if isinstance(module, torch.nn.Sequential | torch.nn.ModuleList)}
    blocks: dict[str, Any] = {}
    for name, module in modules.items():
        inside = any(name.startswith(f"{block}.") for block in blocks)
        if name and name.rpartition(".")[0] in lists and not inside and any(module.children()):
            blocks[name] = module
    layers = {name: module for name, module in modules.items() if not any(module.children())}
    acting = {name: module for name, module in layers.items() if "activation" in type(module).__module__}
    return [blocks, acting, layers]


def _patches(x: Any) -> Any:
    """Of tokens [n, tokens, d] those of a square of patches, which come last."""
    return x[:, x.shape[1] - math.isqrt(x.shape[1]) ** 2 :]


def _moments(x: Any) -> Any:
    """Means and deviations [n, 2 * channels] of maps [n, c, h, w] or [n, h, w, c] of squares, or of tokens' patches."""
    if x.ndim == 3:
        x, places = _patches(x), (1,)
    else:
        places = (1, 2) if x.shape[1] == x.shape[2] != x.shape[3] else (2, 3)
    torch = _torch()
    return torch.cat([x.mean(places), x.std(places, correction=0)], 1)


def _pooled(x: Any) -> Any:
    """Features [n, d] of features, of tokens or of a map [n, c, h, w]."""
    torch = _torch()
    if x.ndim == 3:
        patches = _patches(x)
        own = [x[:, 0]] if patches.shape[1] < x.shape[1] else []
        return torch.cat([*own, patches.mean(1)], 1)
    return x.mean((2, 3)) if x.ndim == 4 else x
