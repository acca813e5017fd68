"""Models of PyTorch as encoders: beside the model's own answers and its package's own preprocessing."""

import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import cxda_jax
from cxda_jax.adapter.encoders import Options, open_encoder
from cxda_jax.adapter.torch_models import weights_hash
from cxda_jax.device.attached import open_again
from tests.commands import command
from tests.lines import refused

torch = pytest.importorskip("torch")
nn, RNG = torch.nn, np.random.default_rng(0)
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)


class Net(nn.Module):
    """A convolution, four blocks of other widths, and a dense layer; `classes` 0: features alone."""

    def __init__(self, classes=3, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        widths = 4, 4, 6, 8, 8
        self.start, self.num_classes = nn.Conv2d(3, 4, 3, 2, 1), classes
        pairs = zip(widths, widths[1:], strict=False)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.ReLU()) for i, o in pairs))
        self.fc = nn.Linear(8, classes) if classes else nn.Identity()

    def forward(self, x, wants=False):
        maps = [x]
        x = self.start(x)
        for block in self.blocks:
            maps.append(x := block(x))
        x = x.mean((2, 3))
        return (self.fc(x), x, maps) if wants else self.fc(x)


def normalised(pixels, side):
    """What a model of this side sees of squares, as torchvision cuts them."""
    cut = round((pixels.shape[1] - side) / 2)
    x = torch.from_numpy(pixels[:, cut : cut + side, cut : cut + side]).permute(0, 3, 1, 2) / 255
    return (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def timm(model):
    def create_model(name, pretrained):
        assert pretrained
        if name != "net":
            raise RuntimeError(f"Unknown model ({name})")
        return model

    told = {"input_size": (3, 16, 16), "mean": MEAN, "std": STD, "crop_pct": 0.9, "crop_mode": "center"}
    data = SimpleNamespace(resolve_model_data_config=lambda of: told)
    return {"create_model": create_model, "data": data}, 17


def torchvision(model):
    told = SimpleNamespace(crop_size=[16], resize_size=[20], mean=MEAN, std=STD)
    default = SimpleNamespace(transforms=lambda: told)

    def get_model(name, weights):
        assert weights is default
        return model

    def get_model_weights(name):
        if name != "net":
            raise ValueError(f"Unknown model {name}")
        return SimpleNamespace(DEFAULT=default)

    return {"models": SimpleNamespace(get_model=get_model, get_model_weights=get_model_weights)}, 20


def transformers(model):
    kinds = {"ForImageClassification": True} if model.num_classes else {}

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, pixel_values):
            answer = self.net(pixel_values)
            return SimpleNamespace(**{"logits" if kinds else "last_hidden_state": answer})

    def loading(gives):
        def from_pretrained(name):
            if name != "net":
                raise OSError(f"{name} is no folder,\nand no name on the hub")
            return gives()

        return SimpleNamespace(from_pretrained=from_pretrained)

    told = SimpleNamespace(
        size={"height": 16, "width": 16}, do_normalize=True, do_rescale=True, rescale_factor=1 / 127.5,
        image_mean=[2 * x for x in MEAN], image_std=[2 * x for x in STD],
    )  # fmt: skip
    config = SimpleNamespace(architectures=[f"Net{kind}" for kind in kinds or ("Model",)])
    given = {"AutoConfig": lambda: config, "AutoImageProcessor": lambda: told}
    given["AutoModelForImageClassification" if kinds else "AutoModel"] = Whole
    return {name: loading(gives) for name, gives in given.items()}, 16


@pytest.fixture
def installed(monkeypatch):
    """A function that puts a small package in the place of one of these; it gives the side of images that it asks for."""

    def install(package, model):
        found, side = package(model)
        module = ModuleType(package.__name__)
        vars(module).update(found)
        monkeypatch.setitem(sys.modules, package.__name__, module)
        return side

    return install


@pytest.mark.parametrize("package", [timm, torchvision, transformers], ids=lambda package: package.__name__)
def test_a_models_name_gives_what_the_model_says_of_images_as_its_package_prepares_them(
    package, installed, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    side = installed(package, model := Net())
    for i in range(6):
        path = tmp_path / "images" / f"camera{i % 2}" / "abc"[i // 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(RNG.integers(0, 256, (side + 4 * (i % 2), side, 3), np.uint8)).save(path)

    def ask(name="net", out="f.npz", code=0, *flags):
        encoder = f"{package.__name__}:{name}"
        return command(
            "features", f"--encoder={encoder}", "--images=images", f"--out={out}", "--batch=4", *flags, code=code
        )

    assert "6 images of 2 domains" in ask()
    with np.load("f.npz") as file:
        found = dict(file)
    pixels = []
    for path in found["paths"]:
        image = Image.open(tmp_path / "images" / path)
        if package is not transformers:  # a square in the middle; there the whole becomes one
            image = image.crop((0, (image.height - side) // 2, side, (image.height + side) // 2))
        pixels.append(np.asarray(image.resize((side, side), Image.Resampling.BILINEAR)))
    with torch.inference_mode():
        logits, features, maps = model(normalised(np.stack(pixels), 16), wants=True)
    style = torch.cat(
        [f(m) for m in maps[:3] for f in (lambda m: m.mean((2, 3)), lambda m: m.std((2, 3), correction=0))], 1
    )
    for name, values in (("logits", logits), ("features", features), ("style", style)):
        np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=1e-5)
    about = json.loads(str(found["about"]))
    assert [name.rpartition("blocks.")[2] for name in about["maps"]] == ["0", "1"] and about["size"] == 16
    np.testing.assert_allclose(about["mean"] + about["std"], MEAN + STD, rtol=1e-6)
    assert "left as it is" in ask()
    again = open_again(f"{package.__name__}:net", about, tmp_path).encode(np.stack(pixels)[:4])
    np.testing.assert_allclose(again["style"], found["style"][:4], rtol=1e-4, atol=1e-5)
    for given in ("--maps=no", "--logits=x", "--mean=1,2"):
        assert given.partition("=")[0] in ask("net", "g.npz", 2, given)
    lines = ask("other", "g.npz", 2)
    assert f"{package.__name__}:other" in lines and lines.count("\n") == 1
    installed(package, Net(seed=1))
    assert "encoder_sha256=" in ask(code=2)


def test_a_model_without_logits_gives_features(installed):
    for package in (timm, transformers):
        side = installed(package, model := Net(classes=0))
        pixels = RNG.integers(0, 256, (4, side, side, 3), np.uint8)
        answer = open_encoder(f"{package.__name__}:net", Options(batch=4)).encode(pixels)
        with torch.inference_mode():
            np.testing.assert_allclose(answer["features"], model(normalised(pixels, 16)), atol=1e-6)
        assert "logits" not in answer


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with refused(named="cxda_jax[timm]"):
        open_encoder("timm:resnet18", Options())


class Tokens(nn.Module):
    """Tokens of the class, of nothing and of four patches, through four layers, of which the widest do not fit."""

    def __init__(self, extra, width):
        super().__init__()
        self.patch, self.extra = nn.Conv2d(3, width, 8, 8), nn.Parameter(torch.randn(1, extra, width))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width)) for _ in range(4))

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.extra.expand(len(x), -1, -1), x], 1)
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(last_hidden_state=x)


@pytest.mark.parametrize(("extra", "width", "count"), [(2, 8, 2), (0, 8, 2), (1, 600, 1)])
def test_tokens_that_are_no_patches_are_left_out_of_the_style(extra, width, count):
    model = Tokens(extra, width)
    encoder = cxda_jax.TorchEncoder(model, MEAN, STD, logits=False)
    pixels = RNG.integers(0, 256, (3, 16, 16, 3), np.uint8)
    found = encoder(pixels)
    with torch.inference_mode():
        x = normalised(pixels, 16)
        last = model(x).last_hidden_state
        y = model.patch(x).flatten(2).transpose(1, 2)
        style = [x.flatten(2).transpose(1, 2)]
        for layer in model.layers[:count]:
            style.append(y := layer(y))
    style = torch.cat([f for m in style for f in (m.mean(1), m.std(1, correction=0))], 1)
    rows = ([last[:, 0]] if extra else []) + [last[:, extra:].mean(1)]
    np.testing.assert_allclose(found["features"], torch.cat(rows, 1), atol=1e-5)
    np.testing.assert_allclose(found["style"], style, atol=1e-5)


class Channels(nn.Module):
    """Gives [n, h, w, channels]."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(3, 5)

    def forward(self, x):
        return self.dense(x.movedim(1, -1))


def test_maps_are_found_in_networks_of_other_forms():
    """Their channels may be the last axis; without blocks, activations are taken, or all layers, or nothing."""
    pixels = RNG.integers(0, 256, (3, 16, 16, 3), np.uint8)
    x = normalised(pixels, 16)
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)]

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(Channels()), nn.Sequential(nn.Flatten(), nn.Linear(1280, 2))])

        def forward(self, x):
            return self.blocks[1](self.blocks[0](x))

    for model, maps, first in (
        (Last(), ["blocks.0"], lambda model: model.blocks[0](x).movedim(-1, 1)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), *pool), ["1"], lambda model: model[:2](x)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), *pool), ["0"], lambda model: model[0](x)),
        (nn.Sequential(nn.Flatten(), nn.Linear(768, 2)), [], None),
    ):
        encoder = cxda_jax.TorchEncoder(model, MEAN, STD)
        found = encoder(pixels)
        with torch.inference_mode():
            np.testing.assert_allclose(found["logits"], model(x), atol=1e-5)
            given = [x, *([first(model)] if first else [])]
        style = torch.cat([f for m in given for f in (m.mean((2, 3)), m.std((2, 3), correction=0))], 1)
        assert encoder.maps == maps
        np.testing.assert_allclose(found["style"], style, atol=1e-5)
    with refused(field="maps", value="no"):
        cxda_jax.TorchEncoder(model, maps=["no"])


def test_a_module_of_the_user_may_hold_one(tmp_path, monkeypatch):
    """Its file is no fact of it, its weights are."""
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(encoder=cxda_jax.TorchEncoder(Net(), MEAN, STD)))
    pixels = RNG.integers(0, 256, (4, 16, 16, 3), np.uint8)
    found = open_encoder("mine:encoder", Options(size=16, batch=4))
    with torch.inference_mode():
        np.testing.assert_allclose(found.encode(pixels)["logits"], Net()(normalised(pixels, 16)), atol=1e-6)
    assert found.about["encoder_sha256"] == weights_hash(Net()) != weights_hash(Net(seed=1))


# By the packages themselves, where they are installed; without a network, so with random weights.
def compare(encoder, pixels, expected):
    found = encoder.encode(pixels)
    with torch.inference_mode():
        np.testing.assert_allclose(found["logits"], expected, atol=1e-5)


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "mobilenetv3_small_100"])
def test_timms_own_models(name, tmp_path):
    timm = pytest.importorskip("timm")
    model = timm.create_model(name).eval()
    timm.models.save_for_hf(model, tmp_path)
    encoder = open_encoder(f"timm:local-dir:{tmp_path}", Options(batch=4))
    pixels = RNG.integers(0, 256, (4, *encoder.shape), np.uint8)
    prepare = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    compare(encoder, pixels, model(torch.stack([prepare(Image.fromarray(each)) for each in pixels])).detach())


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1"])
def test_torchvisions_own_models(name, tmp_path, monkeypatch):
    models = pytest.importorskip("torchvision").models
    weights, model = models.get_model_weights(name).DEFAULT, models.get_model(name).eval()
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    place = tmp_path / "hub" / "checkpoints" / weights.url.rpartition("/")[2]
    place.parent.mkdir(parents=True)
    torch.save(model.state_dict(), place)
    encoder = open_encoder(f"torchvision:{name}", Options(batch=4))
    pixels = RNG.integers(0, 256, (4, *encoder.shape), np.uint8)
    compare(encoder, pixels, model(weights.transforms()(torch.from_numpy(pixels).permute(0, 3, 1, 2))).detach())


@pytest.mark.parametrize("kind", ["ViT", "ConvNext"])
def test_transformers_own_models(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    options = {
        "ViT": {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32,
                "image_size": 32, "patch_size": 8},
        "ConvNext": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    }[kind]  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**options, num_labels=3)
    model = getattr(transformers, f"{kind}ForImageClassification")(config).eval()
    size = {"ViT": {"height": 32, "width": 32}, "ConvNext": {"shortest_edge": 64}}[kind]
    prepare = getattr(transformers, f"{kind}ImageProcessor")(size=size)
    for each in (model, prepare):
        each.save_pretrained(tmp_path)
    encoder = open_encoder(f"transformers:{tmp_path}", Options(batch=4))
    pixels = RNG.integers(0, 256, (4, *encoder.shape), np.uint8)
    compare(encoder, pixels, model(prepare([*pixels], return_tensors="pt")["pixel_values"]).logits.detach())
