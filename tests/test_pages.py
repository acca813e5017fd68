"""Three pages in headless Chromium: the report, the page of an adapted model, and the live page."""

import re

import numpy as np
import pytest

import cxda_jax
from cxda_jax.export.pair import by_model
from cxda_jax.report.adapted import write_adapted
from cxda_jax.report.page import write_report
from tests import test_adapted_page as adapted
from tests.chromium import asked, find, focus, press, resize, settled
from tests.test_report import HOSTILE, make_report, make_task
from tests.test_web import render

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def model():
    return cxda_jax.load("unipen")


@pytest.fixture(scope="module")
def addresses(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    write_report(folder / "report.html", make_report(HOSTILE))
    page = adapted.make_page(m=24, n=40, mark=HOSTILE)
    long = page.answers[0]._replace(file="a_very_long_name_without_any_space_" * 6 + ".png", before="w" * 60)
    write_adapted(folder / "adapted.html", page._replace(answers=[long, *page.answers[1:]]))
    render(model, folder).rename(folder / "live.html")
    return {path.stem: path.as_uri() for path in folder.iterdir()}


@pytest.fixture
def opened(browser, addresses, request):
    """The page that a test has in its name. No test may leave a line in the console."""
    name = next(name for name in addresses if name in request.node.name)
    resize(browser, 1400)
    browser.get_log("performance")
    browser.get(addresses[name])
    if name == "live":
        settled(browser)
    yield browser
    assert browser.get_log("browser") == []


def choose(page, name, value):
    change = "const s = byId(arguments[0]); s.value = arguments[1]; s.dispatchEvent(new Event('change'))"
    page.execute_script(change, name, str(value))


def rows(page, table, column):
    return [
        find(row, f"td:nth-child({column})").text for row in page.find_elements("css selector", f"{table} tbody tr")
    ]


def ranking(page) -> list[int]:
    return page.execute_script(
        "return [...document.querySelectorAll('#ranking li')].map((c) => Number(c.dataset.index))"
    )


@pytest.mark.parametrize("name", ["report", "adapted", "live"])
def test_nothing_is_asked_of_anybody_and_the_page_fits_narrow_windows(opened, addresses, name):
    assert asked(opened) == {addresses[name]} and opened.execute_script("return document.images.length") == 0
    for width, scheme in ((360, "dark"), (1400, "light")):
        resize(opened, width, scheme)
        assert opened.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        ground = opened.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(float, re.findall(r"[\d.]+", ground)[:3])) < 200) == (scheme == "dark")


def test_report_tables_are_sorted_by_keyboard_with_missing_values_last(opened):
    head, other = (find(opened, f"#table-1 th:nth-child({i})") for i in (2, 3))
    focus(opened, "#table-1 th:nth-child(2) button")
    for key, order, said in [
        ("ENTER", ["cml", "erm", "cxda", "cotta"], "ascending"),
        ("SPACE", ["erm", "cxda", "cml", "cotta"], "descending"),
    ]:
        press(opened, key)
        assert rows(opened, "#table-1", 1) == order and head.get_attribute("aria-sort") == said
    find(other, "button").click()
    assert rows(opened, "#table-1", 1) == ["erm", "cml", "cxda", "cotta"] and head.get_attribute("aria-sort") is None
    assert find(opened, "#table-2 td").text == "erm"


def test_report_queries_are_chosen_by_keyboard_and_ranked_by_head_and_domain(opened):
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
    focus(opened, "#queries [tabindex='0']")
    for key, query in {"ARROW_RIGHT": 1, "END": 11, "HOME": 0, "ARROW_UP": 0, "ARROW_DOWN": 1}.items():
        press(opened, key)
        assert ranking(opened) == list(mean[query])
    assert opened.switch_to.active_element.get_attribute("aria-selected") == "true"
    assert find(opened, "#ranking strong").text == f"{40 * weights[1].mean(0).max():.2f} x"
    choose(opened, "head", 3)  # counted from 1, as in figures
    assert ranking(opened) == list(np.argsort(-weights[1, 2], kind="stable")) != list(mean[1])
    choose(opened, "task", 1)
    assert ranking(opened) == list(np.argsort(-make_task(1, shape=(32, 32, 3), n=20, m=5, heads=2).weights[0].mean(0)))


def test_report_figures_follow_the_theme(opened):
    ground = "return getComputedStyle(document.querySelector('.plate')).backgroundColor"
    for shown in ("rgb(28, 32, 38)", "rgb(255, 255, 255)"):
        find(opened, "#theme").click()
        assert opened.execute_script(ground) == shown


def test_adapted_queries_are_chosen_by_keyboard_without_domains_or_labels(opened):
    page = adapted.make_page(m=24, n=40, mark=HOSTILE)
    order = adapted.by_moved(page)
    weights, answer = page.weights[order], page.answers[order[1]]
    focus(opened, "#queries [tabindex='0']")
    press(opened, "ARROW_RIGHT")
    assert ranking(opened) == list(np.argsort(-weights[1].mean(0), kind="stable"))
    told = find(opened, "#chosen").text.split("\n")
    assert told == ["Before", answer.before, "After", answer.after, "File", answer.file]
    assert find(opened, "#ranking .file").text == page.buffer_files[weights[1].mean(0).argmax()]


def numbers(page) -> tuple[int, int]:
    """How many images of the buffer are used, and how many it has."""
    used, held = re.findall(r"\d+", find(page, "#used").text)
    return int(used), int(held)


def pixels(page, script) -> np.ndarray:
    """Images of the page, as JAX takes them."""
    lists = page.execute_script(f"return {script}.map((item) => Array.from(item.bytes))")
    return np.array(lists, np.uint8).reshape(-1, 28, 28, 1)


def test_live_answers_and_attention_are_those_of_jax(opened, model):
    assert "CC BY 4.0" in find(opened, "#credit").text and "WebAssembly" in find(opened, "#speed").text
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
    said = f"Of the 20 recorded drawings above, {right[0]} are right before and {right[1]} after."
    assert find(opened, "#score").text == said


SEVEN = [[(0.2, 0.2), (0.8, 0.2), (0.4, 0.85)], [(0.35, 0.5), (0.7, 0.5)]]


@pytest.mark.parametrize("kind", ["mouse", "touch"])
def test_live_strokes_of_every_pointer_are_drawn_answered_and_kept(opened, kind):
    from selenium.webdriver.common.actions.action_builder import ActionBuilder
    from selenium.webdriver.common.actions.pointer_input import PointerInput

    choose(opened, "hand", "")
    opened.execute_script("byId('pad').scrollIntoView({block: 'center'})")
    box = opened.execute_script("const b = byId('pad').getBoundingClientRect(); return [b.left, b.top, b.width]")
    actions = ActionBuilder(opened, mouse=PointerInput(kind, kind), duration=0)
    for stroke in SEVEN:
        for i, (x, y) in enumerate(stroke):
            actions.pointer_action.move_to_location(round(box[0] + x * box[2]), round(box[1] + y * box[2]))
            if i == 0:
                actions.pointer_action.pointer_down()
        actions.pointer_action.pointer_up()
    actions.perform()
    share = "stroke.map((p) => p.map((x) => x / byId('pad').width))"
    drawn = opened.execute_script(f"return live.state().query.strokes.map((stroke) => {share})")
    assert len(drawn) == 2 and all(np.allclose(*pair, atol=0.02) for pair in zip(drawn, SEVEN, strict=True))
    assert find(opened, "#before .name").text == "7"
    find(opened, "#add").click()
    settled(opened)
    assert numbers(opened) == (1, 1) and not find(opened, "#add").is_enabled()


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


def test_live_dropped_images_are_asked_about_and_remembered_and_the_last_change_counts(opened):
    opened.execute_async_script(DROP, 28, 28)
    settled(opened, "return live.state().buffer.length === 42")
    (image,) = pixels(opened, "[live.state().query]")
    wanted = np.full((28, 28, 1), 255, np.uint8)
    wanted[4:-4, 12:16] = 0
    assert (image == wanted).all()
    opened.execute_async_script(DROP, 56, 28)  # padded above and below, as the model's card says
    settled(opened, "return live.state().buffer.length === 44")
    (image,) = pixels(opened, "[live.state().query]")
    assert (image[:7] == 255).all() and (image[21:] == 255).all() and (image[10:18, 13:15] < 60).all()
    opened.execute_script(
        "for (const n of [40, 3, 39, 7]) { byId('size').value = n; byId('size').dispatchEvent(new Event('input')); }"
    )
    settled(opened)
    assert numbers(opened) == (7, 44) and "After, with 7 images" in find(opened, "#said").text
