"""How all figures look and are saved, and text in them."""

import hashlib
import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from cxda_jax.disk import files
from cxda_jax.errors import brief, printable
from cxda_jax.methods.entry import Style


def save(figure: Figure, path: Path) -> str:
    """Writes PATH.png and PATH.svg, and returns the text of the second, which `to_svg` describes."""
    png, text = io.BytesIO(), to_svg(figure)
    figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
    files.write_bytes(Path(f"{path}.png"), png.getvalue())
    files.write_bytes(Path(f"{path}.svg"), text.encode(errors="replace"))
    return text


def to_svg(figure: Figure) -> str:
    """The figure as an <svg> element, which is the same for equal figures.

    It has text as paths, no date, nothing from elsewhere, and ids that no other figure has.
    """
    svg, unknown = io.StringIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "cxda", "image.composite_image": False}):
        figure.savefig(svg, format="svg", metadata=unknown)
    text = svg.getvalue()[svg.getvalue().index("<svg") :]
    text = re.sub(r'(<image\b[^>]*?) id="[^"]*"', r"\1", text)  # equal images share it, and nothing refers to it
    mark = hashlib.sha256(text.encode()).hexdigest()[:8]
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\1f{mark}-", text)


def above_legend(styles: Mapping[str, Style], height: float = 4.5) -> Figure:
    """An empty figure above a legend of these styles. Its height grows with the legend."""
    columns = int(np.clip(85 // (min(60, max(map(len, styles))) + 10), 1, 5))
    figure = Figure(figsize=(7, height + 0.18 * ((len(styles) - 1) // columns)), layout="constrained")
    handles = [Line2D([], [], **s.arguments(lw=1.5, label=plain(name))) for name, s in styles.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8, handlelength=4)
    return figure


def finish_axes(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title("\n".join(plain(line, 80) for line in title.split("\n")), fontsize=9)
    axes.set(xlabel=x, ylabel=y, axisbelow=True)
    axes.grid(color="0.9", lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def round_ticks(axes: Axes) -> None:
    """Ticks of a logarithmic axis at 1, 2, 5, 10 and so on, which a narrow range has too."""
    axes.xaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_locator=NullLocator(), major_formatter="{x:g}")


def axis_of_sizes(axes: Axes, sizes: Sequence[int], last: int) -> None:
    """An axis of numbers of images up to the last, even in log(1 + n), so that n = 0 has a place. Sizes get ticks."""
    axes.set_xscale("function", functions=(np.log1p, np.expm1))
    width = max(1.0, float(np.log1p(last)))
    axes.set_xlim(*np.expm1([-0.05 * width, 1.05 * width]))
    axes.set_xticks(sizes)
    axes.xaxis.set(minor_locator=NullLocator(), major_formatter="{x:g}")


def plain(text: str, most: int = 60, lines: int = 1) -> str:
    """The text as matplotlib can draw it, with escapes for characters that the font lacks or that cannot be shown.

    A text of more than `most` characters loses its middle, or is broken into `lines`, if there may be several.
    """
    font = get_font(findfont(FontProperties()))
    shown = "".join(c if font.get_char_index(ord(c)) else ascii(c)[1:-1] for c in printable(text))
    if not shown.strip():
        shown = repr(shown)  # quotes can be seen
    parts = textwrap.wrap(shown, most, max_lines=lines, placeholder="...") if lines > 1 else [brief(shown, most)]
    # matplotlib takes what lies between two $ for a formula, but draws \$ as $
    return "\n".join(parts).replace("$", r"\$")
