"""The page of an adapted model: names that somebody else gave."""

import functools

import numpy as np

from cxda_jax.device.page import AdaptedPage, Answered, write_adapted
from cxda_jax.disk.models import Gain
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
    return AdaptedPage(f"Adapted{mark}", facts, answers, m, pixels[:n], names, GAIN, faults)


def test_hostile_names_stay_text_and_odd_bytes_are_escaped(tmp_path):
    found = Elements(written(tmp_path / "adapted.html", make_page(mark=HOSTILE)))
    assert found.tags == Elements(written(tmp_path / "plain.html", make_page())).tags
    assert f"mine_000{HOSTILE}.png" in found.text and f"class {HOSTILE}a" in found.text
    odd, shown = written(tmp_path / "odd.html", make_page(mark="\udcff\x1b\n\u202e")), r"\udcff\x1b\n\u202e"
    assert f"mine_000{shown}.png" in odd and "\x1b" not in odd and "\u202e" not in odd
