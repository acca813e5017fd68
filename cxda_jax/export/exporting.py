"""The command: writes a model in a format, compares what was written with the model,
and keeps it only if they agree."""

import contextlib
import importlib.metadata
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from cxda_jax.device.adapting import FAULTS, fitted, listed
from cxda_jax.device.attached import Attached, attach
from cxda_jax.device.loading import find_model, load
from cxda_jax.device.model import Model
from cxda_jax.disk import files, folders, models
from cxda_jax.errors import UserError, brief
from cxda_jax.experiment import build
from cxda_jax.export import script, web
from cxda_jax.export.formats import FORMATS, Format, Run, insist_on
from cxda_jax.export.joining import join
from cxda_jax.export.pair import Named, Pair, Shapes, by_model, pair_of
from cxda_jax.features import read_labelled
from cxda_jax.fitted import is_adapter
from cxda_jax.progress import replaces, say

REPORT = "export.json"
FILLS = (0, 1, 5, 20)  # images in the buffer, of one compared task after the other; then all places
TIE = 1e-4  # of the largest logit: where the model's two likeliest classes are closer, either counts as its class
OWN_QUERIES = 20  # of a task made of a user's own images
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tensorflow", "ai-edge-litert", "jax2onnx", "onnx", "onnxruntime")


class Task(NamedTuple):
    """The questions of one comparison: images [n, h, w, c] of a buffer, queries [m, h, w, c], and their labels [m],
    if known."""

    support: np.ndarray
    query: np.ndarray
    labels: np.ndarray | None


class Check(NamedTuple):
    """The tasks on which programs are compared with the model.

    Attributes:
      data_dir: where the model's data set is, whose test tasks they are.
      number: so many.
      images: a folder of images to take in their place; "" for none.
    """

    data_dir: str
    number: int
    images: str = ""


def export(path: str, method: str, kind: str, out: Path, places: int, check: Check, encoder: str = "") -> None:
    """Writes a model into the folder `out` in the format `kind`, and prints how the programs compare with the model.

    Args:
      path: of the model, as load() takes it.
      method: how to adapt, as load() takes it.
      places: of the buffer.
      encoder: as load() takes it; it must be an ONNX file, and the format onnx.
    """
    insist_on_place(out)
    if kind == "web":
        with folders.replaced(out, claimed) as folder:
            report = web.write(opened(path, method, encoder), folder)
        print(f"{out}/{web.PAGE}: {report['bytes'] / 2**20:.1f} MB, compared with JAX; {out}/{web.PARITY} says how")
        return
    if kind == "javascript":
        return export_script(opened(path, method, encoder), out, places, check)
    form = FORMATS[kind]
    insist_on(form.needs)
    model = opened(path, method, encoder)
    if encoder and not (kind == "onnx" and encoder.endswith(".onnx")):
        raise UserError(f"encoder={brief(encoder)}: an ONNX file alone is exported with its adapter, and as onnx; "
                        "leave the encoder out, and the programs take rows of logits and style")  # fmt: skip
    alone = attach(find_model(path), "", False) if encoder else None  # the adapter
    pair = pair_of(alone or model, places)
    if model.dtype != np.uint8:
        tasks = tasks_of_rows(model, check.images, places, check.number)
    elif check.images:
        tasks = own_tasks(model, check.images, places, check.number)
    else:
        tasks = test_tasks(model, check.data_dir, places, check.number)
    with folders.replaced(out, claimed) as folder:
        print(f"writing {model.method.name} with {places} places as {kind}", flush=True)
        network = model.config["net"]["name"] if model.config else "of logits and style"
        with converting(f"{kind}: {model.method.name} with the network {network}"):
            form.write(pair, folder)
            if alone:
                join(alone.adapter.origin, Path(encoder).expanduser(), folder, places)
                pair = of_images(pair, model)
        print(f"comparing it with the model on {len(tasks)} tasks", flush=True)
        parity = compare(model, form, form.run(pair, folder), tasks, places)
        report = describe(model, pair, kind, folder, parity)
        files.write_text(folder / REPORT, json.dumps(report, indent=1) + "\n")
    print(said(kind, out, parity, report["files"]))


def opened(path: str, method: str, encoder: str) -> Model:
    """The model. Of an adapter it tells no drift and always adapts, as programs do."""
    folder = find_model(path)
    if method or not is_adapter(folder):
        return load(path, method, encoder)
    model = attach(folder, encoder, False)
    if not model.adapter.helps:
        print(f"warning: fit() did not trust the adapter {folder}; programs adapt all the same", flush=True)
    return model.trusted()


def export_script(model: Model, out: Path, places: int, check: Check) -> None:
    """Writes an adapter as JavaScript, once it agrees with the model."""
    if not isinstance(model, Attached) or model.encoder:
        raise UserError("javascript: an adapter of cxda fit is written so, without an encoder; for images choose web")
    tasks = tasks_of_rows(model, check.images, places, check.number)
    with folders.replaced(out, claimed) as folder:
        script.write(model, folder)
        asked = [(support[:, 0, 0], query[:, 0, 0]) for support, query, _ in tasks]
        theirs, ours = script.answers(model, folder, asked), [by_model(model, *task[:2])[0] for task in tasks]
        pairs = zip(theirs, ours, strict=True)
        error = max(float(np.abs(found - logits).max() / np.abs(logits).max()) for found, logits in pairs)
        if not error <= web.TOLERANCE:
            raise UserError(f"javascript: logits differ by {error:.1e} of the largest (allowed {web.TOLERANCE:.0e})")
        written = {script.SCRIPT: {"sha256": files.hash_file(folder / script.SCRIPT)}}
        report = {"format": "javascript", "parity": {"tasks": len(tasks), "logits": error}, "files": written}
        files.write_text(folder / REPORT, json.dumps(report, indent=1) + "\n")
    print(f"{out}/{script.SCRIPT}: logits differ by {error:.1e} of the largest, over {len(tasks)} tasks")


def of_images(pair: Pair, model: Model) -> Pair:
    """What the programs of a pair take once an encoder is in front of them."""
    images, image = (jax.ShapeDtypeStruct((n, *model.card.shape), np.uint8) for n in (*pair.buffer["present"].shape, 1))
    return pair._replace(buffer={**pair.buffer, "images": images}, asked={**pair.asked, "image": image})


@contextlib.contextmanager
def converting(what: str) -> Iterator[None]:
    """Around a format's converter: a UserError where it does not know an operation."""
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as e:  # converters raise errors of many kinds, with texts of many pages
        raise UserError(f"{what} cannot be converted ({type(e).__name__}); choose another format, such as jax") from e


def insist_on_place(out: Path) -> None:
    """Raises a UserError unless an export may be written there; says so where it replaces an earlier one."""
    found = folders.entries(out)
    if strangers := found - claimed(out):
        what = f"holds {brief(min(strangers), 40)}, which is not as an earlier export left it"
        raise UserError(f"--out={out}: {what}; name a new folder, or move it away")
    folders.insist_on_writable(out, "--out")
    if found:
        replaces(out)


def claimed(out: Path) -> set[str]:
    """Names of the files in a folder that are as an earlier export left them, by the hashes that it wrote."""
    found = set()
    no_report_of_ours = OSError, ValueError, LookupError, TypeError, AttributeError
    for report in (REPORT, web.PARITY):
        with contextlib.suppress(*no_report_of_ours):
            content = json.loads((out / report).read_bytes())
            written = content["files"] if report == REPORT else {web.PAGE: content}
            whole = {name for name, facts in written.items() if files.hash_file(out / name) == facts["sha256"]}
            found |= {report, *whole}
    return found


def tasks_of_rows(model: Model, file: str, places: int, count: int) -> list[Task]:
    """Tasks drawn from a file of cxda features."""
    if not file.endswith(".npz"):
        raise UserError(f"check_images={brief(file)}: an adapter is compared on a file of cxda features; give one")
    found = read_labelled(Path(file))
    rows = np.concatenate([found.logits, found.style], axis=1, dtype=np.float32)
    return drawn(np.stack([model.fit(row) for row in rows]), places, count)


def test_tasks(model: Model, data_dir: str, places: int, count: int) -> list[Task]:
    """Test tasks of the model's own data set. Their buffers hold 0, 1, 5, 20 images and all, in turn."""
    if not model.config:
        fix = "give a folder of images in check_images"
        raise UserError(f"export: an adapter has no data set of its own to compare on; {fix}")
    try:
        experiment = build({**model.config, "method": model.method.name}, data_dir, splits=("test",))
    except UserError as e:
        fix = "give the folder of its data, or images of your own in check_images"
        raise UserError(f"{e}; the programs are compared on test tasks of the model's data: {fix}") from None
    if experiment.store.sha256 != model.card.data_hash:
        raise UserError(
            f"{experiment.store.info.name}: other data than the model was trained on; prepare them again, or "
            "give images of your own in check_images"
        )
    plan, images, labels = experiment.task_plans("test")(range(count)), experiment.store.images, experiment.store.labels
    return [
        Task(images[np.random.default_rng(i).permutation(support)[: fill_of(i, places)]], images[query], labels[query])
        for i, (support, query) in enumerate(zip(plan.support, plan.query, strict=True))
    ]


def own_tasks(model: Model, folder: str, places: int, count: int) -> list[Task]:
    """Tasks whose buffers and queries are drawn from a folder of images without labels."""
    faults: list[str] = []
    pixels = fitted(model, listed(Path(folder), faults.append), faults, "  images").pixels
    for fault in faults[:FAULTS]:
        say(f"left out: {fault}")
    if len(pixels) < 2:
        raise UserError(f"{folder}: {len(pixels)} images that can be read; give a folder of some hundred")
    return drawn(pixels, places, count)


def drawn(pixels: np.ndarray, places: int, count: int) -> list[Task]:
    rng, tasks = np.random.default_rng(0), []
    for i in range(count):
        rows = rng.permutation(len(pixels))
        tasks.append(Task(pixels[rows[: fill_of(i, places)]], pixels[rows[-OWN_QUERIES:]], None))
    return tasks


def fill_of(task: int, places: int) -> int:
    return min(places, (*FILLS, places)[task % (len(FILLS) + 1)])


def compare(model: Model, form: Format, run: Run, tasks: Sequence[Task], places: int) -> dict[str, Any]:
    """Compares the programs with the model itself, which adapts to the images of a buffer without any empty places.

    Raises a UserError if they do not agree.
    """
    encode, predict = run
    errors, attention, same, right, right_of_model = [], [0.0], [], [], []
    encode_ms, predict_ms = [], []
    for task in tasks:
        logits, weights = by_model(model, task.support, task.query)
        count = len(task.support)
        images = np.zeros((places, *model.card.shape), model.dtype)
        images[:count] = task.support
        present = (np.arange(places) < count).astype(np.float32)
        memory = timed(encode_ms, encode, {"images": images, "present": present})
        answers = [timed(predict_ms, predict, {**memory, "image": image[None]}) for image in task.query]
        theirs = np.concatenate([np.asarray(answer["logits"]) for answer in answers])
        errors.append(np.abs(theirs - logits).max() / np.abs(logits).max())
        chosen = np.take_along_axis(logits, theirs.argmax(1)[:, None], 1)[:, 0]
        same.append(logits.max(1) - chosen <= TIE * np.abs(logits).max())
        if weights is not None and count:
            shown = np.concatenate([np.asarray(answer["attention"]) for answer in answers])[..., :count]
            attention.append(np.abs(shown - weights).max())
        if task.labels is not None:
            right.append(theirs.argmax(1) == task.labels)
            right_of_model.append(logits.argmax(1) == task.labels)
    error, equal = float(np.max(errors)), float(np.concatenate(same).mean())  # of numpy, which keeps what is no number
    if not (error <= form.error and equal >= form.same):
        raise UserError(
            f"the programs do not agree with the model: logits differ by {error:.1e} of the largest "
            f"(allowed {form.error:.0e}), "
            f"{100 * equal:.1f} % of the classes are equal (needed {100 * form.same:.0f} %); nothing is written"
        )
    parity = {
        "tasks": len(tasks), "queries": sum(len(task.query) for task in tasks),
        "images": sorted({len(t.support) for t in tasks}),
        "logits": error, "logits_allowed": form.error, "attention": float(np.max(attention)), "same_classes": equal,
        "same_classes_needed": form.same, "encode_ms": middle(encode_ms), "predict_ms": middle(predict_ms),
    }  # fmt: skip
    if right:
        rates = {"accuracy": right, "accuracy_of_the_model": right_of_model}
        parity |= {name: round(100 * float(np.concatenate(rows).mean()), 2) for name, rows in rates.items()}
    return parity


def timed(times: list[float], program: Callable[[Named], Named], inputs: Named) -> Named:
    """The program's results; `times` gets the milliseconds that it took."""
    began = time.perf_counter()
    results = program(inputs)
    times.append(1e3 * (time.perf_counter() - began))
    return results


def middle(times: Sequence[float]) -> float:
    """The median without the first call, which may compile."""
    return round(float(np.median(times[1:] or times)), 3)


def describe(model: Model, pair: Pair, kind: str, folder: Path, parity: Mapping[str, Any]) -> dict[str, Any]:
    """The content of export.json."""

    def shapes(of: Shapes) -> dict[str, Any]:
        return {name: {"shape": list(like.shape), "dtype": str(like.dtype)} for name, like in of.items()}

    card = model.card
    images = {
        "shape": card.shape, "dtype": "uint8", "range": "0 to 255", "fit": card.fit, "background": card.background,
        "normalisation": "inside the programs", "mean": card.mean, "std": card.std,
    }  # fmt: skip
    if model.dtype != np.uint8:
        images = {"shape": card.shape, "dtype": "float32", "holds": "the logits, then the style"}
    weights = {"weights": "weights.safetensors"} if kind == "jax" else {}
    return {
        "format": kind,
        "method": model.method.name,
        "class_names": card.class_names,
        "images": images,
        "encode": {"takes": shapes(pair.buffer), "gives": shapes(pair.memory)} | weights,
        "predict": {"takes": shapes(pair.asked), "gives": shapes(pair.answers)} | weights,
        "parity": dict(parity),
        "files": {
            path.name: {"bytes": path.stat().st_size, "sha256": files.hash_file(path)}
            for path in sorted(folder.iterdir())
        },
        "versions": dict(versions()),
        "card": models.to_json(card),
    }  # fmt: skip


def versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)


def said(kind: str, out: Path, parity: Mapping[str, Any], written: Mapping[str, Any]) -> str:
    """The lines that the command prints at its end."""
    right = ""
    if "accuracy" in parity:
        right = f"; right {parity['accuracy']:.1f} %, the model {parity['accuracy_of_the_model']:.1f} %"
    lines = [
        *(f"{out}/{name}: {facts['bytes']:,} bytes" for name, facts in written.items()),
        f"{kind}: logits differ by {parity['logits']:.1e} of the largest, {100 * parity['same_classes']:.1f} % "
        f"of the classes of {parity['queries']} queries are equal{right}",
        f"{kind}: encode {parity['encode_ms']:.1f} ms, predict {parity['predict_ms']:.2f} ms on this machine",
        f"{out}/{REPORT}: names and shapes of what the programs take and give, hashes, the comparison",
    ]
    return "\n".join(lines)
