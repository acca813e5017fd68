"""Text for figures. Names of classes and domains may hold any characters."""

import textwrap

from matplotlib.font_manager import FontProperties, findfont, get_font

from cxda_jax.errors import brief, printable


def plain(text: str, most: int = 60, lines: int = 1) -> str:
    """The text as matplotlib can draw it, with escapes for characters that the font lacks or that cannot be shown.

    A text of more than `most` characters loses its middle, or is broken into `lines`, if there may be several.
    """
    font = get_font(findfont(FontProperties()))
    shown = "".join(c if font.get_char_index(ord(c)) else ascii(c)[1:-1] for c in printable(text))
    if not shown.strip():
        shown = repr(shown)  # quotes can be seen
    parts = textwrap.wrap(shown, most, max_lines=lines, placeholder="...") if lines > 1 else [brief(shown, most)]
    return "\n".join(parts).replace(
        "$", r"\$"
    )  # matplotlib takes what lies between two $ for a formula, but draws \$ as $
