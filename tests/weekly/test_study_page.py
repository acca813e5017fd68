"""The published study: its tables follow from its records, its numbers from formulas, its rates from a written rule."""

from docs.study import make
from tests.fast.test_study_page import studies  # noqa: F401


def test_pages_hold_what_follows_from_the_records(studies):
    """All tables that are made, README's, the leaderboard and the CSV."""
    for path, text in make.made(studies).items():
        assert path.read_text() == text, f"{path} differs from the records: python -m docs.study.make"
