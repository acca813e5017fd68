"""Files that somebody made so: their hashes fit, and what is in them costs one line before anything is computed of it."""

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import cxda_jax
from cxda_jax.adapter import adapter as adapters
from cxda_jax.adapter.features import read_classes, read_labelled
from cxda_jax.config import extensions, registry
from cxda_jax.device import loading
from cxda_jax.device.model import CompiledMethod, Model
from cxda_jax.disk import manifest, models
from cxda_jax.disk.reading import read_lines, read_table
from cxda_jax.errors import UserError
from cxda_jax.export import script
from cxda_jax.methods.entry import Entry
from tests.lines import refused
from tests.nets import CARD, build_method

CLASSES, STYLE = 6, 8
SPAN = [2.0, 1.0, 3.0]
SIZES = "0", "5", "20", "100"
REPORT = {
    "overall": {"plain": 50.0, **dict.fromkeys(SIZES, SPAN)}, "steps": 1, "tasks": 200, "drift": {"limit": 1.0},
    "calibration": {n: {"temperature": 1.5} for n in SIZES}, "of later versions": [],
}  # fmt: skip
MADE = {
    "classes": CLASSES, "style": STYLE, "keys": "style", "seed": 0, "package": "0", "report": REPORT, "said": "made",
    "origin": {"classes": [*"abcdef"]},
}  # fmt: skip
ARRAYS = {
    "params/adapter/kernel": (STYLE, 16), "params/adapter/bias": (16, CLASSES), "params/adapter/offset": CLASSES,
    **{f"params/adapter/{name}": () for name in ("near", "strength", "log_t", "log_n", "log_m")},
    "batch_stats/adapter/mean": STYLE, "batch_stats/adapter/std": STYLE, "batch_stats/adapter/shares": CLASSES,
}  # fmt: skip
OWN = {
    "scale": (), "bias": CLASSES, "content": (CLASSES,) * 2, "mean": STYLE, "std": STYLE,
    **dict.fromkeys(("weights", "common"), (STYLE, CLASSES)),
}  # fmt: skip
EVIDENCE = {"log_l": (), "evidence_kernel": (6, 16), "evidence_bias": 16, "belief": 16}  # older adapters have none
ARRAYS |= {f"batch_stats/adapter/own/{name}": shape for name, shape in OWN.items()}
ARRAYS |= {f"params/adapter/{name}": shape for name, shape in EVIDENCE.items()}
FLOOR = "variables/batch_stats/adapter/log_floor"
KNOWN = {"centre": STYLE, "between": STYLE, "within": STYLE, "scale": (), "bias": CLASSES, "shares": CLASSES}
WEIGHTS = {
    **{f"variables/{name}": np.full(shape, 0.2, np.float32) for name, shape in ARRAYS.items()},
    FLOOR: np.array(-0.5, np.float32),
    **{f"known/{name}": np.full(shape, 0.2, np.float32) for name, shape in KNOWN.items()},
    "known/thresholds": np.tile(np.linspace(1, 0.5, 9, dtype=np.float32), (2, 1)),
    **{f"known/{name}": np.full((2, 3, 9), x, np.float32) for name, x in (("accepted", 5), ("wrong", 1))},
}  # fmt: skip


def write_adapter(folder, card=MADE, arrays=WEIGHTS):
    folder.mkdir(exist_ok=True)
    (folder / models.CARD).write_text(json.dumps(card))
    save_file(arrays, folder / models.WEIGHTS)
    manifest.write(folder, [models.CARD, models.WEIGHTS], about=adapters.HOLDS)
    return folder


@pytest.fixture(autouse=True)
def no_waiting():
    """What waits for a pipe fails."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.setitimer(signal.ITIMER_REAL, 60, 5)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def changed(content, *places, to):
    """A copy with another value at content[place][place]..."""
    inner = to if len(places) == 1 else changed(content[places[0]], *places[1:], to=to)
    return {**content, places[0]: inner}


WRONG = [  # one of each kind of value that a card may not have
    (("keys",), "../x"), (("keys",), ["style"]), *((("classes",), to) for to in (1, 10**400, 6.0, True, 7)), (("style",), 9),
    (("seed",), -1), *((("report", "calibration", "5", "temperature"), to) for to in (math.nan, 1e308, "1", None, 0)),
    *((("report", "overall", "100"), to) for to in ([1.0, 2.0], [1.0, math.nan, 2.0], {}, [1e9] * 3)),
    *((("report", "drift", "limit"), to) for to in (-1.0, math.inf, True)),
    *((("report", name), []) for name in ("steps", "tasks", "drift", "overall", "calibration")),
    *((("origin", "classes"), to) for to in (["a"], [1] * 6)), *((("origin", name), 10**9) for name in ("size", "batch")),
    *((("origin", name), [math.nan]) for name in ("mean", "std")), (("origin", "maps"), [1]), (("origin", "encoder"), 5),
    (("origin",), []), (("said",), 1),
]  # fmt: skip


def test_a_card_of_an_adapter_is_read_within_its_ranges_alone(tmp_path):
    adapter = cxda_jax.load_adapter(write_adapter(tmp_path, {**MADE, "always": True, "more": 1}))
    assert not adapter.always and adapter.report == REPORT and adapter.helps
    for places, to in WRONG:
        write_adapter(tmp_path, changed(MADE, *places, to=to))
        named = places[-1] if places[-1] not in ("classes", "style") else "classes|style|kernel"
        with refused(f"(card.json|weights.safetensors): .*({named})", tmp_path):
            cxda_jax.load_adapter(tmp_path)
    wide = changed(MADE, "report", "overall", "100", to=[-20.0, -300.0, 260.0])  # of three domains
    assert not cxda_jax.load_adapter(write_adapter(tmp_path, wide)).helps
    for name in MADE:
        write_adapter(tmp_path, {other: value for other, value in MADE.items() if other != name})
        with refused("card.json", tmp_path, named=f"'{name}'"):
            cxda_jax.load_adapter(tmp_path)


def test_weights_of_an_adapter_are_read_within_their_ranges_alone(tmp_path):
    kernel, thresholds = "variables/params/adapter/kernel", WEIGHTS["known/thresholds"]
    wrong = [(name, np.full_like(x, np.nan)) for name, x in WEIGHTS.items()]
    wrong += [(f"known/{name}", np.full(KNOWN[name], -1, np.float32)) for name in ("between", "within", "shares")]
    wrong += [
        ("variables/batch_stats/adapter/std", np.zeros(STYLE, np.float32)), ("known/thresholds", thresholds[:, ::-1].copy()),
        ("known/accepted", np.ones((2, 3, 9), bool)), ("known/wrong", np.full((2, 3, 9), 6, np.float32)),
        (kernel, np.full((STYLE, 16), 3e38, np.float32)), (kernel, np.zeros((STYLE, 15), np.float32)),
        (FLOOR, np.array(0.1, np.float32)),
    ]  # fmt: skip
    for name, array in wrong:
        write_adapter(tmp_path, arrays={**WEIGHTS, name: array})
        with refused("weights.safetensors", tmp_path, named=name.partition("/")[2]):
            cxda_jax.load_adapter(tmp_path)
    newer = {FLOOR, *(f"variables/params/adapter/{name}" for name in EVIDENCE)}
    older = {name: x for name, x in WEIGHTS.items() if "/own/" not in name and name not in newer}
    adapter = cxda_jax.load_adapter(write_adapter(tmp_path, arrays=older))
    assert not adapter.corrects and not adapter.variables["params"]["adapter"]["belief"].any()
    for name in WEIGHTS.keys() - newer:
        arrays = {other: x for other, x in WEIGHTS.items() if other != name}
        write_adapter(tmp_path, arrays={**arrays, f"other{name}": WEIGHTS[name]})
        with refused("weights.safetensors", tmp_path, named=name.partition("/")[2]):
            cxda_jax.load_adapter(tmp_path)


def test_within_these_ranges_an_answer_is_finite_or_refused(tmp_path):
    """At their ends, in several tensors at once, for the largest numbers that an image may have."""
    rng, report = np.random.default_rng(0), changed(REPORT, "drift", "limit", to=None)
    kinds, answered = adapters._VARIABLES | adapters._OWN, 0
    for _ in range(40):
        arrays = dict(WEIGHTS)
        for name in rng.permutation([*kinds])[: rng.integers(len(kinds) + 1)]:
            low, high = map(np.float32, kinds[name].within[:2])
            ends = np.nextafter(low, high), np.nextafter(high, low)
            arrays[f"variables/{name}"] = rng.choice(ends, np.shape(arrays[f"variables/{name}"])).astype(np.float32)
        adapter = cxda_jax.load_adapter(write_adapter(tmp_path, {**MADE, "report": report}, arrays))
        rows = rng.choice([-adapters.LIMIT, 0, 1, adapters.LIMIT], (16, CLASSES + STYLE))
        z, s = np.split(rows, [CLASSES], axis=1)
        buffer = slice(rng.integers(1, 17))
        device = adapter.adapt(z[buffer], s[buffer])
        with contextlib.suppress(UserError):
            proba = device.predict_proba(z, s)
            answered += 1
            assert np.isfinite(proba).all()
    assert answered > 30


def test_a_model_is_read_within_its_ranges_alone(tmp_path):
    folder = shutil.copytree(loading.SHIPPED / "glyphs", tmp_path / "model")
    names = [path.name for path in folder.iterdir() if path.name != manifest.NAME]
    card = json.loads((folder / models.CARD).read_text())
    for places, to in (
        (("mean",), [1e308]), (("std",), [True]), (("seed",), -1), (("shape",), [28, 28, 10**12]), (("class_names",), [1]),
        (("background",), [256, 0, 0]), (("fit",), "../x"), (("gain", "sizes"), [0, 5, 5]), (("gain",), []), (("looks",), {}),
        (("gain", "tasks"), True), (("test", "avg"), math.nan), (("looks", "brightness_spread"), -1.0),
    ):  # fmt: skip
        (folder / models.CARD).write_text(json.dumps(changed(card, *places, to=to)))
        manifest.write(folder, names)
        with refused(f"card.json: .*{places[-1]}", tmp_path):
            cxda_jax.load(folder)
    (folder / models.CARD).write_text(json.dumps(card))
    weights = load_file(folder / models.WEIGHTS)
    save_file({name: np.full_like(array, np.nan) for name, array in weights.items()}, folder / models.WEIGHTS)
    manifest.write(folder, names)
    with refused("finite", tmp_path):
        cxda_jax.load(folder)


def test_an_answer_that_is_not_finite_is_no_answer():
    programs = CompiledMethod(lambda *_: 0, lambda _, query: np.full((len(query.pixels), 10), np.nan), None)
    model = dataclasses.replace(Model(CARD, build_method("erm"), {}, programs), _adapted=0)
    with refused("its answers are not finite"):
        model.predict(np.zeros((2, *CARD.shape), np.uint8))


FEATURES = {
    "logits": np.zeros((9, 3)), "labels": np.arange(9) % 3, "domains": np.repeat([*"ab"], [5, 4]), "style": np.ones((9, 2)),
    "about": np.array("{}"), "classes": np.array([*"abc"]),
}  # fmt: skip


def test_arrays_of_features_are_rows_of_the_same_images(tmp_path):
    path = tmp_path / "f.npz"
    np.savez(path, **FEATURES)
    assert read_labelled(path).origin == {"classes": [*"abc"]}
    for name, to in (
        *((name, FEATURES[name][:8]) for name in ("logits", "labels", "domains", "style")), ("labels", np.zeros(9)),
        ("logits", np.zeros(9)), ("logits", np.zeros((9, 3), complex)), ("classes", np.array([*"ab"])),
        ("about", np.array("[]")), ("about", np.array(5)),
    ):  # fmt: skip
        np.savez(path, **{**FEATURES, name: to})
        with refused("{tmp}/f.npz: .*" + (name if to.shape[:1] != (8,) else ""), tmp_path):
            read_labelled(path)
    without = {name: array for name, array in FEATURES.items() if name != "style"}
    np.savez(path, **without)
    assert read_labelled(path).style is None
    np.savez(path, **without, features=np.ones((9, 4)))
    with refused("no 'style'", tmp_path):
        read_labelled(path)


def test_no_pipe_is_waited_for(tmp_path):
    """Nor is a folder read."""
    buffer = Model(CARD, build_method("bn"), {}, CompiledMethod(*[lambda *_: 0] * 2, None))
    readers = {
        **dict.fromkeys((models.CARD, models.WEIGHTS, manifest.NAME), lambda path: cxda_jax.load(path.parent)),
        "f.npz": read_labelled, "names.txt": read_classes, "metrics.jsonl": read_lines, "a.png": buffer.as_pixels,
        "a.csv": lambda path: list(read_table(path, ("a",), "")),
        "b.npz": lambda path: cxda_jax.SupportBuffer.load(path, buffer),
    }  # fmt: skip
    for name, reader in readers.items():
        for make in (os.mkfifo, os.mkdir):
            folder = write_adapter(tmp_path / f"{name} {make.__name__}")
            (folder / name).unlink(missing_ok=True)
            make(folder / name)
            with refused("", folder, named=name):
                reader(folder / name)


def test_a_script_may_stand_in_a_page(tmp_path):
    name = "</script><script>alert(1)</script><!--"
    origin = {"classes": [name, *"bcdef"]}
    model = cxda_jax.load(write_adapter(tmp_path / "adapter", {**MADE, "origin": origin}))
    script.write(model, tmp_path)
    text = (tmp_path / script.SCRIPT).read_text()
    known = text.partition("new Adapter(")[2].partition(");\n")[0]
    assert not re.search("</script|<!--", text) and json.loads(known)["classes"] == [*origin["classes"]]


def test_packages_of_others_break_themselves_alone(monkeypatch, capsys):
    """One that cannot be imported, one that ends the process, one whose method is none, and two that take a name."""

    def broken():
        raise RuntimeError("\x1b[31mno\nluck")

    def ends():
        raise SystemExit(3)

    points = [
        ("broken", broken), ("left", ends), ("number", lambda: 5), ("icrm", lambda: registry.METHODS["erm"]),
        ("theirs", lambda: registry.METHODS["erm"]), ("theirs", broken),
    ]  # fmt: skip
    found = [SimpleNamespace(name=n, load=load, dist=SimpleNamespace(name=f"of-{n}"), module="m") for n, load in points]
    monkeypatch.setattr(extensions, "entry_points", lambda group: found)
    added = extensions.added("cxda_jax.methods", registry.OWN, lambda entry: isinstance(entry, Entry))
    assert [*added] == ["theirs"] and registry.METHODS["icrm"] is not registry.METHODS["erm"]
    lines = capsys.readouterr().err.splitlines()
    for line, (name, _) in zip(lines, [*points[:4], points[5]], strict=True):
        assert line.isprintable() and len(line) <= 200 and f"of-{name}" in line
