"""Pictures and lines that name classes and domains: any name is shown as the text that it is."""

import os
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from cxda_jax.data.store import open_store
from cxda_jax.studies.examples import Example, draw_attention
from cxda_jax.studies.names import plain
from cxda_jax.studies.sheet import draw_strips
from tests.commands import command

COUNTS = {"compared": 480, "corrected": 61, "spoiled": 12}
DOMAINS = ("$x_{", b"caf\xe9", "日本", "\U0001fae0 face", "a\x1b[31m\n\tb", "long" * 60, " ", "$a$ & <b>")
CLASSES = ("$\\frac$", "_{", b"na\xefve", "猫")


def test_a_data_set_with_any_names_is_prepared_and_drawn(tmp_path):
    root = tmp_path / os.fsdecode(b"caf\xe9")
    for d, domain in enumerate([*DOMAINS, b"left $\xff out"]):
        for label, name in enumerate(CLASSES):
            folder = os.path.join(os.fsencode(root), b"raw", os.fsencode(domain), os.fsencode(name))
            os.makedirs(folder)
            for i in range(2 if d < len(DOMAINS) else 1):
                Image.new("L", (8, 8), 20 * d + 50 * label).save(os.path.join(os.fsdecode(folder), f"{i}.png"))
    arguments = (f"--raw_dir={root}/raw", f"--data_dir={root}/data", "--size=8", "--min_images=8", "--name=names")
    printed, store = command("prepare", "--benchmark=folder", *arguments), open_store(root / "data" / "names")
    domains, classes = store.domain_names, store.info.class_names
    assert set(domains) == set(map(os.fsdecode, DOMAINS)) and set(classes) == set(map(os.fsdecode, CLASSES))
    assert "left $\\udcff out: left out, 4 images are fewer than 8" in printed and f"sha256 {store.sha256}" in printed
    names = [classes[label] for label in store.labels[:8]]
    draw_strips(tmp_path / "step1.png", [(f"query, {domain}", store.images[:8], names) for domain in domains])
    weights, of = np.full(len(store.labels), 1 / len(store.labels)), store.row_domains()
    for own in range(len(classes)):
        example = Example(store.images[own], own, own, 0, 3, store.images[:1], of[:1], weights[:1])
        draw_attention(tmp_path / f"{own}.png", example, COUNTS, domains, classes, f"on {name}")
    pictures = [root / "data" / "names" / "sheet.png", *tmp_path.glob("*.png")]
    assert len(pictures) == 6 and all(path.stat().st_size > 1000 for path in pictures)


def test_plain_text_is_no_formula_in_any_of_its_lines():
    for name, shown in {
        "$x_{": "\\$x_{", "5% \\$": "5% \\\\$", "": "''", " ": "' '", "日本": "\\u65e5\\u672c", "naïve": "naïve",
        "caf\udce9": "caf\\udce9", "a\n\x1b[2Jb": "a\\n\\x1b[2Jb", "x" * 99: "x" * 40 + "..." + "x" * 17,
    }.items():  # fmt: skip
        assert plain(name) == shown
        figure = Figure()
        text = figure.text(0.5, 0.5, plain(name))
        figure.draw_without_rendering()
        assert not text._preprocess_math(text.get_text())[1]


@pytest.mark.parametrize("before, after, verdict, support", [(0, 1, "Corrected", 100), (1, 3, "Spoiled", 3)])
def test_the_picture_shows_both_answers_and_what_is_attended_to(monkeypatch, before, after, verdict, support):
    """Of a query of class b and domain 2."""
    rng, figures = np.random.default_rng(0), []
    pixels = rng.integers(0, 256, (support + 1, 8, 8, 1), np.uint8)
    weights = rng.dirichlet(np.ones(support))
    example = Example(pixels[0], 2, 1, before, after, pixels[1:], np.arange(support) % 5, weights)
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    draw_attention(Path("x.png"), example, COUNTS, [f"writer {i}" for i in range(9)], tuple("abcd"), "cxda on glyphs")
    (figure,) = figures
    count, order = min(5, support), np.argsort(-weights)
    _, first, mark, _, second, other = [text.get_text() for text in figure.axes[count + 1].texts]
    assert (first, second) == (f"'{'abcd'[before]}'", f"'{'abcd'[after]}'")
    assert [mark[2:], other[2:]] == ["right" if answer == 1 else "wrong" for answer in (before, after)]
    assert "'b'" in figure.axes[0].get_title() and figure.get_suptitle().startswith(verdict)
    assert "corrected 61 and spoiled 12" in figure.get_supxlabel()
    for row, chosen in enumerate((order[:count], order[::-1][:count])):
        start = row * (count + 1) + 1
        for axes, i in zip(figure.axes[start : start + count], chosen, strict=True):
            assert np.array_equal(axes.get_images()[0].get_array(), example.support[i, ..., 0])
            assert axes.get_title() == f"{support * weights[i]:.2f} x uniform"
            assert axes.get_xlabel() == f"{'* ' if i % 5 == 2 else ''}writer {i % 5}"
