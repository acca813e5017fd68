"""One HTML file with tables and figures, such as those of a study, and an explorer of what its queries attend to.

Style, script, images and weights lie inside the file, and its content policy forbids everything else. Text is escaped.
Tables and figures are not: they must be safe already.
"""

import html
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from cxda_jax.disk import files
from cxda_jax.errors import UserError
from cxda_jax.pages.document import as_base64, document, in_script, part

LIMIT = 5 * 2**20  # bytes of a report
THUMBNAIL = 48  # pixels of the longer side
COLUMNS = 16  # of a sprite sheet
LOSSLESS = 3 * 2**19  # bytes of a sheet as PNG; photographs in a larger one would leave no room for the rest
EXPLORER = """
<p>Each query image weighs the unlabelled images of its task's support set, which come from several domains, and adapts
its own features by those with much weight. Choose a task and a query (click, arrow keys, Home, End): the support images
are ranked by weight as a multiple of uniform attention, so that 2.00 x is twice the average image's weight, and a star
marks the query's own domain, which the network is not told.</p>
"""


class ExplorerTask(NamedTuple):
    """A task: n support images, m query images of one domain, and attention
    weights that sum to 1 over the support images.

    Images are uint8 [n or m, h, w, c] with 1 or 3 channels. Answers are as each method names the queries' labels.
    Domains and labels are empty where nobody knows them. A user's own images have the names of their files instead.
    """

    name: str
    support: np.ndarray
    support_domains: tuple[str, ...]
    support_labels: tuple[str, ...]
    query: np.ndarray
    query_domain: str
    query_labels: tuple[str, ...]
    answers: Mapping[str, tuple[str, ...]]
    weights: np.ndarray  # [m, heads, n]
    support_files: tuple[str, ...] = ()
    query_files: tuple[str, ...] = ()


class Section(NamedTuple):
    """A section of a page: its id, its title, and its parts. A part is safe HTML, after a link to it or nothing."""

    name: str
    title: str
    parts: Sequence[tuple[str, str]]


class Page(NamedTuple):
    """The content of an HTML file. Tasks are those of the explorer, as `encode` gives them.

    Tables are safe HTML: <table class="sortable"> followed by <p class="notes">.
    """

    title: str
    summary: Sequence[tuple[str, str]]
    faults: Sequence[str]
    sections: Sequence[Section]
    tasks: Sequence[str] = ()
    figures: Sequence[tuple[str, str]] = ()  # parts of a section of their own
    explained: str = EXPLORER  # safe HTML above the explorer
    sheet: str = ""  # address of the sheet whose images the sections show


def write_page(path: Path, page: Page) -> int:
    """Writes the page and returns its size in bytes.

    Where it would pass 5 MB, tasks are left out from the end, then figures, and it says so.
    """
    shown, whole = page, {"tasks": page.tasks, "figures": page.figures}
    kept: dict[str, Any] = {name: list(parts) for name, parts in whole.items()}
    while len(data := render(shown).encode(errors="backslashreplace")) > LIMIT:
        if not (parts := kept["tasks"] or kept["figures"]):
            size = f"{len(data) / 2**20:.1f} MB without any task or figure, 5 MB at most"
            raise UserError(f"{path}: {size}; report fewer results")
        parts.pop()
        faults = [
            f"{len(parts) - len(kept[name])} of {len(parts)} {name} left out: the file may have 5 MB at most"
            for name, parts in whole.items()
            if len(kept[name]) < len(parts)
        ]
        shown = page._replace(faults=[*page.faults, *faults], **kept)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_bytes(path, data)
    return len(data)


def render(page: Page) -> str:
    """The text of the HTML file, however large."""
    style = part("report.css")
    if page.sheet:  # a rule, since a browser reads a variable's address anew for each image
        style += f".picture {{ background-image: url({page.sheet}); }}"
    summary = "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in page.summary)
    explorer = f'{page.explained}<div id="explorer" hidden></div>\n'
    body = links = ""
    for name, title, parts in (
        Section("summary", "Summary", [("", f"<dl>{summary}</dl>")] * bool(summary)),
        Section("faults", "Faults and omissions", [("", f"<p>{html.escape(fault)}</p>") for fault in page.faults]),
        *page.sections,
        Section("figures", "Figures", page.figures),
        Section("attention", "Attention explorer", [("", explorer)] * bool(page.tasks)),
    ):
        content, entries = "".join(part for _, part in parts), "".join(link for link, _ in parts)
        if parts:
            body += f'<section id="{name}"><h2>{title}</h2>\n{content}</section>\n'
            links += f'<li><a href="#{name}">{title}</a>{f"<ol>{entries}</ol>" if entries else ""}</li>'
    unseen = " and the attention explorer stays empty" * bool(page.tasks)
    content = f"""<a class="skip" href="#main">Skip to the content</a>
<header><h1>{html.escape(page.title)}</h1></header>
<nav aria-label="Sections"><ol>{links}</ol></nav>
<main id="main" tabindex="-1">
<noscript><p>Without JavaScript, tables cannot be sorted{unseen}.</p></noscript>
{body}</main>"""
    data = f'<script type="application/json" id="attended">[{",".join(page.tasks)}]</script>'
    return document(page.title, content, style, part("report.js"), data)


def table_part(number: int, table: str) -> tuple[str, str]:
    """A link to a table, and the table in a box that scrolls sideways."""
    caption = re.search(r"<caption\b[^>]*>(.*?)</caption>", table, re.S)
    words = re.sub(r"<[^>]*>", "", caption[1]) if caption else f"Table {number}"
    opening = f'<div class="scroll" role="region" tabindex="0" aria-label="Table {number}">'
    table = re.sub(r"<table\b.*?</table>", lambda m: f"{opening}{m[0]}</div>", table, flags=re.S)
    link = f'<li><a href="#table-{number}">{words}</a></li>'
    return link, f'<div class="table" id="table-{number}">{table}</div>\n'


def figure_part(number: int, title: str, caption: str, svg: str) -> tuple[str, str]:
    """A link to a figure, and the figure: safe SVG whose ids no other figure has."""
    name, title = f"figure-{number}", html.escape(title)
    plate = f'<div class="plate" role="img" tabindex="0" aria-label="{title}">{svg}</div>'
    shown = f"<h3>{title}</h3>{plate}<figcaption>{html.escape(caption)}</figcaption>"
    return f'<li><a href="#{name}">{title}</a></li>', f'<figure id="{name}">{shown}</figure>\n'


def encode(task: ExplorerTask, shared: Mapping[str, Any] | None = None) -> str:
    """A task as JSON that is safe inside a <script> element. Weights are little-endian uint16: weight = number * scale.

    `shared` is the page's own sheet, where that begins with the support images and the queries.
    """
    own, weights = task.query_domain, np.asarray(task.weights, np.float64)
    # the script takes the first for the query's own
    domains = [own, *sorted(set(task.support_domains) - {own})] if task.support_domains else []
    scale = max(float(weights.max()), 1e-9) / 65535
    numbers = np.rint(weights / scale).astype("<u2")
    values: dict[str, Any] = {
        "name": task.name,
        "domains": domains,
        "support": {
            "count": len(task.support),
            "domains": [domains.index(d) for d in task.support_domains],
            "labels": task.support_labels,
            "files": task.support_files,
        },
        "query": {
            "count": len(task.query),
            "labels": task.query_labels,
            "answers": list(task.answers.items()),
            "files": task.query_files,
        },
        "sheet": {**shared, "data": ""} if shared else sheet(np.concatenate([task.support, task.query])),
        "weights": {"heads": weights.shape[1], "scale": scale, "data": as_base64(numbers.tobytes())},
    }
    return in_script(values)


def sheet(images: np.ndarray) -> dict[str, Any]:
    """Images [n, h, w, c] as one picture, row by row, in borders of their edge pixels:
    browsers mix neighbours in scaling."""
    height, width = images.shape[1:3]
    ratio = min(1.0, THUMBNAIL / max(height, width))
    size = max(1, round(width * ratio)), max(1, round(height * ratio))
    flat = images.squeeze(-1) if images.shape[-1] == 1 else images
    shown = np.stack([np.asarray(Image.fromarray(image).resize(size, Image.Resampling.LANCZOS)) for image in flat])
    tiles = np.pad(shown, [(0, 0), (1, 1), (1, 1), (0, 0)][: flat.ndim], mode="edge")
    tiles = np.pad(tiles, [(0, -len(tiles) % COLUMNS), (0, 0), (0, 0), (0, 0)][: flat.ndim])
    rows, file = [np.hstack(list(tiles[i : i + COLUMNS])) for i in range(0, len(tiles), COLUMNS)], io.BytesIO()
    whole, kind = Image.fromarray(np.vstack(rows)), "png"
    whole.save(file, kind, optimize=True)
    if len(file.getvalue()) > LOSSLESS:
        file, kind = io.BytesIO(), "jpeg"
        whole.save(file, kind, quality=85, subsampling=0)
    data = f"data:image/{kind};base64,{as_base64(file.getvalue())}"
    return {"data": data, "width": size[0], "height": size[1], "columns": COLUMNS, "tiny": ratio == 1}
