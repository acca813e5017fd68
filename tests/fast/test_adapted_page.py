"""The page of an adapted model: what its bytes hold."""

import functools
import re

import numpy as np

from cxda_jax.device.page import AdaptedPage, Answered, write_adapted
from cxda_jax.disk.models import Gain
from tests import pages
from tests.pages import HOSTILE, Elements, embedded

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
    return AdaptedPage(f"Adapted{mark}", facts, answers, m, pixels[:n], names, GAIN, faults)


def test_changed_answers_come_first_then_by_how_far_they_moved_and_changes_are_said(tmp_path):
    page = make_page()
    text = written(tmp_path / "new" / "adapted.html", page)
    kinds = {"corrected": [], "spoiled": [], "changed": [], "same": []}
    for i in sorted(range(12), key=lambda i: -page.answers[i].moved):
        before, after, label = (getattr(page.answers[i], name) for name in ("before", "after", "label"))
        kind = "corrected" if after == label else "spoiled" if before == label else "changed"
        kinds[kind if before != after else "same"].append(i)
    order = sum(kinds.values(), [])
    assert all(kinds.values())
    assert re.findall(r'<div class="file" title="[^"]*">(mine_\d+\.png)', text) == [page.answers[i].file for i in order]
    rows = re.findall(r"<tr.*?</tr>", text[text.index("<tbody>") : text.index("</tbody>")], re.S)
    for i, row in zip(order, rows, strict=True):
        answer = page.answers[i]
        changed = answer.before != answer.after
        assert row.startswith('<tr class="changed">') == ("≠ changed" in row) == changed
        places = answer.weights.mean(0).argsort()[::-1][:5]
        assert re.findall(r'title="(buffer_\d+)', row) == [f"buffer_{place:04d}" for place in places]
        if answer.label:
            marks = ["✓ right" if given == answer.label else "✗ wrong" for given in (answer.before, answer.after)]
            assert re.findall("[✓✗] [a-z]+", row) == marks
    assert f"{sum(answer.before != answer.after for answer in page.answers)} of these 12 answers changed" in text
    assert embedded(text)[0]["query"]["files"] == [page.answers[i].file for i in order]


def test_hostile_names_stay_text_and_odd_bytes_are_escaped(tmp_path):
    found = Elements(written(tmp_path / "adapted.html", make_page(mark=HOSTILE)))
    assert found.tags == Elements(written(tmp_path / "plain.html", make_page())).tags
    assert f"mine_000{HOSTILE}.png" in found.text and f"class {HOSTILE}a" in found.text
    odd, shown = written(tmp_path / "odd.html", make_page(mark="\udcff\x1b\n\u202e")), r"\udcff\x1b\n\u202e"
    assert f"mine_000{shown}.png" in odd and "\x1b" not in odd and "\u202e" not in odd
