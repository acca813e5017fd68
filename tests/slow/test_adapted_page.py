"""The page of an adapted model: what its bytes hold."""

from cxda_jax.device import page as module
from tests.fast.test_adapted_page import GAIN, HIGH, LOW, MEAN, make_page, written  # noqa: F401
from tests.slow.test_report import embedded


def test_without_room_the_explorer_shows_a_part_and_pictures_stay(tmp_path, monkeypatch):
    """The most that a page can hold fits: noise as photographs is the worst that can be compressed."""
    text = written(tmp_path / "most.html", make_page(m=200, n=600, shape=(64, 64, 3), heads=8))
    assert "data:image/jpeg" in text and "100 more than these are not shown" in text
    monkeypatch.setattr(module, "WEIGHTS", 5 * 2 * 30)
    text = written(tmp_path / "part.html", make_page())
    assert "5 of the 12 answers above and 30 of the 30 images of the buffer" in text
    (task,) = embedded(text)
    assert task["query"]["count"] == len(task["query"]["files"]) == 5
