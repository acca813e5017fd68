"""Names of classes and domains, which may be any text, as matplotlib can draw them."""

import textwrap

from matplotlib.font_manager import FontProperties, findfont, get_font

from cxda_jax.types import brief, printable


def plain(text: str, most: int = 60, lines: int = 1) -> str:
    """The text as one to draw: no mathematics, and escapes for what cannot be shown or is not in the font.

    Of a long one the middle is left out; with several `lines` it is broken into so many, of `most` characters each.
    """
    font = get_font(findfont(FontProperties()))
    shown = "".join(c if font.get_char_index(ord(c)) else ascii(c)[1:-1] for c in printable(text))
    if not shown.strip():
        shown = repr(shown)  # or nothing would be seen
    parts = textwrap.wrap(shown, most, max_lines=lines, placeholder="...") if lines > 1 else [brief(shown, most)]
    return "\n".join(parts).replace("$", r"\$")  # which matplotlib draws as $; alone, two of them begin a formula
