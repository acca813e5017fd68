"""The live page in headless Chromium: by keyboard, pen, mouse and touch; its answers are those of JAX."""

import re

import numpy as np
import pytest

import cxda_jax
from cxda_jax.disk import safetensors
from cxda_jax.export import web
from cxda_jax.export.pair import by_model
from cxda_jax.report.page import contrast
from tests.chromium import asked, find, press, resize
from tests.test_web import random_model

READY = "return live.ready && live.state().encodedChange === live.state().changes"


@pytest.fixture(scope="module")
def model():
    return cxda_jax.load("unipen")


def address_of(model, folder) -> str:
    path = folder / "index.html"
    path.write_text(web.render(web.describe(model), safetensors.named(model.variables), web.HANDS, checked=True))
    return path.as_uri()


@pytest.fixture(scope="module")
def address(model, tmp_path_factory):
    return address_of(model, tmp_path_factory.mktemp("live"))


@pytest.fixture
def opened(browser, address):
    resize(browser, 1200)
    browser.get_log("performance")
    browser.get(address)
    settled(browser)
    yield browser
    assert browser.get_log("browser") == []


def settled(browser, script=READY):
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 60, poll_frequency=0.05).until(lambda b: b.execute_script(script))


def focus(page, selector):
    page.execute_script("arguments[0].focus()", find(page, selector))


def numbers(page) -> tuple[int, int]:
    """How many images of the buffer are used, and how many it has."""
    used, held = re.findall(r"\d+", find(page, "#used").text)
    return int(used), int(held)


def pixels(page, script) -> np.ndarray:
    """Images of the page, as JAX takes them."""
    lists = page.execute_script(f"return {script}.map((item) => Array.from(item.bytes))")
    return np.array(lists, np.uint8).reshape(-1, 28, 28, 1)


def test_nothing_is_asked_of_anybody_and_the_data_are_credited(opened, address):
    assert asked(opened) == {address}
    credit = find(opened, "#credit").text
    for told in ("International Unipen Foundation", "10.5281/zenodo.1195803", "CC BY 4.0"):
        assert told in credit
    assert "Test accuracy" in find(opened, "#facts").text and "WebAssembly" in find(opened, "#speed").text


@pytest.mark.parametrize("hand", [0, 5])
def test_answers_and_attention_are_those_of_jax(opened, model, hand):
    opened.execute_script(f"byId('hand').value = {hand}; byId('hand').dispatchEvent(new Event('change'))")
    settled(opened)
    support, queries = pixels(opened, "live.state().buffer"), pixels(opened, "live.state().questions")
    before, after = by_model(model, support[:0], queries)[0], by_model(model, support, queries)
    for i in (0, 7, 19):
        opened.execute_script(f"byId('questions').children[{i}].click()")
        told = opened.execute_script("return live.logits")
        assert np.allclose(told["before"], before[i], atol=1e-4 * np.abs(before).max())
        assert np.allclose(told["after"], after[0][i], atol=1e-4 * np.abs(after[0]).max())
        shown = [find(opened, f"#{name} .name").text[0] for name in ("before", "after")]
        assert shown == [model.card.class_names[logits[i].argmax()] for logits in (before, after[0])]
        labels = opened.execute_script("return [...byId('buffer').children].map((b) => b.ariaLabel)")
        weights = after[1][i].mean(0)
        assert [float(re.search(r"attention ([\d.]+)", label)[1]) for label in labels] == pytest.approx(
            100 * weights, abs=0.051
        )
        (most,) = opened.find_elements("css selector", "#buffer .most")
        assert f"Image {weights.argmax() + 1} of the buffer" in most.get_attribute("aria-label")
    labels = opened.execute_script("return live.state().questions.map((item) => item.label)")
    right = [
        sum(model.card.class_names[k] == c for k, c in zip(x.argmax(1), labels, strict=True))
        for x in (before, after[0])
    ]
    settled(opened, "return byId('score').textContent")
    assert (
        find(opened, "#score").text
        == f"Of the 20 recorded drawings above, {right[0]} are right before and {right[1]} after."
    )


def test_everything_is_done_by_keyboard(opened):
    from selenium.webdriver import ActionChains, Keys

    reached = set()
    opened.execute_script("document.activeElement.blur()")
    for _ in range(11):
        ActionChains(opened).send_keys(Keys.TAB).perform()
        active = opened.switch_to.active_element
        reached.add(active.get_attribute("id") or active.find_element("xpath", "..").get_attribute("id"))
        outline = active if active.get_attribute("id") != "files" else find(opened, ".button")
        assert outline.value_of_css_property("outline-style") == "solid"
    assert reached >= {"add", "clear", "files", "questions", "hand", "size", "empty", "buffer", "credit"}

    focus(opened, "#questions [tabindex='0']")
    said = find(opened, "#said").text
    press(opened, "ARROW_RIGHT")
    chosen = "return [...byId('questions').children].findIndex((o) => o.ariaSelected === 'true')"
    assert opened.execute_script(chosen) == 1 and find(opened, "#said").text != said
    press(opened, "END")
    assert opened.execute_script(chosen) == 19
    focus(opened, "#add")
    press(opened, "ENTER")
    settled(opened)
    assert numbers(opened) == (41, 41) and find(opened, "#said").text.startswith("Draw a character")
    focus(opened, "#questions [tabindex='0']")
    press(opened, "HOME")
    assert "After, with 41 images" in find(opened, "#said").text
    focus(opened, "#size")
    press(opened, "HOME")
    settled(opened)
    first, second = re.findall(r": (.*?), [\d.]+ %", find(opened, "#said").text)
    assert numbers(opened) == (0, 41) and first == second
    press(opened, "ARROW_RIGHT")
    settled(opened)
    assert numbers(opened) == (1, 41) and "After, with 1 image:" in find(opened, "#said").text
    press(opened, "END")
    focus(opened, "#buffer [tabindex='0']")
    press(opened, "ARROW_RIGHT")
    press(opened, "ENTER")
    settled(opened)
    assert numbers(opened) == (40, 40)
    inside = "return [...byId('buffer').children].indexOf(document.activeElement)"
    assert opened.execute_script(inside) == 1  # the next image, not the page's beginning
    focus(opened, "#hand")
    press(opened, "ARROW_DOWN")
    settled(opened)
    assert numbers(opened) == (40, 40) and opened.execute_script("return byId('hand').value") == "1"
    focus(opened, "#empty")
    press(opened, "SPACE")
    settled(opened)
    assert numbers(opened) == (0, 0) and not find(opened, "#size").is_enabled()
    assert [find(opened, f"#{name}").get_attribute("aria-live") for name in ("said", "score")] == ["polite"] * 2


def place(page) -> tuple[float, float, float]:
    page.execute_script("byId('hand').value = ''; byId('hand').dispatchEvent(new Event('change'))")
    page.execute_script("byId('pad').scrollIntoView({block: 'center'})")
    return page.execute_script("const b = byId('pad').getBoundingClientRect(); return [b.left, b.top, b.width]")


SEVEN = [[(0.2, 0.2), (0.8, 0.2), (0.4, 0.85)], [(0.35, 0.5), (0.7, 0.5)]]


def drawn(page) -> list[list[list[float]]]:
    """The strokes that the page got, as shares of the pad."""
    return page.execute_script(
        "return live.state().query.strokes.map((stroke) => stroke.map((p) => p.map((x) => x / byId('pad').width)))"
    )


@pytest.mark.parametrize("kind", ["mouse", "pen", "touch"])
def test_strokes_of_every_pointer_are_drawn_answered_and_kept(opened, kind):
    left, top, side = place(opened)
    for stroke in SEVEN:
        at = [(left + x * side, top + y * side) for x, y in stroke]
        if kind == "touch":
            for name, points in (("touchStart", at[:1]), *(("touchMove", [p]) for p in at[1:]), ("touchEnd", [])):
                touches = [{"x": x, "y": y} for x, y in points]
                opened.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": name, "touchPoints": touches})
        else:
            for name, (x, y) in (
                ("mousePressed", at[0]),
                *(("mouseMoved", p) for p in at[1:]),
                ("mouseReleased", at[-1]),
            ):
                event = {
                    "type": name,
                    "x": x,
                    "y": y,
                    "button": "left",
                    "buttons": 1,
                    "clickCount": 1,
                    "pointerType": kind,
                }
                opened.execute_cdp_cmd(
                    "Input.dispatchMouseEvent", event if kind == "pen" else event | {"pointerType": "mouse"}
                )
    got = drawn(opened)
    assert [len(stroke) for stroke in got] == [3, 2]
    for stroke, wanted in zip(got, SEVEN, strict=True):
        assert np.allclose(stroke, wanted, atol=0.02)
    assert find(opened, "#before .name").text == "7"
    find(opened, "#add").click()
    settled(opened)
    assert numbers(opened) == (1, 1) and len(opened.find_elements("css selector", "#buffer button")) == 1
    assert find(opened, "#buffer button").is_displayed() and not find(opened, "#add").is_enabled()


def test_a_second_finger_does_not_draw(opened):
    left, top, side = place(opened)
    one, two = (
        {"x": left + x * side, "y": top + y * side, "id": i} for i, (x, y) in enumerate([(0.3, 0.3), (0.7, 0.7)])
    )
    for name, points in (
        ("touchStart", [one]),
        ("touchStart", [one, two]),
        ("touchMove", [one, two | {"y": top}]),
        ("touchEnd", []),
    ):
        opened.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": name, "touchPoints": points})
    assert len(drawn(opened)) == 1


DROP = """
    const canvas = make("canvas", { width: arguments[0], height: arguments[1] }), context = canvas.getContext("2d");
    context.fillStyle = "#fff";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.fillStyle = "#000";
    context.fillRect(canvas.width / 2 - 2, 4, 4, canvas.height - 8);
    const list = new DataTransfer(), done = arguments[arguments.length - 1];
    canvas.toBlob((blob) => {
      for (let i = 0; i < 3; i++) list.items.add(new File([blob], `${i}.png`, { type: "image/png" }));
      list.items.add(new File(["no image"], "broken.png", { type: "image/png" }));
      byId("pad").dispatchEvent(new DragEvent("drop", { dataTransfer: list, bubbles: true, cancelable: true }));
      setTimeout(done, 300);
    });
"""


def test_dropped_images_are_asked_about_and_remembered(opened):
    opened.execute_async_script(DROP, 28, 28)
    settled(opened, "return live.state().buffer.length === 42")
    settled(opened)
    (image,) = pixels(opened, "[live.state().query]")
    wanted = np.full((28, 28, 1), 255, np.uint8)
    wanted[4:-4, 12:16] = 0
    assert (image == wanted).all() and numbers(opened) == (42, 42)
    opened.execute_async_script(DROP, 56, 28)  # padded above and below, as the model's card says
    settled(opened, "return live.state().buffer.length === 44")
    (image,) = pixels(opened, "[live.state().query]")
    assert (image[:7] == 255).all() and (image[21:] == 255).all() and (image[10:18, 13:15] < 60).all()


def test_a_later_change_stops_an_earlier_encoding(opened):
    opened.execute_script(
        "for (const n of [40, 3, 39, 7]) { byId('size').value = n; byId('size').dispatchEvent(new Event('input')); }"
    )
    settled(opened)
    assert numbers(opened) == (7, 40) and "After, with 7 images" in find(opened, "#said").text
    assert len(opened.find_elements("css selector", "#buffer .unused")) == 33


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_is_never_wider_than_the_window_and_can_be_read(opened, width, scheme):
    resize(opened, width, scheme)
    assert opened.execute_script("return [innerWidth, document.documentElement.scrollWidth <= innerWidth]") == [
        width,
        True,
    ]
    outside = "return [...document.querySelectorAll('main *')].filter((e) => e.getBoundingClientRect().right > innerWidth + 1).length"
    assert opened.execute_script(outside) == 0
    colours = """
        const rgb = (c) => c.match(/[\\d.]+/g).map(Number), found = [];
        for (const e of document.querySelectorAll('body *:not(script, style, noscript, noscript *, option, canvas)')) {
          if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) || e.disabled) continue;
          let below = e;
          while (below.parentElement && (rgb(getComputedStyle(below).backgroundColor)[3] ?? 1) === 0) below = below.parentElement;
          found.push([e.textContent.slice(0, 20), rgb(getComputedStyle(e).color), rgb(getComputedStyle(below).backgroundColor)]);
        }
        return found;
    """
    found = opened.execute_script(colours)
    assert len(found) > 30
    assert (sum(found[1][2][:3]) < 200) == (scheme == "dark")
    for text, ink, ground in found:
        assert contrast(np.array(ink[:3]), np.array(ground[:3])) >= 4.5, text


@pytest.mark.parametrize("method", ["erm", "bn"])
def test_a_method_that_does_not_attend_says_so(browser, tmp_path, method):
    browser.get(address_of(random_model(method, side=28), tmp_path))
    settled(browser)
    assert "does not look at single images" in find(browser, "#legend").text
    logits = browser.execute_script("return live.logits")
    assert (logits["before"] == logits["after"]) == (method == "erm")
    assert not browser.find_elements("css selector", "#buffer .most") and browser.get_log("browser") == []
