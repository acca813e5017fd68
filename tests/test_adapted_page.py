"""The page of an adapted model: what its bytes hold, and how it is used in headless Chromium."""

import re

import numpy as np
import pytest

from cxda_jax.disk.models import Gain
from cxda_jax.report import adapted
from cxda_jax.report import page as module
from cxda_jax.report.adapted import AdaptedPage, Answered, write_adapted
from tests.chromium import asked, find, press, resize
from tests.test_report import HOSTILE, Elements, embedded

MEAN, LOW, HIGH = (0.0, 0.4, 1.9, 3.1, 3.6), (0.0, -0.3, 1.1, 2.2, 2.7), (0.0, 1.1, 2.7, 4.0, 4.5)
GAIN = Gain((0, 1, 4, 16, 64), (70.0, 70.4, 71.9, 73.1, 73.6), MEAN, LOW, HIGH, tasks=100)


def make_page(m=12, n=30, shape=(28, 28, 1), heads=2, mark="", seed=0) -> AdaptedPage:
    """A page of m answers, in no order, every third with a label, and a buffer of n images."""
    rng = np.random.default_rng(seed)
    pixels, classes = rng.integers(0, 90, (m + n, *shape), np.uint8), [f"class {mark}{c}" for c in "abc"]
    for i, image in enumerate(pixels):
        image[i % 5 * 5 : i % 5 * 5 + 5, 4:-4] += 120
    weights = rng.dirichlet(np.full(max(n, 1), 0.7), (m, heads))[..., :n]
    answers = [
        Answered(
            f"mine_{i:03d}{mark}.png", pixels[n + i], classes[i % 3], 0.5 + i / (4 * m), classes[i % 2], 0.75,
            rng.uniform(), tuple(map(int, weights[i].mean(0).argsort()[::-1][:5])), classes[i % 3] if i % 3 == 0 else "",
        )
        for i in range(m)
    ]  # fmt: skip
    names = tuple(f"buffer_{i:04d}{mark}.png" for i in range(n))
    facts = [("Model", f"cxda_any{mark}"), ("Buffer", f"{n} images")]
    faults = [f"mine/broken{mark}.png: no image"]
    return AdaptedPage(f"Adapted{mark}", facts, answers, m, pixels[:n], names, weights, GAIN, faults)


def written(path, page: AdaptedPage) -> str:
    size = write_adapted(path, page)
    assert path.stat().st_size == size <= 5 * 2**20
    return path.read_text()


def by_moved(page: AdaptedPage) -> list[int]:
    return sorted(range(len(page.answers)), key=lambda i: -page.answers[i].moved)


def test_rows_come_ordered_by_how_far_they_moved_and_changes_are_said(tmp_path):
    page = make_page()
    text = written(tmp_path / "new" / "adapted.html", page)
    order = by_moved(page)
    assert re.findall(r'<div class="file" title="[^"]*">(mine_\d+\.png)', text) == [page.answers[i].file for i in order]
    rows = re.findall(r"<tr.*?</tr>", text[text.index("<tbody>") : text.index("</tbody>")], re.S)
    for i, row in zip(order, rows, strict=True):
        answer = page.answers[i]
        changed = answer.before != answer.after
        assert row.startswith('<tr class="changed">') == ("≠ changed" in row) == changed
        near = [f"buffer_{place:04d}.png" for place in answer.nearest]
        assert re.findall(r'role="img" aria-label="([^"]*)" title="([^"]*)"', row) == [(name, name) for name in near]
        if answer.label:
            marks = ["✓ right" if given == answer.label else "✗ wrong" for given in (answer.before, answer.after)]
            assert re.findall("[✓✗] [a-z]+", row) == marks
        else:
            assert "<td>–</td>" in row
    changes = sum(answer.before != answer.after for answer in page.answers)
    assert f"{changes} of these 12 answers changed" in text and "All 12, most moved first" in text
    (task,) = embedded(text)
    assert task["query"]["files"] == [page.answers[i].file for i in order]
    assert task["domains"] == task["support"]["labels"] == task["query"]["labels"] == []


def test_a_part_of_the_answers_is_said_to_be_one_and_unknown_labels_have_no_column(tmp_path):
    page = make_page(total := 7)
    bare = [answer._replace(label="", nearest=()) for answer in page.answers]
    text = written(tmp_path / "adapted.html", page._replace(answers=bare, total=10_000 * total))
    assert "The 7 that moved most of 70,000" in text
    assert (
        "<th>Label</th>" not in text and "Nearest" not in text and "✓" not in Elements(text).text.split("use strict")[0]
    )


def test_hostile_names_stay_text_and_odd_bytes_are_escaped(tmp_path):
    text = written(tmp_path / "adapted.html", make_page(mark=HOSTILE))
    found = Elements(text)
    assert found.tags == Elements(written(tmp_path / "plain.html", make_page())).tags
    assert not any(name.startswith("on") for _, attributes in found.elements for name in attributes)
    assert f"mine_000{HOSTILE}.png" in found.text and f"class {HOSTILE}a" in found.text
    labels = {attributes["aria-label"] for _, attributes in found.elements if "aria-label" in attributes}
    assert any(f"{HOSTILE}.png" in label for label in labels)
    odd = written(tmp_path / "odd.html", make_page(mark="\udcff\x1b\n\u202e"))
    shown = r"\udcff\x1b\n\u202e"
    assert f"mine_000{shown}.png" in odd and "\x1b" not in odd and "\u202e" not in odd
    assert embedded(odd)[0]["support"]["files"][0] == f"buffer_0000{shown}.png"


def test_an_empty_buffer_and_a_method_without_weights_have_no_explorer(tmp_path):
    page = make_page(n=0)
    text = written(tmp_path / "empty.html", page._replace(answers=[a._replace(nearest=()) for a in page.answers]))
    assert embedded(text) == [] and 'id="attention"' not in text and "Your buffer is empty" in text
    assert "your buffer of 0 images, where the expected gain is +0.0 points".lower() in text.lower()
    text = written(tmp_path / "blind.html", make_page()._replace(weights=None, gain=None))
    assert embedded(text) == [] and "Your buffer holds 30 images." in text and 'id="gain"' not in text
    text = written(tmp_path / "nothing.html", AdaptedPage("t", (), (), 0, page.buffer, (), None, None, ()))
    assert "<table" not in text and "data:image" not in text


def test_a_buffer_larger_than_any_that_was_measured_is_said(tmp_path):
    text = written(tmp_path / "adapted.html", make_page(m=3, n=65))
    assert "Your buffer of 65 images".lower() in text.lower() and "No buffer of that size was measured." in text
    assert "(+2.2 to +4.0)" in written(tmp_path / "adapted.html", make_page(m=3, n=16))


def test_a_large_buffer_shows_the_nearest_images_and_keeps_multiples_of_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(adapted, "SHOWN", 20)
    page = make_page(m=2, n=50, heads=1)
    text = written(tmp_path / "adapted.html", page)
    assert "30 more than these are not shown" in text and text.count('<li title="buffer_') == 20
    (task,) = embedded(text)
    places = [int(name[7:11]) for name in task["support"]["files"]]
    assert len(places) == 20 and {place for a in page.answers for place in a.nearest} <= set(places)
    first = by_moved(page)[0]
    highest = task["weights"]["scale"] * 65535 * 20
    expected = max(page.weights[i, 0, places].max() for i in range(2)) * 50
    assert first in (0, 1) and highest == pytest.approx(expected, rel=1e-6)
    assert "data-unsorted" in text
    monkeypatch.setattr(adapted, "SHOWN", 3)
    assert '<span class="file">buffer_' in written(tmp_path / "less.html", page).split("Your buffer</h2>")[0]


def test_the_most_that_a_page_can_hold_fits(tmp_path):
    """Noise as photographs, the worst that can be compressed: the pictures stay, and the explorer may go."""
    page = make_page(m=200, n=600, shape=(64, 64, 3), heads=8)
    noise = np.random.default_rng(0).integers(0, 256, (800, 64, 64, 3), np.uint8)
    answers = [answer._replace(image=image) for answer, image in zip(page.answers, noise[600:], strict=True)]
    text = written(tmp_path / "adapted.html", page._replace(answers=answers, buffer=noise[:600]))
    assert "data:image/jpeg" in text and "100 more than these are not shown" in text


def test_an_explorer_without_room_for_all_says_so(tmp_path, monkeypatch):
    assert "For want of room" not in written(tmp_path / "whole.html", make_page())
    monkeypatch.setattr(adapted, "WEIGHTS", 5 * 2 * 30)
    text = written(tmp_path / "part.html", make_page())
    assert "5 of the 12 answers above and 30 of the 30 images of the buffer" in text
    (task,) = embedded(text)
    assert task["query"]["count"] == len(task["query"]["files"]) == 5


def test_the_explorer_is_left_out_where_the_page_would_be_too_large(tmp_path, monkeypatch):
    whole = write_adapted(tmp_path / "whole.html", make_page())
    monkeypatch.setattr(module, "LIMIT", whole - 1)
    text = written(tmp_path / "less.html", make_page())
    assert embedded(text) == [] and "left out of the explorer" in text and 'id="buffer"' in text


# In the browser.


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("adapted") / "adapted.html"
    page = make_page(m=24, n=40, mark=HOSTILE)
    long = page.answers[0]._replace(file="a_very_long_name_without_any_space_" * 6 + ".png", before="w" * 60)
    write_adapted(path, page._replace(answers=[long, *page.answers[1:]]))
    return path.as_uri()


@pytest.fixture
def opened(browser, address):
    resize(browser, 1400)
    browser.get_log("performance")
    browser.get(address)
    yield browser
    assert browser.get_log("browser") == []


def test_the_page_makes_no_request_and_every_picture_shows(opened, address):
    assert asked(opened) == {address}
    pictures = (
        "return [...document.querySelectorAll('.picture')].map((p) => getComputedStyle(p).backgroundImage.slice(0, 20))"
    )
    assert set(opened.execute_script(pictures)) == {'url("data:image/png;'}


def test_the_table_is_sorted_by_keyboard(opened):
    def numbers():
        return [row.text.split()[0] for row in opened.find_elements("css selector", "#answers tbody td:first-child")]

    assert numbers() == [str(i) for i in range(1, 25)]
    head = find(opened, "#answers th:nth-child(4)")
    opened.execute_script("arguments[0].focus()", find(head, "button"))
    press(opened, "ENTER")
    cells = "return [...document.querySelectorAll('#answers tbody tr')].map((r) => Number(r.cells[3].dataset.value))"
    values = opened.execute_script(cells)
    assert values == sorted(values) and head.get_attribute("aria-sort") == "ascending"
    press(opened, "SPACE")
    assert opened.execute_script(cells) == values[::-1] and numbers() != [str(i) for i in range(1, 25)]
    assert not find(opened, "#answers th:last-child").find_elements("css selector", "button")


def test_queries_and_heads_are_chosen_by_keyboard_without_domains_or_labels(opened):
    page = make_page(m=24, n=40, mark=HOSTILE)
    order = by_moved(page)

    def ranking():
        return opened.execute_script(
            "return [...document.querySelectorAll('#ranking li')].map((c) => Number(c.dataset.index))"
        )

    def ranked(place, head=None):
        weights = page.weights[order[place]]
        return list(np.argsort(-(weights.mean(0) if head is None else weights[head]), kind="stable"))

    assert ranking() == ranked(0)
    opened.execute_script("arguments[0].focus()", find(opened, "#queries [tabindex='0']"))
    for key, place in [("ARROW_RIGHT", 1), ("END", 23), ("HOME", 0), ("ARROW_RIGHT", 1)]:
        press(opened, key)
        assert ranking() == ranked(place)
    told, answer = find(opened, "#chosen").text.split("\n"), page.answers[order[1]]
    assert told == ["Before", answer.before, "After", answer.after, "File", answer.file]
    assert find(opened, "#ranking .file").text == page.buffer_files[ranked(1)[0]]
    opened.execute_script("arguments[0].focus()", find(opened, "#head"))
    press(opened, "ARROW_DOWN")
    assert ranking() == ranked(1, head=0) and "head 1: highest weight" in find(opened, "#said").text
    for absent in ("#legend", "#domain", "#task"):
        assert not find(opened, absent).is_displayed()
    assert not opened.find_elements("css selector", ".star, .domain, #explorer .right, #explorer .wrong")
    assert "domain" not in find(opened, "#explorer").text


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_the_page_is_never_wider_than_the_window_and_can_be_read(opened, width, scheme):
    resize(opened, width, scheme)
    sizes = "const root = document.documentElement; return [innerWidth, root.scrollWidth]"
    inner, held = opened.execute_script(sizes)
    assert held <= inner == width
    outside = """
        return [...document.querySelectorAll('.tiles li, #ranking li, #chosen dd, #answers .scroll, .plate')]
            .filter((e) => e.getBoundingClientRect().right > innerWidth + 0.5).length
    """
    assert opened.execute_script(outside) == 0
    colours = """
        const numbers = (c) => c.match(/[\\d.]+/g).slice(0, 3).map(Number), page = getComputedStyle(document.body);
        const seen = [...document.querySelectorAll('#answers td, #answers b, #answers .right, #answers .wrong, .tiles .file')];
        return [numbers(page.backgroundColor), seen.map((e) => numbers(getComputedStyle(e).color))];
    """
    background, inks = opened.execute_script(colours)
    assert (sum(background) < 200) == (scheme == "dark")
    assert min(module.contrast(np.array(ink), np.array(background)) for ink in inks) >= 4.5
