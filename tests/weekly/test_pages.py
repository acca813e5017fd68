"""Three pages in headless Chromium: the report, the page of an adapted model, and the live page."""

import re
import urllib.parse
from pathlib import Path

import numpy as np
import pytest

import cxda_jax
from cxda_jax.device.page import write_adapted
from cxda_jax.export.pair import by_model
from cxda_jax.studies.page import write_page
from tests.chromium import asked, find, settled
from tests.fast import test_adapted_page as adapted
from tests.pages import HOSTILE, render
from tests.slow.test_report import make_report, make_task


@pytest.fixture(scope="module")
def model():
    return cxda_jax.load("unipen")


@pytest.fixture(scope="module")
def addresses(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    write_page(folder / "report.html", make_report(HOSTILE))
    page = adapted.make_page(m=24, n=40, mark=HOSTILE)
    write_adapted(folder / "adapted.html", page)
    render(model, folder).rename(folder / "live.html")
    return {path.stem: path.as_uri() for path in folder.iterdir()}


@pytest.fixture
def opened(browser, addresses, request):
    """The page that a test has in its name. No test may leave a line in the console."""
    name = next(name for name in addresses if name in request.node.name)
    browser.get_log("performance")
    browser.get(addresses[name])
    if name == "live":
        settled(browser)
    yield browser
    assert browser.get_log("browser") == []


def choose(page, name, value):
    change = "const s = byId(arguments[0]); s.value = arguments[1]; s.dispatchEvent(new Event('change'))"
    page.execute_script(change, name, str(value))


def ranking(page) -> list[int]:
    cells = page.find_elements("css selector", "#ranking li")
    return [int(cell.get_attribute("data-index")) for cell in cells]


@pytest.mark.parametrize("name", ["report", "adapted", "live"])
def test_nothing_is_asked_of_anybody(opened, addresses, name):
    assert asked(opened) == {addresses[name]} and opened.execute_script("return document.images.length") == 0


def test_report_tables_are_sorted_with_missing_values_last(opened):
    column = find(opened, "#table-1 th:nth-child(2) button")
    for order in (["cml", "erm", "cxda", "cotta"], ["erm", "cxda", "cml", "cotta"]):
        column.click()
        first = opened.find_elements("css selector", "#table-1 tbody td:first-child")
        assert [cell.text for cell in first] == order


def test_report_queries_are_chosen_and_ranked_by_head_and_domain(opened):
    task = make_task(mark=HOSTILE)
    told, weights = find(opened, "#chosen").text.split("\n"), task.weights
    assert told[:4] == ["True label", task.query_labels[0], "Domain", f"★ A {task.query_domain}"]
    for i, (method, answers) in enumerate(task.answers.items()):
        verdict = "✓ right" if answers[0] == task.query_labels[0] else "✗ wrong"
        assert told[4 + 2 * i : 6 + 2 * i] == [method, f"{verdict}: {answers[0]}"]
    mean = np.argsort(-weights.mean(1), kind="stable")
    domains = [task.query_domain, *sorted(set(task.support_domains) - {task.query_domain})]
    choose(opened, "domain", 2)
    assert ranking(opened) == [i for i in mean[0] if task.support_domains[i] == domains[2]]
    choose(opened, "domain", "")
    opened.find_elements("css selector", "#queries [role]")[1].click()
    assert ranking(opened) == list(mean[1])
    assert find(opened, "#ranking strong").text == f"{40 * weights[1].mean(0).max():.2f} x"
    choose(opened, "head", 3)  # counted from 1, as in figures
    assert ranking(opened) == list(np.argsort(-weights[1, 2], kind="stable")) != list(mean[1])
    choose(opened, "task", 1)
    assert ranking(opened) == list(np.argsort(-make_task(1, shape=(32, 32, 3), n=20, m=5, heads=2).weights[0].mean(0)))


def pixels(page, script) -> np.ndarray:
    """Images of the page, as JAX takes them."""
    lists = page.execute_script(f"return {script}.map((item) => Array.from(item.bytes))")
    return np.array(lists, np.uint8).reshape(-1, 28, 28, 1)


def test_live_answers_and_attention_are_those_of_jax(opened, model):
    choose(opened, "hand", 5)
    settled(opened)
    support, queries = pixels(opened, "live.state().buffer"), pixels(opened, "live.state().questions")
    before, (after, weights) = by_model(model, support[:0], queries)[0], by_model(model, support, queries)
    names = np.array(model.card.class_names)
    for i in (0, 7, 19):
        opened.execute_script(f"byId('questions').children[{i}].click()")
        for name, logits in {"before": before, "after": after}.items():
            told = opened.execute_script(f"return live.logits.{name}")
            assert np.allclose(told, logits[i], atol=1e-4 * np.abs(logits).max())
            assert find(opened, f"#{name} .name").text[0] == names[logits[i].argmax()]
        labels = opened.execute_script("return [...byId('buffer').children].map((b) => b.ariaLabel)")
        shown = [float(re.search(r"attention ([\d.]+)", label)[1]) for label in labels]
        assert shown == pytest.approx(100 * weights[i].mean(0), abs=0.051)
        (most,) = opened.find_elements("css selector", "#buffer .most")
        assert f"Image {weights[i].mean(0).argmax() + 1} of the buffer" in most.get_attribute("aria-label")
    labels = opened.execute_script("return live.state().questions.map((item) => item.label)")
    right = [(names[logits.argmax(1)] == labels).sum() for logits in (before, after)]
    settled(opened, "return byId('score').textContent")
    said = f"Of the 20 recorded drawings, {right[0]} are right before and {right[1]} after."
    assert find(opened, "#score").text == said


SEVEN = [[(0.2, 0.2), (0.8, 0.2), (0.4, 0.85)], [(0.35, 0.5), (0.7, 0.5)]]


def test_live_buttons_fill_the_buffer_with_one_kind(opened):
    for text, kind in (("Write digits only", str.isdigit), ("Write small letters only", str.islower)):
        opened.find_element("xpath", f"//button[.='{text}']").click()
        settled(opened)
        held, asked = (
            opened.execute_script(f"return live.state().{part}.map((item) => item.label).join('')")
            for part in ("buffer", "questions")
        )
        assert (len(held), len(asked)) == (40, 20) and kind(held + asked)


def test_live_strokes_are_drawn_answered_counted_and_kept(opened):
    from selenium.webdriver.common.actions.action_builder import ActionBuilder
    from selenium.webdriver.common.actions.pointer_input import PointerInput

    def draw():
        opened.execute_script("byId('pad').scrollIntoView({block: 'center'})")
        box = opened.execute_script("const b = byId('pad').getBoundingClientRect(); return [b.left, b.top, b.width]")
        actions = ActionBuilder(opened, mouse=PointerInput("touch", "touch"), duration=0)
        for stroke in SEVEN:
            for i, (x, y) in enumerate(stroke):
                actions.pointer_action.move_to_location(round(box[0] + x * box[2]), round(box[1] + y * box[2]))
                if i == 0:
                    actions.pointer_action.pointer_down()
            actions.pointer_action.pointer_up()
        actions.perform()

    opened.execute_script("Math.random = () => 0.75; byId('myself').click()")
    draw()
    share = "stroke.map((p) => p.map((x) => x / byId('pad').width))"
    drawn = opened.execute_script(f"return live.state().query.strokes.map((stroke) => {share})")
    assert len(drawn) == 2 and all(np.allclose(*pair, atol=0.02) for pair in zip(drawn, SEVEN, strict=True))
    assert find(opened, "#before .name").text == "7✓ right"
    assert find(opened, "#wanted").text == "Draw: digit 7"
    opened.execute_script("Math.random = () => 0.15")
    find(opened, "#add").click()
    settled(opened)
    assert opened.execute_script("return live.state().buffer.length") == 1 and not find(opened, "#add").is_enabled()
    assert find(opened, "#score").text.startswith("Of your 1 image, 1 were right before and 1 after.")
    assert find(opened, "#wanted").text == "Draw: digit 1"
    draw()
    find(opened, "#add").click()
    settled(opened)
    assert find(opened, "#score").text.startswith("Of your 2 images, 1 were right before and 1 after.")


def test_live_says_whether_the_visitors_drawings_helped(opened):
    for gained, lost, said in (
        (6, 0, "So far your drawings helped."),
        (5, 0, "So far your drawings helped, but this may be chance."),
        (1, 1, "So far your drawings did not help."),
        (1, 8, "So far your drawings did harm, but this may be chance."),
        (0, 6, "So far your drawings did harm."),
    ):
        items = [{"label": "1", "right": [False, True]}] * gained + [{"label": "1", "right": [True, False]}] * lost
        told = opened.execute_script("buffer = arguments[0]; return scoreOwn()", items)
        assert told == f"Of your {gained + lost} images, {lost} were right before and {gained} after. {said}"
    assert "cannot say" in opened.execute_script("buffer = [{ label: '' }]; wanted = ''; return scoreOwn()")


def test_live_tour_ends_with_the_visitor_and_at_any_key(opened):
    opened.execute_script("live.second = 0; byId('play').click()")
    settled(opened, "return !byId('play').hidden && byId('hand').value === ''")
    assert not find(opened, "#tour").is_displayed() and find(opened, "#wanted").text
    opened.execute_script("live.second = 1000; byId('play').click()")
    settled(opened, "return !byId('tour').hidden && byId('tour').textContent.includes('buffer is empty')")
    find(opened, "body").send_keys("x")
    settled(opened, "return byId('tour').hidden")
    assert opened.execute_script("return live.state().used === buffer.length && buffer.length") == 40  # all count again


def test_live_page_is_for_fingers_on_a_phone(opened):
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    opened.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    try:
        opened.execute_script("byId('myself').click()")
        box = opened.execute_script("const b = byId('pad').getBoundingClientRect(); return [b.left, b.top, b.width]")
        for kind, share in (("touchStart", 0.8), ("touchMove", 0.5), ("touchMove", 0.2), ("touchEnd", None)):
            points = [] if share is None else [{"x": box[0] + box[2] / 2, "y": box[1] + share * box[2]}]
            opened.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        settled(opened, "return live.state().query")
        assert opened.execute_script("return byId('pad').getBoundingClientRect().top") == box[1]
        assert opened.execute_script("return document.documentElement.scrollWidth") == 390
        small = opened.execute_script("""return [...document.querySelectorAll("button, select, input, .button, [role=option]")]
          .filter((e) => e.offsetParent && e.type !== "file" && Math.min(e.offsetWidth, e.offsetHeight) < 44)
          .map((e) => e.outerHTML)""")
        assert small == []
    finally:
        opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        opened.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})


def test_live_the_last_change_of_the_buffer_counts(opened):
    opened.execute_script(
        "for (const n of [40, 3, 39, 7]) { byId('size').value = n; byId('size').dispatchEvent(new Event('input')); }"
    )
    settled(opened)
    assert "After, with 7 images" in find(opened, "#said").text


def test_live_a_line_costs_the_pixels_that_it_reaches(opened):
    """As many short lines as long ones, which reach all pixels, cost a fraction."""
    script = """return [300, 1].map((turns) => { const began = performance.now(); draw([Array.from({length: 4000},
      (_, i) => turns > 1 ? [i / 4000, Math.sin(i / turns)] : [i % 2, i % 2])], 28);
      return performance.now() - began; })"""
    times = np.array([opened.execute_script(script) for _ in range(3)]).min(0)
    assert times[0] < 0.3 * times[1]


def test_a_hosts_policy_does_not_leave_the_page_without_a_word(browser, addresses):
    policy = '<meta http-equiv="Content-Security-Policy" content="script-src \'self\'">'
    page = Path(urllib.parse.urlparse(addresses["live"]).path)
    (page.parent / "hosted.html").write_text(page.read_text().replace("<head>", f"<head>{policy}", 1))
    browser.get(addresses["live"])
    assert not browser.find_elements("css selector", "#dead")
    browser.get((page.parent / "hosted.html").as_uri())
    settled(browser, "return getComputedStyle(document.getElementById('dead')).visibility === 'visible'")
    assert "Policy" in find(browser, "#dead").text
    browser.get_log("browser")  # the refusals
