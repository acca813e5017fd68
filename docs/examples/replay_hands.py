"""Replays the strokes of held-out writers on the live page, as pointer events in headless Chromium. In a clone, with
the folder that holds UNIPEN's train_r01_v07, and with chromium, chromium-driver and nodejs:

python -m docs.examples.replay_hands --raw_dir=DOWNLOADS --out=docs/results/live.json

20 writers are drawn at random from those that `cxda prepare --benchmark=unipen` holds out for the test, and 120
drawings of each. 100 go into the buffer by the page's button, and 20 are asked about. JAX answers for the pixels that
the page drew; the answers must be the same. The interval is a bootstrap over the writers, since drawings of one writer
are alike. Points that a line does not need are left out before, as record_hands does it.
"""

import argparse
import base64
import json
import statistics
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cxda_jax
from cxda_jax.data.readers import unipen
from cxda_jax.errors import UserError
from cxda_jax.export import web
from cxda_jax.export.pair import by_model
from cxda_jax.progress import Counter, say
from cxda_jax.study.training import commit
from docs.examples.record_hands import UNITS, placed, writers_of_test
from tests.chromium import open_browser

BUFFER, ASKED, TIMES = 100, 20, 7
BOOTSTRAPS = 10_000


class Mouse:
    """Sends mouse events to the page, many before it waits: one by one, each would wait for the next frame."""

    def __init__(self, browser: Any):
        from websocket import create_connection  # selenium needs it too

        address = browser.capabilities["goog:chromeOptions"]["debuggerAddress"]
        with urllib.request.urlopen(f"http://{address}/json") as told:
            pages = [page for page in json.load(told) if page["type"] == "page"]
        self._line = create_connection(pages[0]["webSocketDebuggerUrl"], suppress_origin=True, timeout=60)
        self._sent = 0

    def draw(self, strokes: Sequence[Sequence[tuple[int, int]]], box: Sequence[float]) -> None:
        """Draws strokes in units 0..UNITS into a box of the page, and waits until the page has got all events."""
        left, top, width, height = box
        scale = 0.75 * min(width, height) / UNITS
        for stroke in strokes:
            held = [("mousePressed", stroke[0], 1), *(("mouseMoved", point, 1) for point in stroke[1:])]
            for kind, point, buttons in [*held, ("mouseReleased", stroke[-1], 0)]:
                x, y = left + 0.12 * width + scale * point[0], top + 0.12 * height + scale * point[1]
                event = {"type": kind, "x": x, "y": y, "button": "left", "buttons": buttons, "clickCount": 1}
                self._sent += 1
                self._line.send(json.dumps({"id": self._sent, "method": "Input.dispatchMouseEvent", "params": event}))
        while json.loads(self._line.recv()).get("id") != self._sent:
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--raw_dir", type=Path, required=True, help="the folder that holds train_r01_v07")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file to write")
    parser.add_argument("--model", default="unipen", help="a model, as for cxda adapt")
    parser.add_argument("--writers", type=int, default=20, help="how many writers")
    given = parser.parse_args()
    model = cxda_jax.load(given.model)
    held_out = writers_of_test(given.raw_dir)
    rng = np.random.default_rng(0)
    names = sorted(name for name, characters in held_out.items() if len(characters) >= BUFFER + ASKED)
    chosen = [names[i] for i in sorted(rng.permutation(len(names))[: given.writers])]
    with tempfile.TemporaryDirectory() as folder:
        parity = web.write(model, Path(folder) / "live")
        browser = open_browser(Path(folder) / "browser")
        try:
            result = replay(browser, model, Path(folder) / "live" / web.PAGE, {n: held_out[n] for n in chosen}, rng)
        finally:
            browser.quit()
    result = {"commit": commit(), **result, "parity": parity}
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    say(f"{given.out}: " + ", ".join(f"{name} {result[name]}" for name in ("before", "after", "gain", "same_classes")))


def replay(
    browser: Any, model: cxda_jax.Model, page: Path, writers: dict[str, list[unipen.Character]], rng: Any
) -> dict[str, Any]:
    times = measure(browser, page.as_uri())
    browser.get(page.as_uri())
    until(browser, "return live.ready")
    mouse = Mouse(browser)
    right: dict[str, list[list[bool]]] = {name: [] for name in ("before", "after", "jax_before", "jax_after", "drawn")}
    error, differing = 0.0, 0
    say(f"{len(writers)} writers, {BUFFER} drawings in the buffer and {ASKED} questions of each")
    count = Counter("writers", len(writers))
    for done, characters in enumerate(writers.values()):
        drawings = [characters[i] for i in rng.permutation(len(characters))[: BUFFER + ASKED]]
        labels = np.array([c.label for c in drawings[BUFFER:]])
        support, queries, logits = on_page(browser, mouse, [placed(c.strokes) for c in drawings])
        nothing = np.zeros((0, *support.shape[1:]), np.uint8)
        expected = {"before": by_model(model, nothing, queries)[0], "after": by_model(model, support, queries)[0]}
        for name, wanted in expected.items():
            given = logits[name]
            error = max(error, float(np.abs(given - wanted).max() / np.abs(wanted).max()))
            differing += int((given.argmax(1) != wanted.argmax(1)).sum())
            right[name].append(list(given.argmax(1) == labels))
            right[f"jax_{name}"].append(list(wanted.argmax(1) == labels))
        pixels = np.stack([unipen.draw(c.strokes, unipen.BOX - unipen.PEN) for c in drawings])[..., None]
        right["drawn"].append(list(by_model(model, pixels[:BUFFER], pixels[BUFFER:])[0].argmax(1) == labels))
        count(done)
    shares = {name: np.array(rows).mean(1) for name, rows in right.items()}
    gains = 100 * (shares["after"] - shares["before"])
    resampled = gains[np.random.default_rng(0).integers(0, len(gains), (BOOTSTRAPS, len(gains)))].mean(1)
    return {
        "model": {"method": model.card.method, "commit": model.card.commit, "step": model.card.step},
        "writers": len(writers), "buffer": BUFFER, "queries": len(writers) * ASKED,
        **{name: round(100 * float(share.mean()), 2) for name, share in shares.items()},
        "gain": round(float(gains.mean()), 2),
        "gain_interval": [round(float(q), 2) for q in np.quantile(resampled, [0.025, 0.975])],
        "same_classes": differing == 0, "logits": error, **times,
    }  # fmt: skip


def on_page(
    browser: Any, mouse: Mouse, drawings: Sequence[Any]
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Draws a writer's drawings; the pixels of the buffer and of the queries,
    and the page's logits before and after."""
    choose = "byId('hand').value = ''; byId('hand').dispatchEvent(new Event('change'));"
    browser.execute_script(f"{choose} byId('pad').scrollIntoView({{block: 'center'}})")
    box = browser.execute_script(
        "const b = byId('pad').getBoundingClientRect(); return [b.left, b.top, b.width, b.height]"
    )
    queries, logits = [], {"before": [], "after": []}
    for number, strokes in enumerate(drawings):
        mouse.draw(strokes, box)
        points = browser.execute_script("return live.state().query.strokes.map((stroke) => stroke.length)")
        if points != [len(stroke) for stroke in strokes]:
            raise UserError(f"the page got {points} points, and {[len(stroke) for stroke in strokes]} were sent")
        if number < BUFFER:
            browser.execute_script("byId('add').click()")
            continue
        until(browser, "const s = live.state(); return s.query && s.encodedChange === s.changes")
        pixels, told = browser.execute_script("return [Array.from(live.state().query.bytes), live.logits]")
        queries.append(pixels)
        for name, values in told.items():
            logits[name].append(values)
        browser.execute_script("byId('clear').click()")
    held = browser.execute_script("return live.state().buffer.map((item) => btoa(String.fromCharCode(...item.bytes)))")
    support = np.stack([np.frombuffer(base64.b64decode(text), np.uint8) for text in held])
    side = round(support.shape[1] ** 0.5)
    shaped = [np.asarray(pixels, np.uint8).reshape(-1, side, side, 1) for pixels in (support, queries)]
    return shaped[0], shaped[1], {name: np.array(values, np.float32) for name, values in logits.items()}


def measure(browser: Any, address: str) -> dict[str, float]:
    """Best times of several loads, in milliseconds: until the page has loaded, to encode 100 images,
    and to answer for one."""
    loads, encodes, predictions = [], [], []
    for _ in range(TIMES):
        browser.get(address)
        until(browser, "return live.ready")
        loads.append(browser.execute_script("const t = performance.timing; return t.loadEventEnd - t.navigationStart"))
        encode, predict = browser.execute_script("""
            const items = hands.flatMap((hand) => hand.items()).slice(0, 100).map((item) => item.pixels);
            let start = performance.now();
            const adapted = finish(engine.adapt(items)), encode = performance.now() - start;
            start = performance.now();
            for (const pixels of items) engine.predict(adapted, pixels);
            return [encode, (performance.now() - start) / items.length];
        """)
        encodes.append(encode)
        predictions.append(predict)
    found = {"load_ms": loads, "encode_100_ms": encodes, "predict_ms": predictions}
    best = {name: round(min(values), 2) for name, values in found.items()}
    return {**best, **{f"{name}_median": round(statistics.median(values), 2) for name, values in found.items()}}


def until(browser: Any, script: str) -> None:
    """Waits until a script returns something true."""
    from selenium.common.exceptions import TimeoutException
    from selenium.webdriver.support.ui import WebDriverWait

    try:
        WebDriverWait(browser, 60, poll_frequency=0.02).until(lambda b: b.execute_script(script))
    except TimeoutException:
        raise UserError(f"the page did not answer within 60 s: {script}") from None


if __name__ == "__main__":
    main()
