"""An HTML file that needs nothing from elsewhere.

Style, script and images lie inside it, and its content policy forbids everything else. All pages of this package share
the style and the script of shared.css and shared.js.
"""

import base64
import hashlib
import html
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def part(name: str) -> str:
    """The text of a file of this room, such as shared.css."""
    return (FOLDER / name).read_text(encoding="utf-8")


def document(title: str, body: str, style: str = "", script: str = "", data: str = "") -> str:
    """The text of an HTML file.

    Args:
      title: text, which is escaped here.
      body: safe HTML.
      style: CSS after that of all pages.
      script: JavaScript after that of all pages; none of both is there where it is empty.
      data: safe HTML between the body and the script.
    """
    whole = part("shared.js") + script if script else ""
    policy = f"'sha256-{as_base64(hashlib.sha256(whole.encode()).digest())}'" if script else "'none'"
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="default-src 'none';
base-uri 'none'; form-action 'none'; script-src {policy}; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<title>{html.escape(title)}</title><style>{part("shared.css")}{style}</style></head><body>
{body}
{data}{f"<script>{whole}</script>" if script else ""}</body></html>
"""


def in_script(value: Any) -> str:
    """JSON that is safe inside a <script> element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def as_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
