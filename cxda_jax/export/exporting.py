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

from cxda_jax.adapter.adapter import is_adapter
from cxda_jax.adapter.encoders import open_encoder
from cxda_jax.adapter.features import read_labelled
from cxda_jax.config.reading import of_method
from cxda_jax.device.adapting import listed, read_images, say_faults
from cxda_jax.device.attached import Attached, Rows, attach
from cxda_jax.device.loading import find_model, load
from cxda_jax.device.model import Model
from cxda_jax.disk import files, folders, models
from cxda_jax.disk.reading import read_object
from cxda_jax.errors import UserError, brief
from cxda_jax.export import script, web
from cxda_jax.export.describing import DESCRIBE, options_of, write_describe
from cxda_jax.export.formats import FORMATS, PARTS, Run, insist_on, open_onnx
from cxda_jax.export.pair import Named, Pair, Shapes, by_model, pair_of
from cxda_jax.machine.progress import replaces
from cxda_jax.nets.shares import ShareAdapter
from cxda_jax.training.experiment import build

REPORT = "export.json"
FILLS = (5, 20)  # images in the buffer of compared tasks, after 0, 1 and all places
LEAST = 3  # tasks: with 0, 1 and all places
TIE = 1e-4  # of the largest logit: where the model's two likeliest classes are closer, either counts as its class
NOISE = 4  # times the noise of a classifier, its programs may differ by
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
      number: so many, and LEAST at least.
      images: a folder of images to take in their place; "" for none.
      tolerance: the largest accepted difference of logits, as in Allowed; 0: that of the format.
    """

    data_dir: str
    number: int
    images: str = ""
    tolerance: float = 0.0


class Allowed(NamedTuple):
    """How programs may differ from the model.

    Attributes:
      error: largest difference of logits, relative to the largest logit.
      same: smallest share of equal classes.
      tie: where the model's two likeliest classes are closer, relative to the largest logit, either is equal.
    """

    error: float
    same: float = 1.0
    tie: float = TIE


class Source(NamedTuple):
    """The model to export.

    Attributes:
      path: as load() takes it.
      method: how to adapt, as load() takes it.
      encoder: as load() takes it; it must be an ONNX file, and the format onnx.
      always: export an adapter that fit() did not trust too.
    """

    path: str
    method: str = ""
    encoder: str = ""
    always: bool = False


def export(source: Source, kind: str, out: Path, places: int, check: Check) -> None:
    """Writes a model into the folder `out` in the format `kind`, and prints how the programs compare with the model.

    Args:
      places: of the buffer.
    """
    insist_on_place(out)
    check = check._replace(number=max(LEAST, check.number))
    if kind == "web":
        with folders.replaced(out, claimed) as folder:
            report = web.write(opened(source), folder)
        print(f"{out}/{web.PAGE}: {report['bytes'] / 2**20:.1f} MB, compared with JAX; {out}/{web.PARITY} says how")
        return
    if kind == "javascript":
        return export_script(opened(source), out, places, check)
    insist_on(kind)
    model, form = opened(source), FORMATS[kind]
    insist_on_operations(model, source, kind, places)
    alone = attach(find_model(source.path), "", False).trusted() if source.encoder else None  # the adapter
    pair = pair_of(alone or model, places)
    tasks = tasks_of(model, places, check)
    with folders.replaced(out, claimed) as folder:
        print(f"writing {model.method.name} with {places} places as {kind}", flush=True)
        network = model.config["net"]["name"] if model.config else "of logits and style"
        with converting(f"{kind}: {model.method.name} with the network {network}"):
            form.write(pair, folder)
            if alone:
                write_describe(alone.adapter, Path(source.encoder).expanduser(), folder)
        print(f"comparing it with the model on {len(tasks)} tasks", flush=True)
        seen, facts = tasks, {}
        if alone and isinstance(model, Attached):
            tasks, seen, facts = described(model, alone, source.encoder, folder, tasks)
        noise = NOISE * facts.get("noise", 0.0)
        allowed = Allowed(check.tolerance or max(form.error, noise), form.same, max(TIE, noise))
        parity = compare(alone or model, allowed, form.run(pair, folder), tasks, seen, places) | facts
        report = report_of(model, pair, kind, folder, parity)
        files.write_text(folder / REPORT, json.dumps(report, indent=1) + "\n")
    print(said(kind, out, parity, report["files"]))


def opened(source: Source) -> Model:
    """The model. Of an adapter it tells no drift and always adapts, as programs do.

    A UserError if fit() did not trust it, and nobody asks for it all the same.
    """
    folder = find_model(source.path)
    if source.method or not is_adapter(folder):
        return load(source.path, source.method, source.encoder)
    model = attach(folder, source.encoder, False)
    if not (model.adapter.helps or source.always):
        why = "cxda fit did not trust this adapter, so devices keep the classifier's own answers"
        raise UserError(f"model={folder}: {why}; fit it to more domains, or give --always to export it all the same")
    return model.trusted()


def insist_on_operations(model: Model, source: Source, kind: str, places: int) -> None:
    """Raises a UserError where a format lacks what the programs need."""
    if source.encoder and not (kind == "onnx" and source.encoder.endswith(".onnx")):
        why = "an ONNX file alone is exported with its adapter, and as onnx"
        fix = "leave the encoder out, and the programs take rows of logits and style"
        raise UserError(f"encoder={brief(source.encoder)}: {why}; {fix}")
    if kind.startswith("litert") and model.method.name == "cxda_shares" and places > ShareAdapter.most:
        why = f"each query chooses the {ShareAdapter.most} images that count most, which LiteRT has no operation for"
        raise UserError(f"places={places}: {why}; give {ShareAdapter.most} or fewer, or choose onnx or jax")


def export_script(model: Model, out: Path, places: int, check: Check) -> None:
    """Writes an adapter as JavaScript, once it agrees with the model."""
    if not isinstance(model, Attached) or model.encoder:
        raise UserError("javascript: an adapter of cxda fit is written so, without an encoder; for images choose web")
    tasks, allowed = tasks_of(model, places, check), Allowed(check.tolerance or web.TOLERANCE)
    with folders.replaced(out, claimed) as folder:
        script.write(model, folder)
        asked = [(task.support[:, 0, 0], task.query[:, 0, 0]) for task in tasks]
        theirs, ours = script.answers(model, folder, asked), [by_model(model, *task[:2])[0] for task in tasks]
        parity = facts_of(tasks, allowed) | agreement(theirs, ours, allowed)
        written = {script.SCRIPT: {"sha256": files.hash_file(folder / script.SCRIPT)}}
        report = {"format": "javascript", "parity": parity, "files": written}
        files.write_text(folder / REPORT, json.dumps(report, indent=1) + "\n")
    print(f"{out}/{script.SCRIPT}: {agreed(parity)}")


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
            content = read_object(out / report, "")
            written = content["files"] if report == REPORT else {web.PAGE: content}
            whole = {name for name, facts in written.items() if files.hash_file(out / name) == facts["sha256"]}
            found |= {report, *whole}
    return found


def tasks_of(model: Model, places: int, check: Check) -> list[Task]:
    if model.dtype != np.uint8:
        return tasks_of_rows(model, check.images, places, check.number)
    if check.images:
        return own_tasks(model, check.images, places, check.number)
    return test_tasks(model, check.data_dir, places, check.number)


def tasks_of_rows(model: Model, file: str, places: int, count: int) -> list[Task]:
    """Tasks drawn from a file of cxda features."""
    if not file.endswith(".npz"):
        raise UserError(f"check_images={brief(file)}: an adapter is compared on a file of cxda features; give one")
    found = read_labelled(Path(file), model.adapter.head if isinstance(model, Attached) else None)
    logits = np.asarray(found.logits)
    rows = np.concatenate([logits, logits if found.style is None else found.style], axis=1, dtype=np.float32)
    return drawn(np.stack([model.as_pixels(row) for row in rows]), places, count)


def test_tasks(model: Model, data_dir: str, places: int, count: int) -> list[Task]:
    """Test tasks of the model's own data set. Their buffers hold 0, 1, 5, 20 images and all, in turn."""
    if not model.config:
        fix = "give a folder of images in check_images"
        raise UserError(f"export: an adapter has no data set of its own to compare on; {fix}")
    try:
        experiment = build(of_method(model.config, model.method.name), data_dir, splits=("test",))
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
    pixels = read_images(model, listed(Path(folder), faults.append), faults, "  images").pixels
    say_faults(faults)
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
    return min(places, (0, 1, places, *FILLS)[task % (3 + len(FILLS))])


def described(
    model: Attached, alone: Attached, file: str, folder: Path, tasks: Sequence[Task]
) -> tuple[list[Task], list[Task], dict[str, float]]:
    """The tasks with rows in place of images: as the model's classifier describes them, and as the program does.

    Then, for export.json, the classifier's noise: how much the logits move where it computes its graph as it is
    written, for image after image. Programs cannot be nearer to the model than the model to itself.

    Args:
      alone: the adapter, which takes rows.
      file: of the encoder.
      folder: of the programs.
    """
    adapter, program, times = alone.adapter, open_onnx(folder / f"{DESCRIBE}.onnx"), []

    def encode(pixels: np.ndarray) -> Named:
        row = timed(times, program, {"image": pixels})["row"].reshape(1, -1)
        return {"logits": row[:, : adapter.classes], adapter.keys: row[:, adapter.classes :]}

    plain = open_encoder(file, options_of(adapter.origin), plain=True)
    ours, plainly, theirs = (
        [Task(rows(task.support)[:, None, None], rows(task.query)[:, None, None], task.labels) for task in tasks]
        for rows in (model.rows, Rows(plain, adapter), Rows(plain._replace(encode=encode), adapter))
    )
    answers = ([by_model(alone, *task[:2])[0] for task in each] for each in (plainly, ours))
    return ours, theirs, {"noise": apart(*answers), "describe_ms": middle(times)}


def compare(
    model: Model, allowed: Allowed, run: Run, tasks: Sequence[Task], seen: Sequence[Task], places: int
) -> dict[str, Any]:
    """Compares the programs with the model itself, which adapts to the images of a buffer without any empty places.

    Raises a UserError if they do not agree.

    Args:
      seen: the tasks as the programs see them.
    """
    encode, predict = run
    theirs, ours, attention, encode_ms, predict_ms = [], [], [0.0], [], []
    for task, given in zip(tasks, seen, strict=True):
        logits, weights = by_model(model, task.support, task.query)
        count = len(task.support)
        images = np.zeros((places, *model.card.shape), model.dtype)
        images[:count] = given.support
        present = (np.arange(places) < count).astype(np.float32)
        memory = timed(encode_ms, encode, {"images": images, "present": present})
        answers = [timed(predict_ms, predict, {**memory, "image": image[None]}) for image in given.query]
        theirs.append(np.concatenate([np.asarray(answer["logits"]) for answer in answers]))
        ours.append(logits)
        if weights is not None and count:
            shown = np.concatenate([np.asarray(answer["attention"]) for answer in answers])[..., :count]
            attention.append(np.abs(shown - weights).max())
    parity = facts_of(tasks, allowed) | agreement(theirs, ours, allowed)
    parity |= {"attention": float(np.max(attention)), "encode_ms": middle(encode_ms), "predict_ms": middle(predict_ms)}
    if tasks[0].labels is not None:
        for name, answers in (("accuracy", theirs), ("accuracy_of_the_model", ours)):
            right = [found.argmax(1) == task.labels for found, task in zip(answers, tasks, strict=True)]
            parity[name] = round(100 * float(np.concatenate(right).mean()), 2)
    return parity


def facts_of(tasks: Sequence[Task], allowed: Allowed) -> dict[str, Any]:
    """What was compared, for export.json."""
    return {
        "tasks": len(tasks), "queries": sum(len(task.query) for task in tasks),
        "images": sorted({len(task.support) for task in tasks}),
        "logits_allowed": allowed.error, "same_classes_needed": allowed.same,
    }  # fmt: skip


def agreement(theirs: Sequence[np.ndarray], ours: Sequence[np.ndarray], allowed: Allowed) -> dict[str, float]:
    """How the logits of programs differ from the model's, for export.json. A UserError if they do not agree."""
    same = []
    for found, logits in zip(theirs, ours, strict=True):
        chosen = np.take_along_axis(logits, found.argmax(1)[:, None], 1)[:, 0]
        same.append(logits.max(1) - chosen <= allowed.tie * np.abs(logits).max())
    error, equal = apart(theirs, ours), float(np.concatenate(same).mean())
    if not (error <= allowed.error and equal >= allowed.same):
        fix = f"; --tolerance={2 * error:.0e} accepts them" * (equal >= allowed.same)
        raise UserError(
            f"the programs do not agree with the model: logits differ by {error:.1e} of the largest "
            f"(allowed {allowed.error:.1e}), "
            f"{100 * equal:.1f} % of the classes are equal (needed {100 * allowed.same:.0f} %); nothing is written{fix}"
        )
    return {"logits": error, "same_classes": equal}


def apart(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    """The largest difference of logits, relative to the largest of its task. It keeps what is no number."""
    return float(np.max([np.abs(x - y).max() / np.abs(y).max() for x, y in zip(some, others, strict=True)]))


def timed(times: list[float], program: Callable[[Named], Named], inputs: Named) -> Named:
    """The program's results; `times` gets the milliseconds that it took."""
    began = time.perf_counter()
    results = program(inputs)
    times.append(1e3 * (time.perf_counter() - began))
    return results


def middle(times: Sequence[float]) -> float:
    """The median without the first call, which may compile."""
    return round(float(np.median(times[1:] or times)), 3)


def report_of(model: Model, pair: Pair, kind: str, folder: Path, parity: Mapping[str, Any]) -> dict[str, Any]:
    """The content of export.json."""

    def shapes(of: Shapes) -> dict[str, Any]:
        return {name: {"shape": list(like.shape), "dtype": str(like.dtype)} for name, like in of.items()}

    card = model.card
    images = {
        "shape": card.shape, "dtype": "uint8", "range": "0 to 255", "fit": card.fit, "background": card.background,
        "normalisation": "inside the programs", "mean": card.mean, "std": card.std,
    }  # fmt: skip
    rows = {"dtype": "float32", "holds": "the logits, then the style"}
    first = {}
    if model.dtype != np.uint8:
        images = {"shape": card.shape} | rows
    elif isinstance(model, Attached):
        image, row = jax.ShapeDtypeStruct((1, *card.shape), model.dtype), pair.asked["image"]
        first["rows"] = {"shape": row.shape[1:]} | rows
        first[DESCRIBE] = {"takes": shapes({"image": image}), "gives": shapes({"row": row})}
    weights = {"weights": "weights.safetensors"} if kind == "jax" else {}
    return {
        "format": kind,
        "method": model.method.name,
        "class_names": card.class_names,
        "images": images,
        **first,
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
    times = ", ".join(f"{part} {parity[f'{part}_ms']:.2f} ms" for part in (DESCRIBE, *PARTS) if f"{part}_ms" in parity)
    lines = [
        *(f"{out}/{name}: {facts['bytes']:,} bytes" for name, facts in written.items()),
        f"{kind}: {agreed(parity)}",
        f"{kind}: {times} on this machine",
        f"{out}/{REPORT}: names and shapes of what the programs take and give, hashes, the comparison",
    ]
    return "\n".join(lines)


def agreed(parity: Mapping[str, Any]) -> str:
    """How programs compare with the model."""
    *others, last = map(str, parity["images"])
    noise = f"; the classifier's own noise is {parity['noise']:.1e}" if "noise" in parity else ""
    right = ""
    if "accuracy" in parity:
        right = f"; right {parity['accuracy']:.1f} %, the model {parity['accuracy_of_the_model']:.1f} %"
    return (
        f"logits differ by {parity['logits']:.1e} of the largest (allowed {parity['logits_allowed']:.1e}{noise}), "
        f"{100 * parity['same_classes']:.1f} % of the classes of {parity['queries']} queries are equal, "
        f"with {', '.join(others)} and {last} images in the buffer{right}"
    )
