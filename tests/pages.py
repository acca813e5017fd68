"""What tests of HTML pages share: hostile names, the elements of a page, and what is embedded in it."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

from cxda_jax.device.model import Model
from cxda_jax.disk import safetensors
from cxda_jax.export import web
from cxda_jax.pages.page import write_page

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&<!--"


class Elements(HTMLParser):
    """All elements of a page as (tag, attributes)."""

    def __init__(self, page: str):
        super().__init__()
        self.elements, self.text = [], ""
        self.feed(page)
        self.close()
        self.tags = [tag for tag, _ in self.elements]

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def written(path, page, write=write_page) -> str:
    assert write(path, page) == path.stat().st_size <= 5 * 2**20
    return path.read_text()


def embedded(page: str) -> list[dict]:
    return json.loads(re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.S)[0])


def render(model: Model, folder: Path) -> Path:
    """The page of a model, as if somebody had compared it."""
    page = folder / "index.html"
    page.write_text(web.render(web.describe(model), safetensors.named(model.variables)))
    return page
