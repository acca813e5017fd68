"""Fills the documentation's pages with what stands elsewhere, so that it cannot go stale.

A page has a marker line, such as `<!-- config table -->`, where the text comes. The
page of results has the study's HTML report beside it.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the package need not be installed

from cxda_jax.config import reading  # noqa: E402
from cxda_jax.studies.reporting import report_runs  # noqa: E402
from docs.study.tables import APART, RECORDS  # noqa: E402


def of_root(name: str) -> str:
    """A page of the repository's root, with its links as they are seen from docs/."""
    return (ROOT / name).read_text().replace("](docs/", "](").replace("](CHANGELOG.md", "](changelog.md")


TEXTS = {
    "<!-- config table -->": reading.table(),
    "<!-- contributing -->": of_root("CONTRIBUTING.md"),
    "<!-- changelog -->": of_root("CHANGELOG.md"),
    "<!-- study report -->": '<a href="report.html">The report of all parts</a> is published with these pages.',
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    for marker, text in TEXTS.items():
        markdown = markdown.replace(marker, text)
    return markdown


def on_post_build(config: Any, **_: Any) -> None:
    """Called by mkdocs when all pages are written: results get the report of the study's records, in a minute.

    `mkdocs serve` shows changes at once, so it does without the report.
    """
    if "serve" in sys.argv:
        return
    parts = {path: path.stem.rpartition("-")[0] for path in sorted(RECORDS.glob("*.records"))}
    patterns = [str(path) for path, part in parts.items() if not part.endswith(APART)]
    with tempfile.TemporaryDirectory() as folder:
        report_runs(patterns, folder, data_dir=folder, against="", unfinished=False)
        shutil.copy(Path(folder) / "report.html", Path(config["site_dir"]) / "results")
