"""Fills the documentation's pages with what stands elsewhere, so that it cannot go stale.

A page has a marker line, such as `<!-- config table -->`, where the text comes.
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the package need not be installed

from cxda_jax import config  # noqa: E402


def of_root(name: str) -> str:
    """A page of the repository's root, with its links as they are seen from docs/."""
    return (ROOT / name).read_text().replace("](docs/", "](").replace("](CHANGELOG.md", "](changelog.md")


TEXTS = {
    "<!-- config table -->": config.table(),
    "<!-- contributing -->": of_root("CONTRIBUTING.md"),
    "<!-- changelog -->": of_root("CHANGELOG.md"),
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    for marker, text in TEXTS.items():
        markdown = markdown.replace(marker, text)
    return markdown
