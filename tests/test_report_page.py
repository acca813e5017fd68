"""The HTML report in headless Chromium, where it and selenium are installed."""

import numpy as np
import pytest

from cxda_jax.report.page import write_report
from tests.chromium import asked, find, press, resize
from tests.test_report import HOSTILE, make_report, make_task


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, make_report(HOSTILE))
    return path.as_uri()


@pytest.fixture
def page(browser, address):
    resize(browser, 1400)
    browser.get_log("performance")
    browser.get(address)
    yield browser
    assert browser.get_log("browser") == []


def ranking(page) -> list[int]:
    cards = "return [...document.querySelectorAll('#ranking li')].map((card) => Number(card.dataset.index))"
    return page.execute_script(cards)


def choose(page, name, value):
    change = (
        "const s = document.getElementById(arguments[0]); s.value = arguments[1]; s.dispatchEvent(new Event('change'))"
    )
    page.execute_script(change, name, str(value))


def test_the_page_loads_without_a_request_or_a_complaint(page, address):
    assert asked(page) == {address}
    assert HOSTILE in find(page, "h1").text
    assert page.execute_script("return document.querySelectorAll('img').length") == 0


def test_tables_are_sorted_by_keyboard_with_missing_values_last(page):
    def column(i):
        return [find(row, f"td:nth-child({i})").text for row in page.find_elements("css selector", "#table-1 tbody tr")]

    head = find(page, "#table-1 th:nth-child(2)")
    page.execute_script("arguments[0].focus()", find(head, "button"))
    press(page, "ENTER")
    assert column(1) == ["cml", "erm", "cxda", "cotta"] and head.get_attribute("aria-sort") == "ascending"
    press(page, "SPACE")
    assert column(1) == ["erm", "cxda", "cml", "cotta"] and head.get_attribute("aria-sort") == "descending"
    other = find(page, "#table-1 th:nth-child(3)")
    find(other, "button").click()
    assert column(1) == ["erm", "cml", "cxda", "cotta"] and other.get_attribute("aria-sort") == "ascending"
    assert head.get_attribute("aria-sort") is None
    find(page, "#table-1 th:first-child button").click()
    assert column(1) == ["cml", "cotta", "cxda", "erm"]
    assert find(page, "#table-2 td").text == "erm"


def test_queries_are_chosen_by_keyboard_and_ranked_by_head(page):
    weights = make_task().weights
    mean = np.argsort(-weights.mean(1), kind="stable")
    assert ranking(page) == list(mean[0])
    page.execute_script("arguments[0].focus()", find(page, "#queries [tabindex='0']"))
    for key, query in [("ARROW_RIGHT", 1), ("ARROW_DOWN", 2), ("ARROW_LEFT", 1), ("END", 11),
                       ("ARROW_RIGHT", 11), ("HOME", 0), ("ARROW_UP", 0), ("ARROW_RIGHT", 1)]:  # fmt: skip
        press(page, key)
        assert ranking(page) == list(mean[query])
        assert page.switch_to.active_element.get_attribute("aria-selected") == "true"
    highest = f"{40 * weights[1].mean(0).max():.2f} x"
    assert find(page, "#ranking strong").text == highest
    assert f"Query 2, mean over 4 heads: highest weight {highest}." in find(page, "#said").text
    heads = page.execute_script("return [...document.getElementById('head').options].map((o) => o.textContent)")
    assert heads == ["mean over 4 heads", "head 1", "head 2", "head 3", "head 4"], "counted from 1, as in figures"
    choose(page, "head", 3)
    assert ranking(page) == list(np.argsort(-weights[1, 2], kind="stable")) != list(mean[1])
    page.find_elements("css selector", "#queries [role='option']")[4].click()
    assert ranking(page)[0] == weights[4, 2].argmax()
    choose(page, "task", 1)
    assert ranking(page) == list(np.argsort(-make_task(1, shape=(32, 32, 3), n=20, m=5, heads=2).weights[0].mean(0)))


def test_the_chosen_query_is_told_with_its_answers(page):
    task, told = make_task(mark=HOSTILE), find(page, "#chosen").text.split("\n")
    assert told[:4] == ["True label", task.query_labels[0], "Domain", f"★ A {task.query_domain}"]
    for i, (method, answers) in enumerate(task.answers.items()):
        verdict = "✓ right" if answers[0] == task.query_labels[0] else "✗ wrong"
        assert told[4 + 2 * i : 6 + 2 * i] == [method, f"{verdict}: {answers[0]}"]


def test_the_ranking_can_be_kept_to_one_domain(page):
    task = make_task(mark=HOSTILE)
    order = np.argsort(-task.weights[0].mean(0), kind="stable")
    others = sorted(set(task.support_domains) - {task.query_domain})
    choose(page, "domain", 2)
    assert ranking(page) == [i for i in order if task.support_domains[i] == others[1]]
    assert f"{len(ranking(page))} of 40 images shown" in find(page, "#said").text
    choose(page, "domain", 0)
    assert all(task.support_domains[i] == task.query_domain for i in ranking(page))
    assert len(page.find_elements("css selector", "#ranking .star")) == len(ranking(page))


def test_the_theme_follows_the_system_until_it_is_chosen(page):
    background = "return getComputedStyle(document.body).backgroundColor"
    light = page.execute_script(background)
    find(page, "#theme").click()
    dark = page.execute_script(background)
    assert dark != light and find(page, "#theme").text == "Light theme"
    find(page, "#theme").click()
    assert page.execute_script(background) == light
    page.refresh()
    resize(page, 1400, scheme="dark")
    assert page.execute_script(background) == dark


def test_figures_follow_the_theme(page):
    looks = """
        const plate = document.querySelector('.plate'), seen = getComputedStyle(plate).backgroundColor;
        const line = plate.querySelector('[style*="stroke: light-dark(#000000"]');
        const paper = [...plate.querySelectorAll('path')].some((p) => p.style.fill === '#ffffff' || p.style.fill === 'white');
        return [seen, getComputedStyle(line).stroke, getComputedStyle(plate.querySelector('svg')).fill, paper];
    """
    assert page.execute_script(looks) == ["rgb(255, 255, 255)", "rgb(0, 0, 0)", "rgb(29, 34, 40)", False]
    resize(page, 1400, scheme="dark")
    assert page.execute_script(looks) == ["rgb(28, 32, 38)", "rgb(227, 230, 233)", "rgb(227, 230, 233)", False]


@pytest.mark.parametrize("width", [360, 1400])
def test_figures_can_be_seen_whole_and_the_page_is_never_wider_than_the_window(page, width):
    """Where a figure is wider than its box, the box scrolls to its end, and says so."""
    resize(page, width)
    for task in range(3):
        choose(page, "task", task)
        sizes = "const root = document.documentElement; return [innerWidth, root.clientWidth, root.scrollWidth]"
        outer, inner, held = page.execute_script(sizes)
        assert outer == width and held <= inner <= width
    seen = page.execute_script("""
        return [...document.querySelectorAll('.plate')].map((plate) => {
            const box = plate.getBoundingClientRect(), hint = getComputedStyle(plate, '::before').content;
            plate.scrollLeft = 9999;
            const svg = plate.querySelector('svg').getBoundingClientRect();
            return [box.right <= innerWidth, svg.right <= box.right, svg.width, plate.scrollLeft > 0, hint !== 'none'];
        })
    """)
    assert len(seen) == 2
    for inside, whole, wide, scrolls, hint in seen:
        assert inside and whole and scrolls == hint == (width == 360) and wide >= 0.7 * 6 * 96 - 1
