"""A model as a web page that needs no server, no network and no library: one file, index.html.

The page holds the weights, recorded handwriting to start from, and a small engine: live/engine.js, sequence.js,
shares.js and kernel.wasm. Visitors draw characters, fill the buffer, and see the answer before and after adapting.
Before the page is left behind, its own scripts run in Node.js, and their answers are compared with JAX.
"""

import base64
import hashlib
import html
import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from cxda_jax.config.registry import METHODS
from cxda_jax.data.readers.unipen import draw
from cxda_jax.device.model import Model
from cxda_jax.disk import files, safetensors
from cxda_jax.errors import UserError
from cxda_jax.export.pair import by_model
from cxda_jax.methods.cxda_shares import spread
from cxda_jax.nets.attention import ATTENTION
from cxda_jax.nets.cnn import PADDINGS
from cxda_jax.nets.shares import ShareAdapter
from cxda_jax.pages.document import as_base64, in_script, part
from cxda_jax.version import VERSION

LIVE = Path(__file__).with_name("live")
PAGE, PARITY = "index.html", "parity.json"
FILLS = 0, 1, 5, 100  # images in the buffer where the page is compared with JAX
QUERIES = 16  # images that are asked there
OLDEST = "18 or newer"  # of Node.js
TOLERANCE = 1e-4  # of logits, relative to the largest one; and of attention weights


class Hand(NamedTuple):
    """The drawings of one writer: strokes of each drawing as lists of points (x, y) in 0..255, y down,
    and the labels."""

    labels: str
    drawings: list[list[list[tuple[int, int]]]]


def write(model: Model, out: Path) -> dict[str, Any]:
    """Writes the page, and how it compares with JAX, into the folder `out`.

    Args:
      model: a model of grey, square images, of a method whose entry has a `page`.
      out: a folder, which is made if it is missing.

    Returns:
      The content of parity.json.
    """
    described = describe(model)
    find_node("web")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / PAGE
        files.write_text(page, render(described, safetensors.named(model.variables)))
        parity = {
            "method": described["method"], "bytes": page.stat().st_size, "sha256": files.hash_file(page),
            "versions": {"cxda_jax": VERSION, "jax": jax.__version__}, **compare(model, page),
        }  # fmt: skip
        out.mkdir(parents=True, exist_ok=True)
        files.write_bytes(out / PAGE, page.read_bytes())
    files.write_text(out / PARITY, json.dumps(parity, indent=1) + "\n")
    return parity


def describe(model: Model) -> dict[str, Any]:
    """The facts about a model that the engine needs besides its weights.

    A UserError names what the engine cannot run.
    """
    card, config, name = model.card, model.config, model.method.name
    if not config:
        raise UserError("web: an adapter has no network of its own to run in the page; choose javascript")
    memory = METHODS[name].page
    if memory is None:
        able = ", ".join(other for other, entry in METHODS.items() if entry.page is not None)
        raise UserError(f"web: method {name!r} does not run in the page; choose a model of {able}")
    net, attention = config["net"], config.get("attention", ATTENTION.defaults())
    tokens = config["icrm"] if memory == "sequence" else attention
    if net["name"] != "cnn":
        raise UserError(f"web: network {net['name']!r} does not run in the page; choose a model whose network is cnn")
    if memory not in ("", "shares") and tokens["features"] != "flat":
        raise UserError(f"web: attention features {tokens['features']!r} do not run in the page; choose flat")
    height, width, channels = card.shape
    if height != width or channels != 1:
        raise UserError(f"web: the page draws square grey images, and the model's are {height}x{width}x{channels}")
    share = {"momentum": 0.0, "prior": 0.0}  # of the buffer's statistics; the others use the running ones
    for group in METHODS[name].groups.keys() & {"batch_norm", "bn_alpha", "cxda_any"}:
        share |= {part: config[group][part] for part in share.keys() & config[group].keys()}
    if memory == "blended" and config["cxda_any"]["running"]:
        share["prior"] = 0.0
    features = height // 4 if net["padding"] == "same" else ((height - 4) // 2 - 4) // 2
    dim = features**2 * net["width"]
    heads = attention["heads"]
    layers = [{"pad": pad, "pool": i > 0} for i, pad in enumerate(PADDINGS[net["padding"]])]
    return {
        "method": name,
        "classes": card.class_names,
        "shape": card.shape,
        "mean": card.mean,
        "std": card.std,
        "fit": card.fit,
        "background": card.background,
        "layers": layers,
        "share": share,
        "memory": memory,
        "learned": config["cxda_any"]["learned"] if name == "cxda_any" else 0,
        "sequence": {part: tokens[part] for part in ("layers", "width", "heads", "context")}
        if memory == "sequence"
        else None,
        "shares": {
            "maps": spread(config[name]["maps"], len(layers)),
            "steps": config[name]["em_steps"],
            "most": ShareAdapter.most,
        }
        if memory == "shares"
        else None,
        "attention": {
            "heads": heads,
            "shared_norm": attention["shared_norm"],
            "width": dim / heads / (1 if attention["scale"] == "paper" else attention["ratio"]),
        },
        "facts": facts(model),
    }


def facts(model: Model) -> list[tuple[str, str]]:
    """The texts about the model on the page."""
    card = model.card
    found = [
        ("Method", f"{model.method.name}, seed {card.seed}, cxda_jax {card.package} {card.commit}".strip()),
        ("Data", card.provenance or card.data),
        ("Licence of the data", card.licence or "not recorded"),
    ]
    if card.test:
        spread = f"{card.test['avg_low']:.1f} to {card.test['avg_high']:.1f}"
        tasks = f"{card.test['num_tasks']:.0f} tasks of people whom training did not see"
        found.append(("Test accuracy", f"{card.test['avg']:.1f} % ({spread}), over {tasks}"))
    if card.gain:
        since, size = card.gain.helps_from(), card.gain.sizes[-1]
        gain = f"{card.gain.mean[-1]:+.1f} points ({card.gain.low[-1]:+.1f} to {card.gain.high[-1]:+.1f})"
        helps = f"from {since} image{'s' * (since > 1)} on" if since else "at no measured number of images"
        found.append(("What adapting brings", f"{gain} with {size} images in validation; in mixtures it helps {helps}"))
    return found


def render(described: Mapping[str, Any], variables: Mapping[str, Any]) -> str:
    """The page."""
    names, weights = packed(variables)
    kernel = as_base64((LIVE / "kernel.wasm").read_bytes())
    known = {**described, "tensors": names, "kernel": kernel}
    scripts = {name: _read(f"{name}.js") for name in ("engine", "draw", "page")}
    scripts["page"] = part("shared.js") + scripts["page"]
    scripts["engine"] += _read("sequence.js") + _read("shares.js")
    digests = " ".join(f"'sha256-{as_base64(hashlib.sha256(text.encode()).digest())}'" for text in scripts.values())
    filled = {
        "title": html.escape(f"{described['method']}: draw, and see it adapt"),
        "style": part("shared.css") + _read("page.css"),
        "model": in_script(known),
        "weights": weights,
        "hands": in_script(json.loads(_read("hands.json"))),
        **scripts,
    }
    text = _read("page.html").replace("DIGESTS", digests, 1)
    for name, value in filled.items():
        text = text.replace(f"<!--{name}-->", value, 1)
    return text


def packed(variables: Mapping[str, Any]) -> tuple[list[tuple[str, int, int]], str]:
    """Names of tensors, where each begins and how many numbers it has; and these numbers, float32 in base64."""
    names, blocks, start = [], [], 0
    for name, array in variables.items():
        values = np.asarray(array, "<f4").reshape(-1)
        short = name.split("/", 1)[1]  # without params/ and batch_stats/
        names.append((short, start, len(values)))
        blocks.append(values)
        start += len(values)
    return names, as_base64(np.concatenate(blocks).tobytes())


def read_hands() -> list[Hand]:
    """The recorded handwriting in hands.json: {"hands": [{"name", "labels", "strokes"}]}.

    `strokes` is base64 of bytes: for each drawing the number of its strokes, for each stroke the number of its points,
    for each point x and y.
    """
    found = []
    for entry in json.loads(_read("hands.json"))["hands"]:
        data, at, drawings = base64.b64decode(entry["strokes"]), 0, []
        while at < len(data):
            strokes, count = [], data[at]
            at += 1
            for _ in range(count):
                numbers = data[at + 1 : at + 1 + 2 * data[at]]
                strokes.append(list(zip(numbers[::2], numbers[1::2], strict=True)))
                at += 1 + len(numbers)
            drawings.append(strokes)
        found.append(Hand(entry["labels"], drawings))
    return found


def drawn(strokes: list[list[tuple[int, int]]], side: int) -> np.ndarray:
    """A recorded drawing as the training's reader draws it, uint8 [side, side]."""
    scale = side / 28
    turned = [np.array(stroke, np.float32) * np.array([1, -1], np.float32) for stroke in strokes]
    return draw(turned, 18 * scale, side, 2 * scale)


def compare(model: Model, page: Path) -> dict[str, Any]:
    """Compares the page's scripts, run in Node.js, with JAX. A UserError if they do not agree."""
    side = model.card.shape[0]
    strokes = [drawing for hand in read_hands() for drawing in hand.drawings]
    order = np.random.default_rng(0).permutation(len(strokes))[: FILLS[-1] + QUERIES]
    chosen = [strokes[i] for i in order]
    pixels = np.stack([drawn(drawing, side) for drawing in chosen])[..., None]
    support, queries = pixels[: FILLS[-1]], pixels[FILLS[-1] :]
    found = run(page, support, queries, FILLS, chosen)
    given = np.stack([np.frombuffer(base64.b64decode(text), np.uint8) for text in found["drawn"]])
    ink = int(np.abs(given.reshape(pixels.shape).astype(int) - pixels).max())
    errors = {kind: 0.0 for kind in found["answers"]}
    attention, equal = 0.0, True
    for place, fill in enumerate(FILLS):
        logits, weights = by_model(model, support[:fill], queries)
        for kind, answers in found["answers"].items():
            theirs = np.array(answers[place]["logits"])
            errors[kind] = max(errors[kind], float(np.abs(theirs - logits).max() / np.abs(logits).max()))
            equal &= bool((theirs.argmax(1) == logits.argmax(1)).all())
            if weights is not None and fill:
                attention = max(attention, float(np.abs(np.array(answers[place]["weights"]) - weights).max()))
    if not equal or not max(*errors.values(), attention) <= TOLERANCE or ink > 1:
        said = f"logits off by {max(errors.values()):.1e}, attention by {attention:.1e}, pixels by {ink}"
        raise UserError(
            f"web: the page does not agree with JAX ({said}; allowed {TOLERANCE:.0e} and 1); nothing is written"
        )
    return {
        "compared": True, "fills": FILLS, "queries": len(queries), "logits": errors, "attention": attention,
        "pixels": ink, "same_classes": equal, "tolerance": TOLERANCE, "node": found["node"],
    }  # fmt: skip


def run(page: Path, support: np.ndarray, queries: np.ndarray, fills: Any, strokes: Any = ()) -> dict[str, Any]:
    """The answers of the page's scripts to images, in Node.js; see check.js."""
    images, asked = ([as_base64(image.tobytes()) for image in part] for part in (support, queries))
    asks = {"images": images, "queries": asked, "fills": list(fills), "strokes": list(strokes)}
    return ask_node("web", [LIVE / "check.js", page], asks)


def find_node(kind: str) -> str:
    """The program of Node.js; a UserError of the format where there is none."""
    if node := shutil.which("node"):
        return node
    raise UserError(f"{kind}: node is missing, with which the scripts are compared with JAX; install Node.js {OLDEST}")


def ask_node(kind: str, arguments: Sequence[str | Path], questions: Any) -> Any:
    """What a script prints in Node.js, as JSON. Its last argument is a file that has the questions."""
    node = find_node(kind)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "questions.json"
        file.write_text(json.dumps(questions), encoding="ascii")
        done = subprocess.run([node, *arguments, file], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"{kind}: the scripts fail in node ({last}); Node.js {OLDEST} is needed")
    return json.loads(done.stdout)


def _read(name: str) -> str:
    return (LIVE / name).read_text(encoding="utf-8")
