"""The pages of an adapted model and of fit(): what they show of given numbers, and names that somebody else gave."""

import functools
import re

import numpy as np
import pytest

from cxda_jax.adapter.adapter import Adapter
from cxda_jax.adapter.page import advice, as_html
from cxda_jax.adapter.report import span_of
from cxda_jax.device.page import AdaptedPage, Answered, ClassShares, first, write_adapted
from cxda_jax.disk.models import Gain
from cxda_jax.pages.rows import EDGE, Row, picture
from tests import pages
from tests.pages import HOSTILE, Elements

written = functools.partial(pages.written, write=write_adapted)
MEAN, LOW, HIGH = (0.0, 0.4, 1.9, 3.1, 3.6), (0.0, -0.3, 1.1, 2.2, 2.7), (0.0, 1.1, 2.7, 4.0, 4.5)
GAIN = Gain((0, 1, 4, 16, 64), (70.0, 70.4, 71.9, 73.1, 73.6), MEAN, LOW, HIGH, tasks=100)


def make_page(m=12, n=30, shape=(28, 28, 1), heads=2, mark="") -> AdaptedPage:
    """A page of m answers, in no order, every third with a label, and a buffer of n images."""
    rng = np.random.default_rng(0)
    pixels, classes = rng.integers(0, 256, (m + n, *shape), np.uint8), [f"class {mark}{c}" for c in "abc"]
    weights, answers = rng.dirichlet(np.full(max(n, 1), 0.7), (m, heads))[..., :n], []
    for i in range(m):
        given = classes[i % 3], 0.5 + i / (4 * m), classes[i % 2], 0.75, rng.uniform()
        label = "" if i % 3 else classes[i // 6 % 2]
        answers.append(Answered(f"mine_{i:03d}{mark}.png", pixels[n + i], *given, weights[i], label))
    names, facts = tuple(f"buffer_{i:04d}{mark}.png" for i in range(n)), [("Model", f"cxda_any{mark}")]
    faults = [f"mine/broken{mark}.png: no image"]
    shares = ClassShares(classes, np.array([0.5, 0.25, 0.25]), np.array([0.45, 0.525, 0.025]), True)
    return AdaptedPage(f"Adapted{mark}", facts, answers, m, pixels[:n], names, GAIN, faults, shares)


def made_adapter(domains=12, mark="", **changed) -> Adapter:
    """An adapter of which only the report and its thresholds are known; `changed` are rows of all gains."""
    sizes = {"0": 1.0, "5": 2.0, "20": 3.0, "100": 4.0, "em": -7.0, "own_em": -2.0, "unmix": -3.0, "refit": 2.5}
    sizes |= {f"over_{name}": 4.0 - sizes[name] for name in ("0", "em", "own_em", "unmix", "refit")}
    overall = {"plain": 61.5, **{name: [x, x - 0.9, x + 0.7] for name, x in sizes.items()}} | changed
    names = ("plain", "0", "5", "20", "100")
    calibration = {
        name: {"ece": [0.2 + i / 100, 0.05 + i / 1000], "risk": {"1.0": 0.3 - i / 100, "0.8": 0.1 + i / 1000}}
        for i, name in enumerate(names)
    }
    by_domain = {f"place {i}{mark}": (i * 5 % domains) - 2.25 for i in range(domains)}
    report = {
        "images": 900, "right": 0.6, "domains": domains, "turns": 4, "steps": 90, "asked": 120, "one_set": False,
        "headroom": None, "gain": {"1 domain, own shares": overall, "1 domain, even shares": overall}, "expected": 3.2,
        "overall": overall, "by_domain": by_domain, "calibration": calibration, "drift": {"false_alarms": 0.1},
    }  # fmt: skip
    known = {
        "thresholds": np.array([[0.9, 0.6, 0.2], [0.95, 0.7, 0.1]], np.float32),
        "accepted": np.tile([[40.0, 80.0, 100.0]], (2, domains, 1)),
        "wrong": np.tile([[0.0, 4.0, 30.0]], (2, domains, 1)),
    }
    return Adapter(3, 2, "style", 0, {}, known, report, "said")


def marks(page: Elements, shape: str) -> list[float]:
    """Where the marks of a shape are, in per cent of the width, from the first row to the last."""
    tag = "rect" if shape == "bars" else "svg"
    found = [a for t, a in page.elements if t == tag and a.get("class") == f"mark {shape}" and "%" in a["x"]]
    return [float(a["x"][:-1]) for a in found]


def test_marks_lie_where_their_values_are_on_one_scale():
    values = [-3.0, 0.0, 4.5, 12.0]
    rows = [Row(f"{x:g}", HOSTILE, {"dot": [x, x - 1, x + 2], "ring": [-x]}) for x in values]
    page = Elements(picture(rows, {"dot": "one", "ring": "other"}, "points"))
    places, mirrored = (np.array(marks(page, shape)) for shape in ("dots", "rings"))
    spans = [a for tag, a in page.elements if tag == "line" and a["class"] == "span"]
    zero = {float(a["x1"][:-1]) for tag, a in page.elements if tag == "line" and a["class"] == "zero"}.pop()
    scale = (places[-1] - places[0]) / 15
    np.testing.assert_allclose((places - zero) / scale, values, atol=0.01)
    np.testing.assert_allclose((mirrored - zero) / scale, [-x for x in values], atol=0.01)
    for span, x in zip(spans, values, strict=True):
        ends = [(float(span[end][:-1]) - zero) / scale for end in ("x1", "x2")]
        np.testing.assert_allclose(ends, [x - 1, x + 2], atol=0.01)
    assert page.text.count(HOSTILE) == 4 and min(mirrored) >= 0 and zero + 14 * scale <= 100.01 - EDGE
    bars = Elements(picture([Row("a", "", {"bar": [-2.0]}), Row("b", "", {"bar": [3.0]})], {"bar": "x"}, ""))
    (left, _), (right, wide) = (
        [float(a[of][:-1]) for of in ("x", "width")] for t, a in bars.elements if t == "rect" and "bars" in a["class"]
    )
    assert left + 2 / 3 * wide == pytest.approx(right, abs=0.02)
    for same in ([0.0], [1e-9], [7.0]):
        assert marks(Elements(picture([Row("a", "", {"dot": same})], {"dot": "x"}, "")), "dots")[0] >= 0


def test_the_page_of_fit_shows_the_numbers_of_its_report():
    adapter = made_adapter(mark=HOSTILE)
    page, report = Elements(as_html(adapter)), adapter.report
    assert page.tags == Elements(as_html(made_adapter())).tags
    for name in ("0", "5", "20", "100", "em", "unmix", "refit"):
        assert span_of(report["overall"][name]) in page.text
    assert "61.5 %" in page.text and "65.5 %" in page.text and "+3.2" in page.text
    gains = sorted(report["by_domain"].items(), key=lambda gained: gained[1])
    shown = [page.text.rindex(f"{name}{gain:+.1f}") for name, gain in gains]
    assert shown == sorted(shown) and len(marks(page, "bars")) == 12
    for at in report["calibration"].values():
        assert "{:.1f} % → {:.1f} %".format(*(100 * error for error in at["ece"])) in page.text
    assert "30.0 % → 26.0 %" in page.text and "10.0 % → 10.4 %" in page.text
    told = [adapter.threshold_for(risk) for risk in (0.01, 0.1)]
    assert f"1%{told[0]:.3f}40.0%" in page.text and f"10%{told[1]:.3f}80.0%" in page.text
    many = Elements(as_html(made_adapter(domains=260)))
    assert len(marks(many, "bars")) == 200 and "60 more" in many.text


def test_the_page_of_fit_advises_by_what_was_found():
    def told(domains=12, **changed):
        found = advice(made_adapter(domains, **changed))
        assert 2 <= len(found) <= 4
        return " ".join(found)

    usual, unsure, harmed = told(), told(**{"100": [1.5, -0.5, 3.5]}), told(**{"100": [-4.0, -6.0, -2.0]})
    assert re.search(r"\b5 images.*\+2\.0.*100 images.*\+4\.0", usual)
    assert re.search(r"\b20 images.*\+3\.0", told(**{"5": [0.1, -0.2, 0.4]}))
    assert "+5.0 (+4.0 to +6.0)" in told(refit=[5.0, 4.0, 6.0]) and "+2.5 (" not in usual
    assert "+0.4 (-0.1 to +0.9)" in told(over_0=[0.4, -0.1, 0.9])
    better = {"em": [6.0, 5.0, 7.0], "over_em": [-2.0, -2.5, -1.5]}
    assert "+6.0 (+5.0 to +7.0)" in told(**better)
    assert re.search(r"\b7\b", told(7)) and not re.search(r"\b12\b", usual)
    for text in (unsure, harmed):
        assert "90 of 120" in text and "3 of 12" in text and "90 of 120" not in usual
    adapter = made_adapter(**{"100": [1.5, -0.5, 3.5]})
    with_style, without = (" ".join(advice(adapter._replace(keys=keys))) for keys in ("style", "features"))
    assert "features" in without and "features" not in with_style
    assert "99.0%" in advice(adapter._replace(report={**adapter.report, "right": 0.99}))[0]


def test_of_many_answers_a_quarter_of_the_first_is_for_the_spoiled_ones():
    def answers(count, kind):
        before, after, label = {"corrected": "abb", "spoiled": "aba", "same": "aaa"}[kind]
        given = (np.zeros((2, 2, 1), np.uint8), before, 0.5, after, 0.5)
        return [Answered(f"{kind}{i}", *given, i / count, None, label) for i in range(count)]

    def names(*given):
        return [a.file for a in first([a for kind, count in given for a in answers(count, kind)], 8)]

    kinds = [re.sub(r"\d", "", name) for name in names(("same", 9), ("spoiled", 9), ("corrected", 20))]
    assert kinds == ["corrected"] * 6 + ["spoiled"] * 2
    assert names(("spoiled", 9), ("corrected", 20))[::6] == ["corrected19", "spoiled8"]
    assert names(("same", 9), ("spoiled", 3), ("corrected", 2))[:6] == [
        "corrected1", "corrected0", "spoiled2", "spoiled1", "spoiled0", "same8",
    ]  # fmt: skip
    assert len(names(("spoiled", 3), ("corrected", 2))) == 5


def test_rows_say_what_adapting_corrected_and_spoiled(tmp_path):
    given = make_page(m=24)
    page = Elements(written(tmp_path / "adapted.html", given))
    marked = [attrs.get("class") for tag, attrs in page.elements if tag == "b"]
    for kind, count in (
        ("right", sum(a.corrected for a in given.answers)),
        ("wrong", sum(a.spoiled for a in given.answers)),
    ):
        assert marked.count(kind) == count > 0
    assert len(marked) == sum(a.before != a.after for a in given.answers)


def test_class_shares_stand_by_how_much_they_differ(tmp_path):
    page = Elements(written(tmp_path / "adapted.html", make_page()))
    told = ["class b25.0 % → 52.5 %", "class c25.0 % → 2.5 %", "class a50.0 % → 45.0 %"]
    places = [page.text.index(text) for text in told]
    assert places == sorted(places) and len(marks(page, "dots")) == len(marks(page, "rings")) == 3
    assert len(marks(Elements(written(tmp_path / "a.html", make_page()._replace(shares=None))), "dots")) == 0


def test_hostile_names_stay_text_and_odd_bytes_are_escaped(tmp_path):
    found = Elements(written(tmp_path / "adapted.html", make_page(mark=HOSTILE)))
    assert found.tags == Elements(written(tmp_path / "plain.html", make_page())).tags
    assert f"mine_000{HOSTILE}.png" in found.text and f"class {HOSTILE}a" in found.text
    odd, shown = written(tmp_path / "odd.html", make_page(mark="\udcff\x1b\n\u202e")), r"\udcff\x1b\n\u202e"
    assert f"mine_000{shown}.png" in odd and "\x1b" not in odd and "\u202e" not in odd
