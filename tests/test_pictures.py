"""Pictures and lines that name classes and domains: any name is shown as the text that it is."""

import os
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from cxda_jax.config import read
from cxda_jax.data.store import open_store
from cxda_jax.errors import printable
from cxda_jax.pictures.attention import Answers, Example, draw_attention
from cxda_jax.pictures.names import plain
from cxda_jax.pictures.sheet import draw_strips
from cxda_jax.report.attention import grid
from cxda_jax.report.making import make_report
from cxda_jax.study.results import read_results
from tests.commands import command
from tests.results import make_result, write_result
from tests.test_plots import check_readable
from tests.test_report import embedded

pytestmark = pytest.mark.gate
RIGHT, WRONG = "\u2713 right", "\u2717 wrong"
COUNTS = {"compared": 480, "corrected": 61, "spoiled": 12}
DOMAINS = ("$x_{", b"caf\xe9", "日本", "\U0001fae0 face", "a\x1b[31m\n\tb", "long" * 60, " ", "$a$ & <b>")
CLASSES = ("$\\frac$", "_{", b"na\xefve", "猫")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A data set whose folders have such names, as launch.prepare makes it; what it printed, and where it lies."""
    root = tmp_path_factory.mktemp("names") / os.fsdecode(b"caf\xe9")
    for d, domain in enumerate([*DOMAINS, b"left $\xff out"]):
        for label, name in enumerate(CLASSES):
            folder = os.path.join(os.fsencode(root), b"raw", os.fsencode(domain), os.fsencode(name))
            os.makedirs(folder)
            for i in range(2 if d < len(DOMAINS) else 1):
                Image.new("L", (8, 8), 20 * d + 50 * label).save(os.path.join(os.fsdecode(folder), f"{i}.png"))
    arguments = (f"--raw_dir={root}/raw", f"--data_dir={root}/data", "--size=8", "--min_images=8", "--name=names")
    text = command("prepare", "--benchmark=folder", *arguments)
    return root / "data", open_store(root / "data" / "names"), text


def test_a_data_set_with_any_names_is_prepared_and_drawn(hostile, tmp_path):
    folder, store, printed = hostile
    domains, classes = store.domain_names, store.info.class_names
    assert set(domains) == set(map(os.fsdecode, DOMAINS)) and set(classes) == set(map(os.fsdecode, CLASSES))
    assert "left $\\udcff out: left out, 4 images are fewer than 8" in printed and f"sha256 {store.sha256}" in printed
    with Image.open(folder / "names" / "sheet.png") as sheet:
        assert sheet.size[0] > 800
    names = [classes[label] for label in store.labels[:8]]
    draw_strips(tmp_path / "step1.png", [(f"query, {domain}", store.images[:8], names) for domain in domains])
    weights, of = np.full(len(store.labels), 1 / len(store.labels)), store.row_domains()
    for own in range(len(CLASSES)):
        check_readable(grid(store.images, of, weights, own, store.images[0], domains, text=f"label {classes[own]}"))
        example = Example(store.images[own], own, own, 0, 3, store.images[:1], of[:1], weights[:1])
        draw_attention(tmp_path / f"{own}.png", example, COUNTS, domains, classes, f"on {classes[own]}")
    assert len(list(tmp_path.iterdir())) == 5 and all(path.stat().st_size > 1000 for path in tmp_path.iterdir())


def test_a_report_shows_any_names(hostile, tmp_path):
    data_dir, store, _ = hostile
    config = read("folder:cxda,smoke")
    config["data"]["name"] = "names"
    rows, labels, domains = np.arange(len(store.labels))[None], store.labels[None, :4], store.row_domains()[None]
    attention = {"weights": np.random.default_rng(0).dirichlet(np.ones(rows.size), (1, 4, 2)),
                 "support_domain": domains, "query_domain": domains[:, :4]}  # fmt: skip
    result = make_result("cxda", 0, "folder", config=config, data_hash=store.sha256)
    write_result(result, tmp_path / "run", labels, labels, rows, rows[:, :4], **attention)
    results, faults = read_results([tmp_path / "run"])
    make_report(tmp_path / "report", results, faults, str(data_dir), "")
    page = (tmp_path / "report" / "report.html").read_text()
    assert page.count("<figure ") >= 3 and "attention of cxda" in page
    (task,) = embedded(page)
    assert {"caf\\udce9", "a\\x1b[31m\\n\\tb", "日本", "$x_{"} <= set(task["domains"])
    assert set(task["query"]["labels"]) <= {printable(name) for name in store.info.class_names}


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
    for name in ("$" * 100, "a$ b$ " * 20, "x" * 8 + "$" + "y" * 8 + "$"):
        found = plain(name, 9, 2)
        assert found.count("\n") <= 1 and found.count("$") == found.count("\\$")


def drawn(monkeypatch, before, after, support=100):
    """A query of class b and domain 2, and its figure, which can be read."""
    rng, figures = np.random.default_rng(0), []
    pixels = rng.integers(0, 256, (support + 1, 8, 8, 1), np.uint8)
    weights = rng.dirichlet(np.ones(support))
    example = Example(pixels[0], 2, 1, before, after, pixels[1:], np.arange(support) % 5, weights)
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    draw_attention(Path("x.png"), example, COUNTS, [f"writer {i}" for i in range(9)], tuple("abcd"), "cxda on glyphs")
    check_readable(figures[0])
    return example, figures[0]


@pytest.mark.parametrize("before, after, marks, verdict, support", [
    (0, 1, (WRONG, RIGHT), "Corrected by adapting", 100), (1, 3, (RIGHT, WRONG), "Spoiled by adapting", 3),
])  # fmt: skip
def test_the_picture_shows_both_answers_and_what_is_attended_to(monkeypatch, before, after, marks, verdict, support):
    example, figure = drawn(monkeypatch, before, after, support)
    count, order = min(5, support), np.argsort(-example.weights)
    assert [text.get_text() for text in figure.axes[count + 1].texts] == [
        "answer without support images", f"'{'abcd'[before]}'", marks[0],
        f"answer with {support} of them", f"'{'abcd'[after]}'", marks[1],
    ]  # fmt: skip
    assert "'b'" in figure.axes[0].get_title()
    assert figure.get_suptitle().startswith(verdict) and figure.get_suptitle().endswith(": cxda on glyphs")
    assert "corrected 61 and spoiled 12" in figure.get_supxlabel()
    for row, chosen in enumerate((order[:count], order[::-1][:count])):
        start = row * (count + 1) + 1
        for axes, i in zip(figure.axes[start : start + count], chosen, strict=True):
            assert np.array_equal(axes.get_images()[0].get_array(), example.support[i, ..., 0])
            assert axes.get_title() == f"{support * example.weights[i]:.2f} x uniform"
            assert axes.get_xlabel() == f"{'* ' if i % 5 == 2 else ''}writer {i % 5}"


def test_counts_and_the_query_chosen():
    labels = np.array([[0, 1, 2], [3, 3, 3], [1, 1, 1]])
    before = np.array([[0, 0, 2], [3, 0, 0], [0, 0, 0]])
    after = np.array([[1, 1, 2], [0, 3, 3], [0, 0, 1]])
    answers = Answers(labels, before, after)
    assert answers.counts() == {"compared": 9, "corrected": 4, "spoiled": 2} and answers.telling() == (1, 1)
    assert {type(count) for count in answers.counts().values()} == {int}, "as JSON takes them"
    assert answers._replace(before=labels, after=labels + 1 - np.eye(3, dtype=int)).telling() == (0, 0)
    assert answers._replace(before=labels, after=np.where(np.eye(3), 9, labels)).telling() == (0, 1)
    assert answers._replace(after=labels + 1).telling() == (0, 0)
