"""Files that somebody made so: their hashes fit, and what is in them costs one line before anything is computed of it."""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

import cxda_jax
from cxda_jax.adapter import adapter as adapters
from cxda_jax.adapter.features import read_classes, read_labelled
from cxda_jax.config import extensions, registry
from cxda_jax.device import loading
from cxda_jax.device.model import Model, Programs
from cxda_jax.disk import manifest, models
from cxda_jax.disk.reading import read_lines, read_table
from cxda_jax.errors import UserError
from cxda_jax.export import script
from cxda_jax.methods.erm import ERM
from cxda_jax.nets import building
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
KNOWN = {"centre": STYLE, "between": STYLE, "within": STYLE, "scale": (), "bias": CLASSES, "shares": CLASSES}
WEIGHTS = {
    **{f"variables/{name}": np.full(shape, 0.2, np.float32) for name, shape in ARRAYS.items()},
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


NUMBERS = [math.nan, math.inf, 1e308, "1", None, True, [1]]
WRONG = [
    *((("keys",), to) for to in ("../x", "", None, ["style"])),
    *((("classes",), to) for to in (0, -5, 1, 10**9, 10**400, 6.0, True, 7)),
    *((("style",), to) for to in (0, 10**12, "8", 9)),
    *((("seed",), to) for to in (-1, 2**40, 0.5)),
    *((("report", "calibration", "5", "temperature"), to) for to in (*NUMBERS, 0, -1.0, 1e-300)),
    *((("report", "overall", "plain"), to) for to in NUMBERS),
    *((("report", "overall", "100"), to) for to in ([1.0, 2.0], [*SPAN, 1.0], [1.0, math.nan, 2.0], {}, "abc", [1e9] * 3)),
    *((("report", "drift", "limit"), to) for to in (-1.0, math.inf, "no", True, 1e308)),
    *((("report", name), to) for name in ("steps", "tasks", "drift", "overall", "calibration") for to in (-1, None, [])),
    *((("origin", "classes"), to) for to in (["a"], [1] * 6, "abcdef", {})),
    *((("origin", name), to) for name in ("size", "batch") for to in (0, -1, 10**9, "8", True)),
    *((("origin", name), to) for name in ("mean", "std") for to in (1.0, ["a"], [math.nan], {})),
    (("origin", "maps"), [1]), (("origin", "encoder"), 5), (("origin", "fit"), None), (("origin",), []), (("said",), 1),
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
        with refused(f"card.json: no '{name}'", tmp_path):
            cxda_jax.load_adapter(tmp_path)
    write_adapter(tmp_path, {**MADE, "keys": "logits"})
    with refused("card.json: style=8", tmp_path):
        cxda_jax.load_adapter(tmp_path)


def test_weights_of_an_adapter_are_read_within_their_ranges_alone(tmp_path):
    wrong = [(name, np.full_like(x, to)) for name, x in WEIGHTS.items() if x.dtype == np.float32
             for to in (3e38, -3e38, np.nan)]  # fmt: skip
    wrong += [(f"known/{name}", np.full(KNOWN[name], -1, np.float32)) for name in ("between", "within", "shares")]
    wrong += [
        (f"variables/batch_stats/adapter/{name}", np.zeros(n, np.float32)) for name, n in (("std", 8), ("shares", 6))
    ]
    wrong += [
        ("known/centre", np.full(STYLE, 1e308)),
        ("known/thresholds", WEIGHTS["known/thresholds"][:, ::-1].copy()),
        ("known/accepted", np.ones((2, 3, 9), bool)),
        ("known/accepted", np.ones((2, 3, 8), np.float32)),
        ("known/wrong", np.full((2, 3, 9), 6, np.float32)),
        ("variables/params/adapter/kernel", np.zeros((STYLE, 15), np.float32)),
        ("variables/params/adapter/kernel", np.zeros((STYLE, 16))),
    ]
    for name, array in wrong:
        write_adapter(tmp_path, arrays={**WEIGHTS, name: array})
        with refused(f"weights.safetensors: .*{name.partition('/')[2]}", tmp_path):
            cxda_jax.load_adapter(tmp_path)
    for name in WEIGHTS:
        arrays = {other: x for other, x in WEIGHTS.items() if other != name}
        write_adapter(tmp_path, arrays={**arrays, f"other{name}": WEIGHTS[name]})
        with refused(f"weights.safetensors: no '{name.partition('/')[2]}'", tmp_path):
            cxda_jax.load_adapter(tmp_path)
    write_adapter(tmp_path, arrays={**WEIGHTS, "variables/params/adapter/more": np.zeros(1, np.float32)})
    with refused("weights.safetensors: the network has no params/adapter/more", tmp_path):
        cxda_jax.load_adapter(tmp_path)


def test_within_these_ranges_an_answer_is_finite_or_refused(tmp_path):
    """At their ends, in several tensors at once, for the largest numbers that an image may have."""
    rng, report = np.random.default_rng(0), changed(REPORT, "drift", "limit", to=None)
    kinds, answered = adapters._VARIABLES, 0
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


def test_a_card_of_a_model_is_read_within_its_ranges_alone(tmp_path):
    folder = shutil.copytree(loading.SHIPPED / "glyphs", tmp_path / "model")
    names = [path.name for path in folder.iterdir() if path.name != manifest.NAME]
    card = json.loads((folder / models.CARD).read_text())
    for places, to in (
        (("mean",), [1e308]), (("std",), [True]), (("seed",), -1), (("step",), "20"), (("shape",), [28, 28, 10**12]),
        (("class_names",), [1]), (("background",), [256, 0, 0]), (("background",), [0.5] * 3), (("fit",), "../x"),
        (("gain", "sizes"), [0, 5, 5]), (("gain", "sizes"), [1, 5]), (("gain", "mean"), [1.0]), (("gain",), []),
        (("gain", "low"), [1e308] * len(card["gain"]["low"])), (("gain", "tasks"), True), (("test", "avg"), math.nan),
        (("test",), 5), (("looks", "brightness_spread"), -1.0), (("looks",), {}),
    ):  # fmt: skip
        (folder / models.CARD).write_text(json.dumps(changed(card, *places, to=to)))
        manifest.write(folder, names)
        with refused(f"card.json: .*{places[-1]}", tmp_path):
            cxda_jax.load(folder)


def test_an_answer_that_is_not_finite_is_no_answer():
    programs = Programs(lambda *_: 0, lambda _, query: np.full((len(query.pixels), 10), np.nan), None, None)
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
        *((name, FEATURES[name][:8]) for name in ("logits", "labels", "domains", "style")),
        ("labels", np.array([*"abcabcabc"])), ("labels", np.zeros(9)), ("logits", np.zeros(9)), ("style", np.zeros(())),
        ("logits", np.zeros((9, 3), "U1")), ("logits", np.zeros((9, 3), complex)), ("classes", np.array([*"ab"])),
        ("about", np.array("[]")), ("about", np.array(["{}"])), ("about", np.array(5)), ("classes", np.array(5)),
    ):  # fmt: skip
        np.savez(path, **{**FEATURES, name: to})
        with refused("{tmp}/f.npz: .*" + (name if to.shape[:1] != (8,) else ""), tmp_path):
            read_labelled(path)


def test_a_manifest_is_an_object_of_hashes(tmp_path):
    (tmp_path / "card.json").write_text("{}")
    manifest.write(tmp_path, ["card.json"])
    written, path = json.loads((tmp_path / manifest.NAME).read_text()), tmp_path / manifest.NAME
    assert not manifest.find_fault(tmp_path, ["card.json"])
    for content in (
        "[]", "5", '"text"', "[" * 100_000, json.dumps({**written, "about": []}), json.dumps({**written, "sha256": []}),
        json.dumps({**written, "sha256": {"card.json": 1}}), json.dumps({**written, "format": True}),
    ):  # fmt: skip
        path.write_text(content)
        assert manifest.find_fault(tmp_path, ["card.json"]) == "manifest.json is unreadable"
    path.unlink()
    path.mkdir()
    assert manifest.find_fault(tmp_path, ["card.json"]) == "manifest.json is unreadable" and not adapters.is_adapter(
        tmp_path
    )
    with refused("manifest.json is unreadable", tmp_path):
        adapters.load_adapter(tmp_path)


def test_no_pipe_is_waited_for(tmp_path):
    """Nor is a folder, a socket or a device read."""
    model, adapter = shutil.copytree(loading.SHIPPED / "glyphs", tmp_path / "model"), tmp_path / "adapter"
    write_adapter(adapter)
    places = [
        (adapter / name, lambda _: cxda_jax.load(adapter)) for name in (models.CARD, models.WEIGHTS, manifest.NAME)
    ]
    places += [(model / name, lambda _: cxda_jax.load(model)) for name in (models.CARD, models.CONFIG, manifest.NAME)]
    buffer = Model(CARD, build_method("bn"), {}, Programs(*[lambda *_: 0] * 2, None, None))
    places += [
        (tmp_path / name, reader)
        for name, reader in (
            ("f.npz", read_labelled),
            ("names.txt", read_classes),
            ("a.csv", lambda path: list(read_table(path, ("a",), ""))),
            ("metrics.jsonl", read_lines),
            ("a.png", lambda path: buffer.fit(path)),
            ("b.npz", lambda path: cxda_jax.SupportBuffer.load(path, buffer)),
        )
    ]
    for path, reader in places:
        kept = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        with refused(re.escape(path.name), tmp_path):
            reader(path)
        path.unlink()
        path.mkdir()
        with refused(re.escape(path.name), tmp_path):
            reader(path)
        path.rmdir()
        if kept is not None:
            path.write_bytes(kept)


def test_a_script_may_stand_in_a_page(tmp_path):
    name = "</script><script>alert(1)</script><!--"
    origin = {"classes": [name, *"bcdef"]}
    model = cxda_jax.load(write_adapter(tmp_path / "adapter", {**MADE, "origin": origin}))
    script.write(model, tmp_path)
    text = (tmp_path / script.SCRIPT).read_text()
    known = text.partition("new Adapter(")[2].partition(");\n")[0]
    assert not re.search("</script|<!--", text) and json.loads(known)["classes"] == [*origin["classes"]]


def test_packages_of_others_break_themselves_alone(monkeypatch, capsys):
    """One that cannot be imported, one whose method is none, and one that takes the name of another's."""

    def broken():
        raise RuntimeError("\x1b[31mno\nluck")

    points = [("broken", broken), ("left", lambda: sys_exit()), ("number", lambda: 5), ("icrm", lambda: ERM),
              ("theirs", lambda: ERM), ("theirs", broken)]  # fmt: skip
    found = [SimpleNamespace(name=n, load=load, dist=SimpleNamespace(name=f"of-{n}"), module="m") for n, load in points]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)
    monkeypatch.setattr(extensions, "entry_points", lambda group: found)
    for module, table in ((registry, "METHODS"), (building, "NETS")):
        spec = importlib.util.spec_from_file_location(f"{module.__name__}_again", module.__file__)
        again = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(again)
        known = getattr(again, table)
        assert {*known} - {*getattr(module, table)} == {"theirs"} - {table == "NETS" and "theirs"}
    assert registry.METHODS["icrm"] is not ERM
    lines = capsys.readouterr().err.splitlines()
    for line in lines:
        assert line.isprintable() and len(line) <= 200 and "of-" in line
    assert [re.search(" '(.*?)' of the package of-", line)[1] for line in lines[:5]] == [
        name for name, _ in points if name != "theirs"
    ] + ["theirs"]


def sys_exit():
    raise SystemExit(3)
