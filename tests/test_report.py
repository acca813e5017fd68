"""The HTML report: what its bytes hold, and how it behaves in a browser."""

import base64
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.figure import Figure as Plot
from PIL import Image

from cxda_jax.analysis import report as module
from cxda_jax.analysis.plots import STYLES
from cxda_jax.analysis.report import Attended, Figure, Query, Report, Support, write_report
from cxda_jax.types import UserError
from tests import browser as browsers

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&<!--"
TABLE = """<table class="sortable"><caption>Accuracy of {0}</caption>
<thead><tr><th>Method</th><th>Average</th><th>Worst 10 %</th></tr></thead><tbody>
<tr><td>erm</td><td data-value="61.5">61.5 ± 0.2</td><td data-value="9.5">9.5</td></tr>
<tr><td>cotta</td><td>–</td><td data-value="">–</td></tr>
<tr><td>cml</td><td data-value="7.25">7.2 ± 0.1</td><td data-value="40">40.0</td></tr>
<tr><td>cxda</td><td data-value="61.5">61.5 ± 0.4</td><td data-value="41">41.0</td></tr>
</tbody></table><p class="notes">Mean over three seeds. Every cell is the mean over the same 300 tasks.</p>"""


def make_task(seed=0, name="task 1", shape=(28, 28, 1), n=40, m=12, heads=4, mark="") -> Attended:
    rng = np.random.default_rng(seed)
    names = [f"domain {mark}{c}" for c in ("north", "south", "by the river in the evening", "east")]
    domains, labels = rng.integers(0, 4, n), rng.integers(0, 5, n + m)
    pixels = rng.integers(0, 90, (n + m, *shape), np.uint8)
    side = shape[0] // 5
    for image, label, domain in zip(pixels, labels, [*domains, *[1] * m], strict=True):
        image[label * side : (label + 1) * side, side:-side] += 100
        image[:, :2] += np.uint8(40 * domain)
    words = tuple(f"class {mark}{label}" for label in labels)
    weights = rng.dirichlet(np.full(n, 0.7), (m, heads))
    answers = {f"{method}{mark}": tuple(rng.permutation(words[n:])) for method in ("erm", "cml")}
    query = Query(pixels[n:], names[1], words[n:], {**answers, f"cxda{mark}": words[n:]})
    return Attended(name + mark, Support(pixels[:n], tuple(names[d] for d in domains), words[:n]), query, weights)


def make_figure(title="Accuracy", mark="") -> Figure:
    plot, file = Plot(figsize=(6, 3.2), layout="constrained"), io.StringIO()
    axes = plot.subplots()
    axes.plot([1, 2, 3], [3, 1, 2], "o-", label="cxda")
    axes.set(xlabel="step", ylabel="accuracy in %", title=title)
    axes.legend()
    plot.savefig(file, format="svg")
    return Figure(title + mark, f"Accuracy on unseen domains after each step, over three seeds.{mark}", file.getvalue())


def make_report(mark="") -> Report:
    return Report(
        title=f"Latent domain adaptation on glyphs{mark}",
        summary=[("Benchmarks", f"glyphs{mark}"), ("Methods", "erm, cotta, cml, cxda"), ("Seeds", "0, 1, 2")],
        tables=[TABLE.format("all methods"), TABLE.format("two")],
        figures=[make_figure(mark=mark), make_figure("Loss")],
        attended=[
            make_task(0, "task 1", mark=mark),
            make_task(1, "task 2", (32, 32, 3), n=20, m=5, heads=2),
            make_task(2, "task 3", (112, 112, 3), n=18, m=5),
        ],
        faults=[f"runs/glyphs/cotta/2{mark}: no result.json; evaluate it: python -m launch.evaluate --runs=..."],
    )


class Elements(HTMLParser):
    """All elements of a page as (tag, attributes)."""

    def __init__(self, page: str):
        super().__init__()
        self.found, self.text = [], ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def written(path, report: Report) -> str:
    size = write_report(path, report)
    assert path.stat().st_size == size <= 5 * 2**20
    return path.read_text()


def embedded(page: str) -> list[dict]:
    return json.loads(re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.S)[0])


def test_a_report_asks_for_nothing_from_elsewhere(tmp_path):
    page = written(tmp_path / "new" / "report.html", make_report())
    addresses = [
        v for _, a in Elements(page).found for k, v in a.items() if k in ("src", "href", "xlink:href", "action")
    ]
    assert addresses and all(address.startswith(("#", "data:")) for address in addresses)
    assert not re.search(r"url\(\s*[\"']?(?!#|data:|\$)", page) and "@import" not in page
    tags = [tag for tag, _ in Elements(page).found]
    assert not {"iframe", "object", "embed", "form", "base", "image"} & set(tags) and tags.count("link") == 1
    policy = next(a["content"] for tag, a in Elements(page).found if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy and "img-src data:" in policy and "http" not in policy


def test_hostile_names_stay_text(tmp_path):
    page = written(tmp_path / "report.html", make_report(HOSTILE))
    kinds, plain = Elements(page), Elements(written(tmp_path / "plain.html", make_report()))
    assert [tag for tag, _ in kinds.found] == [tag for tag, _ in plain.found]
    assert not any(name.startswith("on") for _, attributes in kinds.found for name in attributes)
    for text in (f"glyphs{HOSTILE}", f"runs/glyphs/cotta/2{HOSTILE}", f"over three seeds.{HOSTILE}"):
        assert text in kinds.text
    task = embedded(page)[0]
    assert task["name"] == f"task 1{HOSTILE}" and task["domains"][0] == f"domain {HOSTILE}south"
    assert [name for name, _ in task["query"]["answers"]] == [f"{m}{HOSTILE}" for m in ("erm", "cml", "cxda")]
    assert all(label.startswith(f"class {HOSTILE}") for label in task["support"]["labels"])


def test_what_is_not_there_has_no_section(tmp_path):
    page = written(tmp_path / "report.html", Report("Nothing \udcff", (), (), (), (), ()))
    assert not {tag for tag, _ in Elements(page).found} & {"section", "table", "figure", "h2"} and embedded(page) == []


def test_tasks_are_left_out_from_the_end_until_the_report_fits(tmp_path, monkeypatch):
    report = make_report()
    whole = write_report(tmp_path / "whole.html", report)
    monkeypatch.setattr(module, "LIMIT", whole)
    assert len(embedded(written(tmp_path / "fits.html", report))) == 3
    monkeypatch.setattr(module, "LIMIT", whole - 1)
    page = written(tmp_path / "less.html", report)
    assert [task["name"] for task in embedded(page)] == ["task 1", "task 2"]
    assert "1 of 3 tasks left out of the explorer" in page and 'id="attention"' in page
    bare = write_report(tmp_path / "bare.html", report._replace(attended=()))
    monkeypatch.setattr(module, "LIMIT", bare + 500)
    page = written(tmp_path / "none.html", report)
    assert embedded(page) == [] and "3 of 3 tasks left out" in page and 'id="attention"' not in page
    monkeypatch.setattr(module, "LIMIT", bare - 1)
    with pytest.raises(UserError, match=r"never.html: 0\.\d MB without any task, 5 MB at most"):
        write_report(tmp_path / "never.html", report)
    assert not (tmp_path / "never.html").exists()


def test_a_real_limit_of_five_megabytes(tmp_path):
    task = make_task(shape=(48, 48, 3), n=100, m=20)
    noise = np.random.default_rng(0).integers(0, 256, (120, 48, 48, 3), np.uint8)
    task = task._replace(
        support=task.support._replace(pixels=noise[:100]), query=task.query._replace(pixels=noise[100:])
    )
    page = written(tmp_path / "report.html", make_report()._replace(attended=[task] * 7))
    assert len(embedded(page)) == 4 and "3 of 7 tasks left out" in page


def test_tasks_with_broken_weights_are_named_and_misfits_refused(tmp_path):
    task = make_task()
    broken = task._replace(name="task 9", weights=np.where(task.weights > 0.2, np.nan, task.weights))
    page = written(tmp_path / "report.html", make_report()._replace(attended=[broken, task]))
    assert "task 9: attention weights empty or not finite" in page and len(embedded(page)) == 1
    with pytest.raises(ValueError, match="task 1: 40 support and 12 query images, but"):
        write_report(
            tmp_path / "misfit.html", make_report()._replace(attended=[task._replace(weights=task.weights[1:])])
        )


def test_figures_share_no_ids_and_their_references_hold(tmp_path):
    figure = make_figure()
    assert re.findall(r'\bid="', figure.svg) and "url(#" in figure.svg and 'xlink:href="#' in figure.svg
    page = written(tmp_path / "report.html", make_report()._replace(figures=[figure, figure]))
    ids = [a["id"] for _, a in Elements(page).found if "id" in a]
    assert len(ids) == len(set(ids))
    references = re.findall(r"url\(#([^)]+)\)", page) + re.findall(r'href="#([^"]+)"', page)
    assert set(references) <= set(ids)
    for number in (1, 2):
        assert any(r.startswith(f"figure-{number}-") for r in references)
    assert not re.search(r"<style[^>]*>\s*\*", page[page.index("<svg") :]) and "<metadata" not in page


def test_figures_have_the_colours_of_both_themes(tmp_path):
    """White paper and black ink become the page's own; what has a colour stands out from a dark page too."""
    page = written(tmp_path / "report.html", make_report())
    drawn = page[page.index("<figure") : page.rindex("</figure>")]
    styles = re.findall(r'\sstyle="([^"]*)"', drawn)
    assert not any(re.search(r"#\w{6}", re.sub(r"light-dark\([^)]*\)", "", style)) for style in styles)
    assert 'style="fill: #ffffff"' not in drawn and "light-dark(#000000, #e3e6e9)" in drawn
    css = (module.FOLDER / "report.css").read_text()
    assert "--card: light-dark(#ffffff, #1c2026)" in css and "--ink: light-dark(#1d2228, #e3e6e9)" in css
    for color in (*(style.color for style in STYLES.values()), "#1f77b4"):
        dark = module.both_themes(color)[-8:-1]
        ratio = module.contrast(*([int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in (dark, "#1c2026")))
        assert ratio >= 4.0, (color, dark, ratio)


@pytest.mark.parametrize("shape, size", [((28, 28, 1), (28, 28)), ((32, 32, 3), (32, 32)), ((112, 112, 3), (48, 48)),
                                         ((60, 120, 3), (24, 48))])  # fmt: skip
def test_sprites_hold_the_pixels(tmp_path, shape, size):
    task = make_task(shape=shape, n=21, m=5)
    sheet = embedded(written(tmp_path / "report.html", make_report()._replace(attended=[task])))[0]["sheet"]
    assert (sheet["height"], sheet["width"]) == size and sheet["tiny"] == (shape[:2] == size)
    whole = Image.open(io.BytesIO(base64.b64decode(sheet["data"].removeprefix("data:image/png;base64,"))))
    for i, image in enumerate([*task.support.pixels, *task.query.pixels]):
        row, column = divmod(i, sheet["columns"])
        x, y = column * (size[1] + 2) + 1, row * (size[0] + 2) + 1
        tile = np.asarray(whole.crop((x, y, x + size[1], y + size[0])))
        original = Image.fromarray(image.squeeze(-1) if shape[-1] == 1 else image)
        np.testing.assert_array_equal(tile, np.asarray(original.resize(size[::-1], Image.Resampling.LANCZOS)))
        if shape[:2] == size:
            np.testing.assert_array_equal(tile, image.squeeze())
        padded = np.asarray(whole.crop((x - 1, y - 1, x + size[1] + 1, y + size[0] + 1)))
        np.testing.assert_array_equal(padded[0, 1:-1], tile[0])


def test_weights_are_read_back(tmp_path):
    task = make_task()
    weights = embedded(written(tmp_path / "report.html", make_report()))[0]["weights"]
    numbers = np.frombuffer(base64.b64decode(weights["data"]), "<u2").reshape(task.weights.shape)
    np.testing.assert_allclose(numbers * weights["scale"], task.weights, atol=1e-5)
    assert weights["heads"] == 4


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browsers.chromium(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, make_report(HOSTILE))
    return path.as_uri()


@pytest.fixture
def page(browser, address):
    browsers.resize(browser, 1400)
    browser.get_log("performance")
    browser.get(address)
    yield browser
    assert browser.get_log("browser") == []


def find(page, selector):
    return page.find_element("css selector", selector)


def press(page, *keys):
    for key in keys:
        page.switch_to.active_element.send_keys(key)


def ranking(page) -> list[int]:
    cards = "return [...document.querySelectorAll('#ranking li')].map((card) => Number(card.dataset.index))"
    return page.execute_script(cards)


def choose(page, name, value):
    script = (
        "const s = document.getElementById(arguments[0]); s.value = arguments[1]; s.dispatchEvent(new Event('change'))"
    )
    page.execute_script(script, name, str(value))


def test_the_page_loads_without_a_request_or_a_complaint(page, address):
    sent = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"]
    assert address in asked and {url for url in asked if not url.startswith("data:")} == {address}
    assert HOSTILE in find(page, "h1").text and not page.execute_script(
        "return document.querySelectorAll('img').length"
    )


def test_tables_are_sorted_by_keyboard_with_missing_values_last(page):
    from selenium.webdriver import Keys

    def column(i):
        return [find(row, f"td:nth-child({i})").text for row in page.find_elements("css selector", "#table-1 tbody tr")]

    head = find(page, "#table-1 th:nth-child(2)")
    page.execute_script("arguments[0].focus()", find(head, "button"))
    press(page, Keys.ENTER)
    assert column(1) == ["cml", "erm", "cxda", "cotta"] and head.get_attribute("aria-sort") == "ascending"
    press(page, Keys.SPACE)
    assert column(1) == ["erm", "cxda", "cml", "cotta"] and head.get_attribute("aria-sort") == "descending"
    other = find(page, "#table-1 th:nth-child(3)")
    find(other, "button").click()
    assert column(1) == ["erm", "cml", "cxda", "cotta"] and other.get_attribute("aria-sort") == "ascending"
    assert head.get_attribute("aria-sort") is None
    find(page, "#table-1 th:first-child button").click()
    assert column(1) == ["cml", "cotta", "cxda", "erm"]
    assert find(page, "#table-2 td").text == "erm"


def test_queries_are_chosen_by_keyboard_and_ranked_by_head(page):
    from selenium.webdriver import Keys

    weights = make_task().weights
    mean = np.argsort(-weights.mean(1), kind="stable")
    assert ranking(page) == list(mean[0])
    page.execute_script("arguments[0].focus()", find(page, "#queries [tabindex='0']"))
    for key, query in [(Keys.ARROW_RIGHT, 1), (Keys.ARROW_DOWN, 2), (Keys.ARROW_LEFT, 1), (Keys.END, 11),
                       (Keys.ARROW_RIGHT, 11), (Keys.HOME, 0), (Keys.ARROW_UP, 0), (Keys.ARROW_RIGHT, 1)]:  # fmt: skip
        press(page, key)
        assert ranking(page) == list(mean[query])
        assert page.switch_to.active_element.get_attribute("aria-selected") == "true"
    assert find(page, "#ranking strong").text == f"{40 * weights[1].mean(0).max():.2f} x"
    assert (
        f"Query 2, mean over 4 heads: highest weight {find(page, '#ranking strong').text}." in find(page, "#said").text
    )
    heads = page.execute_script("return [...document.getElementById('head').options].map((o) => o.textContent)")
    assert heads == ["mean over 4 heads", "head 1", "head 2", "head 3", "head 4"], "counted from 1, as in figures"
    choose(page, "head", 3)
    assert ranking(page) == list(np.argsort(-weights[1, 2], kind="stable")) != list(mean[1])
    page.find_elements("css selector", "#queries [role='option']")[4].click()
    assert ranking(page)[0] == weights[4, 2].argmax()
    choose(page, "task", 1)
    assert ranking(page) == list(np.argsort(-make_task(1, shape=(32, 32, 3), n=20, m=5, heads=2).weights[0].mean(0)))


def test_the_chosen_query_is_told_with_its_answers(page):
    query = make_task(mark=HOSTILE).query
    told = find(page, "#chosen").text.split("\n")
    assert told[:4] == ["True label", query.labels[0], "Domain", f"★ A {query.domain}"]
    for i, (method, answers) in enumerate(query.answers.items()):
        verdict = "✓ right" if answers[0] == query.labels[0] else "✗ wrong"
        assert told[4 + 2 * i : 6 + 2 * i] == [method, f"{verdict}: {answers[0]}"]


def test_the_ranking_can_be_kept_to_one_domain(page):
    task = make_task(mark=HOSTILE)
    order = np.argsort(-task.weights[0].mean(0), kind="stable")
    others = sorted(set(task.support.domains) - {task.query.domain})
    choose(page, "domain", 2)
    assert ranking(page) == [i for i in order if task.support.domains[i] == others[1]]
    assert f"{len(ranking(page))} of 40 images shown" in find(page, "#said").text
    choose(page, "domain", 0)
    assert all(task.support.domains[i] == task.query.domain for i in ranking(page))
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
    browsers.resize(page, 1400, scheme="dark")
    assert page.execute_script(background) == dark


def test_figures_follow_the_theme(page):
    looks = """
        const plate = document.querySelector('.plate'), seen = getComputedStyle(plate).backgroundColor;
        const line = plate.querySelector('[style*="stroke: light-dark(#000000"]');
        const paper = [...plate.querySelectorAll('path')].some((p) => p.style.fill === '#ffffff' || p.style.fill === 'white');
        return [seen, getComputedStyle(line).stroke, getComputedStyle(plate.querySelector('svg')).fill, paper];
    """
    assert page.execute_script(looks) == ["rgb(255, 255, 255)", "rgb(0, 0, 0)", "rgb(29, 34, 40)", False]
    browsers.resize(page, 1400, scheme="dark")
    assert page.execute_script(looks) == ["rgb(28, 32, 38)", "rgb(227, 230, 233)", "rgb(227, 230, 233)", False]


@pytest.mark.parametrize("width", [360, 1400])
def test_figures_can_be_seen_whole(page, width):
    """Where one is wider than its box, the box scrolls to its end, and says so."""
    browsers.resize(page, width)
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


@pytest.mark.parametrize("width", [360, 1400])
def test_the_page_is_never_wider_than_the_window(page, width):
    browsers.resize(page, width)
    for task in range(3):
        choose(page, "task", task)
        outer, inner, held = page.execute_script(
            "const root = document.documentElement; return [innerWidth, root.clientWidth, root.scrollWidth]"
        )
        assert outer == width and held <= inner <= width
